//! Steps of an optimizer on flat buffers where they lie.

use super::{
    Tch, at, shim,
    storage::{TchBuffer, int},
};
use crate::{Error, Result};
use merak_mpu::{Buffer, StepRange};
use std::{any::Any, ops::Range};
use tch::{Device, Kind, TchError, Tensor};

/// The scalars of a step of [Adam](https://arxiv.org/abs/1412.6980), algorithm 1, or of
/// [AdamW](https://arxiv.org/abs/1711.05101), algorithm 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamScalars {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the two moments.
    pub betas: [f64; 2],
    /// Added after the square root.
    pub epsilon: f64,
    /// Weight decay of the pieces that decay.
    pub weight_decay: f64,
    /// Whether weights decay by themselves (`AdamW`) or through the gradient (`Adam`).
    pub decoupled: bool,
    /// Number of the step, 1 for the first.
    pub time: u64,
    /// Factor of the gradients.
    pub grad_scale: f64,
}

/// The scalars of a step of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdScalars {
    /// Learning rate.
    pub lr: f64,
    /// Momentum; 0 keeps none.
    pub momentum: f64,
    /// Whether the momentum is Nesterov's, which looks ahead.
    pub nesterov: bool,
    /// Weight decay of the pieces that decay, added to the gradient.
    pub weight_decay: f64,
    /// Factor of the gradients.
    pub grad_scale: f64,
}

impl Tch {
    /// The sum of the squares of each range of a buffer of this backend, in f64.
    ///
    /// # Errors
    /// When the buffer is another backend's, or libtorch fails.
    pub fn sums_of_squares(&self, x: &dyn Buffer, ranges: &[Range<usize>]) -> Result<Vec<f64>> {
        self.enter();
        let flat = &own(x)?.flat;
        let node = "gradient norm";
        if let Some(parts) = Parts::of(ranges).filter(|_| flat.device() != Device::Cpu) {
            let sums = parts.sums_of_squares(flat).map_err(at(node))?;
            return Ok(parts.of_ranges(&sums));
        }
        let mut sums = Vec::new();
        let mut rest = ranges;
        while let Some(first) = rest.first() {
            // Adjacent ranges of one length are rows of a matrix.
            let (len, mut rows) = (first.len(), 1);
            while rest
                .get(rows)
                .is_some_and(|next| next.len() == len && next.start == first.start + rows * len)
            {
                rows += 1;
            }
            let sum = || {
                let rows = flat
                    .f_narrow(0, int(first.start), int(rows * len))?
                    .f_reshape([int(rows), int(len)])?;
                rows.f_linalg_norm(2.0, &[1_i64][..], false, Kind::Double)?
                    .f_square_()
            };
            sums.push(sum().map_err(at(node))?);
            rest = &rest[rows..];
        }
        if sums.is_empty() {
            return Ok(Vec::new());
        }
        let all =
            Tensor::f_cat(&sums, 0).and_then(|all| Vec::try_from(all.f_to_device(Device::Cpu)?));
        all.map_err(at(node))
    }

    /// One step of Adam or `AdamW` on buffers of this backend, by ATen's fused kernel.
    ///
    /// # Errors
    /// When a buffer is another backend's, or libtorch fails.
    pub fn adam(
        &self,
        step: &AdamScalars,
        params: &mut dyn Buffer,
        grads: &dyn Buffer,
        [exp_avg, exp_avg_sq]: [&mut dyn Buffer; 2],
        pieces: &[StepRange],
    ) -> Result<()> {
        self.enter();
        let params = own_mut(params)?;
        let (grads, state) = (own(grads)?, [own(exp_avg)?, own(exp_avg_sq)?]);
        for decays in [true, false] {
            let views = |buffer: &TchBuffer, of: fn(&StepRange) -> &Range<usize>| {
                views(
                    buffer,
                    pieces.iter().filter(|piece| piece.decays == decays).map(of),
                )
            };
            let lists = [
                views(params, |piece| &piece.params)?,
                views(grads, |piece| &piece.grads)?,
                views(state[0], |piece| &piece.state)?,
                views(state[1], |piece| &piece.state)?,
            ];
            let weight_decay = if decays { step.weight_decay } else { 0.0 };
            shim::adam(
                &AdamScalars {
                    weight_decay,
                    ..*step
                },
                &lists,
            )?;
        }
        params.renew()
    }

