//! Checkpoints that outlive their topology, and text generation
