//! Every operation has a case in the suite of backends: a new one without a case fails here.

use crate::{
    agreement::{Build, Case, Run, agree, measure, near, round, tolerance},
    support::{backend, dtypes, host_backends, interpreter, noise},
};
use merak_mpu::{Axis, Group, testing::world};
use merak_trace::{
    AxisGroups, Coord, DType, Init, Op, ParamRole, Result, Shard, TensorType,
    fx::{AttentionTerms, Module, Symbol},
    op::{
        Activation, Attention, AxisSlice, DropoutSpec, JoinedGrad, Keys, Reduction,
        RelativeBuckets, Rope, WeightLayout,
    },
};
use serde::Deserialize;
use serde_json::{Value as Json, json};
use std::{collections::BTreeSet, slice, sync::Arc};

/// The names of all operations, as data.
fn variants() -> BTreeSet<String> {
    // The error of reading an unknown name lists the known ones.
    let error = Op::deserialize(json!("nothing")).expect_err("there is no such operation");
    let error = error.to_string();
    let names = error.split('`').skip(1).step_by(2);
    names.skip(1).map(str::to_owned).collect()
}

fn variant(op: &Op) -> String {
    match serde_json::to_value(op).expect("operations are data") {
        Json::String(name) => name,
        fields => {
            let mut names = fields.as_object().expect("a name and fields").keys();
            names.next().expect("a name").clone()
        }
    }
}

fn t(shape: &[usize]) -> TensorType {
    TensorType::new(shape, DType::F64)
}

fn one(module: &Module, op: Op, operands: &[&Symbol]) -> Result<Symbol> {
    Ok(module.apply(op, operands)?.swap_remove(0))
}

/// Runs a case, and notes the operations of its program, forward and backward.
struct Cases(BTreeSet<String>);

impl Cases {
    fn run(
        &mut self,
        name: &str,
        operands: &[TensorType],
        ids: &[(&str, TensorType, &[i64])],
        build: &Build<'_>,
    ) {
        let case = Case {
            name,
            operands,
            ids,
            build,
        };
        agree(&case);
        self.note(&case);
    }

    fn note(&mut self, case: &Case<'_>) {
        let runner = interpreter(&backend(1), &case.graph(DType::F64));
        let nodes = runner.program().graph.nodes().iter();
        self.0.extend(nodes.map(|node| variant(&node.op)));
    }

    /// An operation of one operand, `[3, 7]`.
    fn unary(&mut self, op: &Op) {
        self.run(op.name(), &[t(&[3, 7])], &[], &|module, x, _| {
            Ok(vec![one(module, op.clone(), &[&x[0]])?])
        });
    }

    fn products_and_lookups(&mut self) {
        let layout = WeightLayout::OutIn;
        let operands = [t(&[3, 5]), t(&[4, 5]), t(&[4])];
        self.run("linear", &operands, &[], &|module, x, _| {
            let op = Op::Linear { layout, bias: true };
            Ok(vec![one(module, op, &[&x[0], &x[1], &x[2]])?])
        });
        let operands = [t(&[2, 3, 4]), t(&[2, 4, 5])];
        self.run("matmul", &operands, &[], &|module, x, _| {
            let op = Op::MatMul {
                transpose_a: false,
                transpose_b: false,
            };
            Ok(vec![one(module, op, &[&x[0], &x[1]])?])
        });
        self.run("positions", &[t(&[5, 3])], &[], &|module, x, _| {
            let op = Op::Embedding {
                padding: Some(2),
                slice: None,
            };
            let positions = module.positions(4)?;
            Ok(vec![one(module, op, &[&positions, &x[0]])?])
        });
        let seen = [0, 1, 1, 1, 0, 1];
        let seen = [("seen", TensorType::new([2, 3], DType::I64), &seen[..])];
        self.run("seen_positions", &[t(&[5, 3])], &seen, &|module, x, ids| {
            let positions = module.seen_positions(&ids[0], 1)?;
            let op = Op::Embedding {
                padding: None,
                slice: None,
            };
            Ok(vec![one(module, op, &[&positions, &x[0]])?])
        });
        let ids = [(
            "ids",
            TensorType::new([2, 3], DType::I64),
            &[5, 5, 0, 0, 0, 0][..],
        )];
        self.run("documents", &[t(&[4, 3])], &ids, &|module, x, ids| {
            let positions = one(module, Op::DocumentPositions { first: 1 }, &[&ids[0]])?;
            let op = Op::Embedding {
                padding: None,
                slice: None,
            };
            Ok(vec![one(module, op, &[&positions, &x[0]])?])
        });
        let positions = [("at", TensorType::new([3], DType::I64), &[4, 0, 1][..])];
        self.run("rope", &[t(&[2, 3, 8])], &positions, &|module, x, ids| {
            let rope = Rope {
                head_dim: 4,
                inv_freq: vec![1.0, 0.2],
                scale: 1.5,
                inverse: false,
            };
            Ok(vec![one(module, Op::Rope(rope), &[&x[0], &ids[0]])?])
        });
    }

