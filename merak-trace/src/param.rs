//! Parameters without storage: names, types, initialisers and placements.

use crate::{
    TensorType,
    error::{Error, Result},
    placement::{Placement, Placements},
};
use merak_mpu::{Axis, DType};
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
    /// How it lies on the mesh.
    pub placements: Placements,
    /// Whether training changes it. A frozen parameter has no gradient.
    #[serde(default = "yes")]
    pub trainable: bool,
    /// Whether each rank of the tensor axis makes a summand of its gradient alone, because it works
    /// on a slice of the sequence. Their sum over these ranks is made once per step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub summed: bool,
    /// The element type that nodes read from memory, if it is narrower than the one that they
    /// compute with. Checkpoints have a frozen parameter in this type; a trained one has a master
    /// in the wider type too, since small updates would be lost.
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
            placements: Placements::default(),
            trainable: true,
            summed: false,
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

    /// Places the parameter on the `degree` ranks of an axis and sets its local type.
    ///
    /// # Errors
    /// [`Error::Placement`] for a cut of a dimension that the parameter does not have, or whose
    /// size is not the sum of the cut's parts, and for a degree of 0.
    pub fn place(&mut self, axis: Axis, placement: Placement, degree: usize) -> Result<()> {
        let placed = self.placements.with(axis, placement, degree, &self.full);
        self.placements = placed.map_err(|reason| Error::Placement {
            param: self.name.clone(),
            reason,
        })?;
        self.local = self.placements.local_type(&self.full);
        Ok(())
    }
}
