//! What a rank asks of NCCL in a collective, as data.

use crate::{
    ReduceOp,
    call::{Call, Fingerprint, Parts},
};
use std::fmt;

/// A place in the memory of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) area: Area,
    /// Elements from the beginning of the area.
    pub(super) start: usize,
}

/// Memory of a rank in a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Area {
    Input,
    Output,
}

/// One call of NCCL. `P` is a place in memory, lengths are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step<P = Spot> {
    /// In place.
    AllReduce {
        at: P,
        len: usize,
        op: ReduceOp,
    },
    /// `len` is that of a member's part.
    ReduceScatter {
        from: P,
        to: P,
        len: usize,
        op: ReduceOp,
    },
    Reduce {
        from: P,
        to: P,
        len: usize,
        op: ReduceOp,
        root: usize,
    },
    AllGather {
        from: P,
        to: P,
        len: usize,
    },
    Broadcast {
        from: P,
        to: P,
        len: usize,
        root: usize,
    },
    Send {
        from: P,
        len: usize,
        peer: usize,
    },
    Recv {
        to: P,
        len: usize,
        peer: usize,
    },
}

impl<P: Copy> Step<P> {
    /// The same call in another kind of place.
    pub(super) fn map<Q>(self, place: impl Fn(P) -> Q) -> Step<Q> {
        match self {
            Self::AllReduce { at, len, op } => Step::AllReduce {
                at: place(at),
                len,
                op,
            },
            Self::ReduceScatter { from, to, len, op } => Step::ReduceScatter {
                from: place(from),
                to: place(to),
                len,
                op,
            },
            Self::Reduce {
                from,
                to,
                len,
                op,
                root,
            } => Step::Reduce {
                from: place(from),
                to: place(to),
                len,
                op,
                root,
            },
            Self::AllGather { from, to, len } => Step::AllGather {
                from: place(from),
                to: place(to),
                len,
            },
            Self::Broadcast {
                from,
                to,
                len,
                root,
            } => Step::Broadcast {
                from: place(from),
                to: place(to),
                len,
                root,
            },
            Self::Send { from, len, peer } => Step::Send {
                from: place(from),
                len,
                peer,
            },
            Self::Recv { to, len, peer } => Step::Recv {
                to: place(to),
                len,
                peer,
            },
        }
    }
}

impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let area = match self.area {
            Area::Input => "in",
            Area::Output => "out",
        };
        write!(f, "{area}+{}", self.start)
    }
}

impl<P: fmt::Display> fmt::Display for Step<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce { at, len, op } => write!(f, "all_reduce({op}) {len} {at}"),
            Self::ReduceScatter { from, to, len, op } => {
                write!(f, "reduce_scatter({op}) {len} {from} {to}")
            }
            Self::Reduce {
                from,
                to,
                len,
                op,
                root,
            } => write!(f, "reduce({op}) {len} {from} {to} root {root}"),
            Self::AllGather { from, to, len } => write!(f, "all_gather {len} {from} {to}"),
            Self::Broadcast {
                from,
                to,
                len,
                root,
            } => write!(f, "broadcast {len} {from} {to} root {root}"),
            Self::Send { from, len, peer } => write!(f, "send {len} {from} peer {peer}"),
            Self::Recv { to, len, peer } => write!(f, "recv {len} {to} peer {peer}"),
        }
    }
}

/// What one member does in a collective: the steps of one group call.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) steps: Vec<Step>,
    /// The length of the result where it is not the input.
    pub(super) output_len: Option<usize>,
}

fn input(start: usize) -> Spot {
    Spot {
        area: Area::Input,
        start,
    }
}

fn output(start: usize) -> Spot {
    Spot {
        area: Area::Output,
        start,
    }
}

/// The first element of each part, and the sum of all.
fn starts(lengths: &[usize]) -> (Vec<usize>, usize) {
    let mut end = 0;
    let starts = lengths.iter().map(|len| {
        end += len;
        end - len
    });
    (starts.collect(), end)
}

impl Steps {
    /// The plan of member `me` of `n`, whose buffer fits the call.
    ///
    /// Equal parts, listed or not, are NCCL's own collectives. It has none for parts of different
    /// lengths, nor for a gather or an exchange: these are group calls, without the parts that are
    /// empty.
    pub(super) fn new(fingerprint: &Fingerprint, me: usize, n: usize) -> Self {
        let equal = equal_parts(fingerprint);
        let parts = equal.as_ref().unwrap_or(&fingerprint.parts);
        Self::of(fingerprint.call, parts, me, n).without_empty()
    }

