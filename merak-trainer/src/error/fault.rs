//! Whether the user or the run is at fault, and which keys may be.

use super::Error;
use crate::config::keys;
use merak_ckpt::words::sentence;
use std::error::Error as StdError;

impl Error {
    /// Whether the command line, the configuration or an input is at fault (exit status 2), and not
    /// the run (exit status 1).
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Write { .. }
            | Self::BestModel { .. }
            | Self::DataThread
            | Self::NoThread { .. }
            | Self::SkippedSteps { .. }
            | Self::EvaluationLoss { .. }
            | Self::Rank { .. }
            | Self::Step { .. }
            | Self::Panicked { .. }
            | Self::Stage { .. } => false,
            Self::Blamed { source, .. } => source.is_user_error(),
            Self::Schedule(error) => !pipeline_failed(error),
            Self::Optimizer(error) => !matches!(**error, merak_zero::Error::Communication { .. }),
            Self::Model(error) => !node_failed(error),
            Self::Group(error) => matches!(
                **error,
                merak_mpu::Error::WorldSize { .. }
                    | merak_mpu::Error::ZeroDegree { .. }
                    | merak_mpu::Error::BadVariable { .. }
                    | merak_mpu::Error::MissingVariable { .. }
                    | merak_mpu::Error::NoProcessEngine { .. }
                    | merak_mpu::Error::EngineNotBuilt { .. }
                    | merak_mpu::Error::UnfitEngine { .. }
            ),
            Self::Checkpoint(error) => error.is_user_error(),
            _ => true,
        }
    }

    /// Whether the rank need not be added: every rank ends with the same error, or the error names
    /// its rank.
    pub(crate) fn says_whose(&self) -> bool {
        let names_rank = matches!(self, Self::SkippedSteps { .. } | Self::Step { .. });
        names_rank || self.is_user_error() || self.aborted().is_some()
    }

    /// The message about the failure of a rank other than this one, where that has ended this one.
    /// Processes that survive a failure say so with an exit status of their own.
    pub fn aborted_by_other(&self, this: usize) -> Option<String> {
        let (by, reason) = self.aborted().filter(|(by, _)| *by != this)?;
        Some(format!("rank {by} failed: {}", sentence(reason)))
    }

    /// The rank whose failure has ended this one, and what happened there.
    fn aborted(&self) -> Option<(usize, &str)> {
        let mut cause: Option<&(dyn StdError + 'static)> = Some(self);
        while let Some(error) = cause {
            if let Some(merak_mpu::Error::Aborted { by, reason }) = error.downcast_ref() {
                return Some((*by, reason));
            }
            if let Some(merak_pipe::Error::Aborted { by, reason }) = error.downcast_ref() {
                return Some((*by, reason));
            }
            cause = below(error);
        }
        None
    }
}

/// The cause of an error, those that print like their cause included.
fn below<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e (dyn StdError + 'static)> {
    let boxed = || error.downcast_ref::<Box<Error>>().map(|error| &**error);
    let Some(ours) = error.downcast_ref::<Error>().or_else(boxed) else {
        return error.source();
    };
    match ours {
        Error::Group(error) => Some(&**error),
        Error::Schedule(error) => Some(&**error),
        Error::Optimizer(error) => Some(&**error),
        Error::Model(error) => Some(&**error),
        other => other.source(),
    }
}

impl Error {
    /// The keys that may be to blame, as far as the error tells: the likeliest first. Of several,
    /// the key that the highest layer set is to blame.
    pub(crate) fn keys(&self) -> Vec<&'static str> {
        match self {
            Self::ReadInput { key, .. }
            | Self::UnknownToken { key, .. }
            | Self::Blamed {
                key, place: None, ..
            } => vec![key],
            Self::NoRecords { .. } | Self::Record { .. } => vec!["data.path", "data.format"],
            Self::NoCheckpoint { .. } => vec!["resume_from_checkpoint"],
            Self::NoText { .. }
            | Self::TensorFile { .. }
            | Self::NotText { .. }
            | Self::DataTooLarge { .. } => vec!["data.path"],
            Self::Tokenizer { .. } => vec!["data.tokenizer"],
            Self::Vocabulary { .. } | Self::SpareTokens { .. } => {
                vec!["data.tokenizer", "model.config", "model.hf_dir"]
            }
            Self::OutputDir { .. } => vec!["output_dir"],
            Self::OwnFolder(_) => vec!["model.hf_dir"],
            Self::FewerLayers { .. } => vec!["pp"],
            Self::TooManyRanks { .. } => vec!["dp", "tp", "pp"],
            Self::TwoLengths { .. } | Self::ShortSpans { .. } | Self::ShortTarget { .. } => {
                vec!["seq_length"]
            }
            Self::TooFewTokens { .. } => vec!["seq_length", "data.path"],
            Self::TooFewSamples { split, .. } if *split == "evaluation" => vec![
                "per_device_eval_batch_size",
                "dataloader_drop_last",
                "gradient_accumulation_steps",
                "dp",
                "data.path",
            ],
            Self::TooFewSamples { .. } => vec![
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "dp",
                "data.path",
            ],
            Self::DataKind { .. } => vec!["data.format"],
            Self::ActivationBudget { .. } => vec!["activation_memory_budget"],
            Self::StageMemory { .. } | Self::ScheduleMemory { .. } => {
                vec!["autopipe.memory_limit"]
            }
            Self::Adapter(error) => match **error {
                merak_ckpt::AdaptError::Name { .. } => vec!["adapter_name"],
                _ => vec!["lora_config"],
            },
            Self::AdapterFile { .. } | Self::NothingTrained => vec!["lora_config"],
            Self::Model(error) => of_model(error),
            Self::Optimizer(error) => of_optimizer(error),
            Self::Schedule(error) => of_schedule(error),
            Self::Partition(error) => of_partition(error),
            Self::TensorParallel(error) => of_tensor_parallel(error),
            _ => Vec::new(),
        }
    }
}

