//! How an optimizer reduces, clips and steps, and with whom.

use crate::{
    Error, FlatLayout, LossScaling, OptimizerConfig, ParamSpec, Result, ZeroStage, average,
};
use merak_mpu::Group;

/// Settings of the reductions, clipping and steps of an optimizer.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// The values that the data x sequence group divides.
    pub stage: ZeroStage,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// Largest global norm of the gradients; 0 or less switches clipping off.
    pub max_grad_norm: f64,
    /// How the gradient of the loss is scaled, if it is. The caller multiplies it by
    /// [`ZeroOptimizer::loss_scale`](crate::ZeroOptimizer::loss_scale).
    pub loss_scaling: Option<LossScaling>,
    /// Most elements of one gradient reduction.
    pub reduce_bucket_size: usize,
    /// Most elements of one gathering of parameters.
    pub gather_bucket_size: usize,
    /// Whether gradients are divided before the sum over ranks, not only after it.
    pub prescale_gradients: bool,
    /// The divisor before the sum; 1 stands for the number of ranks. The division after the sum
    /// makes both divisors together the number of ranks.
    pub gradient_predivide_factor: f64,
    /// Decay of an exponential moving average of each weight, which the weight takes part in after
    /// every step that is not skipped; `None`: none is kept.
    ///
    /// With decay `d`, weight `p` and average `e`, in f32: `e <- d e + (1 - d) p`. It is one more
    /// value of the state, by the name [`EMA`](crate::EMA), that begins as the weight.
    pub ema_decay: Option<f64>,
    /// Whether parameters are masters of weights that the caller keeps in 16 bits. From stage 1 on
    /// each rank then keeps the masters that it owns alone, and the ranks gather weights.
    pub has_masters: bool,
    /// Threads that this rank may use for updates and norms; the results do not depend on it.
    pub threads: usize,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self {
            stage: ZeroStage::OptimizerState,
            optimizer: OptimizerConfig::default(),
            max_grad_norm: 1.0,
            loss_scaling: None,
            reduce_bucket_size: 500_000_000,
            gather_bucket_size: 500_000_000,
            prescale_gradients: false,
            gradient_predivide_factor: 1.0,
            ema_decay: None,
            has_masters: false,
            threads: 1,
        }
    }
}

impl ZeroConfig {
    /// The largest `gradient_predivide_factor`, and the largest inverse of one: `f32` holds
    /// gradients times both.
    pub const MAX_PREDIVIDE: u32 = 1_000_000_000;

    /// Checks the range of every number.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first bad one.
    #[expect(clippy::float_cmp, reason = "1 is the value that stands for unset")]
    pub fn validate(&self) -> Result<()> {
        self.optimizer.validate()?;
        average::check(self.ema_decay)?;
        self.loss_scaling
            .iter()
            .try_for_each(LossScaling::validate)?;
        let factor = self.gradient_predivide_factor;
        let largest = f64::from(Self::MAX_PREDIVIDE);
        let factor_legal = (1.0 / largest..=largest).contains(&factor);
        let factor_used = self.prescale_gradients || factor == 1.0;
        let (reduce, gather) = (self.reduce_bucket_size, self.gather_bucket_size);
        for (setting, found, legal, expected) in [
            (
                "reduce_bucket_size",
                reduce as f64,
                reduce > 0,
                "at least 1",
            ),
            (
                "gather_bucket_size",
                gather as f64,
                gather > 0,
                "at least 1",
            ),
            (
                "threads",
                self.threads as f64,
                self.threads > 0,
                "at least 1",
            ),
            (
                "max_grad_norm",
                self.max_grad_norm,
                !self.max_grad_norm.is_nan(),
                "a number",
            ),
            (
                "gradient_predivide_factor",
                factor,
                factor_legal,
                "from 1e-9 to 1e9",
            ),
            (
                "gradient_predivide_factor",
                factor,
                factor_used,
                "1 without `prescale_gradients`",
            ),
        ] {
            if !legal {
                return Err(Error::number_out_of_range(setting, found, expected));
            }
        }
        Ok(())
    }
}

impl ZeroConfig {
    /// Whether `replicas` ranks with the same parameters divide what the stages from this one on
    /// divide.
    pub(crate) fn divides_from(&self, first: ZeroStage, replicas: usize) -> bool {
        self.stage >= first && replicas > 1
    }

    /// Whether one of `replicas` ranks with the same parameters waits for the others within a
    /// forward or backward pass: for gradients where these are divided, for parameters where those
    /// are.
    pub fn waits_in_passes(&self, replicas: usize) -> bool {
        let first = ZeroStage::Gradients.min(self.params_divided_from());
        self.divides_from(first, replicas)
    }

    /// The first stage whose ranks keep the parameters that they own alone.
    pub(crate) fn params_divided_from(&self) -> ZeroStage {
        if self.has_masters {
            ZeroStage::OptimizerState
        } else {
            ZeroStage::Parameters
        }
    }

    /// How parameters lie in the buckets of `replicas` ranks.
    pub(crate) fn layout(&self, params: Vec<ParamSpec>, replicas: usize) -> Result<FlatLayout> {
        let is_whole = |spec: &ParamSpec| self.optimizer.needs_whole(spec);
        // A bucket that ranks wait for within a pass comes and goes as a whole.
        let layout = if self.waits_in_passes(replicas) {
            FlatLayout::with_whole_buckets
        } else {
            FlatLayout::with_whole
        };
        layout(params, self.reduce_bucket_size, replicas, is_whole)
    }
}

/// The groups that an optimizer speaks to.
#[derive(Debug, Clone)]
pub struct ZeroGroups {
    /// The ranks that hold the same parameters: gradients are averaged and ZeRO divides over them.
    pub data_sequence: Group,
    /// The ranks that hold one replica of the model: the norm is summed over them.
    pub model: Group,
}