    fn of(call: Call, parts: &Parts, me: usize, n: usize) -> Self {
        match (call, parts) {
            (Call::AllReduce(op), Parts::Equal(len)) => Self::in_place(Step::AllReduce {
                at: input(0),
                len: *len,
                op,
            }),
            (Call::Broadcast { root }, Parts::Equal(len)) => Self::in_place(Step::Broadcast {
                from: input(0),
                to: input(0),
                len: *len,
                root,
            }),
            (Call::ReduceScatter(op), Parts::Equal(len)) => Self {
                steps: vec![Step::ReduceScatter {
                    from: input(0),
                    to: output(0),
                    len: len / n,
                    op,
                }],
                output_len: Some(len / n),
            },
            (Call::AllGather, Parts::Equal(len)) => Self {
                steps: vec![Step::AllGather {
                    from: input(0),
                    to: output(0),
                    len: *len,
                }],
                output_len: Some(len * n),
            },
            (Call::ReduceScatter(op), Parts::Listed(lengths)) => Self {
                steps: reduce_parts(lengths, op, |_| output(0)),
                output_len: Some(lengths[me]),
            },
            (Call::AllGather, Parts::Listed(lengths)) => Self {
                steps: join_parts(lengths, |start| (input(0), output(start))),
                output_len: Some(lengths.iter().sum()),
            },
            (Call::ReduceScatterInPlace(op), parts) => Self::reduce_in_place(parts, me, n, op),
            (Call::AllGatherInPlace, parts) => Self::join_in_place(parts, me, n),
            (Call::Gather { root }, Parts::Equal(len)) => Self::gather(*len, me, n, root),
            (Call::GatherInPlace { root }, Parts::Equal(len)) => {
                Self::gather_in_place(len / n, me, n, root)
            }
            (Call::AllToAll, Parts::Equal(len)) => {
                Self::exchange(&vec![len / n; n], &vec![len / n; n])
            }
            (Call::AllToAll, Parts::Listed(lengths)) => {
                let column: Vec<_> = lengths.iter().skip(me).step_by(n).copied().collect();
                Self::exchange(&lengths[me * n..(me + 1) * n], &column)
            }
            // No other call has parts of lengths of their own.
            (Call::Barrier, _)
            | (
                Call::AllReduce(_)
                | Call::Gather { .. }
                | Call::GatherInPlace { .. }
                | Call::Broadcast { .. },
                Parts::Listed(_),
            ) => Self::default(),
        }
    }

    fn in_place(step: Step) -> Self {
        Self {
            steps: vec![step],
            output_len: None,
        }
    }

    /// NCCL's own form in place, or a reduction of each part to its place on its member.
    fn reduce_in_place(parts: &Parts, me: usize, n: usize, op: ReduceOp) -> Self {
        match parts {
            Parts::Equal(len) => Self::in_place(Step::ReduceScatter {
                from: input(0),
                to: input(me * (len / n)),
                len: len / n,
                op,
            }),
            Parts::Listed(lengths) => Self {
                steps: reduce_parts(lengths, op, input),
                output_len: None,
            },
        }
    }

    /// NCCL's own form in place, or a broadcast of each part from its place.
    fn join_in_place(parts: &Parts, me: usize, n: usize) -> Self {
        match parts {
            Parts::Equal(len) => Self::in_place(Step::AllGather {
                from: input(me * (len / n)),
                to: input(0),
                len: len / n,
            }),
            Parts::Listed(lengths) => Self {
                steps: join_parts(lengths, |start| (input(start), input(start))),
                output_len: None,
            },
        }
    }

    fn gather(len: usize, me: usize, n: usize, root: usize) -> Self {
        let from = input(0);
        let send = Step::Send {
            from,
            len,
            peer: root,
        };
        let mut plan = Self {
            steps: vec![send],
            output_len: Some(0),
        };
        if me == root {
            plan.output_len = Some(len * n);
            plan.steps.extend((0..n).map(|peer| Step::Recv {
                to: output(len * peer),
                len,
                peer,
            }));
        }
        plan
    }

    /// The others' parts come to their places in the buffer of the root.
    fn gather_in_place(len: usize, me: usize, n: usize, root: usize) -> Self {
        let receipts = (0..n).filter(|&peer| peer != root).map(|peer| Step::Recv {
            to: input(len * peer),
            len,
            peer,
        });
        if me == root {
            return Self {
                steps: receipts.collect(),
                output_len: None,
            };
        }
        Self::in_place(Step::Send {
            from: input(len * me),
            len,
            peer: root,
        })
    }

