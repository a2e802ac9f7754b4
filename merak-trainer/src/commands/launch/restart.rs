//! How a training goes on when its ranks are started again.

use crate::{Cli, Command, commands::train};
use merak_ckpt::{Store, cli};
use merak_trainer::MerakArguments;
use std::{ffi::OsString, fs, path::PathBuf, time::SystemTime};

/// A training's checkpoints, as there were before its first start.
#[derive(Debug)]
pub(super) struct Saved {
    folder: PathBuf,
    before: Vec<(u64, SystemTime)>,
    arguments: Box<MerakArguments>,
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
            folder,
            arguments: Box::new(checked.into_arguments()),
        })
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
    let arguments = &saved.arguments;
    if saved.has_new() {
        keys.extend(["--resume", "auto"]);
        // They are about the checkpoint that the first start began with.
        for (key, is_set) in [
            ("--finetune", arguments.finetune),
            ("--no_load_optim", arguments.no_load_optim),
            ("--no_load_rng", arguments.no_load_rng),
        ] {
            if is_set {
                keys.extend([key, "false"]);
            }
        }
    } else if arguments.overwrite_output_dir {
        // What a failed start has left is replaced as the first one replaced a run.
    } else if arguments.resume_from_checkpoint.is_none() {
        // What a failed start has left is kept aside.
        keys.extend(["--resume", "auto"]);
    }
    let keys = keys.into_iter().map(OsString::from);
    words.iter().cloned().chain(keys).collect()
}
