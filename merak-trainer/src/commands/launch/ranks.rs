//! The processes of one start: begun together, watched, ended together.

use super::{
    guard::Guard,
    lines::{self, Form, Out},
    program::Program,
    verdict::{End, How, Verdict, verdict},
};
use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid},
};
use signal_hook::{
    consts::{SIGCONT, SIGTSTP, SIGUSR2},
    low_level::emulate_default_handler,
};
use std::{
    io::{self, PipeReader, PipeWriter},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

/// How long ranks may end by themselves after one that has found wrong input, or has survived.
const BY_THEMSELVES: Duration = Duration::from_secs(3);

/// Requests to stop after which ranks that do not follow are ended.
const MOST_REQUESTS: usize = 3;

/// Stack of a thread that waits or copies.
const STACK_BYTES: usize = 256 << 10;

/// What the command waits for.
#[derive(Debug)]
pub(super) enum Event {
    /// A rank's process has ended, and waits to be asked how.
    Ended(usize),
    /// The command got a signal.
    Signal(i32),
    /// Output of a rank could not be passed on.
    Output(io::Error),
    /// All output of a rank has been passed on.
    Copied,
}

/// One start of all ranks.
pub(super) struct Start<'a> {
    pub(super) program: &'a Program,
    pub(super) guard: &'a Guard,
    pub(super) processes: usize,
    pub(super) port: u16,
    /// How often ranks were started before, and how often that may be.
    pub(super) restart: u32,
    pub(super) max_restarts: u32,
    /// Alike on all ranks and restarts, and of this command alone.
    pub(super) run_id: &'a str,
    pub(super) grace: Duration,
    /// The filter of messages.
    pub(super) log: &'a str,
}

/// The ranks under way.
struct Ranks<'a> {
    start: &'a Start<'a>,
    /// The process of each rank that has not been asked how it ended.
    running: Vec<Option<Child>>,
    ends: Vec<End>,
    /// Signals that were passed on.
    passed_on: Vec<i32>,
    ending: Ending,
    /// Threads that pass output on.
    copies: usize,
    output_error: Option<io::Error>,
    /// Closed when all ranks have ended.
    ended: (Arc<PipeReader>, Option<PipeWriter>),
}

/// How far the end of all ranks is.
#[derive(Debug, Clone, Copy)]
enum Ending {
    No,
    /// The ranks may end by themselves until then.
    ByThemselves(Instant),
    /// The ranks were told to end, and are killed then.
    Asked(Instant),
    Killed,
}

impl Start<'_> {
    /// Starts all ranks and waits until all have ended. Returns the verdict, and whether a signal
    /// has asked for the end.
    ///
    /// # Errors
    /// When a rank cannot be started, or the output cannot be written.
    pub(super) fn run(
        &self,
        events: &Receiver<Event>,
        sender: &Sender<Event>,
    ) -> io::Result<(Verdict, bool)> {
        let (reader, writer) = io::pipe()?;
        let mut ranks = Ranks {
            start: self,
            running: Vec::new(),
            ends: Vec::new(),
            passed_on: Vec::new(),
            ending: Ending::No,
            copies: 0,
            output_error: None,
            ended: (Arc::new(reader), Some(writer)),
        };
        // Dropping the ranks ends those that run.
        for rank in 0..self.processes {
            ranks.begin(rank, sender)?;
        }
        ranks.watch(events);
        ranks.finish_output(events);
        match ranks.output_error.take() {
            Some(error) => Err(error),
            None => Ok((
                verdict(&ranks.ends, &ranks.passed_on),
                ranks.num_requests() > 0,
            )),
        }
    }

    /// The process of a rank, before its start.
    fn command(&self, rank: usize) -> Command {
        let mut command = self.program.command(self.restart);
        let numbers = [
            ("RANK", rank),
            ("WORLD_SIZE", self.processes),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", self.processes),
            ("GROUP_RANK", 0),
            ("GROUP_WORLD_SIZE", 1),
            ("MASTER_PORT", self.port.into()),
            ("TORCHELASTIC_RESTART_COUNT", self.restart as usize),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts as usize),
        ];
        for (name, number) in numbers {
            command.env(name, number.to_string());
        }
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("TORCHELASTIC_RUN_ID", self.run_id)
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .env("MERAK_LOG", self.log)
            // A group of its own: a key of the terminal reaches the ranks through this command
            // alone, and what a rank has started ends with it.
            .process_group(0);
        end_with_this_process(&mut command);
        command
    }
}

