use super::super::testing::{assert_close, assert_gradient, noise, on_any_threads, to_f64};
use super::super::{MaskKey, Threads, Units};
use super::*;
use crate::Runs;

const DROPOUT: DropoutMask = DropoutMask {
    key: MaskKey {
        seed: 1,
        step: 2,
        node: 3,
    },
    p: 0.3,
};

fn shape(batch: usize, lens: (usize, usize), heads: (usize, usize), dim: usize) -> AttentionShape {
    AttentionShape {
        batch,
        q_len: lens.0,
        k_len: lens.1,
        q_heads: heads.0,
        kv_heads: heads.1,
        head_dim: dim,
    }
}

/// Queries, keys and values without gaps.
fn tensors<T: Float>(shape: AttentionShape) -> [Vec<T>; 3] {
    let q = noise::<T>(1, shape.batch * shape.q_len * shape.q_width());
    let kv_len = shape.batch * shape.k_len * shape.kv_width();
    let double = |x: Vec<T>| x.into_iter().map(|x| x + x).collect();
    [double(q), double(noise(2, kv_len)), noise(3, kv_len)]
}

fn views<T: Float>(shape: AttentionShape, [q, k, v]: &[Vec<T>; 3]) -> [Strided<'_, T>; 3] {
    [
        Strided::contiguous(q, shape.q_len, shape.q_width()),
        Strided::contiguous(k, shape.k_len, shape.kv_width()),
        Strided::contiguous(v, shape.k_len, shape.kv_width()),
    ]
}

