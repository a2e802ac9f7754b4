//! libtorch as the device of a rank's optimizer.

use crate::config::{CheckedArguments, Device};
use merak_mpu::{Buffer, DType, Locality, StepRange};
use merak_trace::{
    Backend, Error,
    backend::tch::{AdamScalars, SgdScalars, Tch, TchDevice},
};
use merak_zero::{DeviceError, OptimizerKind, Step, StepDevice, sums_of_squares};
use std::{ops::Range, sync::Arc};

/// The backend of a rank.
pub(super) fn backend(
    args: &CheckedArguments,
    place: Locality,
    num_threads: usize,
) -> Result<Arc<Tch>, Error> {
    let device = match args.compute.device {
        Device::Cpu => TchDevice::Cpu,
        Device::Cuda => TchDevice::Cuda(place.device(Tch::num_cuda_devices())),
    };
    let backend = Tch::new(device, num_threads)?;
    Ok(Arc::new(match args.autocast() {
        Some(narrow) => backend.with_autocast(narrow)?,
        None => backend,
    }))
}

/// A rule with a step on devices.
enum DeviceRule {
    /// Adam, whose weight decay stands apart from the gradient where it is `decoupled`.
    Adam { decoupled: bool },
    /// Stochastic gradient descent.
    Sgd,
}

/// The step on devices of an optimizer; `None` where it steps in host memory.
fn device_rule(optimizer: OptimizerKind) -> Option<DeviceRule> {
    match optimizer {
        OptimizerKind::AdamW => Some(DeviceRule::Adam { decoupled: true }),
        OptimizerKind::Adam => Some(DeviceRule::Adam { decoupled: false }),
        OptimizerKind::Sgd => Some(DeviceRule::Sgd),
        OptimizerKind::Adafactor
        | OptimizerKind::Lamb
        | OptimizerKind::Lion
        | OptimizerKind::Muon => None,
    }
}

/// Steps flat buffers of a backend.
#[derive(Debug)]
pub(super) struct Steps {
    backend: Arc<Tch>,
    num_threads: usize,
}

impl Steps {
    pub(super) fn new(backend: Arc<Tch>, num_threads: usize) -> Self {
        Self {
            backend,
            num_threads,
        }
    }
}

impl StepDevice for Steps {
    fn has(&self, rule: OptimizerKind) -> bool {
        device_rule(rule).is_some()
    }

    fn zeros(&self, len: usize) -> Result<Box<dyn Buffer>, DeviceError> {
        Ok(self.backend.grad_buffer(DType::F32, len)?)
    }

    fn holds(&self, buffer: &dyn Buffer) -> bool {
        self.backend.holds(buffer)
    }

    fn take(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<Box<dyn Buffer>, DeviceError> {
        Ok(self.backend.copy_parts(from, parts, DType::F32)?)
    }

    fn put(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        Ok(self.backend.put_parts(values, to, parts)?)
    }

    fn add(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        Ok(self.backend.add_parts(values, to, parts)?)
    }

    fn multiply(&self, values: &mut dyn Buffer, factor: f32) -> Result<(), DeviceError> {
        Ok(self.backend.multiply(values, factor)?)
    }

    fn sums_of_squares(
        &self,
        grads: &dyn Buffer,
        ranges: &[Range<usize>],
    ) -> Result<Vec<f64>, DeviceError> {
        if !self.backend.is_cpu() {
            return Ok(self.backend.sums_of_squares(grads, ranges)?);
        }
        let mut sums = Vec::new();
        grads.read(&mut |bytes| {
            let grads = bytemuck::cast_slice(bytes);
            sums = sums_of_squares(grads, ranges.iter().cloned(), self.num_threads);
        });
        Ok(sums)
    }

    fn update(
        &self,
        step: &Step<'_>,
        params: &mut dyn Buffer,
        grads: &dyn Buffer,
        state: &mut [Box<dyn Buffer>],
        pieces: &[StepRange],
    ) -> Result<(), DeviceError> {
        let Step {
            config,
            lr,
            time,
            grad_scale,
        } = *step;
        let Some(rule) = device_rule(config.optim) else {
            return Err(format!("{} is not among its rules", config.optim).into());
        };
        match rule {
            DeviceRule::Adam { decoupled } => {
                let [exp_avg, exp_avg_sq] = state else {
                    return Err("Adam keeps two moments".into());
                };
                let step = AdamScalars {
                    lr,
                    betas: [config.adam_beta1, config.adam_beta2],
                    epsilon: config.adam_epsilon,
                    weight_decay: config.weight_decay,
                    decoupled,
                    time,
                    grad_scale,
                };
                let moments = [&mut **exp_avg, &mut **exp_avg_sq];
                self.backend.adam(&step, params, grads, moments, pieces)?;
            }
            DeviceRule::Sgd => {
                let step = SgdScalars {
                    lr,
                    momentum: config.sgd_momentum,
                    nesterov: config.nesterov,
                    weight_decay: config.weight_decay,
                    grad_scale,
                };
                let momentum = state.first_mut().map(|buffer| &mut **buffer);
                self.backend.sgd(&step, params, grads, momentum, pieces)?;
            }
        }
        Ok(())
    }

    fn average(
        &self,
        decay: f64,
        params: &dyn Buffer,
        averages: &mut dyn Buffer,
        pieces: &[StepRange],
    ) -> Result<(), DeviceError> {
        Ok(self.backend.average(decay, params, averages, pieces)?)
    }
}
