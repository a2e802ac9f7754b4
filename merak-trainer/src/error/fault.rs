//! Whether the user or the run is at fault, and which keys may be.

use merak_mpu::Axis;

use super::{ConfigError, DataError, Error, FolderError, PlanError, ResumeError, Teller};

impl Error {
    /// Whether the command line, the configuration or an input is at fault (exit status 2), and not
    /// the run (exit status 1).
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Write { .. }
            | Self::Resume(ResumeError::BestModel { .. })
            | Self::Data(DataError::DataThread)
            | Self::NoThread { .. }
            | Self::SkippedSteps { .. }
            | Self::Diverged { .. }
            | Self::EvaluationLoss { .. }
            | Self::Absent(_)
            | Self::Rank { .. }
            | Self::Step { .. }
            | Self::Panicked { .. }
            | Self::Stage { .. } => false,
            Self::Blamed { source, .. } | Self::Told(source) => source.is_user_error(),
            Self::Schedule(error) => !pipeline_failed(error),
            Self::Optimizer(error) => !matches!(**error, merak_zero::Error::Communication { .. }),
            Self::Model(error) => !node_failed(error),
            Self::Group(error) => matches!(
                **error,
                merak_mpu::Error::WorldSize { .. }
                    | merak_mpu::Error::ZeroDegree { .. }
                    | merak_mpu::Error::BadVariable { .. }
                    | merak_mpu::Error::MissingVariable { .. }
                    | merak_mpu::Error::EngineNotBuilt { .. }
                    | merak_mpu::Error::UnfitEngine { .. }
                    | merak_mpu::Error::NoLibrary { .. }
                    | merak_mpu::Error::UnfitLibrary { .. }
                    | merak_mpu::Error::Rendezvous { .. }
                    | merak_mpu::Error::Refused { .. }
            ),
            Self::Checkpoint(error) => error.is_user_error(),
            _ => true,
        }
    }

    /// Whether the rank need not be added: every rank ends with the same error, or the error names
    /// its rank.
    pub(crate) fn says_whose(&self) -> bool {
        self.is_user_error()
            || matches!(
                self,
                Self::SkippedSteps { .. }
                    | Self::Diverged { .. }
                    | Self::Step { .. }
                    | Self::Rank {
                        teller: Teller::Here,
                        ..
                    }
            )
    }
}

impl Error {
    /// The keys that may be to blame, as far as the error tells: the likeliest first. Of several,
    /// the key that the highest layer set is to blame.
    pub(crate) fn keys(&self) -> Vec<&'static str> {
        match self {
            Self::ReadInput { key, .. }
            | Self::Config(ConfigError::UnknownMetric { key, .. })
            | Self::Blamed {
                key, place: None, ..
            } => vec![key],
            Self::OwnFolder(_) => vec!["model.hf_dir"],
            Self::TooManyRanks { .. } => vec!["dp", "tp", "pp"],
            Self::Adapter(error) => match **error {
                merak_ckpt::AdaptError::Name { .. } => vec!["adapter_name"],
                _ => vec!["lora_config"],
            },
            Self::Folder(FolderError::OutputDir { .. } | FolderError::NotShared { .. }) => {
                vec!["output_dir"]
            }
            Self::Folder(FolderError::LoggingDir { .. }) => vec!["logging_dir"],
            Self::Resume(ResumeError::NoCheckpoint { .. }) => vec!["resume_from_checkpoint"],
            Self::Resume(ResumeError::OtherTokenizer { .. }) => vec!["data.tokenizer"],
            Self::Data(error) => error.keys(),
            Self::Plan(error) => error.keys(),
            Self::Model(error) => of_model(error),
            Self::Optimizer(error) => of_optimizer(error),
            Self::Schedule(error) => of_schedule(error),
            Self::Partition(error) => of_partition(error),
            Self::TensorParallel(error) => of_tensor_parallel(error),
            _ => Vec::new(),
        }
    }
}

impl DataError {
    fn keys(&self) -> Vec<&'static str> {
        match self {
            Self::NoRecords { .. } | Self::Record { .. } => vec!["data.path", "data.format"],
            Self::NoText { .. }
            | Self::TensorFile { .. }
            | Self::TokenFile { .. }
            | Self::NotText { .. }
            | Self::DataTooLarge { .. } => vec!["data.path"],
            Self::ChatTemplate { .. } => vec!["data.chat_template", "data.tokenizer"],
            Self::NoShare { .. } => vec!["data.mixture"],
            Self::DataKind { .. } => vec!["data.format"],
            Self::Tokenizer { .. } | Self::OtherTokenizer { .. } => vec!["data.tokenizer"],
            Self::Vocabulary { .. } | Self::SpareTokens { .. } => {
                vec!["data.tokenizer", "model.config", "model.hf_dir"]
            }
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
            _ => Vec::new(),
        }
    }
}