fn run<T: Float>(
    threads: &Threads,
    spec: &AttentionSpec<'_, T>,
    [q, k, v]: [Strided<'_, T>; 3],
) -> (Vec<T>, Vec<T>) {
    let shape = spec.shape;
    let rows = shape.batch * shape.q_len;
    let mut out = vec![T::ONE; rows * shape.q_width()];
    let mut lse = vec![T::ONE; rows * shape.q_heads];
    let view = MatMut::new(&mut out, rows, shape.q_width());
    attention(threads, spec, q, k, v, view, &mut lse);
    (out, lse)
}

/// `[dq, dk, dv]`.
fn run_grad<T: Float>(
    threads: &Threads,
    spec: &AttentionSpec<'_, T>,
    tensors: &[Vec<T>; 3],
    dout: &[T],
) -> [Vec<T>; 3] {
    run_bias_grad(threads, spec, tensors, dout, None)
}

/// `[dq, dk, dv]`, the gradient of the bias beside them.
fn run_bias_grad<T: Float>(
    threads: &Threads,
    spec: &AttentionSpec<'_, T>,
    tensors: &[Vec<T>; 3],
    dout: &[T],
    dbias: Option<&mut [T]>,
) -> [Vec<T>; 3] {
    let shape = spec.shape;
    let inputs = views(shape, tensors);
    let (out, lse) = run(threads, spec, inputs);
    let mut grads = tensors.clone().map(|x| vec![T::ONE; x.len()]);
    let [dq, dk, dv] = &mut grads;
    let (q_rows, k_rows) = (shape.batch * shape.q_len, shape.batch * shape.k_len);
    let outputs = [&out[..], dout].map(|x| Strided::contiguous(x, shape.q_len, shape.q_width()));
    let views = AttentionGrads {
        dq: MatMut::new(dq, q_rows, shape.q_width()),
        dk: MatMut::new(dk, k_rows, shape.kv_width()),
        dv: MatMut::new(dv, k_rows, shape.kv_width()),
        dbias,
    };
    attention_grad(threads, spec, inputs, outputs, &lse, views);
    grads
}

/// The definition, in f64, with every score at once; `keep` gives the factor of a probability.
fn naive(
    spec: &AttentionSpec<'_, f64>,
    [q, k, v]: &[Vec<f64>; 3],
    keep: impl Fn(usize, usize, usize, usize) -> f64,
) -> Vec<f64> {
    let s = spec.shape;
    let mut out = vec![0.0; q.len()];
    for (b, h, i) in (0..s.batch)
        .flat_map(|b| (0..s.q_heads).map(move |h| (b, h)))
        .flat_map(|(b, h)| (0..s.q_len).map(move |i| (b, h, i)))
    {
        let at = (b * s.q_len + i) * s.q_width() + h * s.head_dim;
        let kv_at =
            |j: usize| (b * s.k_len + j) * s.kv_width() + h * s.kv_heads / s.q_heads * s.head_dim;
        let position = (i + s.k_len) as i64 - s.q_len as i64;
        let scores: Vec<f64> = (0..s.k_len)
            .map(|j| {
                let distance = position - j as i64;
                let window = spec.window.map_or(i64::MAX, |w| w as i64);
                if (spec.causal && distance < 0) || distance >= window || -distance >= window {
                    return f64::NEG_INFINITY;
                }
                let dot: f64 = (0..s.head_dim).map(|d| q[at + d] * k[kv_at(j) + d]).sum();
                let terms = [spec.mask, spec.bias].into_iter().flatten();
                spec.scale * dot
                    + terms
                        .map(|term| term.row(b, h, i, j..j + 1)[0])
                        .sum::<f64>()
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if largest == f64::NEG_INFINITY {
            continue;
        }
        let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
        for (j, score) in scores.iter().enumerate() {
            let p = (score - largest).exp() / total * keep(b, h, i, j);
            for d in 0..s.head_dim {
                out[at + d] += p * v[kv_at(j) + d];
            }
        }
    }
    out
}

/// Every shape with plain, causal and windowed visibility.
fn specs<T: Float>() -> Vec<AttentionSpec<'static, T>> {
    let shapes = [
        shape(1, (1, 1), (1, 1), 1),
        shape(2, (5, 5), (2, 2), 3),
        shape(1, (70, 70), (4, 2), 8),
        shape(1, (3, 300), (2, 1), 5),
        shape(1, (130, 600), (1, 1), 4),
        shape(1, (9, 4), (2, 2), 4),
    ];
    let all = |shape| {
        let (full, causal) = (AttentionSpec::full(shape), AttentionSpec::causal(shape));
        let window = Some(7);
        [
            full,
            causal,
            AttentionSpec { window, ..full },
            AttentionSpec { window, ..causal },
        ]
    };
    shapes.into_iter().flat_map(all).collect()
}

fn everything(_: usize, _: usize, _: usize, _: usize) -> f64 {
    1.0
}

#[test]
fn values_match_the_definition_for_every_shape_and_visibility() {
    for spec in specs::<f32>() {
        let x = tensors::<f32>(spec.shape);
        let out = on_any_threads(|threads| run(threads, &spec, views(spec.shape, &x)).0);
        let wide = AttentionSpec {
            causal: spec.causal,
            window: spec.window,
            ..AttentionSpec::full(spec.shape)
        };
        let expected = naive(&wide, &x.each_ref().map(|x| to_f64(x)), everything);
        assert_close(&out, &expected, 2e-6);
    }
}

#[test]
fn gradients_match_finite_differences_for_every_shape_and_visibility() {
    for spec in specs::<f64>() {
        check_gradients(&spec);
    }
}

fn check_gradients(spec: &AttentionSpec<'_, f64>) {
    let x = tensors::<f64>(spec.shape);
    let dout = noise::<f64>(9, x[0].len());
    let lens = x.each_ref().map(Vec::len);
    let grads = on_any_threads(|threads| run_grad(threads, spec, &x, &dout).concat());
    let mut from = 0;
    for i in 0..3 {
        let f = |moved: &[f64]| {
            let mut x = x.clone();
            x[i] = moved.to_vec();
            run(&Threads::one(), spec, views(spec.shape, &x)).0
        };
        assert_gradient(&x[i], &dout, f, &grads[from..from + lens[i]]);
        from += lens[i];
    }
}

#[test]
fn single_precision_gradients_match_double() {
    let spec = AttentionSpec::causal(shape(2, (150, 300), (4, 2), 16));
    let x = tensors::<f64>(spec.shape);
    let dout = noise::<f64>(9, x[0].len());
    let wide = run_grad(&Threads::one(), &spec, &x, &dout);
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let spec = AttentionSpec::causal(spec.shape);
    let single = run_grad(
        &Threads::one(),
        &spec,
        &x.each_ref().map(|x| narrow(x)),
        &narrow(&dout),
    );
    for (actual, expected) in single.iter().zip(&wide) {
        assert_close(actual, expected, 2e-5);
    }
}

#[test]
fn an_additive_mask_may_repeat_over_samples_heads_and_queries() {
    let shape = shape(2, (6, 9), (4, 2), 4);
    for (batch_stride, head_stride, row_stride) in [(216, 54, 9), (54, 0, 9), (0, 54, 9), (9, 0, 0)]
    {
        let mut data = noise::<f64>(4, 2 * 216);
        data[3] = f64::NEG_INFINITY;
        let mask = AttentionMask {
            data: &data,
            batch_stride,
            head_stride,
            row_stride,
        };
        let spec = AttentionSpec {
            mask: Some(mask),
            ..AttentionSpec::causal(shape)
        };
        let x = tensors::<f64>(shape);
        let (out, _) = run(&Threads::one(), &spec, views(shape, &x));
        assert_close(&out, &naive(&spec, &x, everything), 1e-12);
        check_gradients(&spec);
    }
}

/// The same attention with a bias for all samples.
fn biased<'a>(spec: &AttentionSpec<'a, f64>, bias: &'a [f64]) -> AttentionSpec<'a, f64> {
    let AttentionShape { q_len, k_len, .. } = spec.shape;
    AttentionSpec {
        bias: Some(AttentionMask {
            data: bias,
            batch_stride: 0,
            head_stride: q_len * k_len,
            row_stride: k_len,
        }),
        ..*spec
    }
}

#[test]
fn the_gradient_of_a_bias_is_summed_over_samples_and_leaves_the_others_as_they_are() {
    for (lens, heads, causal, scale) in [
        ((5, 7), (4, 2), false, 0.7),
        ((9, 4), (2, 2), false, 1.0),
        ((70, 300), (2, 1), true, 0.0),
    ] {
        let shape = shape(3, lens, heads, 3);
        let mut hidden = vec![0.0; 3 * lens.1];
        hidden[lens.1 - 1] = f64::NEG_INFINITY;
        let bias = noise::<f64>(6, heads.0 * lens.0 * lens.1);
        let place = AttentionDropout {
            dropout: DROPOUT,
            first_sample: 0,
            first_head: 0,
        };
        let spec = AttentionSpec {
            causal,
            scale,
            mask: Some(AttentionMask {
                data: &hidden,
                batch_stride: lens.1,
                head_stride: 0,
                row_stride: 0,
            }),
            dropout: (heads.1 == 1).then_some(place),
            ..AttentionSpec::full(shape)
        };
        let x = tensors::<f64>(shape);
        let dout = noise::<f64>(9, x[0].len());
        let dbias = on_any_threads(|threads| {
            let mut dbias = vec![1.0; bias.len()];
            let grads = run_bias_grad(threads, &biased(&spec, &bias), &x, &dout, Some(&mut dbias));
            let plain = run_grad(threads, &biased(&spec, &bias), &x, &dout);
            assert_eq!(grads, plain);
            dbias
        });
        let f = |bias: &[f64]| run(&Threads::one(), &biased(&spec, bias), views(shape, &x)).0;
        assert_gradient(&bias, &dout, f, &dbias);
        if spec.dropout.is_none() {
            let (out, _) = run(&Threads::one(), &biased(&spec, &bias), views(shape, &x));
            assert_close(&out, &naive(&biased(&spec, &bias), &x, everything), 1e-12);
        }
    }
}

#[test]
fn dropout_draws_by_global_sample_and_head() {
    let all = shape(2, (70, 300), (4, 4), 4);
    let place = AttentionDropout {
        dropout: DROPOUT,
        first_sample: 10,
        first_head: 0,
    };
    let spec = AttentionSpec {
        dropout: Some(place),
        ..AttentionSpec::causal(all)
    };
    let x = tensors::<f64>(all);
    let (out, _) = run(&Threads::one(), &spec, views(all, &x));
    let factor = |b: usize, h: usize, i: usize, j: usize| {
        let mut factor = [1.0];
        let element = (h * 70 + i) * 300 + j;
        Mask::new(place.dropout).apply(10 + b as u64, element as u64, &mut factor);
        factor[0]
    };
    assert_close(&out, &naive(&spec, &x, factor), 1e-12);
    check_gradients(&spec);

    // Sample 1 and the heads 2 and 3, as another rank holds them.
    let part = shape(1, (70, 300), (2, 2), 4);
    let spec = AttentionSpec {
        dropout: Some(AttentionDropout {
            first_sample: 11,
            first_head: 2,
            ..place
        }),
        ..AttentionSpec::causal(part)
    };
    let slice = |x, rows: usize| Strided {
        offset: rows * 16 + 8,
        ..Strided::contiguous(x, rows, 16)
    };
    let [q, k, v] = &x;
    let views = [slice(q, 70), slice(k, 300), slice(v, 300)];
    let (part, _) = run(&Threads::one(), &spec, views);
    for (row, part) in part.chunks(8).enumerate() {
        assert_eq!(part, &out[(70 + row) * 16 + 8..][..8]);
    }
}

/// The rows of a sequence of `len` that a slice has, of each of two samples.
fn rows_of<T: Copy>(x: &[T], len: usize, (runs, local): Slice) -> Vec<T> {
    let width = x.len() / (2 * len);
    let row = |at: usize| x[at * width..][..width].to_vec();
    let rows = (0..2).flat_map(|batch| (0..local).map(move |own| batch * len + runs.at(own)));
    rows.flat_map(row).collect()
}

/// Adds the rows of a slice to those of its sequence.
fn add_rows(x: &mut [f64], len: usize, (runs, local): Slice, rows: &[f64]) {
    let width = x.len() / (2 * len);
    for (i, row) in rows.chunks(width).enumerate() {
        let at = i / local * len + runs.at(i % local);
        for (x, add) in x[at * width..].iter_mut().zip(row) {
            *x += add;
        }
    }
}

/// A slice of a sequence: where it lies, and its length.
type Slice = (Runs, usize);

/// An attention, its operands and results, and the gradients of its slices so far.
struct Sliced<'a> {
    whole: AttentionSpec<'a, f64>,
    x: [Vec<f64>; 3],
    out: Vec<f64>,
    lse: Vec<f64>,
    dout: Vec<f64>,
    grads: [Vec<f64>; 3],
}

impl Sliced<'_> {
    /// Queries of one slice and keys of another, and the attention between them.
    fn met(&self, own: Slice, theirs: Slice) -> (AttentionSpec<'_, f64>, [Vec<f64>; 3]) {
        let (all, [q, k, v]) = (self.whole.shape, &self.x);
        let len = all.q_len;
        let places = Places {
            queries: own.0,
            keys: theirs.0,
            len,
        };
        let shape = AttentionShape {
            q_len: own.1,
            k_len: theirs.1,
            ..all
        };
        let spec = AttentionSpec {
            shape,
            places: Some(places),
            ..self.whole
        };
        let operands = [
            rows_of(q, len, own),
            rows_of(k, len, theirs),
            rows_of(v, len, theirs),
        ];
        (spec, operands)
    }

    /// `lse` of a slice.
    fn own_lse(&self, own: Slice) -> Vec<f64> {
        let AttentionShape { q_len, q_heads, .. } = self.whole.shape;
        let of = |head: usize| (0..own.1).map(move |i| self.lse[head * q_len + own.0.at(i)]);
        (0..2 * q_heads).flat_map(of).collect()
    }

    /// Asserts that the queries of a slice meet the keys of all slices as those of the whole.
    fn check_forward(&self, own: Slice, all: &[Slice]) {
        let one = Threads::one();
        let AttentionShape { q_len, q_heads, .. } = self.whole.shape;
        let mut joined: Option<(Vec<f64>, Vec<f64>)> = None;
        for &theirs in all {
            let (spec, operands) = self.met(own, theirs);
            let met = run(&one, &spec, views(spec.shape, &operands));
            joined = Some(match joined {
                None => met,
                Some(others) => {
                    let (mut out, mut lse) = (vec![0.0; met.0.len()], vec![0.0; met.1.len()]);
                    let both = [(&others.0[..], &others.1[..]), (&met.0, &met.1)];
                    join_attention(&one, (q_heads, own.1), both, (&mut out, &mut lse));
                    (out, lse)
                }
            });
        }
        let (out, lse) = joined.expect("there are slices");
        assert_close(&out, &rows_of(&self.out, q_len, own), 1e-12);
        assert_close(&lse, &self.own_lse(own), 1e-12);
    }

    /// Adds the gradients of queries and keys that have met.
    fn add_grads(&mut self, own: Slice, theirs: Slice) {
        let (spec, operands) = self.met(own, theirs);
        let (shape, len) = (spec.shape, self.whole.shape.q_len);
        let mut grads = operands.clone();
        let [dq, dk, dv] = &mut grads;
        let to = AttentionGrads {
            dq: MatMut::new(dq, 2 * own.1, shape.q_width()),
            dk: MatMut::new(dk, 2 * theirs.1, shape.kv_width()),
            dv: MatMut::new(dv, 2 * theirs.1, shape.kv_width()),
            dbias: None,
        };
        let results = [&self.out, &self.dout].map(|x| rows_of(x, len, own));
        let results = results
            .each_ref()
            .map(|x| Strided::contiguous(x, own.1, shape.q_width()));
        let (inputs, lse) = (views(shape, &operands), self.own_lse(own));
        attention_grad(&Threads::one(), &spec, inputs, results, &lse, to);
        for ((sum, grad), slice) in self.grads.iter_mut().zip(&grads).zip([own, theirs, theirs]) {
            add_rows(sum, len, slice, grad);
        }
    }
}