    /// One step of stochastic gradient descent on buffers of this backend.
    ///
    /// # Errors
    /// When a buffer is another backend's, or libtorch fails.
    pub fn sgd(
        &self,
        step: &SgdScalars,
        params: &mut dyn Buffer,
        grads: &dyn Buffer,
        momentum: Option<&mut dyn Buffer>,
        pieces: &[StepRange],
    ) -> Result<()> {
        self.enter();
        let params = own_mut(params)?;
        let grads = own(grads)?;
        let momentum = momentum.map(|buffer| own(buffer)).transpose()?;
        for piece in pieces {
            let view = |buffer: &TchBuffer, range: &Range<usize>| {
                buffer.flat.f_narrow(0, int(range.start), int(range.len()))
            };
            let update = || {
                let mut param = view(params, &piece.params)?;
                let mut grad = view(grads, &piece.grads)?.f_mul_scalar(step.grad_scale)?;
                if piece.decays && step.weight_decay != 0.0 {
                    let _ = grad.f_add_(&param.f_mul_scalar(step.weight_decay)?)?;
                }
                if let Some(momentum) = momentum {
                    let mut carried = view(momentum, &piece.state)?;
                    let _ = carried.f_mul_scalar_(step.momentum)?.f_add_(&grad)?;
                    if step.nesterov {
                        let _ = grad.f_add_(&carried.f_mul_scalar(step.momentum)?)?;
                    } else {
                        grad = carried;
                    }
                }
                let change = grad.f_mul_scalar(step.lr)?;
                param.f_sub_(&change)
            };
            let _ = update().map_err(at("optimizer step"))?;
        }
        params.renew()
    }

    /// Moves averages of parameters, which lie as a state does, towards them: `decay` of each
    /// stays, the rest is the parameter's.
    ///
    /// # Errors
    /// When a buffer is another backend's, or libtorch fails.
    pub fn average(
        &self,
        decay: f64,
        params: &dyn Buffer,
        averages: &mut dyn Buffer,
        pieces: &[StepRange],
    ) -> Result<()> {
        self.enter();
        let (params, averages) = (own(params)?, own(averages)?);
        // Factors that sum to one as f32.
        let kept = f64::from(decay as f32);
        for piece in pieces {
            let view = |buffer: &TchBuffer, range: &Range<usize>| {
                buffer.flat.f_narrow(0, int(range.start), int(range.len()))
            };
            let follow = || {
                let taken = view(params, &piece.params)?.f_mul_scalar(1.0 - kept)?;
                let mut average = view(averages, &piece.state)?;
                average.f_mul_scalar_(kept)?.f_add_(&taken)
            };
            let _ = follow().map_err(at("average of the weights"))?;
        }
        Ok(())
    }
}

/// Ranges as runs of parts of one length, whose sums a device computes in two kernels. The bits of
/// a range's sum depend on the range alone.
#[derive(Debug)]
struct Parts {
    /// Where the first range begins.
    start: usize,
    /// Elements of a part, a power of two.
    len: usize,
    /// Number of parts of each range, and of each gap between two.
    counts: Vec<i64>,
    /// Which of the counts are those of the ranges.
    ranges: Vec<usize>,
}

impl Parts {
    /// None where the parts would be short, or ranges do not ascend.
    fn of(ranges: &[Range<usize>]) -> Option<Self> {
        let borders = ranges.iter().fold(0, |bits, x| bits | x.start | x.end);
        let len = 1_usize << borders.trailing_zeros().min(8);
        let start = ranges.first()?.start;
        let mut parts = Self {
            start,
            len,
            counts: Vec::new(),
            ranges: Vec::new(),
        };
        let mut end = start;
        for range in ranges {
            let gap = range.start.checked_sub(end)?;
            if gap > 0 {
                parts.counts.push(int(gap / len));
            }
            parts.ranges.push(parts.counts.len());
            parts.counts.push(int(range.len() / len));
            end = range.end;
        }
        (len >= 32).then_some(parts)
    }

