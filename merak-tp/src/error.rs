//! Reasons why a model cannot be split.

use merak_trace::{Axis, op::Attention};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What splits tables and output layers with a row for each entry of a vocabulary, in the place of
/// a list in reports and messages.
pub(crate) const SPLIT_VOCABULARY: &str = "split vocabulary";

/// Why a model cannot be split over an axis.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size is no multiple of the degree.
    #[error(
        "{module}: {size} {what} cannot be split over tp = {degree} ({list}): {}",
        choice("tp", legal)
    )]
    Indivisible {
        /// Path of the module.
        module: String,
        /// The size.
        size: usize,
        /// What it counts, as `output features`.
        what: &'static str,
        /// The tensor-parallel degree.
        degree: usize,
        /// The list and its entry that asked for the split.
        list: String,
        /// The degrees that divide it, and that all other layers allow; at most one more than are
        /// shown.
        legal: Vec<usize>,
    },
    /// The ranks cannot share the query heads of an attention evenly.
    #[error(
        "{module}: {} cannot be split over {axis} = {degree}: {}",
        counted(*heads, "attention", *axis), choice(axis.degree_name(), legal), axis = axis.degree_name()
    )]
    Heads {
        /// Path of the module.
        module: String,
        /// Its query heads, those of a rank of the tensor axis where the sequence is cut.
        heads: usize,
        /// The axis.
        axis: Axis,
        /// Its degree.
        degree: usize,
        /// Whether they are shared out by every [`SequenceMethod`](crate::SequenceMethod), so that
        /// another one does not help.
        is_bound: bool,
        /// The degrees that share out all heads, and that all other layers allow; at most one more
        /// than are shown.
        legal: Vec<usize>,
    },
    /// The key and value heads can neither be shared out nor repeated.
    #[error(
        "{module}: {} can neither be split over {axis} = {degree} nor repeated on it: {}",
        counted(*kv_heads, "key/value", *axis), choice(axis.degree_name(), legal), axis = axis.degree_name()
    )]
    KvHeads {
        /// Path of the module.
        module: String,
        /// Its key and value heads, those of a rank of the tensor axis where the sequence is cut.
        kv_heads: usize,
        /// The axis.
        axis: Axis,
        /// Its degree.
        degree: usize,
        /// Whether they are shared out by every [`SequenceMethod`](crate::SequenceMethod), so that
        /// another one does not help.
        is_bound: bool,
        /// The degrees that share out all heads, and that all other layers allow; at most one more
        /// than are shown.
        legal: Vec<usize>,
    },
    /// The ranks cannot share the sequence evenly.
    #[error(
        "{module}: a sequence of {len} cannot be cut over {axis} = {degree}{}: {}, or take another length, such as {}",
        if *axis == Axis::Tensor { " (sequence parallelism)" } else { "" },
        choice(axis.degree_name(), legal), len.next_multiple_of(*degree), axis = axis.degree_name()
    )]
    Sequence {
        /// Path of the module whose results are to be cut.
        module: String,
        /// Length of the sequence.
        len: usize,
        /// The axis.
        axis: Axis,
        /// Its degree.
        degree: usize,
        /// The degrees that divide it, and that all other layers allow; at most one more than are
        /// shown.
        legal: Vec<usize>,
    },
    /// Sequences that each tensor rank has a slice of cannot be cut over the sequence axis too.
    #[error(
        "{node}: the sequence has {len} positions for each of tp = {tp} ranks (sequence parallelism), which cannot be cut over \
         sp = {degree}: choose a length that is a multiple of \"tp\" x \"sp\", which is {}",
        tp * degree
    )]
    NestedSequence {
        /// Name of the node.
        node: String,
        /// Positions of a tensor rank.
        len: usize,
        /// The tensor-parallel degree.
        tp: usize,
        /// The degree of the sequence axis.
        degree: usize,
    },
    /// A trained layer works on whole sequences on every rank of the sequence axis.
    #[error(
        "sp = {degree}: {param} is used on whole sequences, by {node}, which has no form for slices of a sequence: \
         set \"sp\" to 1; models of texts have none of these"
    )]
    WholeSequence {
        /// The degree of the sequence axis.
        degree: usize,
        /// Name of the parameter.
        param: String,
        /// Name of the layer's node.
        node: String,
    },
    /// A dropout whose masks would depend on the size of a microbatch.
    #[error(
        "{node}: dropout counts samples along dimension 0, which holds the sequence: use `Module::dropout_by` with the \
         dimension of the samples"
    )]
    DropoutOfPositions {
        /// Name of the node.
        node: String,
    },
    /// A module is to be split both ways.
    #[error(
        "{module} is to be column-parallel ({col}) and row-parallel ({row}): take it out of one list"
    )]
    BothKinds {
        /// Path of the module.
        module: String,
        /// The entry that says col.
        col: String,
        /// The entry that says row.
        row: String,
    },
    /// The lists name no module of the model.
    #[error("tp = {degree} splits nothing: no {kinds} of the model is matched by {patterns}")]
    NothingMatched {
        /// The tensor-parallel degree.
        degree: usize,
        /// What the entries can match, in words.
        kinds: String,
        /// All entries of the lists.
        patterns: String,
    },
    /// The lists do not say how to split a model.
    #[error(
        "tp = {degree} needs col_para_list and row_para_list, input_output_mapping, weight_change_list or conv_para_list; found \
         {found}: set them with `set_tp_layer_lists`"
    )]
    IncompleteLists {
        /// The tensor-parallel degree.
        degree: usize,
        /// Names of the lists that were given.
        found: String,
    },
    /// Neither the user nor the table of defaults has lists for the model.
    #[error(
        "tp = {degree}: model type \"{family}\" has no default layer lists and none were set: name the linear layers that are \
         split by output features in `col_para_list` and those split by input features in `row_para_list` with \
         `set_tp_layer_lists`, or let `auto_lists` choose them; defaults exist for {known}"
    )]
    NoLists {
        /// The tensor-parallel degree.
        degree: usize,
        /// The model type.
        family: String,
        /// The model types of the table.
        known: String,
    },
    /// A dimension that what an entry names does not have.
    #[error("{module} has {dims}, so dimension {dim} cannot be split ({list})")]
    NoDimension {
        /// Path of the module, or name of the parameter.
        module: String,
        /// Its dimensions, as `dimensions 0 to 1`.
        dims: String,
        /// The dimension asked for.
        dim: usize,
        /// The list and its entry.
        list: String,
    },
    /// No layer can be split without gathering what it makes.
    #[error(
        "tp = {degree} splits nothing: no two linear layers of the model follow each other so that the parts of one are all that \
         the next needs; name layers with `set_tp_layer_lists`"
    )]
    NothingToSplit {
        /// The tensor-parallel degree.
        degree: usize,
    },
    /// The degree is invalid.
    #[error("{} = 0 is no number of ranks, expected 1 or more", axis.degree_name())]
    ZeroDegree {
        /// The axis.
        axis: Axis,
    },
    /// The model was rewritten before.
    #[error("{place} is split over the {axis} axis already")]
    AlreadySplit {
        /// Name of the node or parameter.
        place: String,
        /// The axis.
        axis: Axis,
    },
    /// A rule made a value of another type than its placement says.
    #[error("{node}: the rule gave {found}, its placement says {expected}")]
    LocalType {
        /// Name of the node.
        node: String,
        /// The type by the placement.
        expected: String,
        /// The type of the node that was made.
        found: String,
    },
    /// The rewritten node fails its checks.
    #[error(transparent)]
    Graph(#[from] merak_trace::Error),
}

