//! Every key of this version: name, type, default and meaning.

use std::path::PathBuf;

use merak_ckpt::{EarlyStopping, GenerateOptions};
use merak_mpu::EngineKind;
use merak_partition::{PartitionMethod, RecomputeOp, ScheduleChoice, SplitMethod};
use merak_pipe::ScheduleKind;
use merak_tp::SequenceMethod;
use merak_trace::{Overlap, Units};
use merak_zero::{
    DynamicScaling, LossScaling, LrSchedulerKwargs, LrSchedulerType, OptimizerConfig,
    OptimizerKind, ZeroConfig, ZeroStage,
};
use serde_json::Value;

use super::{
    choice::{
        BackendChoice, CostSource, DataFormat, Device, EarlyStop, HalfPrecision, Offload,
        RecomputeMode, ReportTo, TraceMethod,
    },
    inputs::{InputPaths, Mixture},
    key::{Key, settings},
    lists::{SplitRatio, WeightSlice},
    names::{AdapterName, MetricName, ModelClasses},
    numbers::{Boundaries, LrScales, Ratios, SeqLength, Temperature, ThreadsPerRank, TokenIds},
    setting::InputPath,
    sources::{TemplateSource, TokenizerSource},
};

/// Upper bound on prefetch threads: more than any machine has cores is a typing mistake.
const MAX_WORKERS: i64 = 1024;

/// About thirty years: adding it to a clock cannot overflow.
const MAX_TIMEOUT_S: i64 = 1_000_000_000;

/// Most microbatches of the step that a search for stages simulates; more would not change its
/// result.
const MAX_SIMULATED: i64 = 100_000;

/// Most steps of a profile: their actions are kept in memory.
const MAX_PROFILED: i64 = 1000;

/// The bounds of merak-zero, as the limits of keys.
const MIN_POSITIVE: f64 = OptimizerConfig::MIN_POSITIVE;
const MAX_NUMBER: f64 = OptimizerConfig::MAX_NUMBER;
const MAX_NS_STEPS: i64 = OptimizerConfig::MAX_NS_STEPS as i64;
const MAX_PREDIVIDE: i64 = ZeroConfig::MAX_PREDIVIDE as i64;
const MIN_PREDIVIDE: f64 = 1.0 / ZeroConfig::MAX_PREDIVIDE as f64;
const MAX_SCALE_POWER: i64 = DynamicScaling::MAX_POWER as i64;

/// Upper bound on the losses that a checkpoint keeps for the guard against divergence.
const MAX_WINDOW: i64 = 10_000;

/// The bound of merak-ckpt.
const MAX_BEAMS: i64 = GenerateOptions::MAX_BEAMS as i64;

/// Upper bound on the time of a message, as of the other costs of a search.
const MAX_COMM_COST: i64 = 1_000_000_000_000_000;

