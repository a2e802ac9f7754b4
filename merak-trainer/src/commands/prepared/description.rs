//! A prepared run, described for people: the plan, its memory, and warnings.

use super::{super::output, Prepared};
use merak_ckpt::words::{Bytes, plain};
use merak_partition::ScheduleChoice;
use merak_trace::models::Objective;
use merak_trainer::{
    FasterSchedule, Result,
    data::{Dataset, Datasets},
    threads_per_rank,
};
use std::{fmt::Write as _, sync::Arc};

impl Prepared {
    /// The plan, for people.
    pub(crate) fn describe(&self) -> Result<String> {
        let (args, plan) = (&self.args, &self.plan);
        let mut text = String::new();
        let trained: usize = plan.trained_params().map(|param| param.full.numel()).sum();
        let all = plan.graph.num_elements();
        let trained = if trained == all {
            String::new()
        } else {
            format!(", {trained} trained")
        };
        let _ = writeln!(
            text,
            "model     {}: {all} parameters{trained}, {} layers",
            plan.draft.info.family, plan.draft.info.num_layers
        );
        let _ = writeln!(text, "data      {} ({})", self.description, self.amounts());
        let _ = writeln!(
            text,
            "ranks     {} = dp {} x tp {} x pp {}{}, {} compute threads each",
            args.world_size(),
            args.dp,
            args.tp,
            args.pp,
            if args.sp > 1 {
                format!(" x sp {}", args.sp)
            } else {
                String::new()
            },
            threads_per_rank(args)
        );
        let _ = writeln!(
            text,
            "batch     {} samples of {} = {} per microbatch x {} microbatches x dp {}",
            args.global_batch(),
            self.sample_size(),
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            args.dp
        );
        self.describe_schedule(&mut text);
        let _ = writeln!(text);
        self.warn_in(&mut text)?;
        text += &plan.partition_report()?.to_text(output::columns());
        if let Some(faster) = self.faster {
            let FasterSchedule { kind, gain, .. } = faster;
            let [now, then] = faster.memory.map(|bytes| Bytes(bytes as u64));
            let _ = writeln!(
                text,
                "\nfaster    {kind} would shorten a step by {:.0} %, by {}, in at most {:.0} % more memory ({then} on the fullest rank, now \
                 {now}): set \"train_schedule\" to \"{kind}\" (schedules with other numbers of stages per rank are not compared)",
                100.0 * gain,
                self.costs.unit(),
                100.0 * FasterSchedule::MORE_MEMORY,
            );
        }
        Ok(output::fitted(&plain(&text)))
    }

    /// The schedule, how it was found, and what it is predicted to take.
    fn describe_schedule(&self, text: &mut String) {
        let (args, plan) = (&self.args, &self.plan);
        let _ = write!(text, "schedule  {}", plan.schedule.name);
        let _ = match args.pipeline_size().chunks {
            1 => writeln!(text),
            chunks => writeln!(text, ", {chunks} stages per rank"),
        };
        if let Some(found) = &plan.search {
            let gain = match found.start {
                Some((named, least)) => {
                    let gain = 100.0 * (1.0 - found.simulation.makespan / least);
                    format!("{gain:.1} % shorter than {named}")
                }
                None => "within a limit of memory that no named schedule keeps".to_owned(),
            };
            let (unit, stopped) = (self.costs.unit(), found.stopped);
            let _ = writeln!(text, "          {gain}, by {unit}; {stopped}");
        }
        if plan.search.is_none() && args.train_schedule == ScheduleChoice::Searched {
            let _ = writeln!(
                text,
                "          auto: no shorter schedule was found within the memory"
            );
        }
        self.describe_split(text);
        if let Some(prediction) = &self.prediction {
            let _ = writeln!(text, "time      {prediction}");
            if let Some(measurement) = self.measurement() {
                let _ = writeln!(text, "          {measurement}");
            }
        }
    }