    /// This member's parts go to the others, and theirs come.
    fn exchange(sent: &[usize], received: &[usize]) -> Self {
        let (froms, _) = starts(sent);
        let (tos, whole) = starts(received);
        let pairs = (0..sent.len()).flat_map(|peer| {
            [
                Step::Send {
                    from: input(froms[peer]),
                    len: sent[peer],
                    peer,
                },
                Step::Recv {
                    to: output(tos[peer]),
                    len: received[peer],
                    peer,
                },
            ]
        });
        Self {
            steps: pairs.collect(),
            output_len: Some(whole),
        }
    }

    fn without_empty(mut self) -> Self {
        self.steps.retain(|step| step.len() > 0);
        self
    }
}

/// The parts of a call that lists equal ones, as those of a call without a list.
fn equal_parts(fingerprint: &Fingerprint) -> Option<Parts> {
    let Parts::Listed(lengths) = &fingerprint.parts else {
        return None;
    };
    let first = *lengths.first()?;
    let len = match fingerprint.call {
        Call::AllGather => first,
        Call::ReduceScatter(_) | Call::ReduceScatterInPlace(_) | Call::AllGatherInPlace => {
            first * lengths.len()
        }
        _ => return None,
    };
    let are_equal = lengths.iter().all(|&length| length == first);
    are_equal.then_some(Parts::Equal(len))
}

/// One reduction for each member, of the part that begins at `start`, to `place(start)` on that
/// member; NCCL leaves the place of the others alone.
fn reduce_parts(lengths: &[usize], op: ReduceOp, place: impl Fn(usize) -> Spot) -> Vec<Step> {
    let (starts, _) = starts(lengths);
    let parts = lengths.iter().zip(starts).enumerate();
    let steps = parts.map(|(root, (&len, start))| Step::Reduce {
        from: input(start),
        to: place(start),
        len,
        op,
        root,
    });
    steps.collect()
}

/// One broadcast of each member's part, from and to `places(start)`, where the part begins at
/// `start` among all.
fn join_parts(lengths: &[usize], places: impl Fn(usize) -> (Spot, Spot)) -> Vec<Step> {
    let (starts, _) = starts(lengths);
    let parts = lengths.iter().zip(starts).enumerate();
    let steps = parts.map(|(root, (&len, start))| {
        let (from, to) = places(start);
        Step::Broadcast {
            from,
            to,
            len,
            root,
        }
    });
    steps.collect()
}

