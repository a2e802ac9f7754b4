//! Memory of devices over an engine that moves host memory.

use merak_mpu::{
    Buffer, Communicator, DType, Member, Memory, Packet, ReduceOp, Result, into_vec,
    testing::{sockets_world, tcp_world},
};
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Elements that an engine moves in many pieces.
const LEN: usize = 3 << 18;

/// Memory of a device, which counts how often all of it is copied.
#[derive(Debug)]
struct Remote {
    values: Vec<f32>,
    copies: Arc<AtomicUsize>,
}

impl Buffer for Remote {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn len(&self) -> usize {
        self.values.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.values.read(f);
    }

    /// The elements come to the host, and go back.
    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.copies.fetch_add(2, Ordering::Relaxed);
        self.values.write(f);
    }

    fn set_bytes(&mut self, bytes: &[u8]) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.values.set_bytes(bytes);
    }

    fn lies_on_device(&self) -> bool {
        true
    }

    fn memory(&mut self) -> Memory {
        let address = self.values.as_ptr().addr() as u64;
        Memory::Device {
            ordinal: 0,
            address,
        }
    }

    fn zeros_like(&self, len: usize) -> Box<dyn Buffer> {
        Box::new(Self {
            values: vec![0.0; len],
            copies: Arc::clone(&self.copies),
        })
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// Whether two whole numbers are equal.
fn is(found: f32, expected: f32) -> bool {
    (found - expected).abs() < 0.5
}

/// The elements of a result, which lies on a device.
fn remote(result: Box<dyn Buffer>) -> Vec<f32> {
    let any = result.into_any();
    any.downcast::<Remote>()
        .expect("memory of the device")
        .values
}

/// Collectives and a message of memory of a device, on one of two ranks.
fn moves(member: &Member) -> Result<()> {
    let (group, me) = (member.world_group()?, member.rank().0);
    let copies = Arc::<AtomicUsize>::default();
    let own = |len: usize| -> Box<dyn Buffer> {
        let values = (0..len).map(|i| (i % 7 + me) as f32).collect();
        let copies = Arc::clone(&copies);
        Box::new(Remote { values, copies })
    };
    let sum = |i: usize| (2 * (i % 7) + 1) as f32;
    let found = remote(group.all_reduce(own(LEN), ReduceOp::Sum)?);
    assert!((0..LEN).all(|i| is(found[i], sum(i))));
    assert_eq!(copies.swap(0, Ordering::Relaxed), 2);

    let parts = vec![LEN - 5, 5];
    let pending = group.start_reduce_scatter_parts(own(LEN), parts, ReduceOp::Sum)?;
    let found = remote(pending.wait()?);
    let first = me * (LEN - 5);
    assert!(
        found
            .iter()
            .enumerate()
            .all(|(i, &x)| is(x, sum(first + i)))
    );
    assert_eq!(copies.swap(0, Ordering::Relaxed), 2);

    let pending = group.start_recv(1 - me, 3)?;
    let packet = Packet {
        shape: vec![LEN],
        data: own(LEN),
    };
    group.start_send(1 - me, 3, vec![packet])?.wait()?;
    let packet = pending.wait()?.swap_remove(0);
    let found: Vec<f32> = into_vec(packet.data)?;
    assert!((0..LEN).all(|i| is(found[i], (i % 7 + 1 - me) as f32)));
    assert_eq!(copies.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn memory_of_a_device_is_copied_once_each_way() {
    tcp_world(2, |member| moves(&member).unwrap());
    sockets_world(2, |member| moves(&member).unwrap());
}