fn of_model(error: &merak_trace::Error) -> Vec<&'static str> {
    match error {
        merak_trace::Error::SeqLength { .. } => {
            vec!["seq_length", "data.path", "model.config", "model.hf_dir"]
        }
        _ => Vec::new(),
    }
}

fn of_optimizer(error: &merak_zero::Error) -> Vec<&'static str> {
    use merak_zero::Error as E;
    match error {
        E::ForeignKwarg { .. } | E::LongDecay { .. } => vec!["lr_scheduler_kwargs"],
        E::OutOfRange { key, .. } | E::NotAvailable { key, .. } | E::UnknownName { key, .. } => {
            // A name that is not a key is a parameter of the learning-rate schedule.
            let known = keys().find(|known| known.name == *key);
            vec![known.map_or("lr_scheduler_kwargs", |known| known.name)]
        }
        _ => Vec::new(),
    }
}

fn of_schedule(error: &merak_pipe::Error) -> Vec<&'static str> {
    use merak_pipe::Error as E;
    match error {
        E::TooFewMicrobatches { .. } => vec!["gradient_accumulation_steps", "train_schedule"],
        E::Chunks { .. } => vec!["virtual_stages", "train_schedule"],
        E::Count { what, .. } if what.starts_with("microbatch") => {
            vec!["gradient_accumulation_steps"]
        }
        E::Count { .. } => vec!["pp", "virtual_stages", "gradient_accumulation_steps"],
        _ => Vec::new(),
    }
}

fn of_partition(error: &merak_partition::Error) -> Vec<&'static str> {
    use merak_partition::Error as E;
    match error {
        E::ShardCount { .. } => vec!["shard_count", "pp"],
        E::TooFewSegments { .. } | E::NoLegalCut { .. } => vec!["pp", "virtual_stages"],
        E::UnknownSplitPoint { .. } | E::NoSplitPoint { .. } | E::UnknownFamily { .. } => {
            vec!["custom_split_points", "split_method"]
        }
        E::CustomPartition { .. } => vec!["custom_partition"],
        E::NotACommCost { .. } => vec!["autopipe.comm_cost"],
        E::Microbatches { .. } => vec!["autopipe.micro_batches", "gradient_accumulation_steps"],
        E::NoPartition { .. } => vec!["autopipe.memory_limit"],
        _ => Vec::new(),
    }
}

fn of_tensor_parallel(error: &merak_tp::Error) -> Vec<&'static str> {
    use merak_tp::Error as E;
    match error {
        E::BothKinds { .. } | E::IncompleteLists { .. } => {
            vec![
                "tp_layer_lists.col_para_list",
                "tp_layer_lists.row_para_list",
            ]
        }
        E::Indivisible { .. }
        | E::Heads { .. }
        | E::KvHeads { .. }
        | E::NothingMatched { .. }
        | E::NoLists { .. } => vec!["tp"],
        _ => Vec::new(),
    }
}

/// Whether a schedule was under way when it failed.
fn pipeline_failed(error: &merak_pipe::Error) -> bool {
    use merak_pipe::Error as E;
    matches!(
        error,
        E::Link { .. }
            | E::Timeout { .. }
            | E::Aborted { .. }
            | E::Cancelled { .. }
            | E::PeerLeft { .. }
            | E::NoThread { .. }
    )
}

/// Whether a node was running when it failed.
fn node_failed(error: &merak_trace::Error) -> bool {
    use merak_trace::Error as E;
    matches!(
        error,
        E::Collective { .. } | E::Kernel { .. } | E::Backend { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepPart;

    #[test]
    fn the_failure_of_another_rank_is_found_below_whatever_it_has_ended() {
        let aborted = || merak_mpu::Error::Aborted {
            by: 2,
            reason: "no space left".to_owned(),
        };
        let node = "loss".to_owned();
        let in_node = merak_trace::Error::Collective {
            node,
            source: aborted(),
        };
        let in_optimizer = merak_zero::Error::Communication {
            during: "the norm",
            source: aborted(),
        };
        let in_pipeline = merak_pipe::Error::Aborted {
            by: 2,
            reason: "no space left".to_owned(),
        };
        let of_stage = |source: Error| Error::Stage {
            action: "0F3".parse().unwrap(),
            source: source.into(),
        };
        let of_step = |source: Error| Error::Step {
            rank: 0,
            stages: vec![0],
            part: StepPart::Train,
            step: 7,
            source: Box::new(source),
        };
        for error in [
            Error::from(aborted()),
            in_node.into(),
            in_optimizer.into(),
            in_pipeline.into(),
        ] {
            for error in [of_step(of_stage(error)), of_stage(aborted().into())] {
                assert!(error.says_whose());
                let told = error.aborted_by_other(0).unwrap();
                assert_eq!(told, "rank 2 failed: no space left");
                // The rank itself has its own error.
                assert_eq!(error.aborted_by_other(2), None);
            }
        }
        let own = of_step(Error::DataThread);
        assert_eq!(own.aborted_by_other(0), None);
    }
}
