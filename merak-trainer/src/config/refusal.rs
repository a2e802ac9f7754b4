//! Why the value of a key is refused.

use serde_json::Value;

/// Why a value was refused; the caller adds the place and the key.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Refusal {
    /// The value has another type than the key, or lies outside the type's range.
    Type,
    /// The value is a number beyond the largest that the type holds.
    Beyond { most: String },
    /// An entry of the table has another type than it may have, or lies outside its range.
    Entry {
        name: &'static str,
        expected: String,
        found: Value,
    },
    /// The text of a table or list cannot be read.
    Syntax { reason: String },
    /// The value is not one of the names that the key knows.
    Choice {
        choices: String,
        nearest: Option<String>,
    },
    /// The value is legal, but what it asks for is not built yet.
    NotAvailable { instead: String },
}
