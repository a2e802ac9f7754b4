//! What `merak generate` and `text_generation` share: a model on its ranks that continues prompts.

use super::{model::Loaded, output};
use merak_ckpt::{ADAPTER_CONFIG, Checkpoint, Completion, GenerateOptions, NewToken};
use merak_trainer::{
    CheckedArguments, ConfigError, Error, MerakArguments, MerakTrainer, Plan, PlanInputs, Result,
    StopStrings, TokenizerSource, TrainerParts, Workload, World, data::Tokenizer,
};
use std::{collections::BTreeMap, ops::ControlFlow, path::PathBuf, sync::Arc};

/// A model that is ready to continue prompts.
pub(crate) struct Session {
    pub(crate) args: CheckedArguments,
    pub(crate) tokenizer: Option<Tokenizer>,
    /// Whether the averages of the weights are loaded in their place.
    pub(crate) takes_averages: bool,
    plan: Arc<Plan>,
    options: GenerateOptions,
}

impl Session {
    /// Plans the model of a configuration, with memory for at least `positions` positions. `args`
    /// are complete.
    pub(crate) fn new(
        args: CheckedArguments,
        loaded: Loaded,
        tokenizer: Option<Tokenizer>,
        positions: usize,
    ) -> Result<Self> {
        if tokenizer.is_none() && args.stop_strings.is_some() {
            return Err(Error::Config(ConfigError::MissingKey {
                key: "data.tokenizer",
                advice: "stop_strings are looked for in text, and the model has no tokenizer.json"
                    .to_owned(),
            }));
        }
        let options = loaded.generate_options(&args, tokenizer.as_ref());
        let inputs = PlanInputs::read(loaded.model, &args)?;
        let plan = Arc::new(Plan::new(&inputs, &args)?.frozen());
        plan.check_memory(&args, &[Workload::Generation { positions }])?;
        plan.expect_generative("text generation")?;
        Ok(Self {
            args,
            tokenizer,
            takes_averages: false,
            plan,
            options,
        })
    }

    /// Refuses processes with other degrees, options or prompts than most. Without prompts, those
    /// of the first rank count.
    ///
    /// # Communication
    /// Between processes, as [`World::check_same`].
    pub(crate) fn check_same(&self, world: &World, prompts: &[Vec<u32>]) -> Result<()> {
        let (degrees, options) = (self.plan.draft.degrees, &self.options);
        world.check_same("the configuration", &format!("{degrees}\n{options:#?}"))?;
        let lines: Vec<_> = prompts.iter().map(|ids| format!("{ids:?}")).collect();
        world.check_same("the prompts", &lines.join("\n"))
    }

    /// Calls `body` with each rank's trainer, and returns the result of this process's lowest rank.
    pub(crate) fn on_ranks<T: Send>(
        &self,
        world: &World,
        body: impl Fn(&mut MerakTrainer) -> Result<T> + Sync,
    ) -> Result<T> {
        world.run(&self.args, |member| {
            let mpu = merak_mpu::Mpu::new(member, self.plan.draft.degrees)?;
            let plan = Arc::clone(&self.plan);
            let parts = TrainerParts {
                takes_averages: self.takes_averages,
                ..TrainerParts::default()
            };
            let mut trainer = MerakTrainer::new(plan, mpu, &self.args, parts)?;
            body(&mut trainer)
        })
    }

    /// Refuses the prompts that [`Session::generate`] would refuse, alike on every rank.
    pub(crate) fn check(&self, trainer: &MerakTrainer, prompts: &[Vec<u32>]) -> Result<()> {
        trainer.check_prompts(prompts, &self.options)
    }

    /// Continues prompts on this rank; with `streams`, the first rank prints the text of the one
    /// prompt as it comes.
    pub(crate) fn generate(
        &self,
        trainer: &mut MerakTrainer,
        prompts: &[Vec<u32>],
        streams: bool,
    ) -> Result<Vec<Completion>> {
        let streams = streams && trainer.mpu().is_rank_0();
        let mut watch = Watch::new(self, prompts, streams);
        let completions =
            trainer.generate_with(prompts, &self.options, &mut |token| watch.see(token))?;
        watch.finish();
        Ok(completions)
    }

    /// Whether completions are sequences of their own, which do not go on with the prompt.
    pub(crate) fn translates(&self) -> bool {
        self.plan.has_encoder()
    }

    /// Tokens as people see them: their text, or their ids where there is no tokenizer.
    pub(crate) fn text(&self, ids: &[u32]) -> Result<Vec<u8>> {
        self.text_after(0, ids)
    }

