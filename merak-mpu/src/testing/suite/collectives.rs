//! Collectives against the serial definition of each.

use crate::{
    Buffer, Communicator, DType, Element, Group, Member, Pending, Rank, ReduceOp, into_vec,
};
use half::{bf16, f16};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Empty, one, odd, a whole number of cache lines, and more than one chunk of work.
const LENGTHS: [usize; 5] = [0, 1, 7, 64, 40_001];

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

/// Each collective gives what its serial definition gives, for each type, length and operator.
///
/// # Panics
/// When the engine is wrong.
pub fn collectives_of_all_types(member: &Member) {
    let group = member.world_group().expect("the world is healthy");
    for dtype in DType::ALL {
        match dtype {
            DType::F64 => collectives_of(&group, |x| x, |x: f64| x),
            DType::F32 => collectives_of(&group, |x| x as f32, f64::from),
            DType::BF16 => collectives_of(&group, bf16::from_f64, bf16::to_f64),
            DType::F16 => collectives_of(&group, f16::from_f64, f16::to_f64),
            DType::I64 => collectives_of(&group, |x| x as i64, |x| x as f64),
            DType::U32 => collectives_of(&group, |x| x as u32, f64::from),
            DType::U8 => collectives_of(&group, |x| x as u8, f64::from),
        }
    }
}

/// Small whole numbers, so that every type holds their sums exactly.
fn row<T>(rank: usize, len: usize, make: impl Fn(f64) -> T) -> Vec<T> {
    (0..len)
        .map(|index| make(((index * 5 + rank * 3) % 8) as f64))
        .collect()
}

fn collectives_of<T: Element + PartialEq>(
    group: &Group,
    make: impl Fn(f64) -> T + Copy,
    value: impl Fn(T) -> f64 + Copy,
) {
    let (n, rank) = (group.world_size(), group.rank());
    let rows = |len: usize| (0..n).map(move |rank| row(rank, len, make));
    for len in LENGTHS {
        reductions_of(group, len, make, value);
        same(
            group,
            "all_gather",
            group.all_gather_vec(row(rank, len, make)),
            rows(len).flatten(),
        );
        same(
            group,
            "all_gather_in_place",
            group.all_gather_in_place_vec(own_part_alone(rank, &vec![len; n], make)),
            rows(len).flatten(),
        );
        let own = own_part_alone(rank, &vec![len; n], make);
        let joined = if rank == n - 1 {
            rows(len).flatten().collect()
        } else {
            own.clone()
        };
        same(
            group,
            "gather_in_place",
            group.gather_in_place_vec(own, n - 1),
            joined,
        );
        parts_of(group, len, make, value);
        let root = n / 2;
        same(
            group,
            "broadcast",
            group.broadcast_vec(row(rank, len, make), root),
            row(root, len, make),
        );
        let joined = if rank == root {
            rows(len).flatten().collect()
        } else {
            Vec::new()
        };
        same(
            group,
            "gather",
            group.gather_vec(row(rank, len, make), root),
            joined,
        );
        let columns = rows(len * n).flat_map(|row| row.into_iter().skip(rank * len).take(len));
        same(
            group,
            "all_to_all",
            group.all_to_all_vec(row(rank, len * n, make)),
            columns,
        );
        group.barrier().expect("all ranks come to the barrier");
    }
}

/// Sums, maxima and minima of whole buffers.
fn reductions_of<T: Element + PartialEq>(
    group: &Group,
    len: usize,
    make: impl Fn(f64) -> T + Copy,
    value: impl Fn(T) -> f64 + Copy,
) {
    let (n, rank) = (group.world_size(), group.rank());
    let rows = |len: usize| (0..n).map(move |rank| row(rank, len, make));
    for op in OPS {
        same(
            group,
            "all_reduce",
            group.all_reduce_vec(row(rank, len, make), op),
            fold(op, rows(len), value).map(make),
        );
        let whole = fold(op, rows(len * n), value).map(make);
        let part: Vec<T> = whole.skip(rank * len).take(len).collect();
        let in_place = group.reduce_scatter_in_place_vec(row(rank, len * n, make), op);
        same(
            group,
            "reduce_scatter_in_place",
            in_place.map(|all| all[rank * len..][..len].to_vec()),
            part.clone(),
        );
        same(
            group,
            "reduce_scatter",
            group.reduce_scatter_vec(row(rank, len * n, make), op),
            part,
        );
    }
}

