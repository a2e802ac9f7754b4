//! Tensor-parallel rewriting of a traced model: placements propagate, collectives are inserted
