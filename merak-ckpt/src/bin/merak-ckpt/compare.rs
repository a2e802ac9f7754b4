//! How two checkpoints differ, for people and as JSON.

use crate::line;
use merak_ckpt::{Checkpoint, DiffReport, DiffSummary, Difference, TensorDiff};
use serde_json::json;

/// A summary, and a table of the tensors that differ below it.
pub(crate) fn text(a: &Checkpoint, b: &Checkpoint, report: &DiffReport) -> String {
    let DiffSummary {
        equal,
        different,
        only_in_first,
        only_in_second,
        largest,
    } = report.summary();
    let mut text = String::new();
    line(
        &mut text,
        format_args!(
            "{equal} tensors equal, {different} different, {only_in_first} only in A, {only_in_second} only in B"
        ),
    );
    if report.different.is_empty() {
        return text;
    }
    if let Some(largest) = largest {
        line(
            &mut text,
            format_args!(
                "largest difference {:.3e} in {} `{}` at {:?}",
                largest.absolute, largest.kind, largest.name, largest.index
            ),
        );
    }
    line(&mut text, format_args!("A  {}", a.path().display()));
    line(&mut text, format_args!("B  {}\n", b.path().display()));
    table(&mut text, &report.different);
    text
}

/// One document.
pub(crate) fn json(a: &Checkpoint, b: &Checkpoint, report: &DiffReport) -> String {
    let document = json!({
        "first": a.path(),
        "second": b.path(),
        "summary": report.summary(),
        "tensors": report.different,
    });
    format!("{document:#}\n")
}

fn table(text: &mut String, tensors: &[TensorDiff]) {
    let width = |cell: fn(&TensorDiff) -> usize, title: &str| {
        let widest = tensors.iter().map(cell).max().unwrap_or(0);
        widest.max(title.len())
    };
    let kinds = width(|tensor| tensor.kind.to_string().chars().count(), "kind");
    let names = width(|tensor| tensor.name.chars().count(), "name");
    line(
        text,
        format_args!("{:<kinds$}  {:<names$}  difference", "kind", "name"),
    );
    for tensor in tensors {
        let (kind, name) = (tensor.kind.to_string(), &tensor.name);
        let what = in_words(&tensor.difference);
        line(text, format_args!("{kind:<kinds$}  {name:<names$}  {what}"));
    }
}

fn in_words(difference: &Difference) -> String {
    match difference {
        Difference::OnlyInFirst => "only in A".to_owned(),
        Difference::OnlyInSecond => "only in B".to_owned(),
        Difference::Shape { first, second } => format!("shape {first:?} and {second:?}"),
        Difference::DType { first, second } => format!("type {first} and {second}"),
        Difference::Values(values) => format!(
            "{} of {} elements, at most {:.3e} absolute, {:.3e} relative",
            values.beyond, values.elements, values.max_absolute, values.max_relative
        ),
        other => format!("{other:?}"),
    }
}
