//! Who is at fault.

use super::Error;

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
                merak_mpu::Error::WorldSize { .. } | merak_mpu::Error::ZeroDegree { .. }
            ),
            Self::Checkpoint(error) => error.is_user_error(),
            _ => true,
        }
    }

    /// Whether nobody has to say which rank it was: every rank ends with it alike, or it says so
    /// itself.
    pub(crate) fn says_whose(&self) -> bool {
        self.is_user_error() || matches!(self, Self::SkippedSteps { .. } | Self::Step { .. })
    }
}

impl Error {
    /// The key whose value does not fit what was found, where there is one, as far as the error tells.
    pub(crate) fn key(&self) -> Option<&'static str> {
        use merak_tp::Error as T;
        Some(match self {
            Self::ReadInput { key, .. }
            | Self::UnknownToken { key, .. }
            | Self::Blamed {
                key, place: None, ..
            } => key,
            Self::NoText { .. }
            | Self::NoRecords { .. }
            | Self::TensorFile { .. }
            | Self::NotText { .. }
            | Self::DataTooLarge { .. } => "data.path",
            Self::Tokenizer { .. } => "data.tokenizer",
            Self::OutputDir { .. } => "output_dir",
            Self::FewerLayers { .. } => "pp",
            Self::TwoLengths { .. } | Self::ShortSpans { .. } | Self::ShortTarget { .. } => {
                "seq_length"
            }
            Self::DataKind { .. } => "data.format",
            Self::ActivationBudget { .. } => "activation_memory_budget",
            Self::StageMemory { .. } => "autopipe.memory_limit",
            Self::TensorParallel(error) => match **error {
                T::BothKinds { .. } | T::IncompleteLists { .. } => "tp_layer_lists.col_para_list",
                T::Indivisible { .. }
                | T::Heads { .. }
                | T::KvHeads { .. }
                | T::NothingMatched { .. }
                | T::NoLists { .. } => "tp",
                _ => return None,
            },
            _ => return None,
        })
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
