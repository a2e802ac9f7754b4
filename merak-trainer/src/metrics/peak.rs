//! What a run's speed is a share of.

use std::{
    fmt,
    time::{Duration, Instant},
};

use merak_mpu::{DType, Locality};
use merak_trace::{
    Call, Coord, Init, Op, Param, ParamRole, RunContext, SharedBackend, TensorType, Threads, Value,
    backend::candle::Products, initial_values, op::WeightLayout,
};

use crate::{
    config::{BackendChoice, CheckedArguments, Device},
    data::SampleTensor,
    error::Result,
    stage::Executor,
    world::{cores_here, threads_per_rank},
};

/// How long products are repeated.
const BUDGET: Duration = Duration::from_millis(40);
/// The fewest repetitions, whatever they take; the first one touches memory.
const LEAST_REPETITIONS: usize = 3;

/// The most floating-point operations per second that the ranks of a run can do together: what
/// `mfu` is a share of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// Operations per second, of all ranks.
    pub flops_per_s: f64,
    source: Source,
}

/// Where a peak comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Source {
    /// The key `peak_flops`.
    Key { ranks: usize },
    /// Products of matrices on one rank's threads.
    Measured {
        dtype: DType,
        threads: usize,
        at_once: usize,
    },
}

impl Peak {
    /// As the key `peak_flops` says, for all ranks; else measured on this machine, in some 50 ms,
    /// or a second where larger matrices go to a device: the fastest of several products of square
    /// matrices by the backend of the run, in the element type that it trains in, on the threads of
    /// one rank, times the ranks that have cores at once.
    /// Call it while no rank computes.
    ///
    /// # Errors
    /// When the backend fails, or its device is not there.
    pub fn of(args: &CheckedArguments) -> Result<Self> {
        let ranks = args.world_size();
        if let Some(flops) = args.peak_flops {
            return Ok(Self {
                flops_per_s: flops * ranks as f64,
                source: Source::Key { ranks },
            });
        }
        let threads = threads_per_rank(args);
        let here = args.ranks_here();
        let cores = (cores_here(args) / threads).clamp(1, here);
        let at_once = match args.compute.device {
            Device::Cpu => (cores * ranks).div_ceil(here),
            Device::Cuda => ranks,
        };
        let (values, dtype) = element_types(args);
        Ok(Self {
            flops_per_s: product_speed(args, values, threads)? * at_once as f64,
            source: Source::Measured {
                dtype,
                threads,
                at_once,
            },
        })
    }
}

/// `1.25 TFLOP/s, the speed of f32 products on 2 ranks of 1 threads, measured before the run`
impl fmt::Display for Peak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Flops(self.flops_per_s))?;
        match self.source {
            Source::Key { ranks: 1 } => write!(f, ", as \"peak_flops\" says"),
            Source::Key { ranks } => write!(f, ", {ranks} ranks by \"peak_flops\""),
            Source::Measured {
                dtype,
                threads,
                at_once,
            } => write!(
                f,
                ", the speed of {dtype} products measured before the run (ranks that compute at once: {at_once}, threads of \
                 each: {threads})"
            ),
        }
    }
}

/// A speed in operations per second, as people read it: `83.1 GFLOP/s`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flops(pub f64);

impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, unit) = match self.0 {
            flops if flops >= 1e15 => (flops / 1e15, "P"),
            flops if flops >= 1e12 => (flops / 1e12, "T"),
            flops if flops >= 1e9 => (flops / 1e9, "G"),
            flops => (flops / 1e6, "M"),
        };
        let decimals = if number < 10.0 { 2 } else { 1 };
        f.pad(&format!("{number:.decimals$} {unit}FLOP/s"))
    }
}

/// What makes other speeds of one in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rates {
    /// Samples of a global batch.
    pub samples_per_step: usize,
    /// Operations per token, as [`Plan::flops_per_token`](crate::Plan::flops_per_token) counts
    /// them.
    pub flops_per_token: f64,
    /// Operations per second that all ranks can do.
    pub peak: Option<f64>,
}

impl Rates {
    /// Operations per second at a speed in tokens.
    pub fn flops(&self, tokens_per_s: f64) -> f64 {
        tokens_per_s * self.flops_per_token
    }

    /// Their share of the peak, if there is one.
    pub fn mfu(&self, tokens_per_s: f64) -> Option<f64> {
        self.peak.map(|peak| self.flops(tokens_per_s) / peak)
    }
}

/// A share as people read it: `0.31 %`, `3.1 %`, `31 %`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Percent(pub f64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.0;
        let decimals = match percent {
            p if p >= 9.95 => 0,
            p if p >= 0.995 => 1,
            _ => 2,
        };
        f.pad(&format!("{percent:.decimals$} %"))
    }
}

/// The element type of factors in a run, and that in which it multiplies them.
fn element_types(args: &CheckedArguments) -> (DType, DType) {
    let narrow = args.narrow().or(args.autocast()).unwrap_or(DType::F32);
    match (args.compute.backend, args.products()) {
        (BackendChoice::Tch, _) => (narrow, narrow),
        (BackendChoice::Candle, Products::Rounded) => (DType::F32, DType::BF16),
        (BackendChoice::Candle, Products::Full) => (DType::F32, DType::F32),
    }
}