    fn attention(&mut self) {
        let spec = Attention {
            heads: 2,
            kv_heads: 1,
            head_dim: 3,
            scale: 0.7,
            causal: false,
            ..Attention::default()
        };
        let buckets = RelativeBuckets {
            q_len: 4,
            k_len: 5,
            buckets: 6,
            max_distance: 5,
            bidirectional: true,
        };
        let operands = [t(&[1, 4, 6]), t(&[1, 5, 3]), t(&[1, 5, 3]), t(&[6, 2])];
        let seen = [(
            "seen",
            TensorType::new([1, 5], DType::I64),
            &[1, 1, 1, 1, 0][..],
        )];
        self.run("attention", &operands, &seen, &|module, x, ids| {
            let index = module.relative_buckets(buckets)?;
            let terms = AttentionTerms {
                seen: Some(&ids[0]),
                bias: Some([&x[3], &index]),
            };
            let mixed = module.attention_with([&x[0], &x[1], &x[2]], terms, &spec, 0.0)?;
            Ok(vec![mixed])
        });
    }

    fn rows(&mut self) {
        let (x, vector) = (t(&[3, 7]), t(&[7]));
        let operands = [x.clone(), vector.clone(), vector.clone()];
        self.run("layer_norm", &operands, &[], &|module, x, _| {
            let op = Op::LayerNorm { eps: 1e-5 };
            Ok(vec![one(module, op, &[&x[0], &x[1], &x[2]])?])
        });
        self.run("rms_norm", &operands[..2], &[], &|module, x, _| {
            let op = Op::RmsNorm { eps: 1e-5 };
            Ok(vec![one(module, op, &[&x[0], &x[1]])?])
        });
        let dropout = DropoutSpec {
            p: 0.3,
            key: 7,
            slice: None,
            nested: None,
        };
        for op in [
            Op::Activation(Activation::Silu),
            Op::Softmax,
            Op::Dropout(dropout),
            Op::Scale { factor: -1.5 },
            Op::SumLeading { shape: vec![7] },
            Op::SumAll,
            Op::Identity,
            Op::ShareGrad { ranks: 4 },
        ] {
            self.unary(&op);
        }
        // A positive number, and a root that is a constant to its gradient.
        self.run("inverse_root", slice::from_ref(&x), &[], &|module, x, _| {
            let shares = one(module, Op::Softmax, &[&x[0]])?;
            let root = one(module, Op::InverseRoot, &[&shares])?;
            Ok(vec![module.mul(&root, &x[0])?])
        });
        self.run("silu_mul", &[x.clone(), x.clone()], &[], &|module, x, _| {
            Ok(vec![one(module, Op::SiluMul, &[&x[0], &x[1]])?])
        });
        self.run("add", &[x.clone(), vector], &[], &|module, x, _| {
            Ok(vec![module.add(&x[0], &x[1])?])
        });
        let labels = [(
            "labels",
            TensorType::new([3], DType::I64),
            &[0, 6, -100][..],
        )];
        self.run("cross_entropy", &[x], &labels, &|module, x, ids| {
            let op = Op::CrossEntropy {
                label_smoothing: 0.1,
            };
            Ok(vec![one(module, op, &[&x[0], &ids[0]])?])
        });
    }

