//! The thread of a process that launches its operations, in the order of all ranks.

use super::{
    calls::{Comm, UniqueId},
    core::{Core, Course, IDLE},
    cuda::{Event, Stream},
    job::{Job, Lane, Link, Progress, Talk},
    order::{Agreement, Clock, next},
};
use crate::{Buffer, DType, Error, Result, bell::lock};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Looks at what is under way that the thread takes without a sleep.
const LOOKS: u32 = 200;

/// Sleep between two looks at operations that all members have called.
const SHORT: Duration = Duration::from_micros(50);

/// Sleep between two looks at operations whose members have not come, unless a caller says that
/// they have.
const LONG: Duration = Duration::from_millis(1);

/// Longest wait for the end of communicators, and of what they do when they are aborted.
const FAREWELL: Duration = Duration::from_secs(5);

/// A communicator and its queue.
#[derive(Debug, Clone, Copy)]
struct Line {
    comm: Comm,
    stream: Stream,
}

/// How far a launch has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The communicator's members find each other.
    Joining,
    /// The steps are being put into the queue.
    Asked,
}

/// The state of the thread.
#[derive(Debug)]
pub(super) struct Conductor {
    core: Arc<Core>,
    pub(super) clock: Clock,
    lines: BTreeMap<Link, Line>,
    /// The names of communicators that this rank has offered, and nobody has made.
    offered: BTreeMap<Link, UniqueId>,
    /// What is not launched.
    jobs: Vec<Job>,
    launch: Option<(Job, Line, Phase)>,
    running: Vec<(Job, Event)>,
}

