//! A device steps as the host does, and its state goes out and in again.

use crate::fixture::{config, data_parallel, grads, held, len, lr, noises, step};
use merak_mpu::{Buffer, StepRange, testing::world};
use merak_zero::{
    AdamStep, DeviceError, OptimizerKind, Step, StepDevice, ZeroStage, adam_update, sums_of_squares,
};
use std::{ops::Range, sync::Arc};

/// A device whose memory is the host's.
#[derive(Debug)]
pub(crate) struct Mirror;

fn read<T>(buffer: &dyn Buffer, f: impl FnOnce(&[f32]) -> T) -> T {
    let (mut f, mut out) = (Some(f), None);
    buffer.read(&mut |bytes| out = f.take().map(|f| f(bytemuck::cast_slice(bytes))));
    out.expect("called once")
}

impl StepDevice for Mirror {
    fn has(&self, rule: OptimizerKind) -> bool {
        rule == OptimizerKind::AdamW
    }

    fn zeros(&self, len: usize) -> Result<Box<dyn Buffer>, DeviceError> {
        Ok(Box::new(vec![0.0_f32; len]))
    }

    fn sums_of_squares(
        &self,
        grads: &dyn Buffer,
        ranges: &[Range<usize>],
    ) -> Result<Vec<f64>, DeviceError> {
        Ok(read(grads, |g| {
            sums_of_squares(g, ranges.iter().cloned(), 1)
        }))
    }

    fn update(
        &self,
        step: &Step<'_>,
        params: &mut dyn Buffer,
        grads: &dyn Buffer,
        state: &mut [Box<dyn Buffer>],
        pieces: &[StepRange],
    ) -> Result<(), DeviceError> {
        let [first, second] = state else {
            return Err(format!("{} kinds of state", state.len()).into());
        };
        let decaying = AdamStep::new(step.config, step.lr, step.time, step.grad_scale);
        let grads = read(grads, <[f32]>::to_vec);
        params.write(&mut |p| {
            first.write(&mut |m| {
                second.write(&mut |v| {
                    for piece in pieces {
                        let state = piece.state.clone();
                        let step = if piece.decays {
                            decaying
                        } else {
                            decaying.without_decay()
                        };
                        adam_update(
                            &mut bytemuck::cast_slice_mut(p)[piece.params.clone()],
                            &grads[piece.grads.clone()],
                            &mut bytemuck::cast_slice_mut(m)[state.clone()],
                            &mut bytemuck::cast_slice_mut(v)[state],
                            &step,
                        );
                    }
                });
            });
        });
        Ok(())
    }
}

#[test]
fn a_device_steps_as_the_host_does_and_gives_its_state_back() {
    let stages = [
        ZeroStage::Replicated,
        ZeroStage::OptimizerState,
        ZeroStage::Gradients,
        ZeroStage::Parameters,
    ];
    for stage in stages {
        world(2, |member| {
            let mut host = data_parallel(&member, config(stage));
            let mut device = data_parallel(&member, config(stage))
                .on_device(Arc::new(Mirror))
                .unwrap();
            let mut expected = held(&host, &noises(1, len()));
            let mut found = expected.clone();
            for t in 0..3 {
                let own = || grads(t, member.rank().0);
                let report = step(&mut host, &mut expected, own(), lr(t)).unwrap();
                let on_device = step(&mut device, &mut found, own(), lr(t));
                assert_eq!(on_device.unwrap(), report);
                if t == 1 {
                    let state = device.state().into_owned();
                    device
                        .edit_state(|on_device| {
                            on_device.slices_mut().for_each(|s| s.values.fill(7.0));
                        })
                        .unwrap();
                    assert!(
                        device
                            .state()
                            .slices()
                            .all(|s| s.values.iter().all(|x| x.to_bits() == 7.0_f32.to_bits()))
                    );
                    device.edit_state(|on_device| *on_device = state).unwrap();
                }
            }
            assert!(found == expected);
            assert!(device.state() == host.state());
        });
    }
}

#[test]
fn a_rule_that_the_device_lacks_steps_in_host_memory() {
    world(1, |member| {
        let mut config = config(ZeroStage::Replicated);
        config.optimizer.optim = OptimizerKind::Lion;
        let mut host = data_parallel(&member, config.clone());
        let mut device = data_parallel(&member, config)
            .on_device(Arc::new(Mirror))
            .unwrap();
        let (mut expected, mut found) = (noises(1, len()), noises(1, len()));
        host.step(&mut expected, &mut grads(0, 0), lr(0)).unwrap();
        device.step(&mut found, &mut grads(0, 0), lr(0)).unwrap();
        assert!(found == expected && device.state() == host.state());
    });
}

#[derive(Debug)]
struct Broken;

impl StepDevice for Broken {
    fn has(&self, _: OptimizerKind) -> bool {
        true
    }

    fn zeros(&self, _: usize) -> Result<Box<dyn Buffer>, DeviceError> {
        Err("out of memory".into())
    }

    fn sums_of_squares(&self, _: &dyn Buffer, _: &[Range<usize>]) -> Result<Vec<f64>, DeviceError> {
        Err("unplugged".into())
    }

    fn update(
        &self,
        _: &Step<'_>,
        _: &mut dyn Buffer,
        _: &dyn Buffer,
        _: &mut [Box<dyn Buffer>],
        _: &[StepRange],
    ) -> Result<(), DeviceError> {
        Err("unplugged".into())
    }
}

#[test]
fn a_device_that_fails_is_an_error_with_its_words() {
    world(1, |member| {
        let optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let error = optimizer.on_device(Arc::new(Broken)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the device failed at the optimizer state"
        );
        let source = std::error::Error::source(&error).unwrap();
        assert_eq!(source.to_string(), "out of memory");
    });
}