    /// As [`Self::text`], of the tokens after the first `known`.
    pub(crate) fn text_after(&self, known: usize, ids: &[u32]) -> Result<Vec<u8>> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.bytes_after(known, ids),
            None => Ok(format!("{:?}", &ids[known..]).into_bytes()),
        }
    }

    /// The tokens of a prompt: those of its text, or the ids in it where there is no tokenizer.
    pub(crate) fn tokens(&self, prompt: &[u8]) -> Result<Vec<u32>> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.encode_prompt(prompt),
            None => parse_ids(&String::from_utf8_lossy(prompt)),
        }
    }
}

/// The checkpoint that a configuration goes on from. One that cannot be opened is reported where
/// its weights are read.
pub(crate) fn resumed(arguments: &MerakArguments) -> Option<Checkpoint> {
    let folder = match arguments.resume_from_checkpoint.as_deref()? {
        "auto" | "latest" => arguments.output_dir.clone()?,
        path => path.into(),
    };
    Checkpoint::open_weights(folder).ok()
}

/// The tokenizer of that checkpoint in place of one that is to be trained, which other data would
/// make another one.
pub(crate) fn trained_tokenizer(arguments: &MerakArguments) -> Option<PathBuf> {
    let TokenizerSource::TrainBpe(_) = arguments.data.tokenizer else {
        return None;
    };
    let file = resumed(arguments)?.path().join("tokenizer.json");
    file.is_file().then_some(file)
}

/// The adapter that a checkpoint has beside its weights: its description and its name.
pub(crate) fn own_adapter(checkpoint: &Checkpoint) -> Option<(PathBuf, String)> {
    let file = checkpoint.path().join(ADAPTER_CONFIG);
    let name = checkpoint.manifest().header.model["adapter_name"].as_str();
    let name = name.unwrap_or("default").to_owned();
    file.is_file().then_some((file, name))
}

/// Token ids as people write them.
pub(crate) fn parse_ids(list: &str) -> Result<Vec<u32>> {
    let id = |id: &str| {
        let found = id.trim();
        found.parse().map_err(|_| Error::PromptIds {
            found: found.to_owned(),
        })
    };
    list.split(',').map(id).collect()
}

/// Follows texts as they grow.
struct Watch<'a> {
    tokenizer: Option<&'a Tokenizer>,
    stops: Option<StopStrings<'a>>,
    /// Whether new text is printed at once.
    streams: bool,
    /// The tokens of each prompt, and the printed length of its new text.
    texts: BTreeMap<u64, Text>,
}

/// A text without the replacement characters at its end.
fn without_replacement(mut text: &[u8]) -> &[u8] {
    let mut replacement = [0; 4];
    let replacement = char::REPLACEMENT_CHARACTER.encode_utf8(&mut replacement);
    while let Some(before) = text.strip_suffix(replacement.as_bytes()) {
        text = before;
    }
    text
}

/// A text so far.
struct Text {
    tokens: Vec<u32>,
    prompt_length: usize,
    printed: usize,
}

impl<'a> Watch<'a> {
    fn new(session: &'a Session, prompts: &[Vec<u32>], streams: bool) -> Self {
        let tokenizer = session.tokenizer.as_ref();
        let strings = session.args.stop_strings.as_deref();
        let texts = prompts.iter().map(|tokens| Text {
            tokens: tokens.clone(),
            prompt_length: tokens.len(),
            printed: 0,
        });
        Self {
            tokenizer,
            stops: tokenizer
                .zip(strings)
                .map(|(tokenizer, strings)| StopStrings::new(tokenizer, strings)),
            streams,
            texts: (0..).zip(texts).collect(),
        }
    }

    /// Adds a token to its text; breaks where the text ends.
    fn see(&mut self, token: NewToken) -> ControlFlow<()> {
        let (Some(tokenizer), Some(text)) = (self.tokenizer, self.texts.get_mut(&token.prompt))
        else {
            return ControlFlow::Continue(());
        };
        text.tokens.push(token.id);
        if self.streams {
            // A character may be spread over several tokens: it waits for the last of them.
            text.show(tokenizer, without_replacement);
        }
        match &self.stops {
            Some(stops) if stops.end(&text.tokens) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }

    /// Prints the text that still waits.
    fn finish(self) {
        if let (Some(tokenizer), true) = (self.tokenizer, self.streams) {
            let texts = self.texts.into_values();
            texts.for_each(|mut text| text.show(tokenizer, |all| all));
        }
    }
}

impl Text {
    /// Prints the new bytes of the part of the text that `ready` returns.
    fn show(&mut self, tokenizer: &Tokenizer, ready: impl Fn(&[u8]) -> &[u8]) {
        let Ok(all) = tokenizer.bytes_after(self.prompt_length, &self.tokens) else {
            return;
        };
        let ready = ready(&all);
        if let Some(new) = ready.get(self.printed..) {
            output::stream(new);
            self.printed = ready.len();
        }
    }
}
