//! The optimizer of one rank.

mod average;
mod reduce;
mod step;

pub use step::UpdateReport;

use crate::{
    Block, FlatLayout, GlobalParams, LossScaler, MatrixProducts, ParamSpec, PlainProducts, Result,
    ScalerState, StepDevice, UpdateRule, ZeroConfig, ZeroGroups, copies::Copies,
    device::DeviceState, exchange::Exchange, gathering::Gatherer, layout::Extent,
    optimizer::StateKind, state::OwnedState, update_rule,
};
use merak_mpu::Group;
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The steps that an optimizer has done and skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StepCounts {
    /// Updates done: the `t` of bias corrections and of learning-rate schedules.
    pub steps: u64,
    /// Steps skipped since the beginning.
    pub skipped: u64,
    /// Steps skipped since the last update.
    pub skipped_in_a_row: u64,
    /// Those of them that no lower loss scale could save: without a [`LossScaler`] all.
    #[serde(default)]
    pub skipped_at_floor: u64,
}

/// Reduces, clips and steps the flat parameters of one rank.
///
/// The caller owns two flat f32 buffers, parameters and gradients, laid out by
/// [`ZeroOptimizer::layout`]; the optimizer owns its state, for the blocks that this rank owns
/// alone: all of them in stage 0, one part of each bucket from stage 1 on. Every rank of the model
/// builds one and steps it at the same time.
///
/// Where gradients [are divided](ZeroOptimizer::divides_gradients), from stage 2 on with several
/// replicas, their buffer has the [owned](OwnedState::blocks) elements alone, in flat order, and
/// starts from zero in each step; [`ZeroOptimizer::add_bucket`] adds to it. In stage 3, or from
/// stage 1 on if they are [masters](ZeroConfig::has_masters), the buffer of parameters has these
/// elements alone too, and [`ZeroOptimizer::gatherer`] gathers the others.
#[derive(Debug)]
pub struct ZeroOptimizer {
    layout: FlatLayout,
    model: GlobalParams,
    config: ZeroConfig,
    model_group: Group,
    /// The ranks that hold the pieces of the same parameters, or the summands of the same
    /// gradients.
    tensor_group: Option<Group>,
    products: Arc<dyn MatrixProducts>,
    /// The rule, if it is another program's.
    rule: Option<Arc<dyn UpdateRule>>,
    exchange: Exchange,
    state: OwnedState,
    room: Room,
    progress: StepCounts,
    scaler: Option<LossScaler>,
    /// Whether the gradients of the step in hand are averages already.
    reduced: bool,
    /// Whether the averages of weights have started.
    average_begun: bool,
}

/// Where the values of the state lie.
#[derive(Debug)]
enum Room {
    /// Host memory.
    Memory,
    /// Files of this folder, mapped into memory.
    Files(PathBuf),
    /// The memory of a device, with the flat buffers.
    Device(DeviceState),
}

impl ZeroOptimizer {
    /// Builds the optimizer of this rank, with zeroed state.
    ///
    /// `params` are this rank's trainable parameters in the order in which they shall lie, the same
    /// on all ranks of `groups.data_sequence`; `model` is the same on all ranks.
    ///
    /// # Errors
    /// When a number of `config` is out of range, or `params` and `model` do not fit together.
    pub fn new(
        params: Vec<ParamSpec>,
        model: GlobalParams,
        config: ZeroConfig,
        groups: ZeroGroups,
    ) -> Result<Self> {
        config.validate()?;
        params.iter().try_for_each(|spec| model.check(spec))?;
        let ZeroGroups {
            data_sequence,
            model: model_group,
        } = groups;
        let layout = config.layout(params, data_sequence.world_size())?;
        let exchange = Exchange::new(data_sequence, &config, &layout);
        let blocks = if exchange.is_sharded() {
            owned_blocks(&layout, exchange.group().rank())
        } else {
            layout.blocks().to_vec()
        };
        let state = OwnedState::new(blocks, &layout, &config.optimizer);
        Ok(Self {
            state: average::beside(state, &config),
            products: Arc::new(PlainProducts {
                threads: config.threads,
            }),
            scaler: config.loss_scaling.map(LossScaler::new),
            layout,
            model,
            config,
            model_group,
            tensor_group: None,
            exchange,
            rule: None,
            room: Room::Memory,
            progress: StepCounts::default(),
            reduced: false,
            average_begun: false,
        })
    }