impl Ranks<'_> {
    fn begin(&mut self, rank: usize, events: &Sender<Event>) -> io::Result<()> {
        let in_words = |error: io::Error, what: &str| {
            io::Error::new(
                error.kind(),
                format!("cannot start rank {rank}{what}: {error}"),
            )
        };
        let (output, output_end) = io::pipe().map_err(|error| in_words(error, ""))?;
        let (errors, errors_end) = io::pipe().map_err(|error| in_words(error, ""))?;
        let mut command = self.start.command(rank);
        command.stdout(output_end).stderr(errors_end);
        // A rank in the background that reads from a terminal would be stopped.
        if rank > 0 || io::IsTerminal::is_terminal(&io::stdin()) {
            command.stdin(Stdio::null());
        }
        let child = command.spawn().map_err(|error| {
            let program = command.get_program().to_string_lossy();
            in_words(
                error,
                &format!(" as {}", merak_ckpt::words::brief(&program)),
            )
        })?;
        // The ends of the pipes that belong to the rank.
        drop(command);
        let pid = Pid::from_child(&child);
        self.start.guard.begin(&child);
        self.running.push(Some(child));
        let sender = events.clone();
        start_thread("wait for a rank", move || {
            while waitid(
                WaitId::Pid(pid),
                WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
            )
            .is_err_and(|error| error == Errno::INTR)
            {}
            // The receiver lives as long as the command.
            let _ = sender.send(Event::Ended(rank));
        })?;
        let results = self.start.program.has_results_of(rank);
        for (from, to) in [(output, Out::Standard), (errors, Out::Error)] {
            let is_result = results && matches!(to, Out::Standard);
            let form = Form {
                prefix: (!is_result).then(|| format!("[rank {rank}] ")),
                escapes: to.is_terminal(),
            };
            let (ended, sender) = (Arc::clone(&self.ended.0), events.clone());
            start_thread("pass output on", move || {
                let event = match lines::copy(from, to, form, &ended) {
                    Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Event::Output(error),
                    _ => Event::Copied,
                };
                let _ = sender.send(event);
            })?;
            self.copies += 1;
        }
        Ok(())
    }

    /// Waits until all ranks have ended; passes signals on, and ends all when one fails.
    fn watch(&mut self, events: &Receiver<Event>) {
        while self.running.iter().any(Option::is_some) {
            let deadline = match self.ending {
                Ending::ByThemselves(at) | Ending::Asked(at) => Some(at),
                Ending::No | Ending::Killed => None,
            };
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let event = match left {
                Some(left) => events.recv_timeout(left),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match event {
                Ok(Event::Ended(rank)) => self.reap(rank),
                Ok(Event::Signal(signal)) => self.pass_on(signal),
                Ok(other) => self.note_output(other),
                Err(_) => self.press(),
            }
        }
    }

    /// Collects an ended rank's exit status and kills what it left running.
    fn reap(&mut self, rank: usize) {
        let Some(mut child) = self.running[rank].take() else {
            return;
        };
        // The process is not forgotten yet, so that its group's number is no other's.
        signal_group(&child, Signal::KILL);
        self.start.guard.end(&child);
        let how = child.wait().map_or(How::Status(1), How::from);
        let end = End {
            rank,
            how,
            asked: matches!(self.ending, Ending::Asked(_) | Ending::Killed),
        };
        self.ends.push(end);
        if end.is_failure(&self.passed_on) && matches!(self.ending, Ending::No) {
            if how.lets_others_end() {
                self.ending = Ending::ByThemselves(Instant::now() + BY_THEMSELVES);
            } else {
                self.press();
            }
        } else if end.is_failure(&self.passed_on)
            && matches!(self.ending, Ending::ByThemselves(_))
            && !how.lets_others_end()
        {
            self.press();
        }
    }

    /// The next means to end all ranks.
    fn press(&mut self) {
        if matches!(self.ending, Ending::Asked(_) | Ending::Killed) {
            self.ending = Ending::Killed;
            self.signal_all(Signal::KILL);
        } else {
            self.ending = Ending::Asked(Instant::now() + self.start.grace);
            self.signal_all(Signal::TERM);
            // A stopped process sees the request when it goes on.
            self.signal_all(Signal::CONT);
        }
    }

    fn pass_on(&mut self, number: i32) {
        match number {
            SIGTSTP => {
                self.signal_all(Signal::STOP);
                // Returns when the command goes on.
                let _ = emulate_default_handler(SIGTSTP);
                self.signal_all(Signal::CONT);
            }
            SIGCONT => self.signal_all(Signal::CONT),
            number => {
                self.passed_on.push(number);
                if let Some(signal) = Signal::from_named_raw(number) {
                    self.signal_all(signal);
                }
                if self.num_requests() >= MOST_REQUESTS {
                    self.press();
                }
            }
        }
    }

    /// How often the ranks were asked from outside to end.
    fn num_requests(&self) -> usize {
        let is_request = |signal: &&i32| **signal != SIGUSR2;
        self.passed_on.iter().filter(is_request).count()
    }

    fn signal_all(&self, signal: Signal) {
        for child in self.running.iter().flatten() {
            signal_group(child, signal);
        }
    }

    fn note_output(&mut self, event: Event) {
        self.copies -= 1;
        if let Event::Output(error) = event {
            let reason = format!("cannot pass on what ranks print: {error}");
            let error = io::Error::new(error.kind(), reason);
            self.output_error.get_or_insert(error);
            if matches!(self.ending, Ending::No) {
                self.press();
            }
        }
    }

    /// Waits until the output of all ranks is written, or a signal ends the wait.
    fn finish_output(&mut self, events: &Receiver<Event>) {
        self.ended.1 = None;
        while self.copies > 0 {
            match events.recv() {
                Ok(Event::Signal(SIGTSTP)) => {
                    let _ = emulate_default_handler(SIGTSTP);
                }
                Ok(Event::Signal(SIGCONT) | Event::Ended(_)) => {}
                Ok(Event::Signal(_)) | Err(_) => return,
                Ok(other) => self.note_output(other),
            }
        }
    }
}

impl Drop for Ranks<'_> {
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for child in self.running.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}

/// Sends a signal to a process and to what it has started. One that has ended needs none.
fn signal_group(child: &Child, signal: Signal) {
    let _ = kill_process_group(Pid::from_child(child), signal);
}

fn start_thread(task: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name("merak-launch".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(body)
        .map(drop)
        .map_err(|error| {
            let reason = format!("cannot start a thread to {task}: {error}");
            io::Error::new(error.kind(), reason)
        })
}

/// Has the system kill the process when this one ends, in whatever way: ranks without the command
/// would go on unseen. It is bound to the thread that starts the process, the command's first.
#[cfg(target_os = "linux")]
fn end_with_this_process(command: &mut Command) {
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the request was made.
        if getppid() == Some(parent) {
            Ok(())
        } else {
            Err(io::Error::from(io::ErrorKind::NotFound))
        }
    };
    #[expect(
        unsafe_code,
        reason = "the request must be made by the new process itself"
    )]
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Other systems have no such request.
#[cfg(not(target_os = "linux"))]
fn end_with_this_process(_: &mut Command) {}
