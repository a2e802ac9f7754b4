//! The memory of a process does not grow, however long it trains, evaluates and generates; and
//! kills change no bit.

mod kills;

pub(crate) use kills::Dice;

use merak_ckpt::GenerateOptions;
use merak_trainer::{MerakTrainer, Result, metrics::resident_bytes};

use crate::support::{Case, Tokens, alone};

/// Bytes that the allocator may gain while messages of half a MiB pass.
const TOLERANCE: u64 = 6 << 20;

/// Bytes that the process holds now.
fn resident() -> u64 {
    resident_bytes().expect("the system tells")
}

#[test]
fn an_evaluation_at_pp_2_keeps_no_message_that_it_received() {
    alone("soak::of_fifty_iterations", &[]);
}

#[test]
#[ignore = "looks at the memory of the process: alone in one, which the test above starts"]
fn of_fifty_iterations() {
    // A message has 64 * 8 * 256 elements: half a MiB.
    let case = Case::gpt2()
        .with_model("n_embd", 256)
        .with_data(Tokens { samples: 64 * 50 })
        .with("per_device_eval_batch_size", 64)
        .with_microbatches(1)
        .on((1, 1, 2));
    let held = case.on_ranks(|trainer| {
        trainer.evaluate()?;
        let warm = resident();
        trainer.evaluate()?;
        trainer.evaluate()?;
        Ok((warm, resident()))
    });
    let grown = held.iter().map(|(warm, end)| end.saturating_sub(*warm));
    let grown = grown.max().expect("two ranks");
    assert!(grown < TOLERANCE, "100 messages left {grown} bytes");
}

/// Steps between two looks at the memory.
const STEPS: usize = 1000;

/// Number of looks at the memory; after the second one the process is warm.
const LOOKS: usize = 20;

/// Microbatches of a step.
const MICROBATCHES: usize = 4;

/// Bytes that each microbatch after that may leave: no more than the smallest block of an
/// allocator, on one rank alone.
const LEAK: usize = 16;

/// Steps, an evaluation, and texts of lengths that differ from look to look.
fn look(trainer: &mut MerakTrainer, number: usize) -> Result<u64> {
    for _ in 0..STEPS {
        trainer.train_step()?;
    }
    trainer.evaluate()?;
    let prompts: Vec<_> = (1..=3).map(|length| vec![7; length + number % 4]).collect();
    let options = GenerateOptions {
        max_new_tokens: 5,
        ..GenerateOptions::default()
    };
    trainer.generate(&prompts, &options)?;
    Ok(resident())
}

/// Takes minutes: `cargo test -p merak-trainer --test it -- --ignored --nocapture soak::twenty`.
#[test]
#[ignore = "takes minutes"]
fn twenty_thousand_steps_hold_no_more_memory_than_two_thousand() {
    let case = Case::gpt2()
        .with_model("n_embd", 16)
        .with("max_steps", STEPS * LOOKS)
        .with("per_device_train_batch_size", 1)
        .with("dataloader_num_workers", 1)
        .with_microbatches(MICROBATCHES)
        .on((1, 1, 2));
    let ranks = case.on_ranks(|trainer| {
        (0..LOOKS)
            .map(|number| look(trainer, number))
            .collect::<Result<Vec<_>>>()
    });
    let held = &ranks[0];
    let (warm, end) = (held[1], held[LOOKS - 1]);
    let leaked = (LOOKS - 2) * STEPS * MICROBATCHES * LEAK;
    let text: Vec<_> = held.iter().map(|bytes| bytes >> 10).collect();
    eprintln!("resident KiB after each {STEPS} steps: {text:?}");
    assert!(end < warm + leaked as u64, "{text:?}");
}
