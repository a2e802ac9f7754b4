use merak_mpu::{
    Buffer, Call, Communicator, DType, Error, Member, Memory, Pending, ReduceOp, into_vec,
    testing::DEADLINE,
    threads::{self, WorldOptions},
};
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Elements of a buffer that is too large to be computed in passing.
const LARGE: usize = 6 << 15;

pub(crate) fn on_cores(cores: usize) -> WorldOptions {
    WorldOptions {
        timeout: DEADLINE,
        cores,
        ..WorldOptions::default()
    }
}

/// Sleeps until something has happened, and waits for no operation.
fn until(has_happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !has_happened() {
        assert!(start.elapsed() < DEADLINE, "nobody computes");
        thread::sleep(Duration::from_millis(1));
    }
}

fn is_set(flag: &Arc<AtomicBool>) -> bool {
    flag.load(Ordering::Acquire)
}

/// Numbers that tell when an engine has worked on them.
#[derive(Debug)]
struct Watched {
    data: Vec<f32>,
    is_computed: Arc<AtomicBool>,
}

impl Buffer for Watched {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn len(&self) -> usize {
        self.data.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        self.data.read(f);
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.data.write(f);
        self.is_computed.store(true, Ordering::Release);
    }

    fn memory(&mut self) -> Memory {
        self.data.memory()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// What a member starts, and what it gets.
struct Case {
    call: Call,
    lengths: Option<Vec<usize>>,
    expected: Vec<f32>,
}

/// Collectives of all kinds that move data, for a member of a group whose buffers are `rows`.
fn cases(rows: &[Vec<f32>], rank: usize) -> Vec<Case> {
    let (n, len, root) = (rows.len(), rows[0].len(), rows.len() - 1);
    let part = len / n;
    let own = rank * part..(rank + 1) * part;
    let column = |at: usize| rows.iter().map(|row| row[at]).sum::<f32>();
    let (sum, all) = ((0..len).map(column).collect::<Vec<_>>(), rows.concat());
    let own_sum = sum[own.clone()].to_vec();
    let exchanged: Vec<f32> = rows
        .iter()
        .flat_map(|row| row[own.clone()].to_vec())
        .collect();
    let joined: Vec<f32> = rows
        .iter()
        .enumerate()
        .flat_map(|(from, row)| row[from * part..(from + 1) * part].to_vec())
        .collect();
    let gathered = if rank == root { &joined } else { &rows[rank] };
    let gathered = gathered.clone();
    let only = |chosen: usize, data: &[f32]| {
        let data = if rank == chosen { data } else { &[] };
        data.to_vec()
    };
    let mut of_first = vec![0; n];
    of_first[0] = len;
    let case = |call, lengths, expected| Case {
        call,
        lengths,
        expected,
    };
    let scattered = Call::ReduceScatter(ReduceOp::Sum);
    let scattered_in_place = Call::ReduceScatterInPlace(ReduceOp::Sum);
    vec![
        case(scattered, Some(of_first), only(0, &sum)),
        case(scattered_in_place, None, own_sum.clone()),
        case(scattered, None, own_sum),
        case(Call::AllReduce(ReduceOp::Sum), None, sum),
        case(Call::Gather { root }, None, only(root, &all)),
        case(Call::AllGather, Some(vec![len; n]), all.clone()),
        case(Call::AllGather, None, all),
        case(Call::AllGatherInPlace, Some(vec![part; n]), joined.clone()),
        case(Call::AllGatherInPlace, None, joined),
        case(Call::GatherInPlace { root }, None, gathered),
        case(Call::Broadcast { root }, None, rows[root].clone()),
        case(Call::AllToAll, Some(vec![part; n * n]), exchanged.clone()),
        case(Call::AllToAll, None, exchanged),
    ]
}

/// Starts all cases, waits for none until all are computed, and checks what they gave.
fn start_all(member: &Member, rows: &[Vec<f32>]) -> Result<(), Error> {
    let (group, rank) = (member.world_group()?, member.rank().0);
    let (mut pending, mut flags, mut results) = (Vec::new(), Vec::new(), Vec::new());
    for case in cases(rows, rank) {
        let is_computed = Arc::<AtomicBool>::default();
        let buffer = Box::new(Watched {
            data: rows[rank].clone(),
            is_computed: Arc::clone(&is_computed),
        });
        pending.push(group.start(case.call, buffer, case.lengths.map(Into::into))?);
        flags.push(is_computed);
        results.push((case.call, case.expected));
    }
    until(|| flags.iter().all(is_set));
    for (pending, (call, expected)) in pending.into_iter().zip(results) {
        assert!(pending.is_done(), "{call:?}: all members have come");
        let mut found: Vec<f32> = into_vec(pending.wait()?)?;
        if matches!(call, Call::ReduceScatterInPlace(_)) {
            // What the parts of the others hold is left open.
            found = found[rank * expected.len()..][..expected.len()].to_vec();
        }
        assert!(found == expected, "{call:?}");
    }
    Ok(())
}

#[test]
fn what_all_members_have_started_is_computed_though_nobody_waits() {
    for (n, cores) in [(2, 2), (2, 8), (3, 1)] {
        for len in [6, LARGE] {
            let number = |at: usize, rank: usize| (at as f32 * (0.1 + rank as f32)).sin();
            let row = |rank: usize| (0..len).map(|at| number(at, rank)).collect::<Vec<_>>();
            let rows: Vec<_> = (0..n).map(row).collect();
            threads::run(n, on_cores(cores), |member| start_all(&member, &rows)).unwrap();
        }
    }
}

/// Starts the sum of two members' buffers, and keeps nothing but the operation.
fn start_sum(member: &Member, buffer: Box<dyn Buffer>) -> Pending<Box<dyn Buffer>> {
    let group = member.world_group().expect("the world is new");
    let started = group.start_all_reduce(buffer, ReduceOp::Sum);
    started.expect("members call alike")
}

#[test]
fn an_operation_is_computed_when_the_other_rank_has_dropped_it_and_no_handle_is_left() {
    for cores in [2, 8] {
        let is_computed = Arc::<AtomicBool>::default();
        let watched = Watched {
            data: vec![1.0; LARGE],
            is_computed: Arc::clone(&is_computed),
        };
        let mut members = threads::world(2, on_cores(cores)).into_iter();
        let (first, second) = (members.next().unwrap(), members.next().unwrap());
        let pending = start_sum(&first, Box::new(watched));
        assert!(!pending.is_done(), "rank 1 has not come");
        drop(start_sum(&second, Box::new(vec![2.0_f32; LARGE])));
        assert!(pending.is_done(), "rank 1 has done its part");
        drop((first, second, members));
        until(|| is_set(&is_computed));
        let sum: Vec<f32> = into_vec(pending.wait().unwrap()).unwrap();
        assert!(sum == vec![3.0; LARGE]);
    }
}

/// A buffer that cannot be opened.
#[derive(Debug)]
struct Broken {
    panics: bool,
}

impl Buffer for Broken {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn len(&self) -> usize {
        LARGE
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        f(&[]);
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        assert!(!self.panics, "this panic is part of a test");
        f(&mut []);
    }

    fn memory(&mut self) -> Memory {
        Memory::Host(std::ptr::NonNull::<f32>::dangling().as_ptr().cast())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

#[test]
fn a_failure_that_nobody_waits_for_names_the_rank_whose_buffer_failed() {
    for culprit in [0, 1] {
        let unopened = format!(
            "a buffer of 196608 f32 on rank {culprit} did not open as 786432 aligned bytes"
        );
        for (panics, reason) in [(true, "its buffer panicked"), (false, unopened.as_str())] {
            let members = threads::world(2, on_cores(2));
            let buffer = |rank: usize| -> Box<dyn Buffer> {
                if rank == culprit {
                    Box::new(Broken { panics })
                } else {
                    Box::new(vec![1.0_f32; LARGE])
                }
            };
            // Rank 1 comes last.
            let pending = [0, 1].map(|rank| start_sum(&members[rank], buffer(rank)));
            until(|| members[0].failure().is_some());
            for pending in pending {
                let heard = pending.wait().unwrap_err().to_string();
                assert_eq!(heard, format!("rank {culprit} failed: {reason}"));
            }
        }
    }
}
