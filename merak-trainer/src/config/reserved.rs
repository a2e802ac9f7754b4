//! Keys that are known but do nothing: features of a later version, and Hugging Face's that have no
//! meaning here. They pass at their inactive values, which ask for what happens anyway or for
//! nothing, and are refused at any other.

use serde_json::{Value, json};

use super::{key::Raw, refusal::Refusal, setting::Setting};

/// A key whose feature is not built yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reserved {
    /// Full name.
    pub(crate) name: &'static str,
    /// The values that ask for nothing, as JSON; the first is the documented default.
    pub(crate) inactive: &'static [&'static str],
    /// Why, or what to use instead, after the inactive values.
    advice: &'static str,
}

const fn reserved(
    name: &'static str,
    inactive: &'static [&'static str],
    advice: &'static str,
) -> Reserved {
    Reserved {
        name,
        inactive,
        advice,
    }
}

const FALSE: &[&str] = &["false"];
const NONE: &[&str] = &["null"];

/// Why nothing is kept between runs.
const CACHE: &str = ": a graph is cut in milliseconds, anew in each run";

/// The keys of features to come.
pub(crate) const RESERVED: &[Reserved] = &[
    reserved(
        "input_names",
        NONE,
        ": a model states its inputs, and data give them by name",
    ),
    reserved("cache_sharding", FALSE, CACHE),
    reserved("cache_name", NONE, CACHE),
    // Pages of batches are not pinned, which changes no result: both values train alike.
    reserved("dataloader_pin_memory", &["true", "false"], ""),
    // The first step is always logged.
    reserved("logging_first_step", &["true", "false"], ""),
    // Checkpoints are files of safetensors.
    reserved("save_safetensors", &["true"], ""),
    // "compute.device" names the device; `Config::check` refuses true beside another one.
    reserved("use_cpu", &["false", "true"], ""),
];

