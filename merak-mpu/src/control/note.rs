//! What ranks and the hub tell each other while a world lives.

use super::wire::{Decoder, Encoder, Malformed};
use crate::{Failure, Rank, Wait};
use std::time::Duration;

/// One frame of the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Note {
    /// The sender lives, and this is what its threads wait for.
    Beat { waits: Vec<Wait> },
    /// The sender says that a rank has failed.
    Fail { culprit: Rank, reason: String },
    /// The sender has lost its connection to a rank.
    Suspect { peer: Rank, reason: String },
    /// A wait of the sender was too long.
    Late { after: Duration, wait: Wait },
    /// What the hub has decided, for every rank.
    Poison(Verdict),
    /// The sender has done its part and leaves; it waits for the end of the others where it leaves
    /// last.
    Goodbye { last: bool },
}

/// Who is to blame, by the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) failure: Failure,
    /// The culprit has not failed by itself: its process is gone, stopped or cut off.
    pub(crate) lost: bool,
    /// What the other ranks waited for, where a wait was too long.
    pub(crate) others: Vec<Wait>,
}

impl Note {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut frame = Encoder::default();
        match self {
            Self::Beat { waits } => {
                frame.0.push(1);
                frame.waits(waits);
            }
            Self::Fail { culprit, reason } => {
                frame.0.push(2);
                frame.size(culprit.0).text(reason);
            }
            Self::Suspect { peer, reason } => {
                frame.0.push(3);
                frame.size(peer.0).text(reason);
            }
            Self::Late { after, wait } => {
                frame.0.push(4);
                frame.number(after.as_micros() as u64).wait(wait);
            }
            Self::Poison(Verdict {
                failure,
                lost,
                others,
            }) => {
                frame.0.push(5);
                frame.size(failure.culprit.0).size(failure.reporter.0);
                frame.text(&failure.reason).0.push(u8::from(*lost));
                frame.waits(others);
            }
            Self::Goodbye { last } => frame.0.extend([6, u8::from(*last)]),
        }
        frame.0
    }

    pub(super) fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder(frame);
        let note = match decoder.byte()? {
            1 => Self::Beat {
                waits: decoder.waits()?,
            },
            2 => Self::Fail {
                culprit: decoder.rank()?,
                reason: decoder.text()?,
            },
            3 => Self::Suspect {
                peer: decoder.rank()?,
                reason: decoder.text()?,
            },
            4 => Self::Late {
                after: Duration::from_micros(decoder.number()?),
                wait: decoder.wait()?,
            },
            5 => Self::Poison(Verdict {
                failure: Failure {
                    culprit: decoder.rank()?,
                    reporter: decoder.rank()?,
                    reason: decoder.text()?,
                },
                lost: decoder.byte()? == 1,
                others: decoder.waits()?,
            }),
            6 => Self::Goodbye {
                last: decoder.byte()? == 1,
            },
            _ => return Err(Malformed),
        };
        decoder.end()?;
        Ok(note)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn notes_come_out_as_they_went_in() {
        let wait = Wait {
            rank: Rank(1),
            op: "barrier".into(),
            group: "world [0, 1]".into(),
            sequence: 3,
            missing: vec![Rank(0)],
        };
        let reason = "disk full".to_owned();
        let failure = Failure {
            culprit: Rank(2),
            reporter: Rank(0),
            reason: reason.clone(),
        };
        let notes = [
            Note::Beat {
                waits: vec![wait.clone()],
            },
            Note::Fail {
                culprit: Rank(2),
                reason: reason.clone(),
            },
            Note::Suspect {
                peer: Rank(1),
                reason,
            },
            Note::Late {
                after: Duration::from_millis(20),
                wait: wait.clone(),
            },
            Note::Poison(Verdict {
                failure,
                lost: true,
                others: vec![wait],
            }),
            Note::Goodbye { last: true },
        ];
        for note in notes {
            assert_eq!(Note::decode(&note.encode()), Ok(note));
        }
    }

    proptest! {
        #[test]
        fn bytes_of_a_stranger_are_no_note(kind in 0..9_u8, mut bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            bytes.insert(0, kind);
            let _ = Note::decode(&bytes);
        }
    }
}