/// Attention of slices of queries to slices of keys, against that of all.
fn check_slices(whole: &AttentionSpec<'_, f64>, all: &[Slice]) {
    let one = Threads::one();
    let x = tensors::<f64>(whole.shape);
    let (out, lse) = run(&one, whole, views(whole.shape, &x));
    let dout = noise::<f64>(7, out.len());
    let expected = run_grad(&one, whole, &x, &dout);
    let mut sliced = Sliced {
        whole: *whole,
        grads: expected.clone().map(|x| vec![0.0; x.len()]),
        x,
        out,
        lse,
        dout,
    };
    for &own in all {
        sliced.check_forward(own, all);
        for &theirs in all {
            sliced.add_grads(own, theirs);
        }
    }
    for (grad, expected) in sliced.grads.iter().zip(&expected) {
        assert_close(grad, expected, 1e-11);
    }
}

#[test]
fn slices_of_queries_meet_slices_of_keys_as_all_meet_all() {
    let documents = [0..50, 50..51, 51..120, 120..210];
    let documents: Vec<_> = documents
        .into_iter()
        .flat_map(|document| vec![document.clone(); document.len()])
        .collect();
    let documents = [documents.clone(), vec![0..210; 210]].concat();
    let dropout = AttentionDropout {
        dropout: DROPOUT,
        first_sample: 4,
        first_head: 2,
    };
    let causal = AttentionSpec::causal(shape(2, (210, 210), (4, 2), 4));
    let plain = AttentionSpec {
        causal: false,
        ..causal
    };
    for spec in [causal, plain] {
        for (window, documents, dropout) in [
            (None, None, None),
            (Some(60), None, Some(dropout)),
            (None, Some(&documents[..]), None),
            (Some(31), Some(&documents[..]), Some(dropout)),
        ] {
            let spec = AttentionSpec {
                window,
                documents,
                dropout,
                ..spec
            };
            check_slices(&spec, &[0, 1, 2].map(|rank| (Runs::one(70 * rank), 70)));
            let mirrored = |rank: usize| (Runs::two(35 * rank, 35, 210 - 35 * (rank + 1)), 70);
            check_slices(&spec, &[0, 1, 2].map(mirrored));
        }
    }
}

