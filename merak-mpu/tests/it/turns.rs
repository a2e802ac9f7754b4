use crate::progress::on_cores;
use merak_mpu::{
    Communicator, Error, Group, Member, Rank, ReduceOp,
    testing::DEADLINE,
    threads::{self, WorldOptions},
};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

fn alone(member: &Member) -> Group {
    let group = member.group("alone", &[member.rank()]);
    group.expect("the world is new")
}

#[test]
fn no_more_ranks_than_cores_have_their_turn_at_once() {
    let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let counts = threads::run(5, on_cores(2), |member| {
        let group = alone(&member);
        for _ in 0..40 {
            let turn = group.turn()?;
            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            thread::sleep(Duration::from_micros(50));
            inside.fetch_sub(1, Ordering::SeqCst);
            drop(turn);
        }
        Ok::<_, Error>(())
    });
    assert_eq!(counts.unwrap().len(), 5);
    assert_eq!(most.into_inner(), 2);
}

#[test]
fn where_each_rank_has_a_core_nobody_waits() {
    // Both hold their turns until both have one.
    let both = threads::run(2, on_cores(2), |member| {
        let turn = alone(&member).turn()?;
        member.world_group()?.barrier()?;
        drop(turn);
        Ok::<_, Error>(())
    });
    assert_eq!(both.unwrap(), [(), ()]);
}

#[test]
fn the_members_of_a_group_wait_for_each_other_within_their_turn() {
    let sums = threads::run(6, on_cores(2), |member| {
        let first = member.rank().0 / 2 * 2;
        let pair = member.group("pair", &[Rank(first), Rank(first + 1)])?;
        let mut sum = 0;
        for _ in 0..30 {
            let _turn = pair.turn()?;
            sum += pair.all_reduce_scalar(1_i64, ReduceOp::Sum)?;
        }
        Ok::<_, Error>(sum)
    });
    assert_eq!(sums.unwrap(), [60; 6]);
}

#[test]
fn who_waits_for_a_turn_hears_of_a_failure_and_does_not_wait_for_ever() {
    let failed = threads::run(2, on_cores(1), |member| {
        let group = alone(&member);
        let world = member.world_group().map_err(|e| e.to_string())?;
        if member.rank() == 0 {
            let _turn = group.turn().map_err(|e| e.to_string())?;
            world.barrier().map_err(|e| e.to_string())?;
            thread::sleep(Duration::from_millis(20));
            // The turn still lasts.
            member.abort("out of paper");
            return Err("out of paper".to_owned());
        }
        world.barrier().map_err(|e| e.to_string())?;
        let heard = group.turn().expect_err("the other one never ends its turn");
        assert_eq!(heard.to_string(), "rank 0 failed: out of paper");
        Ok(())
    });
    assert_eq!(
        failed.unwrap_err().to_string(),
        "rank 0 failed: out of paper"
    );

    let options = WorldOptions {
        timeout: Duration::from_secs(2),
        ..on_cores(1)
    };
    let late = threads::run(2, options, |member| {
        let group = alone(&member);
        let world = member.world_group()?;
        if member.rank() == 0 {
            let _turn = group.turn()?;
            world.barrier()?;
            // Until the other one has waited for too long.
            let start = Instant::now();
            while member.failure().is_none() && start.elapsed() < DEADLINE {
                thread::sleep(Duration::from_millis(1));
            }
            return Ok(());
        }
        world.barrier()?;
        group.turn().map(drop)
    });
    let message = late.unwrap_err().to_string();
    assert!(
        message.contains("rank 1 waits in turn 0 of group alone [1] for rank 0"),
        "{message}"
    );
}
