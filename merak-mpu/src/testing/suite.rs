//! What every engine must do: the same checks for threads, sockets, MPI and NCCL.
//!
//! A check is a function that all ranks of a world call together; it makes its own groups and
//! panics where an engine is wrong. [`CHECKS`] are those for a healthy world of any size, to be run
//! under any launcher. [`faults`] breaks worlds on purpose, so it needs a function that makes new
//! ones.
//!
//! ```
//! use merak_mpu::testing::{suite, world};
//! for (_, check) in suite::CHECKS {
//!     world(2, |member| check(&member));
//! }
//! ```

mod collectives;
mod faults;
mod messages;
mod places;

use crate::Member;

pub use collectives::{
    collectives_of_all_types, exchanges_of_parts, groups_side_by_side, late_calls_of_broadcasts,
    single_groups, splits, waits_in_any_order,
};
pub use faults::faults;
pub use messages::{message_order, receipts_are_polled, ring_exchange};
pub use places::{localities, memory_stays_put};

/// A check that all ranks of a world run together.
pub type Check = fn(&Member);

/// All checks for a healthy world, with their names.
pub const CHECKS: &[(&str, Check)] = &[
    ("collectives_of_all_types", collectives_of_all_types),
    ("waits_in_any_order", waits_in_any_order),
    ("exchanges_of_parts", exchanges_of_parts),
    ("late_calls_of_broadcasts", late_calls_of_broadcasts),
    ("groups_side_by_side", groups_side_by_side),
    ("splits", splits),
    ("single_groups", single_groups),
    ("ring_exchange", ring_exchange),
    ("message_order", message_order),
    ("receipts_are_polled", receipts_are_polled),
    ("localities", localities),
    ("memory_stays_put", memory_stays_put),
];
