//! Damaged checkpoints: a command that loads one names the file and ends with status 2.

use std::fs;

use super::Workplace;

/// Changes a file of the checkpoint and loads it by both commands; returns the message.
fn refused(place: &Workplace, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> String {
    let file = place.path("run/checkpoints/step-00000001").join(name);
    let good = fs::read(&file).expect("it is there");
    let mut bad = good.clone();
    change(&mut bad);
    assert_ne!(bad, good, "{name}");
    fs::write(&file, bad).expect("it can be written");
    let resumed = place.mistake("train merak.toml --max_steps 2 --resume latest");
    assert_eq!(place.mistake("generate run --prompt-ids 1 --pp 2"), resumed);
    fs::write(&file, good).expect("it can be written");
    resumed
}

/// Replaces the first occurrence of a text by another of the same length.
fn edit(from: &'static str, to: &'static str) -> impl FnOnce(&mut Vec<u8>) {
    assert_eq!(from.len(), to.len());
    move |bytes| {
        let mut windows = bytes.windows(from.len());
        let at = windows.position(|window| window == from.as_bytes());
        let at = at.expect("it occurs");
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
}

#[test]
fn damage_is_found_on_loading_whatever_file_it_is_in() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let (config, manifest, weights) = ("config.json", "manifest.json", "model-00000.safetensors");
    let messages = [
        refused(&place, config, edit("\"n_head\": 2", "\"n_head\": 4")),
        refused(&place, "tokenizer.json", |b| b[100] ^= 1),
        refused(&place, manifest, edit("\"step\": 1", "\"step\": 7")),
        refused(&place, weights, edit("\"F32\"", "\"I32\"")),
        refused(&place, weights, |b| {
            b.pop();
        }),
        refused(&place, weights, |b| {
            let half = b.len() / 2;
            b[half] ^= 4;
        }),
    ];
    insta::assert_snapshot!(messages.join("\n"), @"
    error: checkpoint run/checkpoints/step-00000001 is damaged: config.json: checksum CHECKSUM, expected CHECKSUM; there is no complete older one
    error: checkpoint run/checkpoints/step-00000001 is damaged: tokenizer.json: checksum CHECKSUM, expected CHECKSUM; there is no complete older one
    error: checkpoint run/checkpoints/step-00000001 is damaged: manifest.json: checksum CHECKSUM, expected CHECKSUM; there is no complete older one
    error: checkpoint run/checkpoints/step-00000001 is damaged: model-00000.safetensors: the header and the manifest differ about `transformer.h.0.attn.c_attn.bias`; there is no complete older one
    error: checkpoint run/checkpoints/step-00000001 is damaged: model-00000.safetensors: the file has 75903 bytes, expected 75904; there is no complete older one
    error: checkpoint run/checkpoints/step-00000001 is damaged: model-00000.safetensors, tensor `transformer.h.2.mlp.c_fc.weight`: checksum CHECKSUM, expected CHECKSUM; there is no complete older one
    ");
}
