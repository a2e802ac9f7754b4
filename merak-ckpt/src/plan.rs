//! Which rank of a topology writes which piece of which tensor.

use crate::cut::share;
use crate::{Error, Kind, Layout, Piece, Result, ShardKind, TensorEntry, Topology, format};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;

/// Most ranks of a topology that checkpoints are rewritten for.
const MAX_RANKS: usize = 1 << 16;

/// Which pipeline stage holds which tensor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Stages {
    /// Parameters in natural order of their names (numbers by value, so `h.2` comes before
    /// `h.10`), cut where the bytes are split most evenly.
    ///
    /// This is not the order in which a model uses them; it matters to no reader.
    #[default]
    Even,
    /// The stage of each name, as a partition of the model has it.
    Named(BTreeMap<String, usize>),
}

/// A file that is to be written, and what it holds.
#[derive(Debug, PartialEq)]
pub(crate) struct PlannedFile {
    pub(crate) kind: ShardKind,
    pub(crate) rank: usize,
    pub(crate) pieces: Vec<PlannedPiece>,
}

/// A piece that one rank writes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PlannedPiece {
    /// Position in the table of tensors.
    pub(crate) tensor: usize,
    pub(crate) layout: Layout,
    /// Flat range of the local tensor, where it is not all of it.
    pub(crate) range: Option<Range<usize>>,
}

impl PlannedPiece {
    /// The piece, by the names of the table that the plan was made for.
    pub(crate) fn piece<'a>(&'a self, tensors: &'a [TensorEntry]) -> Piece<'a> {
        let tensor = &tensors[self.tensor];
        Piece {
            kind: &tensor.kind,
            name: &tensor.name,
            dtype: tensor.dtype,
            layout: &self.layout,
            range: self.range.clone(),
        }
    }
}

/// Deals tensors out to the ranks of a topology: stages by name, tensor-parallel slices by the
/// tensors' cuts, ZeRO parts as flat ranges of each rank's tensors one after the other (state from
/// stage 1, parameters at stage 3). What several ranks hold belongs to the first of them.
pub(crate) fn plan(
    tensors: &[TensorEntry],
    topology: Topology,
    stages: &Stages,
) -> Result<Vec<PlannedFile>> {
    check_degrees(topology)?;
    check_boxes(tensors, topology.tp)?;
    let stage_of = stages_of(tensors, topology.pp, stages)?;
    let mut files = Vec::new();
    for (stage, tp_rank) in pairs(topology.pp, topology.tp) {
        let mut dealt = vec![[Vec::new(), Vec::new()]; topology.dp];
        for kind in kinds(tensors) {
            let is_parameter = *kind == Kind::Parameter;
            let local = local_tensors(tensors, kind, (tp_rank, topology.tp), |name| {
                stage_of[name] == stage
            })?;
            let divides = topology.zero_stage >= kind.divided_from();
            let degree = if divides { topology.dp } else { 1 };
            for (dp_rank, dealt) in dealt.iter_mut().take(degree).enumerate() {
                dealt[usize::from(!is_parameter)].extend(zero_part(&local, dp_rank, degree));
            }
        }
        for (dp_rank, [model, optimizer]) in dealt.into_iter().enumerate() {
            let rank = (stage * topology.dp + dp_rank) * topology.sp * topology.tp + tp_rank;
            for (kind, pieces) in [(ShardKind::Model, model), (ShardKind::Optimizer, optimizer)] {
                if !pieces.is_empty() {
                    files.push(PlannedFile { kind, rank, pieces });
                }
            }
        }
    }
    let pieces = files.iter().flat_map(|file| &file.pieces);
    let slices: usize = pieces.map(|piece| piece.layout.parts().len()).sum();
    if slices > format::MAX_SLICES {
        return Err(Error::InvalidOption {
            key: "dp, tp, pp",
            found: format!(
                "{}, {}, {}, which makes {slices} slices",
                topology.dp, topology.tp, topology.pp
            ),
            expected: "degrees that make 4194304 at most",
        });
    }
    Ok(files)
}

/// Checks that `tp` ranks cut no tensor into more boxes than the format allows.
fn check_boxes(tensors: &[TensorEntry], tp: usize) -> Result<()> {
    for tensor in tensors.iter().filter(|tensor| tensor.num_elements() > 0) {
        let parts = cut_of(tensors, tensor).map_or(&[][..], |cut| &cut.parts);
        let boxes = parts.iter().map(|part| tp.min(*part));
        let boxes = boxes.fold(0, usize::saturating_add);
        if tp > 1 && boxes > format::MAX_BOXES_PER_TENSOR {
            return Err(Error::InvalidOption {
                key: "tp",
                found: format!("{tp}, which cuts `{}` into {boxes} boxes", tensor.name),
                expected: "a degree that makes 4096 at most",
            });
        }
    }
    Ok(())
}

