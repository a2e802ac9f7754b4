//! The `merak` command as its users meet it: exit statuses, messages, documents on standard output.

mod bench; // measurements of this machine
mod chats; // chats and instructions
mod checkpoints; // damaged files
mod columns; // lines that fit a terminal
mod doctor; // what this machine and build can do
mod effects; // every key does something
mod embeddings; // what a model's head reads
mod families; // every family on data of its kind
mod files; // pipes, devices, files without end
mod graphs; // what trace prints
mod help; // keys, options and commands
#[cfg(target_os = "linux")]
mod hosts; // ranks on two hosts
mod images; // folders of images
mod inputs; // several paths, mixtures, data to validate on
mod launch; // ranks as processes
mod metrics; // the fields of metrics.jsonl
mod mistakes; // status 2 and what to do about it
#[cfg(all(feature = "mpi", target_os = "linux"))]
mod mpi; // ranks that mpirun starts
mod output; // what a training prints
mod parquet; // records in files of Parquet
mod plans; // plans without data, and searches for degrees
mod processes; // ranks in processes of their own
mod reports; // event files, traces, the page
mod runs; // one run per folder, signals, full disks
mod samples; // data of which nothing can be learned
mod schedules; // formats, costs, files to check
#[cfg(unix)]
mod scripts; // the scripts of docs/launch
mod settings; // every setting counts
mod sizes; // sizes that no machine can hold
#[cfg(target_os = "linux")]
mod soak; // processes killed again and again
mod streams; // text that is read while a run goes on
#[path = "../../../merak-ckpt/tests/it/terminal.rs"]
mod terminal; // what a command writes to a terminal
mod tokens; // token files
mod training; // train, resume, generate, signals
mod weights; // starting from Hugging Face folders
mod worlds; // processes that make no world, or leave one

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{files, without_checksums};

const MERAK: &str = env!("CARGO_BIN_EXE_merak");

/// A folder with a small model, a text and a configuration of two steps.
struct Workplace {
    folder: TempDir,
}

/// How a command ended.
struct Ended {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Workplace {
    fn new() -> Self {
        let workplace = Self {
            folder: tempfile::tempdir().expect("a temporary folder"),
        };
        workplace.write("model.json", &model().to_string());
        workplace.write("text/a.txt", &text());
        workplace.write(
            "merak.toml",
            "output_dir = \"run\"\nseq_length = 16\nmax_steps = 5\nper_device_train_batch_size = 1\n\
             gradient_accumulation_steps = 4\nlogging_steps = 1\nlearning_rate = 0.01\nsave = true\n\
             max_new_tokens = 4\n\n[model]\nconfig = \"model.json\"\n\n[data]\npath = \"text\"\n\n\
             [compute]\nthreads_per_rank = 1\n\n[distributed]\ntimeout_s = 20\n",
        );
        workplace
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a writable folder");
        fs::write(path, content).expect("a writable folder");
    }

    /// The command with words separated by blanks; it runs in the folder and sees nothing of our
    /// environment. Costs are counted where nothing else is said, so that plans are the same in
    /// every run.
    fn command(&self, line: &str) -> Command {
        self.with(Command::new(MERAK), line)
    }

    /// [`Workplace::command`] of a command that runs ours.
    fn with(&self, mut command: Command, line: &str) -> Command {
        command
            .args(line.split_whitespace())
            .current_dir(self.folder.path())
            .env_clear()
            .env("MERAK_COST_MODEL", "counted");
        command
    }

    fn merak(&self, line: &str) -> Ended {
        let output = self.command(line).output().expect("the command starts");
        self.ended(&output)
    }

    /// What a command wrote, without the folder's name.
    fn ended(&self, output: &Output) -> Ended {
        let folder = format!("{}/", self.folder.path().display());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace(&folder, "");
        Ended {
            status: output.status.code(),
            stdout: text(&output.stdout),
            stderr: without_checksums(&text(&output.stderr)),
        }
    }

    /// Runs a command that must succeed, and returns its standard output.
    fn succeed(&self, line: &str) -> String {
        let ended = self.merak(line);
        assert_eq!(ended.status, Some(0), "merak {line}: {}", ended.stderr);
        ended.stdout
    }

    /// Runs a command whose standard output must be one JSON document.
    fn document(&self, line: &str) -> Value {
        let text = self.succeed(line);
        let document = serde_json::from_str(&text);
        assert!(document.is_ok(), "merak {line}: {document:?} in {text}");
        document.expect("it was just checked")
    }

    /// Runs a command that must end with status 2 and a message of one line, which it returns.
    fn mistake(&self, line: &str) -> String {
        let ended = self.merak(line);
        assert_eq!(ended.status, Some(2), "merak {line}: {}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        ended.stderr.trim_end().to_owned()
    }
}

/// The names in a document, in their order.
fn keys(value: &Value) -> Vec<&str> {
    let object = value.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}

fn model() -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "eos_token_id": 256,
    })
}

/// Some two thousand characters with words in them.
fn text() -> String {
    let words = [
        "every", "rank", "waits", "for", "its", "peer", "and", "none", "for", "ever",
    ];
    (0..400)
        .map(|i| words[(i * i + i / 7) % words.len()])
        .collect::<Vec<_>>()
        .join(" ")
}
