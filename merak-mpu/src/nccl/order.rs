//! One order of launches on all ranks.
//!
//! NCCL needs that ranks launch what they share in one order, also over several communicators: two
//! kernels that wait for each other's peers may not both fit on a device. Ranks start the
//! operations of different groups in any order, so they agree on one, as in Skeen's algorithm for
//! messages in total order:
//!
//! 1. When all members of an operation have called it, each proposes a stamp above all that it has
//!    seen.
//! 2. The largest proposal is the operation's stamp, on every member.
//! 3. A rank launches the operation with the least stamp once none of its open proposals is below
//!    it: what comes later has a larger stamp.
//!
//! A proposal is open while stamps travel, and never while a rank computes, since all members have
//! called. So the order holds up no operation for one whose members have not come.

/// A moment of a world's logical time. No two ranks propose the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp(pub(super) u64);

/// The logical clock of a rank.
#[derive(Debug)]
pub(super) struct Clock {
    time: u64,
    rank: u64,
    size: u64,
}

impl Clock {
    pub(super) fn new(rank: usize, size: usize) -> Self {
        Self {
            time: 0,
            rank: rank as u64,
            size: size as u64,
        }
    }

    /// A stamp above all that this rank has seen.
    pub(super) fn propose(&mut self) -> Stamp {
        self.time += 1;
        Stamp(self.time * self.size + self.rank)
    }

    /// Notes a stamp.
    pub(super) fn see(&mut self, stamp: Stamp) {
        self.time = self.time.max(stamp.0 / self.size);
    }
}

/// How far the members of an operation have agreed on its stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Agreement {
    /// A member has not called it yet.
    Open,
    /// This rank has proposed a stamp.
    Proposed(Stamp),
    /// All have agreed on a stamp.
    Agreed(Stamp),
}

/// The place of the operation that is to be launched next, if it is known.
pub(super) fn next(operations: &[Agreement]) -> Option<usize> {
    let stamps = operations
        .iter()
        .zip(0..)
        .filter_map(|(one, place)| match one {
            Agreement::Agreed(stamp) => Some((*stamp, place)),
            _ => None,
        });
    let (least, place) = stamps.min()?;
    let is_below = |one: &Agreement| matches!(one, Agreement::Proposed(open) if *open < least);
    (!operations.iter().any(is_below)).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Agreement::{Agreed, Open, Proposed};
    use proptest::prelude::*;

    #[test]
    fn an_open_proposal_holds_up_later_stamps_alone() {
        let (of, stamp) = (next, Stamp);
        assert_eq!(of(&[Open, Agreed(stamp(7)), Agreed(stamp(5))]), Some(2));
        assert_eq!(of(&[Proposed(stamp(6)), Agreed(stamp(5))]), Some(1));
        assert_eq!(of(&[Proposed(stamp(4)), Agreed(stamp(5))]), None);
        assert_eq!(of(&[Open, Proposed(stamp(4))]), None);
    }

    /// One rank of a simulated world.
    struct Place {
        clock: Clock,
        agreements: Vec<Agreement>,
        launched: Vec<usize>,
        is_over: Vec<bool>,
    }

    proptest! {
        /// Any groups, and any order in which ranks propose and hear: every two ranks launch what
        /// they share in one order, and everything is launched.
        #[test]
        fn ranks_launch_what_they_share_in_one_order(
            members in prop::collection::vec(1_u8..16, 1..8),
            turns in prop::collection::vec(any::<u16>(), 200),
        ) {
            let has = |operation: usize, rank: usize| members[operation] >> rank & 1 == 1;
            let mut places: Vec<Place> = (0..4)
                .map(|rank| Place {
                    clock: Clock::new(rank, 4),
                    agreements: vec![Open; members.len()],
                    launched: Vec::new(),
                    is_over: vec![false; members.len()],
                })
                .collect();
            let mut stamps: Vec<Vec<Option<Stamp>>> = vec![vec![None; 4]; members.len()];
            let rest = (0..members.len() * 16).map(|turn| turn as u16);
            for turn in turns.into_iter().chain(rest.clone()).chain(rest) {
                let (operation, rank) = (usize::from(turn / 4) % members.len(), usize::from(turn % 4));
                if !has(operation, rank) || places[rank].is_over[operation] {
                    continue;
                }
                let place = &mut places[rank];
                match place.agreements[operation] {
                    Open => {
                        let own = place.clock.propose();
                        stamps[operation][rank] = Some(own);
                        place.agreements[operation] = Proposed(own);
                    }
                    Proposed(_) => {
                        let all: Option<Vec<_>> = (0..4)
                            .filter(|&rank| has(operation, rank))
                            .map(|rank| stamps[operation][rank])
                            .collect();
                        if let Some(stamp) = all.and_then(|all| all.into_iter().max()) {
                            place.clock.see(stamp);
                            place.agreements[operation] = Agreed(stamp);
                        }
                    }
                    Agreed(_) => {}
                }
                while let Some(first) = next(&place.agreements) {
                    place.launched.push(first);
                    place.agreements[first] = Open;
                    place.is_over[first] = true;
                }
            }
            for (rank, place) in places.iter().enumerate() {
                let own: Vec<_> = (0..members.len()).filter(|&one| has(one, rank)).collect();
                let mut launched = place.launched.clone();
                launched.sort_unstable();
                prop_assert_eq!(&launched, &own, "rank {} has launched all", rank);
                for other in &places[..rank] {
                    let shared = |place: &Place, other: &Place| -> Vec<usize> {
                        let all = place.launched.iter().copied();
                        all.filter(|one| other.launched.contains(one)).collect()
                    };
                    prop_assert_eq!(shared(place, other), shared(other, place));
                }
            }
        }
    }
}