/// Members get or bring 0, 1, 2, .. times as much as the first of two of them, in new memory and in
/// buffers that have the parts of all members.
fn parts_of<T: Element + PartialEq>(
    group: &Group,
    len: usize,
    make: impl Fn(f64) -> T + Copy,
    value: impl Fn(T) -> f64 + Copy,
) {
    let (n, rank) = (group.world_size(), group.rank());
    let lengths: Vec<usize> = (0..n).map(|rank| rank * len).collect();
    let (start, whole): (usize, usize) = (lengths[..rank].iter().sum(), lengths.iter().sum());
    let own = || Box::new(row(rank, whole, make));
    let rows = (0..n).map(|rank| row(rank, whole, make));
    let sums: Vec<T> = fold(OPS[0], rows, value).map(make).collect();
    let sums = || sums[start..][..lengths[rank]].iter().copied();
    let joined = || (0..n).flat_map(|rank| row(rank, lengths[rank], make));
    let parts = group
        .start_reduce_scatter_parts(own(), lengths.clone(), OPS[0])
        .and_then(|pending| into_vec(pending.wait()?));
    same(group, "reduce_scatter of parts", parts, sums());
    let parts = group
        .start_reduce_scatter_parts_in_place(own(), lengths.clone(), OPS[0])
        .and_then(|pending| into_vec::<T>(pending.wait()?));
    let parts = parts.map(|all| all[start..][..lengths[rank]].to_vec());
    same(group, "reduce_scatter_in_place of parts", parts, sums());
    let all = group.all_gather_parts_vec(row(rank, lengths[rank], make), lengths.clone());
    same(group, "all_gather of parts", all, joined());
    let own = own_part_alone(rank, &lengths, make);
    let all = group
        .start_all_gather_parts_in_place(Box::new(own), lengths.clone())
        .and_then(|pending| into_vec(pending.wait()?));
    same(group, "all_gather_in_place of parts", all, joined());
}

/// Room for the parts of all members, in which those of the others are not there yet.
fn own_part_alone<T: Element>(
    rank: usize,
    lengths: &[usize],
    make: impl Fn(f64) -> T + Copy,
) -> Vec<T> {
    let part = |(other, &len): (usize, &usize)| {
        if other == rank {
            row(rank, len, make)
        } else {
            // No row has this number.
            vec![make(9.0); len]
        }
    };
    lengths.iter().enumerate().flat_map(part).collect()
}

fn same<T: Element + PartialEq>(
    group: &Group,
    what: &str,
    actual: crate::Result<Vec<T>>,
    expected: impl IntoIterator<Item = T>,
) {
    let expected: Vec<_> = expected.into_iter().collect();
    let (n, rank) = (group.world_size(), group.rank());
    let actual = actual.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(
        actual == expected,
        "{what} of {} {} over {n} ranks is wrong on rank {rank}",
        expected.len(),
        T::DTYPE
    );
}

fn fold<T>(
    op: ReduceOp,
    rows: impl Iterator<Item = Vec<T>>,
    value: impl Fn(T) -> f64 + Copy,
) -> impl Iterator<Item = f64> {
    let wide = rows.map(|row| row.into_iter().map(value).collect::<Vec<f64>>());
    let folded = wide.reduce(|mut sum, row| {
        for (sum, x) in sum.iter_mut().zip(row) {
            *sum = match op {
                ReduceOp::Sum => *sum + x,
                ReduceOp::Max => sum.max(x),
                ReduceOp::Min => sum.min(x),
            };
        }
        sum
    });
    folded.unwrap_or_default().into_iter()
}

/// A long broadcast reaches a member that calls when the others have exchanged their parts.
///
/// # Panics
/// When the engine is wrong.
pub fn late_calls_of_broadcasts(member: &Member) {
    let group = member.world_group().expect("the world is healthy");
    let (n, rank) = (group.world_size(), group.rank());
    for (root, late) in (0..n).flat_map(|root| (0..n).map(move |late| (root, late))) {
        if rank == late {
            thread::sleep(Duration::from_millis(3));
        }
        let row = |rank: usize| row(rank, 300_001, |x| x as f32);
        same(
            &group,
            "broadcast",
            group.broadcast_vec(row(rank), root),
            row(root),
        );
    }
}

/// Members exchange parts of lengths of their own, empty ones among them.
///
/// # Panics
/// When the engine is wrong.
pub fn exchanges_of_parts(member: &Member) {
    let group = member.world_group().expect("the world is healthy");
    let (n, rank) = (group.world_size(), group.rank());
    for most in [1, 3, 20_000] {
        let length = |from: usize, to: usize| (from + 2 * to) % 3 * most;
        let part = |from: usize, to: usize| vec![(from * n + to) as u32; length(from, to)];
        let lengths: Vec<_> = (0..n).map(|to| length(rank, to)).collect();
        let own: Vec<u32> = (0..n).flat_map(|to| part(rank, to)).collect();
        let received = group
            .all_to_all_parts_vec(own, &lengths)
            .expect("all ranks take part");
        let expected: Vec<_> = (0..n).map(|from| part(from, rank)).collect();
        assert!(received == expected, "parts of up to {} elements", 2 * most);
    }
}

