//! What a training prints: its plan, its events, its figures.

use std::process::Stdio;

use insta::assert_snapshot;

use super::Workplace;

#[test]
fn a_dry_run_prints_the_plan_and_writes_nothing() {
    let place = Workplace::new();
    let plan = place.succeed("train merak.toml --dry-run --tp 2 --pp 2");
    assert_snapshot!(plan, @r#"
    model     gpt2: 17776 parameters, 4 layers
    data      text: 1 file, 1.91 KiB (1860 training tokens, 97 validation tokens)
    ranks     4 = dp 1 x tp 2 x pp 2, 1 compute threads each
    batch     4 samples of 16 tokens = 1 per microbatch x 4 microbatches x dp 1
    schedule  1f1b

    stage  segments  parameters    forward   backward  sent (act + grad)  received (act + grad)      kept  live   memory  inputs     modules
        0         5      11.2 k  133 kFLOP  352 kFLOP     1.00 KiB + 0 B         0 B + 1.00 KiB  4.25 KiB     2  134 KiB  input_ids  transformer.wte, transformer.wpe, transformer.h.0-1
        1         5      6.59 k  283 kFLOP  635 kFLOP     0 B + 1.00 KiB         1.00 KiB + 0 B  22.4 KiB     1  140 KiB  labels     transformer.h.2-3, transformer.ln_f, lm_head, loss
    memory: weights, gradients, optimizer state and kept values; batches and values within a phase come on top
    segments by farthest_min_deps: 1644 parameters a segment for 8 segments, 11 candidate cuts
    stages by uniform: 10 segments as 5 + 5; the longest forward is 1.36 times the mean
    tied transformer.wte.weight: stage 0 owns it, copies on 1
    memory    at least 2.67 MiB: of all ranks (4) weights take 121 KiB, gradients 121 KiB, optimizer state 242 KiB, activations 453 KiB, threads and programs 1.75 MiB, the data 7.64 KiB
    "#);
    assert!(!place.path("run").exists());
    assert_eq!(
        place.succeed("train merak.toml --tp=2 --pp=2 --dry-run"),
        plan
    );
    let idle = place.succeed("train merak.toml --tp=2 --pp=2 --dry-run --profile_steps 5");
    let warning = "warning: \"profile_steps\" has no effect: \"profile_start_step\" is unset";
    assert!(idle.contains(warning), "{idle}");
}

#[test]
fn events_name_their_rank_step_stage_and_microbatch() {
    let place = Workplace::new();
    let line = "train merak.toml --pp 2 --log merak_trainer=debug,merak_pipe=trace";
    let ended = place.merak(line);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let event = "rank{rank=1}:step{step=2 part=Train}:microbatch{stage=1 microbatch=3 kind=B}: \
                 merak_pipe::engine: action";
    assert!(ended.stderr.contains(event), "{}", ended.stderr);
}

#[test]
fn a_training_goes_on_when_nobody_reads_its_messages_any_more() {
    let place = Workplace::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = place.command("train merak.toml --log debug");
    let status = command.stdout(Stdio::null()).stderr(writer).status();
    assert_eq!(status.unwrap().code(), Some(0));
}

#[test]
fn a_resumed_run_says_from_where_and_sizes_are_for_people() {
    let place = Workplace::new();
    let told = place.succeed("train merak.toml --max_steps 2");
    assert!(
        told.contains("KiB of activations at most on rank 0, predicted "),
        "{told}"
    );
    let resumed = place.merak("train merak.toml --max_steps 3 --resume latest");
    let line = "resumed from step 2 of run/checkpoints/step-00000002\n";
    assert!(resumed.stderr.contains(line), "{}", resumed.stderr);
}
