//! The bytes to and from one other process, in slots that MPI sends and fills.

use crate::{bell::lock, mill::Wire};
use std::{
    collections::VecDeque,
    io,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex},
};

/// Most slots to one process that wait to be sent or are on their way.
const MOST_SLOTS: usize = 8;

/// Most slots that a lane keeps until the end of the world: as many as are under way in both
/// directions, where both processes send without a pause.
const KEPT_SLOTS: usize = 2 * MOST_SLOTS;

/// Memory of one message, of a fixed size, with the bytes that it holds.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) bytes: Vec<u8>,
    pub(super) len: usize,
}

/// Slots between the wire to one process and the port, both of which the progress thread uses.
///
/// ```text
/// write ──> open ──> ready ──> port: MPI_Isend      port: MPI_Irecv ──> arrived ──> read
///             ^                  │                        ^                          │
///             └───── spare <─────┘                        └────────── spare <────────┘
/// ```
#[derive(Debug)]
pub(super) struct Lane {
    slot_bytes: usize,
    /// The slot that is being written.
    open: Option<Slot>,
    ready: VecDeque<Slot>,
    /// Slots that the port has taken and that have not left.
    flying: usize,
    /// With the bytes of the first one that were read.
    arrived: VecDeque<Slot>,
    used: usize,
    spare: Vec<Slot>,
}

impl Lane {
    pub(super) fn new(slot_bytes: usize) -> Self {
        Self {
            slot_bytes,
            open: None,
            ready: VecDeque::new(),
            flying: 0,
            arrived: VecDeque::new(),
            used: 0,
            spare: Vec::new(),
        }
    }

    /// A slot to be filled.
    pub(super) fn empty(&mut self) -> Slot {
        let slot = self.spare.pop();
        slot.unwrap_or_else(|| Slot {
            bytes: vec![0; self.slot_bytes],
            len: 0,
        })
    }

    /// Takes a slot back whose bytes were sent or read.
    fn recycle(&mut self, slot: Slot) {
        if self.spare.len() < KEPT_SLOTS {
            self.spare.push(Slot { len: 0, ..slot });
        }
    }

    /// The next slot to be sent.
    pub(super) fn take(&mut self) -> Option<Slot> {
        let slot = self.ready.pop_front()?;
        self.flying += 1;
        Some(slot)
    }

    /// Takes a slot back that has left.
    pub(super) fn note_left(&mut self, slot: Slot) {
        self.flying -= 1;
        self.recycle(slot);
    }

    /// Takes a slot that has come.
    pub(super) fn put(&mut self, slot: Slot) {
        self.arrived.push_back(slot);
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    fn write(&mut self, bytes: &[u8]) -> Option<usize> {
        if bytes.is_empty() {
            return Some(0);
        }
        let mut slot = match self.open.take() {
            Some(slot) => slot,
            None if self.ready.len() + self.flying < MOST_SLOTS => self.empty(),
            None => return None,
        };
        let len = bytes.len().min(slot.bytes.len() - slot.len);
        slot.bytes[slot.len..slot.len + len].copy_from_slice(&bytes[..len]);
        slot.len += len;
        if slot.len == slot.bytes.len() {
            self.ready.push_back(slot);
        } else {
            self.open = Some(slot);
        }
        Some(len)
    }

    fn flush(&mut self) {
        self.ready.extend(self.open.take());
    }

    fn read(&mut self, bytes: &mut [u8]) -> usize {
        let Some(slot) = self.arrived.front() else {
            return 0;
        };
        let rest = &slot.bytes[self.used..slot.len];
        let len = bytes.len().min(rest.len());
        bytes[..len].copy_from_slice(&rest[..len]);
        self.used += len;
        if self.used == slot.len {
            self.used = 0;
            if let Some(slot) = self.arrived.pop_front() {
                self.recycle(slot);
            }
        }
        len
    }
}

/// The wire's end of a lane.
#[derive(Debug)]
pub(super) struct LaneWire(pub(super) Arc<Mutex<Lane>>);

impl Wire for LaneWire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        Ok(lock(&self.0).write(bytes))
    }

    fn flush(&mut self) {
        lock(&self.0).flush();
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        Ok(Some(lock(&self.0).read(bytes)))
    }

    fn socket(&self) -> Option<(BorrowedFd<'_>, bool)> {
        None
    }

    fn has_bytes(&self) -> bool {
        !lock(&self.0).arrived.is_empty()
    }

    fn can_move(&self, _: bool) -> bool {
        self.has_bytes()
    }

    fn begin_sleep(&self, _: bool) -> bool {
        // The port says how long a sleep may be.
        self.has_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves what is ready to the other side, as MPI does.
    fn carry(from: &Mutex<Lane>, to: &Mutex<Lane>) -> Vec<usize> {
        let mut lengths = Vec::new();
        // The lock is free again while a slot is carried.
        let next = || lock(from).take();
        while let Some(slot) = next() {
            let mut copy = lock(to).empty();
            copy.bytes[..slot.len].copy_from_slice(&slot.bytes[..slot.len]);
            copy.len = slot.len;
            lengths.push(slot.len);
            lock(to).put(copy);
            lock(from).note_left(slot);
        }
        lengths
    }

    #[test]
    fn bytes_travel_in_slots_and_come_out_as_one_stream() {
        let ends = [(); 2].map(|()| Arc::new(Mutex::new(Lane::new(7))));
        let [mut left, mut right] = ends.clone().map(LaneWire);
        let sent: Vec<u8> = (0..200).collect();
        let (mut written, mut received) = (0, Vec::<u8>::new());
        while received.len() < sent.len() {
            while written < sent.len() {
                let Some(more) = left.write(&sent[written..]).unwrap() else {
                    break;
                };
                written += more;
            }
            left.flush();
            let lengths = carry(&ends[0], &ends[1]);
            assert!(lengths.len() <= MOST_SLOTS && lengths.iter().all(|len| *len <= 7));
            let mut bytes = [0; 5];
            while let Some(read @ 1..) = right.read(&mut bytes).unwrap() {
                received.extend(&bytes[..read]);
            }
            assert!(!right.has_bytes());
        }
        assert_eq!(received, sent);
    }

    #[test]
    fn a_lane_takes_no_more_than_its_slots_until_some_have_left() {
        let lane = Arc::new(Mutex::new(Lane::new(4)));
        let mut wire = LaneWire(Arc::clone(&lane));
        for _ in 0..MOST_SLOTS {
            assert_eq!(wire.write(&[1; 9]).unwrap(), Some(4));
        }
        assert_eq!(wire.write(&[1]).unwrap(), None);
        let slot = lock(&lane).take().unwrap();
        assert_eq!(wire.write(&[1]).unwrap(), None, "it is on its way");
        lock(&lane).note_left(slot);
        assert_eq!(wire.write(&[1]).unwrap(), Some(1));
    }

    #[test]
    fn a_lane_keeps_a_slot_for_each_that_was_under_way_up_to_a_bound() {
        for (slots, kept) in [(1, 1), (5 * KEPT_SLOTS, KEPT_SLOTS)] {
            let lane = Arc::new(Mutex::new(Lane::new(4)));
            let mut wire = LaneWire(Arc::clone(&lane));
            for _ in 0..slots {
                let mut slot = lock(&lane).empty();
                slot.len = 4;
                lock(&lane).put(slot);
            }
            while wire.has_bytes() {
                wire.read(&mut [0; 4]).unwrap();
            }
            let bytes: usize = lock(&lane).spare.iter().map(|slot| slot.bytes.len()).sum();
            assert_eq!(bytes, kept * 4);
        }
    }
}
