//! Runs small graphs on one rank.

use merak_mpu::{Buffer, into_vec};
#[cfg(feature = "tch")]
use merak_trace::backend::tch::{Tch, TchDevice};
use merak_trace::{
    AxisGroups, Batch, DType, GradSlot, GradStore, Graph, Init, Interpreter, Param, ParamStore,
    RecomputePlan, RunContext, SharedBackend, SingleRank, StageCuts, StageProgram, TensorType,
    Value, backend::candle::Candle,
};
use std::{collections::BTreeMap, sync::Arc};

pub(crate) fn backend(threads: usize) -> SharedBackend {
    Arc::new(Candle::new(threads).expect("threads start"))
}

/// Every backend of this build, on every kind of device that is there.
pub(crate) fn backends(threads: usize) -> Vec<SharedBackend> {
    let mut backends = host_backends(threads);
    backends.extend(cuda(threads));
    backends
}

/// Every backend of this build, on the processor.
#[cfg(feature = "tch")]
pub(crate) fn host_backends(threads: usize) -> Vec<SharedBackend> {
    vec![backend(threads), libtorch(TchDevice::Cpu, threads)]
}

/// Every backend of this build, on the processor.
#[cfg(not(feature = "tch"))]
pub(crate) fn host_backends(threads: usize) -> Vec<SharedBackend> {
    vec![backend(threads)]
}

/// The backends of this build that compute in 16 bits over values of f32, on every kind of device
/// that is there.
#[cfg(feature = "tch")]
pub(crate) fn autocasting(dtype: DType, threads: usize) -> Vec<SharedBackend> {
    let backend = |device| -> SharedBackend {
        let tch = Tch::new(device, threads).expect("the device is there");
        Arc::new(tch.with_autocast(dtype).expect("a type of 16 bits"))
    };
    let devices = [TchDevice::Cpu].into_iter().chain(cuda_device());
    devices.map(backend).collect()
}

/// The backends of this build that compute in 16 bits over values of f32.
#[cfg(not(feature = "tch"))]
pub(crate) fn autocasting(_: DType, _: usize) -> Vec<SharedBackend> {
    Vec::new()
}

/// The first CUDA device, where there is one; there must be one if `TEST_CUDA` is set.
#[cfg(feature = "tch")]
fn cuda_device() -> Option<TchDevice> {
    let must_be = std::env::var_os("TEST_CUDA").is_some();
    (must_be || Tch::num_cuda_devices() > 0).then_some(TchDevice::Cuda(0))
}

#[cfg(feature = "tch")]
fn cuda(threads: usize) -> Option<SharedBackend> {
    cuda_device().map(|device| libtorch(device, threads))
}

#[cfg(not(feature = "tch"))]
fn cuda(_: usize) -> Option<SharedBackend> {
    None
}

#[cfg(feature = "tch")]
fn libtorch(device: TchDevice, threads: usize) -> SharedBackend {
    Arc::new(Tch::new(device, threads).expect("the device is there"))
}

/// The element types in which a backend computes.
pub(crate) fn dtypes(backend: &SharedBackend) -> &'static [DType] {
    match backend.name() {
        "tch" => &[DType::F64, DType::F32, DType::BF16, DType::F16],
        _ => &[DType::F64, DType::F32],
    }
}

/// Numbers in [-1, 1) that depend on a seed alone.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..len).map(|_| 2.0 * next() - 1.0).collect()
}

pub(crate) fn value(backend: &SharedBackend, ty: &TensorType, data: &[f64]) -> Value {
    let bytes: Vec<u8> = match ty.dtype {
        DType::F64 => bytemuck::cast_slice(data).to_vec(),
        DType::F32 => {
            bytemuck::cast_slice(&data.iter().map(|&x| x as f32).collect::<Vec<_>>()).to_vec()
        }
        DType::I64 => {
            bytemuck::cast_slice(&data.iter().map(|&x| x as i64).collect::<Vec<_>>()).to_vec()
        }
        DType::BF16 => {
            let data = data.iter().map(|&x| half::bf16::from_f64(x));
            bytemuck::cast_slice(&data.collect::<Vec<_>>()).to_vec()
        }
        DType::F16 => {
            let data = data.iter().map(|&x| half::f16::from_f64(x));
            bytemuck::cast_slice(&data.collect::<Vec<_>>()).to_vec()
        }
        other => unreachable!("tests use no {other}"),
    };
    backend
        .from_bytes(ty, &bytes)
        .expect("as many bytes as the type needs")
}

pub(crate) fn numbers(backend: &SharedBackend, value: &Value) -> Vec<f64> {
    let dtype = value.ty().dtype;
    let buffer = backend
        .into_buffer(value.clone())
        .expect("a value of this backend");
    floats(dtype, &*buffer)
}

pub(crate) fn floats(dtype: DType, buffer: &dyn Buffer) -> Vec<f64> {
    let mut out = Vec::new();
    buffer.read(&mut |bytes| match dtype {
        DType::F64 => out = bytemuck::cast_slice(bytes).to_vec(),
        DType::F32 => {
            out = bytemuck::cast_slice::<u8, f32>(bytes)
                .iter()
                .map(|&x| f64::from(x))
                .collect();
        }
        other => unreachable!("tests read no {other}"),
    });
    out
}

