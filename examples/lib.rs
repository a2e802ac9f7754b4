//! What the numbered examples of this folder share: reading a number from the command line.
//!
//! Each file's first comment says what it shows and how to run it; README.md lists them in order.

use anyhow::{Context, Result, ensure};

/// The `index`-th argument of the command line, a count of at least 1, or `default` where there is
/// none.
///
/// # Errors
/// When the argument is no number, or zero.
pub fn count(index: usize, name: &str, default: usize) -> Result<usize> {
    let Some(text) = std::env::args().nth(index) else {
        return Ok(default);
    };
    let count = text
        .parse()
        .with_context(|| format!("argument {index}, {name}, is a number, found {text:?}"))?;
    ensure!(count > 0, "argument {index}, {name}, is at least 1");
    Ok(count)
}
