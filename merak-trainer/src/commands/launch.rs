//! `merak launch`: the ranks of a command as processes of this machine.

pub(crate) mod guard;
mod lines;
mod program;
mod ranks;
mod restart;
mod verdict;

use self::{
    guard::Guard,
    program::Program,
    ranks::{Event, Start},
    verdict::Verdict,
};
use super::{
    Failure, Outcome, failure::RankFailed, launched::RUN, signals::is_ignored, world::told_once,
};
use clap::Args as ClapArgs;
use merak_ckpt::cli::whole_number;
use merak_mpu::Launch;
use merak_trainer::Error;
use signal_hook::{
    consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2},
    iterator::Signals,
};
use std::{
    ffi::OsString,
    io::{self, ErrorKind},
    net::{Ipv4Addr, TcpListener},
    process::{self, ExitCode},
    sync::mpsc::{self, Sender},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Starts a command as several processes of this machine, one for each rank.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "COMMAND is a command of merak, as in `merak launch -n 4 -- train CONFIG`, or a program that reads \
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.\n\
    Lines are printed after their rank, as in `[rank 2] `; the results of a command of merak, which rank 0 has, as they \
    are. Signals are passed on. When a rank fails, the others are ended, and its exit status is the command's."
)]
pub(crate) struct Args {
    /// Processes, which are the ranks.
    #[arg(
        short = 'n',
        long,
        alias = "nproc-per-node",
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = whole_number(1..=1024_u16)
    )]
    processes: u16,
    /// How often all ranks are started again after one has failed; a training goes on from its last
    /// checkpoint.
    #[arg(
        long,
        value_name = "R",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = whole_number(0..=10_000_u32)
    )]
    max_restarts: u32,
    /// The port where rank 0 is found, and the next higher free one after each restart; unset: a
    /// free one.
    #[arg(
        long,
        value_name = "P",
        allow_negative_numbers = true,
        value_parser = whole_number(1..=u16::MAX)
    )]
    master_port: Option<u16>,
    /// Seconds that the other ranks have to end after one has failed, before they are killed.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30.0,
        allow_negative_numbers = true,
        value_parser = seconds
    )]
    grace_s: f64,
    /// The command and its arguments.
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: Args, log: &str) -> Outcome {
    let program = Program::of(args.command)?;
    expect_no_launcher()?;
    let (sender, events) = mpsc::channel();
    listen(sender.clone())?;
    let guard = Guard::start().map_err(|error| {
        let reason = format!("cannot start a guard of the ranks: {error}");
        io::Error::new(error.kind(), reason)
    })?;
    // Of this command alone, on this machine at this time.
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let run_id = format!(
        "{RUN}{}-{}",
        process::id(),
        now.unwrap_or_default().as_nanos()
    );
    let mut port = first_port(args.master_port)?;
    let mut restart = 0;
    loop {
        let start = Start {
            program: &program,
            guard: &guard,
            processes: args.processes.into(),
            port,
            restart,
            max_restarts: args.max_restarts,
            run_id: &run_id,
            grace: Duration::from_secs_f64(args.grace_s),
            log,
        };
        let (verdict, is_stopped) = start.run(&events, &sender).map_err(of_start)?;
        match verdict {
            Verdict::Done => return Ok(ExitCode::SUCCESS),
            Verdict::Stopped(status) => return Ok(ExitCode::from(status)),
            Verdict::Failed(end) => {
                let status = end.how.exit_status();
                let is_last =
                    restart == args.max_restarts || is_stopped || !program.may_recover_from(status);
                let next = || next_port(port, args.master_port.is_some());
                let Some(next) = (!is_last).then(next).flatten() else {
                    let failed = RankFailed {
                        rank: end.rank,
                        how: end.how.to_string(),
                        restarts: restart,
                        status,
                    };
                    return Err(failed.into());
                };
                port = next;
                restart += 1;
                tracing::warn!(
                    "rank {} {}: all ranks are started again, restart {restart} of {}",
                    end.rank,
                    end.how,
                    args.max_restarts
                );
                program.prepare_restart();
            }
        }
    }
}

/// Refuses to be one of several processes itself, each of which would start all ranks.
fn expect_no_launcher() -> Result<(), Failure> {
    let launch = Launch::from_env()?;
    match launch.launcher {
        Some(launcher) if launch.world_size > 1 => {
            let refused = Error::CommandLine(format!(
                "`merak launch` starts all ranks itself, but {} says that {launcher} has started {} processes: launch \
                 the command by {launcher} alone, without `merak launch`",
                launch.variables.world_size.unwrap_or_default(),
                launch.world_size
            ));
            told_once(&launch, Err(refused)).map_err(Failure::from)
        }
        _ => Ok(()),
    }
}

/// A program that cannot be started is the command line's fault, another failure the run's.
fn of_start(error: io::Error) -> Failure {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => error.to_string().into(),
        _ => error.into(),
    }
}

/// Has signals sent as events, except those that were ignored at the start, as under `nohup`.
fn listen(events: Sender<Event>) -> io::Result<()> {
    let in_words = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot listen for signals: {error}"))
    };
    let all = [
        SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT,
    ];
    let heard = all.into_iter().filter(|&signal| !is_ignored(signal));
    let mut signals = Signals::new(heard).map_err(in_words)?;
    let forward = move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    let spawned = thread::Builder::new()
        .name("merak-signals".to_owned())
        .spawn(forward);
    spawned.map(drop).map_err(in_words)
}

/// A port that nobody listens at, other than the last one.
fn free_port(last: Option<u16>) -> io::Result<u16> {
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| {
            let reason = format!("no port of 127.0.0.1 is free: {error}");
            io::Error::new(error.kind(), reason)
        })?;
        let port = listener.local_addr()?.port();
        if Some(port) != last {
            return Ok(port);
        }
    }
}

/// The given port, else a free one.
fn first_port(given: Option<u16>) -> Result<u16, Failure> {
    match given {
        Some(port) => given_port(port),
        None => Ok(free_port(None)?),
    }
}

/// The port that was asked for, if nobody listens there.
fn given_port(port: u16) -> Result<u16, Failure> {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
        Ok(_) => Ok(port),
        Err(error) => Err(format!(
            "--master-port {port}: port {port} of 127.0.0.1 cannot be taken ({error}): choose \
             another, or leave the option out for a free one"
        )
        .into()),
    }
}

/// The port of the next start after one with port `last`: where that was asked for, the next higher
/// one that nobody listens at. Without one the ranks are not started again.
fn next_port(last: u16, was_given: bool) -> Option<u16> {
    if !was_given {
        let found = free_port(Some(last));
        return found.inspect_err(|error| tracing::warn!("{error}")).ok();
    }
    let next = (last..=u16::MAX).skip(1).find(|&port| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        listener.is_ok()
    });
    if next.is_none() {
        tracing::warn!(
            "no port of 127.0.0.1 after {last} can be taken: the ranks are not started again"
        );
    }
    next
}

fn seconds(text: &str) -> Result<f64, String> {
    const MOST: f64 = 86_400.0;
    let number = text.parse::<f64>().ok();
    let legal = number.filter(|number| (0.0..=MOST).contains(number));
    legal.ok_or_else(|| "expected seconds from 0 to 86400".to_owned())
}