#[test]
fn packed_queries_keys_and_values_are_read_and_their_gradients_written_in_place() {
    let shape = shape(2, (67, 67), (3, 3), 5);
    let width = shape.q_width();
    let packed = noise::<f32>(1, 2 * 67 * 3 * width);
    let column = |i: usize| Strided {
        data: &packed[..],
        batch_stride: 67 * 3 * width,
        row_stride: 3 * width,
        offset: i * width,
    };
    let apart = [0, 1, 2].map(|i| {
        let rows = packed.chunks(3 * width);
        rows.flat_map(|row| row[i * width..][..width].to_vec())
            .collect::<Vec<_>>()
    });
    let (spec, one) = (AttentionSpec::causal(shape), Threads::one());
    let inputs = [column(0), column(1), column(2)];
    let (out, lse) = run(&one, &spec, inputs);
    assert_eq!(out, run(&one, &spec, views(shape, &apart)).0);

    let dout = noise::<f32>(2, out.len());
    let mut grads = vec![0.0; packed.len()];
    let (dq, rest) = MatMut::new(&mut grads, 2 * 67, 3 * width).split_cols(width);
    let (dk, dv) = rest.split_cols(width);
    let outputs = [&out[..], &dout].map(|x| Strided::contiguous(x, 67, width));
    attention_grad(
        &one,
        &spec,
        inputs,
        outputs,
        &lse,
        AttentionGrads {
            dq,
            dk,
            dv,
            dbias: None,
        },
    );
    let expected = run_grad(&one, &spec, &apart, &dout);
    for (row, grads) in grads.chunks(3 * width).enumerate() {
        for (i, grads) in grads.chunks(width).enumerate() {
            assert_eq!(grads, &expected[i][row * width..][..width]);
        }
    }
}