fn check_degrees(topology: Topology) -> Result<()> {
    let Topology { dp, tp, pp, sp, .. } = topology;
    let ranks = [dp, tp, pp, sp]
        .iter()
        .try_fold(1_usize, |n, &degree| n.checked_mul(degree));
    if !ranks.is_some_and(|ranks| (1..=MAX_RANKS).contains(&ranks)) {
        return Err(Error::InvalidOption {
            key: "dp, tp, pp",
            found: format!("{dp}, {tp}, {pp}"),
            expected: "degrees of 1 or more with a product of at most 65536",
        });
    }
    if topology.zero_stage > 3 {
        return Err(Error::InvalidOption {
            key: "zero",
            found: topology.zero_stage.to_string(),
            expected: "0, 1, 2 or 3",
        });
    }
    Ok(())
}

fn pairs(stages: usize, ranks: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..stages).flat_map(move |stage| (0..ranks).map(move |rank| (stage, rank)))
}

/// The kinds of a sorted table.
fn kinds(tensors: &[TensorEntry]) -> Vec<&Kind> {
    let mut kinds: Vec<_> = tensors.iter().map(|tensor| &tensor.kind).collect();
    kinds.dedup();
    kinds
}

/// What one tensor-parallel rank of one stage writes of a kind, before ZeRO divides it.
fn local_tensors(
    tensors: &[TensorEntry],
    kind: &Kind,
    (rank, degree): (usize, usize),
    is_here: impl Fn(&str) -> bool,
) -> Result<Vec<(usize, Layout)>> {
    let mut local = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        if tensor.kind != *kind || !is_here(&tensor.name) {
            continue;
        }
        match cut_of(tensors, tensor) {
            Some(cut) => local.push((index, cut.layout(&tensor.shape, rank, degree)?)),
            None if rank == 0 => local.push((index, Layout::whole(&tensor.shape))),
            None => {}
        }
    }
    Ok(local)
}

/// A tensor's cut; optimizer state without one of its own has that of its parameter.
fn cut_of<'a>(tensors: &'a [TensorEntry], tensor: &'a TensorEntry) -> Option<&'a crate::Cut> {
    tensor.cut.as_ref().or_else(|| {
        let key = (&Kind::Parameter, tensor.name.as_str());
        let found = tensors
            .binary_search_by(|other| (&other.kind, other.name.as_str()).cmp(&key))
            .ok()?;
        let parameter = &tensors[found];
        parameter
            .cut
            .as_ref()
            .filter(|_| parameter.shape == tensor.shape)
    })
}

/// A replica's share of tensors that lie one after the other.
fn zero_part(local: &[(usize, Layout)], rank: usize, degree: usize) -> Vec<PlannedPiece> {
    let sizes = local.iter().map(|(_, layout)| layout.num_local_elements());
    let own = share(sizes.sum(), rank, degree);
    let (mut begin, mut pieces) = (0, Vec::new());
    for (tensor, layout) in local {
        let size = layout.num_local_elements();
        let at = |flat: usize| flat.clamp(begin, begin + size) - begin;
        let range = at(own.start)..at(own.end);
        begin += size;
        // A tensor without elements is noted once, so that its name and shape are not lost.
        if !range.is_empty() || size == 0 && rank == 0 {
            pieces.push(PlannedPiece {
                tensor: *tensor,
                layout: layout.clone(),
                range: (range != (0..size)).then_some(range),
            });
        }
    }
    pieces
}

/// The stage of every name.
fn stages_of<'a>(
    tensors: &'a [TensorEntry],
    pp: usize,
    stages: &Stages,
) -> Result<BTreeMap<&'a str, usize>> {
    let mut sizes = BTreeMap::new();
    for tensor in tensors {
        sizes
            .entry(tensor.name.as_str())
            .or_insert(tensor.num_bytes() as u128);
    }
    if let Stages::Named(named) = stages {
        let stage = |&name: &&'a str| match named.get(name) {
            Some(&stage) if stage < pp => Ok((name, stage)),
            found => Err(Error::InvalidOption {
                key: "stages",
                found: format!("{found:?} for `{name}`"),
                expected: "a stage below pp for every tensor",
            }),
        };
        return sizes.keys().map(stage).collect();
    }
    let mut names: Vec<_> = sizes.into_iter().collect();
    names.sort_by(|(a, _), (b, _)| natural_order(a, b));
    let total = names.iter().map(|(_, size)| size).sum::<u128>().max(1);
    let mut before = 0;
    let stage = |(name, size): (&'a str, u128)| {
        let stage = (2 * before + size) * pp as u128 / (2 * total);
        before += size;
        (name, (stage as usize).min(pp - 1))
    };
    Ok(names.into_iter().map(stage).collect())
}

