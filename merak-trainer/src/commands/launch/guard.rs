//! A helper process that outlives a killed launch and ends the ranks' children; the system ends the
//! ranks.

use rustix::process::{Pid, Signal, kill_process_group};
use std::{
    collections::BTreeSet,
    env,
    io::{self, BufRead, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, ExitCode, Stdio},
};

/// The hidden command that the process runs.
pub(crate) const NAME: &str = "guard-ranks";

/// The launch's end of the process.
#[derive(Debug)]
pub(super) struct Guard {
    child: Child,
    /// Closed by the system when the launch ends; dropped before the process is waited for.
    groups: Option<ChildStdin>,
}

impl Guard {
    pub(super) fn start() -> io::Result<Self> {
        let mut child = Command::new(env::current_exe()?)
            .arg(NAME)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Keys of the terminal are for the launch.
            .process_group(0)
            .spawn()?;
        let groups = child.stdin.take();
        Ok(Self { child, groups })
    }

    /// Guards a rank's process group.
    pub(super) fn begin(&self, rank: &Child) {
        self.tell('+', rank);
    }

    /// Guards it no longer.
    pub(super) fn end(&self, rank: &Child) {
        self.tell('-', rank);
    }

    /// Without a guard, which somebody has killed, the launch goes on.
    fn tell(&self, sign: char, rank: &Child) {
        if let Some(mut groups) = self.groups.as_ref() {
            let _ = groups.write_all(format!("{sign}{}\n", rank.id()).as_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.groups = None;
        let _ = self.child.wait();
    }
}

/// Notes the groups that standard input names until it ends, and kills those that are left.
pub(crate) fn run() -> ExitCode {
    let mut groups = BTreeSet::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        match (
            line.get(..1),
            line.get(1..).and_then(|pid| pid.parse::<i32>().ok()),
        ) {
            (Some("+"), Some(pid)) => _ = groups.insert(pid),
            (_, Some(pid)) => _ = groups.remove(&pid),
            _ => {}
        }
    }
    for group in groups.into_iter().filter(|group| *group > 1) {
        if let Some(group) = Pid::from_raw(group) {
            // A group without processes is gone.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
    ExitCode::SUCCESS
}