settings! {
    /// The arguments of a run: what a configuration file holds, as values.
    ///
    /// Fields carry the names of their keys. The values have the right types and nothing more:
    /// [`MerakArguments::check`] turns them into [`CheckedArguments`](crate::CheckedArguments),
    /// whose values agree with each other.
    MerakArguments under "" {
        /// Folder that the run writes; required for training.
        output_dir: Option<PathBuf> = None,
        /// Whether a new run may take a folder that has one, which is set aside until the new one's
        /// first save.
        overwrite_output_dir: bool = false,
        /// Data-parallel replicas.
        dp: usize [at_least 1] = 1,
        /// Tensor-parallel ranks per replica and stage.
        tp: usize [at_least 1] = 1,
        /// Whether tensor-parallel ranks share the sequence between the layers that they split,
        /// where otherwise each has all of it; they must divide its length.
        sequence_parallel: bool = false,
        /// Dimension of hidden states that holds the sequence: 1 for those of all families, 0 for
        /// models of your own that put the sequence first.
        sequence_dim: usize [at_least 0, at_most 1] = 1,
        /// What runs while sums over tensor-parallel ranks pass: 0 nothing; 1 the other half of the
        /// product whose parts are summed, and gradients of weights; 2 the other half of the
        /// microbatch's samples, within a layer; 3 that half over the borders of layers too. With
        /// one sample, or `sequence_dim = 0`, it is 0.
        tp_overlapping_level: Overlap = Overlap::None,
        /// Ranks that share each sequence: all work is cut along it. They must divide its length.
        sp: usize [at_least 1] = 1,
        /// What attentions do there: `ulysses` gives each rank its heads of all positions, so that
        /// `sp` must divide the heads of a tensor-parallel rank (fewer key and value heads are
        /// repeated); `ring` passes keys and values round, so that each rank computes with those of
        /// one at a time; `all_gather` gives each rank all of them. Both give all ranks the same
        /// work where twice `sp` divides the length, and ask nothing of the heads, except those of
        /// attentions with a table of biases or with keys of another length, as in T5: these are
        /// shared out as by `ulysses`.
        sp_method: SequenceMethod = SequenceMethod::Ulysses,
        /// Ranks of the pipeline.
        pp: usize [at_least 1] = 1,
        /// Order of the microbatches' forwards and backwards on each rank.
        train_schedule: ScheduleChoice = ScheduleChoice::Named(ScheduleKind::OneFOneB),
        /// Stages per rank, for the schedules that run several; those in the shape of a V always
        /// run two.
        virtual_stages: usize [at_least 1] = 1,
        /// Rule that gives shards to stages.
        partition_method: PartitionMethod = PartitionMethod::Uniform,
        /// Boundaries of `partition_method = "custom"`: pp + 1 of them, from 0 to the number of
        /// shards.
        custom_partition: Option<Boundaries> = None,
        /// The costs that searches for stages and schedules, and predictions of step times, use.
        cost_model: CostSource = CostSource::Measured,
        /// File that keeps measured times; unset: `merak/costs.json` in the user's folder for
        /// caches.
        cost_cache: Option<PathBuf> = None,
        /// Rule that cuts the graph into shards.
        split_method: SplitMethod = SplitMethod::FarthestMinDeps,
        /// Module or parameter names that start a shard; only with `split_method = "layer_split"`.
        custom_split_points: Option<Vec<String>> = None,
        /// Modules that no cut enters, so that each is on one stage from its first operation to its
        /// last: paths such as `transformer.h.{i}.attn`, in which `{i}` stands for any number.
        leaf_modules: Option<Vec<String>> = None,
        /// Shards that `farthest_min_deps` aims at; unset: twice the layers.
        shard_count: Option<usize> [at_least 1] = None,
        /// How the model becomes a graph.
        trace_method: TraceMethod = TraceMethod::Fx,
        /// Classes of models that are to be traced, separated by commas, such as
        /// `Qwen2ForCausalLM`. All that Merak knows are traced without it; another one is an error.
        trace_model: ModelClasses = ModelClasses(Vec::new()),
        /// Standard deviation of the normal that initialises weight matrices of a model that states
        /// none; of those that end a branch of a layer, it is divided by `sqrt(2 num_layers)`.
        init_method_std: f64 [more_than 0] = 0.02,
        /// Whether activations are recomputed in the backward.
        activation_checkpointing: bool = true,
        /// Shards per recomputed chunk; 0 is off.
        checkpoint_num_layers: usize = 1,
        /// What recomputation drops.
        recompute: RecomputeMode = RecomputeMode::Full,
        /// Part of the first stage's shards that is recomputed, or a list with one value per stage;
        /// unset: all.
        activation_checkpoint_ratio: Option<Ratios> [at_least 0, at_most 1] = None,
        /// Operations whose results `recompute = "selective"` drops; unset: attention, activation
        /// and norm.
        recompute_ops: Option<Vec<RecomputeOp>> = None,
        /// Bytes of activations per rank under `recompute = "budget"`.
        activation_memory_budget: Option<usize> = None,
        /// Layers; unset: from the model's config.
        num_layers: Option<usize> [at_least 1] = None,
        /// Longest sequence, in tokens, or a pair for encoder and decoder; unset: from the data's
        /// tensors or the model's config.
        seq_length: Option<SeqLength> [at_least 1] = None,
        /// Width of hidden states; unset: from the model's config.
        hidden_size: Option<usize> [at_least 1] = None,
        /// Attention heads; unset: from the model's config.
        num_heads: Option<usize> [at_least 1] = None,
        /// Whether weights are bf16, with f32 masters and gradients, and products multiply bf16; on
        /// the default backend activations stay f32, and under `lora_config` the frozen weights
        /// alone are bf16.
        bf16: bool = false,
        /// Whether weights and activations are f16, with f32 masters and gradients, and the loss is
        /// scaled; on the libtorch backend alone.
        fp16: bool = false,
        /// `amp`: beside `bf16` or `fp16`, weights stay f32 without masters, and products, in
        /// training those of attention too, multiply the short type; libtorch computes what lies
        /// between products in it too, and norms, softmax, sums and losses in f32; unset: weights
        /// have the short type.
        half_precision_backend: Option<HalfPrecision> = None,
        /// Scale of the loss under `fp16`; 0: one that changes with the overflows of gradients.
        loss_scale: f64 [at_least 0] = 0.0,
        /// The first scale that changes is 2 to this power.
        initial_scale_power: usize [at_least 0, at_most MAX_SCALE_POWER] = 32,
        /// Steps without overflow after which that scale doubles.
        loss_scale_window: usize [at_least 1] = 1000,
        /// Overflows until the scale first halves; later ones halve it at once.
        hysteresis: usize [at_least 1] = 2,
        /// Lowest scale that it falls to.
        min_loss_scale: usize [at_least 1] = 1,
        /// Whether tied weights become independent copies.
        no_tie_modules: bool = false,
        /// Whether tensor-parallel ranks divide the vocabulary too: embedding tables, output layer
        /// and loss.
        parallel_vocab: bool = false,
        /// What ZeRO shards over the replicas: 0 nothing, 1 optimizer state, 2 gradients too, 3
        /// parameters too.
        zero_stage: ZeroStage = ZeroStage::OptimizerState,
        /// Whether ZeRO divides the state of an optimizer that the program brings along, which was
        /// not tested with it.
        zero_allow_untested_optimizer: bool = false,
        /// Most elements per all-gather of updated parameters, in stages 1 and 2; it does nothing
        /// in stage 3 and for trained 16-bit weights, which are gathered before their use, a bucket
        /// of `zero_reduce_bucket_size` at a time.
        zero_allgather_bucket_size: usize [at_least 1] = 500_000_000,
        /// Most elements per reduction of gradients; a parameter that is not cut and is larger goes
        /// alone. None is cut from stage 2 on, with 16-bit weights from stage 1 on.
        zero_reduce_bucket_size: usize [at_least 1] = 500_000_000,
        /// Where optimizer state and the `f32` masters of 16-bit weights lie: `host` in host memory
        /// while weights lie on a device, `disk` in files under `output_dir` that are mapped into
        /// it; unset: beside the weights.
        offload_optimizer: Option<Offload> = None,
        /// Whether gradients are divided before their reduction.
        prescale_gradients: bool = false,
        /// Divisor before the reduction; the rest of the division by the replicas follows it. 1:
        /// all of it comes before.
        gradient_predivide_factor: f64 [at_least_f64 MIN_PREDIVIDE, at_most MAX_PREDIVIDE] = 1.0,
        /// Whether checkpoints are written; unset: where `output_dir` is given or `lora_config`
        /// trains an adapter.
        save: Option<bool> = None,
        /// Steps between checkpoints; each epoch's end and the run's own have one too.
        save_steps: usize [at_least 1] = 500,
        /// Whether training goes on while a checkpoint is written, from a copy of the tensors.
        async_save: bool = false,
        /// Newest checkpoints kept; 0 or less keeps all.
        save_total_limit: i64 = -1,
        /// Whether training ends with the weights of the step whose evaluation was best; such steps
        /// are saved too.
        load_best_model_at_end: bool = false,
        /// What an evaluation is judged by: `eval_loss`, or another metric that it gives.
        metric_for_best_model: MetricName = MetricName("eval_loss".to_owned()),
        /// Whether more of that is better; unset: not of a loss or a perplexity.
        greater_is_better: Option<bool> = None,
        /// Evaluations in a row after which training ends if `metric_for_best_model` did not
        /// improve; unset: none.
        early_stopping_patience: Option<usize> [at_least 1] = None,
        /// What an improvement exceeds, for `early_stopping_patience`.
        early_stopping_threshold: f64 [at_least 0] = 0.0,
        /// Whether only weights are loaded, and training starts at step 0.
        finetune: bool = false,
        /// Whether checkpoints leave random state out.
        no_save_rng: bool = false,
        /// Whether checkpoints leave optimizer state out.
        no_save_optim: bool = false,
        /// Whether random state is not restored.
        no_load_rng: bool = false,
        /// Whether optimizer state is not restored.
        no_load_optim: bool = false,
        /// Checkpoint to go on from: a path, `latest` or `auto`.
        resume_from_checkpoint: Option<String> = None,
        /// Whether a resumed run starts its epoch again.
        ignore_data_skip: bool = false,
        /// JSON file with PEFT's fields of a LoRA adapter, which is trained in place of the model.
        lora_config: Option<InputPath> = None,
        /// Name of that adapter.
        adapter_name: AdapterName = AdapterName("default".to_owned()),
        /// Whether to train; the command `train` implies it.
        do_train: bool = false,
        /// Whether to evaluate during training too, each `eval_steps` steps or at the end of each
        /// epoch. `merak train` evaluates at its end in any case where the data have a part for it.
        do_eval: bool = false,
        /// Whether `merak train` writes predictions of the validation part in the end, into
        /// `predictions.jsonl`; the command `predict` implies it.
        do_predict: bool = false,
        /// Whether predictions, and what metrics of one's own are computed from, are logits, not
        /// probabilities of classes or losses of tokens.
        return_logits: bool = false,
        /// Steps between evaluations; unset: at each epoch's end.
        eval_steps: Option<usize> [at_least 1] = None,
        /// Evaluation iterations, each of `gradient_accumulation_steps` microbatches per replica;
        /// unset: the whole set.
        eval_iters: Option<usize> [at_least 1] = None,
        /// Seed of all randomness.
        seed: u64 = 42,
        /// Seed of the order of samples; unset: `seed`.
        data_seed: Option<u64> = None,
        /// Samples per microbatch and replica in training.
        per_device_train_batch_size: usize [at_least 1] = 8,
        /// Samples per microbatch and replica in evaluation.
        per_device_eval_batch_size: usize [at_least 1] = 8,
        /// Microbatches per step and replica.
        gradient_accumulation_steps: usize [at_least 1] = 1,
        /// Prefetch threads for samples; 0: samples are read when they are needed.
        dataloader_num_workers: usize [at_least 0, at_most MAX_WORKERS] = 0,
        /// Whether a rank asks the data for the tensors that its stages read alone, where they need
        /// not be read in whole samples (`data.format` tensors or images).
        split_inputs: bool = false,
        /// Whether evaluation drops its last partial batch.
        dataloader_drop_last: bool = false,
        /// Passes over the training data, or a fraction of one; more than 0 unless `max_steps` is.
        num_train_epochs: f64 = 3.0,
        /// Steps to train; more than 0 wins over `num_train_epochs`.
        max_steps: i64 = -1,
        /// Optimizer.
        optim: OptimizerKind = OptimizerKind::AdamW,
        /// Short form of `optim = "adafactor"`.
        adafactor: bool = false,
        /// Learning rate after warmup.
        learning_rate: f64 [at_least 0, at_most_f64 MAX_NUMBER] = 5e-5,
        /// Weight decay, added to the gradient under `adam` and `sgd` and decoupled under all other
        /// rules; none on norm weights and on what has "bias" in its name.
        weight_decay: f64 [at_least 0, at_most_f64 MAX_NUMBER] = 0.0,
        /// Parts of names: what has one of them in its name does not decay either.
        no_decay_names: Option<Vec<String>> = None,
        /// Factors of the learning rate by parts of names; of several parts that are in a
        /// parameter's name, the longest counts, and of equally long ones the last in alphabetical
        /// order. 0 freezes: no gradient, no optimizer state, no part in the gradients' norm.
        lr_scales: LrScales = LrScales::default(),
        /// Factor of the learning rate from a layer to the one below it; the head has 1, what lies
        /// below all layers the least.
        layerwise_lr_decay: f64 [more_than 0, at_most 1] = 1.0,
        /// Decay of the first moment of Adam and LAMB.
        adam_beta1: f64 [at_least 0, less_than 1] = 0.9,
        /// Decay of their second moment.
        adam_beta2: f64 [at_least 0, less_than 1] = 0.999,
        /// Offset of their denominator.
        adam_epsilon: f64 [at_least_f64 MIN_POSITIVE, at_most_f64 MAX_NUMBER] = 1e-8,
        /// Momentum of `optim = "sgd"`: 0, or at least 1e-37.
        sgd_momentum: f64 [at_least 0, less_than 1] = 0.0,
        /// Whether that momentum is Nesterov's.
        nesterov: bool = false,
        /// Share of the momentum in the direction of `optim = "lion"`.
        lion_beta1: f64 [at_least 0, less_than 1] = 0.9,
        /// Decay of that momentum.
        lion_beta2: f64 [at_least 0, less_than 1] = 0.99,
        /// Under `optim = "adafactor"`, the power of the step that is the share of new squares in
        /// the means of second moments.
        adafactor_decay_rate: f64 [less_than 0] = -0.8,
        /// Root mean square of an update above which Adafactor scales it down.
        adafactor_clip_threshold: f64 [at_least_f64 MIN_POSITIVE, at_most_f64 MAX_NUMBER] = 1.0,
        /// What Adafactor adds to squares of gradients.
        adafactor_epsilon: f64 [at_least_f64 MIN_POSITIVE, at_most_f64 MAX_NUMBER] = 1e-30,
        /// Momentum of `optim = "muon"`, which steps hidden matrices; all else takes AdamW.
        muon_momentum: f64 [at_least 0, less_than 1] = 0.95,
        /// Whether that momentum is Nesterov's.
        muon_nesterov: bool = true,
        /// Repetitions of the polynomial that makes Muon's steps orthogonal.
        muon_ns_steps: usize [at_least 1, at_most MAX_NS_STEPS] = 5,
        /// Smallest norm by which Muon divides a step.
        muon_epsilon: f64 [at_least_f64 MIN_POSITIVE, at_most_f64 MAX_NUMBER] = 1e-7,
        /// Largest global gradient norm; 0 or less switches clipping off.
        max_grad_norm: f64 = 1.0,
        /// Decay of an exponential moving average of the trained weights, which moves after each
        /// update; it is evaluated beside the weights, as `eval_ema_loss`, and saved with the
        /// optimizer's state; unset: none is kept.
        ema_decay: Option<f64> [at_least 0, less_than 1] = None,
        /// Steps in a row without finite gradients after which a run fails; each of them changes
        /// nothing. At the end of a run fewer do: more than it has updates. Under `fp16` those
        /// count in which the loss scale cannot fall.
        max_skipped_steps: usize [at_least 1] = 50,
        /// Whether a run goes back to its last checkpoint, and on after the data that led there,
        /// where a step's loss is a spike, where losses are not finite (of skipped steps: two in a
        /// row), or where `max_skipped_steps` is reached.
        divergence_guard: bool = false,
        /// Steps whose losses a loss is compared with; until there are as many, none is a spike.
        divergence_window: usize [at_least 1, at_most MAX_WINDOW] = 50,
        /// A loss is a spike if it is more than this times the median of that window.
        divergence_factor: f64 [more_than 1] = 3.0,
        /// Most returns to the checkpoint of one step. One more ends the run. Where no loss after
        /// it was finite, the run goes to the checkpoint before, and deletes the later ones.
        divergence_max_rollbacks: usize [at_least 1] = 3,
        /// Shape of the learning rate over the run.
        lr_scheduler_type: LrSchedulerType = LrSchedulerType::Linear,
        /// Parameters of that shape; one that it does not take is refused.
        lr_scheduler_kwargs: LrSchedulerKwargs = LrSchedulerKwargs::default(),
        /// Steps of warmup; more than 0 wins over `warmup_ratio`.
        warmup_steps: usize = 0,
        /// Warmup as a share of all steps.
        warmup_ratio: f64 [at_least 0, at_most 1] = 0.0,
        /// Whether the `labels` of the data stand at their own tokens, as Hugging Face has them,
        /// and move to the tokens that predict them; else they stand there already.
        shift_labels: bool = false,
        /// Share of the target spread over all tokens in the training loss; evaluation reports the
        /// loss without it.
        label_smoothing_factor: f64 [at_least 0, less_than 1] = 0.0,
        /// Steps between log lines.
        logging_steps: usize [at_least 1] = 500,
        /// Where metrics go besides `metrics.jsonl`.
        report_to: ReportTo = ReportTo::None,
        /// Folder of the event files of `report_to = "tensorboard"`; unset: `tensorboard` in the
        /// output folder.
        logging_dir: Option<PathBuf> = None,
        /// Floating-point operations per second that one rank could do at most, which `mfu` is a
        /// share of; unset: the speed of the backend's matrix products, measured before the run.
        peak_flops: Option<f64> [more_than 0] = None,
        /// Whether a table of the times of each rank's instructions is logged every
        /// `logging_steps`; gathering it costs a message from each rank then.
        wall_clock_breakdown: bool = false,
        /// First step of those whose actions are written to `trace.json` in the output folder;
        /// unset: none are.
        profile_start_step: Option<usize> [at_least 1] = None,
        /// How many steps these are.
        profile_steps: usize [at_least 1, at_most MAX_PROFILED] = 3,
        /// Whether the memory of a stage's output is freed once it is sent, unless the stage's
        /// backward reads it. It always is: both values do the same.
        dealloc_pipeoutput: bool = false,
        /// Continues prompts from standard input instead of training, each line for itself, up to a
        /// line `stop`; an empty line has an empty answer.
        text_generation: bool = false,
        /// Most new tokens per prompt in generation.
        out_seq_length: usize [at_least 1] = 1024,
        /// Most new tokens per prompt, by the name of Hugging Face; unset: `out_seq_length`.
        max_new_tokens: Option<usize> [at_least 1] = None,
        /// Sampling temperature; 0 or `greedy` takes the likeliest token.
        temperature: Temperature [at_least 0] = Temperature(0.9),
        /// Sampling keeps the k likeliest tokens; 0 keeps all.
        top_k: usize = 0,
        /// Sampling keeps the likeliest tokens up to this probability.
        top_p: f64 [more_than 0, at_most 1] = 0.9,
        /// Sampling drops tokens less likely than this share of the likeliest.
        min_p: f64 [at_least 0, at_most 1] = 0.0,
        /// Whether generation keeps keys and values between tokens; changes no token, only the
        /// time.
        use_cache: bool = true,
        /// Divisor of the positive logits of tokens already present; 1 is off.
        repetition_penalty: f64 [more_than 0] = 1.0,
        /// No run of this many tokens occurs twice in a text, prompt included; 0 is off.
        no_repeat_ngram_size: usize = 0,
        /// Fewest new tokens before one that ends a text; unset: that of the model's
        /// `generation_config.json`.
        min_new_tokens: Option<usize> = None,
        /// Continuations that a beam search keeps for each prompt; 1 is off. A search draws
        /// nothing.
        num_beams: usize [at_least 1, at_most MAX_BEAMS] = 1,
        /// Power of the number of new tokens by which a beam search divides the score of a text;
        /// more than 0 prefers longer ones.
        length_penalty: f64 = 1.0,
        /// When a beam search ends: `false` once no running beam would be better if it ended now,
        /// `true` once as many texts as beams have ended, `never` once none can become better.
        early_stopping: EarlyStop = EarlyStop(EarlyStopping::No),
        /// Strings that end a generated text, after the token in which they end.
        stop_strings: Option<Vec<String>> = None,
        /// Token that ends a generated row, or a list of them; unset: those of the model's config
        /// and the tokenizer's.
        eos_token_id: Option<TokenIds> = None,
        /// Token that fills shorter rows of a batch; unset: the one of the model's config.
        pad_token_id: Option<u32> = None,
    }
    sections {
        /// The model.
        model: ModelArguments,
        /// The data set.
        data: DataArguments,
        /// The ranks.
        distributed: DistributedArguments,
        /// The computation on a rank.
        compute: ComputeArguments,
        /// What `partition_method` `autopipe` and `exact` assume of a step.
        autopipe: AutopipeArguments,
        /// Which layers are split over tensor-parallel ranks, instead of the model family's
        /// default.
        tp_layer_lists: TpLayerListArguments,
    }
}