#[test]
fn a_query_without_keys_gives_zeros_and_zero_gradients() {
    let shape = shape(1, (4, 300), (1, 1), 3);
    let mut data = vec![0.0_f32; 4 * 300];
    data[300..600].fill(f32::NEG_INFINITY);
    let mask = AttentionMask {
        data: &data,
        batch_stride: 0,
        head_stride: 0,
        row_stride: 300,
    };
    let spec = AttentionSpec {
        mask: Some(mask),
        ..AttentionSpec::full(shape)
    };
    let x = tensors::<f32>(shape);
    let (out, lse) = run(&Threads::one(), &spec, views(shape, &x));
    assert_eq!(out[3..6], [0.0; 3]);
    assert_eq!(lse[1], f32::NEG_INFINITY);
    let [dq, dk, dv] = run_grad(&Threads::one(), &spec, &x, &[1.0; 12]);
    assert_eq!(dq[3..6], [0.0; 3]);
    assert!(dk.iter().chain(&dv).all(|x| x.is_finite()));
}

#[test]
fn nothing_at_all_is_fine() {
    for (lens, batch) in [((0, 5), 1), ((5, 0), 1), ((5, 5), 0)] {
        let spec = AttentionSpec::<f32>::full(shape(batch, lens, (2, 1), 4));
        let x = tensors::<f32>(spec.shape);
        let dout = vec![1.0; x[0].len()];
        let (out, _) = run(&Threads::one(), &spec, views(spec.shape, &x));
        assert!(out.iter().all(|&x| x == 0.0));
        let grads = run_grad(&Threads::one(), &spec, &x, &dout).concat();
        assert!(grads.iter().all(|&x| x == 0.0));
    }
}

