//! Data sets end to end.

use super::{Dataset, Names, Sample, with_seed};
use crate::error::{DataError, Error, Result};
use std::sync::Arc;

/// The samples of several data sets, one set after the other.
#[derive(Debug, Clone)]
pub struct Joined(Vec<Arc<dyn Dataset>>);

impl Joined {
    /// Joins data sets whose samples have the same tensors.
    ///
    /// # Errors
    ///
    /// [`DataError::OutOfRange`] without a data set.
    pub fn new(parts: impl IntoIterator<Item = Arc<dyn Dataset>>) -> Result<Self> {
        let parts: Vec<_> = parts.into_iter().collect();
        if parts.is_empty() {
            let error = DataError::out_of_range("joined data sets", 0, "at least 1");
            return Err(Error::Data(error));
        }
        Ok(Self(parts))
    }

    /// Joins data sets; one alone stays as it is.
    pub(super) fn of(mut parts: Vec<Arc<dyn Dataset>>) -> Arc<dyn Dataset> {
        match parts.len() {
            1 => parts.remove(0),
            _ => Arc::new(Self(parts)),
        }
    }

    /// The set with a sample, and the sample's place there.
    fn find(&self, mut index: usize) -> (&dyn Dataset, usize) {
        let mut parts = self.0.iter().peekable();
        while let Some(part) = parts.next() {
            // An index beyond all samples is the last set's to refuse.
            if index < part.len() || parts.peek().is_none() {
                return (&**part, index);
            }
            index -= part.len();
        }
        unreachable!("there is a set")
    }
}

impl Dataset for Joined {
    fn len(&self) -> usize {
        let parts = self.0.iter().map(|part| part.len());
        parts.fold(0, usize::saturating_add)
    }

    fn is_stream(&self) -> bool {
        self.0.iter().any(|part| part.is_stream())
    }

    fn reseeded(&self, seed: u64) -> Option<Arc<dyn Dataset>> {
        let mut parts = self.0.iter();
        parts.find_map(|part| part.reseeded(seed))?;
        let parts = self.0.iter().map(|part| with_seed(part, seed));
        Some(Arc::new(Self(parts.collect())))
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let (part, index) = self.find(index);
        part.get(index)
    }

    fn get_in_epoch(&self, index: usize, epoch: u64) -> Result<Sample> {
        let (part, index) = self.find(index);
        part.get_in_epoch(index, epoch)
    }

    fn name(&self, index: usize) -> Option<String> {
        let (part, index) = self.find(index);
        part.name(index)
    }

    fn mask(&self, index: usize) -> Result<Option<Vec<i64>>> {
        let (part, index) = self.find(index);
        part.mask(index)
    }

    fn reads_tensors(&self) -> bool {
        self.0.iter().all(|part| part.reads_tensors())
    }

    fn get_tensors(&self, index: usize, epoch: u64, names: &Names) -> Result<Option<Sample>> {
        let (part, index) = self.find(index);
        part.get_tensors(index, epoch, names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{TokenDataset, Tokens};

    #[test]
    fn samples_follow_each_other() {
        let part = |range: std::ops::Range<u32>| {
            let tokens: Tokens = range.collect();
            Arc::new(TokenDataset::new(tokens, 2, "training").unwrap()) as Arc<dyn Dataset>
        };
        let (first, second) = (part(0..9), part(50..55));
        let joined = Joined::new([Arc::clone(&first), Arc::clone(&second)]).unwrap();
        let apart = |set: &Arc<dyn Dataset>| {
            let set = Arc::clone(set);
            (0..set.len()).map(move |index| set.get(index).unwrap())
        };
        let all: Vec<_> = apart(&first).chain(apart(&second)).collect();
        let found: Vec<_> = (0..joined.len())
            .map(|index| joined.get(index).unwrap())
            .collect();
        assert_eq!(found, all);
        assert!(Joined::new([]).is_err());
    }
}
