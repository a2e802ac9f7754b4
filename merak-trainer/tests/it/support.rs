//! Small trainings on any topology, and the whole tensors of what they computed.

mod tensors;

use std::{collections::BTreeMap, path::Path, process::Command, sync::Arc};

use merak_mpu::{Member, Mpu};
use merak_trace::models::{self, Visible};
use merak_trainer::{
    Callback, CheckedArguments, Config, Error, MerakTrainer, Plan, PlanInputs, Result, StepReport,
    TrainerParts,
    data::{Dataset, IGNORED_LABEL, LABELS, Sample, SampleTensor},
    run_world,
};
use merak_zero::UpdateRule;
use serde_json::{Value, json};

use self::tensors::whole;
pub(crate) use self::tensors::{
    assert_close_losses, assert_close_tensors, assert_same_bits, assert_same_tensors, numbers,
};

/// Length of the sequences.
pub(crate) const SEQ: usize = 8;

/// Tokens of the models; 2 does not divide it.
pub(crate) const VOCAB: usize = 101;

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, Vec<f32>>;

/// A training: model, data, keys of the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) model: Value,
    pub(crate) data: Arc<dyn Dataset>,
    keys: BTreeMap<String, String>,
    /// Microbatches of a step over all replicas.
    microbatches: usize,
    num_threads: usize,
    rule: Option<Arc<dyn UpdateRule>>,
    visible: Visible,
}

/// The result of a training.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) reports: Vec<StepReport>,
    /// The weights after the steps.
    pub(crate) weights: Tensors,
    /// The gradients of the step after them, averaged over replicas.
    pub(crate) gradients: Tensors,
}

