//! `metrics.jsonl`: one JSON object per line.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Seek as _, Write as _},
    path::{Path, PathBuf},
};

use merak_ckpt::{lies_at, open_to_write, replace_file, words};
use serde::Serialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// What a logged step reports: every `logging_steps` steps, the first step of a run or of its
/// resumed part, and the last one. A number that is not finite is written as `null`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct StepMetrics {
    /// Optimizer steps done, skipped ones included.
    pub step: usize,
    /// Training loss of this step in nats per token: the mean over the labels of its global batch,
    /// before its update. It is not an average over steps, so that it does not depend on
    /// `logging_steps` or on where a run was resumed.
    pub loss: f64,
    /// Global gradient norm of this step before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens of all global batches since the run's first step, padding included, over all
    /// replicas. It goes on in a resumed run, also with another batch.
    pub tokens: u64,
    /// Tokens per second over the steps since the last record; evaluating and saving do not count.
    pub tokens_per_s: f64,
    /// Floating-point operations of the model per second at this speed, in units of 10^12, over all
    /// ranks, as [`Plan::flops_per_token`](crate::Plan::flops_per_token) counts them.
    pub tflops: Option<f64>,
    /// Share of the ranks' [`Peak`](super::Peak) that this is; `null` without one.
    pub mfu: Option<f64>,
    /// Resident bytes of the process of rank 0 when the record is written, with ranks as threads
    /// that of all ranks; `null` where the system does not tell.
    pub memory_bytes: Option<u64>,
    /// Loss scale; `null` where there is none, as in f32.
    pub loss_scale: Option<f64>,
    /// Steps of the run so far that changed nothing because a gradient was not finite.
    pub skipped_steps: u64,
    /// Mean seconds of a step since the last record, on the first rank; evaluating and saving do
    /// not count.
    pub step_time_s: f64,
    /// Mean seconds of a step since the last record in which the first rank waited for its batches:
    /// how slow its disk is. Workers that read ahead (`dataloader_num_workers`) hide it.
    pub data_wait_s: f64,
    /// Samples per second over the steps since the last record.
    pub samples_per_s: f64,
    /// Seconds since training started, evaluating and saving included. A resumed run goes on from
    /// the last record that it keeps.
    pub time_s: f64,
}

/// Records appended to a file, each handed to the operating system before the next step starts.
///
/// # Examples
///
/// ```
/// use merak_trainer::metrics::{MetricsFile, StepMetrics};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("metrics.jsonl");
/// let mut file = MetricsFile::open(&path, 0)?;
/// file.append(&StepMetrics { step: 1, loss: 5.5, ..StepMetrics::default() })?;
/// assert!(std::fs::read_to_string(&path)?.starts_with(r#"{"step":1,"loss":5.5,"#));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    earlier_time_s: f64,
}

impl MetricsFile {
    /// Opens the file to go on after `steps` optimizer steps: records of later steps, left by a run
    /// that is now resumed before them, are removed, and so is a last line that was cut off. With 0
    /// steps the file starts empty.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written.
    pub fn open(path: &Path, steps: usize) -> Result<Self> {
        let failed = Error::writing(path);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let earlier = match merak_ckpt::read_regular(path, u64::MAX) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(source) => return Err(failed(source)),
        };
        let kept = records_until(&earlier, steps);
        if kept != earlier {
            replace_file(path, kept.as_bytes()).map_err(failed)?;
        }
        Ok(Self {
            path: path.to_path_buf(),
            file: open(path).map_err(failed)?,
            earlier_time_s: last_time_s(&kept),
        })
    }

    /// Makes the file anew, with its records, if it or its folder was removed, and warns of that.
    /// Two looks at the file system where nothing has changed.
    ///
    /// # Errors
    ///
    /// When the file cannot be made, as where something else lies in its place.
    pub fn renew(&mut self) -> Result<()> {
        if lies_at(&self.file, &self.path) {
            return Ok(());
        }
        self.renew_file().map_err(Error::writing(&self.path))?;
        let path = words::file(&self.path);
        tracing::warn!(%path, "the file was removed or replaced: records go on in the one there now");
        Ok(())
    }

    fn renew_file(&mut self) -> io::Result<()> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut renewed = open(&self.path)?;
        if renewed.metadata()?.len() == 0 {
            self.file.rewind()?;
            io::copy(&mut self.file, &mut renewed)?;
        }
        self.file = renewed;
        Ok(())
    }

    /// All records, those of earlier parts of the run included.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub fn records(&self) -> Result<Vec<Value>> {
        let bytes = merak_ckpt::read_regular(&self.path, u64::MAX);
        let bytes = bytes.map_err(Error::writing(&self.path))?;
        let text = String::from_utf8_lossy(&bytes);
        let records = text.lines().map(serde_json::from_str);
        Ok(records.filter_map(serde_json::Result::ok).collect())
    }

    /// `time_s` of the last record that was there when the file was opened; 0 without one.
    pub fn earlier_time_s(&self) -> f64 {
        self.earlier_time_s
    }

    /// Appends one record as one line; makes the file anew if it was removed.
    ///
    /// # Errors
    ///
    /// When the line cannot be written. Where something else lies in the file's place, a later call
    /// that finds the place free makes the file anew with this record too.
    pub fn append(&mut self, record: &impl Serialize) -> Result<()> {
        let path = self.path.clone();
        let failed = Error::writing(&path);
        let mut line = serde_json::to_vec(record).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        let renewed = self.renew();
        // One unbuffered write per line: a run that is killed leaves whole lines.
        self.file.write_all(&line).map_err(failed)?;
        renewed
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    open_to_write(path, options.create(true).read(true).append(true))
}

