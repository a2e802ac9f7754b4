//! A made-up model, saved and loaded by a made-up topology.

use merak_ckpt::{
    Checkpoint, Cut as Rule, DType, Header, Kind, Layout, Piece, Result, ShardKind, Store, Topology,
};
use serde_json::json;
use std::ops::Range;
use std::path::PathBuf;

/// A tensor of the model and how tensor parallelism cuts it.
pub(crate) struct Tensor {
    pub(crate) name: &'static str,
    pub(crate) shape: &'static [usize],
    pub(crate) cut: Cut,
}

#[derive(Clone, Copy)]
pub(crate) enum Cut {
    Replicated,
    /// Equal ranges of a dim.
    Dim(usize),
    /// Equal ranges of each third of a dim: a fused q, k, v.
    Fused(usize),
}

pub(crate) const MODEL: &[Tensor] = &[
    Tensor {
        name: "wte.weight",
        shape: &[8, 6],
        cut: Cut::Dim(0),
    },
    Tensor {
        name: "h.0.attn.c_attn.weight",
        shape: &[6, 24],
        cut: Cut::Fused(1),
    },
    Tensor {
        name: "h.0.attn.c_attn.bias",
        shape: &[24],
        cut: Cut::Fused(0),
    },
    Tensor {
        name: "h.0.mlp.c_proj.weight",
        shape: &[8, 6],
        cut: Cut::Dim(0),
    },
    Tensor {
        name: "h.1.conv.weight",
        shape: &[4, 8, 3, 1],
        cut: Cut::Dim(1),
    },
    Tensor {
        name: "ln_f.weight",
        shape: &[6],
        cut: Cut::Replicated,
    },
    Tensor {
        name: "scale",
        shape: &[],
        cut: Cut::Replicated,
    },
    Tensor {
        name: "empty",
        shape: &[0, 3],
        cut: Cut::Replicated,
    },
];

pub(crate) fn kinds() -> [Kind; 3] {
    [
        Kind::Parameter,
        Kind::optimizer("adamw.exp_avg"),
        Kind::optimizer("adamw.exp_avg_sq"),
    ]
}

/// Element `index` of a tensor of the model: different everywhere.
fn value(kind: &Kind, tensor: &Tensor, index: usize) -> f32 {
    let seed = tensor
        .name
        .bytes()
        .chain(kind.as_str().bytes())
        .fold(7_u32, |h, b| h.wrapping_mul(31) + u32::from(b));
    (seed % 1000) as f32 + index as f32 / 1024.0
}

pub(crate) fn whole(kind: &Kind, tensor: &Tensor) -> Vec<u8> {
    let n: usize = tensor.shape.iter().product();
    (0..n)
        .flat_map(|index| value(kind, tensor, index).to_le_bytes())
        .collect()
}

pub(crate) fn layout(tensor: &Tensor, tp: usize, rank: usize) -> Layout {
    let share =
        |begin: usize, size: usize| begin + size / tp * rank..begin + size / tp * (rank + 1);
    let whole = Layout::whole(tensor.shape);
    let (layout, rule) = match tensor.cut {
        Cut::Replicated => return whole,
        Cut::Dim(dim) => {
            let size = tensor.shape[dim];
            let layout = Layout::shard(tensor.shape, dim, share(0, size));
            (layout, Rule::new(dim, [size]))
        }
        Cut::Fused(dim) => {
            let third = tensor.shape[dim] / 3;
            let ranges = [0, 1, 2].map(|part| share(part * third, third));
            let layout = Layout::along(tensor.shape, dim, &ranges);
            (layout, Rule::new(dim, [third; 3]))
        }
    };
    let layout = layout.expect("it divides");
    layout.with_cut(rule).expect("it fits")
}

/// The flat range of a local tensor that a replica's ZeRO part holds: uneven on purpose.
pub(crate) fn zero_range(layout: &Layout, dp: usize, rank: usize) -> Range<usize> {
    let n = layout.num_local_elements();
    let share = (n + 1).div_ceil(dp);
    (rank * share).min(n)..((rank + 1) * share).min(n)
}

/// The local elements of a layout, taken from the whole tensor without this crate's help.
pub(crate) fn localise(layout: &Layout, whole: &[u8]) -> Vec<u8> {
    let mut out = vec![0; layout.num_local_elements() * 4];
    for part in layout.parts() {
        let size = &part.region.size;
        for flat in 0..size.iter().product() {
            let (mut rest, mut from, mut to) = (flat, 0, 0);
            let mut strides = (1, 1);
            for dim in (0..size.len()).rev() {
                let index = rest % size[dim];
                rest /= size[dim];
                from += (part.region.offset[dim] + index) * strides.0;
                to += (part.local_offset[dim] + index) * strides.1;
                strides = (
                    strides.0 * layout.shape()[dim],
                    strides.1 * layout.local_shape()[dim],
                );
            }
            out[to * 4..to * 4 + 4].copy_from_slice(&whole[from * 4..from * 4 + 4]);
        }
    }
    out
}

