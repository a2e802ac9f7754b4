#[cfg(unix)]
use crate::program::programs;
use half::{bf16, f16};
#[cfg(unix)]
use merak_mpu::testing::{sockets_world, tcp_world};
use merak_mpu::{
    Buffer, Communicator, Element, Member, Packet, ReduceOp, into_vec, testing::world,
};
use proptest::prelude::*;

/// Runs `body` in a world of every engine that this process can have.
fn everywhere(n: usize, body: impl Fn(Member) + Sync) {
    world(n, &body);
    #[cfg(unix)]
    tcp_world(n, &body);
}

/// One row of `len` elements for each of 1 to 4 ranks; the length is a multiple of the rank count.
fn rows<T: Element>(
    element: impl Strategy<Value = T> + Clone,
) -> impl Strategy<Value = Vec<Vec<T>>> {
    (1..5_usize, 0..40_usize).prop_flat_map(move |(n, part)| {
        prop::collection::vec(prop::collection::vec(element.clone(), n * part), n)
    })
}

fn ops() -> impl Strategy<Value = ReduceOp> {
    prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min])
}

/// The definition: a fold in ascending rank over elements made wide, made narrow once at the end.
fn fold<T: Copy, W: Copy>(
    rows: &[Vec<T>],
    widen: impl Fn(T) -> W,
    combine: impl Fn(W, W) -> W,
    narrow: impl Fn(W) -> T,
) -> Vec<T> {
    (0..rows[0].len())
        .map(|index| {
            let column = rows.iter().map(|row| widen(row[index]));
            narrow(column.reduce(&combine).expect("there is a rank"))
        })
        .collect()
}

fn float(op: ReduceOp) -> impl Fn(f32, f32) -> f32 {
    move |a, b| match op {
        ReduceOp::Sum => a + b,
        ReduceOp::Max if a.is_nan() || a >= b => a,
        ReduceOp::Min if a.is_nan() || a <= b => a,
        ReduceOp::Max | ReduceOp::Min => b,
    }
}

fn bytes<T: Element>(data: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(data).to_vec()
}

