//! Parameters in and out of candle's tensors.

use candle_core::{DType, Device, Tensor, Var};
use merak_ckpt::{
    Checkpoint, Cut, Error, Header, Layout, ReshardOptions, Store, Topology, reshard,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

type Vars = BTreeMap<String, Var>;

const ROWS: usize = 4;
const COLUMNS: usize = 6;

/// Two parameters, `[4, 6]` and `[6]`, of their own index plus `start`.
fn vars(start: f32, dtype: DType) -> Vars {
    let var = |shape: &[usize]| {
        let end = start + shape.iter().product::<usize>() as f32;
        let tensor = Tensor::arange(start, end, &Device::Cpu).expect("the numbers of a test fit");
        let tensor = tensor
            .reshape(shape)
            .expect("the numbers of a test fit")
            .to_dtype(dtype)
            .expect("the numbers of a test fit");
        Var::from_tensor(&tensor).expect("the numbers of a test fit")
    };
    let shapes = [
        ("up.weight", vec![ROWS, COLUMNS]),
        ("up.bias", vec![COLUMNS]),
    ];
    shapes
        .map(|(name, shape)| (name.to_owned(), var(&shape)))
        .into()
}

fn values(vars: &Vars) -> Vec<Vec<f32>> {
    let flat = |var: &Var| var.to_dtype(DType::F32)?.flatten_all()?.to_vec1();
    vars.values()
        .map(|var| flat(var).expect("the numbers of a test fit"))
        .collect()
}

#[expect(clippy::unnecessary_wraps, reason = "the shape of a layout's function")]
fn whole(_: &str, sizes: &[usize]) -> merak_ckpt::Result<Layout> {
    Ok(Layout::whole(sizes))
}

fn save(folder: &Path, vars: &Vars) -> PathBuf {
    let draft = Store::in_output_dir(folder)
        .begin(1)
        .expect("the numbers of a test fit");
    let shard = draft
        .write_tensors(0, vars, whole)
        .expect("the numbers of a test fit");
    draft
        .commit(vec![shard], Header::default(), &[])
        .expect("the numbers of a test fit")
}

#[test]
fn variables_are_saved_and_loaded_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16, DType::U32] {
        let saved = vars(3.0, dtype);
        let checkpoint = save(&folder.path().join(dtype.as_str()), &saved);
        let checkpoint = Checkpoint::open(checkpoint).unwrap();
        assert_eq!(checkpoint.verify().damage, []);
        let loaded = vars(0.0, dtype);
        checkpoint.read_tensors(&loaded, whole).unwrap();
        assert_eq!(values(&loaded), values(&saved), "{dtype:?}");
        let single: Tensor = checkpoint.read_tensor("up.bias").unwrap();
        assert_eq!((single.dtype(), single.dims()), (dtype, &[COLUMNS][..]));
    }
}

#[test]
fn ranks_write_their_columns_and_one_rank_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let saved = vars(0.0, DType::F32);
    let draft = Store::in_output_dir(folder.path()).begin(1).unwrap();
    let shards = (0..2).map(|rank| {
        let own = saved.iter().map(|(name, var)| {
            // A view: the parts of a column lie apart.
            let dim = var.rank() - 1;
            (name.clone(), var.narrow(dim, 3 * rank, 3).unwrap())
        });
        let layout = |name: &str, sizes: &[usize]| {
            let shape = saved[name].dims();
            Layout::shard(shape, sizes.len() - 1, 3 * rank..3 * rank + 3)
        };
        draft.write_tensors(rank, &own.collect(), layout).unwrap()
    });
    let shards = shards.collect();
    let folder = draft.commit(shards, Header::default(), &[]).unwrap();
    let loaded = vars(9.0, DType::F32);
    let checkpoint = Checkpoint::open(folder).unwrap();
    checkpoint.read_tensors(&loaded, whole).unwrap();
    assert_eq!(values(&loaded), values(&saved));
}

#[test]
fn a_resharded_checkpoint_is_read_into_variables() {
    let folder = tempfile::tempdir().unwrap();
    let saved = vars(0.0, DType::F32);
    let draft = Store::in_output_dir(folder.path()).begin(1).unwrap();
    let cut = |_: &str, sizes: &[usize]| {
        Layout::whole(sizes).with_cut(Cut::new(sizes.len() - 1, [COLUMNS]))
    };
    let shard = draft.write_tensors(0, &saved, cut).unwrap();
    let one = draft.commit(vec![shard], Header::default(), &[]).unwrap();
    let options = ReshardOptions {
        topology: Topology {
            tp: 3,
            ..Topology::default()
        },
        ..ReshardOptions::default()
    };
    let one = Checkpoint::open(one).unwrap();
    let three = reshard(&one, folder.path().join("three"), &options).unwrap();
    let three = Checkpoint::open(three).unwrap();
    assert_eq!(three.manifest().files.len(), 3);
    let loaded = vars(9.0, DType::F32);
    three.read_tensors(&loaded, whole).unwrap();
    assert_eq!(values(&loaded), values(&saved));
}

#[test]
fn weights_of_another_float_type_are_converted() {
    let folder = tempfile::tempdir().unwrap();
    let saved = vars(0.0, DType::BF16);
    let checkpoint = Checkpoint::open(save(folder.path(), &saved)).unwrap();
    let loaded = vars(9.0, DType::F32);
    checkpoint.read_tensors(&loaded, whole).unwrap();
    assert_eq!(values(&loaded), values(&saved));
}

#[test]
fn a_variable_that_the_checkpoint_does_not_fit_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(save(folder.path(), &vars(0.0, DType::F32))).unwrap();
    let read = |name: &str, shape: &[usize], dtype: DType| {
        let var = Var::zeros(shape, dtype, &Device::Cpu).unwrap();
        let vars = BTreeMap::from([(name.to_owned(), var)]);
        checkpoint.read_tensors(&vars, whole).unwrap_err()
    };
    let error = read("up.wieght", &[ROWS, COLUMNS], DType::F32);
    let nearest = Some("up.weight".to_owned());
    assert!(matches!(error, Error::MissingTensor { nearest: found, .. } if found == nearest));
    let error = read("up.bias", &[COLUMNS + 1], DType::F32);
    assert!(matches!(error, Error::ShapeMismatch { .. }), "{error}");
    let error = read("up.bias", &[COLUMNS], DType::I16);
    assert_eq!(error.to_string(), "tensor `up.bias` cannot be used");
}
