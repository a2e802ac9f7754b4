use crate::processes::free_port;
use merak_mpu::{Member, ReduceOp, Result, tcp};
use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::Barrier,
    thread,
    time::Duration,
};

const HOST: &str = "127.0.0.1";

/// Options of one test's world; its name keeps it apart from those of other tests.
fn options(test: &str, rank: usize, n: usize, port: u16) -> tcp::JoinOptions {
    tcp::JoinOptions {
        run: format!("{test}-{}", std::process::id()),
        ..tcp::JoinOptions::new(rank, n, HOST, port).with_timeout(Duration::from_secs(15))
    }
}

/// Joins with all options at once, and uses the members while all of them live.
fn join_all(options: &[tcp::JoinOptions]) -> Vec<Result<f32>> {
    let use_it = |member: Member| {
        let sum = member.world_group()?.all_reduce_scalar(1.0, ReduceOp::Sum);
        member.end();
        sum
    };
    thread::scope(|scope| {
        let joins: Vec<_> = options
            .iter()
            .map(|options| scope.spawn(move || tcp::join(options).and_then(use_it)))
            .collect();
        joins
            .into_iter()
            .map(|join| join.join().expect("nothing panics"))
            .collect()
    })
}

fn texts(results: Vec<Result<f32>>) -> Vec<String> {
    let text =
        |result: Result<f32>| result.map_or_else(|error| error.to_string(), |x| x.to_string());
    results.into_iter().map(text).collect()
}

#[test]
fn strangers_at_the_door_disturb_nobody() {
    let port = free_port();
    let first = options("strangers", 0, 3, port);
    let world = thread::spawn(move || join_all(&[first]));
    let mut strangers = Vec::new();
    for word in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 9000], b""] {
        let stranger = loop {
            match TcpStream::connect((HOST, port)) {
                // Until rank 0 listens, a socket may have the port itself, and be its own peer.
                Ok(stream) if stream.local_addr().ok() != stream.peer_addr().ok() => break stream,
                _ => thread::sleep(Duration::from_millis(5)),
            }
        };
        // It may be sent away while it still speaks.
        let _ = (&stranger).write_all(word);
        strangers.push(stranger);
    }
    let others = [1, 2].map(|rank| options("strangers", rank, 3, port));
    let mut sums = join_all(&others);
    sums.extend(world.join().unwrap());
    assert_eq!(texts(sums), ["3"; 3]);
    let mut greeting = Vec::new();
    let _ = strangers[0].read_to_end(&mut greeting);
    assert!(greeting.len() < 200, "a stranger learns little");
}

#[test]
fn digests_that_differ_name_the_odd_rank_and_a_tie_both_sides() {
    for (plans, told) in [
        (
            &["a", "b", "a"][..],
            "rank 1 has another plan than ranks 0 and 2",
        ),
        (
            &["b", "a", "a"],
            "rank 0 has another plan than ranks 1 and 2",
        ),
        (&["a", "b"], "rank 0 has one plan, rank 1 has another"),
        (
            &["a", "b", "b", "a"],
            "ranks 0 and 3 have one plan, ranks 1 and 2 have another",
        ),
    ] {
        let port = free_port();
        let with = |(rank, plan): (usize, &&str)| tcp::JoinOptions {
            digests: vec![
                ("configuration".into(), vec![7]),
                ("plan".into(), plan.as_bytes().to_vec()),
            ],
            ..options("digests", rank, plans.len(), port)
        };
        let options: Vec<_> = plans.iter().enumerate().map(with).collect();
        let said = texts(join_all(&options));
        let reason = format!("rank 0 cannot meet the others at {HOST}:{port}: {told}");
        assert_eq!(said[0], reason);
        for (rank, said) in said.iter().enumerate().skip(1) {
            assert_eq!(*said, format!("rank 0 sent rank {rank} away: {reason}"));
        }
    }
}