settings! {
    /// Section `[model]`.
    ModelArguments under "model." {
        /// A Hugging Face config.json, which names the family and the sizes; unset: that of
        /// `hf_dir`.
        config: Option<InputPath> = None,
        /// A Hugging Face folder: its weights to start from, its config.json where `config` is
        /// unset, its tokenizer where none is set. A classifier that its weights lack starts at
        /// random.
        hf_dir: Option<InputPath> = None,
        /// Whether a classifier of another size than that of the weights in `hf_dir` starts at
        /// random.
        ignore_mismatched_sizes: bool = false,
    }
}

settings! {
    /// Section `[data]`.
    DataArguments under "data." {
        /// File or folder, or a list of them that are read in turn; on the command line `a,b`
        /// or JSON; unset: the sources of the crates in Cargo.lock as text.
        path: Option<InputPaths> = None,
        /// In place of `path`: several, each with its share of the samples. An epoch has as many
        /// samples as all parts; a part of which it takes fewer goes on in the next epoch.
        mixture: Option<Mixture> = None,
        /// File or folder to validate on, or a list of them; unset: the end of the data.
        validation_path: Option<InputPaths> = None,
        /// What the files hold.
        format: DataFormat = DataFormat::Text,
        /// How text becomes tokens: `bytes`, the path of a tokenizer.json, or `{ train_bpe = N }`
        /// for byte-level BPE of N tokens, trained on the data; unset with token files: theirs.
        tokenizer: TokenizerSource = TokenizerSource::Bytes,
        /// File with the Jinja template of chats, or the name of a template beside the tokenizer,
        /// in `additional_chat_templates` or `tokenizer_config.json`; unset: the default one there,
        /// `chat_template.jinja` or in `tokenizer_config.json`.
        chat_template: Option<TemplateSource> = None,
        /// Whether a sequence holds several documents that do not see each other: those of a stream
        /// of tokens, or as many chats as fit. Positions count from the start of each.
        packing: bool = false,
        /// Whether training reads text and records in their order while it goes on, instead of all
        /// of them before it begins: for data that do not fit in memory and are not tokenized. A
        /// run needs `max_steps`, and `validation_path` where it evaluates.
        streaming: bool = false,
        /// Samples of a stream among which the next one is drawn; 1 keeps their order. Read under
        /// `streaming` alone.
        shuffle_buffer: usize [at_least 1] = SHUFFLE_BUFFER,
        /// Share of the tokens or samples, at the end of each part, that validation takes where
        /// `validation_path` is unset.
        validation_fraction: f64 [at_least 0, less_than 1] = VALIDATION_FRACTION,
        /// Most bytes of text that are read; unset: all of `path`, or 8 MiB of the crates' sources.
        max_bytes: Option<usize> [at_least 1] = None,
        /// Whether files that are no text (binary, or not UTF-8 where the tokenizer needs that) are
        /// passed over and counted, not refused.
        skip_binary: bool = false,
        /// Share of a text's tokens that masked language modelling hides and span corruption leaves
        /// out.
        mlm_probability: f64 [more_than 0, less_than 1] = 0.15,
        /// Share of the hidden tokens that the mask token replaces.
        mask_replace_prob: f64 [at_least 0, at_most 1] = 0.8,
        /// Share of the hidden tokens that any token replaces; the rest stay as they are.
        random_replace_prob: f64 [at_least 0, at_most 1] = 0.1,
        /// Mean length of the pieces that span corruption leaves out.
        mean_noise_span_length: f64 [at_least 1] = 3.0,
    }
}

