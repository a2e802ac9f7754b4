//! What the optimizer knows of a parameter, on this rank and in the whole model.

use crate::{Error, Result, blocks::num_norm_blocks};

/// One trainable parameter as this rank holds it.
///
/// Frozen parameters have no gradient, state or traffic, so they are never listed.
///
/// ```
/// use merak_zero::ParamSpec;
/// // A bias that every tensor rank holds whole: tensor rank 1 leaves it out of the norm.
/// let bias = ParamSpec::new("h.0.attn.c_proj.bias", &[64], 3)
///     .without_decay()
///     .with_norm(false);
/// assert_eq!(bias.numel(), 64);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Name of the logical parameter in the whole model.
    pub name: String,
    /// Shape of the local tensor: this rank's tensor-parallel slice.
    pub shape: Vec<usize>,
    /// Position of the logical parameter in [`GlobalParams`].
    pub global_index: usize,
    /// Whether weight decay applies; not to biases and the weights of normalisation layers.
    pub decay: bool,
    /// Whether this copy counts in the global norm, which takes each logical element once: true for
    /// a tensor-parallel slice; for a parameter that all tensor ranks hold whole, on tensor rank 0
    /// alone; for a tied weight, on the first stage that owns it alone.
    pub counts_in_norm: bool,
}

impl ParamSpec {
    /// Describes a parameter that decays and counts in the norm.
    pub fn new(name: impl Into<String>, shape: &[usize], global_index: usize) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            global_index,
            decay: true,
            counts_in_norm: true,
        }
    }

    /// Exempts the parameter from weight decay.
    #[must_use]
    pub fn without_decay(mut self) -> Self {
        self.decay = false;
        self
    }

    /// Sets whether this copy counts in the global norm.
    #[must_use]
    pub fn with_norm(mut self, counts_in_norm: bool) -> Self {
        self.counts_in_norm = counts_in_norm;
        self
    }

    /// The number of local elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Every trainable logical parameter of the whole model, in model order: the same on all ranks.
///
/// It gives each norm block of each parameter its own place in one vector, so that the global norm
/// adds the same numbers in the same order wherever the pipeline is cut.
///
/// ```
/// use merak_zero::{GlobalParams, NORM_BLOCK};
/// let model = GlobalParams::new([("wte", 3 * NORM_BLOCK + 1), ("ln_f.weight", 64)]);
/// assert_eq!((model.len(), model.num_blocks()), (2, 5));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GlobalParams {
    entries: Vec<GlobalParam>,
    num_blocks: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct GlobalParam {
    name: String,
    local_numel: usize,
    first_block: usize,
}

impl GlobalParams {
    /// Lists the parameters by name and number of elements of one tensor rank's slice.
    pub fn new<S: Into<String>>(params: impl IntoIterator<Item = (S, usize)>) -> Self {
        let mut model = Self::default();
        for (name, local_numel) in params {
            model.entries.push(GlobalParam {
                name: name.into(),
                local_numel,
                first_block: model.num_blocks,
            });
            model.num_blocks += num_norm_blocks(local_numel);
        }
        model
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the model has no trainable parameter.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of norm blocks of the whole model: length of the vector that the norm exchanges.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The name of the parameter with this global index.
    pub fn name(&self, global_index: usize) -> Option<&str> {
        self.entries.get(global_index).map(|p| p.name.as_str())
    }

    /// The place of the first norm block of a parameter; the parameter was checked before.
    pub(crate) fn first_block(&self, global_index: usize) -> usize {
        self.entries[global_index].first_block
    }

    /// The parameter that a place of the norm vector belongs to.
    pub(crate) fn param_of_block(&self, block: usize) -> &str {
        let after = self.entries.partition_point(|p| p.first_block <= block);
        &self.entries[after - 1].name
    }

    /// The places of each parameter's norm blocks, in model order.
    pub(crate) fn block_ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.entries
            .iter()
            .map(|p| p.first_block..p.first_block + num_norm_blocks(p.local_numel))
    }

    /// Checks that a rank's parameter is the one in the table.
    pub(crate) fn check(&self, spec: &ParamSpec) -> Result<()> {
        let Some(entry) = self.entries.get(spec.global_index) else {
            return Err(Error::UnknownParam {
                param: spec.name.clone(),
                index: spec.global_index,
                num_params: self.len(),
            });
        };
        if entry.name != spec.name || entry.local_numel != spec.numel() {
            return Err(Error::ParamMismatch {
                param: spec.name.clone(),
                found: spec.numel(),
                index: spec.global_index,
                expected_param: entry.name.clone(),
                expected: entry.local_numel,
            });
        }
        Ok(())
    }
}
