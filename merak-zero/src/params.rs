//! What the optimizer knows of a parameter, on this rank and in the whole model.

use crate::{Error, Result, blocks::num_norm_blocks};
use std::ops::Range;

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
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own about the parameter"
)]
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
    /// The cut of the parameter over the tensor group; `None`: each of its ranks holds all of it.
    pub cut: Option<TensorCut>,
    /// Whether each rank of the tensor group has a summand of the gradient of a parameter that all
    /// of them hold whole, as each works on a slice of the sequence.
    pub summed: bool,
    /// Whether it is a matrix between embeddings and head, which Muon makes orthogonal steps of.
    pub hidden_matrix: bool,
    /// Factor of the learning rate.
    pub lr_scale: f64,
}

/// The cut of a parameter over a tensor-parallel group.
///
/// The dimension of the whole parameter consists of `parts`, each of which is cut into equal
/// pieces, one for each rank: a fused projection has a part for each of its projections. Where the
/// number of ranks does not divide a part, every rank has room for a piece rounded up, and padding
/// of zeros follows what the last ones hold.
///
/// ```
/// use merak_zero::TensorCut;
/// let fused = TensorCut { dim: 0, parts: vec![4, 4, 4] };
/// assert_eq!(fused.whole(&[6, 5]), [12, 5]);
/// // What rank 1 of 2 holds of that dimension.
/// assert_eq!(fused.ranges(1, 2), [2..4, 6..8, 10..12]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorCut {
    /// The dimension that is cut.
    pub dim: usize,
    /// The lengths of its parts in the whole parameter.
    pub parts: Vec<usize>,
}

impl TensorCut {
    /// The shape of the whole parameter of which `local` is the shape of a piece; that shape again
    /// where it does not have the dimension, which optimizers refuse.
    pub fn whole(&self, local: &[usize]) -> Vec<usize> {
        let mut shape = local.to_vec();
        if let Some(len) = shape.get_mut(self.dim) {
            *len = self.parts.iter().sum();
        }
        shape
    }

    /// Where the pieces that a rank of `num_ranks`, at least 1, holds lie in the whole dimension,
    /// in the order of its local tensor.
    pub fn ranges(&self, rank: usize, num_ranks: usize) -> Vec<Range<usize>> {
        let mut part_start = 0;
        let range = |part: &usize| {
            let room = part.div_ceil(num_ranks.max(1));
            let (start, end) = ((rank * room).min(*part), ((rank + 1) * room).min(*part));
            let own = part_start + start..part_start + end;
            part_start += part;
            own
        };
        self.parts.iter().map(range).collect()
    }

    /// The room that every rank of `num_ranks` has for each part, padding included.
    pub(crate) fn rooms(&self, num_ranks: usize) -> impl Iterator<Item = usize> {
        self.parts.iter().map(move |part| part.div_ceil(num_ranks))
    }
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
            cut: None,
            summed: false,
            hidden_matrix: false,
            lr_scale: 1.0,
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

    /// Says how the tensor group cuts the parameter.
    #[must_use]
    pub fn with_cut(mut self, cut: TensorCut) -> Self {
        self.cut = Some(cut);
        self
    }

    /// Says that each rank of the tensor group has a summand of the gradient.
    #[must_use]
    pub fn with_sum(mut self) -> Self {
        self.summed = true;
        self
    }

    /// Says that Muon makes orthogonal steps of the parameter, which has two dimensions.
    #[must_use]
    pub fn as_hidden_matrix(mut self) -> Self {
        self.hidden_matrix = true;
        self
    }

    /// Sets the factor of the learning rate.
    #[must_use]
    pub fn with_lr_scale(mut self, lr_scale: f64) -> Self {
        self.lr_scale = lr_scale;
        self
    }

    /// The number of local elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Shape of the whole parameter, of which the tensor group may hold pieces.
    pub fn whole_shape(&self) -> Vec<usize> {
        let cut = self.cut.as_ref();
        cut.map_or_else(|| self.shape.clone(), |cut| cut.whole(&self.shape))
    }

    /// The number of elements of the whole parameter.
    pub(crate) fn whole_numel(&self) -> usize {
        self.whole_shape().iter().product()
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

    /// The places of a parameter's norm blocks; the parameter was checked before.
    pub(crate) fn blocks_of(&self, global_index: usize) -> Range<usize> {
        let param = &self.entries[global_index];
        param.first_block..param.first_block + num_norm_blocks(param.local_numel)
    }

    /// The places of each parameter's norm blocks, in model order.
    pub(crate) fn block_ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.len()).map(|index| self.blocks_of(index))
    }

    /// Checks that a rank's parameter is the one in the table, has the dimension that it is cut
    /// along, and is a matrix if it is to be one.
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
        if let Some(cut) = &spec.cut
            && cut.dim >= spec.shape.len()
        {
            return Err(Error::NoSuchDim {
                param: spec.name.clone(),
                dim: cut.dim,
                shape: spec.shape.clone(),
            });
        }
        if spec.hidden_matrix && spec.shape.len() != 2 {
            return Err(Error::NoMatrix {
                param: spec.name.clone(),
                shape: spec.shape.clone(),
            });
        }
        Ok(())
    }
}
