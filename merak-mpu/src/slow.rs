//! Links of a given speed, to measure what overlaps with computing.

use crate::{
    Error, Member, Result, Started,
    bell::FOREVER,
    wrapped::{Between, Start},
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The time that a link adds to a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSpeed {
    /// From the start of a collective to its first byte.
    pub latency: Duration,
    /// Bytes of the member's buffer that pass in a second, at least 1; collectives of a rank follow
    /// each other.
    pub bytes_per_second: f64,
}

/// The link of one rank.
///
/// ```
/// use merak_mpu::{LinkSpeed, ReduceOp, SlowLink, threads};
/// use std::time::{Duration, Instant};
///
/// let speed = LinkSpeed { latency: Duration::from_millis(200), bytes_per_second: 1e9 };
/// threads::run(2, threads::WorldOptions::default(), |member| {
///     let link = SlowLink::new(speed, "world")?;
///     let member = link.joined_by(&member);
///     let start = Instant::now();
///     member.world_group()?.all_reduce_vec(vec![1.0_f32], ReduceOp::Sum)?;
///     assert!(start.elapsed() >= speed.latency && link.busy() > Duration::ZERO);
///     assert!(link.waited() > Duration::ZERO);
///     Ok::<_, merak_mpu::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct SlowLink {
    speed: LinkSpeed,
    group: &'static str,
    wire: Arc<Mutex<Wire>>,
}

#[derive(Debug)]
struct Wire {
    free_at: Instant,
    busy: Duration,
    waited: Duration,
}

impl SlowLink {
    /// A link for the collectives of the groups with a name.
    ///
    /// # Errors
    /// [`Error::LinkSpeed`] for less than a byte a second, or a latency of decades.
    pub fn new(speed: LinkSpeed, group: &'static str) -> Result<Self> {
        let LinkSpeed {
            latency,
            bytes_per_second,
        } = speed;
        // NaN is no speed either.
        if !(bytes_per_second >= 1.0 && latency <= FOREVER) {
            return Err(Error::LinkSpeed {
                bytes_per_second,
                latency,
                longest: FOREVER,
            });
        }
        let wire = Wire {
            free_at: Instant::now(),
            busy: Duration::ZERO,
            waited: Duration::ZERO,
        };
        Ok(Self {
            speed,
            group,
            wire: Arc::new(Mutex::new(wire)),
        })
    }

    /// The member with its groups on the link. What it computes does not change.
    pub fn joined_by(&self, member: &Member) -> Member {
        member.behind(self.clone())
    }

    /// The time for which the wire was busy so far.
    pub fn busy(&self) -> Duration {
        self.wire().busy
    }

    /// The time for which the rank waited for the link so far, as no computing has hidden it.
    pub fn waited(&self) -> Duration {
        self.wire().waited
    }

    /// Takes the wire for some bytes; the moment at which they have arrived.
    fn send(&self, bytes: usize) -> Instant {
        let time = Duration::from_secs_f64(bytes as f64 / self.speed.bytes_per_second);
        let mut wire = self.wire();
        wire.free_at = wire.free_at.max(Instant::now()) + time;
        wire.busy += time;
        wire.free_at + self.speed.latency
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Between for SlowLink {
    fn start(&self, start: Start<'_>) -> Started {
        if start.group != self.group {
            return start.go();
        }
        let bytes = start.bytes();
        let pending = start.go()?;
        let (arrives, link) = (self.send(bytes), self.clone());
        Ok(pending.delayed_until(arrives, move |delay| link.wire().waited += delay))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_that_carries_nothing_is_refused_before_any_collective() {
        let link = |latency, bytes_per_second| {
            let speed = LinkSpeed {
                latency,
                bytes_per_second,
            };
            SlowLink::new(speed, "world").map(drop)
        };
        for speed in [0.0, -1.0, f64::NAN, 1e-300, 0.5] {
            let text = link(Duration::ZERO, speed).unwrap_err().to_string();
            let start =
                format!("a link of {speed} bytes a second and a latency of 0ns is too slow");
            assert!(text.starts_with(&start), "{text}");
        }
        assert!(link(Duration::MAX, 1.0).is_err());
        for speed in [1.0, 1e9, f64::INFINITY] {
            assert!(link(Duration::from_secs(1), speed).is_ok(), "{speed}");
        }
    }
}
