//! One step of a rank: the norm, clipping, the update, and what other ranks have updated.

use super::{Room, ZeroOptimizer};
use crate::{
    Error, GradNorm, LossScaler, OptimizerConfig, OptimizerKind, ParamSpec, Result, Step, flat,
    gathering::Arrivals,
    norm,
    optimizer::{OtherStep, Rule},
    update,
    whole::PieceHolders,
};
use merak_mpu::Buffer;

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

impl ZeroOptimizer {
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
        if !(0.0..=OptimizerConfig::MAX_NUMBER).contains(&lr) {
            return Err(Error::number_out_of_range("lr", lr, "from 0 to 1e37"));
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
        self.begin_average(params)?;
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
            self.follow(params)?;
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
    /// parameter because of whose gradient it is skipped. All ranks skip it, and the first tells.
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
        let tells = self.exchange.group().rank() == 0 && self.model_group.rank() == 0;
        match &mut self.scaler {
            Some(scaler) if !scaler.is_at_floor() => {
                let loss_scale = scaler.scale();
                if tells {
                    tracing::info!(%param, step, loss_scale, "step skipped: gradient overflows at this loss scale");
                }
            }
            _ => {
                self.progress.skipped_at_floor += 1;
                if tells {
                    tracing::warn!(%param, step, "step skipped: gradient is not finite");
                }
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
