//! Point-to-point messages.

use crate::{Communicator, Group, Member, Message, Packet, into_vec};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Every rank sends three tensors of different shapes and types to the next one, before it
/// receives. The integers begin with their own number, as a shape might.
///
/// # Panics
/// When the engine is wrong.
pub fn ring_exchange(member: &Member) {
    let group = member.world_group().expect("the world is healthy");
    let (n, rank) = (group.world_size(), group.rank());
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let message = vec![
        Packet {
            shape: vec![2, 3],
            data: Box::new(vec![rank as f32; 6]),
        },
        Packet {
            shape: vec![0, 4],
            data: Box::new(Vec::<i64>::new()),
        },
        Packet {
            shape: vec![3],
            data: Box::new(vec![3_i64, -1, 7]),
        },
    ];
    group.send(next, 1, message).expect("sends do not wait");
    let mut received = group.recv(previous, 1).expect("the previous rank sends");
    assert_eq!(received.len(), 3);
    let integers = received.pop().expect("there are three");
    assert_eq!(integers.shape, [3]);
    let integers = into_vec::<i64>(integers.data).expect("the type is kept");
    assert_eq!(integers, [3, -1, 7]);
    let empty = received.pop().expect("there are three");
    assert_eq!(empty.shape, [0, 4]);
    let empty = into_vec::<i64>(empty.data).expect("the type is kept");
    assert!(empty.is_empty());
    let full = received.pop().expect("there are three");
    assert_eq!(full.shape, [2, 3]);
    let data: Vec<f32> = into_vec(full.data).expect("the type is kept");
    assert_eq!(data, [previous as f32; 6]);
    let outside = group.send(n, 0, Vec::new());
    assert!(outside.is_err(), "there is no rank {n}");
}

/// Messages of one tag keep their order, tags do not mix, and receipts may be waited for in any
/// order.
///
/// # Panics
/// When the engine is wrong.
pub fn message_order(member: &Member) {
    let group = member.world_group().expect("the world is healthy");
    let (n, rank) = (group.world_size(), group.rank());
    let target = (rank + n / 2) % n;
    let source = (rank + n - n / 2) % n;
    for number in 0..3_u32 {
        send_number(&group, target, 7, number * 10 + 7);
        send_number(&group, target, 8, number * 10 + 8);
    }
    let receipts: Vec<_> = [8, 7, 7, 8, 8, 7]
        .into_iter()
        .map(|tag| group.start_recv(source, tag).expect("the world is healthy"))
        .collect();
    let mut numbers: Vec<u32> = receipts
        .into_iter()
        .rev()
        .map(|receipt| number_in(receipt.wait().expect("the source has sent it")))
        .collect();
    numbers.reverse();
    assert_eq!(numbers, [8, 7, 17, 18, 28, 27]);
}

/// A receipt is done once its message has come.
///
/// # Panics
/// When the engine is wrong.
pub fn receipts_are_polled(member: &Member) {
    let group = member.world_group().expect("the world is healthy");
    let (n, rank) = (group.world_size(), group.rank());
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let receipt = group.start_recv(previous, 9).expect("the world is healthy");
    assert!(!receipt.is_done(), "nobody has sent it yet");
    group.barrier().expect("all ranks come to the barrier");
    send_number(&group, next, 9, rank as u32);
    let start = Instant::now();
    while !receipt.is_done() && start.elapsed() < Duration::from_secs(5) {
        thread::yield_now();
    }
    assert!(receipt.is_done(), "the previous rank has sent it");
    let message = receipt.wait().expect("the previous rank has sent it");
    assert_eq!(number_in(message), previous as u32);
}

fn send_number(group: &Group, to: usize, tag: u64, number: u32) {
    let packet = Packet {
        shape: vec![],
        data: Box::new(vec![number]),
    };
    group
        .send(to, tag, vec![packet])
        .expect("sends do not wait");
}

fn number_in(mut message: Message) -> u32 {
    let packet = message.pop().expect("there is one packet");
    into_vec::<u32>(packet.data).expect("the type is kept")[0]
}