settings! {
    /// Section `[distributed]`.
    DistributedArguments under "distributed." {
        /// How ranks reach each other.
        engine: EngineKind = EngineKind::Auto,
        /// File of NCCL's library, for the engine `nccl`; unset: `libnccl.so.2` or `libnccl.so`,
        /// where the system finds libraries.
        nccl_library: Option<PathBuf> = None,
        /// Seconds after which a wait for a peer ends as an error.
        timeout_s: f64 [more_than 0, at_most MAX_TIMEOUT_S] = 600.0,
    }
}

settings! {
    /// Section `[compute]`.
    ComputeArguments under "compute." {
        /// Library that executes the graph's nodes.
        backend: BackendChoice = BackendChoice::Candle,
        /// Device that executes them.
        device: Device = Device::Cpu,
        /// Compute threads of each rank: `auto` divides the cores.
        threads_per_rank: ThreadsPerRank = ThreadsPerRank::Auto,
        /// Units for bf16 that products of the default backend may use where the processor has
        /// them: all of them, no more than vectors, or none; results differ in the order of sums.
        units: Units = Units::Matrix,
    }
}

settings! {
    /// Section `[autopipe]`.
    AutopipeArguments under "autopipe." {
        /// Microbatches of the simulated step, read under `partition_method` "autopipe" or "exact"
        /// alone; unset: those of the run.
        micro_batches: Option<usize> [at_least 1, at_most MAX_SIMULATED] = None,
        /// Time of a message between stages, read under `partition_method` "autopipe" or "exact"
        /// alone: seconds, or billions of operations where these are counted; unset: as measured,
        /// or 0.
        comm_cost: Option<f64> [at_least 0, at_most MAX_COMM_COST] = None,
        /// Most bytes of weights, gradients, optimizer state and activations that the search for
        /// stages, or for a schedule, gives a rank; unset: no limit for stages, and for a schedule
        /// what the fullest rank needs under `interleaved_1f1b`.
        memory_limit: Option<usize> [at_least 1] = None,
    }
}

