//! Activations and rotary positions.

use super::{run::Outcome, storage::int};
use crate::op::{Activation, Rope};
use tch::{Kind, Tensor};

/// `x -> y`.
pub(super) fn activation(kind: Activation, x: &Tensor) -> Outcome {
    match kind {
        Activation::GeluTanh => x.f_gelu("tanh"),
        Activation::GeluErf => x.f_gelu("none"),
        Activation::Silu => x.f_silu(),
        Activation::Relu => x.f_relu(),
        Activation::Tanh => x.f_tanh(),
    }
}

/// `x, dy -> dx`.
pub(super) fn activation_grad(kind: Activation, x: &Tensor, dy: &Tensor) -> Outcome {
    match kind {
        Activation::GeluTanh => x.f_gelu_backward(dy, "tanh"),
        Activation::GeluErf => x.f_gelu_backward(dy, "none"),
        Activation::Silu => x.f_silu_backward(dy),
        Activation::Relu => x.f_threshold_backward(dy, 0_i64),
        Activation::Tanh => Tensor::f_tanh_backward(dy, &x.f_tanh()?),
    }
}

/// `gate, up -> silu(gate) * up`.
pub(super) fn silu_mul(gate: &Tensor, up: &Tensor) -> Outcome {
    gate.f_silu()?.f_mul(up)
}

/// `gate, up, dy -> dgate, dup`.
pub(super) fn silu_mul_grad([gate, up, dy]: [&Tensor; 3]) -> Outcome<Vec<Tensor>> {
    let dgate = gate.f_silu_backward(&dy.f_mul(up)?)?;
    Ok(vec![dgate, gate.f_silu()?.f_mul_(dy)?])
}

/// Turns elements d and d + n of each head by `position * inv_freq[d]` and scales them, like
/// `kernels::rope`.
pub(super) fn rope(spec: &Rope, x: &Tensor, positions: &Tensor) -> Outcome {
    let shape = x.size();
    let (pairs, head) = (int(spec.inv_freq.len()), int(spec.head_dim));
    let frequencies = Tensor::from_slice(&spec.inv_freq).f_to_device(x.device())?;
    let positions = positions.f_to_kind(Kind::Float)?.f_unsqueeze(-1)?;
    let angles = positions.f_mul(&frequencies)?;
    let angles = angles.f_to_kind(Kind::Double)?.f_unsqueeze(-2)?;
    let turn = if x.kind() == Kind::Double {
        Kind::Double
    } else {
        Kind::Float
    };
    let (cos, sin) = (
        angles.f_cos()?.f_to_kind(turn)?,
        angles.f_sin()?.f_to_kind(turn)?,
    );
    let (cos, sin) = (cos.f_mul_scalar(spec.scale)?, sin.f_mul_scalar(spec.scale)?);
    let sin = if spec.inverse { sin.f_neg()? } else { sin };
    let heads = x.f_reshape([shape[0], shape[1], -1, head])?;
    let parts = heads.f_split_with_sizes([pairs, pairs, head - 2 * pairs], -1)?;
    let (a, b) = (parts[0].f_to_kind(turn)?, parts[1].f_to_kind(turn)?);
    let turned_a = a.f_mul(&cos)?.f_sub(&b.f_mul(&sin)?)?;
    let turned_b = a.f_mul(&sin)?.f_add(&b.f_mul(&cos)?)?;
    let kind = x.kind();
    Tensor::f_cat(
        &[
            turned_a.f_to_kind(kind)?,
            turned_b.f_to_kind(kind)?,
            parts[2].shallow_clone(),
        ],
        -1,
    )
}
