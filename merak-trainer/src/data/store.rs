//! Where the tokens of a stream lie.

use std::{borrow::Cow, fmt, ops::Range, sync::Arc};

use crate::error::Result;

/// A stream of tokens that is read by range, so that it need not lie in memory.
pub trait TokenStore: Send + Sync + fmt::Debug {
    /// Number of tokens.
    fn len(&self) -> usize;

    /// Whether there are no tokens.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens of a range, which ends at `len()` at the latest.
    ///
    /// # Errors
    ///
    /// When they cannot be read.
    fn read(&self, range: Range<usize>) -> Result<Cow<'_, [u32]>>;

    /// Bytes of memory that the tokens take.
    fn held_bytes(&self) -> usize {
        0
    }
}

impl TokenStore for Vec<u32> {
    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn read(&self, range: Range<usize>) -> Result<Cow<'_, [u32]>> {
        Ok(Cow::Borrowed(&self[range]))
    }

    fn held_bytes(&self) -> usize {
        size_of_val(self.as_slice())
    }
}

/// A part of a stream of tokens. Clones share the store.
///
/// # Examples
///
/// ```
/// use merak_trainer::data::Tokens;
///
/// let [first, second] = (0..10).collect::<Tokens>().split_at(7);
/// assert_eq!((first.len(), second.len()), (7, 3));
/// assert_eq!(*second.read(1..3)?, [8, 9]);
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tokens {
    store: Arc<dyn TokenStore>,
    range: Range<usize>,
}

impl Tokens {
    /// All tokens of a store.
    pub fn new(store: Arc<dyn TokenStore>) -> Self {
        let range = 0..store.len();
        Self { store, range }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The tokens of a range of this part.
    ///
    /// # Errors
    ///
    /// When they cannot be read.
    ///
    /// # Panics
    ///
    /// When the range ends beyond the part.
    pub fn read(&self, range: Range<usize>) -> Result<Cow<'_, [u32]>> {
        assert!(
            range.end <= self.len(),
            "{range:?} of {} tokens",
            self.len()
        );
        let start = self.range.start;
        self.store.read(start + range.start..start + range.end)
    }

    /// The first `at` tokens, at most all, and the others.
    #[must_use]
    pub fn split_at(&self, at: usize) -> [Self; 2] {
        let Range { start, end } = self.range;
        let middle = (start + at).min(end);
        [start..middle, middle..end].map(|range| Self {
            store: Arc::clone(&self.store),
            range,
        })
    }

    /// Bytes of memory that these tokens take.
    pub(super) fn held_bytes(&self) -> usize {
        match self.store.held_bytes() {
            0 => 0,
            _ => self.len() * size_of::<u32>(),
        }
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(tokens: Vec<u32>) -> Self {
        Self::new(Arc::new(tokens))
    }
}

impl FromIterator<u32> for Tokens {
    fn from_iter<I: IntoIterator<Item = u32>>(tokens: I) -> Self {
        Vec::from_iter(tokens).into()
    }
}
