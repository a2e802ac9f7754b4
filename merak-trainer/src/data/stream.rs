//! Data whose samples nobody has counted.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    dataset::{Dataset, Sample},
    rng::{below, hash},
};
use crate::error::{DataError, Error, Result};

/// Keeps these draws apart from those of other data sets with the same seed.
const DRAWS: u64 = 0x7374_7265_616D_0000;

/// The samples of one pass.
pub type Samples = Box<dyn Iterator<Item = Result<Sample>> + Send>;

/// Samples that come one after the other, and whose number shows at the end.
pub trait SampleStream: Send + Sync + fmt::Debug {
    /// Begins pass `pass` over the samples, counted from 0. The same pass gives the same samples in
    /// the same order whenever it begins: each process reads the stream for itself, and a resumed
    /// run reads it once more.
    ///
    /// # Errors
    ///
    /// When nothing can be read.
    fn samples(&self, pass: u64) -> Result<Samples>;

    /// The same samples by another seed, as [`Dataset::reseeded`].
    fn reseeded(&self, seed: u64) -> Option<Arc<dyn SampleStream>> {
        let _ = seed;
        None
    }
}

/// A data set of a stream: sample i is the i-th of all passes, one after the other.
///
/// Training takes the samples in their order, and a run of it needs `max_steps`. Ranks ask for
/// samples that lie near each other; the last ones stay in memory for the slower of them, and a
/// sample further back is read once more from the start of the stream. So is the place at which a
/// resumed run goes on.
///
/// # Examples
///
/// ```
/// use std::{collections::BTreeMap, sync::Arc};
/// use merak_trainer::data::{Dataset, SampleStream, SampleTensor, Samples, StreamDataset};
///
/// /// Five samples in each pass.
/// #[derive(Debug)]
/// struct Counting;
///
/// impl SampleStream for Counting {
///     fn samples(&self, pass: u64) -> merak_trainer::Result<Samples> {
///         let sample = move |number| {
///             let values = SampleTensor::vector(vec![pass as i64, number]);
///             Ok(BTreeMap::from([("input_ids".to_owned(), values)]))
///         };
///         Ok(Box::new((0..5).map(sample)))
///     }
/// }
///
/// let data = StreamDataset::new(Arc::new(Counting)).shuffled(3, 42);
/// assert!(data.is_stream());
/// assert_eq!(data.get(7)?["input_ids"].ints()[0], 1);
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug)]
pub struct StreamDataset {
    stream: Arc<dyn SampleStream>,
    /// Samples among which the next one is drawn.
    shuffle_buffer: usize,
    seed: u64,
    /// Samples that stay in memory once they are given.
    window: usize,
    reader: Mutex<Reader>,
}

/// How far a stream is read.
#[derive(Default)]
struct Reader {
    /// The rest of the pass; none at its end.
    samples: Option<Samples>,
    /// Passes that were begun.
    passes: u64,
    /// Samples that were read and not given yet.
    waiting: Vec<Sample>,
    /// The last samples that were given.
    given: VecDeque<Sample>,
    /// How many were given.
    next: usize,
}

impl StreamDataset {
    /// The samples of a stream, in their order.
    pub fn new(stream: Arc<dyn SampleStream>) -> Self {
        Self {
            stream,
            shuffle_buffer: 1,
            seed: 0,
            window: 1024,
            reader: Mutex::default(),
        }
    }

    /// This stream, each sample drawn from the next `buffer` of its pass that were not drawn yet.
    /// The draws depend on the seed alone.
    #[must_use]
    pub fn shuffled(self, buffer: usize, seed: u64) -> Self {
        Self {
            shuffle_buffer: buffer.max(1),
            seed,
            ..self
        }
    }

    /// This stream with `window` samples, instead of 1024, that stay in memory for slower ranks.
    /// Ranks that are threads need the samples of two steps, and those that workers read ahead;
    /// with fewer, they read the stream again and again.
    #[must_use]
    pub fn with_window(self, window: usize) -> Self {
        Self {
            window: window.max(1),
            ..self
        }
    }

    /// Gives one sample more.
    fn advance(&self, reader: &mut Reader) -> Result<()> {
        let sample = loop {
            if let Some(sample) = self.draw(reader)? {
                break sample;
            }
            let samples = self.stream.samples(reader.passes)?;
            reader.samples = Some(samples);
            reader.passes += 1;
            self.fill(reader)?;
            if reader.waiting.is_empty() {
                return Err(Error::Data(DataError::EmptyStream));
            }
        };
        if reader.given.len() == self.window {
            reader.given.pop_front();
        }
        reader.given.push_back(sample);
        reader.next += 1;
        Ok(())
    }

    /// The next sample of the pass, if there is one.
    fn draw(&self, reader: &mut Reader) -> Result<Option<Sample>> {
        self.fill(reader)?;
        if reader.waiting.is_empty() {
            return Ok(None);
        }
        let bits = hash(&[DRAWS, self.seed, reader.next as u64]);
        let drawn = below(bits, reader.waiting.len());
        Ok(Some(reader.waiting.swap_remove(drawn)))
    }

    /// Reads as many samples of the pass as may wait.
    fn fill(&self, reader: &mut Reader) -> Result<()> {
        while reader.waiting.len() < self.shuffle_buffer
            && let Some(samples) = &mut reader.samples
        {
            match samples.next() {
                Some(sample) => reader.waiting.push(sample?),
                None => reader.samples = None,
            }
        }
        Ok(())
    }
}

impl Dataset for StreamDataset {
    fn len(&self) -> usize {
        usize::MAX
    }

    fn is_stream(&self) -> bool {
        true
    }