settings! {
    /// Section `[tp_layer_lists]`.
    TpLayerListArguments under "tp_layer_lists." {
        /// Whether the layers are chosen so that they communicate least, for models without lists
        /// too. Written `tp_layer_lists = "auto"` as well.
        auto: bool = false,
        /// Names of linear layers whose output features are split.
        col_para_list: Option<Vec<String>> = None,
        /// Names of linear layers whose input features are split.
        row_para_list: Option<Vec<String>> = None,
        /// Linear layers by the ratio of their input to their output features, the output layer
        /// left out; the first that matches counts.
        input_output_mapping: Option<Vec<SplitRatio>> = None,
        /// Names with a dimension to slice: of linear layers 0, the output features, or 1, the
        /// input features; else of the parameters NAME and NAME.weight.
        weight_change_list: Option<Vec<WeightSlice>> = None,
        /// Attributes that count heads or features, of modules that a tracer keeps whole. Here
        /// every operation is traced, and all sizes follow from what is split.
        tp_attr_list: Option<Vec<String>> = None,
        /// Names of convolutions whose input channels are split.
        conv_para_list: Option<Vec<String>> = None,
    }
}

/// Share of the data that is for validation where nothing else is said.
pub(super) const VALIDATION_FRACTION: f64 = 0.05;

