//! What a rank writes of a checkpoint: which pieces of which tensors, and where their values are.

use super::MerakTrainer;
use crate::{error::Result, stage::ParamMemory};
use merak_ckpt::{
    Checkpoint, Cut, DType, Draft, Kind, Layout, Look, OwnedPiece, Part, PendingShard, Piece,
    Region, Shard, ShardKind, Staging,
};
use merak_trace::{Axis, Param};
use merak_zero::OwnedState;

/// Elements that are compared at once.
const BLOCK_ELEMENTS: usize = 1 << 18;

/// A file of a checkpoint that is to be written. Another thread may read it: its values do not
/// change meanwhile.
#[derive(Debug)]
pub(super) struct ShardSource {
    kind: ShardKind,
    rank: usize,
    pieces: Vec<OwnedPiece>,
    values: Values,
}

/// Where the values of pieces are.
#[derive(Debug)]
enum Values {
    /// The pieces of parameters with these numbers; updates wait while they are shown.
    Parameters {
        memory: ParamMemory,
        numbers: Vec<usize>,
    },
    /// The slices with these numbers of a snapshot.
    State {
        state: OwnedState,
        slices: Vec<usize>,
    },
}

/// Memory for the copies of a rank's files, from save to save.
#[derive(Debug, Clone, Default)]
pub(super) struct StagingMemory {
    parameters: Staging,
    state: Staging,
}

impl ShardSource {
    /// Writes the file.
    pub(super) fn write(self, draft: &Draft) -> merak_ckpt::Result<Shard> {
        let mut outcome = Ok(Shard::default());
        self.show(&mut |pieces| outcome = draft.write_shard(self.kind, self.rank, pieces));
        outcome
    }

    /// Starts a thread that writes the file.
    pub(super) fn write_later(
        self,
        draft: &Draft,
        staging: &StagingMemory,
    ) -> merak_ckpt::Result<PendingShard> {
        let staging = match self.kind {
            ShardKind::Model => &staging.parameters,
            ShardKind::Optimizer => &staging.state,
        };
        draft.write_shard_later(self.kind, self.rank, staging, move |look| self.show(look))
    }

    /// Whether a checkpoint holds these values, in these types.
    pub(super) fn is_in(&self, checkpoint: &Checkpoint) -> bool {
        let mut is_in = true;
        self.show(&mut |pieces| {
            is_in = pieces
                .iter()
                .all(|(piece, bytes)| holds(checkpoint, piece, bytes));
        });
        is_in
    }

    fn show(&self, look: &mut Look<'_>) {
        let show = |values: &[&[u8]], places: &[usize], look: &mut Look<'_>| {
            let pieces = self.pieces.iter().zip(places);
            let pieces: Vec<_> = pieces
                .map(|(piece, &place)| (piece.piece(), values[place]))
                .collect();
            look(&pieces);
        };
        match &self.values {
            Values::Parameters { memory, numbers } => {
                memory.read(&mut |all| show(all, numbers, look));
            }
            Values::State { state, slices } => {
                let all: Vec<_> = state
                    .slices()
                    .map(|slice| bytemuck::cast_slice::<f32, u8>(slice.values))
                    .collect();
                show(&all, slices, look);
            }
        }
    }
}

/// Whether a checkpoint holds a piece with these bytes; they are read a block at a time.
fn holds(checkpoint: &Checkpoint, piece: &Piece<'_>, bytes: &[u8]) -> bool {
    let width = piece.dtype.size_bytes();
    let mut begin = piece.flat_range().start;
    bytes.chunks(BLOCK_ELEMENTS * width).all(|bytes| {
        let end = begin + bytes.len() / width;
        let block = Piece {
            range: Some(begin..end),
            ..piece.clone()
        };
        begin = end;
        // Padding is not stored, so it must compare as equal.
        let mut stored = bytes.to_vec();
        checkpoint.read(&block, &mut stored).is_ok() && stored == bytes
    })
}

/// How the state of a parameter lies that is laid out so.
pub(super) fn state_layout(param: &Layout, without: Option<usize>) -> Result<Layout> {
    Ok(match without {
        None => param.clone(),
        Some(dim) => param.without_dim(dim)?,
    })
}

