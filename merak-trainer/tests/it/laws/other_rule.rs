//! An optimizer that the program brings along.

use crate::support::{Case, assert_close_losses, numbers};
use merak_ckpt::{Checkpoint, Checksum};
use merak_trainer::chain;
use merak_zero::{RuleStep, UpdateRule};

/// Descent along a decaying sum of gradients.
#[derive(Debug)]
struct HeavyBall;

impl UpdateRule for HeavyBall {
    fn name(&self) -> &'static str {
        "heavy_ball"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["velocity"]
    }

    fn step(
        &self,
        step: &RuleStep<'_>,
        params: &mut [f32],
        grads: &[f32],
        state: &mut [&mut [f32]],
    ) {
        for ((p, g), v) in params.iter_mut().zip(grads).zip(&mut *state[0]) {
            *v = 0.9 * *v + g;
            *p -= step.lr as f32 * *v;
        }
    }
}

fn heavy_ball() -> Case {
    let case = Case::gpt2().with_rule(HeavyBall);
    case.with("learning_rate", 0.05).with("weight_decay", 0)
}

#[test]
fn a_rule_of_the_program_steps_as_sgd_with_momentum_does_on_any_topology() {
    let sgd = Case::gpt2().with("optim", "sgd").with("sgd_momentum", 0.9);
    let sgd = sgd.with("learning_rate", 0.05).with("weight_decay", 0);
    let expected = sgd.run(4);
    for degrees in [(1, 1, 1), (1, 2, 2), (2, 1, 1)] {
        let case = heavy_ball().on(degrees).with("zero_stage", 0);
        let run = case.run(4);
        let what = format!("{degrees:?}");
        assert_close_losses(&run.reports, &expected.reports, 1e-4, &what);
    }
}

#[test]
fn zero_takes_an_untested_rule_with_the_key_alone_and_its_state_is_resumed() {
    let case = heavy_ball().on((2, 1, 1));
    let error = case.try_on_ranks(|_| Ok(())).expect_err("it is refused");
    let text = chain(&error);
    let expected = "the optimizer \"heavy_ball\" of this program was not tested with ZeRO, which \
                    divides its state in stage 1 over 2 replicas: set \
                    \"zero_allow_untested_optimizer\" to true, or \"zero_stage\" to 0";
    assert!(text.contains(expected), "{text}");
    let whole = case.clone().with("zero_stage", 0).run(4);
    let case = case.with("zero_allow_untested_optimizer", true);
    let folder = tempfile::tempdir().expect("a temporary folder");
    for stage in [1, 3] {
        let case = case.clone().with("zero_stage", stage);
        let case = case.writing(&folder.path().join(stage.to_string()));
        let unbroken = case.run(4);
        assert_close_losses(&unbroken.reports, &whole.reports, 1e-4, "stage 0");
        let saved = case.on_ranks(|trainer| {
            trainer.train_step()?;
            trainer.train_step()?;
            trainer.save_checkpoint()
        });
        let checkpoint = Checkpoint::open(&saved[0]).expect("it was saved");
        let kinds = checkpoint.manifest().kinds().into_iter();
        assert!(kinds.into_iter().any(|kind| kind.as_str() == "velocity"));
        let resumed = case.with("resume_from_checkpoint", "latest").run(2);
        assert_eq!(numbers(&resumed.reports), numbers(&unbroken.reports[2..]));
        assert!(resumed.weights == unbroken.weights, "stage {stage}");
    }
}

/// The same rule under another name.
#[derive(Debug)]
struct LightBall;

impl UpdateRule for LightBall {
    fn name(&self) -> &'static str {
        "light_ball"
    }

    fn state_names(&self) -> &'static [&'static str] {
        HeavyBall.state_names()
    }

    fn step(
        &self,
        step: &RuleStep<'_>,
        params: &mut [f32],
        grads: &[f32],
        state: &mut [&mut [f32]],
    ) {
        HeavyBall.step(step, params, grads, state);
    }
}

#[test]
fn state_of_another_rule_is_refused_by_its_name_even_where_the_states_have_the_same_names() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = heavy_ball().writing(folder.path());
    let saved = case.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.save_checkpoint()
    });
    let light = heavy_ball().with_rule(LightBall).writing(folder.path());
    let resumed = light.with("resume_from_checkpoint", "latest");
    let error = resumed.try_on_ranks(|_| Ok(())).expect_err("it is refused");
    let text = chain(&error);
    let expected = "has the optimizer state of heavy_ball (velocity), but the program's rule is light_ball \
                    (velocity): choose the same one, or set \"no_load_optim\" to start with fresh state";
    assert!(text.contains(expected), "{text}");
    let _ = resumed.with("no_load_optim", true).run(1);
    // A checkpoint of an earlier version does not tell the rule.
    let manifest = saved[0].join("manifest.json");
    let text = std::fs::read_to_string(&manifest).expect("it was saved");
    let (text, _) = text.rsplit_once("\"checksum\"").expect("it has one");
    let older = text.replace(r#","rule":"heavy_ball""#, "");
    assert_ne!(older, text);
    let checksum = Checksum::of(older.as_bytes());
    let older = format!("{older}\"checksum\": \"{checksum}\"\n}}\n");
    std::fs::write(&manifest, older).expect("the folder can be written");
    let resumed = heavy_ball().writing(folder.path());
    let _ = resumed.with("resume_from_checkpoint", "latest").run(1);
}
