//! The programs of the course beside each other.
//!
//! - `tch`: example 15 gives the numbers of example 13.

mod tch;
