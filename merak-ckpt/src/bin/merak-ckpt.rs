//! The `merak-ckpt` command.
fn main() {}