/// Hugging Face training arguments without effect here, and what to use instead where there is
/// something.
pub(crate) const NO_EFFECT: &[(&str, &str)] = &[
    ("accelerator_config", ""),
    (
        "activation_checkpointing_kwargs",
        r#""checkpoint_num_layers""#,
    ),
    ("auto_find_batch_size", ""),
    ("average_tokens_across_devices", ""),
    ("batch_eval_metrics", ""),
    ("bf16_full_eval", ""),
    ("dataloader_in_order", ""),
    ("dataloader_multiprocessing_context", ""),
    ("dataloader_persistent_workers", ""),
    ("dataloader_prefetch_factor", ""),
    ("ddp_backend", r#""distributed.engine""#),
    ("ddp_broadcast_buffers", ""),
    ("ddp_bucket_cap_mb", r#""zero_reduce_bucket_size""#),
    ("ddp_find_unused_parameters", ""),
    ("ddp_static_graph", ""),
    ("ddp_timeout", r#""distributed.timeout_s""#),
    ("debug", ""),
    ("deepspeed", r#""zero_stage""#),
    ("disable_tqdm", ""),
    ("enable_jit_checkpoint", ""),
    ("eval_accumulation_steps", ""),
    ("eval_delay", ""),
    ("eval_do_concat_batches", ""),
    ("eval_on_start", ""),
    ("eval_strategy", r#""do_eval" and "eval_steps""#),
    ("eval_use_gather_object", ""),
    ("evaluation_strategy", r#""do_eval" and "eval_steps""#),
    ("fp16_backend", ""),
    ("fp16_full_eval", ""),
    ("fp16_opt_level", ""),
    ("fsdp", r#""zero_stage""#),
    ("fsdp_config", r#""zero_stage""#),
    ("full_determinism", ""),
    ("generation_config", ""),
    ("generation_max_length", r#""max_new_tokens""#),
    ("generation_num_beams", r#""num_beams""#),
    ("gradient_checkpointing", r#""activation_checkpointing""#),
    (
        "gradient_checkpointing_kwargs",
        r#""checkpoint_num_layers""#,
    ),
    ("group_by_length", ""),
    ("hub_always_push", ""),
    ("hub_model_id", ""),
    ("hub_private_repo", ""),
    ("hub_revision", ""),
    ("hub_strategy", ""),
    ("hub_token", ""),
    ("include_for_metrics", ""),
    ("include_inputs_for_metrics", ""),
    ("include_num_input_tokens_seen", ""),
    ("include_tokens_per_second", ""),
    ("jit_mode_eval", ""),
    ("label_names", ""),
    ("length_column_name", ""),
    ("liger_kernel_config", ""),
    ("local_rank", ""),
    ("log_level", r#""--log""#),
    ("log_level_replica", r#""--log""#),
    ("log_on_each_node", ""),
    ("logging_nan_inf_filter", ""),
    ("logging_strategy", r#""logging_steps""#),
    ("mp_parameters", ""),
    ("neftune_noise_alpha", ""),
    ("no_cuda", r#""compute.device""#),
    ("optim_args", ""),
    ("optim_target_modules", ""),
    ("parallelism_config", r#""dp", "tp", "sp" and "pp""#),
    ("past_index", ""),
    ("per_gpu_eval_batch_size", r#""per_device_eval_batch_size""#),
    (
        "per_gpu_train_batch_size",
        r#""per_device_train_batch_size""#,
    ),
    ("predict_with_generate", r#""text_generation""#),
    ("prediction_loss_only", ""),
    ("project", ""),
    ("push_to_hub", ""),
    ("ray_scope", ""),
    ("remove_unused_columns", ""),
    ("restore_callback_states_from_checkpoint", ""),
    ("run_name", ""),
    ("save_on_each_node", ""),
    ("save_only_model", r#""no_save_optim""#),
    ("save_strategy", r#""save" and "save_steps""#),
    ("skip_memory_metrics", ""),
    ("sortish_sampler", ""),
    ("tf32", ""),
    ("torch_compile", ""),
    ("torch_compile_backend", ""),
    ("torch_compile_mode", ""),
    ("torch_empty_cache_steps", ""),
    ("torchdynamo", r#""trace_method""#),
    ("tpu_metrics_debug", ""),
    ("tpu_num_cores", ""),
    ("trackio_bucket_id", ""),
    ("trackio_space_id", ""),
    ("trackio_static_space_id", ""),
    ("train_sampling_strategy", ""),
    ("use_ipex", ""),
    ("use_legacy_prediction_loop", ""),
    ("use_liger_kernel", ""),
    ("use_mps_device", ""),
];

impl Reserved {
    /// Whether a bare `--key` on the command line means true.
    pub(crate) fn is_flag(&self) -> bool {
        matches!(self.inactive[0], "true" | "false")
    }

    /// Passes an inactive value and refuses any other.
    pub(crate) fn check(&self, raw: &Raw) -> Result<(), Refusal> {
        let found = normal(&as_value(raw));
        let mut inactive = self.inactive.iter().map(|text| value_of(text));
        if inactive.any(|value| normal(&value) == found) {
            return Ok(());
        }
        let instead = self
            .inactive
            .iter()
            .map(|text| if *text == "null" { "none" } else { text });
        let mut instead = super::choice::one_of(&instead.collect::<Vec<_>>());
        instead.push_str(self.advice);
        Err(Refusal::NotAvailable { instead })
    }
}

/// Whether a value is true, however it is written.
pub(crate) fn is_true(raw: &Raw) -> bool {
    normal(&as_value(raw)) == Value::Bool(true)
}

/// Whether a value of a key without effect sets nothing.
pub(crate) fn sets_nothing(raw: &Raw) -> bool {
    let value = normal(&as_value(raw));
    [Value::Null, json!(false), json!(""), json!([]), json!({})].contains(&value)
}

fn value_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

fn as_value(raw: &Raw) -> Value {
    match raw {
        Raw::Typed(value) => value.clone(),
        Raw::Text(text) if text.eq_ignore_ascii_case("true") => Value::Bool(true),
        Raw::Text(text) if text.eq_ignore_ascii_case("false") => Value::Bool(false),
        Raw::Text(text) => value_of(text),
    }
}

/// A form in which equal values compare equal: numbers as floats, the words for none as null.
fn normal(value: &Value) -> Value {
    match value {
        Value::Number(number) => Value::from(number.as_f64()),
        Value::String(_) => match Option::<String>::from_value(value) {
            Ok(None) => Value::Null,
            _ => value.clone(),
        },
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inactive_value_passes_however_it_is_written() {
        for reserved in RESERVED {
            for inactive in reserved.inactive {
                let typed = Raw::Typed(serde_json::from_str(inactive).unwrap());
                assert_eq!(reserved.check(&typed), Ok(()), "{}", reserved.name);
                let text = Raw::Text(inactive.trim_matches('"').to_owned());
                assert_eq!(reserved.check(&text), Ok(()), "{}", reserved.name);
            }
            assert!(
                reserved.check(&Raw::Text("7.25".into())).is_err(),
                "{}",
                reserved.name
            );
        }
    }

    #[test]
    fn a_flag_of_hugging_face_may_stay_off() {
        assert!(sets_nothing(&Raw::Text("False".into())));
        assert!(sets_nothing(&Raw::Typed(json!([]))));
        assert!(!sets_nothing(&Raw::Typed(json!("ds_config.json"))));
    }
}