/// Operations per second of products of such values on one rank.
fn product_speed(args: &CheckedArguments, values: DType, threads: usize) -> Result<f64> {
    let place = Locality {
        host: 0,
        local_rank: 0,
        local_size: 1,
        core_sharers: 1,
    };
    let backend = Executor::new(args, place, threads)?.backend;
    // Products on a device run ahead of the clock: several are timed together.
    let (side, products) = match args.compute.device {
        Device::Cpu => (512, 1),
        Device::Cuda => (4096, 8),
    };
    let square = TensorType::new([side, side], values);
    let numbers = noise(&square);
    let matrix = || backend.from_bytes(&square, &numbers);
    let (x, w) = (matrix()?, matrix()?);
    let row = TensorType::new([1, side], values);
    let row = backend.from_bytes(&row, &numbers[..row.size_bytes()])?;
    let start = Instant::now();
    let (mut best, mut done) = (f64::INFINITY, 0);
    while done < LEAST_REPETITIONS || start.elapsed() < BUDGET {
        let begun = Instant::now();
        for _ in 0..products {
            product(&backend, &x, &w)?;
        }
        // A row waits for the products before it.
        let last = product(&backend, &row, &w)?;
        drop(backend.into_buffer(last)?);
        best = best.min(begun.elapsed().as_secs_f64());
        done += 1;
    }
    let (side, products) = (side as f64, f64::from(products));
    Ok(2.0 * side * side * (side * products + 1.0) / best.max(f64::MIN_POSITIVE))
}

/// The bytes of a tensor of noise: a device multiplies zeros faster, as they take less power than
/// the numbers of a run.
fn noise(ty: &TensorType) -> Vec<u8> {
    let wide = TensorType::new(ty.shape.clone(), DType::F32);
    let param = Param::new("noise", wide, Init::Uniform(1.0), ParamRole::Weight);
    let mut values = vec![0.0_f32; ty.numel()];
    initial_values(&Threads::one(), 0, &param, Coord::default(), &mut values);
    let values = SampleTensor::floats(ty.shape.clone(), values);
    let values = values.expect("there is a number for each element");
    values.bytes_as(ty.dtype).into_owned()
}

/// A row of values by a weight, as a linear layer computes it.
fn product(backend: &SharedBackend, x: &Value, w: &Value) -> Result<Value> {
    let op = Op::Linear {
        layout: WeightLayout::InOut,
        bias: false,
    };
    let context = RunContext::default();
    let call = Call {
        name: "peak",
        op: &op,
        results: std::slice::from_ref(x.ty()),
        context: &context,
    };
    Ok(backend
        .run(call, vec![x.clone(), w.clone()])?
        .swap_remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::collections::BTreeSet;

    fn arguments(line: &[&str]) -> CheckedArguments {
        let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
        let config = Config::load(None, [], &line).expect("legal values");
        config.check().expect("values that fit each other")
    }

    #[test]
    fn the_peak_is_measured_or_given_for_each_rank() {
        let given = Peak::of(&arguments(&["--peak_flops=2e9", "--tp=2"])).unwrap();
        assert_eq!(given.flops_per_s.to_string(), "4000000000");
        assert_eq!(given.to_string(), "4.00 GFLOP/s, 2 ranks by \"peak_flops\"");
        for dtype in ["--bf16=false", "--bf16"] {
            let line = ["--compute.threads_per_rank=1", dtype];
            let measured = Peak::of(&arguments(&line)).unwrap();
            // A single core of any machine of this century, and of the next years.
            let range = 1e7..1e13;
            assert!(range.contains(&measured.flops_per_s), "{measured}");
            let name = if dtype == "--bf16" { "bf16" } else { "f32" };
            assert!(
                measured
                    .to_string()
                    .contains(&format!("of {name} products"))
            );
        }
    }

    #[test]
    fn what_is_multiplied_is_noise_in_every_type() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let ty = TensorType::new([64, 64], dtype);
            let bytes = noise(&ty);
            assert_eq!(bytes.len(), ty.size_bytes());
            let numbers: BTreeSet<_> = bytes.chunks(dtype.size_bytes()).collect();
            // Drawn numbers of 8 bits of precision meet each other now and then.
            assert!(numbers.len() > 500, "{dtype}: {}", numbers.len());
        }
    }

    #[test]
    fn shares_and_speeds_have_three_digits_at_most() {
        let rates = Rates {
            samples_per_step: 4,
            flops_per_token: 100.0,
            peak: Some(1e6),
        };
        assert_eq!(rates.mfu(1000.0), Some(0.1));
        let shown = [0.314, 0.0314, 0.00314].map(|share| Percent(share).to_string());
        assert_eq!(shown, ["31 %", "3.1 %", "0.31 %"]);
        assert_eq!(Flops(8.31e10).to_string(), "83.1 GFLOP/s");
    }
}
