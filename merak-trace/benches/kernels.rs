//! Speed of the CPU kernels at the shapes of a GPT with 8 layers of 512, beside a copy.
//!
//! `cargo bench -p merak-trace --features bench --bench kernels`; each benchmark runs on one and on
//! two threads.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use merak_trace::kernels::{
    Activation, AttentionGrads, AttentionShape, AttentionSpec, DropoutMask, MaskKey, MatMut,
    MatRef, SampleSlice, Strided, Targets, Threads, Write, activation, activation_grad, attention,
    attention_grad, cross_entropy, cross_entropy_grad, dropout, gemm, layer_norm,
    layer_norm_grad_input,
};

const THREADS: [usize; 2] = [1, 2];
const ROWS: usize = 512;
const WIDTH: usize = 512;

fn main() {
    divan::main();
}

fn noise(len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0)
        .collect()
}

fn run(bencher: Bencher<'_, '_>, num_threads: usize, mut kernel: impl FnMut(&Threads)) {
    let threads = Threads::new(num_threads).expect("the threads of a benchmark start");
    bencher.bench_local(|| kernel(&threads));
}

/// The yardstick of kernels that are limited by memory speed.
#[divan::bench]
fn copy(bencher: Bencher<'_, '_>) {
    let (x, mut y) = (noise(ROWS * 4 * WIDTH), noise(ROWS * 4 * WIDTH));
    bencher
        .counter(BytesCount::of_slice(&x))
        .bench_local(|| black_box(&mut y).copy_from_slice(&x));
}

/// Multiply-adds per second, as items: forward, input gradient and weight gradient of a layer.
#[divan::bench(args = THREADS, consts = [512, 2048])]
fn product<const OUT: usize>(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (x, w, mut y) = (noise(ROWS * WIDTH), noise(OUT * WIDTH), noise(ROWS * OUT));
    let (x, w) = (MatRef::new(&x, ROWS, WIDTH), MatRef::new(&w, OUT, WIDTH));
    let bencher = bencher.counter(ItemsCount::new(ROWS * OUT * WIDTH));
    run(bencher, num_threads, |threads| {
        let y = MatMut::new(&mut y, ROWS, OUT);
        gemm(threads, 1.0, x, w.transposed(), Write::Replace, y);
    });
}

#[divan::bench(args = THREADS, consts = [512, 2048])]
fn weight_gradient<const OUT: usize>(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (x, dy, mut dw) = (noise(ROWS * WIDTH), noise(ROWS * OUT), noise(OUT * WIDTH));
    let (x, dy) = (MatRef::new(&x, ROWS, WIDTH), MatRef::new(&dy, ROWS, OUT));
    let bencher = bencher.counter(ItemsCount::new(ROWS * OUT * WIDTH));
    run(bencher, num_threads, |threads| {
        let dw = MatMut::new(&mut dw, OUT, WIDTH);
        gemm(threads, 1.0, dy.transposed(), x, Write::Add, dw);
    });
}

#[divan::bench(args = THREADS, consts = [256, 1024])]
fn causal_attention<const LEN: usize>(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (spec, qkv, mut out, mut lse) = attention_case(LEN);
    run(bencher, num_threads, |threads| {
        let [q, k, v] = packed(&qkv, LEN);
        let out = MatMut::new(&mut out, ROWS * 2, WIDTH);
        attention(threads, &spec, q, k, v, out, &mut lse);
    });
}

#[divan::bench(args = THREADS, consts = [256, 1024])]
fn causal_attention_gradient<const LEN: usize>(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (spec, qkv, mut out, mut lse) = attention_case(LEN);
    let (dout, mut grads) = (noise(out.len()), qkv.clone());
    let [q, k, v] = packed(&qkv, LEN);
    let view = MatMut::new(&mut out, ROWS * 2, WIDTH);
    attention(&Threads::one(), &spec, q, k, v, view, &mut lse);
    let outputs = [&out[..], &dout].map(|x| Strided::contiguous(x, LEN, WIDTH));
    run(bencher, num_threads, |threads| {
        let (dq, rest) = MatMut::new(&mut grads, ROWS * 2, 3 * WIDTH).split_cols(WIDTH);
        let (dk, dv) = rest.split_cols(WIDTH);
        let grads = AttentionGrads {
            dq,
            dk,
            dv,
            dbias: None,
        };
        attention_grad(threads, &spec, [q, k, v], outputs, &lse, grads);
    });
}

