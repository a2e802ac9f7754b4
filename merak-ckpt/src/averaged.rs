//! Averages of weights in the place of the weights.

use crate::error::foreign;
use crate::{Checkpoint, Kind, Result};

/// What merak-zero calls averages of weights among the state of an optimizer.
const EMA: &str = "ema";

impl Checkpoint {
    /// The parameters alone, with the averages that a run kept of those that it trained as their
    /// values.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) where there are no averages, and as for
    /// [`Checkpoint::open`] where the header of a file is not what the manifest says.
    pub fn averaged(&self) -> Result<Self> {
        let (manifest, average) = (self.manifest(), Kind::optimizer(EMA));
        if manifest.tensors_of(&average).next().is_none() {
            let reason = "it has no averages of its weights: its run kept none";
            return Err(foreign(self.path(), reason));
        }
        let parameters = manifest.tensors_of(&Kind::Parameter);
        let positions = parameters.filter_map(|tensor| {
            let of_kind = |kind| manifest.tensor_index(kind, &tensor.name);
            let position = of_kind(&average).or_else(|| of_kind(&Kind::Parameter))?;
            Some((position, tensor.name.clone()))
        });
        self.as_parameters(positions.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Header, Layout, Piece, ShardKind, Store};

    #[test]
    fn averages_take_the_place_of_the_weights_that_have_them() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::in_output_dir(folder.path());
        let (own, average, layout) = (Kind::Parameter, Kind::optimizer(EMA), Layout::whole(&[2]));
        let piece = |kind, name| Piece {
            kind,
            ..Piece::parameter(name, DType::U8, &layout)
        };
        let weights = [
            (piece(&own, "frozen"), &[1_u8; 2][..]),
            (piece(&own, "trained"), &[2_u8; 2][..]),
        ];
        let averages = [(piece(&average, "trained"), &[3_u8; 2][..])];
        let save = |step, averages: &[(Piece<'_>, &[u8])]| {
            let draft = store.begin(step).unwrap();
            let model = draft.write_shard(ShardKind::Model, 0, &weights).unwrap();
            let state = draft.write_shard(ShardKind::Optimizer, 0, averages);
            let path = draft.commit(vec![model, state.unwrap()], Header::default(), &[]);
            Checkpoint::open(path.unwrap()).unwrap()
        };
        let saved = save(1, &averages).averaged().unwrap();
        assert_eq!(saved.manifest().kinds(), [&Kind::Parameter]);
        let found = ["frozen", "trained"].map(|name| saved.read_whole(&own, name).unwrap());
        assert_eq!(found, [[1; 2], [3; 2]]);
        let without = save(2, &[]).averaged().unwrap_err().to_string();
        assert!(without.contains("no averages of its weights"), "{without}");
    }
}
