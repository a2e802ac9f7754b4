//! The report of a rewrite, for people.

use crate::SplitKind;
use merak_trace::{Axis, Graph, needs_grad, op::Exchange};
use serde::Serialize;
use std::fmt;

/// The splits, gathers and communication of a rewrite; its `Display` is a page of text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The axis over which the model is split.
    pub axis: Axis,
    /// The ranks of the axis.
    pub degree: usize,
    /// The layers that are split, in graph order.
    pub modules: Vec<SplitModule>,
    /// Layers that are in the lists but stay whole, because their key or value heads are fewer than
    /// ranks.
    pub kept_whole: Vec<KeptWhole>,
    /// Split values that an operation needs whole.
    pub gathers: Vec<Gather>,
    /// Entries of the lists that match nothing: worth a warning.
    pub unmatched: Vec<String>,
    /// Why layers were chosen, where no lists said so.
    pub choices: Vec<Choice>,
    /// The communication of one microbatch over the axis, by collective and direction.
    pub collectives: Vec<CollectiveBytes>,
}

/// A layer that is split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SplitModule {
    /// Path of the module.
    pub module: String,
    /// Its split.
    pub kind: SplitKind,
    /// The list and its entry.
    pub matched_by: String,
    /// Input features of the whole layer.
    pub in_features: usize,
    /// Output features of the whole layer.
    pub out_features: usize,
    /// Parts of the output features that are split one by one: 3 in a fused query, key and value
    /// projection.
    pub parts: usize,
    /// Features of padding on all ranks together, where the degree does not divide a vocabulary.
    pub padding: usize,
}

/// A layer whose heads each rank needs whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeptWhole {
    /// Path of the module.
    pub module: String,
    /// The key or value heads that it makes.
    pub kv_heads: usize,
}

/// A split value that is made whole for an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gather {
    /// Name of the node, parameter or input.
    pub value: String,
    /// Name of the first node that needs it whole.
    pub needed_by: String,
    /// Bytes of the whole value.
    pub bytes: usize,
    /// Whether it holds logits of a split vocabulary, which a loss without a split form needs:
    /// worth a warning.
    pub is_logits: bool,
}

/// The choice for the layers of one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// Their path, with `{i}` in place of numbers.
    pub layers: String,
    /// Their split; `None`: whole on every rank.
    pub kind: Option<SplitKind>,
    /// Elements of their matrices.
    pub elements: usize,
    /// Why.
    pub reason: String,
}

/// The collectives of one kind and direction in one microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CollectiveBytes {
    /// Name of the collective.
    pub collective: &'static str,
    /// Whether they run in the backward.
    pub backward: bool,
    /// Number of them.
    pub count: usize,
    /// Bytes of the whole values together. Over a ring of `T` ranks each sends `2(T-1)/T` of them
    /// in an all-reduce; `(T-1)/T` in an all-gather, in a reduce-scatter, or where keys and values
    /// go round; and all gradients that follow these.
    pub bytes: usize,
}

impl Report {
    pub(crate) fn new(axis: Axis, degree: usize) -> Self {
        Self {
            axis,
            degree,
            modules: Vec::new(),
            kept_whole: Vec::new(),
            gathers: Vec::new(),
            unmatched: Vec::new(),
            choices: Vec::new(),
            collectives: Vec::new(),
        }
    }

    /// Bytes of all collectives of one microbatch.
    pub fn bytes(&self) -> usize {
        self.collectives.iter().map(|traffic| traffic.bytes).sum()
    }

    /// A line for each layer that stays whole and for each split value that is gathered.
    pub fn made_whole(&self) -> impl Iterator<Item = String> {
        let ranks = self.degree;
        let kept = self.kept_whole.iter().map(move |kept| {
            let KeptWhole { module, kv_heads } = kept;
            format!("whole {module}: {kv_heads} key/value heads are repeated over {ranks} ranks")
        });
        kept.chain(self.gathers.iter().map(ToString::to_string))
    }

