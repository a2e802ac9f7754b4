//! How an optimizer reduces, clips and steps, and with whom.

use crate::{
    Error, FlatLayout, LossScaling, OptimizerConfig, ParamSpec, Result, ZeroStage, average,
    exchange::{MOST_APART, MOST_IN_FLIGHT},
    gathering::MOST_GATHERED,
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

/// Bytes for each element, and the ranks that divide the elements among themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptBytes {
    /// Bytes for each element.
    pub bytes: usize,
    /// The ranks that divide the elements; 1 where each rank keeps all of them.
    pub ranks: usize,
}

/// Bytes that a rank keeps for each element of a trained parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// The ranks that divide the weights, whose bytes are those of their own type. A rank that has
    /// a part of them keeps the master alone.
    pub weight_ranks: usize,
    /// The `f32` master beside a weight of another type.
    pub master: KeptBytes,
    /// The gradient.
    pub gradient: KeptBytes,
    /// The state of the update rule, the most that it keeps for an element of any parameter, and
    /// the average of weights.
    pub state: KeptBytes,
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

    /// The most values that are kept for each element of a parameter.
    fn most_kept_per_element(&self) -> usize {
        self.optimizer.most_kept_per_element() + usize::from(self.ema_decay.is_some())
    }

    /// The first stage whose ranks keep the parameters that they own alone.
    pub(crate) fn params_divided_from(&self) -> ZeroStage {
        if self.has_masters {
            ZeroStage::OptimizerState
        } else {
            ZeroStage::Parameters
        }
    }

    /// Bytes that each of `replicas` ranks with the same parameters keeps for an element of them.
    ///
    /// ```
    /// use merak_zero::{ZeroConfig, ZeroStage};
    /// let mut config = ZeroConfig::default();
    /// let state = config.element_bytes(4).state;
    /// assert_eq!((state.bytes, state.ranks), (8, 4));
    /// config.stage = ZeroStage::Replicated;
    /// assert_eq!(config.element_bytes(4).state.ranks, 1);
    /// ```
    pub fn element_bytes(&self, replicas: usize) -> ElementBytes {
        let float = size_of::<f32>();
        let divided_from = |first| {
            if self.divides_from(first, replicas) {
                replicas
            } else {
                1
            }
        };
        ElementBytes {
            weight_ranks: divided_from(ZeroStage::Parameters),
            master: KeptBytes {
                bytes: float,
                ranks: divided_from(self.params_divided_from()),
            },
            gradient: KeptBytes {
                bytes: float,
                ranks: divided_from(ZeroStage::Gradients),
            },
            state: KeptBytes {
                bytes: float * self.most_kept_per_element(),
                ranks: divided_from(ZeroStage::OptimizerState),
            },
        }
    }
}

/// Bytes of the copies of buckets that are on their way between ranks with the same parameters, at
/// most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExchangeBytes {
    /// Gradients whose sum is under way. In host memory it stays for the next ones.
    pub sums: usize,
    /// Parameters that other ranks have stepped, under way and received, beside this rank's part.
    pub gathers: usize,
    /// The largest bucket of weights that come and go, in stage 3, gathered in their type. How many
    /// of them a rank has at once is up to those who read them.
    pub weight_bucket: usize,
}

impl ZeroConfig {
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

    /// What the one of `replicas` ranks that owns most of these parameters has. Where a rule needs
    /// whole parameters, that may be much more than an equal part of [`ZeroConfig::element_bytes`],
    /// and the state of an element less.
    ///
    /// # Errors
    /// As [`FlatLayout::new`].
    pub fn most_owned(&self, params: Vec<ParamSpec>, replicas: usize) -> Result<MostOwned> {
        let is_divided = self.divides_from(ZeroStage::OptimizerState, replicas);
        let ranks = if is_divided { replicas } else { 1 };
        let layout = self.layout(params, ranks)?;
        let averages = usize::from(self.ema_decay.is_some());
        let mut owned = vec![MostOwned::default(); ranks];
        for bucket in layout.buckets() {
            for (own, part) in owned.iter_mut().zip(layout.parts(bucket)) {
                own.elements += part.flat.len();
                own.state += averages * part.flat.len();
                for block in &layout.blocks()[part.blocks] {
                    let spec = &layout.params()[block.param];
                    own.state += match (self.optimizer.needs_whole(spec), block.local.start) {
                        (true, 0) => self.optimizer.state_numel(spec),
                        (true, _) => 0,
                        (false, _) => self.optimizer.state_of(spec).len() * block.local.len(),
                    };
                }
            }
        }
        let most = |of: fn(&MostOwned) -> usize| owned.iter().map(of).max().unwrap_or(0);
        Ok(MostOwned {
            elements: most(|own| own.elements),
            state: most(|own| own.state),
        })
    }

    /// What `replicas` ranks with these parameters keep of them for the exchange of buckets, at
    /// most.
    ///
    /// # Errors
    /// As [`FlatLayout::new`].
    pub fn exchange_bytes(&self, params: Vec<ParamSpec>, replicas: usize) -> Result<ExchangeBytes> {
        if replicas == 1 {
            return Ok(ExchangeBytes::default());
        }
        let layout = self.layout(params, replicas)?;
        let lens = layout.buckets().iter().map(|bucket| bucket.flat.len());
        let (number, largest) = (layout.buckets().len(), lens.max().unwrap_or(0));
        let bytes = |copies: usize, elements: usize| {
            copies.saturating_mul(elements.saturating_mul(size_of::<f32>()))
        };
        // Each microbatch sums divided gradients, so both sums may be those of one bucket.
        let summed = if self.element_bytes(replicas).gradient.ranks > 1 {
            MOST_APART
        } else {
            MOST_IN_FLIGHT.min(number)
        };
        let gathers = self.divides_from(ZeroStage::OptimizerState, replicas)
            && !self.divides_from(self.params_divided_from(), replicas);
        let weight = if self.element_bytes(replicas).weight_ranks == 1 {
            0
        } else if self.has_masters {
            size_of::<u16>()
        } else {
            size_of::<f32>()
        };
        let piece = (self.gather_bucket_size / replicas).max(1);
        let gathered = largest.min(piece.saturating_mul(replicas));
        Ok(ExchangeBytes {
            sums: bytes(summed, largest),
            gathers: if gathers {
                bytes(MOST_GATHERED, gathered + gathered.min(piece))
            } else {
                0
            },
            weight_bucket: largest.saturating_mul(weight),
        })
    }
}

/// What a rank owns of parameters that several have, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MostOwned {
    /// Elements of the parameters.
    pub elements: usize,
    /// Values of optimizer state and averages, 4 bytes each.
    pub state: usize,
}

/// The groups that an optimizer speaks to.
#[derive(Debug, Clone)]
pub struct ZeroGroups {
    /// The ranks that hold the same parameters: gradients are averaged and ZeRO divides over them.
    pub data_sequence: Group,
    /// The ranks that hold one replica of the model: the norm is summed over them.
    pub model: Group,
}
