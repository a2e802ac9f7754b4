//! Small pipelines whose shortest schedules a solver has found (`goldens/optima.py`).

use merak_pipe::{Auto, AutoLimits, Costs, Result, Size, auto};

/// A pipeline, and the makespan of the shortest schedule that is known.
#[derive(serde::Deserialize)]
pub(crate) struct Solved {
    pub(crate) ranks: usize,
    pub(crate) microbatches: usize,
    pub(crate) chunks: usize,
    /// Most microbatches that a rank keeps.
    pub(crate) limit: Option<f64>,
    #[serde(rename = "F")]
    pub(crate) forward: Vec<f64>,
    #[serde(rename = "I")]
    pub(crate) input_grad: Vec<f64>,
    #[serde(rename = "W")]
    pub(crate) weight_grad: Vec<f64>,
    #[serde(rename = "C")]
    pub(crate) hop: Vec<f64>,
    pub(crate) optimum: f64,
    /// No schedule of the placements that the solver tried is shorter.
    pub(crate) bound: f64,
}

impl Solved {
    pub(crate) fn size(&self) -> Size {
        Size::new(self.ranks, self.microbatches).with_chunks(self.chunks)
    }

    /// The schedule that `auto` finds within the limit.
    pub(crate) fn search(&self) -> Result<Auto> {
        let size = self.size();
        let costs = Costs {
            forward: self.forward.clone(),
            input_grad: self.input_grad.clone(),
            weight_grad: self.weight_grad.clone(),
            recompute: vec![0.0; size.stages()],
            hop: self.hop.clone(),
            overlap: 1.0,
        };
        let limit = |limit| vec![limit; self.ranks];
        let limits = AutoLimits {
            peak_activations: self.limit.map_or_else(Vec::new, limit),
            ..AutoLimits::default()
        };
        auto(size, &costs, &limits)
    }
}