    /// The part of the first of two ranks with a vocabulary of 13.
    fn vocabulary(&mut self) {
        let slice = |dim| AxisSlice::new(Axis::Tensor, dim, 13);
        let ids = [("ids", TensorType::new([4], DType::I64), &[12, 0, 6, 7][..])];
        self.run(
            "embedding of a slice",
            &[t(&[7, 3])],
            &ids,
            &|module, x, ids| {
                let op = Op::Embedding {
                    padding: Some(6),
                    slice: Some(slice(0)),
                };
                Ok(vec![one(module, op, &[&ids[0], &x[0]])?])
            },
        );
        let labels = [(
            "labels",
            TensorType::new([3], DType::I64),
            &[12, 6, -100][..],
        )];
        for label_smoothing in [0.0, 0.1] {
            self.run("vocab_loss", &[t(&[3, 7])], &labels, &|module, x, ids| {
                let slice = slice(1);
                let max = one(module, Op::VocabMax { slice }, &[&x[0]])?;
                let op = Op::VocabSums {
                    label_smoothing,
                    slice,
                };
                let sums = one(module, op, &[&x[0], &ids[0], &max])?;
                let op = Op::VocabLoss {
                    label_smoothing,
                    slice,
                };
                let loss = one(module, op, &[&x[0], &ids[0], &max, &sums])?;
                Ok(vec![loss, max, sums])
            });
        }
    }

    fn shapes(&mut self) {
        for op in [
            Op::Reshape { shape: vec![7, 3] },
            Op::Transpose { perm: vec![1, 0] },
        ] {
            self.unary(&op);
        }
        self.run("split, unused", &[t(&[2, 6])], &[], &|module, x, _| {
            let (dim, sizes) = (1, vec![4, 2]);
            let mut pieces = module.apply(Op::Split { dim, sizes }, &[&x[0]])?;
            pieces.truncate(1);
            Ok(pieces)
        });
        let operands = [t(&[2, 1]), t(&[2, 3])];
        self.run("concat", &operands, &[], &|module, x, _| {
            Ok(vec![one(module, Op::Concat { dim: 1 }, &[&x[0], &x[1]])?])
        });
    }
}

#[test]
fn every_operation_has_a_case() {
    let mut cases = Cases(BTreeSet::new());
    cases.products_and_lookups();
    cases.attention();
    cases.rows();
    cases.vocabulary();
    cases.shapes();
    // These run on two ranks below.
    cases.note(&REGIONS);
    cases.note(&EXCHANGES);
    cases.0.insert("join_attention".to_owned());
    let variants = variants();
    assert!(variants.len() > 40, "{variants:?}");
    let missing: Vec<_> = variants.difference(&cases.0).collect();
    assert!(missing.is_empty(), "without a case: {missing:?}");
}

/// The ranks of a world as the tensor axis.
#[derive(Debug)]
struct TensorGroup(Group);

impl AxisGroups for TensorGroup {
    fn along(&self, axis: Axis) -> Option<Group> {
        (axis == Axis::Tensor).then(|| self.0.clone())
    }
}

/// The place (rank, column there) of each of six columns in parts of two and four over two ranks.
const PLACES: [(usize, usize); 6] = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn slope_of_silu(x: f64) -> f64 {
    sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))
}

