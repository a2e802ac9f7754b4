//! Autocast: operations in 16 bits or in `f32` by the table of [`crate::op::Autocast`], over
//! parameters of `f32`.
//!
//! The types of a graph stay `f32`. What a tensor really holds is its own matter: a product leaves
//! one of 16 bits, and where a value leaves the backend as a buffer, it is widened again. Each
//! operation gets its operands in the types of the table, so no kernel knows of it.

use super::{
    Tch, at,
    storage::{Handle, kind},
};
use crate::{Call, Error, Result, Value, op::Autocast};
use merak_mpu::DType;
use tch::Kind;

impl Tch {
    /// The same backend, whose operations over values of `f32` compute in an element type of 16
    /// bits where [`Op::autocast`](crate::Op::autocast) says so.
    ///
    /// # Errors
    /// When the type has no 16 bits.
    pub fn with_autocast(self, dtype: DType) -> Result<Self> {
        let narrow = match dtype {
            DType::BF16 | DType::F16 => kind(dtype),
            _ => None,
        };
        match narrow {
            Some(narrow) => Ok(Self {
                autocast: Some(narrow),
                ..self
            }),
            None => Err(Error::backend(
                "autocast",
                format!("{dtype} does not have 16 bits: choose bf16 or f16"),
            )),
        }
    }

    /// The operands of a node in the types in which it takes them.
    pub(super) fn operands(&self, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
        let Some(narrow) = self.autocast else {
            return Ok(inputs);
        };
        let rule = |operand| call.op.autocast(operand);
        let mut widest = narrow;
        for (operand, value) in inputs.iter().enumerate() {
            if rule(operand) == Autocast::Widest && Handle::of(value)?.kind() == Kind::Float {
                widest = Kind::Float;
            }
        }
        let cast = |(operand, value)| match rule(operand) {
            Autocast::Narrow => self.cast(call.name, value, narrow),
            Autocast::Wide => self.cast(call.name, value, Kind::Float),
            Autocast::Widest => self.cast(call.name, value, widest),
            Autocast::AsIs => Ok(value),
        };
        inputs.into_iter().enumerate().map(cast).collect()
    }

    /// A value of `f32` or 16 bits in the other type; one of neither as it is.
    fn cast(&self, node: &str, value: Value, to: Kind) -> Result<Value> {
        let handle = Handle::of(&value)?;
        let is_cast = handle.kind() == Kind::Float || Some(handle.kind()) == self.autocast;
        if handle.kind() == to || !is_cast {
            return Ok(value);
        }
        let ty = value.ty().clone();
        if let Some(copy) = handle.kept(to).map_err(at(node))? {
            return Ok(Handle::new(copy, None).into_value(ty));
        }
        let cast = handle.tensor().f_to_kind(to).map_err(at(node))?;
        Ok(self.wrap(&ty, cast))
    }
}
