//! Moves the slots of all lanes by MPI.

use super::{
    lane::Lane,
    library::{Flight, Library},
};
use crate::{
    Rank,
    bell::lock,
    mill::{Port, Unreachable},
};
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Most messages that one turn takes, so that what has come is used before more comes.
const MOST_PROBES: usize = 64;

/// How long the thread looks for messages without a pause after the last one.
const AWAKE: Duration = Duration::from_micros(50);

/// Longest pause between two looks.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Longest wait until the last bytes of a world that has ended have left.
const LAST_BYTES: Duration = Duration::from_secs(10);

/// The messages to and from one other process, in their order.
struct Peer {
    rank: Rank,
    lane: Arc<Mutex<Lane>>,
    sends: VecDeque<Flight>,
    receipts: VecDeque<Flight>,
}

impl Peer {
    /// Sends what is ready, and takes back what has left. Returns whether anything has moved.
    fn send(&mut self, library: &mut Library) -> io::Result<bool> {
        let mut lane = lock(&self.lane);
        let mut moved = false;
        while let Some(slot) = lane.take() {
            self.sends.push_back(library.send(self.rank, slot)?);
            moved = true;
        }
        while let Some(flight) = pop_over(&mut self.sends)? {
            lane.note_left(flight.into_slot());
            moved = true;
        }
        Ok(moved)
    }

    /// Hands on what has come, in the order in which it was sent.
    fn deliver(&mut self) -> io::Result<bool> {
        let mut moved = false;
        while let Some(flight) = pop_over(&mut self.receipts)? {
            lock(&self.lane).put(flight.into_slot());
            moved = true;
        }
        Ok(moved)
    }
}

/// The first flight, where it is over.
fn pop_over(flights: &mut VecDeque<Flight>) -> io::Result<Option<Flight>> {
    let is_over = flights.front_mut().map(Flight::is_over).transpose()?;
    Ok(if is_over == Some(true) {
        flights.pop_front()
    } else {
        None
    })
}

/// The lanes of a process and their messages.
pub(super) struct MpiPort {
    library: Library,
    /// By rank; none for this process, and for one that cannot be reached.
    peers: Vec<Option<Peer>>,
    /// When a message has moved last.
    moved: Instant,
}

impl MpiPort {
    pub(super) fn new(library: Library, lanes: Vec<Option<Arc<Mutex<Lane>>>>) -> Self {
        let peer = |(rank, lane): (usize, Option<Arc<Mutex<Lane>>>)| {
            lane.map(|lane| Peer {
                rank: Rank(rank),
                lane,
                sends: VecDeque::new(),
                receipts: VecDeque::new(),
            })
        };
        Self {
            library,
            peers: lanes.into_iter().enumerate().map(peer).collect(),
            moved: Instant::now(),
        }
    }

    /// Calls `f` for each process. One that cannot be reached is left out from then on.
    fn each(
        &mut self,
        f: impl Fn(&mut Peer, &mut Library) -> io::Result<bool>,
    ) -> Result<bool, Unreachable> {
        let mut moved = false;
        for (rank, place) in self.peers.iter_mut().enumerate() {
            if let Some(peer) = place {
                match f(peer, &mut self.library) {
                    Ok(has_moved) => moved |= has_moved,
                    Err(error) => {
                        *place = None;
                        let rank = Rank(rank);
                        return Err(Unreachable { rank, error });
                    }
                }
            }
        }
        Ok(moved)
    }

    /// Begins to receive the messages that are there.
    fn receive(&mut self) -> Result<bool, Unreachable> {
        for taken in 0..MOST_PROBES {
            let own = self.library.rank;
            let probed = self.library.probe();
            let probed = probed.map_err(|error| Unreachable { rank: own, error })?;
            let Some((rank, len)) = probed else {
                return Ok(taken > 0);
            };
            let Some(peer) = &mut self.peers[rank.0] else {
                return Ok(taken > 0);
            };
            let slot = lock(&peer.lane).empty();
            match self.library.receive(rank, len, slot) {
                Ok(flight) => peer.receipts.push_back(flight),
                Err(error) => {
                    self.peers[rank.0] = None;
                    return Err(Unreachable { rank, error });
                }
            }
        }
        Ok(true)
    }

    /// Waits until all bytes have left, and ends MPI together with the other processes.
    pub(super) fn finish(mut self) -> io::Result<()> {
        let start = Instant::now();
        let is_under_way = |peer: &Peer| !peer.sends.is_empty() || lock(&peer.lane).has_ready();
        while self.peers.iter().flatten().any(is_under_way) {
            self.turn().map_err(|lost| lost.error)?;
            if start.elapsed() > LAST_BYTES {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        self.library.finish()
    }
}

impl Port for MpiPort {
    fn turn(&mut self) -> Result<(), Unreachable> {
        let sent = self.each(Peer::send)?;
        let received = self.receive()?;
        let delivered = self.each(|peer, _| peer.deliver())?;
        if sent || received || delivered {
            self.moved = Instant::now();
        } else {
            // The ranks of a host may be more than its cores.
            thread::yield_now();
        }
        Ok(())
    }

    /// A small part of the time since the last message, so that a wait gets little longer by it and
    /// an idle process needs little of its core.
    fn longest_sleep(&self) -> Option<Duration> {
        let idle = self.moved.elapsed();
        Some(if idle < AWAKE {
            Duration::ZERO
        } else {
            (idle / 8).min(LONGEST_SLEEP)
        })
    }
}
