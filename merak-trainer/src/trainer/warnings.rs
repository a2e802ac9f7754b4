//! Warnings at the start of a run, of arguments that cost more than they give.

use crate::{
    config::CheckedArguments,
    machine::num_cores,
    plan::{Draft, kept_bytes, kept_under},
    world::threads_per_rank,
};
use merak_partition::{ParamBytes, ParamSums};
use merak_trace::{Units, backend::candle::Products};
use merak_zero::ZeroConfig;

/// Threads of a rank for each core of its host from which on a step takes much longer: with sixty
/// times as many as cores it takes seconds.
const MOST_THREADS_A_CORE: usize = 8;

/// Warns of what the arguments ask for in vain, and of what the split of layers over ranks costs;
/// for the first rank.
pub(super) fn warn(args: &CheckedArguments, draft: &Draft) {
    let (zero_stage, pp) = (u8::from(args.zero_stage), args.pp);
    let gradient_ranks = kept_bytes(args, args.replicas()).gradient.ranks;
    if gradient_ranks > 1 && pp > 1 {
        tracing::warn!(
            zero_stage,
            pp,
            "with several pipeline stages every microbatch is reduced apart: zero_stage 1 sends less"
        );
    }
    let unmatched = draft.unmatched_targets.iter().map(ToString::to_string);
    for told in args.without_effect().into_iter().chain(unmatched) {
        tracing::warn!("{told}");
    }
    if args.data.streaming && args.do_eval && args.eval_steps.is_none() {
        tracing::warn!(
            "a stream has no end of an epoch to evaluate at: \"eval_steps\" sets steps between evaluations"
        );
    }
    let units = Units::of_processor().min(args.compute.units);
    if args.products() == Products::Rounded && units == Units::None {
        tracing::warn!(
            "no unit for products of bf16 is here, or \"compute.units\" leaves it out: {}",
            without_units(args)
        );
    }
    let has_weights = args.model.hf_dir.is_some() || args.resume_from_checkpoint.is_some();
    if args.lora_config.is_some() && !has_weights {
        tracing::warn!(
            "the adapter is trained beside weights that are drawn at random: \"model.hf_dir\" names a folder to start from"
        );
    }
    if let Some(logits) = draft.tensor.gathers.iter().find(|gather| gather.is_logits) {
        tracing::warn!(
            "\"parallel_vocab\" splits the logits, but {} needs them whole: they are gathered, {} bytes a microbatch",
            logits.needed_by,
            logits.bytes
        );
    }
    let (threads, cores) = (threads_per_rank(args), num_cores());
    if threads > MOST_THREADS_A_CORE * cores {
        tracing::warn!(
            threads,
            cores,
            "\"compute.threads_per_rank\" has many more threads than there are cores, which wait for each other"
        );
    }
    if args.offload_optimizer != args.offload() {
        tracing::warn!(
            "\"offload_optimizer\" host changes nothing: \"compute.device\" is cpu, whose weights lie in host memory \
             too; disk keeps optimizer state in files"
        );
    }
}

/// What `bf16` is good for where products take as long as in f32.
fn without_units(args: &CheckedArguments) -> String {
    if args.narrow().is_none() {
        return "\"half_precision_backend\" amp saves neither time nor memory".to_owned();
    }
    let config = ZeroConfig {
        has_masters: false,
        ..args.zero_config(1)
    };
    let narrow = trained_bytes(kept_bytes(args, args.replicas()), 2, args.replicas());
    let wide = trained_bytes(kept_under(&config, args.replicas()), 4, args.replicas());
    let saved = if narrow < wide {
        "saves memory and no time"
    } else {
        "saves no time, and memory only of weights that are not trained"
    };
    format!(
        "\"bf16\" {saved}: a trained weight takes {narrow} bytes with all that is kept for it, in f32 {wide}"
    )
}

/// Bytes on each rank for a trained weight of some bytes, rounded to tenths.
fn trained_bytes(kept: ParamBytes, weight_bytes: usize, replicas: usize) -> f64 {
    // As many elements as replicas can divide without a rest.
    let elements = 1000 * replicas;
    let held = kept.held(ParamSums {
        frozen_bytes: 0,
        trained: elements,
        narrow: if weight_bytes == 2 { elements } else { 0 },
        trained_bytes: weight_bytes * elements,
        uses: elements,
    });
    (10.0 * held.total() as f64 / elements as f64).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn warning(keys: &str) -> String {
        let line: Vec<_> = keys.split(' ').map(|key| format!("--{key}")).collect();
        let args = Config::load(None, [], &line).unwrap().check().unwrap();
        without_units(&args)
    }

    #[test]
    fn bf16_without_units_is_said_to_save_what_it_saves() {
        let whole = "\"bf16\" saves no time, and memory only of weights that are not trained: a trained weight \
                     takes 18 bytes with all that is kept for it, in f32 16";
        for keys in [
            "bf16 zero_stage=0",
            "bf16 zero_stage=3",
            "bf16 zero_stage=0 dp=4",
        ] {
            assert_eq!(warning(keys), whole);
        }
        let cases = [
            ("bf16 dp=2", "saves no time,", "12 bytes", "f32 12"),
            ("bf16 dp=4", "saves memory and no time", "9 bytes", "f32 10"),
            (
                "bf16 dp=4 zero_stage=2",
                "saves memory and no time",
                "6 bytes",
                "f32 7",
            ),
            (
                "bf16 dp=4 zero_stage=3",
                "saves no time,",
                "4 bytes",
                "f32 4",
            ),
            (
                "bf16 dp=3 optim=sgd",
                "saves memory and no time",
                "7.3 bytes",
                "f32 8",
            ),
        ];
        for (keys, saved, narrow, wide) in cases {
            let text = warning(keys);
            let has = |part: &str| text.contains(part);
            assert!(
                has(saved) && has(narrow) && text.ends_with(wide),
                "{keys}: {text}"
            );
        }
        let amp = warning("bf16 half_precision_backend=amp");
        assert!(amp.ends_with("neither time nor memory"), "{amp}");
    }
}