/// The whole lines of records up to a step; none for a run that starts. Lines without a step belong
/// to others and stay.
fn records_until(text: &str, steps: usize) -> String {
    if steps == 0 {
        return String::new();
    }
    let is_kept = |line: &&str| {
        let record: Value = serde_json::from_str(line).unwrap_or_default();
        line.ends_with('\n')
            && record["step"]
                .as_u64()
                .is_none_or(|step| step <= steps as u64)
    };
    text.split_inclusive('\n').filter(is_kept).collect()
}

/// The time of the last record that has one.
fn last_time_s(text: &str) -> f64 {
    let time = |line: &str| serde_json::from_str::<Value>(line).ok()?["time_s"].as_f64();
    text.lines().rev().find_map(time).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::EvaluationMetrics;

    fn record(step: usize) -> StepMetrics {
        StepMetrics {
            step,
            loss: 2.5,
            time_s: step as f64 / 2.0,
            ..StepMetrics::default()
        }
    }

    fn steps(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).expect("a metrics file");
        let step = |line| serde_json::from_str::<Value>(line).expect("a record")["step"].as_u64();
        text.lines()
            .map(|line| step(line).expect("a step"))
            .collect()
    }

    #[test]
    fn a_resumed_run_leaves_no_step_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/metrics.jsonl");
        let mut file = MetricsFile::open(&path, 0).unwrap();
        for step in 1..=5 {
            file.append(&record(step)).unwrap();
        }
        file.append(&EvaluationMetrics {
            step: 5,
            ..EvaluationMetrics::default()
        })
        .unwrap();
        drop(file);
        fs::write(
            &path,
            fs::read_to_string(&path).unwrap() + r#"{"step": 2, "lo"#,
        )
        .unwrap();
        let mut resumed = MetricsFile::open(&path, 3).unwrap();
        assert_eq!(resumed.earlier_time_s().to_string(), "1.5");
        resumed.append(&record(4)).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        MetricsFile::open(&path, 0)
            .unwrap()
            .append(&record(1))
            .unwrap();
        assert_eq!(steps(&path), [1]);
    }

    #[test]
    fn a_removed_file_is_made_anew_with_its_records() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/metrics.jsonl");
        let mut file = MetricsFile::open(&path, 0).unwrap();
        file.append(&record(1)).unwrap();
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        file.append(&record(2)).unwrap();
        file.append(&record(3)).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
    }

    #[test]
    fn records_wait_while_something_else_lies_in_the_place_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::open(&path, 0).unwrap();
        file.append(&record(1)).unwrap();
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = file.append(&record(2)).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl"), "{error}");
        file.renew().unwrap_err();
        fs::remove_dir(&path).unwrap();
        file.renew().unwrap();
        assert_eq!(steps(&path), [1, 2]);
    }

    #[test]
    fn a_record_has_the_documented_fields_in_order() {
        let record = StepMetrics {
            step: 7,
            loss: f64::NAN,
            lr: 1e-3,
            ..StepMetrics::default()
        };
        insta::assert_snapshot!(serde_json::to_string(&record).unwrap(), @r#"{"step":7,"loss":null,"grad_norm":0.0,"lr":0.001,"tokens":0,"tokens_per_s":0.0,"tflops":null,"mfu":null,"memory_bytes":null,"loss_scale":null,"skipped_steps":0,"step_time_s":0.0,"data_wait_s":0.0,"samples_per_s":0.0,"time_s":0.0}"#);
    }
}