/// Runs a case of `x [4, 6]` with three results of these lengths on two ranks. `expected` makes of
/// `x` and of the weights what each rank must find: the results, and the gradient of `x`.
fn agree_on_two_ranks(
    case: fn() -> Case<'static>,
    lens: [usize; 3],
    expected: impl Fn(&[f64], &[Vec<f64>; 3]) -> [[Vec<f64>; 4]; 2],
) {
    for backend in host_backends(1) {
        for &dtype in dtypes(&backend) {
            let found = world(2, |member| {
                let group = member.world_group().expect("every rank is in the world");
                let run = Run {
                    groups: Arc::new(TensorGroup(group)),
                    ..Run::new(&backend, dtype)
                };
                measure(&case(), &run)
            });
            let numbers = |seed, len| -> Vec<_> {
                let numbers = noise(seed, len).into_iter();
                numbers.map(|x| round(dtype, x)).collect()
            };
            let [first, second, third] = lens;
            let weights = [numbers(32, first), numbers(33, second), numbers(34, third)];
            let expected = expected(&numbers(31, 24), &weights);
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let names = ["weights0", "weights1", "weights2", "operand0"];
                for (what, expected) in names.into_iter().zip(expected) {
                    let place = format!("{what} of rank {rank} on {} in {dtype}", backend.name());
                    near(&place, &found[what], expected, tolerance(dtype), false);
                }
            }
        }
    }
}

/// The slices of `x [4, 6]` go through a function on their ranks, and are joined and summed.
const REGIONS: Case<'static> = Case {
    name: "regions of two ranks",
    operands: &[],
    ids: &[],
    build: &|module, _, _| {
        let axis = Axis::Tensor;
        let parts = vec![2, 4];
        let shard = Shard::new(1, parts);
        let x = module.param("operand0", &[4, 6], Init::Normal(1.0), ParamRole::Weight)?;
        let op = Op::Scatter {
            axis,
            shard: shard.clone(),
            local: 3,
        };
        let slice = one(module, op, &[&x])?;
        let bent = one(module, Op::Activation(Activation::Silu), &[&slice])?;
        let grad = JoinedGrad::Whole;
        let joined = one(module, Op::AllGather { axis, shard, grad }, &[&bent])?;
        let op = Reduction::Sum;
        let sum = one(module, Op::AllReduce { axis, op }, &[&bent])?;
        let copied = one(module, Op::CopyTo { axis }, &[&x])?;
        Ok(vec![joined, sum, copied])
    },
};

#[test]
fn regions_of_two_ranks_join_sum_and_slice() {
    let expected = |x: &[f64], weights: &[Vec<f64>; 3]| {
        let silu: Vec<_> = x.iter().map(|&x| x * sigmoid(x)).collect();
        let mut sum = vec![0.0; 12];
        let mut gradient = vec![0.0; 24];
        for (i, &x) in x.iter().enumerate() {
            let local = i / 6 * 3 + PLACES[i % 6].1;
            sum[local] += silu[i];
            // Both ranks use the whole of `x` in the same way.
            let upstream = weights[0][i] + weights[1][local];
            gradient[i] = slope_of_silu(x) * upstream + 2.0 * weights[2][i];
        }
        let each = [silu, sum, x.to_vec(), gradient];
        [each.clone(), each]
    };
    agree_on_two_ranks(|| REGIONS, [24, 12, 24], expected);
}

/// Both ranks bend all of `x [4, 6]`; the sum is cut, handed over from columns to rows, and joined
/// by columns for work that each rank does a part of.
const EXCHANGES: Case<'static> = Case {
    name: "exchanges of two ranks",
    operands: &[],
    ids: &[],
    build: &|module, _, _| {
        let axis = Axis::Tensor;
        let columns = Shard::new(1, vec![2, 4]);
        let rows = Shard::new(0, vec![4]);
        let x = module.param("operand0", &[4, 6], Init::Normal(1.0), ParamRole::Weight)?;
        let bent = one(module, Op::Activation(Activation::Silu), &[&x])?;
        let op = Op::ReduceScatter {
            axis,
            shard: columns.clone(),
            local: 3,
        };
        let slice = one(module, op, &[&bent])?;
        let op = Op::AllToAll {
            axis,
            from: columns.clone(),
            to: rows.clone(),
        };
        let of_rows = one(module, op, &[&slice])?;
        let op = Op::AllToAll {
            axis,
            from: rows,
            to: columns.clone(),
        };
        let back = one(module, op, &[&of_rows])?;
        let op = Op::AllGather {
            axis,
            shard: columns,
            grad: JoinedGrad::Summand,
        };
        let joined = one(module, op, &[&back])?;
        Ok(vec![slice, of_rows, joined])
    },
};