    fn reseeded(&self, seed: u64) -> Option<Arc<dyn Dataset>> {
        let stream = self.stream.reseeded(seed);
        if stream.is_none() && (seed == self.seed || self.shuffle_buffer == 1) {
            return None;
        }
        let data = Self::new(stream.unwrap_or_else(|| Arc::clone(&self.stream)));
        let data = data.shuffled(self.shuffle_buffer, seed);
        Some(Arc::new(data.with_window(self.window)))
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let mut reader = self.reader.lock().unwrap_or_else(|poisoned| {
            // A panic left the stream at an unknown place.
            let mut reader = PoisonError::into_inner(poisoned);
            *reader = Reader::default();
            reader
        });
        if index + reader.given.len() < reader.next {
            *reader = Reader::default();
        }
        while reader.next <= index {
            if let Err(error) = self.advance(&mut reader) {
                // The next rank meets the error too, and no sample after it.
                *reader = Reader::default();
                return Err(error);
            }
        }
        let first = reader.next - reader.given.len();
        Ok(reader.given[index - first].clone())
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("passes", &self.passes)
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::{super::sample_tensor::SampleTensor, *};

    /// Counts from 0 in each pass; counts the reads.
    #[derive(Debug, Default)]
    struct Numbers {
        len: usize,
        fails_at: Option<usize>,
        reads: Arc<AtomicUsize>,
    }

    impl SampleStream for Numbers {
        fn samples(&self, pass: u64) -> Result<Samples> {
            let (reads, fails_at) = (Arc::clone(&self.reads), self.fails_at);
            Ok(Box::new((0..self.len).map(move |number| {
                reads.fetch_add(1, Ordering::Relaxed);
                if fails_at == Some(number) {
                    return Err(Error::Data(DataError::DataThread));
                }
                let values =
                    SampleTensor::vector([pass, number as u64].map(u64::cast_signed).to_vec());
                Ok(Sample::from([("x".to_owned(), values)]))
            })))
        }
    }

    fn stream(len: usize) -> StreamDataset {
        StreamDataset::new(Arc::new(Numbers {
            len,
            ..Numbers::default()
        }))
    }

    fn at(data: &StreamDataset, index: usize) -> (usize, usize) {
        let sample = data.get(index).unwrap();
        let value = |at: usize| usize::try_from(sample["x"].ints()[at]).unwrap();
        (value(0), value(1))
    }

    #[test]
    fn samples_come_in_their_order_and_passes_after_each_other() {
        let data = stream(3);
        let found: Vec<_> = (0..7).map(|index| at(&data, index)).collect();
        let pass = |pass: usize| (0..3).map(move |number| (pass, number));
        let expected: Vec<_> = pass(0).chain(pass(1)).chain(pass(2)).take(7).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_shuffled_pass_has_each_sample_once_in_an_order_of_its_own() {
        let data = stream(50).shuffled(8, 3);
        let pass = |number: usize| -> Vec<_> {
            (50 * number..50 * (number + 1))
                .map(|index| at(&data, index))
                .collect()
        };
        let (first, second) = (pass(0), pass(1));
        for (number, pass) in [&first, &second].into_iter().enumerate() {
            assert!(pass.iter().all(|sample| sample.0 == number));
            let all: BTreeSet<_> = pass.iter().map(|sample| sample.1).collect();
            assert_eq!(all.len(), 50);
        }
        let orders = [&first, &second].map(|pass| pass.iter().map(|s| s.1).collect::<Vec<_>>());
        assert_ne!(orders[0], orders[1]);
        assert_ne!(orders[0], (0..50).collect::<Vec<_>>());
        // A sample comes at most a buffer early.
        assert!((0..50).all(|place| orders[0][place] < place + 8));
        let other = stream(50).shuffled(8, 4);
        assert_ne!(
            at(&other, 0).1 * 50 + at(&other, 1).1,
            orders[0][0] * 50 + orders[0][1]
        );
    }

    #[test]
    fn samples_are_the_same_in_whatever_order_ranks_ask() {
        let ahead = stream(11).shuffled(4, 1).with_window(6);
        let expected: Vec<_> = (0..40).map(|index| at(&ahead, index)).collect();
        for window in [1, 2, 64] {
            let data = stream(11).shuffled(4, 1).with_window(window);
            for index in [5, 0, 3, 39, 38, 2, 30, 39] {
                assert_eq!(
                    at(&data, index),
                    expected[index],
                    "window {window}, sample {index}"
                );
            }
        }
    }

    #[test]
    fn samples_near_each_other_are_read_once() {
        let reads = Arc::default();
        let numbers = Numbers {
            len: 100,
            reads: Arc::clone(&reads),
            ..Numbers::default()
        };
        let data = StreamDataset::new(Arc::new(numbers)).with_window(4);
        for index in [1, 0, 3, 2, 5, 2, 4] {
            assert_eq!(at(&data, index).1, index);
        }
        assert_eq!(reads.load(Ordering::Relaxed), 6);
    }

    #[test]
    fn an_error_is_met_by_each_rank_that_comes_to_it() {
        let data = StreamDataset::new(Arc::new(Numbers {
            len: 9,
            fails_at: Some(4),
            ..Numbers::default()
        }));
        assert_eq!(at(&data, 3), (0, 3));
        for _ in 0..2 {
            data.get(5).unwrap_err();
            data.get(4).unwrap_err();
        }
        assert_eq!(at(&data, 2), (0, 2));
    }

    #[test]
    fn a_stream_without_samples_is_refused() {
        insta::assert_snapshot!(stream(0).get(0).unwrap_err(), @"the stream of samples ends before its first one");
    }
}
