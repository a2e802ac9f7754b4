//! The embeddings of a prediction are what the head of the model reads in `transformers`.
//!
//! `goldens/embeddings` has the numbers and the script that made them.

use safetensors::Dtype;
use serde_json::Value;

use super::{
    families::{objects, place, write_tensors},
    weights::{golden, write_model},
};

/// Tolerance, as a share of a sample's largest number: that of law L4.
const TOLERANCE: f64 = 1e-4;

fn integers(list: &Value) -> impl Iterator<Item = i64> {
    let list = list.as_array().expect("a list").iter();
    list.map(|number| number.as_i64().expect("an integer"))
}

fn numbers(list: &Value) -> Vec<f64> {
    let list = list.as_array().expect("a list").iter();
    list.map(|number| number.as_f64().expect("a number"))
        .collect()
}

fn check(case: &str) {
    let golden_of_case = golden(&format!(
        "merak-trainer/tests/goldens/embeddings/{case}.json"
    ));
    let base = golden(golden_of_case["base"].as_str().expect("a path"));
    let place = place(&base["config"], "tensors", "samples.safetensors");
    write_model(&place, &base);
    let tensors = golden_of_case["tensors"].as_object().expect("an object");
    let tensors = tensors.iter().map(|(name, tensor)| {
        let shape = integers(&tensor["shape"]).map(|size| usize::try_from(size).expect("a size"));
        let shape: Vec<usize> = shape.collect();
        let values = integers(&tensor["values"]);
        if name == "pixel_values" {
            let bytes = values.map(|value| u8::try_from(value).expect("a byte"));
            (name.as_str(), Dtype::U8, shape, bytes.collect::<Vec<_>>())
        } else {
            let bytes = values.flat_map(i64::to_le_bytes);
            (name.as_str(), Dtype::I64, shape, bytes.collect())
        }
    });
    write_tensors(
        &place.path("samples.safetensors"),
        &tensors.collect::<Vec<_>>(),
    );

    let expected = golden_of_case["embeddings"].as_array().expect("a list");
    for ranks in ["", "--tp 2 --pp 2", "--dp 2"] {
        place.succeed(&format!(
            "predict merak.toml hf --what embeddings -o found.jsonl {ranks}"
        ));
        let found = objects(&place, "found.jsonl");
        assert_eq!(found.len(), expected.len(), "{case} {ranks}");
        for (sample, (found, expected)) in found.iter().zip(expected).enumerate() {
            let (found, expected) = (numbers(&found["embedding"]), numbers(expected));
            assert_eq!(found.len(), expected.len(), "{case} {ranks}");
            let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() <= TOLERANCE * largest,
                    "sample {sample} of {case} {ranks}: {found}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn decoders_leave_out_padding_after_and_before_the_tokens() {
    check("gpt2");
    check("llama-left");
}

#[test]
fn encoders_give_what_the_head_of_their_task_reads() {
    for case in ["bert-masked", "bert-classes", "vit"] {
        check(case);
    }
}

#[test]
fn of_an_encoder_decoder_the_positions_of_the_decoder_count() {
    check("t5");
}
