//! The options of a process that joins a world.

use crate::{Error, bell::FOREVER};
use std::{net::IpAddr, time::Duration};

/// Which world a process joins, and as what.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// This process's rank.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// The name or address of the host of rank 0, or several with commas between them, of which
    /// each rank takes one that answers.
    pub host: String,
    /// The port where rank 0 takes connections. It takes one of the next where another program,
    /// as `torchrun`'s agent, holds it, and the other ranks find it there.
    pub port: u16,
    /// Longest wait for a peer.
    pub timeout: Duration,
    /// Longest silence of a process before the others count it as lost.
    pub beat_timeout: Duration,
    /// Whether processes of one host share memory, the same on every rank. They do where the system
    /// is Linux; without it they use sockets as processes of several hosts do.
    pub shared_memory: bool,
    /// A name of the run, the same on every rank. Runs of different names may use one port.
    pub run: String,
    /// What must be equal on every rank, by name, as `("configuration", bytes)`.
    pub digests: Vec<(String, Vec<u8>)>,
}

impl JoinOptions {
    /// The options for one of `world_size` processes that meet at a host and port.
    pub fn new(rank: usize, world_size: usize, host: &str, port: u16) -> Self {
        let timeout = crate::threads::WorldOptions::default().timeout;
        Self {
            rank,
            world_size,
            host: host.to_owned(),
            port,
            timeout,
            beat_timeout: default_beat(timeout),
            shared_memory: true,
            run: String::new(),
            digests: Vec::new(),
        }
    }

    /// Sets the longest wait for a peer, and the silence after which a process counts as lost to
    /// half of it, from 2 to 30 seconds.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self {
            timeout,
            beat_timeout: default_beat(timeout),
            ..self
        }
    }

    /// The same with waits whose ends a clock holds.
    pub(crate) fn bounded(&self) -> Self {
        Self {
            timeout: self.timeout.min(FOREVER),
            beat_timeout: self.beat_timeout.min(FOREVER),
            ..self.clone()
        }
    }

    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    pub(super) fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::Rendezvous {
            rank: self.rank,
            address: self.place(),
            reason: reason.into(),
        }
    }

    /// Whether rank 0 takes connections of its own host alone.
    pub(super) fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    }
}

fn default_beat(timeout: Duration) -> Duration {
    (timeout / 2).clamp(Duration::from_secs(2), Duration::from_secs(30))
}
