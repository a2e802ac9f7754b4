//! What a rank keeps of parameters, gradients, state and copies, before any of it is made.

use crate::{
    ParamSpec, Result, ZeroConfig, ZeroStage,
    exchange::{MOST_APART, MOST_IN_FLIGHT},
    gathering::MOST_GATHERED,
};

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

/// What a rank owns of parameters that several have, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MostOwned {
    /// Elements of the parameters.
    pub elements: usize,
    /// Values of optimizer state and averages, 4 bytes each.
    pub state: usize,
}

impl ZeroConfig {
    /// The most values that are kept for each element of a parameter.
    fn most_kept_per_element(&self) -> usize {
        self.optimizer.most_kept_per_element() + usize::from(self.ema_decay.is_some())
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

    /// What the one of `replicas` ranks that owns most of these parameters has. Where a rule needs
    /// whole parameters, that may be much more than an equal part of [`ZeroConfig::element_bytes`],
    /// and the state of an element less.
    ///
    /// # Errors
    /// As [`FlatLayout::new`](crate::FlatLayout::new).
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
    /// As [`FlatLayout::new`](crate::FlatLayout::new).
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