impl Case {
    /// A GPT-2 of 4 layers: fused q, k, v, learned positions, a tied head, no dropout.
    pub(crate) fn gpt2() -> Self {
        Self::of(json!({
            "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 2 * SEQ, "n_embd": 32, "n_layer": 4,
            "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }))
    }

    /// A Llama of 4 layers: rotary positions, RMS norms, two query heads for each key head, an
    /// untied head.
    pub(crate) fn llama() -> Self {
        Self::of(json!({
            "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 2 * SEQ, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "tie_word_embeddings": false, "attention_dropout": 0.0,
        }))
    }

    /// The other families that predict the next token, 4 layers each, with what sets them apart.
    pub(crate) fn relatives() -> Vec<(&'static str, Self)> {
        let relative_of_llama = |family: &str| Self::llama().with_model("model_type", family);
        let usual = |family: &str| {
            Self::of(json!({
                "model_type": family, "vocab_size": VOCAB, "max_position_embeddings": 2 * SEQ, "hidden_size": 32,
                "num_hidden_layers": 4, "num_attention_heads": 4,
            }))
            .with_dropout(0.0)
        };
        vec![
            (
                "mistral",
                relative_of_llama("mistral").with_model("sliding_window", 3),
            ),
            (
                "qwen2",
                relative_of_llama("qwen2")
                    .with_model("use_sliding_window", true)
                    .with_model("sliding_window", 5)
                    .with_model("max_window_layers", 2),
            ),
            (
                "qwen3",
                relative_of_llama("qwen3").with_model("head_dim", 12),
            ),
            ("opt", usual("opt").with_model("ffn_dim", 48)),
            (
                "opt post-norm",
                usual("opt")
                    .with_model("ffn_dim", 48)
                    .with_model("do_layer_norm_before", false)
                    .with_model("word_embed_proj_dim", 16),
            ),
            (
                "gpt_neox",
                usual("gpt_neox").with_model("intermediate_size", 48),
            ),
            ("gpt", usual("gpt")),
        ]
    }

    /// A training of a model on little data.
    pub(crate) fn of(model: Value) -> Self {
        Self {
            model,
            data: Arc::new(Tokens { samples: 37 }),
            keys: BTreeMap::new(),
            microbatches: 4,
            num_threads: 1,
            rule: None,
            visible: Visible::All,
        }
        .with("seq_length", SEQ)
        .with("seed", 1234)
        .with("per_device_train_batch_size", 2)
        .with("per_device_eval_batch_size", 2)
        .with("max_steps", 24)
        .with("learning_rate", 1e-3)
        .with("weight_decay", 0.1)
        .with("warmup_steps", 2)
        .with("distributed.timeout_s", 20)
    }

    /// Sets a key of the configuration.
    #[expect(clippy::needless_pass_by_value, reason = "callers write literals")]
    pub(crate) fn with(mut self, key: &str, value: impl ToString) -> Self {
        self.keys.insert(key.to_owned(), value.to_string());
        self
    }

    /// Sets a field of the model's configuration.
    pub(crate) fn with_model(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.model[field] = value.into();
        self
    }

    /// Sets every dropout that the model has.
    pub(crate) fn with_dropout(mut self, probability: f64) -> Self {
        let names: &[&str] = match self.model["model_type"].as_str() {
            Some("gpt2") => &["resid_pdrop", "embd_pdrop", "attn_pdrop"],
            Some("opt") => &["dropout", "attention_dropout"],
            Some("gpt_neox") => &["hidden_dropout", "attention_dropout"],
            Some("gpt") => &["dropout"],
            _ => &["attention_dropout"],
        };
        for name in names {
            self.model[*name] = probability.into();
        }
        self
    }

    /// Ties the head to the embedding, or not.
    pub(crate) fn with_tied(self, tied: bool) -> Self {
        self.with_model("tie_word_embeddings", tied)
    }

    /// Trains an adapter in place of the model; its description is written into `folder`.
    pub(crate) fn with_lora(self, folder: &Path, config: &Value) -> Self {
        let file = folder.join("lora.json");
        std::fs::write(&file, config.to_string()).expect("the folder can be written");
        self.with("lora_config", file.display())
    }

    /// Replaces the samples.
    pub(crate) fn with_data(mut self, data: impl Dataset + 'static) -> Self {
        self.data = Arc::new(data);
        self
    }

    /// Steps by a rule of another program.
    pub(crate) fn with_rule(mut self, rule: impl UpdateRule + 'static) -> Self {
        self.rule = Some(Arc::new(rule));
        self
    }

    /// Lets a token see these earlier ones, as the data say which they are.
    pub(crate) fn seeing(mut self, visible: Visible) -> Self {
        self.visible = visible;
        self
    }

    /// Compute threads of each rank.
    pub(crate) fn with_threads(mut self, num_threads: usize) -> Self {
        self.num_threads = num_threads;
        self
    }

    /// Microbatches of a step over all replicas.
    pub(crate) fn with_microbatches(mut self, microbatches: usize) -> Self {
        self.microbatches = microbatches;
        self
    }

    /// Degrees; the global batch stays what it is.
    pub(crate) fn on(self, (dp, tp, pp): (usize, usize, usize)) -> Self {
        self.with("dp", dp).with("tp", tp).with("pp", pp)
    }

    /// `sp` ranks that share each sequence.
    pub(crate) fn sharing(self, sp: usize) -> Self {
        self.with("sp", sp)
    }

    /// The folder that the run writes.
    pub(crate) fn writing(self, folder: &Path) -> Self {
        self.with("output_dir", folder.display())
    }

    /// The checked configuration.
    pub(crate) fn arguments(&self) -> CheckedArguments {
        self.config()
            .check()
            .expect("the configuration of a test is legal")
    }

    /// The configuration.
    pub(crate) fn config(&self) -> Config {
        let dp: usize = self
            .keys
            .get("dp")
            .map_or(1, |dp| dp.parse().expect("a degree is a number"));
        let mut keys = self.keys.clone();
        keys.entry("gradient_accumulation_steps".to_owned())
            .or_insert_with(|| (self.microbatches / dp).to_string());
        let line: Vec<_> = keys
            .iter()
            .map(|(key, value)| format!("--{key}={value}"))
            .collect();
        Config::load(None, [], &line).expect("the configuration of a test is legal")
    }

    /// The plan.
    pub(crate) fn plan(&self) -> Arc<Plan> {
        Arc::new(self.try_plan().expect("the case can be planned"))
    }

    /// The plan, or why there is none.
    pub(crate) fn try_plan(&self) -> Result<Plan> {
        let args = self.arguments();
        Plan::new(&self.try_inputs()?, &args)
    }

    /// What the plan is made from.
    pub(crate) fn inputs(&self) -> PlanInputs {
        self.try_inputs().expect("its adapter can be read")
    }

    fn try_inputs(&self) -> Result<PlanInputs> {
        let model = models::from_config(&self.model).expect("the model of a test is legal");
        let model = match self.visible {
            Visible::All => model.into(),
            visible => models::with_visible(model.into(), visible),
        };
        PlanInputs::read(model, &self.arguments())
    }

    /// Runs `body` with every rank's trainer.
    pub(crate) fn try_on_ranks<T: Send>(
        &self,
        body: impl Fn(&mut MerakTrainer) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.try_on_ranks_told(|_| [], body)
    }

    /// The same, with callbacks on some ranks.
    pub(crate) fn try_on_ranks_told<T: Send, C: IntoIterator<Item = Box<dyn Callback>>>(
        &self,
        told: impl Fn(usize) -> C + Sync,
        body: impl Fn(&mut MerakTrainer) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.try_on_ranks_with(
            |rank, parts| parts.callbacks = told(rank).into_iter().collect(),
            body,
        )
    }

    /// The same, with changes of each rank's parts.
    pub(crate) fn try_on_ranks_with<T: Send>(
        &self,
        change: impl Fn(usize, &mut TrainerParts) + Sync,
        body: impl Fn(&mut MerakTrainer) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let plan = self.plan();
        run_world(&self.arguments(), |member| {
            let rank = member.rank().0;
            let change = |parts: &mut TrainerParts| change(rank, parts);
            body(&mut self.trainer_with(&plan, member, change)?)
        })
    }

    /// The trainer of a rank.
    pub(crate) fn trainer(&self, plan: &Arc<Plan>, member: Member) -> Result<MerakTrainer> {
        self.trainer_with(plan, member, |_| ())
    }

    /// The same, with changes of its parts.
    fn trainer_with(
        &self,
        plan: &Arc<Plan>,
        member: Member,
        change: impl Fn(&mut TrainerParts),
    ) -> Result<MerakTrainer> {
        let mpu = Mpu::new(member, plan.draft.degrees)?;
        let mut parts = TrainerParts {
            train_data: Some(Arc::clone(&self.data)),
            eval_data: Some(Arc::clone(&self.data)),
            num_threads: self.num_threads,
            model_files: vec![(
                "config.json".to_owned(),
                self.model.to_string().into_bytes(),
            )],
            rule: self.rule.clone(),
            ..TrainerParts::default()
        };
        change(&mut parts);
        MerakTrainer::new(Arc::clone(plan), mpu, &self.arguments(), parts)
    }

    /// Runs `body` with every rank's trainer, which must succeed.
    #[expect(clippy::panic, reason = "a failed training is a failed test")]
    pub(crate) fn on_ranks<T: Send>(
        &self,
        body: impl Fn(&mut MerakTrainer) -> Result<T> + Sync,
    ) -> Vec<T> {
        self.try_on_ranks(body)
            .unwrap_or_else(|error| panic!("{} in {self:?}", merak_trainer::chain(&error)))
    }

    /// Trains for `steps` steps and looks at the gradients of the next one.
    pub(crate) fn run(&self, steps: usize) -> Run {
        let plan = self.plan();
        let mut ranks = self.on_ranks(|trainer| {
            let reports = (0..steps)
                .map(|_| trainer.train_step())
                .collect::<Result<Vec<_>>>()?;
            let place = trainer.mpu().coord();
            let weights = trainer.parameters()?;
            let (_, gradients) = trainer.gradients()?;
            Ok((reports, place, weights, gradients))
        });
        let degrees = plan.draft.degrees;
        let replicas = u8::try_from(degrees.dp * degrees.sp).expect("few replicas");
        let weights = whole(&plan, ranks.iter().map(|rank| (rank.1, &rank.2)), None);
        let gradients = whole(
            &plan,
            ranks.iter().map(|rank| (rank.1, &rank.3)),
            Some(replicas),
        );
        for (reports, ..) in &ranks {
            assert_eq!(
                numbers(reports),
                numbers(&ranks[0].0),
                "all ranks report the same"
            );
        }
        let (reports, ..) = ranks.swap_remove(0);
        Run {
            reports,
            weights,
            gradients,
        }
    }
}

/// Sequences that a model can learn a little of. Some positions have no label, so that microbatches
/// differ in their count of labels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tokens {
    pub(crate) samples: usize,
}

impl Dataset for Tokens {
    fn len(&self) -> usize {
        self.samples
    }

    fn get(&self, index: usize) -> Result<Sample, Error> {
        let token = |position: usize| {
            let token = (7 * index + (position + index) * position) % VOCAB;
            i64::try_from(token).expect("a small number")
        };
        let ids = (0..SEQ).map(token).collect();
        let label = |position: usize| match position {
            1 if index.is_multiple_of(3) => IGNORED_LABEL,
            position if position > 5 && index.is_multiple_of(5) => IGNORED_LABEL,
            position => token(position + 1),
        };
        let labels = (0..SEQ).map(label).collect();
        Ok(Sample::from([
            ("input_ids".to_owned(), SampleTensor::vector(ids)),
            (LABELS.to_owned(), SampleTensor::vector(labels)),
        ]))
    }
}

/// Runs an ignored test alone in a process, with these variables of the environment and memory and
/// threads of its own.
pub(crate) fn alone(name: &str, environment: &[(&str, &str)]) {
    let mut own = Command::new(std::env::current_exe().expect("it runs"));
    own.args(["--ignored", "--exact", name, "--nocapture"]);
    own.envs(environment.iter().copied());
    let output = own.output().expect("it runs again");
    let text = String::from_utf8_lossy(&output.stdout);
    let failure = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{failure}");
    assert!(text.contains("1 passed"), "{text}");
}

/// A message without its checksums: those of trained weights differ between processors.
pub(crate) fn without_checksums(text: &str) -> String {
    let is_checksum = |word: &str| word.len() == 16 && word.chars().all(|c| c.is_ascii_hexdigit());
    let words = text.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
    let masked = words.map(|word| {
        let bare = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        if is_checksum(bare) {
            word.replace(bare, "CHECKSUM")
        } else {
            word.to_owned()
        }
    });
    masked.collect()
}

/// Every file below a folder, by its path there.
pub(crate) fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        if path.is_dir() {
            let below = files(&path).into_iter();
            found.extend(below.map(|(file, bytes)| (format!("{name}/{file}"), bytes)));
        } else {
            found.push((name, std::fs::read(&path).expect("a readable file")));
        }
    }
    found.sort();
    found
}