    /// The same among the ranks that hold the pieces of its parameters ([`ParamSpec::cut`]), in the
    /// order of the pieces, and the summands of gradients ([`ParamSpec::summed`]). Rules that need
    /// whole tensors speak to them.
    #[must_use]
    pub fn in_tensor_group(mut self, group: Group) -> Self {
        self.tensor_group = Some(group).filter(|group| !group.is_single());
        self
    }

    /// The same with products of matrices by `products`, which Muon takes most of its time for.
    #[must_use]
    pub fn with_products(mut self, products: Arc<dyn MatrixProducts>) -> Self {
        self.products = products;
        self
    }

    /// The same with a rule of another program in place of that of [`ZeroConfig::optimizer`], and
    /// with zeroed state of its own in host memory. It comes before [`ZeroOptimizer::on_disk`], and
    /// before [`ZeroOptimizer::on_device`], which then changes nothing.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) when its names of state cannot be used;
    /// [`Error::LateRule`](crate::Error::LateRule) where the state is on a device or in files.
    pub fn with_rule(mut self, rule: Arc<dyn UpdateRule>) -> Result<Self> {
        update_rule::check(&*rule)?;
        if !matches!(self.room, Room::Memory) {
            return Err(crate::Error::LateRule {
                rule: rule.name().to_owned(),
            });
        }
        let names = rule.state_names();
        let kinds = |_: &ParamSpec| names.iter().map(|name| StateKind::of(name)).collect();
        let blocks = self.state.blocks().to_vec();
        let state = OwnedState::of_kinds(blocks, &self.layout, names, kinds);
        self.state = average::beside(state, &self.config);
        self.rule = Some(rule);
        Ok(self)
    }

    /// The same with zeroed state in the memory of a device, which then steps buffers that lie
    /// there.
    ///
    /// Reductions over several ranks take copies in its memory, as after
    /// [`ZeroOptimizer::reduced_on`]. A step by a rule that the device does not have goes through
    /// host memory, where its state stays.
    ///
    /// # Errors
    /// [`Error::TwoPlaces`](crate::Error::TwoPlaces) after [`ZeroOptimizer::on_disk`]; when the
    /// memory of the device does not suffice.
    pub fn on_device(mut self, device: Arc<dyn StepDevice>) -> Result<Self> {
        self = self.reduced_on(Arc::clone(&device));
        if self.rule.is_some() || !device.has(self.config.optimizer.optim) {
            return Ok(self);
        }
        if matches!(self.room, Room::Files(_)) {
            return Err(crate::Error::TwoPlaces);
        }
        let extents = [self.exchange.params(), self.exchange.grads()];
        let state = DeviceState::new(device, &self.layout, &self.state, extents)?;
        self.room = Room::Device(state);
        self.state = self.state.without_values();
        Ok(self)
    }

    /// The same with collectives over copies in the memory of a device of the buffers that lie
    /// there, so that an engine for devices moves them without the host.
    #[must_use]
    pub fn reduced_on(mut self, device: Arc<dyn StepDevice>) -> Self {
        self.exchange.set_copies(Copies::on(device));
        self
    }

    /// The same with its state in files of a folder that are mapped into memory, as
    /// [`MappedFloats`](crate::MappedFloats) are. Steps have the same bits.
    ///
    /// # Errors
    /// [`Error::TwoPlaces`](crate::Error::TwoPlaces) where the state is on a device;
    /// [`Error::StateFile`](crate::Error::StateFile) when the files cannot be had.
    pub fn on_disk(mut self, folder: &Path) -> Result<Self> {
        if matches!(self.room, Room::Device(_)) {
            return Err(crate::Error::TwoPlaces);
        }
        self.room = Room::Files(folder.to_owned());
        self.keep_in_files()?;
        Ok(self)
    }

