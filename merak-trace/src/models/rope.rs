//! Rotary positions as configurations describe them, and their scalings to longer contexts.

use super::fields::{Fields, error};
use crate::{Result, op::Rope};
use std::f64::consts::PI;

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

/// How the frequencies of a model are stretched over a longer context than it was first trained for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scaling {
    /// As trained.
    None,
    /// All frequencies divided by a factor ([Chen et al. 2023](https://arxiv.org/abs/2306.15595)).
    Linear { factor: f64 },
    /// A base that grows with sequences beyond the longest of training, "dynamic NTK".
    Dynamic { factor: f64 },
    /// Long wavelengths divided, short ones kept, those between interpolated
    /// ([Llama 3](https://arxiv.org/abs/2407.21783), section 3.4.2).
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    /// [`YaRN`](https://arxiv.org/abs/2309.00071), section 3.2: a ramp over the dimensions from kept to divided.
    Yarn {
        factor: f64,
        fast: f64,
        slow: f64,
        truncate: bool,
        original: f64,
        /// Factor of sines and cosines, section 3.4 as `transformers` has it.
        attention: f64,
    },
}

/// Where a family keeps what others keep in `rope_theta` and `partial_rotary_factor`.
#[derive(Debug, Clone, Copy)]
pub(super) struct RotaryFields {
    /// Name of the base.
    pub(super) theta: &'static str,
    /// Name and default of the rotated share of a head, where the family rotates less than all.
    pub(super) share: Option<(&'static str, f64)>,
}

impl Rotary {
    /// Reads `rope_parameters` of transformers 5, or `rope_scaling` and the top level of transformers 4.
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

    /// The operation that turns the heads of sequences of length `seq`.
    pub(super) fn op(&self, seq: usize) -> Rope {
        let pairs = self.rotated.div_ceil(2);
        let frequency = |pair: usize| {
            let plain = self.base(seq).powf(-self.exponent(pair));
            self.scaled(pair, plain) as f32
        };
        Rope {
            head_dim: self.head_dim,
            inv_freq: (0..pairs).map(frequency).collect(),
            scale: match self.scaling {
                Scaling::Yarn { attention, .. } => attention,
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

    fn scaled(&self, pair: usize, plain: f64) -> f64 {
        match self.scaling {
            Scaling::None | Scaling::Dynamic { .. } => plain,
            Scaling::Linear { factor } => plain / factor,
            Scaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                let wavelength = 2.0 * PI / plain;
                if wavelength < original / high {
                    plain
                } else if wavelength > original / low {
                    plain / factor
                } else {
                    let kept = (original / wavelength - low) / (high - low);
                    (1.0 - kept) * plain / factor + kept * plain
                }
            }
            Scaling::Yarn {
                factor,
                fast,
                slow,
                truncate,
                original,
                ..
            } => {
                let (from, to) = self.ramp(fast, slow, truncate, original);
                let divided = ((pair as f64 - from) / (to - from)).clamp(0.0, 1.0);
                divided * plain / factor + (1.0 - divided) * plain
            }
        }
    }

    /// The pairs between which `YaRN` goes from kept to divided frequencies: those that turn `fast` and `slow`
    /// times over the original context.
    fn ramp(&self, fast: f64, slow: f64, truncate: bool, original: f64) -> (f64, f64) {
        let dim = self.rotated as f64;
        let pair =
            |turns: f64| dim * (original / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (mut from, mut to) = (pair(fast), pair(slow));
        if truncate {
            (from, to) = (from.floor(), to.ceil());
        }
        (from, to) = (from.max(0.0), to.min(dim - 1.0));
        if from.total_cmp(&to).is_eq() {
            to += 0.001;
        }
        (from, to)
    }
}

impl Scaling {
    fn from_fields(
        f: &Fields<'_>,
        nested: &Fields<'_>,
        rotated: usize,
        max_seq: usize,
    ) -> Result<Self> {
        let kind = nested.string_or(nested.renamed("rope_type", "type")?, "default")?;
        let original = || -> Result<f64> {
            let name = "original_max_position_embeddings";
            Ok(agreed(f, Some(nested), name, name)?.unwrap_or(max_seq as f64))
        };
        let scaling = match kind.as_str() {
            "default" => Self::None,
            "linear" => Self::Linear {
                factor: factor(nested)?,
            },
            "dynamic" => {
                let factor = factor(nested)?;
                if rotated < 3 || factor < 1.0 {
                    let reason = "is dynamic, which needs a factor of at least 1 and more than one rotated pair";
                    return Err(nested.error("rope_type", reason));
                }
                Self::Dynamic { factor }
            }
            "llama3" => {
                let (low, high) = ("low_freq_factor", "high_freq_factor");
                let scaling = (nested.positive(low)?, nested.positive(high)?);
                if scaling.0 >= scaling.1 {
                    let reason =
                        format!("is {}, expected more than {low}, {}", scaling.1, scaling.0);
                    return Err(nested.error(high, &reason));
                }
                Self::Llama3 {
                    factor: factor(nested)?,
                    low: scaling.0,
                    high: scaling.1,
                    original: original()?,
                }
            }
            "yarn" => yarn(nested, original()?, max_seq)?,
            _ => {
                let reason =
                    format!("is \"{kind}\", expected default, linear, dynamic, llama3 or yarn");
                return Err(nested.error("rope_type", &reason));
            }
        };
        nested.finish()?;
        Ok(scaling)
    }
}

fn yarn(nested: &Fields<'_>, original: f64, max_seq: usize) -> Result<Scaling> {
    let factor = nested
        .opt_positive("factor")?
        .unwrap_or(max_seq as f64 / original);
    let magnitude = |scale: f64| match factor {
        factor if factor <= 1.0 => 1.0,
        factor => 0.1 * scale * factor.ln() + 1.0,
    };
    let scales = (
        nested.opt_positive("mscale")?,
        nested.opt_positive("mscale_all_dim")?,
    );
    let attention = match (nested.opt_positive("attention_factor")?, scales) {
        (Some(given), _) => given,
        (None, (Some(scale), Some(all))) => magnitude(scale) / magnitude(all),
        (None, _) => magnitude(1.0),
    };
    Ok(Scaling::Yarn {
        factor,
        fast: nested.opt_positive("beta_fast")?.unwrap_or(32.0),
        slow: nested.opt_positive("beta_slow")?.unwrap_or(1.0),
        truncate: nested.flag_or("truncate", true)?,
        original,
        attention,
    })
}

fn factor(nested: &Fields<'_>) -> Result<f64> {
    nested.positive("factor")
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