impl Conductor {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let clock = Clock::new(core.inner.rank().0, core.inner.world_size());
        Self {
            core,
            clock,
            lines: BTreeMap::new(),
            offered: BTreeMap::new(),
            jobs: Vec::new(),
            launch: None,
            running: Vec::new(),
        }
    }

    pub(super) fn run(mut self) {
        let mut is_broken = false;
        if let Err(error) = self.core.calls.enter() {
            self.core.fail(&error);
        }
        let mut looks = 0;
        loop {
            let (course, stop) = {
                let mut inbox = lock(&self.core.inbox);
                inbox.nudged = false;
                self.jobs.append(&mut inbox.jobs);
                (inbox.course, inbox.stop)
            };
            if let Some(error) = self.core.failure() {
                self.break_up(&error, is_broken);
                is_broken = true;
            } else if self.sweep() {
                looks = 0;
                continue;
            }
            if !is_broken && course == Course::Ending && self.is_drained() {
                self.close();
                self.jobs.clear();
                lock(&self.core.inbox).course = Course::Drained;
                self.core.bell.ring();
                continue;
            }
            if stop {
                if !is_broken && course != Course::Drained {
                    let reason = "the world has ended".to_owned();
                    let by = self.core.inner.rank().0;
                    self.break_up(&Error::Aborted { by, reason }, false);
                }
                return;
            }
            self.rest(looks);
            looks = looks.saturating_add(1);
        }
    }

    /// Sleeps as long as what is under way allows.
    fn rest(&self, looks: u32) {
        let has_called = |job: &Job| job.agreement != Agreement::Open;
        let is_busy =
            self.launch.is_some() || !self.running.is_empty() || self.jobs.iter().any(has_called);
        if is_busy && looks < LOOKS {
            thread::yield_now();
            return;
        }
        let longest = if is_busy {
            SHORT
        } else if self.jobs.is_empty() {
            IDLE
        } else {
            LONG
        };
        let inbox = lock(&self.core.inbox);
        if inbox.jobs.is_empty() && !inbox.nudged && !inbox.stop {
            let woken = self.core.wake.wait_timeout(inbox, longest);
            drop(woken.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Goes on with everything as far as it goes without a wait, and tells whether anything has.
    fn sweep(&mut self) -> bool {
        let advanced = self.advance();
        let launched = self.go_on_launching();
        let ended = self.look_at_running();
        advanced | launched | ended
    }

    /// Lets the members of each operation agree.
    fn advance(&mut self) -> bool {
        let (mut progressed, mut waiting) = (false, BTreeSet::<Lane>::new());
        for mut job in mem::take(&mut self.jobs) {
            if job.agreement == Agreement::Open && waiting.contains(&job.lane) {
                self.jobs.push(job);
                continue;
            }
            match job.advance(self) {
                Ok(Progress::Over) => {
                    progressed = true;
                    self.core.bell.ring();
                }
                Ok(progress) => {
                    if job.agreement == Agreement::Open {
                        waiting.insert(job.lane);
                    }
                    progressed |= progress == Progress::Some;
                    self.jobs.push(job);
                }
                Err(error) => {
                    progressed = true;
                    self.give_up(job, error);
                }
            }
        }
        progressed
    }

    /// Ends a job, and the world, for an error.
    fn give_up(&self, job: Job, error: Error) {
        // The caller finds this error, and no other that follows from it.
        job.slot.leave(error.clone());
        self.core.fail(&error);
        job.end(Err(error));
        self.core.bell.ring();
    }

    /// Launches the next operation in the order of all ranks, one at a time.
    fn go_on_launching(&mut self) -> bool {
        let Some((job, line, phase)) = self.launch.take() else {
            let agreements: Vec<_> = self.jobs.iter().map(|job| job.agreement).collect();
            let Some(place) = next(&agreements) else {
                return false;
            };
            let job = self.jobs.remove(place);
            match self.line(&job) {
                Ok(line) => self.launch = Some((job, line, Phase::Joining)),
                Err(error) => self.give_up(job, error),
            }
            return true;
        };
        match self.core.calls.is_settled(line.comm) {
            Ok(false) => {
                self.launch = Some((job, line, phase));
                return false;
            }
            Ok(true) => {}
            Err(error) => {
                self.give_up(job, error);
                return true;
            }
        }
        if phase == Phase::Joining && !job.work.steps.is_empty() {
            match self.ask(&job, line) {
                Ok(()) => self.launch = Some((job, line, Phase::Asked)),
                Err(error) => self.give_up(job, error),
            }
            return true;
        }
        match self.core.calls.mark(line.stream) {
            Ok(event) => self.running.push((job, event)),
            Err(error) => self.give_up(job, error),
        }
        true
    }

    /// The communicator of a job, which is made where it does not exist.
    fn line(&mut self, job: &Job) -> Result<Line> {
        if let Some(line) = self.lines.get(&job.link) {
            return Ok(*line);
        }
        let id = job.id.ok_or_else(|| Error::Device {
            call: "a communicator of NCCL",
            reason: "no member has named it".to_owned(),
        })?;
        let (n, me) = job.place();
        let stream = self.core.calls.stream()?;
        let comm = self.core.calls.init(n, &id, me)?;
        let line = Line { comm, stream };
        self.lines.insert(job.link, line);
        self.offered.remove(&job.link);
        Ok(line)
    }

    /// Puts the steps of a job into the queue of its communicator, after what its memory waits
    /// for.
    fn ask(&self, job: &Job, line: Line) -> Result<()> {
        let calls = &self.core.calls;
        for start in &job.work.start {
            calls.follow(line.stream, *start)?;
        }
        calls.group_start()?;
        let mut steps = job.work.steps.iter();
        let outcome =
            steps.try_for_each(|(dtype, step)| calls.step(line.comm, line.stream, *dtype, *step));
        // A group that was opened is closed, whatever its steps said.
        let closed = calls.group_end();
        outcome.and(closed)
    }

    /// Ends the jobs that the device is done with.
    fn look_at_running(&mut self) -> bool {
        let mut progressed = false;
        for (job, event) in mem::take(&mut self.running) {
            let state = match self.core.calls.is_past(event) {
                Ok(false) => self.line_error(&job).map_or(Ok(false), Err),
                other => other,
            };
            match state {
                Ok(false) => {
                    self.running.push((job, event));
                    continue;
                }
                Ok(true) => {
                    self.drop_events(&job, Some(event));
                    job.end(Ok(()));
                    self.core.bell.ring();
                }
                // Its memory is in use until the communicator is aborted.
                Err(error) => {
                    job.slot.leave(error.clone());
                    self.core.fail(&error);
                    job.slot.finish(Err(error));
                    self.core.bell.ring();
                    self.running.push((job, event));
                }
            }
            progressed = true;
        }
        progressed
    }

    /// What has failed on the communicator of a job since its launch.
    fn line_error(&self, job: &Job) -> Option<Error> {
        let line = self.lines.get(&job.link)?;
        self.core.calls.is_settled(line.comm).err()
    }

    fn drop_events(&self, job: &Job, end: Option<Event>) {
        for event in job.work.start.iter().copied().chain(end) {
            self.core.calls.drop_event(event);
        }
    }

    /// Whether all is over that this rank has begun; a receipt that nobody has answered is not.
    fn is_drained(&self) -> bool {
        let is_idle = |job: &Job| {
            job.agreement == Agreement::Open && matches!(job.talk, Talk::Receive { .. })
        };
        self.launch.is_none() && self.running.is_empty() && self.jobs.iter().all(is_idle)
    }

    /// Closes the communicators, together with their other members.
    fn close(&mut self) {
        let calls = Arc::clone(&self.core.calls);
        let lines: Vec<Line> = mem::take(&mut self.lines).into_values().collect();
        let asked: Vec<_> = lines.iter().map(|line| calls.finalize(line.comm)).collect();
        let deadline = Instant::now() + FAREWELL;
        for (line, asked) in lines.into_iter().zip(asked) {
            let mut state = asked.and_then(|()| calls.is_settled(line.comm));
            while matches!(state, Ok(false)) && Instant::now() < deadline {
                thread::sleep(SHORT);
                state = calls.is_settled(line.comm);
            }
            let freed = match state {
                Ok(true) => calls.destroy(line.comm),
                // A peer that has left already, or a device that failed: what was asked is done.
                _ => calls.abort(line.comm),
            };
            if let Err(error) = freed.and_then(|()| calls.drop_stream(line.stream)) {
                tracing::debug!(%error, "a communicator did not end well");
            }
        }
    }

    /// Ends everything with an error: first for those who wait, then on the device.
    fn break_up(&mut self, error: &Error, is_broken: bool) {
        let launch = self.launch.take().map(|(job, ..)| job);
        let running = mem::take(&mut self.running).into_iter();
        let (on_device, events): (Vec<Job>, Vec<Event>) = running.unzip();
        let mut jobs: Vec<Job> = mem::take(&mut self.jobs);
        let on_device: Vec<Job> = on_device.into_iter().chain(launch).collect();
        for job in jobs.iter().chain(&on_device) {
            job.slot.finish(Err(error.clone()));
        }
        self.core.bell.ring();
        jobs.clear();
        if is_broken {
            return;
        }
        let is_still = self.abort_lines();
        for event in events {
            self.core.calls.drop_event(event);
        }
        if !is_still {
            // The device may still write there.
            mem::forget(on_device);
        }
    }

    /// Aborts all communicators, and tells whether their queues have come to an end.
    fn abort_lines(&mut self) -> bool {
        let calls = &self.core.calls;
        let lines = mem::take(&mut self.lines);
        for line in lines.values() {
            if let Err(error) = calls.abort(line.comm) {
                tracing::debug!(%error, "a communicator did not end well");
            }
        }
        let deadline = Instant::now() + FAREWELL;
        let mut are_still = true;
        for line in lines.into_values() {
            // A device that has failed does nothing any more.
            let Ok(end) = calls.mark(line.stream) else {
                continue;
            };
            let mut state = calls.is_past(end);
            while matches!(state, Ok(false)) && Instant::now() < deadline {
                thread::sleep(SHORT);
                state = calls.is_past(end);
            }
            are_still &= !matches!(state, Ok(false));
            calls.drop_event(end);
        }
        are_still
    }
}

/// What jobs ask of the thread that runs them.
impl Conductor {
    /// Whether the communicator of a link exists.
    pub(super) fn has(&self, link: Link) -> bool {
        self.lines.contains_key(&link)
    }

    /// This rank's name for a communicator that does not exist.
    pub(super) fn offer(&mut self, link: Link) -> Result<UniqueId> {
        if let Some(id) = self.offered.get(&link) {
            return Ok(*id);
        }
        let id = self.core.calls.unique_id()?;
        self.offered.insert(link, id);
        Ok(id)
    }

    /// A buffer for elements that come.
    pub(super) fn allocate(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>> {
        match &self.core.allocate {
            Some(allocate) => allocate(self.core.calls.ordinal(), dtype, len),
            None => self.core.calls.zeros(dtype, len),
        }
    }

    pub(super) fn address_of(&self, buffer: &mut dyn Buffer) -> Result<u64> {
        self.core.address_of(buffer)
    }

    pub(super) fn mark(&self, buffers: &[Box<dyn Buffer>]) -> Result<Vec<Event>> {
        self.core.mark(buffers)
    }
}
