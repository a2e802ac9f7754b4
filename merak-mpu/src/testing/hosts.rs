//! Two hosts, played by this machine.

use std::{
    ffi::OsStr,
    io::{self, BufRead, BufReader, ErrorKind, Write},
    process::{Child, Command, Stdio},
    thread,
};

/// The addresses of the two hosts.
pub const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];

/// The end of the cable on either host.
const CABLE: &str = "cable0";

/// Two network namespaces with a cable between them.
///
/// A process that waits for the end of its input holds each. So the system removes them when this
/// value is dropped or its process ends, and all that was started in them has ended.
#[derive(Debug)]
pub struct TwoHosts {
    holders: [Child; 2],
}

impl TwoHosts {
    /// Makes the hosts.
    ///
    /// # Errors
    /// The reason, where this machine does not allow it or lacks the tools `unshare`, `nsenter` and
    /// `ip`.
    pub fn new() -> Result<Self, String> {
        let holders = match [holder(), holder()] {
            [Ok(first), Ok(second)] => [first, second],
            [first, second] => {
                let errors = [first, second]
                    .into_iter()
                    .filter_map(|holder| match holder {
                        Ok(mut holder) => {
                            end(&mut holder);
                            None
                        }
                        Err(error) => Some(error),
                    });
                return Err(errors.collect::<Vec<_>>().swap_remove(0));
            }
        };
        // Whatever fails from here on drops them.
        let hosts = Self { holders };
        let [first, second] = [0, 1].map(|host| hosts.holders[host].id().to_string());
        let cable = [
            "link", "add", CABLE, "netns", &first, "type", "veth", "peer", "name", CABLE, "netns",
            &second,
        ];
        run(Command::new("ip").args(cable))?;
        for (host, address) in ADDRESSES.into_iter().enumerate() {
            let address = format!("{address}/24");
            for line in [
                ["address", "add", &address, "dev", CABLE],
                ["link", "set", "dev", CABLE, "up"],
                ["link", "set", "dev", "lo", "up"],
            ] {
                run(hosts.command(host, "ip").args(line))?;
            }
        }
        Ok(hosts)
    }

    /// [`TwoHosts::new`] for a test; where this machine does not allow it, standard error says so,
    /// also where the harness keeps what a test that passes prints.
    pub fn or_skipped() -> Option<Self> {
        let hosts = Self::new();
        if let Err(reason) = &hosts {
            let test = thread::current();
            let test = test.name().unwrap_or("a test");
            // Not by a macro, whose text the harness would keep.
            let line = format!("skipped: {test} needs two hosts: {reason}\n");
            let _ = io::stderr().write_all(line.as_bytes());
        }
        hosts.ok()
    }

    /// A program that will run on one of the hosts, 0 or 1. It is that process itself, so its
    /// number, its signals and its end are the program's.
    pub fn command(&self, host: usize, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        let holder = self.holders[host].id();
        command.arg(format!("--net=/proc/{holder}/ns/net"));
        command.arg("--").arg(program);
        command
    }

    /// Cuts the cable: nothing that either host sends reaches the other.
    ///
    /// # Errors
    /// The reason, where the system does not do it.
    pub fn cut(&self) -> Result<(), String> {
        let line = ["link", "set", "dev", CABLE, "down"];
        run(self.command(1, "ip").args(line))
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        self.holders.iter_mut().for_each(end);
    }
}

/// A process in a network namespace of its own.
fn holder() -> Result<Child, String> {
    let child = Command::new("unshare")
        .args(["--net", "sh", "-c", "echo ready; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.map_err(|error| cannot("unshare", &error))?;
    let mut said = String::new();
    if let Some(stdout) = &mut child.stdout {
        // What does not speak is not ready.
        let _ = BufReader::new(stdout).read_line(&mut said);
    }
    if said == "ready\n" {
        return Ok(child);
    }
    end(&mut child);
    Err("this process may not make a network namespace".to_owned())
}

fn end(child: &mut Child) {
    // One that has ended cannot be killed.
    let _ = child.kill();
    let _ = child.wait();
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output();
    let program = command.get_program().to_string_lossy().into_owned();
    let output = output.map_err(|error| cannot(&program, &error))?;
    if output.status.success() {
        return Ok(());
    }
    let error = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {}: {}", output.status, error.trim()))
}

fn cannot(program: &str, error: &io::Error) -> String {
    if error.kind() == ErrorKind::NotFound {
        format!("there is no program {program}")
    } else {
        format!("{program}: {error}")
    }
}