    /// The sum for each count, in f64. Within a part it is in f32, so that no wide copy of the
    /// elements is made.
    fn sums_of_squares(&self, flat: &Tensor) -> Result<Vec<f64>, TchError> {
        let num_parts: i64 = self.counts.iter().sum();
        let parts = flat
            .f_narrow(0, int(self.start), num_parts * int(self.len))?
            .f_reshape([num_parts, int(self.len)])?;
        let norms = parts.f_linalg_norm(2.0, &[-1_i64][..], false, None)?;
        let squares = norms.f_to_kind(Kind::Double)?.f_square_()?;
        let counts = Tensor::from_slice(&self.counts).f_to_device(flat.device())?;
        let none = None::<&Tensor>;
        let sums =
            Tensor::f_segment_reduce(&squares, "sum", Some(&counts), none, none, 0, true, 0.0)?;
        Vec::try_from(sums.f_to_device(Device::Cpu)?)
    }

    /// Those of the ranges.
    fn of_ranges(&self, sums: &[f64]) -> Vec<f64> {
        self.ranges.iter().map(|&index| sums[index]).collect()
    }
}

fn views<'a>(
    buffer: &TchBuffer,
    ranges: impl Iterator<Item = &'a Range<usize>>,
) -> Result<Vec<Tensor>> {
    let view = |range: &Range<usize>| {
        let view = buffer.flat.f_narrow(0, int(range.start), int(range.len()));
        view.map_err(at("optimizer step"))
    };
    ranges.map(view).collect()
}

pub(super) fn own(buffer: &dyn Buffer) -> Result<&TchBuffer> {
    let any: &dyn Any = buffer;
    any.downcast_ref().ok_or_else(foreign)
}

pub(super) fn own_mut(buffer: &mut dyn Buffer) -> Result<&mut TchBuffer> {
    let any: &mut dyn Any = buffer;
    any.downcast_mut().ok_or_else(foreign)
}

