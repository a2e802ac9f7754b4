//! What is in a checkpoint, for people and as JSON.

use crate::line;
use merak_ckpt::{
    Checkpoint, Kind, Manifest, TensorEntry,
    words::{Bytes, file, row},
};
use serde_json::{Value, json};

/// A table of the tensors below a few lines about the whole. Where a row exceeds `columns`, its
/// figures get a line of their own.
pub(crate) fn text(checkpoint: &Checkpoint, columns: Option<usize>) -> String {
    let mut text = String::new();
    add_summary(&mut text, checkpoint);
    add_table(&mut text, &checkpoint.manifest().tensors, columns);
    text
}

fn add_summary(text: &mut String, checkpoint: &Checkpoint) {
    let manifest = checkpoint.manifest();
    let header = &manifest.header;
    let topology = header.topology;
    line(
        text,
        format_args!("checkpoint  {}", file(checkpoint.path())),
    );
    line(text, format_args!("step        {}", header.step));
    line(
        text,
        format_args!(
            "written by  dp={} tp={} pp={} sp={} zero_stage={}",
            topology.dp, topology.tp, topology.pp, topology.sp, topology.zero_stage
        ),
    );
    line(
        text,
        format_args!(
            "files       {}, {}",
            manifest.files.len(),
            Bytes(total_bytes(manifest))
        ),
    );
    if let Some(base) = &manifest.base {
        line(text, format_args!("base        ../{}", base.folder));
    }
    let factors: Vec<_> = factors(manifest).collect();
    if !factors.is_empty() {
        add_sums(text, "of an adapter", factors.into_iter());
    }
    for kind in manifest.kinds() {
        add_sums(text, &kind.to_string(), manifest.tensors_of(kind));
    }
}

fn add_sums<'a>(text: &mut String, of: &str, tensors: impl Iterator<Item = &'a TensorEntry>) {
    let (count, elements, size) = sums(tensors);
    let size = Bytes(size);
    line(
        text,
        format_args!("{of:<24}{count:>6} tensors {elements:>14} elements  {size}"),
    );
}

fn add_table(text: &mut String, tensors: &[TensorEntry], columns: Option<usize>) {
    let longest = |column: fn(&TensorEntry) -> String| {
        let cells = tensors.iter().map(column);
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let width = longest(|tensor| tensor.name.clone());
    let kinds = longest(|tensor| tensor.kind.to_string()).max("kind".len());
    let shapes = longest(|tensor| format!("{:?}", tensor.shape)).max("shape".len());
    text.push('\n');
    let mut add = |kind: &str, name: &str, figures: [&str; 4]| {
        let [dtype, shape, slices, size] = figures;
        let figures = format!("{dtype:<5} {shape:<shapes$} {slices:>6} {size:>8}");
        let row = row([kind, name, &figures], [kinds, width], columns);
        line(text, format_args!("{row}"));
    };
    add("kind", "name", ["type", "shape", "slices", "size"]);
    for tensor in tensors {
        let TensorEntry {
            kind,
            name,
            dtype,
            slices,
            ..
        } = tensor;
        let [kind, dtype] = [kind.to_string(), dtype.to_string()];
        let shape = format!("{:?}", tensor.shape);
        let slices = slices.len().to_string();
        let size = Bytes(tensor.num_bytes() as u64).to_string();
        add(&kind, name, [&dtype, &shape, &slices, &size]);
    }
}

/// The parameters of an adapter.
fn factors(manifest: &Manifest) -> impl Iterator<Item = &TensorEntry> {
    let parameters = manifest.tensors_of(&Kind::Parameter);
    parameters.filter(|entry| entry.is_of_adapter())
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
        "base": manifest.base,
        "bytes": total_bytes(manifest),
        "adapter_elements": sums(factors(manifest)).1,
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
