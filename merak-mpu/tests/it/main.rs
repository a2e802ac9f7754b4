//! merak-mpu from outside.

/// Waits allocate little, however many ranks wait.
mod allocations;
/// candle's tensors in collectives and messages.
#[cfg(feature = "candle")]
mod candle;
/// Memory of devices over an engine that moves host memory.
#[cfg(unix)]
mod devices;
/// Failures of ranks and what the others hear.
mod faults;
/// Processes of two hosts, and a cable that is cut.
#[cfg(target_os = "linux")]
mod hosts;
/// Collectives equal their serial definition, for random types, lengths and values.
mod laws;
/// Places, neighbours and groups of every rank of a 2 x 2 x 2 x 2 world.
mod mpu;
/// Ranks that are processes: what the others hear when one is killed, stopped or wrong.
#[cfg(unix)]
mod processes;
/// Programs of collectives and messages between any ranks.
#[cfg(unix)]
mod program;
/// Collectives of threads are computed though nobody waits for them.
mod progress;
/// How processes find each other, and whom they do not let in.
#[cfg(unix)]
mod rendezvous;
/// Every engine passes the suite of all engines.
mod suite;
/// libtorch's tensors in collectives and messages.
#[cfg(feature = "tch")]
mod tch;
/// The laws that hold for tensors of every library; bodies of tests, as `cfg(test)` tells clippy.
#[cfg(test)]
#[cfg(any(feature = "candle", feature = "tch"))]
mod tensors;
/// Ranks that share cores compute by turns.
mod turns;
/// Which types may cross threads, and which traits are dyn-safe.
mod types;
