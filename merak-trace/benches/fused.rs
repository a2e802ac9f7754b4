//! Speed of the fused kernels beside the same mathematics composed of plain tensor operations.
//!
//! `RAYON_NUM_THREADS=1 cargo bench -p merak-trace --features bench --bench fused` prints medians
//! and the median ratio. Both sides compute the output and all gradients on one thread, by turns,
//! at the shapes of a GPT with layers of 512. The plain side runs candle's operations on whole
//! tensors, and its autograd from the sum of the outputs.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use merak_trace::kernels::{
    Activation, AttentionGrads, AttentionMask, AttentionShape, AttentionSpec, DropoutMask, MaskKey,
    MatMut, SampleSlice, Strided, TableRows, Targets, Threads, Turn, activation, activation_grad,
    add_assign, attention, attention_grad, cross_entropy, cross_entropy_grad, dropout, embedding,
    embedding_grad, layer_norm, layer_norm_grad_input, layer_norm_grad_params, rms_norm,
    rms_norm_grad_input, rms_norm_grad_params, rope, silu_mul, silu_mul_grad, softmax,
    softmax_grad,
};
use std::f64::consts::{FRAC_1_SQRT_2, PI};
use std::hint::black_box;
use std::time::Instant;

const ROWS: usize = 512;
const WIDTH: usize = 512;
const WIDE: usize = 4 * WIDTH;
const CLASSES: usize = 8192;
const HEADS: usize = 8;
const ROUNDS: usize = 15;

/// Two ways to the same numbers.
struct Case {
    name: &'static str,
    fused: Box<dyn FnMut()>,
    plain: Box<dyn FnMut() -> Result<()>>,
}

impl Case {
    fn new(
        name: &'static str,
        fused: impl FnMut() + 'static,
        plain: impl FnMut() -> Result<()> + 'static,
    ) -> Self {
        Self {
            name,
            fused: Box::new(fused),
            plain: Box::new(plain),
        }
    }
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn main() -> Result<()> {
    println!(
        "{:<22}{:>12}{:>12}{:>8}",
        "kernel", "fused µs", "plain µs", "ratio"
    );
    for mut case in cases()? {
        let mut times = Vec::with_capacity(ROUNDS);
        for round in 0..=ROUNDS {
            let start = Instant::now();
            (case.fused)();
            let fused = start.elapsed().as_secs_f64() * 1e6;
            let start = Instant::now();
            (case.plain)()?;
            let plain = start.elapsed().as_secs_f64() * 1e6;
            // The first round touches memory for the first time.
            if round > 0 {
                times.push((fused, plain));
            }
        }
        let median = |of: fn(&(f64, f64)) -> f64| {
            let mut all: Vec<_> = times.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let (fused, plain) = (median(|t| t.0), median(|t| t.1));
        let ratio = median(|t| t.1 / t.0);
        println!("{:<22}{fused:>12.0}{plain:>12.0}{ratio:>8.1}", case.name);
    }
    Ok(())
}

fn cases() -> Result<Vec<Case>> {
    let attentions: Result<Vec<_>> = FORMS.into_iter().map(Form::case).collect();
    let mut cases = attentions?;
    cases.extend([
        layer_norm_case()?,
        rms_norm_case()?,
        activation_case("gelu, tanh", Activation::GeluTanh, plain_gelu_tanh)?,
        activation_case("gelu, erf", Activation::GeluErf, plain_gelu_erf)?,
        silu_gate()?,
        softmax_case()?,
        cross_entropy_case()?,
        embedding_case()?,
        rotary_embedding()?,
        dropout_case()?,
        residual_add()?,
    ]);
    Ok(cases)
}

fn noise(len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0)
        .collect()
}

fn ones(len: usize) -> Vec<f32> {
    vec![1.0; len]
}

fn tensor(shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(noise(shape.iter().product()), shape, &Device::Cpu)
}

fn var(shape: &[usize]) -> Result<Var> {
    Var::from_tensor(&tensor(shape)?)
}

fn backward(output: &Tensor) -> Result<()> {
    black_box(output.sum_all()?.backward()?);
    Ok(())
}

/// A form of attention; length and width are common to all forms.
#[derive(Clone, Copy)]
struct Form {
    name: &'static str,
    kv_heads: usize,
    causal: bool,
    window: Option<usize>,
    /// Number of keys hidden as padding at the end of each sample in the second half.
    hidden: usize,
    /// Whether a table `[heads, q, k]` is added to the scores and has a gradient.
    biased: bool,
}

const CAUSAL: Form = Form {
    name: "causal attention",
    kv_heads: HEADS,
    causal: true,
    window: None,
    hidden: 0,
    biased: false,
};

/// The forms in model families: encoders with padding, grouped-query heads, windows, relative
/// positions.
const FORMS: [Form; 5] = [
    CAUSAL,
    Form {
        name: "  hidden keys",
        causal: false,
        hidden: ATTENTION_LEN / 4,
        ..CAUSAL
    },
    Form {
        name: "  grouped queries",
        kv_heads: HEADS / 4,
        ..CAUSAL
    },
    Form {
        name: "  window of 64",
        window: Some(64),
        ..CAUSAL
    },
    Form {
        name: "  with a bias",
        causal: false,
        biased: true,
        ..CAUSAL
    },
];

const ATTENTION_LEN: usize = 256;
const BATCH: usize = 2 * ROWS / ATTENTION_LEN;

impl Form {
    fn sees(&self, query: usize, key: usize) -> bool {
        let window = self.window.unwrap_or(usize::MAX);
        !(self.causal && key > query) && query.saturating_sub(key) < window
    }

