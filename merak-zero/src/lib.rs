//! Sharded optimizers over flat buckets: ZeRO, clipping by the true global norm, learning-rate schedules
