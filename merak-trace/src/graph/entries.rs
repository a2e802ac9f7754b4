//! What a graph consists of: ids, values, nodes and ports; and its setting for collectives.

use crate::{Op, TensorType};
use serde::{Deserialize, Serialize};
use std::{fmt, sync::Arc};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub u32);

        impl $name {
            /// The position in the graph's table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            pub(crate) fn at(index: usize) -> Self {
                Self(u32::try_from(index).expect("a graph has fewer than 2^32 entries"))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}
id!(
    /// A value of a graph; prints as `%3`.
    ValueId,
    "%"
);
id!(
    /// A node of a graph; prints as `n3`.
    NodeId,
    "n"
);
id!(
    /// A parameter of a graph; prints as `p3`.
    ParamId,
    "p"
);

/// The origin of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Given from outside under the name at this position of
    /// [`Graph::inputs`](super::Graph::inputs).
    Input(usize),
    /// Read from a parameter.
    Param(ParamId),
    /// A result of a node.
    Node {
        /// The node.
        node: NodeId,
        /// Which of its results.
        result: usize,
    },
}

/// The type and the source of a value.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueInfo {
    /// Shape and element type.
    pub ty: TensorType,
    /// Its origin.
    pub source: Source,
}

/// One operation of a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Unique name: the module path, the operation and, where needed, a number.
    pub name: Arc<str>,
    /// Path of the module that called the operation, as `transformer.h.3.attn`.
    pub scope: Arc<str>,
    /// Its operation.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results.
    pub outputs: Vec<ValueId>,
}

impl Node {
    /// The layer of the model that it belongs to: the path up to its first number, or the first
    /// module.
    ///
    /// ```
    /// use merak_trace::{DType, Graph, Op, TensorType};
    ///
    /// let mut graph = Graph::new();
    /// let x = graph.add_input("x", TensorType::new([2], DType::F32));
    /// graph.add_node(&"transformer.h.3.attn".into(), Op::Identity, vec![x])?;
    /// assert_eq!(graph.nodes()[0].layer(), "transformer.h.3");
    /// # Ok::<(), merak_trace::Error>(())
    /// ```
    pub fn layer(&self) -> &str {
        let mut end = 0;
        for part in self.scope.split('.') {
            end += part.len();
            if part.parse::<usize>().is_ok() {
                return &self.scope[..end];
            }
            end += 1;
        }
        let first = self.scope.split('.').next().unwrap_or_default();
        if first.is_empty() { "(root)" } else { first }
    }
}

/// A named value at the border of a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct Port {
    /// The name by which data is bound.
    pub name: String,
    /// The value.
    pub value: ValueId,
}

/// The work that runs while collectives pass.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Overlap {
    /// Nothing: each collective is waited for.
    #[default]
    None,
    /// The other half of the product whose parts are summed, and gradients of weights.
    Linear,
    /// The other half of the microbatch, within a layer of the model.
    Block,
    /// The other half of the microbatch, over the borders of layers too.
    Blocks,
}