#[test]
fn two_processes_of_one_rank_and_another_world_size_are_one_clear_error() {
    // One that comes when rank 0 has given up finds nobody.
    let soon = |options: tcp::JoinOptions| options.with_timeout(Duration::from_secs(5));
    let port = free_port();
    let ranks = [0, 1, 1].map(|rank| options("twice", rank, 3, port));
    let said = texts(join_all(&ranks.map(soon)));
    assert!(said[0].contains("two processes are rank 1 ("), "{said:?}");
    assert!(said.iter().all(|said| said.contains("rank")), "{said:?}");
    let port = free_port();
    let sizes = [(0, 3), (1, 3), (2, 4)].map(|(rank, n)| options("size", rank, n, port));
    let said = texts(join_all(&sizes.map(soon)));
    let found = "says that the world has 4 ranks, rank 0 that it has 3";
    assert!(
        said[0].contains("rank 2 (process ") && said[0].contains(found),
        "{said:?}"
    );
    assert!(said.iter().all(|said| said.contains("rank")), "{said:?}");
    let outside = texts(join_all(&[options("outside", 4, 4, port)]));
    assert!(
        outside[0].ends_with("rank 4 does not exist in a world of 4 ranks"),
        "{outside:?}"
    );
}

#[test]
fn a_second_run_on_a_port_is_refused_and_the_first_one_lives() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let first = thread::spawn(move || {
        let ranks = [0, 1].map(|rank| options("again", rank, 2, port));
        thread::scope(|scope| {
            let joins = ranks
                .iter()
                .map(|options| scope.spawn(|| tcp::join(options)));
            let joins: Vec<_> = joins.collect();
            let members = joins.into_iter().map(|join| join.join().unwrap());
            members.collect::<Result<Vec<_>>>().unwrap()
        })
    });
    let members = first.join().unwrap();
    let said = texts(join_all(&[options("again", 0, 2, port)]));
    assert!(
        said[0].contains(&format!(
            "holds port {port}: give each run a port of its own"
        )),
        "{said:?}"
    );
    let said = texts(join_all(&[options("again", 1, 2, port)]));
    assert!(
        said[0].contains("have met, so rank 1 cannot join them"),
        "{said:?}"
    );
    // A run of another name takes the next port.
    let others = [0, 1].map(|rank| options("other", rank, 2, port));
    assert_eq!(texts(join_all(&others)), ["2", "2"]);
    let sums = merak_mpu::run_members(members, 1 << 20, |member| {
        member
            .world_group()?
            .all_reduce_scalar(1.0_f32, ReduceOp::Sum)
    });
    assert_eq!(sums.unwrap(), [2.0, 2.0]);
}

#[test]
fn where_there_is_no_rank_0_the_error_says_what_was_found() {
    let port = free_port();
    let alone = tcp::JoinOptions {
        timeout: Duration::from_millis(300),
        ..options("nobody", 1, 2, port)
    };
    let said = texts(join_all(&[alone]));
    let expected = format!(
        "rank 1 cannot meet the others at {HOST}:{port}: no rank 0 was found on this port or the \
         next 15 within 300ms: "
    );
    assert!(said[0].starts_with(&expected), "{said:?}");
}

#[test]
fn the_clocks_of_all_ranks_count_from_one_moment() {
    let members = tcp::world(3, Duration::from_secs(15)).unwrap();
    let epochs: Vec<_> = members.iter().map(Member::epoch).collect();
    for epoch in &epochs {
        let apart = epoch.max(&epochs[0]).duration_since(*epoch.min(&epochs[0]));
        assert!(apart < Duration::from_millis(50), "{apart:?}");
    }
    let ended = merak_mpu::run_members(members, 1 << 20, |_| Ok::<_, merak_mpu::Error>(()));
    assert!(ended.is_ok());
}

#[test]
fn ranks_that_fail_at_once_name_one_culprit() {
    for _ in 0..20 {
        let members = tcp::world(3, Duration::from_secs(15)).unwrap();
        let start = Barrier::new(2);
        let fail = |member: &Member| {
            if member.rank().0 > 0 {
                start.wait();
                member.abort("disk full");
            }
            let group = member.world_group();
            let _ = group.and_then(|world| world.barrier());
            member.failure().map(|failure| failure.culprit)
        };
        let named = thread::scope(|scope| {
            let ranks: Vec<_> = members
                .iter()
                .map(|member| scope.spawn(|| fail(member)))
                .collect();
            let named = ranks.into_iter().map(|rank| rank.join().unwrap());
            named.collect::<Vec<_>>()
        });
        assert!(named[0].is_some(), "{named:?}");
        assert!(named.iter().all(|other| *other == named[0]), "{named:?}");
    }
}