impl PlanError {
    fn keys(&self) -> Vec<&'static str> {
        match self {
            Self::UnknownToken { key, .. } | Self::UnknownPart { key, .. } => vec![key],
            Self::SequenceDim { .. } => vec!["sequence_dim"],
            Self::FewerLayers { .. } => vec!["pp"],
            Self::FewMicrobatches { .. } => vec!["gradient_accumulation_steps", "train_schedule"],
            Self::NoSplitPoints(_) => vec!["split_method"],
            Self::ActivationBudget { .. } => vec!["activation_memory_budget"],
            Self::StageMemory { .. } | Self::ScheduleMemory { .. } => {
                vec!["autopipe.memory_limit"]
            }
            Self::AdapterFile { .. } | Self::NothingTrained => vec!["lora_config"],
            Self::AbsentWeight { .. } => vec![
                "tp_layer_lists.weight_change_list",
                "tp_layer_lists.col_para_list",
                "tp_layer_lists.row_para_list",
                "pp",
            ],
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
        E::OutOfRange { setting, .. } | E::UnknownName { setting, .. } => {
            vec![of_setting(setting)]
        }
        E::StateFile { .. } => vec!["offload_optimizer", "output_dir"],
        _ => Vec::new(),
    }
}

/// The keys that give the settings of merak-zero, where their names differ.
const RENAMED: [(&str, &str); 10] = [
    ("threads", "compute.threads_per_rank"),
    ("stage", "zero_stage"),
    ("optimizer", "optim"),
    ("reduce_bucket_size", "zero_reduce_bucket_size"),
    ("gather_bucket_size", "zero_allgather_bucket_size"),
    ("lr", "learning_rate"),
    ("scale", "loss_scale"),
    ("initial_power", "initial_scale_power"),
    ("window", "loss_scale_window"),
    ("min_scale", "min_loss_scale"),
];

/// The parameters of the learning-rate schedules, which have one key together.
const OF_SCHEDULE: [&str; 5] = ["num_cycles", "power", "lr_end", "timescale", "min_lr_ratio"];

/// The key that gives a setting of merak-zero.
fn of_setting(setting: &'static str) -> &'static str {
    let renamed = RENAMED.iter().find(|(name, _)| *name == setting);
    match renamed {
        Some((_, key)) => key,
        None if OF_SCHEDULE.contains(&setting) => "lr_scheduler_kwargs",
        None => setting,
    }
}

fn of_schedule(error: &merak_pipe::Error) -> Vec<&'static str> {
    use merak_pipe::Error as E;
    match error {
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
        E::TargetSegments { .. } => vec!["shard_count", "pp"],
        E::TooFewSegments { .. } | E::NoLegalCut { .. } => {
            vec!["virtual_stages", "pp", "leaf_modules"]
        }
        E::UnknownSplitPoint { .. } => vec!["custom_split_points", "split_method"],
        E::UnknownLeaf { .. } => vec!["leaf_modules"],
        E::Boundaries { .. } => vec!["custom_partition"],
        E::NotACommCost { .. } => vec!["autopipe.comm_cost"],
        E::Microbatches { .. } => vec!["autopipe.micro_batches", "gradient_accumulation_steps"],
        E::NoPartition { .. } => vec!["autopipe.memory_limit"],
        _ => Vec::new(),
    }
}

fn of_tensor_parallel(error: &merak_tp::Error) -> Vec<&'static str> {
    use merak_tp::Error as E;
    match error {
        E::BothKinds { col, row, .. } => of_lists(&[col, row]),
        E::IncompleteLists { found, .. } => of_lists(&[found]),
        E::NoDimension { list, .. } => of_lists(&[list]),
        E::Sequence {
            axis: Axis::Tensor, ..
        } => vec!["seq_length", "sequence_parallel", "tp"],
        E::Sequence { axis, .. } => vec!["seq_length", axis.degree_name()],
        E::NestedSequence { .. } => vec!["seq_length", "tp", "sp"],
        E::WholeSequence { .. } => vec!["sp"],
        E::Heads { axis, .. } | E::KvHeads { axis, .. } => vec![axis.degree_name()],
        E::Indivisible { .. }
        | E::NothingMatched { .. }
        | E::NothingToSplit { .. }
        | E::NoLists { .. } => vec!["tp"],
        _ => Vec::new(),
    }
}

