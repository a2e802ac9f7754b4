//! A device steps as the host does, and its state goes out and in again.

use crate::fixture::{
    STAGES, alone, config, data_parallel, grads, held, len, lr, model, noises, params, step,
};
use merak_mpu::{Buffer, DType, Memory, StepRange, testing::world};
use merak_zero::{
    AdamStep, DeviceError, OptimizerKind, Step, StepDevice, ZeroConfig, ZeroGroups, ZeroOptimizer,
    ZeroStage, adam_update, sums_of_squares,
};
use std::{
    any::Any,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A device whose memory is the host's. It holds [`Apart`]s, and steps other buffers too.
#[derive(Debug)]
pub(crate) struct Mirror;

/// Memory of the device, which counts how often it is shown to the host.
#[derive(Debug, Default)]
struct Apart {
    values: Vec<f32>,
    shown: Arc<AtomicUsize>,
}

impl Apart {
    fn boxed(values: Vec<f32>) -> Box<dyn Buffer> {
        let shown = Arc::default();
        Box::new(Self { values, shown })
    }

    fn of(buffer: &dyn Buffer) -> Option<&Self> {
        let any: &dyn Any = buffer;
        any.downcast_ref()
    }

    fn of_mut(buffer: &mut dyn Buffer) -> &mut Self {
        let any: &mut dyn Any = buffer;
        any.downcast_mut().expect("memory of the device")
    }
}

impl Buffer for Apart {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn len(&self) -> usize {
        self.values.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        self.shown.fetch_add(1, Ordering::Relaxed);
        self.values.read(f);
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.shown.fetch_add(1, Ordering::Relaxed);
        self.values.write(f);
    }

    fn memory(&mut self) -> Memory {
        self.values.memory()
    }

    fn zeros_like(&self, len: usize) -> Box<dyn Buffer> {
        Self::boxed(vec![0.0; len])
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// Shows the elements of a buffer without a trace.
fn read<T>(buffer: &dyn Buffer, f: impl FnOnce(&[f32]) -> T) -> T {
    if let Some(apart) = Apart::of(buffer) {
        return f(&apart.values);
    }
    let (mut f, mut out) = (Some(f), None);
    buffer.read(&mut |bytes| out = f.take().map(|f| f(bytemuck::cast_slice(bytes))));
    out.expect("called once")
}

/// Changes parts of a buffer of the device.
fn change(
    values: &dyn Buffer,
    to: &mut dyn Buffer,
    parts: &[Range<usize>],
    change: impl Fn(&mut f32, f32),
) {
    let places = parts.iter().cloned().flatten();
    let to = &mut Apart::of_mut(to).values;
    read(values, |values| {
        assert_eq!(values.len(), parts.iter().map(Range::len).sum::<usize>());
        places
            .zip(values)
            .for_each(|(at, &x)| change(&mut to[at], x));
    });
}

impl StepDevice for Mirror {
    fn has(&self, rule: OptimizerKind) -> bool {
        rule == OptimizerKind::AdamW
    }

    fn holds(&self, buffer: &dyn Buffer) -> bool {
        Apart::of(buffer).is_some()
    }

    fn take(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<Box<dyn Buffer>, DeviceError> {
        let parts = parts.iter().cloned();
        let part = |part: Range<usize>| read(from, |from| from[part].to_vec());
        Ok(Apart::boxed(parts.flat_map(part).collect()))
    }

    fn put(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        change(values, to, parts, |to, x| *to = x);
        Ok(())
    }

    fn add(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        change(values, to, parts, |to, x| *to += x);
        Ok(())
    }

    fn multiply(&self, values: &mut dyn Buffer, factor: f32) -> Result<(), DeviceError> {
        let values = Apart::of_mut(values).values.iter_mut();
        values.for_each(|x| *x *= factor);
        Ok(())
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
        let params: &mut dyn Buffer = if self.holds(params) {
            &mut Apart::of_mut(params).values
        } else {
            params
        };
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

/// Three steps on memory of the device, and how often the host saw a flat buffer.
fn steps_apart(
    optimizer: &mut ZeroOptimizer,
    rank: usize,
) -> merak_zero::Result<(Vec<f32>, usize)> {
    let shown = Arc::<AtomicUsize>::default();
    let flat = |values: Vec<f32>| Apart {
        values,
        shown: Arc::clone(&shown),
    };
    let mut weights = flat(held(optimizer, &noises(1, len())));
    for t in 0..3 {
        let all = grads(t, rank);
        let mut kept = if optimizer.divides_gradients() {
            let mut kept = flat(vec![0.0; optimizer.num_gradients()]);
            for bucket in (0..optimizer.layout().buckets().len()).rev() {
                let own = all[optimizer.layout().buckets()[bucket].flat.clone()].to_vec();
                let own = Apart::boxed(own);
                optimizer.add_bucket(bucket, own, &mut kept)?;
            }
            kept
        } else {
            let mut all = flat(all);
            optimizer.start_bucket(0, &mut all)?;
            all
        };
        optimizer.step(&mut weights, &mut kept, lr(t))?;
    }
    Ok((weights.values, shown.load(Ordering::Relaxed)))
}

#[test]
fn gradients_and_parameters_on_a_device_are_reduced_and_gathered_there() {
    for stage in STAGES {
        for (prescale_gradients, gradient_predivide_factor) in [(false, 1.0), (true, 8.0)] {
            let config = ZeroConfig {
                prescale_gradients,
                gradient_predivide_factor,
                ..config(stage)
            };
            world(2, |member| {
                let rank = member.rank().0;
                let mut host = data_parallel(&member, config.clone());
                let mut expected = held(&host, &noises(1, len()));
                for t in 0..3 {
                    step(&mut host, &mut expected, grads(t, rank), lr(t)).unwrap();
                }
                let device = data_parallel(&member, config.clone());
                let mut device = device.on_device(Arc::new(Mirror)).unwrap();
                let (found, shown) = steps_apart(&mut device, rank).unwrap();
                assert!(found == expected, "stage {stage:?}, rank {rank}");
                assert_eq!(shown, 0, "stage {stage:?}, rank {rank}");
                assert!(device.state() == host.state());
            });
        }
    }
}

#[test]
fn state_in_host_memory_takes_gradients_that_a_device_reduced() {
    world(2, |member| {
        let rank = member.rank().0;
        let mut host = data_parallel(&member, config(ZeroStage::OptimizerState));
        let mut expected = noises(1, len());
        host.step(&mut expected, &mut grads(0, rank), lr(0))
            .unwrap();
        let other = data_parallel(&member, config(ZeroStage::OptimizerState));
        let mut other = other.reduced_on(Arc::new(Mirror));
        let (mut found, mut own) = (noises(1, len()), Apart::boxed(grads(0, rank)));
        other.step(&mut found, &mut *own, lr(0)).unwrap();
        assert!(found == expected && other.state() == host.state());
    });
}

#[test]
fn summands_of_tensor_ranks_are_added_up_on_the_device() {
    world(2, |member| {
        let rank = member.rank().0;
        let made = || {
            let mut params = params();
            params[1].summed = true;
            params[5].summed = true;
            let groups = ZeroGroups {
                data_sequence: alone(&member),
                model: alone(&member),
            };
            let config = config(ZeroStage::Replicated);
            let made = ZeroOptimizer::new(params, model(), config, groups).unwrap();
            made.in_tensor_group(member.world_group().unwrap())
        };
        let mut expected = grads(0, rank);
        made().reduce_gradients(&mut expected).unwrap();
        let mut device = made().on_device(Arc::new(Mirror)).unwrap();
        let mut found = Apart {
            values: grads(0, rank),
            ..Apart::default()
        };
        device.reduce_gradients(&mut found).unwrap();
        assert!(found.values == expected && expected != grads(0, rank));
        assert_eq!(found.shown.load(Ordering::Relaxed), 0);
    });
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

    fn holds(&self, _: &dyn Buffer) -> bool {
        true
    }

    fn take(&self, _: &dyn Buffer, _: &[Range<usize>]) -> Result<Box<dyn Buffer>, DeviceError> {
        Err("unplugged".into())
    }

    fn put(
        &self,
        _: &dyn Buffer,
        _: &mut dyn Buffer,
        _: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        Err("unplugged".into())
    }

    fn add(
        &self,
        _: &dyn Buffer,
        _: &mut dyn Buffer,
        _: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        Err("unplugged".into())
    }

    fn multiply(&self, _: &mut dyn Buffer, _: f32) -> Result<(), DeviceError> {
        Err("unplugged".into())
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
    world(2, |member| {
        let optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let mut optimizer = optimizer.reduced_on(Arc::new(Broken));
        let error = optimizer.reduce_gradients(&mut grads(0, 0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the device failed at the gradient reduction"
        );
    });
}
