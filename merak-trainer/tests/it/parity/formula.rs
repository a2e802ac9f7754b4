//! Weights and data that `goldens/families/make.py` computes too.

use merak_trainer::{
    Result,
    data::{BatchShape, Dataset, IGNORED_LABEL, LABELS, Sample, SampleTensor, TrainingOrder},
};

/// Tokens of the models.
const VOCAB: usize = 31;

/// `len` numbers in [-1, 1): `SplitMix64` from the FNV-1a hash of the name.
fn uniform(name: &str, len: usize) -> impl Iterator<Item = f64> {
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
pub(crate) fn weight(name: &str, len: usize) -> Vec<f32> {
    let is_norm =
        name.ends_with("weight") && (name.to_lowercase().contains("norm") || name.contains(".ln_"));
    let (shift, scale) = match (is_norm, name.ends_with("bias")) {
        (true, _) => (1.0, 0.1),
        (_, true) => (0.0, 0.1),
        _ => (0.0, 0.3),
    };
    uniform(name, len)
        .map(|u| (shift + scale * u) as f32)
        .collect()
}

/// The samples, placed so that the trainer takes them in the order of the formula.
#[derive(Debug)]
pub(super) struct Samples {
    seq: usize,
    pad: i64,
    /// Which sample of the formula stands at each index.
    places: Vec<usize>,
}

impl Samples {
    /// As many as the steps of one epoch need.
    pub(super) fn new(steps: usize, shape: BatchShape, seed: u64, seq: usize, pad: i64) -> Self {
        let len = steps * shape.global_batch();
        let order = TrainingOrder::new(len, shape, seed).expect("there are enough samples");
        let mut places = vec![0; len];
        for step in 0..steps {
            for microbatch in 0..shape.microbatches {
                let taken = order.microbatch(step, 0, microbatch);
                for (row, index) in taken.indices.into_iter().enumerate() {
                    places[index] = taken.first_position + row;
                }
            }
        }
        Self { seq, pad, places }
    }

    /// Tokens and labels of a sample of the formula. Every third is padded at its end; padded
    /// positions and those before them have no label.
    pub(super) fn sample(&self, index: usize) -> (Vec<i64>, Vec<i64>) {
        let real = self.real(index);
        let token = |t: usize| {
            let token = (7 * index + (t + index) * t) % VOCAB;
            i64::try_from(token).expect("a small number")
        };
        let id = |t| if t < real { token(t) } else { self.pad };
        let label = |t| match t {
            1 if index.is_multiple_of(3) => IGNORED_LABEL,
            t if t + 1 < real => token(t + 1),
            _ => IGNORED_LABEL,
        };
        (
            (0..self.seq).map(id).collect(),
            (0..self.seq).map(label).collect(),
        )
    }

    /// Positions of a sample that are not padding.
    pub(super) fn real(&self, index: usize) -> usize {
        self.seq - if index % 3 == 1 { 2 } else { 0 }
    }
}

impl Dataset for Samples {
    fn len(&self) -> usize {
        self.places.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let (ids, labels) = self.sample(self.places[index]);
        Ok(Sample::from([
            ("input_ids".to_owned(), SampleTensor::vector(ids)),
            (LABELS.to_owned(), SampleTensor::vector(labels)),
        ]))
    }
}
