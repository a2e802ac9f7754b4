//! Rotary positions as configurations describe them, and their scalings to longer contexts.

mod scaling;

use self::scaling::Scaling;
use super::fields::{Fields, error};
use crate::{Result, op::Rope};

/// The most elements of a head, each pair of which has a frequency.
const MAX_HEAD_DIM: usize = 1 << 16;

/// The rotary positions of a model.
///
/// With d rotated elements per head and base θ, pair i turns by `θ^(-2i/d)` per position
/// ([RoFormer](https://arxiv.org/abs/2104.09864), section 3.2.2), which a scaling changes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rotary {
    head_dim: usize,
    /// Rotated elements of a head, rounded up to pairs when they are used.
    rotated: usize,
    theta: f64,
    max_seq: usize,
    scaling: Scaling,
}

/// A family's names for `rope_theta` and `partial_rotary_factor`.
#[derive(Debug, Clone, Copy)]
pub(super) struct RotaryFields {
    /// Name of the base.
    pub(super) theta: &'static str,
    /// Name and default of the rotated share of a head, where the family rotates less than all.
    pub(super) share: Option<(&'static str, f64)>,
}

impl Rotary {
    /// Reads `rope_parameters` of transformers 5, or `rope_scaling` and the top level of
    /// transformers 4.
    pub(super) fn from_fields(
        f: &Fields<'_>,
        names: RotaryFields,
        head_dim: usize,
        max_seq: usize,
    ) -> Result<Self> {
        let nested = parameters(f)?;
        let theta = agreed(f, nested.as_ref(), "rope_theta", names.theta)?.unwrap_or(10_000.0);
        if theta <= 1.0 {
            return Err(error(
                names.theta,
                &format!("is {theta}, expected more than 1"),
            ));
        }
        let (share_name, default) = names.share.unwrap_or(("partial_rotary_factor", 1.0));
        let share = agreed(f, nested.as_ref(), "partial_rotary_factor", share_name)?;
        let share = share.unwrap_or(default);
        if !(0.0..=1.0).contains(&share) || (names.share.is_none() && share < 1.0) {
            let expected = if names.share.is_some() { "0 to 1" } else { "1" };
            return Err(error(
                share_name,
                &format!("is {share}, expected {expected}"),
            ));
        }
        f.bounded("head_dim", head_dim, (MAX_HEAD_DIM, "elements"))?;
        let rotated = (head_dim as f64 * share) as usize;
        if rotated == head_dim && !head_dim.is_multiple_of(2) {
            return Err(error(
                "head_dim",
                &format!("is {head_dim}, expected an even number"),
            ));
        }
        let scaling = match &nested {
            Some(nested) => Scaling::from_fields(f, nested, rotated, max_seq)?,
            None => Scaling::None,
        };
        Ok(Self {
            head_dim,
            rotated,
            theta,
            max_seq,
            scaling,
        })
    }

    /// The longest sequence that the frequencies are made for.
    pub(super) fn longest(&self) -> usize {
        match self.scaling {
            Scaling::Dynamic { factor } => (self.max_seq as f64 * factor) as usize,
            _ => self.max_seq,
        }
    }

    /// The shortest sequence length with the same frequencies as length `seq`.
    pub(super) fn scaling_length(&self, seq: usize) -> usize {
        match &self.scaling {
            Scaling::Dynamic { .. } if seq > self.max_seq => seq,
            Scaling::LongRope { original, .. } if seq > *original => original + 1,
            _ => 1,
        }
    }

    /// The operation that turns the heads of sequences of length `seq`, or of a part of them.
    pub(super) fn op(&self, seq: usize) -> Rope {
        let pairs = self.rotated.div_ceil(2);
        let frequency = |pair: usize| {
            let plain = self.base(seq).powf(-self.exponent(pair));
            self.scaled(pair, plain, seq) as f32
        };
        Rope {
            head_dim: self.head_dim,
            inv_freq: (0..pairs).map(frequency).collect(),
            scale: match self.scaling {
                Scaling::Yarn { attention, .. } | Scaling::LongRope { attention, .. } => attention,
                _ => 1.0,
            },
            inverse: false,
        }
    }

    fn exponent(&self, pair: usize) -> f64 {
        (2 * pair) as f64 / self.rotated as f64
    }

    fn base(&self, seq: usize) -> f64 {
        let Scaling::Dynamic { factor } = self.scaling else {
            return self.theta;
        };
        let longer = seq.max(self.max_seq) as f64 / self.max_seq as f64;
        let dim = self.rotated as f64;
        self.theta * (factor * longer - (factor - 1.0)).powf(dim / (dim - 2.0))
    }

    fn scaled(&self, pair: usize, plain: f64, seq: usize) -> f64 {
        match &self.scaling {
            Scaling::None | Scaling::Dynamic { .. } => plain,
            Scaling::Linear { factor } => plain / factor,
            Scaling::Llama3(scaling) => scaling.scaled(plain),
            Scaling::Yarn { ramp, .. } => ramp.scaled(pair, plain, self.rotated, self.theta),
            Scaling::LongRope {
                short,
                long,
                original,
                ..
            } => plain / if seq > *original { long } else { short }[pair],
        }
    }
}

/// The object that describes the rotary positions. Where both spellings are there, they must agree.
fn parameters<'a>(f: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    let name = f.renamed("rope_parameters", "rope_scaling")?;
    f.object(name)
}

/// A number that may stand in the nested object, under `outer` on the top level, or in both alike.
fn agreed(
    f: &Fields<'_>,
    nested: Option<&Fields<'_>>,
    inner: &str,
    outer: &str,
) -> Result<Option<f64>> {
    let given = nested.map_or(Ok(None), |nested| nested.opt_number(inner))?;
    let top = f.opt_number(outer)?;
    match (given, top) {
        (Some(a), Some(b)) if a.total_cmp(&b).is_ne() => {
            let reason = format!("is {b}, but {a} in the rope parameters");
            Err(error(outer, &reason))
        }
        _ => Ok(given.or(top)),
    }
}