/// All reductions equal the folded row, bit for bit and on every rank.
fn check_reductions<T: Element>(rows: &[Vec<T>], op: ReduceOp, folded: &[T]) {
    let n = rows.len();
    let part = folded.len() / n;
    everywhere(n, |member| {
        let (group, rank) = (
            member.world_group().expect("the world is new"),
            member.rank().0,
        );
        let sum = group
            .all_reduce_vec(rows[rank].clone(), op)
            .expect("all ranks take part");
        assert_eq!(bytes(&sum), bytes(folded));
        let own = group
            .reduce_scatter_vec(rows[rank].clone(), op)
            .expect("all ranks take part");
        let expected = bytes(&folded[rank * part..(rank + 1) * part]);
        assert_eq!(bytes(&own), expected);
        let all = group
            .reduce_scatter_in_place_vec(rows[rank].clone(), op)
            .expect("all ranks take part");
        assert_eq!(bytes(&all[rank * part..(rank + 1) * part]), expected);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[cfg(unix)]
    #[test]
    fn any_program_of_calls_gives_equal_bits_on_every_engine(program in programs(1..=5)) {
        let threads = world(program.ranks, |member| program.results(&member));
        let processes = tcp_world(program.ranks, |member| program.results(&member));
        prop_assert!(threads == processes, "shared memory");
        let hosts = sockets_world(program.ranks, |member| program.results(&member));
        prop_assert!(threads == hosts, "sockets");
    }

    #[test]
    fn reductions_of_f32_are_serial_folds(rows in rows(any::<f32>()), op in ops()) {
        // A NaN's payload may differ from run to run of one addition, so NaNs are made alike.
        let rows: Vec<Vec<f32>> = rows
            .into_iter()
            .map(|row| row.into_iter().map(|x| if x.is_nan() { f32::INFINITY } else { x }).collect())
            .collect();
        let folded = fold(&rows, |x| x, float(op), |x| x);
        prop_assume!(folded.iter().all(|x| !x.is_nan()));
        check_reductions(&rows, op, &folded);
    }

    #[test]
    fn reductions_of_bf16_are_serial_folds_in_f32(rows in rows((-1e4_f32..1e4).prop_map(bf16::from_f32)), op in ops()) {
        let folded = fold(&rows, bf16::to_f32, float(op), bf16::from_f32);
        check_reductions(&rows, op, &folded);
    }

    #[test]
    fn reductions_of_f16_are_serial_folds_in_f32(rows in rows((-1e4_f32..1e4).prop_map(f16::from_f32)), op in ops()) {
        let folded = fold(&rows, f16::to_f32, float(op), f16::from_f32);
        check_reductions(&rows, op, &folded);
    }

    #[test]
    fn reductions_of_integers_are_serial_folds(rows in rows(any::<i64>()), op in ops()) {
        let folded = fold(&rows, |x| x, |a, b| match op {
            ReduceOp::Sum => a.wrapping_add(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::Min => a.min(b),
        }, |x| x);
        check_reductions(&rows, op, &folded);
    }

    #[test]
    fn gathers_and_exchanges_move_every_element_to_its_place(rows in rows(any::<u8>()), root in 0..4_usize) {
        let n = rows.len();
        let part = rows[0].len() / n;
        let root = root % n;
        everywhere(n, |member| {
            let (group, rank) = (member.world_group().unwrap(), member.rank().0);
            let own = || rows[rank].clone();
            assert_eq!(group.all_gather_vec(own()).unwrap(), rows.concat());
            assert_eq!(group.broadcast_vec(own(), root).unwrap(), rows[root]);
            let parts = rows.iter().enumerate();
            let parts: Vec<_> = parts.map(|(from, row)| &row[from * part..(from + 1) * part]).collect();
            assert_eq!(group.all_gather_in_place_vec(own()).unwrap(), parts.concat());
            let columns: Vec<_> = rows.iter().map(|row| &row[rank * part..(rank + 1) * part]).collect();
            assert_eq!(group.all_to_all_vec(own()).unwrap(), columns.concat());
            let back = group.all_to_all_vec(columns.concat()).unwrap();
            assert_eq!(back, own(), "an exchange undoes itself");
        });
    }

    #[test]
    fn byte_strings_of_any_length_are_gathered(texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 1..5)) {
        everywhere(texts.len(), |member| {
            let (group, rank) = (member.world_group().unwrap(), member.rank().0);
            assert_eq!(group.all_gather_bytes(texts[rank].clone()).unwrap(), texts);
            let root = texts.len() - 1;
            let taken = if rank == root { texts.as_slice() } else { &[] };
            assert_eq!(group.gather_bytes(texts[rank].clone(), root).unwrap(), taken);
            assert_eq!(group.broadcast_bytes(texts[rank].clone(), root).unwrap(), texts[root]);
        });
    }
}

#[test]
fn results_lie_in_the_memory_that_was_given() {
    everywhere(2, |member| {
        let group = member.world_group().unwrap();
        let data = vec![1.0_f32; 100_000];
        let place = data.as_ptr();
        let data = group.all_reduce_vec(data, ReduceOp::Sum).unwrap();
        let data = group.broadcast_vec(data, 0).unwrap();
        let data = group.all_to_all_vec(data).unwrap();
        let data = group.reduce_scatter_in_place_vec(data, ReduceOp::Max);
        let data = group.all_gather_in_place_vec(data.unwrap()).unwrap();
        assert_eq!(data.as_ptr(), place);
        assert_eq!(data, vec![2.0; 100_000]);
    });
}

#[test]
fn a_copy_that_passes_the_caches_by_comes_whole() {
    // 36 MiB: from 32 MiB on threads copy that way.
    let row = |rank: usize| -> Vec<u32> { (0..9_u32 << 20).map(|x| x * 3 + rank as u32).collect() };
    world(2, |member| {
        let group = member.world_group().unwrap();
        let found = group.broadcast_vec(row(group.rank()), 1).unwrap();
        assert!(found == row(1));
    });
}

#[test]
fn a_message_is_the_box_that_was_sent() {
    let places = world(2, |member| {
        let group = member.world_group().unwrap();
        if member.rank() == 0 {
            let data = vec![7_u32; 3];
            let place = data.as_ptr().addr();
            let packet = Packet {
                shape: vec![3],
                data: Box::new(data),
            };
            group.send(1, 0, vec![packet]).unwrap();
            return place;
        }
        let packet = group.recv(0, 0).unwrap().remove(0);
        let data: Vec<u32> = into_vec(packet.data).unwrap();
        assert_eq!(data, [7; 3]);
        data.as_ptr().addr()
    });
    assert_eq!(places[0], places[1]);
}

#[test]
fn sums_are_the_same_bits_in_every_run() {
    let run = || {
        world(4, |member| {
            let group = member.world_group().unwrap();
            let scale = 0.1 + member.rank().0 as f32;
            let data: Vec<f32> = (0..50_000)
                .map(|index| (index as f32 * scale).sin())
                .collect();
            group.all_reduce_vec(data, ReduceOp::Sum).unwrap()
        })
    };
    let first = run();
    for later in 0..3 {
        assert!(run() == first, "run {later} differs");
    }
}

#[test]
fn a_started_collective_keeps_its_buffer_alive_when_the_rank_leaves() {
    let leave = |member: Member| {
        let group = member.world_group().unwrap();
        let buffer: Box<dyn Buffer> = Box::new(vec![1.0_f64; 10_000]);
        let pending = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
        (member.rank() == 1).then(|| into_vec::<f64>(pending.wait().unwrap()).unwrap())
    };
    let expected = [None, Some(vec![2.0; 10_000])];
    assert_eq!(world(2, leave), expected);
    #[cfg(unix)]
    assert_eq!(tcp_world(2, leave), expected);
}

#[cfg(unix)]
#[test]
fn a_rank_that_left_after_its_call_is_there_for_one_that_calls_later() {
    let sums = tcp_world(2, |member| {
        if member.rank() == 1 {
            // Rank 0 has called and ended by then.
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let group = member.world_group().unwrap();
        let buffer: Box<dyn Buffer> = Box::new(vec![1.0_f64; 10_000]);
        let pending = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
        (member.rank() == 1).then(|| into_vec::<f64>(pending.wait().unwrap()).unwrap())
    });
    assert_eq!(sums, [None, Some(vec![2.0; 10_000])]);
}

#[cfg(unix)]
#[test]
fn what_a_process_sent_arrives_after_it_has_ended_its_part() {
    const LEN: usize = 3 << 20;
    let sums = tcp_world(3, |member| {
        let group = member.world_group().unwrap();
        if member.rank() == 2 {
            let packet = Packet {
                shape: vec![LEN],
                data: Box::new(vec![3_u32; LEN]),
            };
            group.send(0, 5, vec![packet]).unwrap();
            return 0;
        }
        if member.rank() == 1 {
            return 0;
        }
        // Both others have ended meanwhile.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let packet = group.recv(2, 5).unwrap().remove(0);
        into_vec::<u32>(packet.data).unwrap().iter().sum::<u32>()
    });
    assert_eq!(sums[0], 3 * LEN as u32);
}
