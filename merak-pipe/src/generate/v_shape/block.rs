//! The block of one microbatch.

/// When the forwards and input gradients of microbatch 0 start, in units; those of microbatch `m`
/// start [`PERIOD`] times `m` later. On each rank the four starts differ modulo the period.
#[derive(Debug, Clone)]
pub(super) struct Block {
    /// For each rank the starts by [`Part`].
    starts: Vec<[usize; 4]>,
}

/// The four parts of a block on each rank, in the order in which a microbatch meets them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    ForwardDown,
    ForwardBack,
    InputBack,
    InputDown,
}

impl Part {
    pub(super) const ALL: [Self; 4] = [
        Self::ForwardDown,
        Self::ForwardBack,
        Self::InputBack,
        Self::InputDown,
    ];

    /// The ranks in the order in which the part passes them.
    fn ranks(self, ranks: usize) -> impl Iterator<Item = usize> {
        let down = matches!(self, Self::ForwardDown | Self::InputBack);
        (0..ranks).map(move |step| if down { step } else { ranks - 1 - step })
    }
}

/// Units from one microbatch to the next: six actions on each rank.
pub(super) const PERIOD: usize = 6;

impl Block {
    /// When a part of a microbatch starts.
    pub(super) fn start(&self, rank: usize, part: Part, microbatch: usize) -> usize {
        self.starts[rank][part as usize] + PERIOD * microbatch
    }

    /// Most activations on a rank at once, when each weight gradient follows its input gradient.
    pub(super) fn peak(&self) -> usize {
        let live = |starts: &[usize; 4], at: usize| {
            // Of each stage, the microbatches begun until `at` less those that have ended, both
            // counted from a time before the first.
            let shift = PERIOD * starts[Part::InputDown as usize];
            let begun = |part: Part| (at + shift - starts[part as usize]) / PERIOD;
            begun(Part::ForwardDown) - begun(Part::InputDown) + begun(Part::ForwardBack)
                - begun(Part::InputBack)
        };
        let peak = |starts: &[usize; 4]| live(starts, starts[0]).max(live(starts, starts[1]));
        self.starts.iter().map(peak).max().unwrap_or(0)
    }

    /// The block in which each part follows at once. With a multiple of three ranks, two parts
    /// would meet modulo the period, so the turns wait two units.
    pub(super) fn shortest(ranks: usize) -> Self {
        let wait = if ranks.is_multiple_of(3) { 2 } else { 0 };
        Self::regular(ranks, [1; 4], [wait, 0, wait])
    }

    /// Blocks with two units for each hop back.
    pub(super) fn halves(ranks: usize) -> impl Iterator<Item = Self> {
        let waits = (0..5).flat_map(|first| (0..5).map(move |last| [first, 0, last]));
        let blocks = waits.map(move |waits| Self::regular(ranks, [1, 2, 1, 2], waits));
        blocks.filter(Self::is_disjoint)
    }

    /// Up to `tries` blocks whose hops take one to three units, drawn so that parts never meet.
    pub(super) fn drawn(ranks: usize, tries: usize) -> impl Iterator<Item = Self> {
        let mut random = Lcg(1);
        (0..tries).filter_map(move |_| Self::draw(ranks, &mut random))
    }

    fn regular(ranks: usize, steps: [usize; 4], waits: [usize; 3]) -> Self {
        let mut starts = vec![[0; 4]; ranks];
        let mut at = 0;
        for (part, step) in Part::ALL.into_iter().zip(steps) {
            for rank in part.ranks(ranks) {
                starts[rank][part as usize] = at;
                at += step;
            }
            at = at - step + 1 + waits.get(part as usize).copied().unwrap_or(0);
        }
        Self { starts }
    }

    fn draw(ranks: usize, random: &mut Lcg) -> Option<Self> {
        let mut starts = vec![[0; 4]; ranks];
        let mut taken = vec![[false; PERIOD]; ranks];
        let mut at = 0;
        for part in Part::ALL {
            for rank in part.ranks(ranks) {
                at += [0, 0, 1, 1, 2][random.below(5)];
                // The next unit that is free on this rank; a long wait would only hold memory.
                at += (0..3).find(|wait| !taken[rank][(at + wait) % PERIOD])?;
                taken[rank][at % PERIOD] = true;
                starts[rank][part as usize] = at;
                at += 1;
            }
        }
        Some(Self { starts })
    }

    fn is_disjoint(&self) -> bool {
        self.starts.iter().all(|starts| {
            let mut units = starts.map(|start| start % PERIOD);
            units.sort_unstable();
            units.windows(2).all(|pair| pair[0] != pair[1])
        })
    }
}

/// A linear congruential generator: the same draws on every rank and machine.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, limit: u64) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % limit) as usize
    }
}