    /// Brings what was moved into memory, or is shared with a snapshot, into files again.
    fn keep_in_files(&mut self) -> Result<()> {
        match &self.room {
            Room::Files(folder) => self.state.keep_in_files(folder),
            Room::Memory | Room::Device(_) => Ok(()),
        }
    }

    /// The place of each parameter in the flat buffers.
    pub fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    /// Whether each rank keeps gradients for what it owns alone.
    pub fn divides_gradients(&self) -> bool {
        self.exchange.grads() == Extent::Owned
    }

    /// Whether each rank keeps the parameters that it owns alone.
    pub fn divides_params(&self) -> bool {
        self.exchange.params() == Extent::Owned
    }

    /// The elements of the buffer of gradients.
    pub fn num_gradients(&self) -> usize {
        self.elements(self.exchange.grads())
    }

    /// The elements of the buffer of parameters.
    pub fn num_params(&self) -> usize {
        self.elements(self.exchange.params())
    }

    fn elements(&self, extent: Extent) -> usize {
        match extent {
            Extent::All => self.layout.len(),
            Extent::Owned => self.state.num_owned(),
        }
    }

    /// Gathers buckets of parameters where these are divided.
    pub fn gatherer(&self) -> Gatherer {
        self.exchange.gatherer(&self.layout)
    }

    /// The most bytes of copies of gradients on their way that this rank has had at once, of which
    /// [`ZeroConfig::exchange_bytes`] says how many there may be.
    pub fn most_summed_bytes(&self) -> usize {
        self.exchange.most_bytes()
    }

    /// The settings in use.
    pub fn config(&self) -> &ZeroConfig {
        &self.config
    }

    /// The state of the elements that this rank owns; a copy if it lies on a device. Averages of
    /// weights are zero until the optimizer has seen these, in [`ZeroOptimizer::start_average`] or
    /// in its first step.
    pub fn state(&self) -> Cow<'_, OwnedState> {
        match &self.room {
            Room::Memory | Room::Files(_) => Cow::Borrowed(&self.state),
            Room::Device(device) => Cow::Owned(self.state.with_values(device.read())),
        }
    }

    /// Changes the state of the elements that this rank owns, as from a checkpoint.
    ///
    /// # Errors
    /// [`Error::StateFile`](crate::Error::StateFile) when a further file for the state cannot be
    /// had.
    pub fn edit_state(&mut self, edit: impl FnOnce(&mut OwnedState)) -> Result<()> {
        self.keep_in_files()?;
        self.average_begun = true;
        match &mut self.room {
            Room::Memory | Room::Files(_) => edit(&mut self.state),
            Room::Device(device) => {
                let mut state = self.state.with_values(device.read());
                edit(&mut state);
                device.write(state.values());
            }
        }
        self.keep_in_files()
    }

    /// Number of updates that were done, and that were skipped.
    pub fn progress(&self) -> StepCounts {
        self.progress
    }

    /// Continues from a checkpoint.
    pub fn set_progress(&mut self, progress: StepCounts) {
        self.progress = progress;
    }

    /// The factor of the gradient of the loss in the step in hand; 1 without
    /// [`ZeroConfig::loss_scaling`].
    pub fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// The state of the loss scale, for a checkpoint; `None` without one, or if it is fixed.
    pub fn scaler_state(&self) -> Option<ScalerState> {
        self.scaler.as_ref().and_then(LossScaler::state)
    }

    /// Continues with the loss scale of a checkpoint, if this optimizer has one that changes.
    pub fn restore_scaler(&mut self, state: ScalerState) {
        if let Some(scaler) = &mut self.scaler {
            scaler.restore(state);
        }
    }
}

/// The blocks in this rank's part of each bucket.
fn owned_blocks(layout: &FlatLayout, rank: usize) -> Vec<Block> {
    let buckets = layout.buckets().iter();
    buckets
        .map(|bucket| layout.part(bucket, rank).blocks)
        .flat_map(|range| layout.blocks()[range].iter().cloned())
        .collect()
}
