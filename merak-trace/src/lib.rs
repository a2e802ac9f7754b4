//! A typed graph of a model: symbolic tracing, autodiff, backends and model definitions
