//! What any topology saves, any other reads back.

use crate::support::{check, save, topologies, topology};
use merak_ckpt::{Checkpoint, DType, Header, Kind, Layout, Part, Piece, Region, ShardKind, Store};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn every_topology_reads_what_every_other_wrote() {
    let all = [topologies(), vec![topology(3, 1, 3)]].concat();
    assert_eq!(all.len(), 17 + 1);
    let folder = tempfile::tempdir().unwrap();
    for (step, &writer) in all.iter().enumerate() {
        let store = Store::in_output_dir(folder.path());
        let path = save(&store, step as u64, writer).unwrap();
        assert_eq!(store.latest().unwrap(), Some(path.clone()));
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.manifest().header.topology, writer);
        for &reader in &all {
            check(&checkpoint, reader);
        }
    }
}

#[test]
fn equal_states_make_equal_bytes() {
    let read_all = |path: &Path| -> BTreeMap<_, _> {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
        entries
            .map(|e| (e.file_name(), fs::read(e.path()).unwrap()))
            .collect()
    };
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = folders
        .each_ref()
        .map(|folder| read_all(&save(&Store::new(folder.path()), 7, topology(2, 2, 1)).unwrap()));
    assert_eq!(first.len(), 2 + 4 + 4 + 2);
    assert_eq!(first, second);
}

