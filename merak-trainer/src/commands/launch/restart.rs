//! How a training goes on when its ranks are started again.

use crate::{Cli, Command, commands::train};
use merak_ckpt::{Store, cli};
use merak_trainer::{CheckedArguments, RunFolder, chain};
use std::{ffi::OsString, fs, path::PathBuf, time::SystemTime};

/// A training's checkpoints, as there were before its first start.
#[derive(Debug)]
pub(super) struct Saved {
    folder: PathBuf,
    before: Vec<(u64, SystemTime)>,
    /// Whether the folder had a run, which stays as it is.
    had_run: bool,
    arguments: Box<CheckedArguments>,
}

impl Saved {
    /// Looks for the checkpoints of a command, where it trains.
    pub(super) fn by(words: &[OsString]) -> Option<Self> {
        let line = [OsString::from("merak")].into_iter();
        let cli: Cli = cli::parse(line.chain(words.iter().cloned())).ok()?;
        let Command::Train(args) = cli.command else {
            return None;
        };
        // What is wrong with the configuration, the training itself says.
        let checked = train::arguments(args).ok()?;
        let folder = checked.run_folder().ok()?;
        Some(Self {
            before: checkpoints(&folder),
            had_run: RunFolder::has_run(&checked),
            folder,
            arguments: Box::new(checked),
        })
    }

    /// Makes room for another start: before its first checkpoint the training begins again in a
    /// folder without a run.
    pub(super) fn make_room(&self) {
        if self.had_run || self.has_new() {
            return;
        }
        if let Err(error) = RunFolder::keep_records(&self.arguments) {
            // The start itself is refused then.
            let error = chain(&error);
            tracing::warn!(
                error,
                "what the failed start has recorded is still in its place"
            );
        }
    }

    /// Whether there is a checkpoint that was not there before.
    fn has_new(&self) -> bool {
        let now = checkpoints(&self.folder);
        now.iter()
            .any(|checkpoint| !self.before.contains(checkpoint))
    }
}

/// The steps that are saved in an output folder, with the times when they were.
fn checkpoints(folder: &PathBuf) -> Vec<(u64, SystemTime)> {
    let store = Store::in_output_dir(folder);
    let steps = store.steps().unwrap_or_default();
    let time = |step| {
        let manifest = store.path_of(step).join(merak_ckpt::format::MANIFEST);
        fs::metadata(manifest).and_then(|file| file.modified()).ok()
    };
    let found = steps.into_iter();
    found.filter_map(|step| Some((step, time(step)?))).collect()
}

/// The words of a training that is started again. It goes on from its own last checkpoint. Before
/// its first one it begins as it did, be that with another run's checkpoint.
pub(super) fn words_of_restart(words: &[OsString], saved: &Saved) -> Vec<OsString> {
    let mut keys = Vec::new();
    if saved.has_new() {
        keys.extend(["--resume", "auto"].map(str::to_owned));
        for (key, value) in saved.arguments.keys_to_resume() {
            keys.extend([format!("--{key}"), value]);
        }
    }
    let keys = keys.into_iter().map(OsString::from);
    words.iter().cloned().chain(keys).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// What a restart adds to a training's line with these keys, without and with a checkpoint of
    /// its own.
    fn added(keys: &str) -> [String; 2] {
        let place = TempDir::new().unwrap();
        let (config, run) = (place.path().join("c.json"), place.path().join("run"));
        fs::write(&config, "{}").unwrap();
        let checkpoint = |step: u64| {
            let folder = Store::in_output_dir(&run).path_of(step);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(merak_ckpt::format::MANIFEST), "{}").unwrap();
        };
        checkpoint(5);
        let line = format!(
            "train {} --output_dir {} {keys}",
            config.display(),
            run.display()
        );
        let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
        let saved = Saved::by(&words).expect("a training");
        let added = || {
            let all = words_of_restart(&words, &saved);
            assert_eq!(all[..words.len()], words);
            let new: Vec<_> = all[words.len()..]
                .iter()
                .filter_map(|word| word.to_str())
                .collect();
            new.join(" ")
        };
        let before = added();
        checkpoint(10);
        [before, added()]
    }

    #[test]
    fn a_restart_goes_on_from_a_checkpoint_of_its_own_and_else_as_it_began() {
        for (keys, before, after) in [
            ("", "", "--resume auto"),
            ("--resume auto", "", "--resume auto"),
            ("--resume other --dry-run", "", "--resume auto"),
            ("--overwrite_output_dir", "", "--resume auto"),
            (
                "--resume other --finetune --no_load_optim",
                "",
                "--resume auto --finetune false --no_load_optim false",
            ),
            (
                "--resume other --ignore_data_skip --no_load_rng",
                "",
                "--resume auto --no_load_rng false --ignore_data_skip false",
            ),
        ] {
            assert_eq!(added(keys), [before, after], "{keys}");
        }
    }

    #[test]
    fn other_commands_and_wrong_lines_are_started_again_as_they_are() {
        for line in ["evaluate c.toml run", "train", "train no-such.toml", "x"] {
            let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            assert!(Saved::by(&words).is_none(), "{line}");
        }
    }
}
