#[cfg(unix)]
use merak_mpu::{
    Member, tcp,
    testing::{sockets_world, tcp_world},
};
use merak_mpu::{
    testing::{suite, world},
    threads,
};
#[cfg(unix)]
use std::time::Duration;

#[test]
fn threads_pass_every_check_in_worlds_of_one_to_five() {
    for n in 1..=5 {
        for (_, check) in suite::CHECKS {
            world(n, |member| check(&member));
        }
    }
}

#[test]
fn threads_survive_every_fault() {
    for n in [2, 4] {
        suite::faults(n, |n, timeout| {
            let options = threads::WorldOptions {
                timeout,
                ..threads::WorldOptions::default()
            };
            threads::world(n, options)
        });
    }
}

#[cfg(unix)]
#[test]
fn tcp_passes_every_check_in_worlds_of_one_to_five() {
    for n in 1..=5 {
        tcp_world(n, |member| {
            for (_, check) in suite::CHECKS {
                check(&member);
            }
        });
    }
}

#[cfg(unix)]
#[test]
fn tcp_survives_every_fault() {
    for n in [2, 4] {
        suite::faults(n, |n, timeout| {
            tcp::world(n, timeout).expect("there are sockets")
        });
        suite::faults(n, over_sockets);
    }
}

/// A world whose ranks do not share memory, as those of several hosts.
#[cfg(unix)]
fn over_sockets(n: usize, timeout: Duration) -> Vec<Member> {
    let options = tcp::JoinOptions {
        shared_memory: false,
        ..tcp::JoinOptions::new(0, n, "127.0.0.1", 0).with_timeout(timeout)
    };
    tcp::world_of(&options).expect("there are sockets")
}

#[cfg(target_os = "linux")]
#[test]
fn every_rank_knows_the_memory_that_all_pairs_of_its_host_share() {
    let shared = |member: Member| member.shared_bytes();
    let of_pair = tcp_world(2, shared)[0];
    assert!(of_pair >= 2 << 20, "two rings of a MiB: {of_pair}");
    assert_eq!(tcp_world(4, shared), [6 * of_pair; 4]);
    assert_eq!(sockets_world(3, shared), [0; 3]);
    assert_eq!(world(3, shared), [0; 3]);
}

#[cfg(unix)]
#[test]
fn tcp_without_shared_memory_passes_every_check() {
    for n in 1..=5 {
        sockets_world(n, |member| {
            for (_, check) in suite::CHECKS {
                check(&member);
            }
        });
    }
}
