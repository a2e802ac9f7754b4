//! The optimizer of one rank.

use crate::{
    Block, Error, FlatLayout, GlobalParams, GradNorm, LossScaler, MatrixProducts, NORM_BLOCK,
    OptimizerKind, ParamSpec, PlainProducts, Result, ScalerState, Step, StepDevice, UpdateRule,
    ZeroConfig, ZeroGroups,
    device::DeviceState,
    exchange::Exchange,
    flat,
    gathering::{Arrivals, Gatherer},
    layout::Extent,
    norm,
    optimizer::{OtherStep, Rule, StateKind},
    state::OwnedState,
    update, update_rule,
    whole::PieceHolders,
};
use merak_mpu::{Buffer, Group, ReduceOp};
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The progress of an optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
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

/// The outcome of a step, the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateReport {
    /// The global norm of the averaged gradients, before clipping and without the loss scale.
    pub grad_norm: f64,
    /// The factor that clipped the gradients.
    pub clip_factor: f64,
    /// The scale of the loss in this step, if there is one.
    pub loss_scale: Option<f64>,
    /// The first parameter with a non-finite gradient, if that made all ranks skip the update.
    pub skipped: Option<String>,
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
    progress: Progress,
    scaler: Option<LossScaler>,
    /// Whether the gradients of the step in hand are averages already.
    reduced: bool,
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
        Ok(Self {
            state: OwnedState::new(blocks, &layout, &config.optimizer),
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
            progress: Progress::default(),
            reduced: false,
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
    /// [`Error::OutOfRange`] when its names of state cannot be used.
    pub fn with_rule(mut self, rule: Arc<dyn UpdateRule>) -> Result<Self> {
        update_rule::check(&*rule)?;
        let names = rule.state_names();
        let kinds = |_: &ParamSpec| names.iter().map(|name| StateKind::of(name)).collect();
        let blocks = self.state.blocks().to_vec();
        self.state = OwnedState::of_kinds(blocks, &self.layout, names, kinds);
        self.rule = Some(rule);
        Ok(self)
    }

    /// The same with zeroed state in the memory of a device, which then steps buffers that lie
    /// there.
    ///
    /// Reductions over several ranks go through host memory. So does a step by a rule that the
    /// device does not have, whose state stays in host memory.
    ///
    /// # Errors
    /// When the memory of the device does not suffice.
    pub fn on_device(mut self, device: Arc<dyn StepDevice>) -> Result<Self> {
        if self.rule.is_some() || !device.has(self.config.optimizer.optim) {
            return Ok(self);
        }
        let extents = [self.exchange.params(), self.exchange.grads()];
        let state = DeviceState::new(device, &self.layout, &self.state, extents)?;
        self.room = Room::Device(state);
        self.state = self.state.without_values();
        Ok(self)
    }

    /// The same with its state in files of a folder that are mapped into memory, as
    /// [`MappedFloats`](crate::MappedFloats) are. Steps have the same bits.
    ///
    /// # Errors
    /// [`Error::StateFile`] when the files cannot be had.
    pub fn on_disk(mut self, folder: &Path) -> Result<Self> {
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

    /// The state of the elements that this rank owns; a copy if it lies on a device.
    pub fn state(&self) -> Cow<'_, OwnedState> {
        match &self.room {
            Room::Memory | Room::Files(_) => Cow::Borrowed(&self.state),
            Room::Device(device) => Cow::Owned(self.state.with_values(device.read())),
        }
    }

    /// Changes the state of the elements that this rank owns, as from a checkpoint.
    ///
    /// # Errors
    /// [`Error::StateFile`] when a further file for the state cannot be had.
    pub fn edit_state(&mut self, edit: impl FnOnce(&mut OwnedState)) -> Result<()> {
        self.keep_in_files()?;
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
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Continues from a checkpoint.
    pub fn set_progress(&mut self, progress: Progress) {
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

    /// Starts the reduction of one bucket while the backward pass works on others.
    ///
    /// The gradients of the bucket must be complete, and stay as they are until
    /// [`ZeroOptimizer::reduce_gradients`], which starts the other buckets. Every rank of the data
    /// x sequence group gives the same buckets in the same order. Four are under way at most: a
    /// further one starts with the next call that finds the oldest done. Nothing waits here, so the
    /// group is used for nothing else until [`ZeroOptimizer::reduce_gradients`].
    ///
    /// # Communication
    /// As [`ZeroOptimizer::reduce_gradients`], for one bucket.
    ///
    /// # Errors
    /// When the bucket was started before, `grads` does not fit the layout, or the group fails.
    pub fn start_bucket(&mut self, bucket: usize, grads: &mut dyn Buffer) -> Result<()> {
        flat::check("gradient", grads, self.num_gradients())?;
        self.check_bucket(bucket, |this| {
            if this.divides_gradients() {
                Some("gradients are divided: `add_bucket` takes them")
            } else if this.exchange.is_given(bucket) {
                Some("it was started before")
            } else {
                None
            }
        })?;
        if self.exchange.is_alone() {
            return Ok(());
        }
        self.exchange.give(bucket);
        self.exchange.advance(&self.layout, grads, false)
    }

    /// Starts the reduction of a bucket's gradients of one or more microbatches where gradients are
    /// divided; what this rank owns of the average is added to `kept`.
    ///
    /// The gradients are those of all elements of the bucket. Each further bucket of a step is
    /// complete in `kept` no later than with [`ZeroOptimizer::reduce_gradients`]. Every rank of the
    /// data x sequence group gives the same buckets in the same order; two are under way at most,
    /// so the caller may have to wait for the others.
    ///
    /// # Communication
    /// A reduce-scatter of 4 bytes for each element of the bucket.
    ///
    /// # Errors
    /// When gradients are not divided or reduced already, a buffer is of another length, or the
    /// group fails.
    pub fn add_bucket(
        &mut self,
        bucket: usize,
        gradients: Box<dyn Buffer>,
        kept: &mut dyn Buffer,
    ) -> Result<()> {
        flat::check("gradient", kept, self.num_gradients())?;
        self.check_bucket(bucket, |this| {
            let is_whole = !this.divides_gradients();
            is_whole.then_some("gradients are not divided: `start_bucket` takes them")
        })?;
        let expected = self.layout.buckets()[bucket].flat.len();
        flat::check("bucket of gradients", &*gradients, expected)?;
        self.exchange.add(bucket, &self.layout, gradients, kept)
    }

    /// Refuses a bucket that cannot be reduced now, or for what `refusal` says.
    fn check_bucket(
        &self,
        bucket: usize,
        refusal: impl FnOnce(&Self) -> Option<&'static str>,
    ) -> Result<()> {
        let num_buckets = self.layout.buckets().len();
        let reason = match bucket {
            _ if self.reduced => Some("the gradients of this step are reduced already"),
            _ if bucket >= num_buckets => Some("there is no such bucket"),
            _ => refusal(self),
        };
        reason.map_or(Ok(()), |reason| {
            Err(Error::BucketOrder {
                bucket,
                num_buckets,
                reason,
            })
        })
    }

    /// Whether [`ZeroOptimizer::start_bucket`] was called for a bucket in this step.
    ///
    /// # Panics
    /// When the layout has no such bucket.
    pub fn is_started(&self, bucket: usize) -> bool {
        self.exchange.is_given(bucket)
    }

    /// Replaces the gradients of what this rank owns by their average over the data x sequence
    /// group.
    ///
    /// Elements of other ranks stay as they were. [`ZeroOptimizer::step`] calls this when the
    /// caller did not.
    ///
    /// Gradients of which each rank of the tensor group has a summand are summed over it then.
    ///
    /// # Communication
    /// With `L` elements over `N` ranks: an all-reduce of `4 L` bytes in stage 0, a reduce-scatter
    /// of `4 L` bytes in stage 1, bucket by bucket from the last, up to four under way. None where
    /// gradients are divided, whose reductions this waits for. For what this rank owns of
    /// parameters that are [summed](ParamSpec::summed), an all-reduce of 4 bytes per element over
    /// the tensor group.
    ///
    /// # Errors
    /// When the gradients of this step were reduced before, `grads` does not fit the layout, or the
    /// group fails.
    pub fn reduce_gradients(&mut self, grads: &mut dyn Buffer) -> Result<()> {
        flat::check("gradient", grads, self.num_gradients())?;
        if self.reduced {
            return Err(Error::ReducedTwice);
        }
        if self.divides_gradients() {
            self.exchange.advance(&self.layout, grads, true)?;
        } else if !self.exchange.is_alone() {
            for bucket in (0..self.layout.buckets().len()).rev() {
                if !self.exchange.is_given(bucket) {
                    self.exchange.give(bucket);
                }
            }
            self.exchange.advance(&self.layout, grads, true)?;
            self.exchange.end_step();
        }
        self.sum_over_tensor(grads)?;
        self.reduced = true;
        Ok(())
    }

    /// Sums what this rank owns of the gradients of which each tensor rank has a summand; not many
    /// more elements than a bucket has at once.
    fn sum_over_tensor(&self, grads: &mut dyn Buffer) -> Result<()> {
        let Some(group) = &self.tensor_group else {
            return Ok(());
        };
        let params = self.layout.params();
        let places = self.state.places(self.exchange.grads());
        let owned = self.state.blocks().iter().zip(places);
        let summed = owned.filter(|(block, _)| params[block.param].summed);
        let summed: Vec<_> = summed.map(|(_, place)| place).collect();
        let blocks_at_once = (self.config.reduce_bucket_size / NORM_BLOCK).max(1);
        for places in summed.chunks(blocks_at_once) {
            let mut all = Vec::new();
            flat::read(grads, |g| {
                let own = places.iter().map(|place| &g[place.clone()]);
                own.for_each(|own| all.extend_from_slice(own));
            });
            let sum = group.all_reduce_vec(all, ReduceOp::Sum);
            let sum = sum.map_err(Error::communication("sum over the tensor group"))?;
            flat::write(grads, |g| {
                let mut sum = &sum[..];
                for place in places {
                    let (own, further) = sum.split_at(place.len());
                    g[place.clone()].copy_from_slice(own);
                    sum = further;
                }
            });
        }
        Ok(())
    }

    /// The norm of the averaged gradients of the whole model, without the loss scale.
    ///
    /// Sums of squares of norm blocks, in f64, are added by parameter and then over the parameters
    /// in model order, so the cut into pipeline stages and the ZeRO stage change no bit of it.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes per norm block of the whole model over the model group, from stage
    /// 1 on also over the data x sequence group.
    ///
    /// # Errors
    /// When `grads` does not fit the layout or a group fails.
    pub fn grad_norm(&self, grads: &dyn Buffer) -> Result<GradNorm> {
        flat::check("gradient", grads, self.num_gradients())?;
        let (blocks, threads) = (self.state.blocks(), self.config.threads);
        let places = self.state.places(self.exchange.grads());
        let own = match &self.room {
            Room::Memory | Room::Files(_) => flat::read(grads, |g| {
                norm::sums_of_squares(g, places.into_iter(), threads)
            }),
            Room::Device(device) => device.block_sums(grads, &places)?,
        };
        let sums = norm::in_model_order(&self.layout, &self.model, blocks, own);
        let sums = norm::sum_over_ranks(&self.exchange, &self.model_group, sums)?;
        Ok(norm::combine(&self.model, &sums).unscaled(self.loss_scale()))
    }

    /// Reduces, unscales, clips and applies the gradients with learning rate `lr`, and gathers the
    /// parameters.
    ///
    /// A gradient that is not finite, on any rank, skips the step on all: parameters, state and the
    /// step count stay as they were. The loss scale takes its next value.
    ///
    /// # Communication
    /// [`ZeroOptimizer::reduce_gradients`] unless done before, [`ZeroOptimizer::grad_norm`], and
    /// in stages 1 and 2 an all-gather of `4 L / N` bytes from each of the `N` ranks.
    ///
    /// # Errors
    /// When a buffer does not fit the layout, `lr` is negative or not finite, the tensor group does
    /// not hold all of a parameter whose rule needs that, or a group fails.
    pub fn step(
        &mut self,
        params: &mut dyn Buffer,
        grads: &mut dyn Buffer,
        lr: f64,
    ) -> Result<UpdateReport> {
        let (report, mut arrivals) = self.start_step(params, grads, lr)?;
        arrivals.finish(params)?;
        Ok(report)
    }

    /// The same, but what other ranks have stepped arrives later: the next forward pass waits for
    /// each bucket before it reads its parameters. Until then `params` has old values there.
    ///
    /// # Communication
    /// That of [`ZeroOptimizer::step`]; of the all-gathers the first ones are started.
    ///
    /// # Errors
    /// As [`ZeroOptimizer::step`].
    pub fn start_step(
        &mut self,
        params: &mut dyn Buffer,
        grads: &mut dyn Buffer,
        lr: f64,
    ) -> Result<(UpdateReport, Arrivals)> {
        flat::check("parameter", params, self.num_params())?;
        if lr < 0.0 || !lr.is_finite() {
            return Err(Error::out_of_range(
                "lr",
                lr,
                "a finite number of at least 0",
            ));
        }
        let optimizer = &self.config.optimizer;
        let mut specs = self.layout.params().iter();
        specs.try_for_each(|spec| {
            if self.rule.is_none() && optimizer.needs_whole(spec) {
                self.holders().check(spec)
            } else {
                Ok(())
            }
        })?;
        if !self.reduced {
            self.reduce_gradients(grads)?;
        }
        let norm = self.grad_norm(grads)?;
        self.reduced = false;
        let loss_scale = self.scaler.as_ref().map(LossScaler::scale);
        let clip_factor = norm.clip_factor(self.config.max_grad_norm);
        self.note(norm.non_finite.as_deref());
        if norm.non_finite.is_none() {
            let (config, time) = (&self.config.optimizer, self.progress.steps);
            let grad_scale = clip_factor / loss_scale.unwrap_or(1.0);
            if let Room::Device(device) = &mut self.room {
                let step = Step {
                    config,
                    lr,
                    time,
                    grad_scale,
                };
                device.update(&step, params, grads)?;
            } else {
                let mut step = |p: &mut [f32], g: &[f32]| self.update(lr, grad_scale, p, g);
                flat::write(params, |p| flat::read(grads, |g| step(p, g)))?;
            }
        }
        let mut arrivals = self
            .exchange
            .arrivals(&self.layout, norm.non_finite.is_none());
        arrivals.start(params)?;
        let report = UpdateReport {
            grad_norm: norm.norm,
            clip_factor,
            loss_scale,
            skipped: norm.non_finite,
        };
        Ok((report, arrivals))
    }

    /// Counts a step, and sets the loss scale of the next one; `non_finite` names the first
    /// parameter because of whose gradient it is skipped.
    fn note(&mut self, non_finite: Option<&str>) {
        let Some(param) = non_finite else {
            self.progress.steps += 1;
            self.progress.skipped_in_a_row = 0;
            self.progress.skipped_at_floor = 0;
            self.scaler.iter_mut().for_each(LossScaler::after_clean);
            return;
        };
        self.progress.skipped += 1;
        self.progress.skipped_in_a_row += 1;
        let step = self.progress.steps + self.progress.skipped;
        match &mut self.scaler {
            Some(scaler) if !scaler.is_at_floor() => {
                let loss_scale = scaler.scale();
                tracing::info!(%param, step, loss_scale, "step skipped: gradient overflows at this loss scale");
            }
            _ => {
                self.progress.skipped_at_floor += 1;
                tracing::warn!(%param, step, "step skipped: gradient is not finite");
            }
        }
        self.scaler.iter_mut().for_each(LossScaler::after_overflow);
    }

    fn holders(&self) -> PieceHolders<'_> {
        PieceHolders {
            group: self.tensor_group.as_ref(),
        }
    }

    /// Applies the rules to what this rank owns.
    fn update(
        &mut self,
        lr: f64,
        grad_scale: f64,
        params: &mut [f32],
        grads: &[f32],
    ) -> Result<()> {
        self.keep_in_files()?;
        let specs = self.layout.params();
        let (config, time) = (&self.config.optimizer, self.progress.steps);
        let threads = self.config.threads;
        let rule = |spec: &ParamSpec| match &self.rule {
            None => config.rule(spec, lr, time, grad_scale),
            Some(_) => Rule::Other(OtherStep {
                lr: lr * spec.lr_scale,
                time,
                grad_scale,
            }),
        };
        let rules: Vec<_> = specs.iter().map(rule).collect();
        let blocks = self.state.blocks().to_vec();
        let (params, grads) = (
            (params, self.exchange.params()),
            (grads, self.exchange.grads()),
        );
        let mut owned = update::owned(specs, &rules, &mut self.state, params, grads);
        if let Some(rule) = &self.rule {
            update::step_others(&mut owned, &**rule, threads);
            return Ok(());
        }
        update::step_elements(&mut owned, threads);
        if config.optim == OptimizerKind::Lamb {
            let sums = update::lamb_moments(&mut owned, threads);
            let all = sums
                .into_iter()
                .map(|kind| norm::in_model_order(&self.layout, &self.model, &blocks, kind));
            let all = all.collect::<Vec<_>>().concat();
            let all = norm::sum_over_ranks(&self.exchange, &self.model_group, all)?;
            let kinds = all.split_at(self.model.num_blocks());
            let sums_of = |spec: &ParamSpec| {
                let places = self.model.blocks_of(spec.global_index);
                <[_; 2]>::from(kinds).map(|sums| sums[places.clone()].iter().sum())
            };
            update::step_lamb(&mut owned, sums_of, threads);
        }
        let holders = PieceHolders {
            group: self.tensor_group.as_ref(),
        };
        update::step_tensors(owned, holders, &*self.products, threads)
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
