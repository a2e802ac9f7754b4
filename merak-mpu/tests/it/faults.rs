use merak_mpu::{
    Buffer, Call, Communicator, DType, Error, Group, Member, Memory, Rank, ReduceOp, RunError,
    into_vec,
    testing::world,
    threads::{self, WorldOptions},
};
use std::{
    any::Any,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

fn within(milliseconds: u64) -> WorldOptions {
    WorldOptions {
        timeout: Duration::from_millis(milliseconds),
        ..WorldOptions::default()
    }
}

fn world_of(member: &Member) -> Group {
    member.world_group().expect("the world is new")
}

#[test]
fn a_timeout_says_who_waits_for_whom() {
    // Rank 0 waits for rank 1, which has waited longer for a message of rank 2, which has other
    // work.
    let (waits, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let until = |flag: &AtomicBool| {
        while !flag.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let failure = threads::run(3, within(4000), |member| {
        let world = world_of(&member);
        let result = match member.rank().0 {
            0 => {
                until(&waits);
                std::thread::sleep(Duration::from_millis(100));
                let pair = member.group("pair", &[Rank(0), Rank(1)]);
                pair.and_then(|pair| pair.barrier())
            }
            1 => {
                waits.store(true, Ordering::Relaxed);
                world.recv(2, 5).map(drop)
            }
            _ => {
                until(&over);
                Ok(())
            }
        };
        over.store(true, Ordering::Relaxed);
        result
    });
    assert_eq!(
        failure.unwrap_err().to_string(),
        "rank 1 failed: no answer within 4s: \
         rank 1 waits in recv(tag 5) 0 of group world [0, 1, 2] for rank 2; \
         rank 0 waits in barrier 0 of group pair [0, 1] for rank 1"
    );
}

#[test]
fn a_wait_that_is_as_long_as_can_be_ends_when_its_peer_comes() {
    fn late(member: &Member) -> Result<Vec<u32>, Error> {
        if member.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        let sum = world_of(member).all_reduce_vec(vec![1_u32], ReduceOp::Sum)?;
        member.end();
        Ok(sum)
    }
    let options = WorldOptions {
        timeout: Duration::MAX,
        ..WorldOptions::default()
    };
    let sums = threads::run(2, options, |member| late(&member));
    assert_eq!(sums.unwrap(), [[2], [2]]);
    #[cfg(unix)]
    {
        let options = merak_mpu::tcp::JoinOptions {
            timeout: Duration::MAX,
            beat_timeout: Duration::MAX,
            ..merak_mpu::tcp::JoinOptions::new(0, 2, "127.0.0.1", 0)
        };
        let members = merak_mpu::tcp::world_of(&options).unwrap();
        let sums = merak_mpu::run_members(members, 2 << 20, |member| late(&member));
        assert_eq!(sums.unwrap(), [[2], [2]]);
    }
}

#[cfg(unix)]
#[test]
fn rank_0_ends_after_the_slowest_rank_and_blames_nobody() {
    let timeout = Duration::from_millis(200);
    let members = merak_mpu::tcp::world(2, timeout).unwrap();
    let start = Instant::now();
    let ended = merak_mpu::run_members(members, 2 << 20, |member| {
        if member.rank() == 1 {
            std::thread::sleep(3 * timeout);
        }
        member.end();
        assert!(start.elapsed() >= 3 * timeout && member.failure().is_none());
        Ok::<_, Error>(())
    });
    ended.unwrap();
}

#[test]
fn the_first_of_several_failures_is_reported() {
    let failure = threads::run(4, WorldOptions::default(), |member| {
        let world = world_of(&member);
        if member.rank() == 2 {
            return Err("disk full".to_owned());
        }
        world.barrier().map_err(|error| error.to_string())
    });
    match failure {
        Err(RunError::Failed { rank, cause }) => {
            assert_eq!((rank, cause.as_str()), (Rank(2), "disk full"));
        }
        other => panic!("expected a failure, found {other:?}"),
    }
}

#[test]
fn an_abort_ends_a_wait_at_once_and_names_its_reason() {
    let heard = world(2, |member| {
        if member.rank() == 1 {
            member.abort("loss is NaN at step 3");
        }
        // Rank 0 hears of it here or there.
        let barrier = member.world_group().and_then(|world| world.barrier());
        barrier.unwrap_err().to_string()
    });
    assert_eq!(heard, ["rank 1 failed: loss is NaN at step 3"; 2]);
}

#[test]
fn a_thread_that_panics_with_a_group_poisons_the_world() {
    let mut members = threads::world(2, within(20_000));
    let (second, first) = (members.pop().unwrap(), members.pop().unwrap());
    let (mine, theirs) = (world_of(&first), world_of(&second));
    let thread = std::thread::spawn(move || {
        let _theirs = theirs;
        panic!("this panic is part of a test");
    });
    let error = mine.barrier().unwrap_err();
    assert_eq!(error.to_string(), "rank 1 failed: panicked");
    assert!(thread.join().is_err());
}

#[test]
fn different_operations_are_named_on_both_sides() {
    let heard = world(2, |member| {
        let world = world_of(&member);
        world.barrier().unwrap();
        let error = if member.rank() == 0 {
            let started = world.start_all_reduce(Box::new(vec![0_u8; 4]), ReduceOp::Max);
            world.send(1, 0, Vec::new()).unwrap();
            started.unwrap().wait().map(drop)
        } else {
            world.recv(0, 0).unwrap();
            world.broadcast_vec(vec![0.0_f32; 2], 1).map(drop)
        };
        error.unwrap_err().to_string()
    });
    let message = "operation 1 of group world [0, 1] differs: \
                   rank 0 called all_reduce(max) of 4 u8, rank 1 called broadcast(root 1) of 2 f32";
    assert_eq!(heard, [format!("rank 1 failed: {message}"), message.into()]);
}

#[test]
fn arguments_are_checked_before_anything_is_sent() {
    world(2, |member| {
        let world = world_of(&member);
        let text = |error: Error| error.to_string();
        assert_eq!(
            world
                .reduce_scatter_vec(vec![0_u8; 7], ReduceOp::Sum)
                .map_err(text),
            Err(
                "reduce_scatter over 2 ranks needs a multiple of 2 elements, found 7; nearest is 6"
                    .into()
            )
        );
        assert_eq!(
            world.broadcast_vec(vec![0_u8; 7], 2).map_err(text),
            Err("rank 2 does not exist in world [0, 1], which has 2 ranks".into())
        );
        let group = |members: &[usize]| {
            let members: Vec<Rank> = members.iter().copied().map(Rank).collect();
            member.group("odd", &members).map(drop).map_err(text)
        };
        assert_eq!(
            group(&[1, 0]),
            Err("[1, 0] cannot be group odd: members must ascend".into())
        );
        assert_eq!(
            group(&[0, 1, 2]),
            Err("[0, 1, 2] cannot be group odd: the world has 2 ranks".into())
        );
        assert_eq!(
            group(&[]),
            Err(format!(
                "[] cannot be group odd: rank {} is not among them",
                member.rank()
            ))
        );
        world.barrier().unwrap();
    });
}

#[test]
fn parts_that_do_not_fit_a_buffer_are_refused_before_anything_is_sent() {
    world(2, |member| {
        let world = world_of(&member);
        let buffer = |len: usize| -> Box<dyn Buffer> { Box::new(vec![0_u8; len]) };
        let in_place = Call::ReduceScatterInPlace(ReduceOp::Sum);
        for (call, wanted) in [
            (Call::AllGather, 3),
            (Call::AllGatherInPlace, 6),
            (in_place, 6),
        ] {
            let refused = |lengths: &[usize]| {
                let started = world.start(call, buffer(2), Some(lengths.into()));
                started.unwrap_err().to_string()
            };
            let what = format!("{} cannot cut the parts of 2 ranks:", call.name());
            assert_eq!(refused(&[2]), format!("{what} there are 1 lengths"));
            let other = format!("their lengths ask for a buffer of {wanted} elements, found 2");
            assert_eq!(refused(&[3, 3]), format!("{what} {other}"));
            let large = "the sum of their lengths is too large";
            assert_eq!(refused(&[2, usize::MAX]), format!("{what} {large}"));
        }
        let at_one = Call::GatherInPlace { root: 1 };
        for call in [Call::AllGatherInPlace, at_one, in_place] {
            let error = world.start(call, buffer(7), None).unwrap_err();
            let reason = "over 2 ranks needs a multiple of 2 elements, found 7; nearest is 6";
            assert_eq!(error.to_string(), format!("{} {reason}", call.name()));
        }
        world.barrier().unwrap();
    });
}

/// A buffer that shows fewer bytes than it promises, and cannot be read at all.
#[derive(Debug)]
struct Short;

impl Buffer for Short {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn len(&self) -> usize {
        8
    }

    fn read(&self, _: &mut dyn FnMut(&[u8])) {}

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
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
fn a_buffer_that_breaks_its_promise_is_an_error_on_every_rank() {
    let heard = world(2, |member| {
        let world = world_of(&member);
        let buffer: Box<dyn Buffer> = if member.rank() == 1 {
            Box::new(Short)
        } else {
            Box::new(vec![0.0_f32; 8])
        };
        let error = world.all_reduce(buffer, ReduceOp::Sum).unwrap_err();
        error.to_string()
    });
    let broken = "a buffer of 8 f32 on rank 1 did not open as 32 aligned bytes";
    let told = format!("rank 1 failed: {broken}");
    for message in heard {
        assert!(message == broken || message == told, "{message}");
    }
}

#[test]
fn elements_that_a_buffer_does_not_show_are_not_taken_for_none() {
    let error = into_vec::<f32>(Box::new(Short)).unwrap_err();
    let expected = "0 of the 8 elements of a buffer of f32 could be read";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn ranks_get_the_stack_that_was_asked_for() {
    fn deep(levels: usize) -> usize {
        let frame = std::hint::black_box([levels; 128]);
        match levels {
            0 => 0,
            _ => frame[levels % 128] - levels + 1 + deep(levels - 1),
        }
    }
    // 20,000 frames of a kibibyte are more than the eight mebibytes of the default.
    let options = WorldOptions {
        stack_bytes: 64 << 20,
        ..WorldOptions::default()
    };
    let levels = threads::run(1, options, |_| Ok::<_, Error>(deep(20_000)));
    assert_eq!(levels.unwrap(), [20_000]);
}
