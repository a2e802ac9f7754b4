//! The gathering of parameters over the replicas.

use crate::{Error, FlatLayout, Result, copies::Copies};
use merak_mpu::{Buffer, Communicator, Group, Pending};
use std::{collections::VecDeque, ops::Range};

/// The operation, for errors.
const GATHERING: &str = "gathering of parameters";

/// Most chunks that are under way at once: each has a copy of its parameters.
pub(crate) const MOST_GATHERED: usize = 2;

/// Gathers buckets of parameters that the ranks of a data x sequence group divide among themselves.
///
/// Every rank of the group gathers the same buckets in the same order.
#[derive(Debug, Clone)]
pub struct Gatherer {
    group: Group,
    buckets: Vec<GatheredBucket>,
}

/// A bucket, as one rank gathers it.
#[derive(Debug, Clone)]
pub(crate) struct GatheredBucket {
    /// This rank's part among the elements that it owns.
    pub(crate) own: Range<usize>,
    /// The lengths of all ranks' parts.
    pub(crate) lengths: Vec<usize>,
}

impl Gatherer {
    pub(crate) fn new(group: Group, buckets: Vec<GatheredBucket>) -> Self {
        Self { group, buckets }
    }

    /// Where this rank's part of a bucket lies among the elements that it owns.
    ///
    /// # Panics
    /// When the layout has no such bucket.
    pub fn own_part(&self, bucket: usize) -> Range<usize> {
        self.buckets[bucket].own.clone()
    }

    /// The number of the first element of this rank's part in the bucket, and how many elements the
    /// bucket has.
    ///
    /// # Panics
    /// When the layout has no such bucket.
    pub fn place(&self, bucket: usize) -> (usize, usize) {
        let lengths = &self.buckets[bucket].lengths;
        let before = &lengths[..self.group.rank()];
        (before.iter().sum(), lengths.iter().sum())
    }

    /// Starts to gather a bucket where it lies: `all` has as many elements as the bucket, of any
    /// type, and this rank's part in its [place](Gatherer::place); the others may be anything. The
    /// result has those of all ranks, in flat order.
    ///
    /// # Communication
    /// An all-gather of the parts.
    ///
    /// # Errors
    /// When `all` has another length or the group fails.
    ///
    /// # Panics
    /// When the layout has no such bucket.
    pub fn start(&self, bucket: usize, all: Box<dyn Buffer>) -> Result<PendingBucket> {
        let lengths = self.buckets[bucket].lengths.clone();
        let pending = self.group.start_all_gather_parts_in_place(all, lengths);
        pending
            .map(PendingBucket)
            .map_err(Error::communication(GATHERING))
    }
}

/// A bucket of parameters that is being gathered.
#[derive(Debug)]
pub struct PendingBucket(Pending<Box<dyn Buffer>>);

impl PendingBucket {
    /// Waits for the values of all elements of the bucket.
    ///
    /// # Errors
    /// When the group fails.
    pub fn wait(self) -> Result<Box<dyn Buffer>> {
        let gathered = self.0.wait();
        gathered.map_err(Error::communication(GATHERING))
    }
}

/// Parameters that other ranks have stepped, on their way into the flat buffer of this one (stages
/// 1 and 2).
///
/// They arrive bucket by bucket, in flat order, which is that of the forward pass. Two collectives
/// are under way at most. Every rank of the data x sequence group waits for all buckets before it
/// uses the group for anything else.
#[derive(Debug)]
#[must_use = "parameters of other ranks arrive when they are waited for"]
pub struct Arrivals {
    group: Group,
    copies: Copies,
    waiting: VecDeque<Chunk>,
    under_way: VecDeque<(Chunk, Pending<Box<dyn Buffer>>)>,
}

/// What one collective gathers.
#[derive(Debug)]
struct Chunk {
    bucket: usize,
    /// The elements of the flat buffer that each rank sends.
    pieces: Vec<Range<usize>>,
}

impl Arrivals {
    /// All buckets of a layout; a collective gathers no more elements than `most`, or one of each
    /// rank.
    pub(crate) fn new(group: &Group, copies: Copies, layout: &FlatLayout, most: usize) -> Self {
        let piece = (most / group.world_size()).max(1);
        let buckets = 0..layout.buckets().len();
        Self {
            waiting: buckets.flat_map(|b| chunks(layout, b, piece)).collect(),
            copies,
            ..Self::none(group)
        }
    }

    /// No bucket.
    pub(crate) fn none(group: &Group) -> Self {
        Self {
            group: group.clone(),
            copies: Copies::default(),
            waiting: VecDeque::new(),
            under_way: VecDeque::new(),
        }
    }

    /// The first bucket that has not arrived; `None` when all have.
    pub fn first_missing(&self) -> Option<usize> {
        let mut chunks = self.under_way.iter().map(|(chunk, _)| chunk);
        let first = chunks.next().or(self.waiting.front());
        first.map(|chunk| chunk.bucket)
    }

    /// Waits until this bucket and those before it are in `params`, the flat buffer that was
    /// stepped. Starts the gathering of later ones meanwhile.
    ///
    /// # Communication
    /// All-gathers of `4 L / N` bytes from each of `N` ranks for a bucket of `L` elements.
    ///
    /// # Errors
    /// When the group fails.
    pub fn wait_through(&mut self, bucket: usize, params: &mut dyn Buffer) -> Result<()> {
        while self.first_missing().is_some_and(|next| next <= bucket) {
            self.start(params)?;
            self.finish_oldest(params)?;
            self.start(params)?;
        }
        Ok(())
    }

    /// Waits for all buckets, as [`Arrivals::wait_through`].
    ///
    /// # Errors
    /// When the group fails.
    pub fn finish(&mut self, params: &mut dyn Buffer) -> Result<()> {
        self.wait_through(usize::MAX, params)
    }

    /// Starts the next collectives, as many as may be under way.
    pub(crate) fn start(&mut self, params: &dyn Buffer) -> Result<()> {
        while self.under_way.len() < MOST_GATHERED
            && let Some(chunk) = self.waiting.pop_front()
        {
            let own = chunk.pieces[self.group.rank()].clone();
            let own = self.copies.take(params, &[own], GATHERING)?;
            let lengths = chunk.pieces.iter().map(Range::len).collect();
            let pending = self.group.start_all_gather_parts(own, lengths);
            let pending = pending.map_err(Error::communication(GATHERING))?;
            self.under_way.push_back((chunk, pending));
        }
        Ok(())
    }

    fn finish_oldest(&mut self, params: &mut dyn Buffer) -> Result<()> {
        let Some((chunk, pending)) = self.under_way.pop_front() else {
            return Ok(());
        };
        let all = pending.wait().map_err(Error::communication(GATHERING))?;
        self.copies.put(&*all, params, &chunk.pieces, GATHERING)
    }
}

/// The chunks of a bucket: pieces of this length of each rank's part.
fn chunks(layout: &FlatLayout, bucket: usize, piece: usize) -> impl Iterator<Item = Chunk> + '_ {
    let parts = layout.parts(&layout.buckets()[bucket]);
    let parts: Vec<_> = parts.map(|part| part.flat).collect();
    let longest = parts.iter().map(Range::len).max().unwrap_or(0);
    (0..longest).step_by(piece).map(move |start| {
        let at = |part: &Range<usize>, offset| part.end.min(part.start.saturating_add(offset));
        let end = start.saturating_add(piece);
        let pieces = parts.iter().map(|part| at(part, start)..at(part, end));
        Chunk {
            bucket,
            pieces: pieces.collect(),
        }
    })
}
