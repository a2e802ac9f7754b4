//! What is in a checkpoint, for people and as JSON.

use crate::line;
use merak_ckpt::{Checkpoint, Kind, Manifest, TensorEntry};
use serde_json::{Value, json};

/// A table of the tensors below a few lines about the whole.
pub(crate) fn text(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let header = &manifest.header;
    let topology = header.topology;
    let mut text = String::new();
    line(
        &mut text,
        format_args!("checkpoint  {}", checkpoint.path().display()),
    );
    line(&mut text, format_args!("step        {}", header.step));
    line(
        &mut text,
        format_args!(
            "written by  dp={} tp={} pp={} sp={} zero_stage={}",
            topology.dp, topology.tp, topology.pp, topology.sp, topology.zero_stage
        ),
    );
    line(
        &mut text,
        format_args!(
            "files       {}, {}",
            manifest.files.len(),
            bytes(total_bytes(manifest))
        ),
    );
    let factors = || {
        manifest
            .tensors_of(&Kind::Parameter)
            .filter(|entry| entry.is_of_adapter())
    };
    if factors().next().is_some() {
        let (count, elements, size) = sums(factors());
        let of = "of an adapter";
        line(
            &mut text,
            format_args!(
                "{of:<24}{count:>6} tensors {elements:>14} elements  {}",
                bytes(size)
            ),
        );
    }
    for kind in manifest.kinds() {
        let (count, elements, size) = sums(manifest.tensors_of(kind));
        line(
            &mut text,
            format_args!(
                "{kind:<24}{count:>6} tensors {elements:>14} elements  {}",
                bytes(size)
            ),
        );
    }
    let width = manifest
        .tensors
        .iter()
        .map(|tensor| tensor.name.chars().count())
        .max()
        .unwrap_or(0);
    line(
        &mut text,
        format_args!(
            "\n{:<24}{:<width$}  {:<6}{:<22}{:>6}  {:>10}",
            "kind", "name", "type", "shape", "slices", "size"
        ),
    );
    for tensor in &manifest.tensors {
        let TensorEntry {
            kind,
            name,
            dtype,
            slices,
            ..
        } = tensor;
        let shape = format!("{:?}", tensor.shape);
        let size = bytes(tensor.num_bytes() as u64);
        line(
            &mut text,
            format_args!(
                "{kind:<24}{name:<width$}  {dtype:<6}{shape:<22}{:>6}  {size:>10}",
                slices.len()
            ),
        );
    }
    text
}

/// One document: the manifest without checksums and places, with sums.
pub(crate) fn json(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let header = &manifest.header;
    let kind = |kind| {
        let (tensors, elements, bytes) = sums(manifest.tensors_of(kind));
        (
            kind.to_string(),
            json!({"tensors": tensors, "elements": elements, "bytes": bytes}),
        )
    };
    let tensor = |tensor: &TensorEntry| {
        json!({
            "kind": tensor.kind,
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "bytes": tensor.num_bytes(),
            "slices": tensor.slices.len(),
        })
    };
    let document = json!({
        "path": checkpoint.path(),
        "step": header.step,
        "topology": header.topology,
        "model": header.model,
        "state": header.state,
        "bytes": total_bytes(manifest),
        "adapter_elements": sums(manifest.tensors_of(&Kind::Parameter).filter(|entry| entry.is_of_adapter())).1,
        "kinds": manifest.kinds().into_iter().map(kind).collect::<serde_json::Map<String, Value>>(),
        "files": manifest.files,
        "tensors": manifest.tensors.iter().map(tensor).collect::<Vec<_>>(),
    });
    format!("{document:#}\n")
}

fn total_bytes(manifest: &Manifest) -> u64 {
    manifest.files.iter().map(|file| file.length).sum()
}

/// Number of tensors, of elements, and of bytes.
fn sums<'a>(tensors: impl Iterator<Item = &'a TensorEntry>) -> (usize, u64, u64) {
    tensors.fold((0, 0, 0), |(count, elements, bytes), tensor| {
        (
            count + 1,
            elements + tensor.num_elements() as u64,
            bytes + tensor.num_bytes() as u64,
        )
    })
}

/// A size for people: `512 B`, `1.5 MiB`.
fn bytes(n: u64) -> String {
    let mut size = n as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if size < 1024.0 {
            return if unit == "B" {
                format!("{n} B")
            } else {
                format!("{size:.1} {unit}")
            };
        }
        size /= 1024.0;
    }
    format!("{size:.1} TiB")
}