#[test]
fn files_are_ordinary_safetensors_and_whole_tensors_have_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(&Store::new(folder.path()), 1, topology(1, 1, 1)).unwrap();
    let bytes = fs::read(path.join("model-00000.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weight = tensors.tensor("h.1.conv.weight").unwrap();
    assert_eq!(weight.shape(), [4, 8, 3, 1]);
    assert_eq!(weight.dtype(), safetensors::Dtype::F32);
    let data_start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert_eq!(data_start % merak_ckpt::format::ALIGNMENT, 0);

    let path = save(&Store::new(folder.path()), 2, topology(2, 2, 1)).unwrap();
    let bytes = fs::read(path.join("optim-00003.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    insta::assert_debug_snapshot!(names, @r#"
    [
        "adamw.exp_avg/h.0.attn.c_attn.bias[12:16]#3:4",
        "adamw.exp_avg/h.0.attn.c_attn.bias[20:24]",
        "adamw.exp_avg/h.0.attn.c_attn.weight[0:6,12:16]#12:24",
        "adamw.exp_avg/h.0.attn.c_attn.weight[0:6,20:24]#12:24",
        "adamw.exp_avg/h.0.attn.c_attn.weight[0:6,4:8]#13:24",
        "adamw.exp_avg/h.0.mlp.c_proj.weight[4:8,0:6]#13:24",
        "adamw.exp_avg/h.1.conv.weight[0:4,4:8,0:3,0:1]#25:48",
        "adamw.exp_avg/wte.weight[4:8,0:6]#13:24",
    ]
    "#);
}

#[test]
fn padding_is_neither_written_nor_read() {
    // A vocabulary of 5 rows over two ranks of 3: the last local row of rank 1 is padding.
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path());
    let draft = store.begin(1).unwrap();
    let layout = |rank: usize| {
        let region = Region::new([3 * rank, 0], [3 - rank, 2]);
        Layout::new(
            &[5, 2],
            &[3, 2],
            vec![Part {
                region,
                local_offset: vec![0, 0],
            }],
        )
        .unwrap()
    };
    let kind = Kind::Parameter;
    let shards = [0, 1].map(|rank| {
        let bytes: Vec<u8> = (0..6).map(|i| 6 * rank as u8 + i).collect();
        let layout = layout(rank);
        let piece = Piece {
            kind: &kind,
            name: "wte",
            dtype: DType::U8,
            layout: &layout,
            range: None,
        };
        draft
            .write_shard(ShardKind::Model, rank, &[(piece, &bytes)])
            .unwrap()
    });
    let path = draft
        .commit(shards.to_vec(), Header::default(), &[])
        .unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(
        checkpoint.read_whole(&kind, "wte").unwrap(),
        (0..10).collect::<Vec<u8>>()
    );
    let mut local = [0xFF; 6];
    let layout = layout(1);
    let piece = Piece {
        kind: &kind,
        name: "wte",
        dtype: DType::U8,
        layout: &layout,
        range: None,
    };
    checkpoint.read(&piece, &mut local).unwrap();
    assert_eq!(local, [6, 7, 8, 9, 0xFF, 0xFF]);
}

#[test]
fn ranks_that_are_threads_may_share_an_open_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    save(&Store::new(folder.path()), 1, topology(2, 2, 1)).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    std::thread::scope(|scope| {
        for tp in [1, 2, 4] {
            let checkpoint = &checkpoint;
            scope.spawn(move || check(checkpoint, topology(3, tp, 1)));
        }
    });
}

/// Cuts each dim of a shape into ranges: the grid's cells tile the tensor.
fn grid(shape: &[usize], cuts: &[Vec<usize>]) -> Vec<Region> {
    let mut cells = vec![Region::new([], [])];
    for (dim, &size) in shape.iter().enumerate() {
        let mut points: Vec<_> = cuts[dim]
            .iter()
            .map(|cut| cut % (size + 1))
            .chain([0, size])
            .collect();
        points.sort_unstable();
        points.dedup();
        let ranges: Vec<_> = points
            .windows(2)
            .map(|pair| (pair[0], pair[1] - pair[0]))
            .collect();
        let extend = |cell: &Region, (offset, size)| {
            let mut cell = cell.clone();
            cell.offset.push(offset);
            cell.size.push(size);
            cell
        };
        cells = cells
            .iter()
            .flat_map(|cell| ranges.iter().map(move |&range| extend(cell, range)))
            .collect();
    }
    cells
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_box_and_range_reads_back_from_any_tiling(
        shape in prop::collection::vec(1_usize..6, 0..4),
        cuts in prop::collection::vec(prop::collection::vec(0_usize..6, 0..3), 4),
        split in 0_usize..200,
        wanted in prop::collection::vec((0_usize..6, 0_usize..6), 4),
        window in (0_usize..200, 0_usize..200),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let draft = store.begin(0).unwrap();
        let kind = Kind::Parameter;
        let n: usize = shape.iter().product();
        let values: Vec<u16> = (0..n as u16).collect();
        let mut shards = Vec::new();
        for (index, cell) in grid(&shape, &cuts).into_iter().enumerate() {
            let layout = Layout::region(&shape, cell).unwrap();
            let local = gather(&shape, &layout.parts()[0].region, &values);
            let middle = split % (local.len() / 2 + 1);
            for (half, range) in [0..middle, middle..local.len() / 2].into_iter().enumerate() {
                let bytes = &local[range.start * 2..range.end * 2];
                let piece = Piece { kind: &kind, name: "w", dtype: DType::U16, layout: &layout, range: Some(range) };
                shards.push(draft.write_shard(ShardKind::Model, 2 * index + half, &[(piece, bytes)]).unwrap());
            }
        }
        let checkpoint = Checkpoint::open(draft.commit(shards, Header::default(), &[]).unwrap()).unwrap();
        let (mut offset, mut size) = (Vec::new(), Vec::new());
        for (dim, &full) in shape.iter().enumerate() {
            offset.push(wanted[dim].0 % full);
            size.push(wanted[dim].1 % (full - offset[dim]) + 1);
        }
        let layout = Layout::region(&shape, Region::new(offset, size)).unwrap();
        let local = gather(&shape, &layout.parts()[0].region, &values);
        let end = window.0 % (local.len() / 2 + 1);
        let begin = window.1 % (end + 1);
        let mut out = vec![0xEE; (end - begin) * 2];
        let piece = Piece { kind: &kind, name: "w", dtype: DType::U16, layout: &layout, range: Some(begin..end) };
        checkpoint.read(&piece, &mut out).unwrap();
        prop_assert_eq!(&out, &local[begin * 2..end * 2]);
    }
}

/// The bytes of a box, element by element.
fn gather(shape: &[usize], region: &Region, values: &[u16]) -> Vec<u8> {
    let is_inside = |flat: usize| {
        let mut rest = flat;
        (0..shape.len()).rev().all(|dim| {
            let index = rest % shape[dim];
            rest /= shape[dim];
            (region.offset[dim]..region.offset[dim] + region.size[dim]).contains(&index)
        })
    };
    (0..values.len())
        .filter(|&flat| is_inside(flat))
        .flat_map(|flat| values[flat].to_le_bytes())
        .collect()
}