impl Error {
    /// The same, told of lists that are the defaults of a family, which nobody wrote.
    #[must_use]
    pub fn of_defaults(mut self) -> Self {
        if let Self::Indivisible { list, .. } = &mut self
            && *list != SPLIT_VOCABULARY
        {
            list.insert_str(0, "default ");
        }
        self
    }

    /// Whether a size or heads prevent the split.
    pub(crate) fn is_misfit(&self) -> bool {
        matches!(
            self,
            Self::Indivisible { .. } | Self::Heads { .. } | Self::KvHeads { .. }
        )
    }

    /// The degrees to choose from, if a size or heads prevent the split.
    pub(crate) fn legal_mut(&mut self) -> Option<&mut Vec<usize>> {
        match self {
            Self::Indivisible { legal, .. }
            | Self::Heads { legal, .. }
            | Self::KvHeads { legal, .. }
            | Self::Sequence { legal, .. } => Some(legal),
            _ => None,
        }
    }

    /// The query heads of an attention that the ranks of an axis cannot share.
    pub(crate) fn heads(
        module: &str,
        spec: &Attention,
        (axis, degree): (Axis, usize),
        is_bound: bool,
    ) -> Self {
        Self::Heads {
            module: module.to_owned(),
            heads: spec.heads,
            axis,
            degree,
            is_bound,
            legal: shares_of_heads(spec),
        }
    }
}

/// The degrees that share out the query heads of an attention, and share out or repeat its key
/// heads.
pub(crate) fn shares_of_heads(spec: &Attention) -> Vec<usize> {
    let mut degrees = divisors(spec.heads);
    degrees.retain(|&degree| {
        spec.kv_heads.is_multiple_of(degree) || degree.is_multiple_of(spec.kv_heads)
    });
    degrees
}

/// A number of heads of a kind in words: on the sequence axis they are those of a rank.
fn counted(heads: usize, kind: &str, axis: Axis) -> String {
    let plural = if heads == 1 { "" } else { "s" };
    let whose = match axis {
        Axis::Sequence => " of a rank",
        _ => "",
    };
    format!("{heads} {kind} head{plural}{whose}")
}

/// The divisors of a size, ascending.
pub(crate) fn divisors(size: usize) -> Vec<usize> {
    let small = (1..=size.isqrt()).filter(|divisor| size.is_multiple_of(*divisor));
    let mut all: Vec<_> = small
        .flat_map(|divisor| [divisor, size / divisor])
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Degrees that a message names; dots stand for more.
pub(crate) const MOST_LISTED: usize = 12;

/// What to do about a degree: there may be no choice.
fn choice(name: &str, legal: &[usize]) -> String {
    match legal {
        [only] => format!("set \"{name}\" to {only}"),
        _ => format!("choose \"{name}\" among {}", listed(legal)),
    }
}

/// `1, 2, 4`, and dots after [`MOST_LISTED`] degrees.
fn listed(degrees: &[usize]) -> String {
    let shown = degrees.iter().take(MOST_LISTED);
    let mut words: Vec<_> = shown.map(ToString::to_string).collect();
    if degrees.len() > MOST_LISTED {
        words.push("..".to_owned());
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_head_and_one_degree_are_told_as_one() {
        let error = Error::Heads {
            module: "h.0.attn".into(),
            heads: 1,
            axis: Axis::Sequence,
            degree: 2,
            is_bound: false,
            legal: vec![1],
        };
        assert_eq!(
            error.to_string(),
            "h.0.attn: 1 attention head of a rank cannot be split over sp = 2: set \"sp\" to 1"
        );
    }

    #[test]
    fn divisors_are_listed_in_order_and_not_without_end() {
        assert_eq!(divisors(12), [1, 2, 3, 4, 6, 12]);
        assert_eq!(divisors(9), [1, 3, 9]);
        assert_eq!(
            listed(&divisors(768)),
            "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, .."
        );
    }
}