/// Order of names in which numbers count by value: `h.2` comes before `h.10`.
pub(crate) fn natural_order(a: &str, b: &str) -> Ordering {
    let mut runs = (runs(a), runs(b));
    loop {
        match (runs.0.next(), runs.1.next()) {
            (None, None) => return a.cmp(b),
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(a), Some(b)) => {
                let order = match (number(a), number(b)) {
                    (Some(a), Some(b)) => a.len().cmp(&b.len()).then(a.cmp(b)),
                    _ => a.cmp(b),
                };
                if order.is_ne() {
                    return order;
                }
            }
        }
    }
}

/// The runs of digits and of other characters of a name.
fn runs(name: &str) -> impl Iterator<Item = &str> {
    let is_digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    let mut rest = name;
    std::iter::from_fn(move || {
        let digits = is_digit(rest);
        let end = rest
            .find(|c: char| c.is_ascii_digit() != digits)
            .unwrap_or(rest.len());
        let (run, after) = rest.split_at(end);
        rest = after;
        (!run.is_empty()).then_some(run)
    })
}

/// The digits that count, where a run is a number.
fn number(run: &str) -> Option<&str> {
    run.starts_with(|c: char| c.is_ascii_digit())
        .then(|| run.trim_start_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cut, DType};

    fn tensor(kind: Kind, name: &str, shape: &[usize], cut: Option<Cut>) -> TensorEntry {
        TensorEntry {
            kind,
            name: name.to_owned(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            cut,
            slices: Vec::new(),
        }
    }

    /// A line per file: its name, then the pieces.
    fn drawn(tensors: &[TensorEntry], topology: Topology) -> String {
        let line = |file: PlannedFile| {
            let piece = |piece: &PlannedPiece| {
                let parts = piece
                    .layout
                    .parts()
                    .iter()
                    .map(|part| part.region.to_string());
                let range = piece.range.clone();
                let range = range.map_or_else(String::new, |r| format!("#{}:{}", r.start, r.end));
                format!(
                    "{}{}{range}",
                    tensors[piece.tensor].name,
                    parts.collect::<String>()
                )
            };
            let pieces: Vec<_> = file.pieces.iter().map(piece).collect();
            format!("{} {}", file.kind.file_name(file.rank), pieces.join(" "))
        };
        let files = plan(tensors, topology, &Stages::Even).unwrap();
        files.into_iter().map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn stages_take_names_slices_follow_cuts_and_zero_takes_ranges() {
        let state = Kind::optimizer("m");
        let qkv = || Some(Cut::new(0, [4, 4]));
        let tensors = [
            tensor(Kind::Parameter, "h.10.w", &[8], qkv()),
            tensor(Kind::Parameter, "h.2.w", &[8], None),
            tensor(state.clone(), "h.10.w", &[8], None),
            tensor(state, "h.2.w", &[8], None),
        ];
        let topology = Topology {
            dp: 2,
            tp: 2,
            pp: 2,
            sp: 1,
            zero_stage: 1,
        };
        insta::assert_snapshot!(drawn(&tensors, topology), @"
        model-00000.safetensors h.2.w[0:8]
        optim-00000.safetensors h.2.w[0:8]#0:4
        optim-00002.safetensors h.2.w[0:8]#4:8
        model-00004.safetensors h.10.w[0:2][4:6]
        optim-00004.safetensors h.10.w[0:2][4:6]#0:2
        optim-00006.safetensors h.10.w[0:2][4:6]#2:4
        model-00005.safetensors h.10.w[2:4][6:8]
        optim-00005.safetensors h.10.w[2:4][6:8]#0:2
        optim-00007.safetensors h.10.w[2:4][6:8]#2:4
        ");
    }

    #[test]
    fn numbers_in_names_count_by_value() {
        let mut names = ["h.10.w", "h.2.w", "h.2", "h.02.w", "a", "h.b", ""];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(names, ["", "a", "h.2", "h.02.w", "h.2.w", "h.10.w", "h.b"]);
    }

    #[test]
    fn more_boxes_than_the_format_has_are_refused_before_anything_is_written() {
        let qkv = Cut::new(0, [2048; 3]);
        let tensors = [tensor(Kind::Parameter, "qkv", &[6144], Some(qkv))];
        let planned = |tp| {
            let topology = Topology {
                tp,
                ..Topology::default()
            };
            plan(&tensors, topology, &Stages::Even)
        };
        assert!(planned(1365).is_ok());
        insta::assert_snapshot!(planned(65536).unwrap_err().to_string(), @"`tp` is 65536, which cuts `qkv` into 6144 boxes, expected a degree that makes 4096 at most");
    }

    #[test]
    fn a_stage_beyond_the_last_is_refused() {
        let tensors = [tensor(Kind::Parameter, "w", &[8], None)];
        let stages = Stages::Named([("w".to_owned(), 2)].into());
        let topology = Topology {
            pp: 2,
            ..Topology::default()
        };
        let error = plan(&tensors, topology, &stages).unwrap_err();
        insta::assert_snapshot!(error.to_string(), @"`stages` is Some(2) for `w`, expected a stage below pp for every tensor");
    }
}
