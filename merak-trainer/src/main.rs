//! The `merak` command.
fn main() {}
