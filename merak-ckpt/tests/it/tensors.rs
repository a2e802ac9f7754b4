//! Parameters in and out of the tensors of every library.

use merak_ckpt::{
    Checkpoint, Cut, Error, Header, Layout, ReshardOptions, Store, Topology, reshard,
};
use merak_mpu::{DType, HostTensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

type Vars<T> = BTreeMap<String, T>;

const ROWS: usize = 4;
const COLUMNS: usize = 6;

/// Variables of a library under test.
pub(crate) trait Library: HostTensor {
    /// The types of `f32` numbers that go there and back.
    const TYPES: &[DType];

    /// A variable of some elements, as the type says.
    fn var(values: &[f32], sizes: &[usize], dtype: DType) -> Self;

    /// A variable of elements that no checkpoint has.
    fn shorts(sizes: &[usize]) -> Self;

    /// The elements in row-major order.
    fn values(&self) -> Vec<f32>;

    /// Part of the last dim, over the same memory.
    fn columns(&self, start: usize, len: usize) -> Self;
}

/// Makes a test of every law here for a library.
macro_rules! laws {
    ($var:ty: $($law:ident)*) => {
        $(#[test]
        fn $law() {
            $crate::tensors::$law::<$var>();
        })*
    };
    ($var:ty) => {
        $crate::tensors::laws!($var:
            variables_are_saved_and_loaded_bit_for_bit
            ranks_write_their_columns_and_one_rank_reads_them
            one_rank_writes_and_ranks_read_their_columns_in_place
            a_resharded_checkpoint_is_read_into_variables
            weights_of_another_float_type_are_converted
            a_variable_that_the_checkpoint_does_not_fit_is_named
        );
    };
}
pub(crate) use laws;

/// Two parameters, `[4, 6]` and `[6]`, of their own index plus `start`.
fn vars<T: Library>(start: f32, dtype: DType) -> Vars<T> {
    let var = |shape: &[usize]| {
        let count = shape.iter().product();
        let values = (0..count).map(|i: usize| start + i as f32);
        T::var(&values.collect::<Vec<_>>(), shape, dtype)
    };
    let shapes = [
        ("up.weight", vec![ROWS, COLUMNS]),
        ("up.bias", vec![COLUMNS]),
    ];
    shapes
        .map(|(name, shape)| (name.to_owned(), var(&shape)))
        .into()
}

fn values<T: Library>(vars: &Vars<T>) -> Vec<Vec<f32>> {
    vars.values().map(T::values).collect()
}

#[expect(clippy::unnecessary_wraps, reason = "the shape of a layout's function")]
fn whole(_: &str, sizes: &[usize]) -> merak_ckpt::Result<Layout> {
    Ok(Layout::whole(sizes))
}

fn save<T: Library>(folder: &Path, vars: &Vars<T>) -> PathBuf {
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

pub(crate) fn variables_are_saved_and_loaded_bit_for_bit<T: Library>() {
    let folder = tempfile::tempdir().unwrap();
    for &dtype in T::TYPES {
        let saved = vars::<T>(3.0, dtype);
        let checkpoint = save(&folder.path().join(dtype.as_str()), &saved);
        let checkpoint = Checkpoint::open(checkpoint).unwrap();
        assert_eq!(checkpoint.verify().damage, []);
        let loaded = vars::<T>(0.0, dtype);
        checkpoint.read_tensors(&loaded, whole).unwrap();
        assert_eq!(values(&loaded), values(&saved), "{dtype}");
        let single: T = checkpoint.read_tensor("up.bias").unwrap();
        let dtype_of_single = single.share().unwrap().dtype();
        assert_eq!((dtype_of_single, single.sizes()), (dtype, vec![COLUMNS]));
    }
}

pub(crate) fn ranks_write_their_columns_and_one_rank_reads_them<T: Library>() {
    let folder = tempfile::tempdir().unwrap();
    let saved = vars::<T>(0.0, DType::F32);
    let draft = Store::in_output_dir(folder.path()).begin(1).unwrap();
    let shards = (0..2).map(|rank| {
        let own = saved.iter().map(|(name, var)| {
            // A view: the parts of a column lie apart.
            (name.clone(), var.columns(3 * rank, 3))
        });
        let layout = |name: &str, sizes: &[usize]| {
            let shape = saved[name].sizes();
            Layout::shard(&shape, sizes.len() - 1, 3 * rank..3 * rank + 3)
        };
        draft.write_tensors(rank, &own.collect(), layout).unwrap()
    });
    let shards = shards.collect();
    let folder = draft.commit(shards, Header::default(), &[]).unwrap();
    let loaded = vars::<T>(9.0, DType::F32);
    let checkpoint = Checkpoint::open(folder).unwrap();
    checkpoint.read_tensors(&loaded, whole).unwrap();
    assert_eq!(values(&loaded), values(&saved));
}

pub(crate) fn one_rank_writes_and_ranks_read_their_columns_in_place<T: Library>() {
    let folder = tempfile::tempdir().unwrap();
    let saved = vars::<T>(0.0, DType::F32);
    let checkpoint = Checkpoint::open(save(folder.path(), &saved)).unwrap();
    let loaded = vars::<T>(99.0, DType::F32);
    let right = loaded.iter();
    let right = right.map(|(name, var)| (name.clone(), var.columns(3, 3)));
    let layout =
        |name: &str, sizes: &[usize]| Layout::shard(&saved[name].sizes(), sizes.len() - 1, 3..6);
    checkpoint.read_tensors(&right.collect(), layout).unwrap();
    let [expected, before] = [0.0, 99.0].map(|start| values(&vars::<T>(start, DType::F32)));
    for (index, found) in values(&loaded).into_iter().enumerate() {
        // The left columns are not those of the views.
        let from = |i: usize| if i % COLUMNS < 3 { &before } else { &expected };
        let expected: Vec<f32> = (0..found.len()).map(|i| from(i)[index][i]).collect();
        assert_eq!(found, expected);
    }
}

pub(crate) fn a_resharded_checkpoint_is_read_into_variables<T: Library>() {
    let folder = tempfile::tempdir().unwrap();
    let saved = vars::<T>(0.0, DType::F32);
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
    let loaded = vars::<T>(9.0, DType::F32);
    three.read_tensors(&loaded, whole).unwrap();
    assert_eq!(values(&loaded), values(&saved));
}

pub(crate) fn weights_of_another_float_type_are_converted<T: Library>() {
    let folder = tempfile::tempdir().unwrap();
    let saved = vars::<T>(0.0, DType::BF16);
    let checkpoint = Checkpoint::open(save(folder.path(), &saved)).unwrap();
    let loaded = vars::<T>(9.0, DType::F32);
    checkpoint.read_tensors(&loaded, whole).unwrap();
    assert_eq!(values(&loaded), values(&saved));
}

pub(crate) fn a_variable_that_the_checkpoint_does_not_fit_is_named<T: Library>() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(save(folder.path(), &vars::<T>(0.0, DType::F32))).unwrap();
    let floats = |sizes: &[usize]| T::var(&vec![0.0; sizes.iter().product()], sizes, DType::F32);
    let read = |name: &str, var: T| {
        let vars = BTreeMap::from([(name.to_owned(), var)]);
        checkpoint.read_tensors(&vars, whole).unwrap_err()
    };
    let error = read("up.wieght", floats(&[ROWS, COLUMNS]));
    let nearest = Some("up.weight".to_owned());
    assert!(matches!(error, Error::MissingTensor { nearest: found, .. } if found == nearest));
    let error = read("up.bias", floats(&[COLUMNS + 1]));
    assert!(matches!(error, Error::ShapeMismatch { .. }), "{error}");
    let error = read("up.bias", T::shorts(&[COLUMNS]));
    assert_eq!(error.to_string(), "tensor `up.bias` cannot be used");
}