    /// A line for each entry of the lists that matches nothing.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        let unmatched = self.unmatched.iter();
        unmatched.map(|entry| format!("warning: {entry} matches nothing"))
    }

    /// Adds up the collectives of a rewritten graph and of its backward.
    pub(crate) fn count_collectives(&mut self, graph: &Graph) {
        let needs_grad = needs_grad(graph, &[]);
        for node in graph.nodes() {
            let Some(exchange) = Exchange::of(graph, node) else {
                continue;
            };
            let (count, bytes) = (exchange.count, exchange.whole_bytes);
            let ring = node.op.ring();
            if ring.is_some_and(|ring| ring.slice.axis == self.axis) {
                self.count(exchange.name, false, (count, bytes));
                if node.inputs[..3]
                    .iter()
                    .any(|input| needs_grad[input.index()])
                {
                    self.count(exchange.name, true, (2 * count, 2 * bytes));
                }
                continue;
            }
            let region = node.op.region();
            let Some(region) = region.filter(|region| region.axis == self.axis) else {
                continue;
            };
            // The whole value, forward and backward alike.
            if let Some(collective) = region.kind.forward() {
                self.count(collective.name(), false, (count, bytes));
            }
            let backward = region.kind.backward();
            if let Some(collective) = backward.filter(|_| needs_grad[node.inputs[0].index()]) {
                self.count(collective.name(), true, (count, bytes));
            }
        }
        self.collectives
            .sort_by_key(|traffic| (traffic.backward, traffic.collective));
    }

    fn count(&mut self, collective: &'static str, backward: bool, (count, bytes): (usize, usize)) {
        let known = self
            .collectives
            .iter()
            .position(|traffic| traffic.collective == collective && traffic.backward == backward);
        let index = known.unwrap_or_else(|| {
            self.collectives.push(CollectiveBytes {
                collective,
                backward,
                count: 0,
                bytes: 0,
            });
            self.collectives.len() - 1
        });
        self.collectives[index].count += count;
        self.collectives[index].bytes += bytes;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let degree = self.degree;
        if self.axis == Axis::Sequence {
            writeln!(f, "sequence parallel over {degree} ranks")?;
        } else {
            let layers = self.modules.len();
            writeln!(
                f,
                "tensor parallel over {degree} ranks: {layers} layers split"
            )?;
        }
        let names = self.modules.iter().map(|module| module.module.len());
        let width = names.max().unwrap_or(0);
        for module in &self.modules {
            writeln!(f, "  {module:width$}")?;
        }
        for line in self.made_whole() {
            writeln!(f, "  {line}")?;
        }
        for traffic in &self.collectives {
            writeln!(f, "  {traffic}")?;
        }
        for warning in self.warnings() {
            writeln!(f, "  {warning}")?;
        }
        for choice in &self.choices {
            writeln!(f, "  {choice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for SplitModule {
    /// The width is that of the module's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = f.width().unwrap_or(0);
        write!(
            f,
            "{} {:width$}  {} -> {}",
            self.kind, self.module, self.in_features, self.out_features
        )?;
        if self.parts > 1 {
            write!(f, " in {} parts", self.parts)?;
        }
        if self.padding > 0 {
            write!(f, " and {} of padding", self.padding)?;
        }
        write!(f, "  ({})", self.matched_by)
    }
}

impl fmt::Display for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            value,
            needed_by,
            bytes,
            ..
        } = self;
        write!(
            f,
            "gather {value}: {needed_by} needs it whole, {bytes} bytes"
        )
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self
            .kind
            .map_or("whole".to_owned(), |kind| kind.to_string());
        write!(f, "auto {kind} {}: {}", self.layers, self.reason)
    }
}

impl fmt::Display for CollectiveBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.backward { "backward" } else { "forward" };
        let (collective, count, bytes) = (self.collective, self.count, self.bytes);
        write!(
            f,
            "{direction} {collective}: {count} per microbatch, {bytes} bytes"
        )
    }
}