fn foreign() -> Error {
    Error::backend("flat buffer", "is another backend's")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, backend::tch::TchDevice};
    use merak_mpu::DType;

    const LEN: usize = 40;

    fn tch() -> Tch {
        Tch::new(TchDevice::Cpu, 1).unwrap()
    }

    fn buffer(tch: &Tch, values: &[f32]) -> Box<dyn Buffer> {
        let mut buffer = tch.grad_buffer(DType::F32, values.len()).unwrap();
        buffer.write(&mut |bytes| bytes.copy_from_slice(bytemuck::cast_slice(values)));
        buffer
    }

    fn values(buffer: &dyn Buffer) -> Vec<f32> {
        let mut out = Vec::new();
        buffer.read(&mut |bytes| out = bytemuck::cast_slice(bytes).to_vec());
        out
    }

    fn noise(seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 37 + seed * 11) % 23) as f32 / 11.0 - 1.0;
        (0..LEN).map(value).collect()
    }

    /// Two pieces with a gap between them; the state is packed.
    fn pieces() -> [StepRange; 2] {
        let piece = |flat: Range<usize>, start, decays| StepRange {
            state: start..start + flat.len(),
            grads: flat.clone(),
            params: flat,
            decays,
        };
        [piece(0..17, 0, true), piece(20..LEN, 17, false)]
    }

    /// Applies `update(param, grad, decays, state index)` to the elements of the pieces.
    fn by_hand(params: &mut [f32], mut update: impl FnMut(f64, f64, bool, usize) -> f64) {
        let grads = noise(2);
        for piece in pieces() {
            for (i, state) in piece.params.clone().zip(piece.state) {
                let (param, grad) = (f64::from(params[i]), f64::from(grads[i]));
                params[i] = update(param, grad, piece.decays, state) as f32;
            }
        }
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{found} against {expected}"
            );
        }
    }

    #[test]
    fn squares_are_summed_by_parts_as_on_a_device() {
        let x: Vec<f32> = (0..1024).map(|i| ((i * 37) % 23) as f32 / 11.0).collect();
        let ranges = [64..128, 128..512, 576..640, 960..1024];
        let parts = Parts::of(&ranges).unwrap();
        assert_eq!(
            (parts.len, &parts.counts[..]),
            (64, &[1, 6, 1, 1, 5, 1][..])
        );
        let sums = parts.sums_of_squares(&Tensor::from_slice(&x)).unwrap();
        for (sum, range) in parts.of_ranges(&sums).iter().zip(ranges) {
            let expected: f64 = x[range].iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((sum - expected).abs() < 1e-6 * expected);
        }
        let short = [0..8, 8..64];
        assert!(Parts::of(&short).is_none());
        let descending = [64..128, 0..64];
        assert!(Parts::of(&descending).is_none());
        assert!(Parts::of(&[]).is_none());
    }

    #[test]
    fn squares_are_summed_by_range() {
        let tch = tch();
        let x = noise(1);
        let ranges = [0..8, 8..16, 16..24, 24..27, 30..33, 33..36, 36..40];
        let sums = tch.sums_of_squares(&*buffer(&tch, &x), &ranges).unwrap();
        assert_eq!(sums.len(), ranges.len());
        for (sum, range) in sums.iter().zip(ranges) {
            let expected: f64 = x[range].iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((sum - expected).abs() < 1e-9);
        }
        let none = tch.sums_of_squares(&*buffer(&tch, &x), &[]).unwrap();
        assert!(none.is_empty());
    }

    #[test]
    fn adam_follows_its_formula() {
        let tch = tch();
        for decoupled in [true, false] {
            let mut params = buffer(&tch, &noise(1));
            let mut moments = [buffer(&tch, &[0.0; 37]), buffer(&tch, &[0.0; 37])];
            let (mut expected, mut state) = (noise(1), [[0.0_f64; 2]; 37]);
            for time in 1..4_u64 {
                let step = AdamScalars {
                    lr: 0.1,
                    betas: [0.9, 0.99],
                    epsilon: 1e-8,
                    weight_decay: 0.2,
                    decoupled,
                    time,
                    grad_scale: 0.5,
                };
                let [m, v] = &mut moments;
                let grads = buffer(&tch, &noise(2));
                tch.adam(
                    &step,
                    &mut *params,
                    &*grads,
                    [&mut **m, &mut **v],
                    &pieces(),
                )
                .unwrap();
                by_hand(&mut expected, |mut p, g, decays, i| {
                    let mut g = 0.5 * g;
                    if decays && decoupled {
                        p *= 1.0 - 0.1 * 0.2;
                    } else if decays {
                        g += 0.2 * p;
                    }
                    state[i] = [
                        0.9 * state[i][0] + 0.1 * g,
                        0.99 * state[i][1] + 0.01 * g * g,
                    ];
                    let unbiased = [0.9_f64, 0.99].map(|beta| 1.0 - beta.powf(time as f64));
                    let root = (state[i][1] / unbiased[1]).sqrt() + 1e-8;
                    p - 0.1 * state[i][0] / unbiased[0] / root
                });
            }
            assert_close(&values(&*params), &expected);
            let first: Vec<_> = state.iter().map(|state| state[0] as f32).collect();
            assert_close(&values(&*moments[0]), &first);
        }
    }

    #[test]
    fn averages_follow_their_formula() {
        let tch = tch();
        let mut averages = buffer(&tch, &noise(3)[..37]);
        let mut expected = noise(3)[..37].to_vec();
        for seed in 4..7 {
            let params = buffer(&tch, &noise(seed));
            tch.average(0.9, &*params, &mut *averages, &pieces())
                .unwrap();
            for piece in pieces() {
                for (i, state) in piece.params.zip(piece.state) {
                    expected[state] = 0.9_f32 * expected[state] + (1.0 - 0.9_f32) * noise(seed)[i];
                }
            }
        }
        assert_close(&values(&*averages), &expected);
    }

    #[test]
    fn sgd_follows_its_formula() {
        let tch = tch();
        for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
            let mut params = buffer(&tch, &noise(1));
            let mut state = buffer(&tch, &[0.0; 37]);
            let (mut expected, mut carried) = (noise(1), [0.0_f64; 37]);
            for _ in 0..3 {
                let step = SgdScalars {
                    lr: 0.1,
                    momentum,
                    nesterov,
                    weight_decay: 0.2,
                    grad_scale: 0.5,
                };
                let kept = (momentum > 0.0).then_some(&mut *state);
                let grads = buffer(&tch, &noise(2));
                tch.sgd(&step, &mut *params, &*grads, kept, &pieces())
                    .unwrap();
                by_hand(&mut expected, |p, g, decays, i| {
                    let g = 0.5 * g + if decays { 0.2 * p } else { 0.0 };
                    carried[i] = momentum * carried[i] + g;
                    let ahead = if nesterov {
                        g + momentum * carried[i]
                    } else {
                        carried[i]
                    };
                    p - 0.1 * ahead
                });
            }
            assert_close(&values(&*params), &expected);
        }
    }
}
