//! Random schedules of any shape: several stages per rank, split backwards.

use merak_pipe::{Action, Kind, MicrobatchId, Schedule, Size, StageId};
use proptest::prelude::*;

/// Any schedule of moderate size that a pipeline can carry out.
pub(crate) fn played() -> impl Strategy<Value = Schedule> {
    let deal = prop_oneof![Just(Deal::InTurn), Just(Deal::ThereAndBack)];
    let size = (1_usize..=4, 1_usize..=6, 1_usize..=3);
    let choices = proptest::collection::vec(any::<u8>(), 1..64);
    (size, deal, 1_usize..=4, choices).prop_map(|(size, deal, live, choices)| {
        let (ranks, microbatches, chunks) = size;
        let size = Size::new(ranks, microbatches).with_chunks(chunks);
        play(size, deal, live, &choices)
    })
}

/// How stages are dealt to ranks: in turn, or there and back (the V shape).
#[derive(Debug, Clone, Copy)]
enum Deal {
    InTurn,
    ThereAndBack,
}

impl Deal {
    fn rank(self, stage: usize, ranks: usize) -> usize {
        match self {
            Self::ThereAndBack if (stage / ranks) % 2 == 1 => ranks - 1 - stage % ranks,
            _ => stage % ranks,
        }
    }
}

/// Plays a pipeline in which each rank, in turn, does the one of its ready actions that `choices`
/// picks, with at most `live` microbatches of a stage between forward and weight gradient.
fn play(size: Size, deal: Deal, live: usize, choices: &[u8]) -> Schedule {
    let stages = size.stages();
    let [mut forwards, mut inputs, mut weights] = [0; 3].map(|_| vec![0; stages]);
    let mut actions = vec![Vec::new(); size.ranks];
    let mut choices = choices.iter().cycle();
    while weights.iter().any(|done| *done < size.microbatches) {
        for (rank, list) in actions.iter_mut().enumerate() {
            let mut ready = Vec::new();
            for s in (0..stages).filter(|s| deal.rank(*s, size.ranks) == rank) {
                let (f, i, w) = (forwards[s], inputs[s], weights[s]);
                if f < size.microbatches && f - w < live && (s == 0 || f < forwards[s - 1]) {
                    ready.push((s, Kind::Forward, f));
                }
                if i < f && (s + 1 == stages || i < inputs[s + 1]) {
                    ready.push((s, Kind::InputGrad, i));
                }
                if w < i {
                    ready.push((s, Kind::WeightGrad, w));
                }
            }
            let choice = usize::from(*choices.next().expect("a cycle does not end"));
            let Some(&(s, kind, m)) = ready.get(choice % ready.len().max(1)) else {
                continue;
            };
            match kind {
                Kind::Forward => forwards[s] += 1,
                Kind::InputGrad => inputs[s] += 1,
                _ => weights[s] += 1,
            }
            list.push(Action::new(StageId(s), kind, MicrobatchId(m)));
        }
    }
    Schedule::new("played", size, actions)
}
