//! Weights and data that `goldens/families/make.py` computes too.

use serde_json::Value as Json;

/// Samples of a batch.
pub(super) const BATCH: usize = 3;

/// Lengths of the texts and of their translations.
pub(super) const SEQ: usize = 8;
pub(super) const TARGET: usize = 6;

const VOCAB: usize = 31;
const IGNORED: i64 = -100;

/// `len` numbers in [-1, 1): `SplitMix64` from the FNV-1a hash of the name.
pub(super) fn uniform(name: &str, len: usize) -> impl Iterator<Item = f64> + use<> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (1..=len as u64).map(move |index| {
        let x = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    })
}

/// The starting values of a parameter.
pub(super) fn weight(name: &str, len: usize) -> Vec<f64> {
    let is_norm =
        name.ends_with("weight") && (name.to_lowercase().contains("norm") || name.contains(".ln_"));
    let (shift, scale) = match (is_norm, name.ends_with("bias")) {
        (true, _) => (1.0, 0.1),
        (_, true) => (0.0, 0.1),
        _ => (0.0, 0.3),
    };
    uniform(name, len).map(|u| shift + scale * u).collect()
}

/// The inputs of a model, by its configuration.
pub(super) struct Samples<'a>(pub(super) &'a Json);

impl Samples<'_> {
    /// An input of one step, `numel` numbers in all.
    pub(super) fn batch(&self, input: &str, step: usize, numel: usize) -> Vec<f64> {
        let rows = step * BATCH..(step + 1) * BATCH;
        if input == "pixel_values" {
            let pixels = |index| uniform(&format!("image {index}"), numel / BATCH);
            return rows.flat_map(pixels).collect();
        }
        rows.flat_map(|index| self.integers(input, index))
            .map(|x| x as f64)
            .collect()
    }

    fn integers(&self, input: &str, index: usize) -> Vec<i64> {
        let real = SEQ - if index % 3 == 1 { 2 } else { 0 };
        let pad = self.0["pad_token_id"].as_i64().unwrap_or(0);
        let positions = |at: &dyn Fn(usize) -> i64| (0..SEQ).map(at).collect();
        if self.is_causal() {
            // Padding stands before the tokens.
            let first = SEQ - real;
            return match input {
                "input_ids" => {
                    positions(&|t| t.checked_sub(first).map_or(pad, |t| token(index, t)))
                }
                "attention_mask" => positions(&|t| i64::from(t >= first)),
                _ => positions(&|t| match t.checked_sub(first) {
                    Some(t) if t + 1 < real => token(index, t + 1),
                    _ => IGNORED,
                }),
            };
        }
        match input {
            "input_ids" => positions(&|t| if t < real { token(index, t) } else { pad }),
            "attention_mask" => positions(&|t| i64::from(t < real)),
            "token_type_ids" => positions(&|t| i64::from(t >= SEQ / 2)),
            "decoder_input_ids" => {
                let moved = translation(index).into_iter().take(TARGET - 1);
                let start = self.0["decoder_start_token_id"].as_i64();
                let moved = moved.map(|label| if label == IGNORED { pad } else { label });
                start.into_iter().chain(moved).collect()
            }
            _ => self.labels(index, real),
        }
    }

    fn is_causal(&self) -> bool {
        let architecture = self.0["architectures"][0].as_str().unwrap_or_default();
        architecture.ends_with("CausalLM") || architecture.ends_with("LMHeadModel")
    }

    fn labels(&self, index: usize, real: usize) -> Vec<i64> {
        let architecture = self.0["architectures"][0].to_string();
        if self.0["model_type"] == "t5" {
            return translation(index);
        }
        if architecture.contains("Classification") {
            let classes = self.0["id2label"]
                .as_object()
                .map_or(2, serde_json::Map::len);
            let label = i64::try_from(index * index % classes).expect("a small number");
            return vec![if index % 5 == 4 { IGNORED } else { label }];
        }
        let vocab = i64::try_from(VOCAB).expect("a small number");
        let sought = |t: usize| match t {
            t if (t + index).is_multiple_of(3) && t < real => (token(index, t) + 5) % vocab,
            _ => IGNORED,
        };
        (0..SEQ).map(sought).collect()
    }
}

fn token(index: usize, t: usize) -> i64 {
    i64::try_from((7 * index + (t + index) * t) % VOCAB).expect("a small number")
}

fn translation(index: usize) -> Vec<i64> {
    let label = |t: usize| match t {
        t if t + 1 < TARGET || !index.is_multiple_of(3) => token(index + 3, t),
        _ => IGNORED,
    };
    (0..TARGET).map(label).collect()
}
