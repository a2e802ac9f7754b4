//! A run before its ranks start: everything that the configuration names, read, checked and planned.

use super::{
    environment,
    model::{Loaded, companions},
};
use merak_trainer::{
    CheckedArguments, Config, Error, MerakTrainer, Plan, Result, TrainerParts, Workload,
    data::{Corpus, Dataset, TokenDataset},
    threads_per_rank,
};
use std::{fmt::Write as _, sync::Arc};

/// What all ranks of a run share.
pub(crate) struct Prepared {
    pub(crate) args: CheckedArguments,
    pub(crate) model: Loaded,
    pub(crate) plan: Arc<Plan>,
    pub(crate) corpus: Corpus,
    train: Option<Arc<dyn Dataset>>,
    validation: Option<Arc<dyn Dataset>>,
    model_files: Vec<(String, Vec<u8>)>,
}

impl Prepared {
    /// Prepares a training, with validation where the data have a part for it.
    pub(crate) fn to_train(config: &Config) -> Result<Self> {
        Self::new(config, true)
    }

    /// Prepares an evaluation of the validation part alone.
    pub(crate) fn to_evaluate(config: &Config) -> Result<Self> {
        Self::new(config, false)
    }

    fn new(config: &Config, trains: bool) -> Result<Self> {
        let checked = config.check()?;
        let model = Loaded::of(&checked)?;
        let args = model.complete(checked)?;
        let corpus = Corpus::load(&args.data, &environment::crate_sources(config.file()))?;
        let info = model.model.info();
        let (tokens, vocab) = (corpus.tokenizer.vocab_size(), info.vocab_size);
        if tokens > vocab {
            return Err(Error::Vocabulary { tokens, vocab });
        }
        let seq = args.seq_length.unwrap_or(info.max_seq);
        let cut = |tokens: &Arc<[u32]>, part| {
            let data = TokenDataset::new(Arc::clone(tokens), seq, part)?;
            Ok::<_, Error>(Arc::new(data) as Arc<dyn Dataset>)
        };
        let train = trains.then(|| cut(&corpus.train, "training")).transpose()?;
        let validates = !trains || args.do_eval || !corpus.validation.is_empty();
        let validation = validates
            .then(|| cut(&corpus.validation, "validation"))
            .transpose()?;
        let parts = TrainerParts {
            train_data: train.clone(),
            eval_data: validation.clone(),
            ..TrainerParts::default()
        };
        MerakTrainer::check_data(&args, &parts)?;
        let plan = Arc::new(Plan::new(Arc::clone(&model.model), &args)?);
        plan.expect_causal("training on text")?;
        // The configuration in use, overrides included, so that a checkpoint alone makes the model again.
        let model_json = format!("{:#}\n", model.json).into_bytes();
        let tokenizer = corpus.tokenizer.to_json()?.into_bytes();
        let mut model_files = vec![
            ("config.json".to_owned(), model_json),
            ("tokenizer.json".to_owned(), tokenizer),
        ];
        model_files.extend(companions(&args)?);
        Ok(Self {
            args,
            model,
            plan,
            corpus,
            train,
            validation,
            model_files,
        })
    }

    /// What each rank's trainer is made of.
    pub(crate) fn parts(&self) -> TrainerParts {
        TrainerParts {
            train_data: self.train.clone(),
            eval_data: self.validation.clone(),
            model_files: self.model_files.clone(),
            ..TrainerParts::default()
        }
    }

    /// Whether there is something to evaluate.
    pub(crate) fn validates(&self) -> bool {
        self.validation.is_some()
    }

    /// Refuses what this machine's memory cannot hold.
    pub(crate) fn check_memory(&self) -> Result<()> {
        let training = self.train.as_ref().map(|_| Workload::Training);
        let evaluation = self.validation.as_ref().map(|data| Workload::Evaluation {
            samples: data.len(),
        });
        let workloads: Vec<_> = training.into_iter().chain(evaluation).collect();
        self.plan.check_memory(&self.args, &workloads)
    }

    /// The plan, for people.
    pub(crate) fn describe(&self) -> Result<String> {
        let (args, plan) = (&self.args, &self.plan);
        let mut text = String::new();
        let _ = writeln!(
            text,
            "model     {}: {} parameters, {} layers",
            plan.info.family,
            plan.graph.num_elements(),
            plan.info.num_layers
        );
        let (train, validation) = (self.corpus.train.len(), self.corpus.validation.len());
        let _ = writeln!(
            text,
            "data      {} ({train} training tokens, {validation} validation tokens)",
            self.corpus.description
        );
        let _ = writeln!(
            text,
            "ranks     {} = dp {} x tp {} x pp {}, {} compute threads each",
            args.world_size(),
            args.dp,
            args.tp,
            args.pp,
            threads_per_rank(args)
        );
        let _ = writeln!(
            text,
            "batch     {} samples of {} tokens = {} per microbatch x {} microbatches x dp {}",
            args.global_batch(),
            plan.seq_length,
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            args.dp
        );
        let _ = writeln!(text, "schedule  {}\n", plan.schedule.name);
        for unmatched in &plan.tensor.unmatched {
            let _ = writeln!(
                text,
                "warning: the tensor-parallel pattern \"{unmatched}\" matches nothing"
            );
        }
        let _ = write!(text, "{}", plan.partition_report(args)?);
        Ok(text)
    }
}
