//! What a microbatch communicates, counted from the programs that ranks run.

use merak_trace::{Axis, Phase, StageProgram, op::Exchange};
use serde::Serialize;
use std::{collections::BTreeMap, fmt};

/// The collectives of one microbatch over an axis, by layer; its `Display` is a table.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Traffic {
    /// In the order in which the layers come.
    pub layers: Vec<LayerTraffic>,
}

/// The collectives of one kind in one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerTraffic {
    /// Path of the layer, as `transformer.h.3`, or the first module of a path without a number.
    pub layer: String,
    /// Name of the collective.
    pub collective: &'static str,
    /// Number of them in the forward.
    pub forward: usize,
    /// Number of them that run again before the backward.
    pub recomputed: usize,
    /// Number of them in the backward.
    pub backward: usize,
    /// Bytes of the whole values of all of them. Over a ring of `T` ranks each sends `2(T-1)/T` of
    /// them in an all-reduce; `(T-1)/T` in an all-gather, in a reduce-scatter, or where keys and
    /// values go round; all gradients that follow these; and a `T`-th of `(T-1)/T` in an
    /// all-to-all.
    pub bytes: usize,
}

impl Traffic {
    /// Counts the collectives over an axis in programs for training, those of recomputation and of
    /// gradients included.
    ///
    /// ```
    /// use merak_tp::{Traffic, default_lists, rewrite};
    /// use merak_trace::models::{self, TraceOptions};
    /// use merak_trace::{Axis, RecomputePlan, StageCuts, StageProgram};
    ///
    /// let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 101, "n_positions": 16,
    ///     "n_embd": 32, "n_layer": 1, "n_head": 4 });
    /// let model = models::from_config(&config)?.trace(&TraceOptions::training(2, 16))?;
    /// let split = rewrite(&model, &default_lists("gpt2").expect("it is known"), 2)?;
    /// let (cuts, plan) = (StageCuts::whole(&split.graph), RecomputePlan::default());
    /// let program = StageProgram::training(&split.graph, &cuts, 0, &plan)?;
    ///
    /// let layer = &Traffic::of([&program], Axis::Tensor).layers[0];
    /// assert_eq!((layer.layer.as_str(), layer.collective), ("transformer.h.0", "all_reduce"));
    /// assert_eq!((layer.forward, layer.backward), (2, 2));
    /// assert_eq!(layer.bytes, 4 * (2 * 16 * 32) * 4); // of [2, 16, 32] f32
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of<'a>(programs: impl IntoIterator<Item = &'a StageProgram>, axis: Axis) -> Self {
        let mut traffic = Self::default();
        let mut known = BTreeMap::new();
        for program in programs {
            let nodes = program.graph.nodes().iter().zip(&program.phases);
            for (node, phase) in nodes.filter(|(node, _)| node.op.communicates() == Some(axis)) {
                let Some(exchange) = Exchange::of(&program.graph, node) else {
                    continue;
                };
                let (layer, collective) = (node.layer(), exchange.name);
                let key = (layer.to_owned(), collective);
                let index = *known.entry(key).or_insert_with(|| {
                    traffic.layers.push(LayerTraffic {
                        layer: layer.to_owned(),
                        collective,
                        forward: 0,
                        recomputed: 0,
                        backward: 0,
                        bytes: 0,
                    });
                    traffic.layers.len() - 1
                });
                let row = &mut traffic.layers[index];
                row.bytes += exchange.whole_bytes;
                *match phase {
                    Phase::Forward => &mut row.forward,
                    Phase::Recompute => &mut row.recomputed,
                    Phase::BackwardInput | Phase::BackwardWeight => &mut row.backward,
                } += exchange.count;
            }
        }
        traffic
    }

    /// All layers together, by collective.
    pub fn total(&self) -> Vec<LayerTraffic> {
        let mut total: Vec<LayerTraffic> = Vec::new();
        for row in &self.layers {
            match total
                .iter_mut()
                .find(|sum| sum.collective == row.collective)
            {
                Some(sum) => {
                    sum.forward += row.forward;
                    sum.recomputed += row.recomputed;
                    sum.backward += row.backward;
                    sum.bytes += row.bytes;
                }
                None => total.push(LayerTraffic {
                    layer: "in total".to_owned(),
                    ..row.clone()
                }),
            }
        }
        total
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<_> = self.layers.iter().cloned().chain(self.total()).collect();
        let width = |name: fn(&LayerTraffic) -> &str, title: usize| {
            let names = rows.iter().map(|row| name(row).len());
            names.fold(title, usize::max)
        };
        let (layer, kind) = (width(|row| &row.layer, 5), width(|row| row.collective, 10));
        writeln!(
            f,
            "{:layer$}  {:kind$}  forward  again  backward  bytes",
            "layer", "collective"
        )?;
        for row in &rows {
            writeln!(
                f,
                "{:layer$}  {:kind$}  {:7}  {:5}  {:8}  {}",
                row.layer, row.collective, row.forward, row.recomputed, row.backward, row.bytes
            )?;
        }
        Ok(())
    }
}