/// The keys of the lists of layers that an error tells of: the texts begin with their names.
fn of_lists(told: &[&str]) -> Vec<&'static str> {
    let is_told = |key: &&&str| {
        let name = key.rsplit('.').next().unwrap_or_default();
        told.iter().any(|text| text.starts_with(name))
    };
    LISTS.iter().filter(is_told).copied().collect()
}

/// The keys of the lists of layers.
const LISTS: [&str; 6] = [
    "tp_layer_lists.col_para_list",
    "tp_layer_lists.row_para_list",
    "tp_layer_lists.input_output_mapping",
    "tp_layer_lists.weight_change_list",
    "tp_layer_lists.tp_attr_list",
    "tp_layer_lists.conv_para_list",
];

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
        E::Collective { .. } | E::Kernel { .. } | E::Backend { .. } | E::Sink(_)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use merak_zero::{
        DynamicScaling, LossScaling, LrSchedule, LrSchedulerKwargs, LrSchedulerType, ZeroConfig,
        ZeroStage,
    };

    #[test]
    fn a_refusal_of_lists_is_told_with_the_lists_that_it_is_about() {
        let keys = |error: merak_tp::Error| Error::from(error).keys();
        let attributes = merak_tp::Error::IncompleteLists {
            degree: 2,
            found: "tp_attr_list alone".into(),
        };
        assert_eq!(keys(attributes), ["tp_layer_lists.tp_attr_list"]);
        let both = merak_tp::Error::BothKinds {
            module: "h.0.mlp".into(),
            col: "weight_change_list [\"mlp\", 0]".into(),
            row: "input_output_mapping, entry 1: inputs to outputs 1:1, row-parallel".into(),
        };
        let expected = [
            "tp_layer_lists.input_output_mapping",
            "tp_layer_lists.weight_change_list",
        ];
        assert_eq!(keys(both), expected);
        let known: Vec<_> = crate::config::keys().map(|key| key.name).collect();
        assert!(LISTS.iter().all(|key| known.contains(key)));
    }

    #[test]
    fn a_setting_of_the_optimizer_is_told_with_the_key_that_gives_it() {
        let configs = [
            ZeroConfig {
                reduce_bucket_size: 0,
                ..ZeroConfig::default()
            },
            ZeroConfig {
                gather_bucket_size: 0,
                ..ZeroConfig::default()
            },
            ZeroConfig {
                threads: 0,
                ..ZeroConfig::default()
            },
            ZeroConfig {
                max_grad_norm: f64::NAN,
                ..ZeroConfig::default()
            },
        ];
        let mut errors: Vec<_> = configs.map(|config| config.validate().unwrap_err()).into();
        let scaling = LossScaling::Dynamic(DynamicScaling {
            initial_power: 3,
            min_scale: 9,
            ..DynamicScaling::default()
        });
        errors.push(scaling.validate().unwrap_err());
        errors.push(ZeroStage::try_from(4).unwrap_err());
        errors.push("sdg".parse::<merak_zero::OptimizerKind>().unwrap_err());
        let kwargs = LrSchedulerKwargs {
            power: Some(-1.0),
            ..LrSchedulerKwargs::default()
        };
        for (kwargs, lr) in [(kwargs, 0.1), (LrSchedulerKwargs::default(), -1.0)] {
            let made = LrSchedule::new(LrSchedulerType::Polynomial, &kwargs, lr, 0, 9);
            errors.push(made.unwrap_err());
        }
        let found: Vec<_> = errors
            .into_iter()
            .flat_map(|error| Error::from(error).keys())
            .collect();
        let expected = [
            "zero_reduce_bucket_size",
            "zero_allgather_bucket_size",
            "compute.threads_per_rank",
            "max_grad_norm",
            "min_loss_scale",
            "zero_stage",
            "optim",
            "lr_scheduler_kwargs",
            "learning_rate",
        ];
        assert_eq!(found, expected);
        let known: Vec<_> = crate::config::keys().map(|key| key.name).collect();
        assert!(found.iter().all(|key| known.contains(key)));
    }
}
