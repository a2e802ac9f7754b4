//! Where ranks run and where their memory lies.

use crate::{Buffer, Member};
use std::{any::Any, time::Duration};

/// Every rank has a place of its own on its host, and hosts are numbered without a gap.
///
/// # Panics
/// When the engine is wrong.
pub fn localities(member: &Member) {
    let world = member.world_group().expect("the world is healthy");
    let own = member.locality();
    assert!(own.local_rank < own.local_size, "{own:?}");
    let all = world.all_gather_vec(vec![own.host as u32, own.local_rank as u32]);
    let all = all.expect("all ranks take part");
    let mut hosts = 0;
    for (rank, place) in all.chunks(2).enumerate() {
        let before = all.chunks(2).take(rank);
        let earlier = before.filter(|other| other[0] == place[0]).count();
        assert_eq!(place[1], earlier as u32, "places ascend with the ranks");
        assert!(place[0] <= hosts, "the first rank of a host numbers it");
        hosts = hosts.max(place[0] + 1);
    }
    let here = all.chunks(2).filter(|place| place[0] == own.host as u32);
    assert_eq!(here.count(), own.local_size);
    assert!(member.failure().is_none());
    let age = member.epoch().elapsed();
    assert!(age < Duration::from_hours(1), "the world is {age:?} old");
}

/// A buffer lies where it did after it was moved and written, and its like has its type.
///
/// # Panics
/// When the engine or a buffer is wrong.
pub fn memory_stays_put(_: &Member) {
    let mut buffer: Box<dyn Buffer> = Box::new(vec![1.0_f32; 5]);
    let place = buffer.memory();
    buffer.clear();
    let mut moved = vec![buffer];
    let mut buffer = moved.remove(0);
    assert_eq!(buffer.memory(), place);
    let like = buffer.zeros_like(3);
    assert_eq!((like.dtype(), like.len()), (buffer.dtype(), 3));
    let any: &dyn Any = &*like;
    assert!(any.is::<Vec<f32>>());
}
