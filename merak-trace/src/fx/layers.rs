//! Layers: the parameters of a module and the operation that uses them.

use super::{Module, Symbol};
use crate::{Init, Op, ParamRole, Result, op::WeightLayout};

/// Layers with the parameters of this module.
impl Module {
    /// `y = x W (+ b)` with parameters `weight` and `bias`; `x: [.., in]`, `y: [.., out]`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn linear(
        &self,
        x: &Symbol,
        out: usize,
        layout: WeightLayout,
        bias: bool,
        init: Init,
    ) -> Result<Symbol> {
        let mut shape = [0; 2];
        shape[layout.in_dim()] = x.ty.last_dim();
        shape[layout.out_dim()] = out;
        let weight = self.param("weight", &shape, init, ParamRole::Weight)?;
        if !bias {
            return self.linear_with(x, &weight, layout);
        }
        let bias = self.param("bias", &[out], Init::Constant(0.0), ParamRole::Bias)?;
        self.apply1(Op::Linear { layout, bias: true }, &[x, &weight, &bias])
    }

    /// Rows of the parameter `weight`, `[rows, width]`, and that parameter, so that another layer
    /// can tie to it.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn embedding(
        &self,
        ids: &Symbol,
        rows: usize,
        width: usize,
        init: Init,
    ) -> Result<(Symbol, Symbol)> {
        self.padded_embedding(ids, rows, width, None, init)
    }

    /// As [`Module::embedding`], but lookups do not train the row `padding`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn padded_embedding(
        &self,
        ids: &Symbol,
        rows: usize,
        width: usize,
        padding: Option<usize>,
        init: Init,
    ) -> Result<(Symbol, Symbol)> {
        let table = self.param("weight", &[rows, width], init, ParamRole::Embedding)?;
        let slice = None;
        let lookup = Op::Embedding { padding, slice };
        Ok((self.apply1(lookup, &[ids, &table])?, table))
    }

    /// Layer normalisation over the last dimension, with parameters `weight` and `bias`
    /// ([Ba et al.](https://arxiv.org/abs/1607.06450)).
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn layer_norm(&self, x: &Symbol, eps: f64) -> Result<Symbol> {
        let width = x.ty.last_dim();
        let weight = self.param("weight", &[width], Init::Constant(1.0), ParamRole::Norm)?;
        let bias = self.param("bias", &[width], Init::Constant(0.0), ParamRole::Norm)?;
        self.apply1(Op::LayerNorm { eps }, &[x, &weight, &bias])
    }

    /// Root-mean-square normalisation over the last dimension, with parameter `weight`
    /// ([Zhang and Sennrich](https://arxiv.org/abs/1910.07467)).
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn rms_norm(&self, x: &Symbol, eps: f64) -> Result<Symbol> {
        let weight = self.param(
            "weight",
            &[x.ty.last_dim()],
            Init::Constant(1.0),
            ParamRole::Norm,
        )?;
        self.apply1(Op::RmsNorm { eps }, &[x, &weight])
    }
}
