//! What a training tells at its end.

use super::{super::output, Args, Finished, KEEPS_NOTHING, Run};
use merak_ckpt::{
    Store,
    words::{Bytes, file, plain},
};
use merak_trace::models::Objective;
use merak_trainer::{LoadedCheckpoint, Stop, TrainOutput, metrics::Percent};
use signal_hook::low_level::signal_name;
use std::{fmt::Write as _, path::Path};

impl Run<'_> {
    /// The summary of the run: figures in lines that fit the terminal; the sample, paths and
    /// commands as they are. `args` started it.
    pub(super) fn summary(&self, finished: &Finished, output_dir: &Path, args: &Args) -> String {
        let mut text = String::new();
        tell_steps(&finished.output, finished.total_steps, &mut text);
        self.tell_evaluation(finished, &mut text);
        self.tell_memory(finished, &mut text);
        self.compare_times(finished, &mut text);
        if let Some((peak, mfu)) = self.peak.zip(finished.mfu) {
            let _ = writeln!(text, "MFU       {} of {peak}", Percent(mfu));
        }
        text = output::fitted(&text);
        self.tell_sample(finished, &mut text);
        let metrics = file(&output_dir.join("metrics.jsonl"));
        let _ = writeln!(text, "metrics   {metrics}");
        let report = file(&output_dir.join("report.html"));
        let _ = writeln!(text, "report    {report}");
        if self.args.saves() {
            let store = Store::in_output_dir(output_dir);
            let last = store.path_of(finished.output.global_step as u64);
            let _ = writeln!(text, "saved     {}", file(&last));
            let output = &finished.output;
            let is_interrupted = matches!(output.stopped_by, Some(Stop::Signal { .. }));
            if is_interrupted && output.global_step < finished.total_steps {
                let config = file(&args.config);
                let keys = if args.keys.is_empty() {
                    ""
                } else {
                    ", with the same keys"
                };
                let _ = writeln!(text, "go on     merak train {config} --resume auto{keys}");
            }
            let best = finished.output.best;
            let best = best.map(|best| store.path_of(best.step as u64));
            self.advise_to_generate(&best.unwrap_or(last), &mut text);
        } else {
            text += &output::fitted(KEEPS_NOTHING);
        }
        text
    }

    /// The message about a checkpoint that is at the end of the run.
    pub(super) fn nothing_left(&self, checkpoint: &LoadedCheckpoint) -> String {
        let (path, step, total) = (
            file(&checkpoint.path),
            checkpoint.global_step,
            checkpoint.total_steps,
        );
        let key = if self.args.max_steps > 0 {
            "max_steps"
        } else {
            "num_train_epochs"
        };
        let mut text = output::fitted(&format!(
            "nothing left to do: {path} is at step {step}, and \"{key}\" ends the run at step {total}\n\
             go on     with a larger \"{key}\", for example --max_steps {}\n",
            step + total
        ));
        self.advise_to_generate(&checkpoint.path, &mut text);
        text
    }

    /// Adds how to use a saved model.
    fn advise_to_generate(&self, checkpoint: &Path, text: &mut String) {
        if self.plan.draft.model.objective() == Objective::CausalLm {
            let chat = if self.has_chats { " --chat" } else { "" };
            let checkpoint = file(checkpoint);
            let _ = writeln!(
                text,
                "continue  merak generate {checkpoint}{chat} --prompt TEXT"
            );
        }
    }

    /// Adds the losses on held-out samples.
    fn tell_evaluation(&self, finished: &Finished, text: &mut String) {
        if let Some(evaluation) = &finished.evaluation {
            let (loss, samples) = (evaluation.eval_loss, evaluation.eval_samples);
            let _ = writeln!(text, "validated loss {loss:.4} over {samples} samples");
            // Training is done: tokens that can no longer be read leave out a line.
            let bigram = self
                .corpus
                .as_ref()
                .and_then(|corpus| corpus.bigram_loss().ok());
            if let Some(bigram) = bigram.flatten() {
                let _ = writeln!(
                    text,
                    "bigram    loss {bigram:.4}: what counting pairs of tokens reaches on the same data"
                );
            }
        }
        if let Some(best) = finished.output.best {
            let _ = writeln!(
                text,
                "best      {} {:.4} at step {}, whose weights the model has now",
                self.args.metric_for_best_model.short(),
                best.score,
                best.step
            );
        }
    }

    /// Adds the activations of the first rank beside their prediction.
    fn tell_memory(&self, finished: &Finished, text: &mut String) {
        let measured = Bytes::from(finished.peak_activation_bytes);
        let predicted = self.predicted_memory().unwrap_or_default();
        let Some(predicted) = predicted.first() else {
            return;
        };
        // Both have gathered weights that come and go.
        let (what, bound) = match predicted.gathered {
            0 => ("activations", ""),
            _ => ("activations and gathered weights", "at most "),
        };
        let predicted = Bytes::from(predicted.activations + predicted.gathered);
        let _ = writeln!(
            text,
            "memory    {measured} of {what} at most on rank 0, predicted {bound}{predicted}"
        );
    }

    /// Adds the text that the model makes.
    fn tell_sample(&self, finished: &Finished, text: &mut String) {
        let Some((sample, tokenizer)) = finished.sample.as_ref().zip(self.tokenizer.as_ref())
        else {
            return;
        };
        let prompt = &sample.prompt_ids;
        let all = [&prompt[..], &sample.ids].concat();
        let _ = writeln!(
            text,
            "\nsample    the model continues >>>\n{}>>>{}<<<\n",
            plain(&tokenizer.decode(prompt).unwrap_or_default()),
            plain(
                &tokenizer
                    .decode_after(prompt.len(), &all)
                    .unwrap_or_default()
            )
        );
    }

    /// Adds the measured times of the steps beside the prediction.
    fn compare_times(&self, finished: &Finished, text: &mut String) {
        let mut steps = finished.times.clone();
        steps.sort_unstable();
        let Some((prediction, step)) = self.prediction.as_ref().zip(steps.get(steps.len() / 2))
        else {
            return;
        };
        let step = step.as_secs_f64();
        let _ = writeln!(
            text,
            "time      {:.1} ms a step (median of the last {}), predicted {:.1}: measured by predicted {:.2}",
            1e3 * step,
            steps.len(),
            1e3 * prediction.step(),
            step / prediction.step(),
        );
        for stage in self
            .plan
            .compare_stages(prediction, &finished.ran)
            .unwrap_or_default()
        {
            let _ = writeln!(text, "          {stage}");
        }
    }
}

