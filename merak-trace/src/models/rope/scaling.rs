//! How the frequencies of a model are stretched over a longer context than it was first trained
//! for.

use super::Fields;
use crate::{Result, models::fields::error};
use std::f64::consts::PI;

/// A scaling of rotary positions, as `rope_type` names it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scaling {
    /// As trained.
    None,
    /// All frequencies divided by a factor ([Chen et al. 2023](https://arxiv.org/abs/2306.15595)).
    Linear { factor: f64 },
    /// A base that grows with sequences beyond the longest of training, "dynamic NTK".
    Dynamic { factor: f64 },
    /// Long wavelengths divided, short ones kept.
    Llama3(Llama3),
    /// [`YaRN`](https://arxiv.org/abs/2309.00071).
    Yarn {
        ramp: Ramp,
        /// Factor of sines and cosines, section 3.4 as `transformers` has it.
        attention: f64,
    },
    /// A divisor for each pair, and another for sequences longer than those of the first training
    /// ([`LongRoPE`](https://arxiv.org/abs/2402.13753), section 3; Phi-3).
    LongRope {
        short: Vec<f64>,
        long: Vec<f64>,
        original: usize,
        /// Factor of sines and cosines, for short sequences too.
        attention: f64,
    },
}

/// Long wavelengths divided, short ones kept, those between interpolated
/// ([Llama 3](https://arxiv.org/abs/2407.21783), section 3.4.2).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Llama3 {
    factor: f64,
    low: f64,
    high: f64,
    original: f64,
}

impl Llama3 {
    /// The scaled frequency.
    pub(super) fn scaled(&self, plain: f64) -> f64 {
        let wavelength = 2.0 * PI / plain;
        if wavelength < self.original / self.high {
            plain
        } else if wavelength > self.original / self.low {
            plain / self.factor
        } else {
            let kept = (self.original / wavelength - self.low) / (self.high - self.low);
            (1.0 - kept) * plain / self.factor + kept * plain
        }
    }
}

/// A ramp over the pairs from kept to divided frequencies
/// ([`YaRN`](https://arxiv.org/abs/2309.00071), section 3.2).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Ramp {
    factor: f64,
    fast: f64,
    slow: f64,
    truncate: bool,
    original: f64,
}

impl Ramp {
    /// The scaled frequency of a pair.
    pub(super) fn scaled(&self, pair: usize, plain: f64, rotated: usize, theta: f64) -> f64 {
        let (from, to) = self.ends(rotated as f64, theta);
        let divided = ((pair as f64 - from) / (to - from)).clamp(0.0, 1.0);
        divided * plain / self.factor + (1.0 - divided) * plain
    }

    /// The pairs between which frequencies go from kept to divided: those that turn `fast` and
    /// `slow` times over the original context.
    fn ends(&self, dim: f64, theta: f64) -> (f64, f64) {
        let pair =
            |turns: f64| dim * (self.original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut from, mut to) = (pair(self.fast), pair(self.slow));
        if self.truncate {
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
    /// Reads the nested object and related fields of the top level.
    pub(super) fn from_fields(
        f: &Fields<'_>,
        nested: &Fields<'_>,
        rotated: usize,
        max_seq: usize,
    ) -> Result<Self> {
        let kind = nested.string_or(nested.renamed("rope_type", "type")?, "default")?;
        // transformers prefers the top level, and may write its default into the nested object.
        let original = || -> Result<f64> {
            let (outer, inner) = (f.opt_number(ORIGINAL)?, nested.opt_number(ORIGINAL)?);
            let original = outer.or(inner).unwrap_or(max_seq as f64);
            if original < 1.0 {
                return Err(error(
                    ORIGINAL,
                    &format!("is {original}, expected at least 1"),
                ));
            }
            Ok(original)
        };
        if ["default", "linear", "dynamic"].contains(&&*kind) {
            // transformers uses the model's longest sequence regardless.
            nested.ignore(&[ORIGINAL]);
        }
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
            "llama3" => Self::Llama3(llama3(nested, original()?)?),
            "yarn" => yarn(nested, original()?, max_seq)?,
            "longrope" => long_rope(nested, original()?, rotated, max_seq)?,
            _ => {
                let reason = format!(
                    "is \"{kind}\", expected default, linear, dynamic, llama3, yarn or longrope"
                );
                return Err(nested.error("rope_type", &reason));
            }
        };
        nested.finish()?;
        Ok(scaling)
    }
}

/// The length of the sequences of the first training.
const ORIGINAL: &str = "original_max_position_embeddings";

fn llama3(nested: &Fields<'_>, original: f64) -> Result<Llama3> {
    let names = ("low_freq_factor", "high_freq_factor");
    let (low, high) = (nested.positive(names.0)?, nested.positive(names.1)?);
    if low >= high {
        let reason = format!("is {high}, expected more than {}, {low}", names.0);
        return Err(nested.error(names.1, &reason));
    }
    Ok(Llama3 {
        factor: factor(nested)?,
        low,
        high,
        original,
    })
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
    let ramp = Ramp {
        factor,
        fast: nested.opt_positive("beta_fast")?.unwrap_or(32.0),
        slow: nested.opt_positive("beta_slow")?.unwrap_or(1.0),
        truncate: nested.flag_or("truncate", true)?,
        original,
    };
    Ok(Scaling::Yarn { ramp, attention })
}

fn long_rope(
    nested: &Fields<'_>,
    original: f64,
    rotated: usize,
    max_seq: usize,
) -> Result<Scaling> {
    let divisors = |name: &str| {
        let found = nested.positives(name)?;
        let pairs = rotated.div_ceil(2);
        if found.len() != pairs {
            let reason = format!(
                "has {} entries, but a head has {pairs} rotated pairs",
                found.len()
            );
            return Err(nested.error(name, &reason));
        }
        Ok(found)
    };
    let (short, long) = (divisors("short_factor")?, divisors("long_factor")?);
    let factor = nested.opt_positive("factor")?;
    let factor = factor.unwrap_or(max_seq as f64 / original);
    let attention = match nested.opt_positive("attention_factor")? {
        Some(given) => given,
        None if factor <= 1.0 => 1.0,
        None if original <= 1.0 => {
            let reason = format!("is {original}, expected more than 1");
            return Err(error(ORIGINAL, &reason));
        }
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    Ok(Scaling::LongRope {
        short,
        long,
        original: original as usize,
        attention,
    })
}

fn factor(nested: &Fields<'_>) -> Result<f64> {
    nested.positive("factor")
}