/// Parameters of a program, filled with noise of the parameter's name (and 1 for norm scales).
pub(crate) fn params(backend: &SharedBackend, graph: &Graph) -> ParamStore {
    let mut offsets = Vec::new();
    let mut len = 0;
    for param in graph.params() {
        offsets.push(len);
        len += param.local.numel();
    }
    let mut store = backend
        .param_store(graph.params(), &offsets, len)
        .expect("a valid layout");
    let data: Vec<f64> = graph
        .params()
        .iter()
        .flat_map(|param| {
            let seed = param.name.bytes().fold(7_u64, |hash, byte| {
                hash.wrapping_mul(31).wrapping_add(u64::from(byte))
            });
            let (shift, scale) = match param.init {
                Init::Constant(value) => (value, 0.1),
                Init::Normal(_) | Init::Uniform(_) => (0.0, 0.5),
            };
            noise(seed, param.local.numel())
                .into_iter()
                .map(move |x| shift + scale * x)
        })
        .collect();
    write(&mut *store.flat, &data);
    store
}

/// Parameters with the given elements, trained and frozen ones in a store each.
pub(crate) fn views(backend: &SharedBackend, params: &[Param], data: &[Vec<f64>]) -> Vec<Value> {
    let mut views = BTreeMap::new();
    for is_trained in [true, false] {
        let own = params.iter().zip(data).enumerate();
        let own: Vec<_> = own
            .filter(|(_, (param, _))| param.trainable == is_trained)
            .collect();
        let (mut offsets, mut flat) = (Vec::new(), Vec::new());
        for (_, (_, data)) in &own {
            offsets.push(flat.len());
            flat.extend_from_slice(data);
        }
        let of_store: Vec<_> = own.iter().map(|(_, (param, _))| (*param).clone()).collect();
        let store = backend.param_store(&of_store, &offsets, flat.len());
        let mut store = store.expect("a valid layout");
        write(&mut *store.flat, &flat);
        views.extend(own.iter().map(|(index, _)| *index).zip(store.views));
    }
    views.into_values().collect()
}

pub(crate) fn write(buffer: &mut dyn Buffer, data: &[f64]) {
    let dtype = buffer.dtype();
    buffer.write(&mut |bytes| match dtype {
        DType::F64 => bytemuck::cast_slice_mut(bytes).copy_from_slice(data),
        DType::BF16 => bytemuck::cast_slice_mut::<u8, half::bf16>(bytes)
            .iter_mut()
            .zip(data)
            .for_each(|(to, &from)| *to = half::bf16::from_f64(from)),
        _ => bytemuck::cast_slice_mut::<u8, f32>(bytes)
            .iter_mut()
            .zip(data)
            .for_each(|(to, &from)| *to = from as f32),
    });
}

/// A store with one buffer per gradient of a program.
pub(crate) fn grad_store(backend: &SharedBackend, program: &StageProgram) -> GradStore {
    let mut store = GradStore::default();
    for (buffer, grad) in program.grads.iter().enumerate() {
        let ty = &program.graph.param(grad.param).local;
        // Gradients of 16-bit parameters are summed in f32.
        let dtype = match ty.dtype {
            DType::BF16 | DType::F16 => DType::F32,
            other => other,
        };
        let memory = backend.grad_buffer(dtype, ty.numel());
        store.buffers.push(memory.expect("room for it"));
        store.slots.push(GradSlot {
            buffer,
            offset: 0,
            len: ty.numel(),
        });
    }
    store
}

/// The whole model on one rank.
pub(crate) fn interpreter(backend: &SharedBackend, graph: &Graph) -> Interpreter {
    interpreter_in(backend, graph, Arc::new(SingleRank))
}

/// The whole model on a rank of some groups.
pub(crate) fn interpreter_in(
    backend: &SharedBackend,
    graph: &Graph,
    groups: Arc<dyn AxisGroups>,
) -> Interpreter {
    let program = StageProgram::training(
        graph,
        &StageCuts::whole(graph),
        0,
        &RecomputePlan::default(),
    )
    .expect("differentiable");
    Interpreter::new(Arc::new(program), Arc::clone(backend), groups)
}

/// A context with dropout on.
pub(crate) fn context() -> RunContext {
    RunContext {
        seed: 1234,
        step: 3,
        sample_base: 4,
        training: true,
        ..RunContext::default()
    }
}

/// Loss and gradients, one list per use of a parameter.
pub(crate) fn loss_and_grads(graph: &Graph, batch: &Batch, threads: usize) -> (f64, Vec<Vec<f64>>) {
    let backend = backend(threads);
    let runner = interpreter(&backend, graph);
    let params = params(&backend, &runner.program().graph);
    let mut store = grad_store(&backend, runner.program());
    let mut forwarded = runner
        .forward(&params.views, batch, Vec::new(), context())
        .expect("runs forward");
    let loss = numbers(&backend, &forwarded.outputs[0])[0];
    runner
        .backward(
            &mut forwarded.frame,
            &params.views,
            Vec::new(),
            1.0,
            &mut store,
        )
        .expect("runs backward");
    let grads = store.buffers.into_iter().map(|buffer| {
        let dtype = buffer.dtype();
        if dtype == DType::F64 {
            into_vec(buffer).expect("f64")
        } else {
            floats(dtype, &*buffer)
        }
    });
    (loss, grads.collect())
}