impl<P> Step<P> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::AllReduce { len, .. }
            | Self::ReduceScatter { len, .. }
            | Self::Reduce { len, .. }
            | Self::AllGather { len, .. }
            | Self::Broadcast { len, .. }
            | Self::Send { len, .. }
            | Self::Recv { len, .. } => *len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    /// The calls of each of three members, and the length of its result.
    fn told(call: Call, parts: Parts) -> Vec<String> {
        let fingerprint = Fingerprint {
            call,
            dtype: DType::F32,
            parts,
        };
        let members = (0..3).map(|me| {
            let plan = Steps::new(&fingerprint, me, 3);
            let steps: Vec<_> = plan.steps.iter().map(ToString::to_string).collect();
            let len = plan
                .output_len
                .map_or("in place".to_owned(), |len| len.to_string());
            format!("{} -> {len}", steps.join("; "))
        });
        members.collect()
    }

    #[test]
    fn equal_parts_are_one_call_of_nccl() {
        let sum = ReduceOp::Sum;
        assert_eq!(
            told(Call::AllReduce(ReduceOp::Max), Parts::Equal(5)),
            ["all_reduce(max) 5 in+0 -> in place"; 3]
        );
        assert_eq!(
            told(Call::Broadcast { root: 2 }, Parts::Equal(5)),
            ["broadcast 5 in+0 in+0 root 2 -> in place"; 3]
        );
        assert_eq!(
            told(Call::ReduceScatter(sum), Parts::Equal(6)),
            ["reduce_scatter(sum) 2 in+0 out+0 -> 2"; 3]
        );
        assert_eq!(
            told(Call::AllGather, Parts::Equal(5)),
            ["all_gather 5 in+0 out+0 -> 15"; 3]
        );
    }

    #[test]
    fn uneven_parts_are_group_calls_without_the_empty_ones() {
        let parts = Parts::Listed([4, 0, 2].into());
        assert_eq!(
            told(Call::ReduceScatter(ReduceOp::Sum), parts.clone()),
            [4, 0, 2].map(|len| format!(
                "reduce(sum) 4 in+0 out+0 root 0; reduce(sum) 2 in+4 out+0 root 2 -> {len}"
            ))
        );
        assert_eq!(
            told(Call::AllGather, parts),
            ["broadcast 4 in+0 out+0 root 0; broadcast 2 in+0 out+4 root 2 -> 6"; 3]
        );
        assert_eq!(
            told(Call::AllReduce(ReduceOp::Sum), Parts::Equal(0)),
            [" -> in place"; 3]
        );
    }

    #[test]
    fn equal_parts_that_are_listed_are_one_call_of_nccl_too() {
        let sum = ReduceOp::Sum;
        let parts = || Parts::Listed([2; 3].into());
        for (call, len) in [
            (Call::ReduceScatter(sum), 6),
            (Call::ReduceScatterInPlace(sum), 6),
            (Call::AllGather, 2),
            (Call::AllGatherInPlace, 6),
        ] {
            assert_eq!(told(call, parts()), told(call, Parts::Equal(len)));
        }
        let exchange = Parts::Listed([2; 9].into());
        assert_eq!(
            told(Call::AllToAll, exchange),
            told(Call::AllToAll, Parts::Equal(6))
        );
    }

    #[test]
    fn what_works_in_place_has_no_output() {
        let sum = ReduceOp::Sum;
        let summed = |place| format!("reduce_scatter(sum) 2 in+0 in+{place} -> in place");
        assert_eq!(
            told(Call::ReduceScatterInPlace(sum), Parts::Equal(6)),
            [0, 2, 4].map(summed)
        );
        let joined = |place| format!("all_gather 2 in+{place} in+0 -> in place");
        assert_eq!(
            told(Call::AllGatherInPlace, Parts::Equal(6)),
            [0, 2, 4].map(joined)
        );
        assert_eq!(
            told(Call::GatherInPlace { root: 1 }, Parts::Equal(6)),
            [
                "send 2 in+0 peer 1 -> in place",
                "recv 2 in+0 peer 0; recv 2 in+4 peer 2 -> in place",
                "send 2 in+4 peer 1 -> in place",
            ]
        );
        let parts = Parts::Listed([4, 0, 2].into());
        assert_eq!(
            told(Call::ReduceScatterInPlace(sum), parts.clone()),
            ["reduce(sum) 4 in+0 in+0 root 0; reduce(sum) 2 in+4 in+4 root 2 -> in place"; 3]
        );
        assert_eq!(
            told(Call::AllGatherInPlace, parts),
            ["broadcast 4 in+0 in+0 root 0; broadcast 2 in+4 in+4 root 2 -> in place"; 3]
        );
    }

    #[test]
    fn gathers_and_exchanges_are_sends_and_receipts() {
        assert_eq!(
            told(Call::Gather { root: 1 }, Parts::Equal(5)),
            [
                "send 5 in+0 peer 1 -> 0",
                "send 5 in+0 peer 1; recv 5 out+0 peer 0; recv 5 out+5 peer 1; \
                 recv 5 out+10 peer 2 -> 15",
                "send 5 in+0 peer 1 -> 0",
            ]
        );
        assert_eq!(
            told(Call::AllToAll, Parts::Equal(6)),
            ["send 2 in+0 peer 0; recv 2 out+0 peer 0; send 2 in+2 peer 1; recv 2 out+2 peer 1; \
              send 2 in+4 peer 2; recv 2 out+4 peer 2 -> 6"; 3]
        );
        // Member p sends p + q elements to member q.
        let lengths = (0..9).map(|place| place / 3 + place % 3).collect();
        assert_eq!(
            told(Call::AllToAll, Parts::Listed(lengths))[0],
            "send 1 in+0 peer 1; recv 1 out+0 peer 1; send 2 in+1 peer 2; recv 2 out+1 peer 2 -> 3"
        );
    }

    #[test]
    fn what_one_member_sends_is_what_the_other_receives() {
        let lengths: Parts = Parts::Listed((0..9).map(|place| place * 7 % 5).collect());
        let fingerprint = Fingerprint {
            call: Call::AllToAll,
            dtype: DType::U8,
            parts: lengths,
        };
        let plans: Vec<_> = (0..3).map(|me| Steps::new(&fingerprint, me, 3)).collect();
        for (me, plan) in plans.iter().enumerate() {
            for step in &plan.steps {
                let Step::Send { len, peer, .. } = step else {
                    continue;
                };
                let came = plans[*peer].steps.iter().any(
                    |step| matches!(step, Step::Recv { len: l, peer: p, .. } if l == len && *p == me),
                );
                assert!(came, "{step} of {me}");
            }
        }
    }
}