/// Adds what was trained, of so many steps in all.
fn tell_steps(output: &TrainOutput, total: usize, text: &mut String) {
    let seconds = output.train_runtime.as_secs_f64();
    let speed = output.train_tokens_per_second;
    let steps = match (output.steps, output.global_step) {
        (steps, all) if steps == all => format!("{all} steps"),
        (steps, all) => format!("{steps} steps up to step {all}"),
    };
    let _ = writeln!(
        text,
        "\ntrained   {steps} ({:.2} epochs) in {seconds:.1} s, {speed:.0} tokens/s, mean loss {:.4}",
        output.epoch, output.training_loss
    );
    let _ = match output.stopped_by {
        None => Ok(()),
        Some(Stop::Asked) => writeln!(
            text,
            "stopped   early, as \"early_stopping_patience\" or a callback asks"
        ),
        Some(Stop::Signal { signal, .. }) => writeln!(
            text,
            "stopped   by {} at step {} of {total}",
            signal_name(signal as i32).unwrap_or("a signal"),
            output.global_step
        ),
    };
    if output.skipped_steps > 0 {
        let _ = writeln!(
            text,
            "skipped   {} of the {} steps, as a gradient was not finite",
            output.skipped_steps, output.steps
        );
    }
    if output.rollbacks > 0 {
        let _ = writeln!(
            text,
            "returned  {} times to the last checkpoint, and on after the data that diverged",
            output.rollbacks
        );
    }
}
