//! The number of a rank, and what it may be waiting for.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A rank of the world: the number of one participant, from 0.
///
/// A place within a smaller group is a plain `usize` and called group rank.
///
/// ```
/// use merak_mpu::Rank;
/// assert_eq!(format!("{} {:?}", Rank(3), [Rank(0), Rank(8)]), "3 [0, 8]");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub usize);

impl From<usize> for Rank {
    fn from(rank: usize) -> Self {
        Self(rank)
    }
}

impl PartialEq<usize> for Rank {
    fn eq(&self, other: &usize) -> bool {
        self.0 == *other
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One rank that waits for others: its number, its operation and the missing ranks.
///
/// ```
/// use merak_mpu::{Rank, Wait};
/// let wait = Wait {
///     rank: Rank(2),
///     op: "all_reduce".into(),
///     group: "tensor [2, 3]".into(),
///     sequence: 7,
///     missing: vec![Rank(3)],
/// };
/// assert_eq!(wait.to_string(), "rank 2 waits in all_reduce 7 of group tensor [2, 3] for rank 3");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The rank that waits.
    pub rank: Rank,
    /// The operation it waits in.
    pub op: String,
    /// The name and members of the group.
    pub group: String,
    /// The number of the operation within its group, from 0; for a receipt within its sender and
    /// tag.
    pub sequence: u64,
    /// The ranks that have not come; empty when all came and the result is being computed.
    pub missing: Vec<Rank>,
}

impl Wait {
    /// The operation of rank 0 that waits until all processes of the world have come.
    pub const JOIN: &'static str = "join";
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            op,
            group,
            sequence,
            missing,
        } = self;
        if op == Self::JOIN {
            write!(f, "rank {rank} of the {group} waits for the first word of ")?;
        } else {
            write!(
                f,
                "rank {rank} waits in {op} {sequence} of group {group} for "
            )?;
        }
        match missing.as_slice() {
            [] => f.write_str("the result"),
            [one] => write!(f, "rank {one}"),
            many if many.len() <= MOST_NAMED => write!(f, "ranks {many:?}"),
            many => {
                let (named, more) = many.split_at(MOST_NAMED);
                write!(f, "ranks {named:?} and {} more", more.len())
            }
        }
    }
}

/// The most missing ranks that a message lists.
const MOST_NAMED: usize = 32;

/// Most members that messages name one by one.
const MOST_MEMBERS: usize = 16;

/// A group as messages name it: `tensor [0, 1]`, `world [0-1023]`, `data [0, 8, 16, .., 1016]`.
pub(crate) fn describe_group(name: &str, members: &[Rank]) -> String {
    match members {
        [first, .., last] if members.len() > MOST_MEMBERS => {
            if last.0 - first.0 + 1 == members.len() {
                format!("{name} [{first}-{last}]")
            } else {
                let [second, third] = [members[1], members[2]];
                format!("{name} [{first}, {second}, {third}, .., {last}]")
            }
        }
        _ => format!("{name} {members:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_lists_the_first_of_many_missing_ranks() {
        let wait = Wait {
            rank: Rank(0),
            op: "join".into(),
            group: "world".into(),
            sequence: 0,
            missing: (1..1000).map(Rank).collect(),
        };
        let shown = wait.to_string();
        assert!(shown.ends_with("31, 32] and 967 more"), "{shown}");
    }

    #[test]
    fn a_large_group_is_named_in_few_words() {
        let group = |members: Vec<usize>| {
            let members: Vec<_> = members.into_iter().map(Rank).collect();
            describe_group("data", &members)
        };
        assert_eq!(group(vec![3]), "data [3]");
        assert_eq!(group(vec![0, 2, 4]), "data [0, 2, 4]");
        assert_eq!(group((8..1024).collect()), "data [8-1023]");
        let every_eighth = (0..1024).step_by(8).collect();
        assert_eq!(group(every_eighth), "data [0, 8, 16, .., 1016]");
    }
}