    /// The mask that hides padding, `[B, k]`.
    fn padding(&self) -> Vec<f32> {
        let seen = |sample, key| sample < BATCH / 2 || key + self.hidden < ATTENTION_LEN;
        let keys = (0..BATCH * ATTENTION_LEN).map(|i| (i / ATTENTION_LEN, i % ATTENTION_LEN));
        keys.map(|(sample, key)| hidden_unless(seen(sample, key)))
            .collect()
    }

    fn case(self) -> Result<Case> {
        const LEN: usize = ATTENTION_LEN;
        let dim = WIDTH / HEADS;
        let (rows, kv_width) = (BATCH * LEN, self.kv_heads * dim);
        let widths = [WIDTH, kv_width, kv_width];
        let (qkv, dout) = (widths.map(|width| noise(rows * width)), ones(rows * WIDTH));
        let (mut out, mut lse) = (noise(rows * WIDTH), noise(rows * HEADS));
        let mut grads = qkv.clone();
        let padding = self.padding();
        let bias = noise(HEADS * LEN * LEN);
        let mut dbias = bias.clone();
        let fused = move || {
            let threads = Threads::one();
            let spec = AttentionSpec {
                causal: self.causal,
                window: self.window,
                mask: (self.hidden > 0).then_some(AttentionMask {
                    data: &padding,
                    batch_stride: LEN,
                    head_stride: 0,
                    row_stride: 0,
                }),
                bias: self.biased.then_some(AttentionMask {
                    data: &bias,
                    batch_stride: 0,
                    head_stride: LEN * LEN,
                    row_stride: LEN,
                }),
                ..AttentionSpec::full(AttentionShape {
                    batch: BATCH,
                    q_len: LEN,
                    k_len: LEN,
                    q_heads: HEADS,
                    kv_heads: self.kv_heads,
                    head_dim: dim,
                })
            };
            let [q, k, v] = [0, 1, 2].map(|i| Strided::contiguous(&qkv[i], LEN, widths[i]));
            let result = MatMut::new(&mut out, rows, WIDTH);
            attention(&threads, &spec, q, k, v, result, &mut lse);
            let outputs = [&out[..], &dout].map(|x| Strided::contiguous(x, LEN, WIDTH));
            let [dq, dk, dv] = &mut grads;
            let grads = AttentionGrads {
                dq: MatMut::new(dq, rows, WIDTH),
                dk: MatMut::new(dk, rows, kv_width),
                dv: MatMut::new(dv, rows, kv_width),
                dbias: self.biased.then_some(&mut dbias[..]),
            };
            attention_grad(&threads, &spec, [q, k, v], outputs, &lse, grads);
        };
        Ok(Case::new(self.name, fused, self.plain()?))
    }

