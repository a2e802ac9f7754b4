//! Parameters as proxies: names, types, initialisers and placements, never storage.

use crate::TensorType;
use merak_mpu::DType;
use serde::{Deserialize, Serialize};

/// The starting values of a parameter. A value depends only on the seed, the name of the parameter
/// and the index of the element in the full tensor, so every topology starts from the same weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Normal distribution of mean 0 with this standard deviation.
    Normal(f64),
    /// Uniform distribution over `[-bound, bound)`.
    Uniform(f64),
    /// One value everywhere.
    Constant(f64),
}

/// The role of a parameter, which decides weight decay and the names in reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamRole {
    /// The matrix of a linear layer or the kernel of a convolution.
    Weight,
    /// An additive vector.
    Bias,
    /// Scale or shift of a normalisation layer.
    Norm,
    /// A lookup table.
    Embedding,
}

/// How one logical tensor lies on the ranks of a mesh axis.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Every rank has the whole tensor.
    #[default]
    Replicate,
    /// Each rank has one slice.
    Shard(Shard),
    /// Every rank has a summand; the tensor is their sum.
    Partial,
}

/// A tensor cut along one dimension.
///
/// The dimension is the concatenation of `parts`, and each part is cut evenly: rank `r` of `n`
/// holds the `r`-th `1/n` of every part, one after the other. One part is the usual slice; a fused
/// `[q|k|v]` projection has three, and rank `r` then holds `q_r|k_r|v_r`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The dimension that is cut.
    pub dim: usize,
    /// Sizes of the parts in the full tensor.
    pub parts: Vec<usize>,
}

/// A box of a full tensor and where it lies in the local one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalBox {
    /// First index per dimension in the full tensor.
    pub offset: Vec<usize>,
    /// Size per dimension.
    pub size: Vec<usize>,
    /// First index along the sharded dimension in the local tensor (the other offsets are 0).
    pub local_start: usize,
    /// The sharded dimension, 0 when nothing is cut.
    pub dim: usize,
}

impl Placement {
    /// A plain cut of dimension `dim`, of size `size` in the full tensor.
    pub fn shard(dim: usize, size: usize) -> Self {
        Self::Shard(Shard {
            dim,
            parts: vec![size],
        })
    }

    /// The local type of a tensor of type `full` on one of `degree` ranks.
    ///
    /// The caller has checked that `degree` divides each part.
    #[must_use]
    pub fn local_type(&self, full: &TensorType, degree: usize) -> TensorType {
        match self {
            Self::Shard(shard) => full.with_dim(shard.dim, full.shape[shard.dim] / degree),
            Self::Replicate | Self::Partial => full.clone(),
        }
    }

    /// The boxes of the full tensor that rank `rank` of `degree` holds, in the order of its local
    /// tensor.
    pub fn local_boxes(&self, full: &TensorType, rank: usize, degree: usize) -> Vec<LocalBox> {
        let zeros = vec![0; full.ndim()];
        let Self::Shard(shard) = self else {
            return vec![LocalBox {
                offset: zeros,
                size: full.shape.clone(),
                local_start: 0,
                dim: 0,
            }];
        };
        let (mut part_start, mut local_start) = (0, 0);
        let mut boxes = Vec::with_capacity(shard.parts.len());
        for &part in &shard.parts {
            let len = part / degree;
            let mut offset = zeros.clone();
            offset[shard.dim] = part_start + rank * len;
            let size = full.with_dim(shard.dim, len).shape;
            boxes.push(LocalBox {
                offset,
                size,
                local_start,
                dim: shard.dim,
            });
            part_start += part;
            local_start += len;
        }
        boxes
    }
}

/// A parameter without storage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Param {
    /// The qualified name, as in the model's checkpoint files.
    pub name: String,
    /// Further names of the same parameter (tied weights).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The type of the whole parameter.
    pub full: TensorType,
    /// The type of one rank's slice; equals `full` until a rewrite places the parameter.
    pub local: TensorType,
    /// The starting values.
    pub init: Init,
    /// The parameter's role.
    pub role: ParamRole,
    /// How it lies on the ranks of the tensor axis.
    pub placement: Placement,
    /// Whether training changes it. A frozen parameter has no gradient.
    #[serde(default = "yes")]
    pub trainable: bool,
    /// The element type in memory and in checkpoints, if it is narrower than the one that nodes
    /// compute with. For frozen parameters only: small updates would be lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<DType>,
    /// The parameter whose layer it adapts, where it is a factor of a low-rank update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
}

/// The dimension that a factor of a low-rank update shares with the updated parameter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beside {
    /// The name of the other parameter.
    pub param: String,
    /// The dimension of this parameter with the shared features.
    pub dim: usize,
    /// The dimension of the other parameter with these features: if it is cut, this one is cut
    /// alike.
    pub of: usize,
}

fn yes() -> bool {
    true
}

impl Param {
    /// Makes an unplaced parameter.
    pub fn new(name: impl Into<String>, full: TensorType, init: Init, role: ParamRole) -> Self {
        let local = full.clone();
        Self {
            name: name.into(),
            aliases: Vec::new(),
            full,
            local,
            init,
            role,
            placement: Placement::Replicate,
            trainable: true,
            kept: None,
            beside: None,
        }
    }

    /// Whether weight decay applies: not to biases and normalisation layers, nor to parameters with
    /// "bias" in their name, such as T5's table `relative_attention_bias`. Trainers of transformers
    /// decide by names too.
    pub fn decays(&self) -> bool {
        matches!(self.role, ParamRole::Weight | ParamRole::Embedding) && !self.name.contains("bias")
    }

    /// The element type in memory.
    pub fn kept_dtype(&self) -> DType {
        self.kept.unwrap_or(self.local.dtype)
    }

    /// Bytes of one rank's slice in memory.
    pub fn kept_bytes(&self) -> usize {
        let kept = TensorType::new(self.local.shape.clone(), self.kept_dtype());
        kept.size_bytes()
    }

    /// Places the parameter on `degree` ranks and sets its local type.
    pub fn place(&mut self, placement: Placement, degree: usize) {
        self.local = placement.local_type(&self.full, degree);
        self.placement = placement;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fused_projection_is_cut_per_part() {
        let full = TensorType::new([4, 12], DType::F32);
        let placement = Placement::Shard(Shard {
            dim: 1,
            parts: vec![4, 4, 4],
        });
        assert_eq!(placement.local_type(&full, 2).shape, [4, 6]);
        let starts: Vec<_> = placement
            .local_boxes(&full, 1, 2)
            .iter()
            .map(|b| (b.offset[1], b.local_start))
            .collect();
        assert_eq!(starts, [(2, 0), (6, 2), (10, 4)]);
    }

    #[test]
    fn the_boxes_of_all_ranks_cover_the_tensor_once() {
        let full = TensorType::new([6, 5], DType::F32);
        let placement = Placement::Shard(Shard {
            dim: 0,
            parts: vec![2, 4],
        });
        let mut seen = [0; 6];
        for rank in 0..2 {
            for b in placement.local_boxes(&full, rank, 2) {
                (b.offset[0]..b.offset[0] + b.size[0]).for_each(|row| seen[row] += 1);
            }
        }
        assert_eq!(seen, [1; 6]);
    }
}
