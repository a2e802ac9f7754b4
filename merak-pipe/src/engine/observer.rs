//! What watches a run.

use crate::Action;

/// Is told when each action of a rank begins and ends, in the order of its schedule.
///
/// Both actions of a [pair](crate::Pair) that runs at once begin before either ends. The rank waits
/// until it has been told, so what takes long here delays the pipeline.
///
/// # Examples
/// ```
/// use merak_pipe::{Action, Kind, Observer};
///
/// /// The forwards that are under way and have no backward yet.
/// #[derive(Default)]
/// struct Alive(usize);
///
/// impl Observer for Alive {
///     fn end(&mut self, action: Action) {
///         match action.kind {
///             Kind::Forward => self.0 += 1,
///             Kind::Backward | Kind::WeightGrad => self.0 -= 1,
///             _ => {}
///         }
///     }
/// }
///
/// let mut alive = Alive::default();
/// alive.end("0F0".parse()?);
/// assert_eq!(alive.0, 1);
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub trait Observer {
    /// An action begins: its message has come.
    fn begin(&mut self, action: Action) {
        let _ = action;
    }

    /// An action has ended, or has failed. What it computed is not yet sent.
    fn end(&mut self, action: Action) {
        let _ = action;
    }
}

/// Watches nothing.
impl Observer for () {}
