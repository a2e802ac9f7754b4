//! Samples: their order, their names, their evaluation.
