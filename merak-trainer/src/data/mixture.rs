//! Several data sets as one.

use std::sync::Arc;

use super::{
    dataset::{Dataset, Names, Sample, with_seed},
    permutation::Permutation,
    rng::hash,
};
use crate::error::{DataError, Error, Result};

/// Keeps these draws apart from those of other data sets with the same seed.
const STREAM: u64 = 0x6D69_7874_7572_6500;

/// Several data sets, each with its share of the samples.
///
/// An epoch has as many samples as all parts together. Part p with weight `w_p` has a share of
/// N `w_p` / Σw of them, rounded to whole samples. It gives its samples in passes, each a
/// permutation from (seed, p, pass) that takes each sample once; an epoch goes on where the one
/// before it stopped. So a small part with a large weight is repeated, and of a large part with a
/// small weight no sample is left out for ever.
///
/// A sample is a function of (seed, epoch, index) alone, as for every data set: the same on each
/// topology, and after a resume. [`TrainingOrder`](super::TrainingOrder) interleaves the parts.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use merak_trainer::data::{Dataset, MixtureDataset, TokenDataset};
///
/// let part = |first| TokenDataset::new((first..first + 41).collect(), 4, "training");
/// let [many, few]: [Arc<dyn Dataset>; 2] = [Arc::new(part(0)?), Arc::new(part(1000)?)];
/// let parts = vec![(many, 3.0), (few, 1.0)];
/// let data = MixtureDataset::new(parts, 42)?;
/// let is_first = |index| Ok(data.get(index)?["input_ids"].ints()[0] < 1000);
/// let first: Vec<bool> = (0..20).map(is_first).collect::<Result<_, merak_trainer::Error>>()?;
/// assert_eq!(first.iter().filter(|first| **first).count(), 15);
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MixtureDataset {
    parts: Vec<Part>,
    seed: u64,
    len: usize,
}

#[derive(Debug, Clone)]
struct Part {
    data: Arc<dyn Dataset>,
    /// Samples of an epoch.
    share: usize,
}

impl MixtureDataset {
    /// Mixes data sets by their weights.
    ///
    /// # Errors
    ///
    /// [`DataError::OutOfRange`] without parts; [`DataError::NoShare`] for a part without samples,
    /// one whose weight is not a finite number of more than 0, and one whose weight is so small
    /// that an epoch takes no sample of it; [`DataError::Endless`] for a stream.
    pub fn new(parts: Vec<(Arc<dyn Dataset>, f64)>, seed: u64) -> Result<Self> {
        if parts.iter().any(|(data, _)| data.is_stream()) {
            let purpose = "a mixture";
            return Err(Error::Data(DataError::Endless { purpose }));
        }
        if parts.is_empty() {
            let error = DataError::out_of_range("parts of a mixture", 0, "at least 1");
            return Err(Error::Data(error));
        }
        let len = parts.iter().map(|(data, _)| data.len()).sum();
        let weights: Vec<_> = parts.iter().map(|(_, weight)| *weight).collect();
        let shares = shares(&weights, len);
        for (number, ((data, weight), share)) in parts.iter().zip(&shares).enumerate() {
            if data.is_empty() || !weight.is_finite() || *weight <= 0.0 || *share == 0 {
                return Err(Error::Data(DataError::NoShare {
                    number: number + 1,
                    weight: *weight,
                    samples: data.len(),
                    all: len,
                }));
            }
        }
        let parts = parts.into_iter().zip(shares);
        let parts = parts.map(|((data, _), share)| Part { data, share });
        Ok(Self {
            parts: parts.collect(),
            seed,
            len,
        })
    }
}

/// `len` divided by weights: rounded down, then one more for the largest rests, the earlier first.
fn shares(weights: &[f64], len: usize) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<_> = weights
        .iter()
        .map(|weight| len as f64 * (weight / sum))
        .collect();
    let mut shares: Vec<_> = exact.iter().map(|share| share.floor() as usize).collect();
    let mut by_rest: Vec<_> = (0..weights.len()).collect();
    by_rest.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let missing = len.saturating_sub(shares.iter().sum());
    for &part in by_rest.iter().cycle().take(missing) {
        shares[part] += 1;
    }
    shares
}

impl Dataset for MixtureDataset {
    fn len(&self) -> usize {
        self.len
    }

    fn reseeded(&self, seed: u64) -> Option<Arc<dyn Dataset>> {
        let draws_by_it = |part: &Part| part.data.reseeded(seed).is_none();
        if seed == self.seed && self.parts.iter().all(draws_by_it) {
            return None;
        }
        let reseeded = |part: &Part| Part {
            data: with_seed(&part.data, seed),
            ..*part
        };
        Some(Arc::new(Self {
            parts: self.parts.iter().map(reseeded).collect(),
            seed,
            ..*self
        }))
    }