    /// Why layers are split over ranks as they are, and what is gathered for that.
    fn describe_split(&self, text: &mut String) {
        let split = &self.plan.draft.tensor;
        let gathered = split.gathers.first().map(|first| {
            let bytes: usize = split.gathers.iter().map(|gather| gather.bytes).sum();
            format!(
                "gathers of split values: {}, {} a microbatch, the first of {} for {}; `merak trace` lists them",
                split.gathers.len(),
                Bytes(bytes as u64),
                first.value,
                first.needed_by
            )
        });
        let choices = split.choices.iter().map(ToString::to_string);
        for (index, line) in choices.chain(gathered).enumerate() {
            let head = if index == 0 { "tensor" } else { "" };
            let _ = writeln!(text, "{head:9} {line}");
        }
    }

    /// The least memory of the run, for people.
    pub(crate) fn describe_memory(&self) -> Result<String> {
        let data = self.datasets.held_bytes as u64;
        let memory = self.plan.run_memory(&self.args, &self.workloads(), data)?;
        let total = Bytes(memory.total());
        let text = format!("memory    at least {total}: {memory}\n");
        Ok(output::fitted(&text))
    }

    /// When the times behind the prediction were measured, for people.
    fn measurement(&self) -> Option<String> {
        let measured = self.costs.measurement()?;
        let age = measured.age();
        let percent = 100.0 * measured.spread;
        let steady = if measured.is_unsteady() {
            ": the machine was busy, and the prediction may be off"
        } else if measured.is_contradicted {
            "; steps took another time before, and the prediction may be off"
        } else if measured.is_worn() {
            ": that is long ago, and the prediction may be off"
        } else {
            ""
        };
        Some(format!(
            "by times measured {age}, whose repetitions differed by {percent:.0} %{steady}"
        ))
    }

    /// The amounts of data to train and to evaluate on, for people.
    fn amounts(&self) -> String {
        let described = |train, validation, what| {
            format!("{train} training {what}, {validation} validation {what}")
        };
        if let Some(corpus) = &self.corpus {
            return described(corpus.train.len(), corpus.validation.len(), "tokens");
        }
        let Datasets {
            train, validation, ..
        } = &self.datasets;
        let len = |data: &Option<Arc<dyn Dataset>>| data.as_ref().map_or(0, |data| data.len());
        match train {
            Some(train) if train.is_stream() => format!("{} validation samples", len(validation)),
            _ => described(len(train), len(validation), "samples"),
        }
    }

    /// What a sample is, for people.
    fn sample_size(&self) -> String {
        let plan = &self.plan;
        match (plan.draft.model.objective(), plan.draft.target_length) {
            (Objective::ImageClassification, _) => "an image".to_owned(),
            (_, Some(target)) => format!("{} tokens and {target} to write", plan.draft.seq_length),
            _ => format!("{} tokens", plan.draft.seq_length),
        }
    }

    /// Warns of settings that do nothing, or not what they seem to.
    fn warn_in(&self, text: &mut String) -> Result<()> {
        let (args, plan) = (&self.args, &self.plan);
        for unmatched in &plan.draft.tensor.unmatched {
            let _ = writeln!(
                text,
                "warning: the tensor-parallel pattern \"{unmatched}\" matches nothing"
            );
        }
        if let Some((warmup, total)) = self.long_warmup()? {
            let _ = writeln!(
                text,
                "warning: the warmup takes {warmup} steps and the run {total}: the learning rate never reaches \
                 \"learning_rate\", {}",
                args.learning_rate
            );
        }
        if let Some(first) = args.profile_start_step
            && first > self.total_steps
        {
            let _ = writeln!(
                text,
                "warning: \"profile_start_step\" is {first} and the run ends at step {}: no step is profiled",
                self.total_steps
            );
        }
        if args.asks_for_recomputation() && plan.recomputes_nothing() {
            let _ = writeln!(
                text,
                "warning: nothing is recomputed: the last stage, and shards without parameters or with embeddings, keep \
                 their activations under these keys"
            );
        }
        Ok(())
    }

    /// The steps of the warmup and of the run, where the run ends before the warmup does.
    fn long_warmup(&self) -> Result<Option<(u64, usize)>> {
        let Some(train) = &self.datasets.train else {
            return Ok(None);
        };
        let total = self
            .args
            .total_steps(train.len() / self.args.global_batch());
        let warmup = self.args.lr_schedule(total)?.warmup();
        Ok((warmup >= total as u64 && warmup > 0).then_some((warmup, total)))
    }
}