/// Samples of a stream among which the next one is drawn where nothing else is said.
pub(super) const SHUFFLE_BUFFER: usize = 1000;

impl MerakArguments {
    /// Whether checkpoints are written: `save`, or where it is unset, whether there is an output
    /// folder or an adapter.
    pub fn saves(&self) -> bool {
        self.save
            .unwrap_or_else(|| self.output_dir.is_some() || self.lora_config.is_some())
    }

    /// Whether more of `metric_for_best_model` is better.
    pub fn greater_is_better(&self) -> bool {
        self.greater_is_better
            .unwrap_or_else(|| self.metric_for_best_model.greater_is_better())
    }

    /// Whether a run saves after `steps` steps; `ends_epoch` tells whether the last one ends an
    /// epoch.
    pub(crate) fn saves_after(&self, steps: usize, ends_epoch: bool) -> bool {
        self.saves() && (ends_epoch || steps.is_multiple_of(self.save_steps))
    }

    /// Whether step `step` of a run of `total` steps is logged, which went on after `first` steps.
    pub(crate) fn logs_after(&self, step: usize, first: usize, total: usize) -> bool {
        step.is_multiple_of(self.logging_steps) || step == total || step == first + 1
    }

    /// The scale of the loss, which `fp16` needs.
    pub(crate) fn loss_scaling(&self) -> Option<LossScaling> {
        let scaling = if self.loss_scale > 0.0 {
            LossScaling::Fixed(self.loss_scale)
        } else {
            LossScaling::Dynamic(DynamicScaling {
                initial_power: u32::try_from(self.initial_scale_power).unwrap_or(u32::MAX),
                window: self.loss_scale_window as u64,
                hysteresis: self.hysteresis as u64,
                min_scale: self.min_loss_scale as u64,
            })
        };
        self.fp16.then_some(scaling)
    }