    fn plain(self) -> Result<impl FnMut() -> Result<()> + 'static> {
        const LEN: usize = ATTENTION_LEN;
        let dim = WIDTH / HEADS;
        let group = HEADS / self.kv_heads;
        let q = var(&[BATCH, HEADS, LEN, dim])?;
        let [k, v] = [(); 2].map(|()| var(&[BATCH, self.kv_heads, LEN, dim]));
        let (k, v) = (k?, v?);
        let bias = self.biased.then(|| var(&[HEADS, LEN, LEN])).transpose()?;
        let seen = (0..LEN * LEN).map(|i| hidden_unless(self.sees(i / LEN, i % LEN)));
        let mut hidden = Tensor::from_vec(seen.collect(), (1, 1, LEN, LEN), &Device::Cpu)?;
        if self.hidden > 0 {
            let padding = Tensor::from_vec(self.padding(), (BATCH, 1, 1, LEN), &Device::Cpu)?;
            hidden = hidden.broadcast_add(&padding)?;
        }
        // Each head of keys, repeated for every head of queries that shares it.
        let shared = move |x: &Tensor| -> Result<Tensor> {
            let shape = (BATCH, HEADS / group, group, LEN, dim);
            let shared = x.unsqueeze(2)?.broadcast_as(shape)?;
            shared.reshape((BATCH, HEADS, LEN, dim))
        };
        let scale = (dim as f64).powf(-0.5);
        Ok(move || {
            let (k, v) = if group > 1 {
                (shared(&k)?, shared(&v)?)
            } else {
                (k.as_tensor().clone(), v.as_tensor().clone())
            };
            let mut scores = (q.matmul(&k.t()?)? * scale)?;
            if self.causal || self.hidden > 0 {
                scores = scores.broadcast_add(&hidden)?;
            }
            if let Some(bias) = &bias {
                scores = scores.broadcast_add(bias)?;
            }
            backward(&plain_softmax(&scores)?.matmul(&v)?)
        })
    }
}

/// The term added to the score of a key.
fn hidden_unless(seen: bool) -> f32 {
    if seen { 0.0 } else { f32::NEG_INFINITY }
}

fn layer_norm_case() -> Result<Case> {
    let (x, dy, w) = (noise(ROWS * WIDTH), ones(ROWS * WIDTH), noise(WIDTH));
    let (mut y, mut dx, mut mean, mut rstd) = (x.clone(), x.clone(), noise(ROWS), noise(ROWS));
    let (mut dw, mut db) = (w.clone(), w.clone());
    let fused = move || {
        let threads = Threads::one();
        layer_norm(
            &threads,
            &x,
            &w,
            Some(&w),
            1e-5,
            &mut y,
            &mut mean,
            &mut rstd,
        );
        layer_norm_grad_input(&threads, &dy, &x, &w, &mean, &rstd, &mut dx);
        layer_norm_grad_params(&threads, &dy, &x, &mean, &rstd, &mut dw, Some(&mut db));
    };
    let (x, w, b) = (var(&[ROWS, WIDTH])?, var(&[WIDTH])?, var(&[WIDTH])?);
    Ok(Case::new("layer norm", fused, move || {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = centred.broadcast_div(&(variance + 1e-5)?.sqrt()?)?;
        backward(&normed.broadcast_mul(&w)?.broadcast_add(&b)?)
    }))
}

fn rms_norm_case() -> Result<Case> {
    let (x, dy, w) = (noise(ROWS * WIDTH), ones(ROWS * WIDTH), noise(WIDTH));
    let (mut y, mut dx, mut rstd, mut dw) = (x.clone(), x.clone(), noise(ROWS), w.clone());
    let fused = move || {
        let threads = Threads::one();
        rms_norm(&threads, &x, &w, 1e-5, &mut y, &mut rstd);
        rms_norm_grad_input(&threads, &dy, &x, &w, &rstd, &mut dx);
        rms_norm_grad_params(&threads, &dy, &x, &rstd, &mut dw);
    };
    let (x, w) = (var(&[ROWS, WIDTH])?, var(&[WIDTH])?);
    Ok(Case::new("RMS norm", fused, move || {
        let squares = x.sqr()?.mean_keepdim(D::Minus1)?;
        backward(
            &x.broadcast_div(&(squares + 1e-5)?.sqrt()?)?
                .broadcast_mul(&w)?,
        )
    }))
}

