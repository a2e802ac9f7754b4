//! How two checkpoints differ, for people and as JSON.

use crate::line;
use merak_ckpt::{
    DiffReport, DiffSummary, Difference, TensorDiff,
    words::{file, folded, row},
};
use serde_json::json;
use std::path::Path;

/// A summary, and a table of the tensors that differ below it, in lines of at most `columns`
/// characters if given; a longer name or path stays whole.
pub(crate) fn text(a: &Path, b: &Path, report: &DiffReport, columns: Option<usize>) -> String {
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
    let mut text = folded(&text, columns);
    line(&mut text, format_args!("A  {}", file(a)));
    line(&mut text, format_args!("B  {}\n", file(b)));
    text + &folded(&table(&report.different, columns), columns)
}

/// One document.
pub(crate) fn json(a: &Path, b: &Path, report: &DiffReport) -> String {
    let document = json!({
        "first": a,
        "second": b,
        "summary": report.summary(),
        "tensors": report.different,
    });
    format!("{document:#}\n")
}

fn table(tensors: &[TensorDiff], columns: Option<usize>) -> String {
    let mut text = String::new();
    let width = |cell: fn(&TensorDiff) -> usize, title: &str| {
        let widest = tensors.iter().map(cell).max().unwrap_or(0);
        widest.max(title.len())
    };
    let kinds = width(|tensor| tensor.kind.to_string().chars().count(), "kind");
    let names = width(|tensor| tensor.name.chars().count(), "name");
    let mut add = |cells: [&str; 3]| {
        let row = row(cells, [kinds, names], columns);
        line(&mut text, format_args!("{row}"));
    };
    add(["kind", "name", "difference"]);
    for tensor in tensors {
        let what = in_words(&tensor.difference);
        add([&tensor.kind.to_string(), &tensor.name, &what]);
    }
    text
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

#[cfg(test)]
mod tests {
    use super::*;
    use merak_ckpt::{Kind, Largest, ValueDiff};

    #[test]
    fn a_comparison_of_long_names_fits_80_columns_and_loses_no_word() {
        let name = "transformer.encoder.layers.11.cross_attention.query_key_value.weight";
        let index = vec![30_000, 12_287];
        let tensor = |kind: &Kind, difference| TensorDiff {
            kind: kind.clone(),
            name: name.to_owned(),
            difference,
        };
        let values = ValueDiff {
            elements: 377_487_360,
            beyond: 377_487_359,
            max_absolute: 1.25,
            at: 7,
            max_relative: 0.5,
        };
        let kind = Kind::optimizer("adamw.exp_avg_sq");
        let report = DiffReport {
            equal: 3,
            different: vec![
                tensor(&Kind::Parameter, Difference::OnlyInSecond),
                tensor(&kind, Difference::Values(values)),
            ],
            largest: Some(Largest {
                kind,
                name: name.to_owned(),
                index,
                absolute: 1.25,
            }),
        };
        let (a, b) = (Path::new("a"), Path::new("b"));
        let narrow = text(a, b, &report, Some(80));
        let too_long = |line: &&str| line.chars().count() > 80 && !line.ends_with(name);
        assert_eq!(narrow.lines().find(too_long), None, "{narrow}");
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(&narrow), words(&text(a, b, &report, None)));
    }
}