    fn get(&self, index: usize) -> Result<Sample> {
        self.get_in_epoch(index, 0)
    }

    fn get_in_epoch(&self, index: usize, epoch: u64) -> Result<Sample> {
        let (data, sample, pass) = self.find(index, epoch);
        data.get_in_epoch(sample, pass)
    }

    fn mask(&self, index: usize) -> Result<Option<Vec<i64>>> {
        let (data, sample, _) = self.find(index, 0);
        data.mask(sample)
    }

    fn reads_tensors(&self) -> bool {
        self.parts.iter().all(|part| part.data.reads_tensors())
    }

    fn get_tensors(&self, index: usize, epoch: u64, names: &Names) -> Result<Option<Sample>> {
        let (data, sample, pass) = self.find(index, epoch);
        data.get_tensors(sample, pass, names)
    }
}

impl MixtureDataset {
    /// The part with a sample of an epoch, and the sample's place and pass there.
    fn find(&self, index: usize, epoch: u64) -> (&dyn Dataset, usize, u64) {
        let mut place = index;
        for (number, part) in self.parts.iter().enumerate() {
            if place >= part.share {
                place -= part.share;
                continue;
            }
            let len = part.data.len() as u128;
            let running = u128::from(epoch) * part.share as u128 + place as u128;
            let (pass, place) = ((running / len) as u64, (running % len) as usize);
            let seed = hash(&[STREAM, self.seed, number as u64]);
            let order = Permutation::new(part.data.len(), seed, pass);
            let sample = order.get(place).expect("a place below the length");
            return (&*part.data, sample, pass);
        }
        unreachable!("index {index} of {} samples", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::TokenDataset;

    fn part(first: u32, samples: u32) -> Arc<dyn Dataset> {
        let tokens = (first..=first + samples).collect();
        Arc::new(TokenDataset::new(tokens, 1, "training").unwrap())
    }

    fn epoch(data: &MixtureDataset, epoch: u64) -> Vec<i64> {
        let first = |index| data.get_in_epoch(index, epoch).unwrap()["input_ids"].ints()[0];
        (0..data.len()).map(first).collect()
    }

    #[test]
    fn an_epoch_has_the_shares_and_the_next_one_goes_on() {
        let data = MixtureDataset::new(vec![(part(0, 30), 1.0), (part(1000, 10), 3.0)], 7).unwrap();
        let epochs: Vec<_> = (0..3).map(|number| epoch(&data, number)).collect();
        for epoch in &epochs {
            assert_eq!(epoch.iter().filter(|id| **id < 1000).count(), 10);
            // The small part is repeated three times.
            for sample in 1000..1010 {
                assert_eq!(epoch.iter().filter(|id| **id == sample).count(), 3);
            }
        }
        // In three epochs each sample of the large part was used once.
        let mut first: Vec<_> = epochs
            .concat()
            .into_iter()
            .filter(|id| *id < 1000)
            .collect();
        first.sort_unstable();
        assert_eq!(first, (0..30).collect::<Vec<_>>());
        assert_eq!(epoch(&data, 1), epochs[1]);
        let other =
            MixtureDataset::new(vec![(part(0, 30), 1.0), (part(1000, 10), 3.0)], 8).unwrap();
        assert_ne!(epoch(&other, 0), epochs[0]);
    }

    #[test]
    fn shares_sum_to_the_length() {
        assert_eq!(shares(&[1.0, 1.0, 1.0], 10), [4, 3, 3]);
        assert_eq!(shares(&[0.7, 0.3], 10), [7, 3]);
        assert_eq!(shares(&[1e300, 1e-300], 10), [10, 0]);
    }

    #[test]
    fn a_part_without_a_share_is_refused() {
        let refuse = |weight| {
            let parts = vec![(part(0, 8), 1.0), (part(9, 2), weight)];
            MixtureDataset::new(parts, 1).unwrap_err().to_string()
        };
        let expected = "part 2 of the mixture has 2 samples and the weight 0, which makes none of the 10 samples of an epoch: \
             give it more data or a larger weight";
        assert_eq!(refuse(0.0), expected);
        assert!(refuse(f64::INFINITY).contains("the weight inf, which makes none"));
        assert!(MixtureDataset::new(Vec::new(), 1).is_err());
        assert!(refuse(1e-9).contains("the weight 0.000000001, which makes none"));
    }
}
