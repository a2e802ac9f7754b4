#[cfg(unix)]
use merak_mpu::{tcp, testing::tcp_world};
use merak_mpu::{
    testing::{suite, world},
    threads,
};

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
    }
}
