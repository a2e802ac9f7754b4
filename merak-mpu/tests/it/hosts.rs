//! Two network namespaces play two hosts; the tests are skipped where the system allows none.

use crate::processes::{Ranks, free_port};
use merak_mpu::testing::hosts::{ADDRESSES, TwoHosts};
use std::{path::Path, process::Command};

/// The host of each of four ranks.
const HOSTS: [usize; 4] = [0, 0, 1, 1];

fn start(scenario: &str, command: impl Fn(usize, &Path) -> Command) -> Ranks {
    Ranks::start_at(scenario, 4, 0..4, (ADDRESSES[0], free_port()), command)
}

#[test]
fn processes_know_their_hosts_and_sum_over_the_cable() {
    let Some(hosts) = TwoHosts::or_skipped() else {
        return;
    };
    let ranks = start("where", |rank, own| hosts.command(HOSTS[rank], own));
    let expected = HOSTS.into_iter().enumerate().map(|(rank, host)| {
        let said = format!("host {host}, place {} of 2, cores of 2, sum 16", rank % 2);
        (rank, said)
    });
    assert_eq!(ranks.results(None), expected.collect::<Vec<_>>());
}

#[test]
fn hosts_that_cannot_be_told_apart_use_sockets_where_memory_is_out_of_reach() {
    let Some(hosts) = TwoHosts::or_skipped() else {
        return;
    };
    // Without /proc nothing tells the namespaces of one machine apart.
    let hide = "mount -t tmpfs none /proc && exec \"$@\"";
    let ranks = start("where", |rank, own| {
        let mut command = hosts.command(HOSTS[rank], "unshare");
        command.args(["--mount", "sh", "-c", hide, "sh"]).arg(own);
        command
    });
    for (rank, said) in ranks.results(None) {
        assert_eq!(
            said,
            format!("host 0, place {rank} of 4, cores of 4, sum 16")
        );
    }
}

#[test]
fn a_cut_cable_ends_both_sides_and_each_names_who_is_out_of_reach() {
    let Some(hosts) = TwoHosts::or_skipped() else {
        return;
    };
    let mut ranks = start("cut", |rank, own| hosts.command(HOSTS[rank], own));
    ranks.wait_for_sums();
    hosts.cut().unwrap();
    for (rank, said) in ranks.results(None) {
        // Rank 0 judges for its side, and is the one that the other side misses.
        let culprits: &[usize] = if HOSTS[rank] == 0 { &[2, 3] } else { &[0] };
        let names = |culprit| {
            let lost = format!(
                "rank {culprit} failed: no heartbeat within 2s: its process is stopped or its host \
                 is cut off (rank {rank} "
            );
            said.starts_with(&lost) && said.contains(" all_reduce ")
        };
        let named = culprits.iter().any(names);
        assert!(named, "rank {rank} says: {said}");
    }
}
