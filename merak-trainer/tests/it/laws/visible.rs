//! L2 with ranks that share each sequence, where a token does not see all earlier ones: padding is
//! hidden, or several documents stand side by side.

use merak_trace::models::Visible;
use merak_trainer::{
    MerakTrainer, Result,
    data::{Dataset, IGNORED_LABEL, LABELS, Sample, SampleTensor},
};

use super::sp::check;
use crate::support::{Case, SEQ, Tokens, VOCAB};

const SAMPLES: usize = 37;

/// [`Tokens`] with padding, before or after, of which some samples consist.
#[derive(Debug)]
struct Padded;

impl Dataset for Padded {
    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let padding = [0, 3, 5, SEQ][index % 4];
        let is_padding = |at: usize| match index % 3 {
            0 => at >= SEQ - padding,
            _ => at < padding,
        };
        let mut sample = Tokens { samples: SAMPLES }.get(index)?;
        let token =
            |at: usize| i64::try_from((7 * index + at * at) % VOCAB).expect("a small number");
        let label = |at: usize| {
            if is_padding(at) {
                IGNORED_LABEL
            } else {
                token(at + 1)
            }
        };
        let seen = |at: usize| i64::from(!is_padding(at));
        sample.extend([
            (LABELS.to_owned(), vector(label)),
            ("attention_mask".to_owned(), vector(seen)),
        ]);
        Ok(sample)
    }
}

/// [`Tokens`] of documents of three positions, the first and the last of which are cut.
#[derive(Debug)]
struct Packed;

impl Dataset for Packed {
    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let mut sample = Tokens { samples: SAMPLES }.get(index)?;
        let document = |at: usize| i64::try_from((at + index) / 3).expect("a small number");
        sample.insert("document_ids".to_owned(), vector(document));
        Ok(sample)
    }
}

fn vector(of: impl Fn(usize) -> i64) -> SampleTensor {
    SampleTensor::vector((0..SEQ).map(of).collect())
}

/// One model of each kind of attention, with dropout: heads and learned positions, grouped heads,
/// these with a window, positions that padding does not count for.
fn models() -> Vec<Case> {
    let windowed = Case::llama()
        .with_model("model_type", "mistral")
        .with_model("sliding_window", 3);
    let relatives = Case::relatives().into_iter();
    let opt = relatives.filter(|(family, _)| *family == "opt");
    let models = [Case::gpt2(), Case::llama(), windowed].into_iter();
    let models = models.chain(opt.map(|(_, case)| case));
    models.map(|case| case.with_dropout(0.1)).collect()
}

/// Checks every model in every way to share a sequence against one rank, the other families in one.
fn check_all(see: impl Fn(Case) -> Case) {
    for case in models().into_iter().map(&see) {
        let ways = [
            (2, "ulysses"),
            (4, "ulysses"),
            (2, "ring"),
            (4, "ring"),
            (4, "all_gather"),
        ];
        let ways = ways.map(|(sp, method)| case.clone().sharing(sp).with("sp_method", method));
        check(&case, &ways, 3);
        let wide = ["ulysses", "ring"].map(|method| {
            let wide = case.clone().on((1, 2, 2)).sharing(2);
            wide.with("sp_method", method).with("zero_stage", 3)
        });
        check(&case, &wide, 3);
        let sliced = case.clone().on((2, 2, 1)).sharing(2);
        let sliced = sliced.with("sequence_parallel", true);
        check(&case, &[sliced.with("zero_stage", 1)], 3);
    }
    let others = Case::relatives().into_iter();
    let others = others.filter(|(family, _)| !["mistral", "opt"].contains(family));
    for (_, case) in others {
        let case = see(case.with_dropout(0.1));
        let ring = case.clone().sharing(2).with("sp_method", "ring");
        check(&case, &[ring], 3);
    }
}

#[test]
fn padding_is_hidden_from_ranks_that_share_a_sequence_as_from_one() {
    check_all(|case| case.seeing(Visible::Unpadded).with_data(Padded));
}

#[test]
fn documents_are_parted_for_ranks_that_share_a_sequence_as_for_one() {
    check_all(|case| case.seeing(Visible::Document).with_data(Packed));
}

#[test]
fn evaluations_hide_the_same_on_ranks_that_share_a_sequence() {
    let evaluated = |case: &Case| case.on_ranks(MerakTrainer::evaluate)[0].eval_loss;
    let all = || Case::llama().with_dropout(0.1);
    let packed = all().seeing(Visible::Document).with_data(Packed);
    for (case, without) in [
        (
            all().seeing(Visible::Unpadded).with_data(Padded),
            all().with_data(Padded),
        ),
        (packed, all().with_data(Tokens { samples: SAMPLES })),
    ] {
        let alone = evaluated(&case);
        assert!((evaluated(&without) / alone - 1.0).abs() > 1e-6, "it hides");
        for (sp, method) in [(2, "ulysses"), (4, "ring")] {
            let found = evaluated(&case.clone().sharing(sp).with("sp_method", method));
            let gap = (found / alone - 1.0).abs();
            assert!(gap < 1e-6, "{sp} {method}: {gap:e}");
        }
    }
}
