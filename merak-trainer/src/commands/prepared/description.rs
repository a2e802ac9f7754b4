//! A prepared run, described for people: its data and memory, and warnings besides those of the
//! plan.

use super::{super::output, Prepared};
use merak_ckpt::words::Bytes;
use merak_trainer::{
    Result,
    data::{Dataset, Datasets},
};
use std::{fmt::Write as _, sync::Arc};

impl Prepared {
    /// The plan, for people.
    pub(crate) fn describe(&self) -> Result<String> {
        let data = format!("{} ({})", self.description, self.amounts());
        let mut warnings = String::new();
        self.warn_in(&mut warnings)?;
        self.planned.describe(Some(&data), &warnings)
    }

    /// The least memory of the run, for people.
    pub(crate) fn describe_memory(&self) -> Result<String> {
        let data = self.datasets.held_bytes as u64;
        let memory = self.plan.run_memory(&self.args, &self.workloads(), data)?;
        let total = Bytes(memory.total());
        let text = format!("memory    at least {total}: {memory}\n");
        Ok(output::fitted(&text))
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

    /// Warns of settings that do nothing, or not what they seem to.
    fn warn_in(&self, text: &mut String) -> Result<()> {
        let args = &self.args;
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