    /// The key that gives the first loss scale.
    pub(crate) fn loss_scale_key(&self) -> &'static str {
        if self.loss_scale > 0.0 {
            "loss_scale"
        } else {
            "initial_scale_power"
        }
    }

    /// Stages that each rank of the pipeline runs: `virtual_stages`, or the two of a V.
    pub(crate) fn chunks(&self) -> usize {
        match self.train_schedule.fixed_chunks() {
            Some(chunks) if self.virtual_stages == 1 => chunks,
            _ => self.virtual_stages,
        }
    }
}

/// The first of the lists of layers that is set, by the name of its key.
pub(crate) fn given_list(lists: &TpLayerListArguments) -> Option<&'static str> {
    let mut names = TpLayerListArguments::KEYS.iter().map(|key| key.name);
    names.find(|name| matches!(lists.get(name), Some(Value::Array(_))))
}

/// The sections of a configuration file.
pub(crate) const SECTIONS: &[&str] = &[
    "model",
    "data",
    "distributed",
    "compute",
    "autopipe",
    "tp_layer_lists",
];

/// Every key of this version, in the order of the documentation.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    [
        MerakArguments::KEYS,
        ModelArguments::KEYS,
        DataArguments::KEYS,
        DistributedArguments::KEYS,
        ComputeArguments::KEYS,
        AutopipeArguments::KEYS,
        TpLayerListArguments::KEYS,
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_takes_a_list_where_what_it_expects_says_so() {
        for key in keys() {
            let expected = (key.expected)();
            assert_eq!(key.is_list, expected.contains("a list"), "{key:?}");
        }
    }

    #[test]
    fn the_scale_of_the_loss_follows_its_keys() {
        let scaling = |change: fn(&mut MerakArguments)| {
            let mut args = MerakArguments {
                fp16: true,
                ..MerakArguments::default()
            };
            change(&mut args);
            args.loss_scaling()
        };
        let usual = scaling(|_| ());
        assert!(usual.is_some());
        let changes: [fn(&mut MerakArguments); 6] = [
            |args| args.fp16 = false,
            |args| args.loss_scale = 128.0,
            |args| args.initial_scale_power = 7,
            |args| args.loss_scale_window = 7,
            |args| args.hysteresis = 7,
            |args| args.min_loss_scale = 7,
        ];
        assert!(changes.iter().all(|change| scaling(*change) != usual));
    }

    #[test]
    fn without_keys_weights_are_updated_by_the_defaults_of_merak_zero() {
        let args = MerakArguments::default().check().unwrap();
        assert_eq!(args.zero_config(1), ZeroConfig::default());
        let args = MerakArguments {
            fp16: true,
            ..MerakArguments::default()
        };
        let dynamic = LossScaling::Dynamic(DynamicScaling::default());
        assert_eq!(args.loss_scaling(), Some(dynamic));
    }
}
