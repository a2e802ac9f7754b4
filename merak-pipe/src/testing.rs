//! What every link must do: checks for a link of one's own (feature `testing`).
//!
//! ```
//! use merak_pipe::{testing, threads};
//! testing::check_links(|ranks, deadline| threads::<Vec<u8>>(ranks, deadline));
//! ```
#![expect(
    clippy::panic,
    reason = "a test helper reports a failed test by panicking"
)]

use crate::{Error, Link, MicrobatchId, Result, StageId, Tag};
use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

/// A wait that must not reach its end.
const LONG: Duration = Duration::from_secs(30);

/// A wait that is meant to end. Ranks that share cores do not start at once.
const SHORT: Duration = Duration::from_secs(2);

/// How long a rank lets the others wait before it ends their waits.
const PAUSE: Duration = Duration::from_millis(200);

/// A check whose ranks have not ended by then hangs.
const HANGS: Duration = Duration::from_mins(1);

/// Checks links against the promises of [`Link`]. `make` takes the number of ranks and the deadline
/// of their waits, and returns the links in rank order.
///
/// The checks: messages with one tag keep their order and those with others may overtake them;
/// payloads of many megabytes come whole, both ways at once, whether receives were announced or
/// not; steps follow each other over the same links; a message that never comes is an error by the
/// deadline; a rank that leaves is an error for the one that waits for it; an abort ends the waits
/// of all ranks at once with its reason, and so does an [interrupter](Link::interrupter), where the
/// link has one.
///
/// # Panics
/// When a link breaks a promise, with the name of the check, or hangs.
pub fn check_links<P, L>(make: impl Fn(usize, Duration) -> Vec<L>)
where
    P: From<Vec<u8>> + Into<Vec<u8>> + Send + 'static,
    L: Link<P> + Send + 'static,
{
    all_ranks("order", make(2, LONG), order);
    all_ranks("large payloads", make(2, LONG), large_payloads);
    all_ranks("ring", make(4, LONG), ring);
    all_ranks("deadline", make(2, SHORT), deadline);
    all_ranks("lost peer", make(2, SHORT), lost_peer);
    all_ranks("abort", make(3, LONG), abort);
    interrupt(make(2, LONG));
}

/// Runs a check on every rank, each a thread.
fn all_ranks<P, L>(name: &'static str, links: Vec<L>, check: fn(usize, L))
where
    P: 'static,
    L: Link<P> + Send + 'static,
{
    let (done, ended) = mpsc::channel();
    let ranks = links.len();
    let spawn = |(rank, link)| {
        let done = done.clone();
        thread::spawn(move || {
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(rank, link)));
            // The receiver is gone where another rank has failed already.
            drop(done.send((rank, outcome)));
        })
    };
    let threads: Vec<_> = links.into_iter().enumerate().map(spawn).collect();
    let mut waiting: Vec<usize> = (0..ranks).collect();
    while !waiting.is_empty() {
        match ended.recv_timeout(HANGS) {
            Ok((rank, Ok(()))) => waiting.retain(|other| *other != rank),
            Ok((rank, Err(panic))) => {
                let message = crate::engine::panic_message(&*panic);
                panic!("{name}: rank {rank}: {message}");
            }
            Err(mpsc::RecvTimeoutError::Timeout | mpsc::RecvTimeoutError::Disconnected) => {
                panic!("{name}: ranks {waiting:?} hang");
            }
        }
    }
    for thread in threads {
        thread.join().expect("its panics are caught");
    }
}

/// The address of a message from one rank to another, as if each had one stage.
fn tag(from: usize, to: usize, microbatch: usize) -> Tag {
    Tag {
        from: StageId(from),
        to: StageId(to),
        microbatch: MicrobatchId(microbatch),
    }
}

fn send<P: From<Vec<u8>>>(link: &mut impl Link<P>, to: usize, tag: Tag, bytes: Vec<u8>) {
    link.send(to, tag, bytes.into())
        .expect("a send needs no receiver");
}

fn recv<P: Into<Vec<u8>>>(link: &mut impl Link<P>, from: usize, tag: Tag) -> Vec<u8> {
    link.recv(from, tag).expect("the message was sent").into()
}

/// The error of a receive whose message never comes.
fn refused<P>(link: &mut impl Link<P>, from: usize, tag: Tag) -> Error {
    let outcome: Result<P> = link.recv(from, tag);
    outcome.err().expect("no message was sent")
}

