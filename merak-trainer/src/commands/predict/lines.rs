//! Predictions as JSON lines.

use merak_ckpt::format::DRAFT;
use merak_trainer::{Error, PredictionKind, Result, SamplePrediction};
use serde_json::{Value, json};
use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, BufWriter, ErrorKind, Write},
    path::{Path, PathBuf},
};

/// Standard output in the place of a file's path.
pub(super) const STANDARD: &str = "standard output";

/// Lines on their way to a file, which takes its name when all are there. Dropping them before
/// removes what was written.
pub(in crate::commands) struct Lines {
    out: Box<dyn Write + Send>,
    /// The file.
    path: PathBuf,
    /// Where its lines lie until then; a pipe, a device and standard output get them at once.
    draft: Option<PathBuf>,
    has_labels: bool,
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
            return Ok(Self::to(io::stdout(), STANDARD.into(), None));
        }
        // A link stays one.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if path.exists() {
            let there = File::options().append(true).open(&path)?;
            if !there.metadata()?.is_file() {
                return Ok(Self::to(BufWriter::new(there), path, None));
            }
        }
        let name = path.file_name().ok_or(ErrorKind::NotFound)?;
        let mut draft = OsString::from(DRAFT);
        draft.push(name);
        let draft = path.with_file_name(draft);
        let out = BufWriter::new(File::create(&draft)?);
        Ok(Self::to(out, path, Some(draft)))
    }

    fn to(out: impl Write + Send + 'static, path: PathBuf, draft: Option<PathBuf>) -> Self {
        Self {
            out: Box::new(out),
            path,
            draft,
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
        writeln!(self.out, "{line}").map_err(Error::writing(&self.path))
    }

    /// Gives the file its name. Returns whether samples had labels.
    pub(in crate::commands) fn finish(mut self) -> Result<bool> {
        self.named().map_err(Error::writing(&self.path))?;
        Ok(self.has_labels)
    }

    fn named(&mut self) -> io::Result<()> {
        self.out.flush()?;
        if let Some(draft) = &self.draft {
            fs::rename(draft, &self.path)?;
            self.draft = None;
        }
        Ok(())
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        if let Some(draft) = &self.draft {
            // What stays is seen by its name.
            let _ = fs::remove_file(draft);
        }
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