#[test]
fn exchanges_of_two_ranks_sum_cut_and_turn() {
    let expected = |x: &[f64], weights: &[Vec<f64>; 3]| {
        // Both ranks have the same summand.
        let sum: Vec<_> = x.iter().map(|&x| 2.0 * x * sigmoid(x)).collect();
        let mut gradient = vec![0.0; 24];
        let (mut columns, mut rows) = ([vec![0.0; 12], vec![0.0; 12]], sum.clone());
        let last_rows = rows.split_off(12);
        for (i, &x) in x.iter().enumerate() {
            let (rank, column) = PLACES[i % 6];
            columns[rank][i / 6 * 3 + column] = sum[i];
            // Each rank weighs its own columns, its own rows, and all of the joined value.
            let upstream =
                weights[0][i / 6 * 3 + column] + weights[1][i % 12] + 2.0 * weights[2][i];
            gradient[i] = slope_of_silu(x) * upstream;
        }
        let [first, second] = columns;
        [
            [first, rows, sum.clone(), gradient.clone()],
            [second, last_rows, sum, gradient],
        ]
    };
    agree_on_two_ranks(|| EXCHANGES, [12, 12, 24], expected);
}

/// Attention of two heads to the keys of a sequence of eight, of which each of two ranks has two
/// slices: from queries, keys and values of its own and those that go round, or of one rank alone.
fn ring_attention(is_ring: bool, module: &Module, x: &[Symbol]) -> Result<Vec<Symbol>> {
    let axis = Axis::Tensor;
    let shard = Shard::mirrored(1, 8);
    let slice = AxisSlice {
        mirrored: true,
        ..AxisSlice::new(axis, 1, 8)
    };
    let spec = Attention {
        heads: 2,
        kv_heads: 1,
        head_dim: 3,
        scale: 0.7,
        causal: true,
        window: Some(6),
        queries: is_ring.then_some(slice),
        keys: if is_ring { Keys::Ring } else { Keys::All },
        ..Attention::default()
    };
    let own = |x: &Symbol| {
        let (shard, local) = (shard.clone(), 4);
        if is_ring {
            one(module, Op::Scatter { axis, shard, local }, &[x])
        } else {
            Ok(x.clone())
        }
    };
    let [q, k, v] = [own(&x[0])?, own(&x[1])?, own(&x[2])?];
    let mixed = one(module, Op::Attention(spec), &[&q, &k, &v])?;
    let (shard, grad) = (shard.clone(), JoinedGrad::Whole);
    if is_ring {
        let joined = Op::AllGather { axis, shard, grad };
        return Ok(vec![one(module, joined, &[&mixed])?]);
    }
    Ok(vec![mixed])
}

#[test]
fn attention_in_a_ring_is_that_of_one_rank() {
    let operands = [t(&[2, 8, 6]), t(&[2, 8, 3]), t(&[2, 8, 3])];
    let case = |build: &'static Build<'static>| Case {
        name: "attention",
        operands: &operands,
        ids: &[],
        build,
    };
    let whole = case(&|module, x, _| ring_attention(false, module, x));
    for backend in host_backends(1) {
        for &dtype in dtypes(&backend) {
            let expected = measure(&whole, &Run::new(&backend, dtype));
            let found = world(2, |member| {
                let group = member.world_group().expect("every rank is in the world");
                let run = Run {
                    place: Coord::default().with(Axis::Tensor, group.rank()),
                    groups: Arc::new(TensorGroup(group)),
                    ..Run::new(&backend, dtype)
                };
                let ring = case(&|module, x, _| ring_attention(true, module, x));
                measure(&ring, &run)
            });
            for (rank, found) in found.iter().enumerate() {
                for (what, expected) in &expected {
                    let place = format!("{what} of rank {rank} on {} in {dtype}", backend.name());
                    near(
                        &place,
                        &found[what],
                        expected,
                        2.0 * tolerance(dtype),
                        false,
                    );
                }
            }
        }
    }
}