/// 1024 positions in samples of `len`, with eight heads of 64.
fn attention_case(len: usize) -> (AttentionSpec<'static, f32>, Vec<f32>, Vec<f32>, Vec<f32>) {
    let spec = AttentionSpec::causal(AttentionShape {
        batch: ROWS * 2 / len,
        q_len: len,
        k_len: len,
        q_heads: 8,
        kv_heads: 8,
        head_dim: WIDTH / 8,
    });
    let positions = ROWS * 2;
    let (qkv, out) = (noise(positions * 3 * WIDTH), noise(positions * WIDTH));
    (spec, qkv, out, noise(positions * 8))
}

fn packed(qkv: &[f32], len: usize) -> [Strided<'_, f32>; 3] {
    [0, 1, 2].map(|i| Strided {
        data: qkv,
        batch_stride: len * 3 * WIDTH,
        row_stride: 3 * WIDTH,
        offset: i * WIDTH,
    })
}

#[divan::bench(args = THREADS)]
fn norm_and_gradient(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (x, dy, w) = (noise(ROWS * WIDTH), noise(ROWS * WIDTH), noise(WIDTH));
    let (mut y, mut mean, mut rstd) = (x.clone(), noise(ROWS), noise(ROWS));
    let bencher = bencher.counter(BytesCount::of_slice(&x));
    run(bencher, num_threads, |threads| {
        layer_norm(threads, &x, &w, None, 1e-5, &mut y, &mut mean, &mut rstd);
        layer_norm_grad_input(threads, &dy, &x, &w, &mean, &rstd, &mut y);
    });
}

#[divan::bench(args = THREADS)]
fn gelu(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (x, mut y) = (noise(ROWS * 4 * WIDTH), noise(ROWS * 4 * WIDTH));
    let bencher = bencher.counter(BytesCount::of_slice(&x));
    run(bencher, num_threads, |threads| {
        activation(threads, Activation::GeluTanh, &x, &mut y);
    });
}

#[divan::bench(args = THREADS)]
fn gelu_gradient(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (x, dy, mut dx) = (
        noise(ROWS * 4 * WIDTH),
        noise(ROWS * 4 * WIDTH),
        noise(ROWS * 4 * WIDTH),
    );
    let bencher = bencher.counter(BytesCount::of_slice(&x));
    run(bencher, num_threads, |threads| {
        activation_grad(threads, Activation::GeluTanh, &x, &dy, &mut dx);
    });
}

#[divan::bench(args = THREADS)]
fn drop_a_tenth(bencher: Bencher<'_, '_>, num_threads: usize) {
    let (x, mut y) = (noise(ROWS * 4 * WIDTH), noise(ROWS * 4 * WIDTH));
    let key = MaskKey {
        seed: 1,
        step: 2,
        node: 3,
    };
    let slice = SampleSlice::whole(0, ROWS * WIDTH);
    let bencher = bencher.counter(BytesCount::of_slice(&x));
    run(bencher, num_threads, |threads| {
        dropout(threads, DropoutMask { key, p: 0.1 }, slice, &x, &mut y);
    });
}

#[divan::bench(args = THREADS)]
fn loss_and_gradient(bencher: Bencher<'_, '_>, num_threads: usize) {
    let classes = 8192;
    let (x, mut dx, mut lse) = (noise(ROWS * classes), noise(ROWS * classes), noise(ROWS));
    let labels: Vec<i64> = (0..8192).step_by(16).collect();
    let targets = Targets::all(&labels, 0.0, classes);
    let bencher = bencher.counter(BytesCount::of_slice(&x));
    run(bencher, num_threads, |threads| {
        let loss = cross_entropy(threads, &x, &labels, 0.0, &mut lse);
        let grad = cross_entropy_grad(threads, &targets, Some(&x), &lse, 1.0, &mut dx);
        loss.and(grad).expect("the labels are classes");
    });
}