#[test]
fn a_nan_reaches_the_queries_that_see_it() {
    let spec = AttentionSpec::causal(shape(1, (6, 6), (1, 1), 2));
    let mut x = tensors::<f32>(spec.shape);
    x[1][2 * 3] = f32::NAN;
    let (out, _) = run(&Threads::one(), &spec, views(spec.shape, &x));
    assert!(out[..6].iter().all(|x| x.is_finite()));
    assert!(out[6..].iter().all(|x| x.is_nan()));
}

/// The elements as bf16 holds them.
fn as_halves<T: Float>(x: &[T]) -> Vec<T> {
    let rounded = |x: &T| half::bf16::from_f64(x.to_f64()).to_f64();
    x.iter().map(|x| T::from_f64(rounded(x))).collect()
}

/// The largest difference, as a part of the largest element.
fn apart(found: &[f32], expected: &[f64]) -> f64 {
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    let differences = pairs.map(|(&found, x)| (f64::from(found) - x).abs());
    differences.fold(0.0, f64::max) / largest
}

#[test]
fn rounded_factors_change_digits_beyond_those_of_bf16_on_all_units_and_none_of_f64() {
    for (shape, causal) in [
        (shape(1, (70, 70), (4, 2), 64), true),
        (shape(2, (130, 300), (2, 1), 32), false),
        (shape(1, (3, 300), (2, 1), 5), false),
    ] {
        let spec = AttentionSpec {
            causal,
            rounds: true,
            ..AttentionSpec::<f32>::full(shape)
        };
        let exact = AttentionSpec {
            causal,
            rounds: true,
            ..AttentionSpec::<f64>::full(shape)
        };
        let x = tensors::<f32>(shape).map(|x| as_halves(&x));
        let dout = as_halves(&noise::<f32>(9, x[0].len()));
        let wide = x.each_ref().map(|x| to_f64(x));
        let (expected, _) = run(&Threads::one(), &exact, views(shape, &wide));
        let plain = AttentionSpec {
            rounds: false,
            ..exact
        };
        assert!(run(&Threads::one(), &plain, views(shape, &wide)).0 == expected);
        let expected_grads = run_grad(&Threads::one(), &exact, &wide, &to_f64(&dout));
        for units in [Units::None, Units::Vector, Units::Matrix] {
            let found = on_any_threads(|threads| {
                let threads = threads.clone().with_units(units);
                let (out, _) = run(&threads, &spec, views(shape, &x));
                let [dq, dk, dv] = run_grad(&threads, &spec, &x, &dout);
                [out, dq, dk, dv].concat()
            });
            let (out, mut rest) = found.split_at(expected.len());
            // An eighth bit is lost where numbers are rounded; the smallest are lost in sums.
            let error = apart(out, &expected);
            assert!((1e-5..0.004).contains(&error), "{error} on {units:?}");
            for expected in &expected_grads {
                let (grad, others) = rest.split_at(expected.len());
                rest = others;
                let error = apart(grad, expected);
                assert!((1e-5..0.016).contains(&error), "{error} on {units:?}");
            }
        }
    }
}