fn activation_case(
    name: &'static str,
    kind: Activation,
    plain: fn(&Tensor) -> Result<Tensor>,
) -> Result<Case> {
    let (x, dy) = (noise(ROWS * WIDE), ones(ROWS * WIDE));
    let (mut y, mut dx) = (x.clone(), x.clone());
    let fused = move || {
        let threads = Threads::one();
        activation(&threads, kind, &x, &mut y);
        activation_grad(&threads, kind, &x, &dy, &mut dx);
    };
    let x = var(&[ROWS, WIDE])?;
    Ok(Case::new(name, fused, move || backward(&plain(&x)?)))
}

fn plain_gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let argument = ((x.sqr()? * 0.044_715)? + 1.0)?.mul(x)?;
    let tanh = (argument * (2.0 / PI).sqrt())?.tanh()?;
    (x * 0.5)? * (tanh + 1.0)?
}

fn plain_gelu_erf(x: &Tensor) -> Result<Tensor> {
    (x * 0.5)? * ((x * FRAC_1_SQRT_2)?.erf()? + 1.0)?
}

fn silu_gate() -> Result<Case> {
    let (gate, up, dy) = (noise(ROWS * WIDE), noise(ROWS * WIDE), ones(ROWS * WIDE));
    let (mut y, mut dgate, mut dup) = (gate.clone(), gate.clone(), gate.clone());
    let fused = move || {
        let threads = Threads::one();
        silu_mul(&threads, &gate, &up, &mut y);
        silu_mul_grad(&threads, &gate, &up, &dy, &mut dgate, &mut dup);
    };
    let (gate, up) = (var(&[ROWS, WIDE])?, var(&[ROWS, WIDE])?);
    Ok(Case::new("silu gate", fused, move || {
        let sigmoid = ((gate.neg()?.exp()? + 1.0)?).recip()?;
        backward(&gate.mul(&sigmoid)?.mul(&up)?)
    }))
}

/// Softmax over the last dimension.
fn plain_softmax(x: &Tensor) -> Result<Tensor> {
    let largest = x.max_keepdim(D::Minus1)?.detach();
    let exps = x.broadcast_sub(&largest)?.exp()?;
    exps.broadcast_div(&exps.sum_keepdim(D::Minus1)?)
}

fn softmax_case() -> Result<Case> {
    let (x, dy) = (noise(ROWS * WIDE), ones(ROWS * WIDE));
    let (mut y, mut dx) = (x.clone(), x.clone());
    let fused = move || {
        let threads = Threads::one();
        softmax(&threads, WIDE, &x, &mut y);
        softmax_grad(&threads, WIDE, &y, &dy, &mut dx);
    };
    let x = var(&[ROWS, WIDE])?;
    Ok(Case::new("softmax", fused, move || {
        backward(&plain_softmax(&x)?)
    }))
}

fn labels(count: usize) -> Vec<i64> {
    (0..count)
        .map(|i| (i * 7919 % CLASSES).cast_signed() as i64)
        .collect()
}

fn cross_entropy_case() -> Result<Case> {
    let (x, ids) = (noise(ROWS * CLASSES), labels(ROWS));
    let (mut logits, mut lse) = (x.clone(), noise(ROWS));
    let plain_ids = Tensor::from_vec(ids.clone(), (ROWS, 1), &Device::Cpu)?;
    let fused = move || {
        let threads = Threads::one();
        // The gradient takes the place of the logits.
        logits.copy_from_slice(&x);
        let loss = cross_entropy(&threads, &logits, &ids, 0.0, &mut lse);
        let targets = Targets::all(&ids, 0.0, CLASSES);
        let grad = cross_entropy_grad(
            &threads,
            &targets,
            None,
            &lse,
            1.0 / ROWS as f32,
            &mut logits,
        );
        black_box(loss.and(grad)).expect("the labels are classes");
    };
    let x = var(&[ROWS, CLASSES])?;
    Ok(Case::new("cross entropy", fused, move || {
        let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
        let lse = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
        let of_labels = shifted.gather(&plain_ids, D::Minus1)?;
        backward(&((lse - of_labels)? / ROWS as f64)?)
    }))
}