impl MerakTrainer {
    /// The files that this rank writes of a checkpoint of the run as it stands. With a base, they
    /// leave out what lies in it.
    pub(super) fn shard_sources(&self, is_on_base: bool) -> Result<Vec<ShardSource>> {
        let layouts = self.noted_layouts()?;
        let is_saved = |param: &Param| param.trainable || !is_on_base;
        let mut sources = vec![self.parameters_source(&layouts, is_saved)];
        // Undivided state is the same on all replicas; of divided state every replica writes its
        // own.
        let kept = self
            .stages
            .optimizer
            .config()
            .element_bytes(self.args.replicas());
        let divided = kept.state.ranks > 1;
        if !self.args.no_save_optim && (divided || self.is_first_replica()) {
            sources.push(self.state_source(&layouts)?);
        }
        Ok(sources)
    }

    /// The parameters that this rank owns and that are not trained.
    pub(super) fn frozen_source(&self) -> Result<ShardSource> {
        let is_frozen = |param: &Param| !param.trainable;
        Ok(self.parameters_source(&self.noted_layouts()?, is_frozen))
    }

    /// How each parameter lies in the whole, with the cuts that resharding needs, also with one
    /// tensor-parallel rank.
    fn noted_layouts(&self) -> Result<Vec<Layout>> {
        let cuts = self.stages.plan.param_cuts()?;
        let noted = |param: &Param| {
            let layout = self.layout(param)?;
            Ok(match cuts.get(&param.name) {
                Some(shard) => layout.with_cut(Cut::new(shard.dim, shard.parts.clone()))?,
                None => layout,
            })
        };
        self.stages.table.iter().map(noted).collect()
    }

    /// How this rank's slice of a parameter lies in the whole.
    pub(super) fn layout(&self, param: &Param) -> Result<Layout> {
        let place = self.stages.mpu.coord();
        let boxes = param.placements.local_boxes(&param.full, place).into_iter();
        let parts = boxes.map(|piece| Part {
            region: Region {
                offset: piece.offset,
                size: piece.size,
            },
            local_offset: piece.local,
        });
        let (full, local) = (&param.full.shape, &param.local.shape);
        Ok(Layout::new(full, local, parts.collect())?)
    }

    fn is_first_replica(&self) -> bool {
        self.stages.mpu.data_sequence_parallel_rank() == 0
    }

    fn parameters_source(
        &self,
        layouts: &[Layout],
        is_saved: impl Fn(&Param) -> bool,
    ) -> ShardSource {
        let (table, memory) = (&self.stages.table, self.stages.params.memory());
        let (mut pieces, mut numbers) = (Vec::new(), Vec::new());
        for (number, (index, local)) in memory.pieces().into_iter().enumerate() {
            // What is undivided is the same on all replicas.
            let is_divided = self.stages.params.is_divided(index);
            let writes = self.is_first_replica() || is_divided;
            if writes && self.stages.owned[index] && is_saved(&table[index]) {
                numbers.push(number);
                pieces.push(OwnedPiece {
                    kind: Kind::Parameter,
                    name: table[index].name.clone(),
                    dtype: self.stages.stored(index),
                    layout: layouts[index].clone(),
                    range: is_divided.then_some(local),
                });
            }
        }
        ShardSource {
            kind: ShardKind::Model,
            rank: self.stages.mpu.rank().0,
            pieces,
            values: Values::Parameters { memory, numbers },
        }
    }

    fn state_source(&self, layouts: &[Layout]) -> Result<ShardSource> {
        let (table, trained) = (&self.stages.table, self.stages.trained());
        let state = self.stages.optimizer.state().into_owned();
        let (mut pieces, mut slices) = (Vec::new(), Vec::new());
        for (number, slice) in state.slices().enumerate() {
            let index = trained[slice.param];
            if self.writes_state(&table[index], slice.without) && self.stages.owned[index] {
                slices.push(number);
                pieces.push(OwnedPiece {
                    kind: Kind::optimizer(slice.name),
                    name: table[index].name.clone(),
                    dtype: DType::F32,
                    layout: state_layout(&layouts[index], slice.without)?,
                    range: Some(slice.local),
                });
            }
        }
        Ok(ShardSource {
            kind: ShardKind::Optimizer,
            rank: self.stages.mpu.rank().0,
            pieces,
            values: Values::State { state, slices },
        })
    }

    /// Whether this rank writes what is kept for a parameter that it owns: where the parameter is
    /// cut along the dimension that its state lacks, every tensor rank has the same state.
    fn writes_state(&self, param: &Param, without: Option<usize>) -> bool {
        let shard = param.placements.on(Axis::Tensor).as_shard();
        let is_shared = shard.is_some_and(|shard| Some(shard.dim) == without);
        !is_shared || self.stages.mpu.tensor_parallel_rank() == 0
    }
}
