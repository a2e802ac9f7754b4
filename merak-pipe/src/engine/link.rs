//! What carries payloads between ranks.

use super::Interrupter;
use crate::{Result, Tag};

/// One rank's connection to the other ranks of its pipeline.
///
/// Messages with one tag between two ranks arrive in the order in which they were sent, step after
/// step. A wait ends with an error when a rank failed or a deadline passed, and never lasts for
/// ever. With the feature `testing`, `testing::check_links` checks that a link keeps these
/// promises.
pub trait Link<P> {
    /// Hands a message over without waiting for its receiver.
    ///
    /// # Errors
    /// When a rank failed or the link is broken.
    fn send(&mut self, to: usize, tag: Tag, payload: P) -> Result<()>;

    /// Waits for a message.
    ///
    /// # Errors
    /// When a rank failed, the sender is gone, or the deadline passed.
    fn recv(&mut self, from: usize, tag: Tag) -> Result<P>;

    /// Announces a receive, which will follow later. Links that need no announcement ignore it.
    ///
    /// # Errors
    /// When a rank failed or the link is broken.
    fn post(&mut self, from: usize, tag: Tag) -> Result<()> {
        let _ = (from, tag);
        Ok(())
    }

    /// Waits until this rank may compute, before each action. Links whose ranks each have a core
    /// have no queue.
    ///
    /// # Errors
    /// When a rank failed or the deadline passed.
    fn begin(&mut self) -> Result<()> {
        Ok(())
    }

    /// Lets another rank compute, after each action that [`Link::begin`] came before.
    fn end(&mut self) {}

    /// Waits until everything that was sent is on its way, at the end of a step.
    ///
    /// A link may still read payloads then, and between threads the receiver has their memory: a
    /// stage never changes a tensor in place that it has sent.
    ///
    /// # Errors
    /// When a rank failed or the link is broken.
    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    /// Makes each pending and later wait of all ranks fail with this rank and the reason.
    fn abort(&mut self, reason: &str);

    /// A function that does what [`Link::abort`] does, from any thread and while this rank waits,
    /// so that a [`Cancel`](crate::Cancel) ends a run at once. Over a link without one, a run that
    /// is cancelled ends when its wait does.
    fn interrupter(&self) -> Option<Interrupter> {
        None
    }
}