/// Members that give one color become a group, and the groups do not mix.
///
/// # Panics
/// When the engine is wrong.
pub fn splits(member: &Member) {
    let world = member.world_group().expect("the world is healthy");
    let color = (world.rank() % 3) as u32;
    let group = world.split(color).expect("all ranks take part");
    let expected: Vec<_> = (0..world.world_size())
        .map(Rank)
        .filter(|rank| (rank.0 % 3) as u32 == color)
        .collect();
    assert_eq!(group.members(), expected);
    assert_eq!(group.name(), format!("world/{color}"));
    let ranks = group.all_gather_vec(vec![member.rank().0 as u32]);
    let ranks = ranks.expect("all members take part");
    assert!(
        ranks
            .iter()
            .map(|rank| *rank as usize)
            .eq(expected.iter().map(|rank| rank.0))
    );
}

/// Operations that are started in one order may be waited for in another on each rank, or dropped.
///
/// # Panics
/// When the engine is wrong.
pub fn waits_in_any_order(member: &Member) {
    const STARTED: usize = 6;
    let group = member.world_group().expect("the world is healthy");
    let (n, rank) = (group.world_size(), group.rank());
    let mut pending: Vec<(usize, Pending<Box<dyn Buffer>>)> = (0..STARTED)
        .map(|number| {
            let buffer: Box<dyn Buffer> = Box::new(vec![number as f32; 1000]);
            let started = group.start_all_reduce(buffer, ReduceOp::Sum);
            (number, started.expect("the world is healthy"))
        })
        .collect();
    pending.rotate_left(rank % STARTED);
    if rank % 2 == 1 {
        pending.reverse();
    }
    if rank == 0 {
        // A result that is not wanted holds up no other member.
        drop(pending.pop());
    }
    for (number, pending) in pending {
        // A poll says that the wait is short, or nothing.
        let start = Instant::now();
        while !pending.is_done() && start.elapsed() < Duration::from_secs(5) {
            thread::yield_now();
        }
        assert!(pending.is_done(), "all ranks have started it");
        let buffer = pending.wait().expect("all ranks have started it");
        let sum: Vec<f32> = into_vec(buffer).expect("the type is kept");
        assert_eq!(sum, vec![(number * n) as f32; 1000]);
    }
    group.barrier().expect("all ranks come to the barrier");
}

/// Collectives of overlapping groups do not mix, for any order in which ranks use them.
///
/// # Panics
/// When the engine is wrong.
pub fn groups_side_by_side(member: &Member) {
    let world = member.world_group().expect("the world is healthy");
    let me = member.rank().0;
    let parity: Vec<Rank> = (me % 2..member.world_size()).step_by(2).map(Rank).collect();
    let group = |name: &str| member.group(name, &parity).expect("the world is healthy");
    // Groups of one name and members are told apart by the order in which they were made.
    let (first, second) = (group("parity"), group("parity"));
    let start = |group: &Group, value: u32| {
        group
            .start_all_gather(Box::new(vec![value]))
            .expect("the world is healthy")
    };
    let (a, b, c) = if (me / 2).is_multiple_of(2) {
        let a = start(&first, 10);
        let b = start(&second, 20);
        (a, b, start(&world, 30))
    } else {
        let c = start(&world, 30);
        let b = start(&second, 20);
        (start(&first, 10), b, c)
    };
    let everybody = world.world_size();
    for (pending, value, n) in [
        (c, 30, everybody),
        (b, 20, parity.len()),
        (a, 10, parity.len()),
    ] {
        let buffer = pending.wait().expect("all ranks have started it");
        let gathered: Vec<u32> = into_vec(buffer).expect("the type is kept");
        assert_eq!(gathered, vec![value; n]);
    }
}

/// A group of one returns its buffer as it is.
///
/// # Panics
/// When the engine is wrong.
pub fn single_groups(member: &Member) {
    let alone = member
        .group("alone", &[member.rank()])
        .expect("the world is healthy");
    let data = vec![1.5_f32, 2.5];
    let place = data.as_ptr();
    let data = alone
        .all_reduce_vec(data, ReduceOp::Sum)
        .and_then(|data| alone.all_gather_vec(data))
        .and_then(|data| alone.reduce_scatter_vec(data, ReduceOp::Max))
        .and_then(|data| alone.all_gather_in_place_vec(data))
        .and_then(|data| alone.reduce_scatter_in_place_vec(data, ReduceOp::Max))
        .and_then(|data| alone.broadcast_vec(data, 0))
        .and_then(|data| alone.all_to_all_vec(data))
        .expect("nobody else takes part");
    assert_eq!(data, [1.5, 2.5]);
    assert_eq!(data.as_ptr(), place, "a group of one copies nothing");
    assert!(alone.broadcast_vec(data, 1).is_err());
}