fn embedding_case() -> Result<Case> {
    let (table, dy, ids) = (noise(CLASSES * WIDTH), ones(ROWS * WIDTH), labels(ROWS));
    let (mut y, mut dtable) = (dy.clone(), table.clone());
    let plain_ids = Tensor::from_vec(ids.clone(), ROWS, &Device::Cpu)?;
    let rows = TableRows::all(CLASSES);
    let fused = move || {
        let threads = Threads::one();
        let found = embedding(&threads, &rows, &table, &ids, &mut y);
        let grad = embedding_grad(&threads, &rows, &dy, &ids, &mut dtable);
        found.and(grad).expect("the ids are rows");
    };
    let table = var(&[CLASSES, WIDTH])?;
    Ok(Case::new("embedding", fused, move || {
        backward(&table.index_select(&plain_ids, 0)?)
    }))
}

fn rotary_embedding() -> Result<Case> {
    let (dim, half) = (WIDTH / HEADS, WIDTH / HEADS / 2);
    let inv_freq: Vec<f32> = (0..half)
        .map(|i| 10_000_f32.powf(-(i as f32) / half as f32))
        .collect();
    let positions: Vec<i64> = (0..ROWS.cast_signed() as i64).collect();
    let angles: Vec<f32> = positions
        .iter()
        .flat_map(|&p| inv_freq.iter().map(move |f| p as f32 * f))
        .collect();
    let (x, dy) = (noise(ROWS * WIDTH), ones(ROWS * WIDTH));
    let (mut y, mut dx) = (x.clone(), x.clone());
    let fused = move || {
        let threads = Threads::one();
        let turn = |inverse| Turn {
            inv_freq: &inv_freq,
            scale: 1.0,
            inverse,
        };
        rope(&threads, dim, &turn(false), &positions, WIDTH, &x, &mut y);
        rope(&threads, dim, &turn(true), &positions, WIDTH, &dy, &mut dx);
    };
    let angles = Tensor::from_vec(angles, (ROWS, 1, half), &Device::Cpu)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let x = var(&[ROWS, HEADS, dim])?;
    Ok(Case::new("rotary embedding", fused, move || {
        let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        backward(&Tensor::cat(&[first, second], 2)?)
    }))
}

fn dropout_case() -> Result<Case> {
    const P: f32 = 0.1;
    let (x, dy) = (noise(ROWS * WIDE), ones(ROWS * WIDE));
    let (mut y, mut dx) = (x.clone(), x.clone());
    let key = MaskKey {
        seed: 1,
        step: 2,
        node: 3,
    };
    let what = DropoutMask { key, p: P.into() };
    let slice = SampleSlice::whole(0, ROWS * WIDE);
    let fused = move || {
        let threads = Threads::one();
        dropout(&threads, what, slice, &x, &mut y);
        dropout(&threads, what, slice, &dy, &mut dx);
    };
    let x = var(&[ROWS, WIDE])?;
    Ok(Case::new("dropout", fused, move || {
        let numbers = Tensor::rand(0.0_f32, 1.0, (ROWS, WIDE), &Device::Cpu)?;
        let kept = (numbers.ge(P)?.to_dtype(DType::F32)? / f64::from(1.0 - P))?;
        backward(&x.mul(&kept)?)
    }))
}

fn residual_add() -> Result<Case> {
    let (x, mut sum) = (noise(ROWS * WIDTH), noise(ROWS * WIDTH));
    let fused = move || add_assign(&Threads::one(), &x, &mut sum);
    let (x, y) = (tensor(&[ROWS, WIDTH])?, tensor(&[ROWS, WIDTH])?);
    Ok(Case::new("residual add", fused, move || {
        black_box(x.add(&y)?);
        Ok(())
    }))
}
