//! Speed of an update beside the same mathematics composed of plain tensor operations.
//!
//! `RAYON_NUM_THREADS=1 cargo bench -p merak-zero`: steps of `AdamW` over four million elements, on
//! one thread.

use candle_core::{Device, Result, Tensor};
use divan::Bencher;
use merak_zero::{AdamStep, OptimizerConfig, adam_update};

const LEN: usize = 1 << 22;
const LR: f64 = 3e-4;

fn main() {
    divan::main();
}

fn noise() -> Vec<f32> {
    (0..LEN)
        .map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0)
        .collect()
}

#[divan::bench]
fn fused(bencher: Bencher<'_, '_>) {
    let (grad, mut param) = (noise(), noise());
    let (mut first, mut second) = (vec![0.0; LEN], vec![0.0; LEN]);
    let step = AdamStep::new(&OptimizerConfig::default(), LR, 1, 1.0);
    bencher.bench_local(|| adam_update(&mut param, &grad, &mut first, &mut second, &step));
}

#[divan::bench]
fn plain(bencher: Bencher<'_, '_>) {
    let config = OptimizerConfig::default();
    let (beta1, beta2) = (config.adam_beta1, config.adam_beta2);
    let (decay, epsilon) = (config.weight_decay, config.adam_epsilon);
    let tensor = || Tensor::from_vec(noise(), LEN, &Device::Cpu).expect("as many numbers");
    let (mut p, g) = (tensor(), tensor());
    let zeros = || g.zeros_like().expect("memory suffices");
    let (mut m, mut v) = (zeros(), zeros());
    let mut step = || -> Result<()> {
        m = ((&m * beta1)? + (&g * (1.0 - beta1))?)?;
        v = ((&v * beta2)? + (g.sqr()? * (1.0 - beta2))?)?;
        let (m_hat, v_hat) = ((&m / (1.0 - beta1))?, (&v / (1.0 - beta2))?);
        let update = (m_hat / (v_hat.sqrt()? + epsilon)?)?;
        p = ((&p * (1.0 - LR * decay))? - (update * LR)?)?;
        Ok(())
    };
    bencher.bench_local(|| step().expect("the shapes are equal"));
}
