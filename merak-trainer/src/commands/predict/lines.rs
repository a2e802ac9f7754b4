//! Predictions as JSON lines.

use merak_ckpt::DraftFile;
use merak_trainer::{Error, PredictionKind, Result, SamplePrediction};
use serde_json::{Value, json};
use std::{
    fs::File,
    io::{self, BufWriter, IntoInnerError, Write},
    path::{Path, PathBuf},
};

/// Standard output in the place of a file's path.
pub(super) const STANDARD: &str = "standard output";

/// Lines on their way to a file, which takes its name when all are there. Dropping them before
/// removes what was written.
pub(in crate::commands) struct Lines {
    out: Out,
    /// The file.
    path: PathBuf,
    has_labels: bool,
}

enum Out {
    File(BufWriter<DraftFile>),
    /// A pipe, a device or standard output, which get lines at once.
    Stream(Box<dyn Write + Send>),
}

/// Whether a path stands for standard output.
pub(super) fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

impl Lines {
    /// Begins a file, which keeps what is in it until [`Lines::finish`].
    pub(in crate::commands) fn begin(path: &Path) -> io::Result<Self> {
        if is_standard(path) {
            // Each line is written when it ends.
            return Ok(Self::to(Out::Stream(Box::new(io::stdout())), STANDARD));
        }
        if path.exists() {
            let there = File::options().append(true).open(path)?;
            if !there.metadata()?.is_file() {
                return Ok(Self::to(Out::Stream(Box::new(BufWriter::new(there))), path));
            }
        }
        let draft = BufWriter::new(DraftFile::begin(path)?);
        Ok(Self::to(Out::File(draft), path))
    }

    fn to(out: Out, path: impl Into<PathBuf>) -> Self {
        Self {
            out,
            path: path.into(),
            has_labels: false,
        }
    }

    /// Adds the line of a sample, and the name that the data give it.
    pub(super) fn write(
        &mut self,
        kind: PredictionKind,
        prediction: &SamplePrediction,
        name: Option<String>,
    ) -> Result<()> {
        let mut line = line(kind, prediction);
        if let Some(name) = name {
            line["file"] = name.into();
        }
        self.has_labels |= prediction.labels.iter().any(|&label| label >= 0);
        let written = match &mut self.out {
            Out::File(draft) => writeln!(draft, "{line}"),
            Out::Stream(out) => writeln!(out, "{line}"),
        };
        written.map_err(Error::writing(&self.path))
    }

    /// Gives the file its name. Returns whether samples had labels.
    pub(in crate::commands) fn finish(self) -> Result<bool> {
        let finished = match self.out {
            Out::File(draft) => draft
                .into_inner()
                .map_err(IntoInnerError::into_error)
                .and_then(DraftFile::finish),
            Out::Stream(mut out) => out.flush(),
        };
        finished.map_err(Error::writing(&self.path))?;
        Ok(self.has_labels)
    }
}

/// The field of a prediction in its line.
pub(super) fn name_of(kind: PredictionKind) -> &'static str {
    match kind {
        PredictionKind::Probabilities => "probabilities",
        PredictionKind::Losses => "losses",
        PredictionKind::Embeddings => "embedding",
        PredictionKind::Logits => "logits",
    }
}

/// The object of a sample: its place, its prediction, and what is shorter than that.
fn line(kind: PredictionKind, prediction: &SamplePrediction) -> Value {
    let SamplePrediction {
        sample,
        predictions: values,
        labels,
    } = prediction;
    // What is not finite is null.
    let mut object = json!({ "sample": sample, name_of(kind): values });
    let has_class = labels.len() == 1;
    if kind == PredictionKind::Losses {
        let finite: Vec<f64> = values
            .iter()
            .copied()
            .filter(|x| !x.is_nan())
            .map(f64::from)
            .collect();
        let mean = finite.iter().sum::<f64>() / finite.len().max(1) as f64;
        object["loss"] = (!finite.is_empty()).then_some(mean).into();
    }
    if has_class && kind != PredictionKind::Embeddings && kind != PredictionKind::Losses {
        let mut best = 0;
        for (class, value) in values.iter().enumerate() {
            if *value > values[best] {
                best = class;
            }
        }
        object["class"] = best.into();
    }
    if has_class {
        object["label"] = (labels[0] >= 0).then_some(labels[0]).into();
    }
    object
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn prediction(values: &[f32], labels: &[i64]) -> SamplePrediction {
        SamplePrediction {
            sample: 3,
            predictions: values.to_vec(),
            labels: labels.to_vec(),
        }
    }

    #[test]
    fn a_line_has_the_prediction_and_its_short_form() {
        let of = |values: &[f32], labels: &[i64], kind| {
            line(kind, &prediction(values, labels)).to_string()
        };
        assert_eq!(
            of(&[0.25, 0.75], &[0], PredictionKind::Probabilities),
            r#"{"sample":3,"probabilities":[0.25,0.75],"class":1,"label":0}"#
        );
        assert_eq!(
            of(&[0.5, f32::NAN, 1.5], &[1, -100, 2], PredictionKind::Losses),
            r#"{"sample":3,"losses":[0.5,null,1.5],"loss":1.0}"#
        );
        assert_eq!(
            of(&[0.5], &[-100], PredictionKind::Embeddings),
            r#"{"sample":3,"embedding":[0.5],"label":null}"#
        );
    }

    #[test]
    fn a_file_has_its_lines_when_all_are_there_and_else_keeps_what_it_had() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        let kind = PredictionKind::Embeddings;
        for labels in [&[-100_i64], &[1]] {
            let before = fs::read_to_string(&path).ok();
            for finishes in [false, true] {
                let mut lines = Lines::begin(&path).unwrap();
                let sample = prediction(&[0.5], labels);
                lines.write(kind, &sample, None).unwrap();
                assert_eq!(fs::read_to_string(&path).ok(), before);
                if finishes {
                    assert_eq!(lines.finish().unwrap(), labels[0] >= 0);
                }
            }
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(
                text,
                format!("{}\n", line(kind, &prediction(&[0.5], labels)))
            );
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
        // What is no file of its own is written as it is.
        let mut lines = Lines::begin(Path::new("/dev/null")).unwrap();
        lines.write(kind, &prediction(&[0.5], &[1]), None).unwrap();
        lines.finish().unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}
