//! What ranks allocate while they wait for each other.

use merak_mpu::{
    Communicator, ReduceOp,
    testing::allocations::{Counting, asked_bytes},
    threads::{self, WorldOptions},
};
use std::{thread, time::Duration};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn options() -> WorldOptions {
    WorldOptions {
        timeout: Duration::from_mins(1),
        stack_bytes: 256 << 10,
        ..WorldOptions::default()
    }
}

/// The most bytes that a rank of `n` asks for in a barrier for which all but one have to sleep.
fn most_in_a_barrier(n: usize) -> usize {
    let asked = threads::run(n, options(), |member| {
        let world = member.world_group()?;
        if member.rank().0 + 1 == n {
            thread::sleep(Duration::from_millis(200));
        }
        let before = asked_bytes();
        world.barrier()?;
        Ok::<_, merak_mpu::Error>(asked_bytes() - before)
    });
    let asked = asked.expect("no rank fails");
    asked.into_iter().max().expect("there are ranks")
}

#[test]
fn the_memory_of_a_wait_grows_with_the_ranks_and_not_with_their_square() {
    let (few, many) = (most_in_a_barrier(32), most_in_a_barrier(128));
    assert!(many < 8 * few, "{few} bytes at 32 ranks, {many} at 128");
}

#[test]
fn a_group_lists_its_members_once_for_all_of_them() {
    let lists = threads::run(8, options(), |member| {
        let world = member.world_group()?;
        Ok::<_, merak_mpu::Error>(world.members().as_ptr().addr())
    });
    let lists = lists.expect("no rank fails");
    assert!(lists.iter().all(|list| *list == lists[0]), "{lists:?}");
}

#[test]
fn strings_are_gathered_for_one_rank_alone() {
    const BYTES: usize = 10_000;
    let asked = threads::run(16, options(), |member| {
        let world = member.world_group()?;
        let own = vec![member.rank().0 as u8; BYTES];
        let before = asked_bytes();
        let all = world.gather_bytes(own, 3)?;
        assert_eq!(all.len(), if member.rank() == 3 { 16 } else { 0 });
        for (rank, bytes) in all.iter().enumerate() {
            assert_eq!(*bytes, [rank as u8; BYTES]);
        }
        Ok::<_, merak_mpu::Error>(asked_bytes() - before)
    });
    let asked = asked.expect("no rank fails");
    let others = asked.iter().enumerate().filter(|(rank, _)| *rank != 3);
    assert!(
        others.map(|(_, bytes)| bytes).all(|bytes| *bytes < BYTES),
        "{asked:?}"
    );
}

#[test]
fn parts_are_not_padded_to_the_longest() {
    const LONGEST: usize = 100_000;
    let asked = threads::run(16, options(), |member| {
        let world = member.world_group()?;
        let lengths: Vec<_> = (0..16)
            .map(|rank| if rank == 5 { LONGEST } else { 1 })
            .collect();
        let whole = vec![1_u8; LONGEST + 15];
        let before = asked_bytes();
        let own =
            world.start_reduce_scatter_parts(Box::new(whole), lengths.clone(), ReduceOp::Sum)?;
        let own = merak_mpu::into_vec::<u8>(own.wait()?)?;
        assert_eq!(own, vec![16; lengths[member.rank().0]]);
        let all = world.all_gather_parts_vec(own, lengths)?;
        assert!(all.len() == LONGEST + 15 && all.iter().all(|x| *x == 16));
        Ok::<_, merak_mpu::Error>(asked_bytes() - before)
    });
    let asked = asked.expect("no rank fails");
    let most = asked.iter().max().expect("there are ranks");
    assert!(*most < 4 * LONGEST, "{asked:?}");
}

#[test]
fn what_works_in_place_asks_for_no_memory_of_the_size_of_its_buffer() {
    const BYTES: usize = 1 << 20;
    let asked = threads::run(4, options(), |member| {
        let (world, own) = (member.world_group()?, member.rank().0 * BYTES / 4);
        let whole = vec![1_u8; BYTES];
        let before = asked_bytes();
        let whole = world.reduce_scatter_in_place_vec(whole, ReduceOp::Sum)?;
        assert!(whole[own..][..BYTES / 4].iter().all(|x| *x == 4));
        let whole = world.all_gather_in_place_vec(whole)?;
        let asked = asked_bytes() - before;
        assert!(whole.iter().all(|x| *x == 4));
        Ok::<_, merak_mpu::Error>(asked)
    });
    let asked = asked.expect("no rank fails");
    assert!(asked.iter().all(|asked| *asked < BYTES / 8), "{asked:?}");
}
