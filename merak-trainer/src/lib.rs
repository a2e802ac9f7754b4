//! The full stack: configuration, data, the training loop, metrics and the merak command