fn order<P: From<Vec<u8>> + Into<Vec<u8>>, L: Link<P>>(rank: usize, mut link: L) {
    let (one, other) = (tag(0, 1, 0), tag(0, 1, 1));
    for step in 0..3 {
        if rank == 0 {
            send(&mut link, 1, one, vec![step, 0]);
            send(&mut link, 1, one, vec![step, 1]);
            send(&mut link, 1, other, vec![step, 2]);
            send(&mut link, 1, one, Vec::new());
        } else {
            assert_eq!(
                recv(&mut link, 0, other),
                [step, 2],
                "another tag may overtake"
            );
            assert_eq!(recv(&mut link, 0, one), [step, 0], "the first comes first");
            assert_eq!(
                recv(&mut link, 0, one),
                [step, 1],
                "the second comes second"
            );
            assert!(recv(&mut link, 0, one).is_empty(), "a payload may be empty");
        }
        link.finish().expect("everything was sent");
    }
}

/// Sixteen megabytes and one, so that no buffer of a round size holds them.
const LARGE: usize = (16 << 20) + 1;

fn large_payloads<P: From<Vec<u8>> + Into<Vec<u8>>, L: Link<P>>(rank: usize, mut link: L) {
    let other = 1 - rank;
    let payload = |rank: usize| -> Vec<u8> { (0..LARGE).map(|i| (i * 31 + rank) as u8).collect() };
    for announced in [false, true] {
        let incoming = tag(other, rank, 0);
        if announced {
            link.post(other, incoming).expect("nothing has failed");
        }
        send(&mut link, other, tag(rank, other, 0), payload(rank));
        assert!(
            recv(&mut link, other, incoming) == payload(other),
            "the payload is another"
        );
        link.finish().expect("everything was sent");
    }
}

fn ring<P: From<Vec<u8>> + Into<Vec<u8>>, L: Link<P>>(rank: usize, mut link: L) {
    let ranks = 4;
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for step in 0..50_u8 {
        let microbatch = usize::from(step % 8);
        // As the engine does: a receive may be announced long before it is waited for.
        link.post(before, tag(before, rank, microbatch))
            .expect("nothing has failed");
        link.begin().expect("nothing has failed");
        link.end();
        send(
            &mut link,
            next,
            tag(rank, next, microbatch),
            vec![step, rank as u8],
        );
        let came = recv(&mut link, before, tag(before, rank, microbatch));
        assert_eq!(came, [step, before as u8]);
        link.finish().expect("everything was sent");
    }
}

fn deadline<P: From<Vec<u8>> + Into<Vec<u8>>, L: Link<P>>(rank: usize, mut link: L) {
    if rank == 0 {
        let start = Instant::now();
        refused(&mut link, 1, tag(1, 0, 0));
        assert!(start.elapsed() >= SHORT / 2, "the deadline had not come");
        assert!(start.elapsed() < LONG / 2, "the deadline is long past");
        link.abort("the check is over");
    } else {
        // The rank stays until the other one has given up.
        refused(&mut link, 0, tag(0, 1, 0));
    }
}

fn lost_peer<P: From<Vec<u8>> + Into<Vec<u8>>, L: Link<P>>(rank: usize, mut link: L) {
    if rank == 0 {
        send(&mut link, 1, tag(0, 1, 0), vec![7]);
        link.finish().expect("everything was sent");
    } else {
        assert_eq!(
            recv(&mut link, 0, tag(0, 1, 0)),
            [7],
            "what was sent before still comes"
        );
        refused(&mut link, 0, tag(0, 1, 1));
    }
}

fn abort<P: From<Vec<u8>> + Into<Vec<u8>>, L: Link<P>>(rank: usize, mut link: L) {
    if rank == 2 {
        thread::sleep(PAUSE);
        link.abort("the third rank has had enough");
        return;
    }
    let start = Instant::now();
    let error = refused(&mut link, 1 - rank, tag(1 - rank, rank, 0));
    assert!(start.elapsed() < LONG / 2, "an abort ends a wait at once");
    assert_blames(&error, "the third rank has had enough");
    // And every later one.
    refused(&mut link, 1 - rank, tag(1 - rank, rank, 1));
}

fn assert_blames(error: &Error, reason: &str) {
    let found = matches!(error, Error::Aborted { reason: found, .. } if found.contains(reason));
    assert!(
        found,
        "expected Aborted with the reason {reason:?}, found: {error}"
    );
}

/// An interrupter ends the waits of all ranks, also of those without an interrupter.
fn interrupt<P, L>(links: Vec<L>)
where
    P: From<Vec<u8>> + Into<Vec<u8>> + Send + 'static,
    L: Link<P> + Send + 'static,
{
    let Some(interrupt) = links.first().and_then(Link::interrupter) else {
        return;
    };
    let interrupt = Arc::new(interrupt);
    let waker = thread::spawn(move || {
        thread::sleep(PAUSE);
        interrupt("somebody outside has had enough");
    });
    all_ranks("interrupter", links, |rank, mut link: L| {
        let start = Instant::now();
        let error = refused(&mut link, 1 - rank, tag(1 - rank, rank, 0));
        assert!(
            start.elapsed() < LONG / 2,
            "an interrupter ends a wait at once"
        );
        assert_blames(&error, "somebody outside has had enough");
    });
    waker.join().expect("it interrupts and ends");
}