/// Saves the model as `dp * tp * pp` ranks would, optimizer state cut by ZeRO.
pub(crate) fn save(store: &Store, step: u64, topology: Topology) -> Result<PathBuf> {
    let Topology { dp, tp, pp, .. } = topology;
    // Dropping it removes the folder, unless that has its final name.
    let _begun = store.begin(step)?;
    let mut shards = Vec::new();
    for rank in 0..dp * tp * pp {
        let (dp_rank, tp_rank, stage) = (rank / (tp * pp), rank % tp, rank / tp % pp);
        let draft = store.draft(step);
        for (kind, file) in
            kinds()
                .iter()
                .zip([ShardKind::Model, ShardKind::Optimizer, ShardKind::Optimizer])
        {
            let is_model = file == ShardKind::Model;
            let owned = MODEL.iter().enumerate().filter(|(index, tensor)| {
                let replica = matches!(tensor.cut, Cut::Replicated) && tp_rank > 0;
                index % pp == stage && !replica && (dp_rank == 0 || !is_model)
            });
            let locals: Vec<_> = owned
                .map(|(_, tensor)| {
                    let layout = layout(tensor, tp, tp_rank);
                    let range = (!is_model).then(|| zero_range(&layout, dp, dp_rank));
                    let bytes = localise(&layout, &whole(kind, tensor));
                    let bytes = range
                        .clone()
                        .map_or(bytes.clone(), |r| bytes[r.start * 4..r.end * 4].to_vec());
                    (tensor.name, layout, range, bytes)
                })
                .collect();
            let pieces: Vec<_> = locals
                .iter()
                .map(|(name, layout, range, bytes)| {
                    let range = range.clone();
                    (
                        Piece {
                            kind,
                            name,
                            dtype: DType::F32,
                            layout,
                            range,
                        },
                        bytes.as_slice(),
                    )
                })
                .collect();
            let index = if kind.as_str() == "adamw.exp_avg_sq" {
                rank + 100
            } else {
                rank
            };
            shards.push(draft.write_shard(file, index, &pieces)?);
        }
    }
    let header = Header {
        step,
        topology,
        model: json!({"model_type": "gpt2", "n_layer": 2}),
        state: json!({"consumed_samples": step * 16, "seed": 42}),
    };
    store
        .draft(step)
        .commit(shards, header, &[("config.json", b"{\"n_layer\":2}\n")])
}

/// Loads the model as each rank would and compares every byte.
pub(crate) fn check(checkpoint: &Checkpoint, topology: Topology) {
    let Topology { dp, tp, .. } = topology;
    for kind in &kinds() {
        for tensor in MODEL {
            let whole = whole(kind, tensor);
            assert_eq!(
                checkpoint.read_whole(kind, tensor.name).expect("it reads"),
                whole
            );
            for (dp_rank, tp_rank) in (0..dp).flat_map(|d| (0..tp).map(move |t| (d, t))) {
                let layout = layout(tensor, tp, tp_rank);
                let range = zero_range(&layout, dp, dp_rank);
                let expected = localise(&layout, &whole)[range.start * 4..range.end * 4].to_vec();
                let mut found = vec![0xAA; expected.len()];
                let piece = Piece {
                    kind,
                    name: tensor.name,
                    dtype: DType::F32,
                    layout: &layout,
                    range: Some(range),
                };
                checkpoint.read(&piece, &mut found).expect("it reads");
                assert_eq!(
                    found, expected,
                    "{kind} {} tp {tp_rank} dp {dp_rank}",
                    tensor.name
                );
            }
        }
    }
}

pub(crate) fn topology(dp: usize, tp: usize, pp: usize) -> Topology {
    Topology {
        dp,
        tp,
        pp,
        ..Topology::default()
    }
}

/// The topologies of {1, 2, 4}³ with at most 8 ranks.
pub(crate) fn topologies() -> Vec<Topology> {
    let degrees = [1, 2, 4];
    let pairs = degrees.iter().flat_map(|&dp| degrees.map(|tp| (dp, tp)));
    let all = pairs.flat_map(|(dp, tp)| degrees.map(|pp| topology(dp, tp, pp)));
    all.filter(|all| all.dp * all.tp * all.pp <= 8).collect()
}
