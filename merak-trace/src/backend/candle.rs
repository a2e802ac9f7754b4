//! The default backend: values in host memory, which candle's tensors can share, and fused kernels.

mod accumulate;
mod attention;
mod buckets;
mod elementwise;
mod loss;
mod moves;
mod norm;
mod pool;
mod products;
mod run;
mod storage;

use crate::{
    Backend, Call, Error, Following, GradStore, Param, ParamStore, RelativeBias, Result,
    TensorType, Value,
    kernels::{Threads, Units},
    value::MemoryMeter,
};
use buckets::Buckets;
use candle_core::Tensor;
use merak_mpu::{Buffer, DType, into_vec, zeros};
use pool::{Pool, Pooled};
use std::ops::Range;
use storage::{Handle, Kept, Scalar, at, elements, kept, own_elements, steal};

/// Runs nodes on the CPU, on the compute threads of one rank.
///
/// Results do not depend on the number of threads. Memory of freed values is kept and reused.
///
/// Parameters of f32 may be [kept](Param::kept) in bf16, trained ones as copies of f32 masters.
/// Products and lookups widen the elements as they load them; other operations widen them in
/// temporary memory. All results are those of an f32 parameter with the same values.
#[derive(Debug)]
pub struct Candle {
    threads: Threads,
    products: Products,
    pool: Pool,
    buckets: Buckets,
    memory: MemoryMeter,
}

/// How exact the products of linear layers and their gradients are, and in training those of
/// attention. All other operations compute in the type of their values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Products {
    /// In the type of the values.
    #[default]
    Full,
    /// Factors of `f32` are rounded to bf16 while they are read; sums are `f32`. It is faster on
    /// [units that multiply bf16](Units), and takes about the same time without them.
    Rounded,
}

impl Candle {
    /// A backend that computes on `num_threads` threads.
    ///
    /// # Errors
    /// When the operating system refuses to start the threads.
    pub fn new(num_threads: usize) -> Result<Self> {
        let threads = Threads::new(num_threads).map_err(|source| Error::Kernel {
            node: "backend".to_owned(),
            source,
        })?;
        Ok(Self {
            threads,
            products: Products::default(),
            pool: Pool::default(),
            buckets: Buckets::default(),
            memory: MemoryMeter::default(),
        })
    }

    /// The same backend with products of that precision.
    #[must_use]
    pub fn with_products(self, products: Products) -> Self {
        Self { products, ..self }
    }

    /// The same backend, whose products use no other units of the processor than these.
    #[must_use]
    pub fn with_units(self, units: Units) -> Self {
        Self {
            threads: self.threads.with_units(units),
            ..self
        }
    }

    /// The tensor of a value of this backend, over the value's own memory.
    ///
    /// It stays as it is for as long as it is kept: the backend neither overwrites the memory nor
    /// takes it for other values. A parameter's tensor shows each update. A parameter that is
    /// [kept](Param::kept) in bf16 is copied.
    ///
    /// # Errors
    /// When the value is of another backend.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use merak_trace::backend::candle::Candle;
    ///
    /// let backend = Candle::new(1)?;
    /// let value = backend.value_of(&Tensor::new(&[[1.0_f32, 2.0]], &Device::Cpu)?)?;
    /// assert_eq!(value.ty().to_string(), "f32[1, 2]");
    /// assert_eq!(Candle::tensor_of(&value)?.to_vec2::<f32>()?, [[1.0, 2.0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn tensor_of(value: &Value) -> Result<Tensor> {
        storage::tensor_of(value)
    }

    /// A value over the memory of a tensor, which must not be changed in place any more. A strided
    /// tensor is copied; a tensor of a graph of candle's leaves it.
    ///
    /// # Errors
    /// When the tensor is not on the CPU, or of another type than a [`DType`].
    pub fn value_of(&self, tensor: &Tensor) -> Result<Value> {
        storage::value_of(tensor, |bytes| self.memory.lease(bytes))
    }

    /// Wraps memory that the pool gets back.
    fn wrap<T: Pooled>(&self, ty: &TensorType, data: Vec<T>) -> Result<Value> {
        self.wrap_in(ty, data, Some(self.pool.clone()))
    }

    /// Wraps memory that is freed after its last use.
    fn wrap_once<T: Scalar>(&self, ty: &TensorType, data: Vec<T>) -> Result<Value> {
        self.wrap_in(ty, data, None)
    }

    fn wrap_in<T: Scalar>(
        &self,
        ty: &TensorType,
        data: Vec<T>,
        pool: Option<Pool>,
    ) -> Result<Value> {
        if data.len() != ty.numel() {
            let reason = format!("cannot be made of {} elements", data.len());
            return Err(at("allocation")(format!("{ty} {reason}")));
        }
        let lease = self.memory.lease(ty.size_bytes());
        Ok(Handle::new(data, pool, lease).into_value(ty.clone()))
    }

    /// Memory for a result, with unspecified contents.
    fn result<T: Pooled>(&self, ty: &TensorType) -> Vec<T> {
        self.pool.take(ty.numel())
    }

    /// Copies the bytes of whole elements into memory from the pool.
    fn copied<T: Pooled>(&self, bytes: &[u8]) -> Vec<T> {
        let mut elements = self.pool.take::<T>(bytes.len() / size_of::<T>());
        bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
        elements
    }

    fn vec_of<T: Scalar>(value: Value) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(match steal::<T>(value) {
            Ok(memory) => memory,
            Err(shared) => elements::<T>(&shared)?.to_vec(),
        }))
    }
}

impl Backend for Candle {
    fn name(&self) -> &'static str {
        "candle"
    }

    fn memory(&self) -> &MemoryMeter {
        &self.memory
    }

    fn run(&self, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
        run::run(self, call, inputs, None)
    }

    fn attend(
        &self,
        call: Call<'_>,
        operands: [Value; 3],
        bias: Option<&RelativeBias>,
        sequences: &mut [Following<'_>],
    ) -> Result<Value> {
        attention::attend(self, call, (&operands, bias), sequences)
    }

    fn accumulate(
        &self,
        call: Call<'_>,
        inputs: Vec<Value>,
        store: &mut GradStore,
        slots: &[usize],
    ) -> Result<()> {
        accumulate::accumulate(self, call, inputs, store, slots)
    }

    fn from_bytes(&self, ty: &TensorType, bytes: &[u8]) -> Result<Value> {
        if bytes.len() != ty.size_bytes() {
            let reason = format!("cannot be made of {} bytes", bytes.len());
            return Err(Error::backend(ty.to_string(), reason));
        }
        match ty.dtype {
            DType::F32 => self.wrap(ty, self.copied::<f32>(bytes)),
            DType::F64 => self.wrap(ty, self.copied::<f64>(bytes)),
            DType::BF16 => self.wrap_once::<half::bf16>(ty, bytemuck::pod_collect_to_vec(bytes)),
            DType::F16 => self.wrap_once::<half::f16>(ty, bytemuck::pod_collect_to_vec(bytes)),
            DType::I64 => self.wrap(ty, self.copied::<i64>(bytes)),
            DType::U32 => self.wrap_once::<u32>(ty, bytemuck::pod_collect_to_vec(bytes)),
            DType::U8 => self.wrap_once::<u8>(ty, bytes.to_vec()),
        }
    }

    fn from_buffer(&self, ty: &TensorType, buffer: Box<dyn Buffer>) -> Result<Value> {
        if buffer.dtype() != ty.dtype || buffer.len() != ty.numel() {
            let reason = format!(
                "cannot be made of {} elements of {}",
                buffer.len(),
                buffer.dtype()
            );
            return Err(Error::backend(ty.to_string(), reason));
        }
        let node = || ty.to_string();
        let collective = |source| Error::Collective {
            node: node(),
            source,
        };
        match ty.dtype {
            DType::F32 => self.wrap::<f32>(ty, into_vec(buffer).map_err(collective)?),
            DType::F64 => self.wrap::<f64>(ty, into_vec(buffer).map_err(collective)?),
            DType::BF16 => self.wrap_once::<half::bf16>(ty, into_vec(buffer).map_err(collective)?),
            DType::F16 => self.wrap_once::<half::f16>(ty, into_vec(buffer).map_err(collective)?),
            DType::I64 => self.wrap_once::<i64>(ty, into_vec(buffer).map_err(collective)?),
            DType::U32 => self.wrap_once::<u32>(ty, into_vec(buffer).map_err(collective)?),
            DType::U8 => self.wrap_once::<u8>(ty, into_vec(buffer).map_err(collective)?),
        }
    }

    fn into_buffer(&self, value: Value) -> Result<Box<dyn Buffer>> {
        match value.ty().dtype {
            DType::F32 => Self::vec_of::<f32>(value),
            DType::F64 => Self::vec_of::<f64>(value),
            DType::BF16 => Self::vec_of::<half::bf16>(value),
            DType::F16 => Self::vec_of::<half::f16>(value),
            DType::I64 => Self::vec_of::<i64>(value),
            DType::U32 => Self::vec_of::<u32>(value),
            DType::U8 => Self::vec_of::<u8>(value),
        }
    }

    fn grad_buffer(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>> {
        Ok(zeros(dtype, len))
    }

    fn bucket_buffer(&self, len: usize) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(self.buckets.take_zeros::<f32>(len)))
    }

    fn free_buckets(&self) {
        self.buckets.free();
    }

    fn copy_parts(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
        dtype: DType,
    ) -> Result<Box<dyn Buffer>> {
        super::parts::copy(from, parts, dtype)
    }

    fn put_parts(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<()> {
        super::parts::put(values, to, parts)
    }

    fn gather_buffer(
        &self,
        from: &dyn Buffer,
        part: Range<usize>,
        dtype: DType,
        at: usize,
        len: usize,
    ) -> Result<Box<dyn Buffer>> {
        super::parts::check_place(from, &part, dtype, (at, len))?;
        let mut all: Box<dyn Buffer> = match dtype {
            DType::F32 => Box::new(self.buckets.take::<f32>(len)),
            DType::BF16 => Box::new(self.buckets.take::<half::bf16>(len)),
            _ => zeros(dtype, len),
        };
        super::parts::convert(from, &[part], &mut *all, at);
        Ok(all)
    }

    fn param_store(&self, params: &[Param], offsets: &[usize], len: usize) -> Result<ParamStore> {
        storage::param_store(params, offsets, len, (&self.pool, &self.threads))
    }

    fn param_copies(
        &self,
        params: &[Param],
        offsets: &[usize],
        masters: Box<dyn Buffer>,
    ) -> Result<ParamStore> {
        storage::param_copies(params, offsets, masters, (&self.pool, &self.threads))
    }

    fn param_values(
        &self,
        params: &[Param],
        offsets: &[usize],
        buffer: Box<dyn Buffer>,
    ) -> Result<Vec<Value>> {
        let ty = TensorType::new([buffer.len()], buffer.dtype());
        let lease = self.memory.lease(ty.size_bytes());
        let whole = match ty.dtype {
            DType::BF16 => {
                let wide = Some(self.pool.clone());
                Handle::of_bucket::<half::bf16>(buffer, wide, lease)?
            }
            DType::F64 => {
                let values = into_vec::<f64>(buffer).map_err(at("parameters"))?;
                Handle::new(values, None, lease)
            }
            _ => Handle::of_bucket::<f32>(buffer, None, lease)?,
        };
        storage::param_values(params, offsets, &whole.into_value(ty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Init, Op, ParamRole, RunContext, op};
    use candle_core::Device;

    fn ty<const N: usize>(shape: [usize; N], dtype: DType) -> TensorType {
        TensorType::new(shape, dtype)
    }

    #[test]
    fn attention_rounds_its_factors_in_training_alone() {
        let (tensor, sums) = (ty([1, 64, 64], DType::F32), ty([1, 2, 64], DType::F32));
        let attention = op::Attention::of_heads(2, 32);
        // Forward, then backward with another operand as the gradient.
        let run = |products, training| -> Vec<Vec<f32>> {
            let backend = Candle::new(1).unwrap().with_products(products);
            let context = RunContext {
                training,
                ..RunContext::default()
            };
            let value = |seed: usize| {
                let numbers = (0..tensor.numel()).map(|i| (i * 37 + seed) % 23);
                let numbers: Vec<_> = numbers.map(|i| i as f32 / 7.0 - 1.5).collect();
                backend.from_buffer(&tensor, Box::new(numbers)).unwrap()
            };
            let call = |op: &Op, results: &[TensorType], operands| {
                let call = Call {
                    name: "attention",
                    op,
                    results,
                    context: &context,
                };
                backend.run(call, operands).unwrap()
            };
            let operands = || vec![value(1), value(5), value(8)];
            let forward = Op::Attention(attention.clone());
            let results = call(&forward, &[tensor.clone(), sums.clone()], operands());
            let inputs = [vec![value(3)], operands(), results.clone()].concat();
            let backward = Op::AttentionGrad(attention.clone());
            let grads = call(
                &backward,
                &[tensor.clone(), tensor.clone(), tensor.clone()],
                inputs,
            );
            let all = results[..1].iter().chain(&grads);
            all.map(|value| elements::<f32>(value).unwrap().to_vec())
                .collect()
        };
        let exact = run(Products::Full, true);
        assert!(run(Products::Full, false) == exact);
        assert!(run(Products::Rounded, false) == exact);
        let rounded = run(Products::Rounded, true);
        assert!(
            rounded
                .iter()
                .zip(&exact)
                .all(|(rounded, exact)| rounded != exact)
        );
    }

    #[test]
    fn a_tensor_that_is_kept_outlives_its_value() {
        let backend = Candle::new(1).unwrap();
        let four = ty([4], DType::F32);
        let counted = [1.0_f32, 2.0, 3.0, 4.0];
        let value = || {
            let buffer = Box::new(counted.to_vec());
            backend.from_buffer(&four, buffer).unwrap()
        };
        let call = Call {
            name: "sum",
            op: &Op::Add,
            results: std::slice::from_ref(&four),
            context: &RunContext::default(),
        };
        let add = |a: Value| backend.run(call, vec![a, value()]).unwrap().remove(0);

        // The operation would overwrite its first operand.
        let overwritten = value();
        let kept = Candle::tensor_of(&overwritten).unwrap();
        let sum = add(overwritten);
        assert_eq!(&*elements::<f32>(&sum).unwrap(), [2.0, 4.0, 6.0, 8.0]);
        assert_eq!(kept.to_vec1::<f32>().unwrap(), counted);

        // The pool would give the memory to the next value.
        let dropped = value();
        let also_kept = Candle::tensor_of(&dropped).unwrap();
        let before = backend.pool.kept();
        drop(dropped);
        assert_eq!(backend.pool.kept(), before);
        let next = add(add(value()));
        assert_eq!(next.ty(), &four);
        assert_eq!(also_kept.to_vec1::<f32>().unwrap(), counted);
    }

    #[test]
    fn values_and_tensors_share_their_memory() {
        let backend = Candle::new(1).unwrap();
        let place = |tensor: &Tensor| {
            let mut place = 0;
            let buffer = merak_mpu::candle::TensorBuffer::new(tensor).unwrap();
            buffer.read(&mut |bytes| place = bytes.as_ptr().addr());
            place
        };
        for dtype in DType::ALL {
            let tensor = Tensor::ones((2, 3), dtype.into(), &Device::Cpu).unwrap();
            let value = backend.value_of(&tensor).unwrap();
            assert_eq!(value.ty(), &ty([2, 3], dtype));
            let back = Candle::tensor_of(&value).unwrap();
            assert_eq!((place(&back), back.dims()), (place(&tensor), &[2, 3][..]));
            // What is not ours is neither overwritten nor taken for the pool.
            drop((value, back));
            assert_eq!(backend.pool.kept(), (0, 0));
            assert_eq!(tensor.elem_count(), 6);
        }
        assert_eq!(backend.memory().live_bytes(), 0);
        let strided = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).unwrap();
        let strided = strided.reshape((2, 3)).unwrap().t().unwrap();
        let value = backend.value_of(&strided).unwrap();
        assert_eq!(
            &*elements::<f32>(&value).unwrap(),
            [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
        );
        let shorts = Tensor::zeros(2, candle_core::DType::I16, &Device::Cpu).unwrap();
        let error = backend.value_of(&shorts).unwrap_err().to_string();
        assert!(error.contains("its elements are I16"), "{error}");
    }

    #[test]
    fn nodes_read_the_rounded_copy_of_a_trained_parameter_that_is_kept_in_bf16() {
        let backend = Candle::new(2).unwrap();
        let param = |name: &str, len: usize| Param {
            kept: Some(DType::BF16),
            ..Param::new(
                name,
                ty([len], DType::F32),
                Init::Constant(0.0),
                ParamRole::Weight,
            )
        };
        let params = [param("a", 2), param("b", 3)];
        let mut store = backend.param_store(&params, &[3, 0], 5).unwrap();
        assert_eq!((store.flat.dtype(), store.flat.len()), (DType::F32, 5));
        let masters = [1.0_f32, 1.001, f32::NAN, -3.0, 0.1];
        let mut write = |bytes: &mut [u8]| bytes.copy_from_slice(bytemuck::cast_slice(&masters));
        store.flat.write(&mut write);
        let mut kept = Vec::new();
        store.flat.read(&mut |bytes| kept = bytes.to_vec());
        assert_eq!(kept, bytemuck::cast_slice::<_, u8>(&masters));
        let rounded = masters.map(|x| half::bf16::from_f32(x).to_f32().to_bits());
        let read = |value: &Value| {
            let values = elements::<f32>(value).unwrap();
            values.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(read(&store.views[0]), rounded[3..]);
        assert_eq!(read(&store.views[1]), rounded[..3]);
        // Parameters that replicas divide come in either type.
        let narrow: Vec<_> = masters.map(half::bf16::from_f32).into();
        let views = backend.param_values(&params, &[3, 0], Box::new(narrow));
        assert_eq!(read(&views.unwrap()[1]), rounded[..3]);
        let two = |bytes: &mut [u8]| bytes.copy_from_slice(bytemuck::cast_slice(&[2.0_f32, 2.0]));
        store.flat.write_part(8..16, &mut { two });
        let two = 2.0_f32.to_bits();
        assert_eq!(read(&store.views[0]), [two, rounded[4]]);
        assert_eq!(read(&store.views[1]), [rounded[0], rounded[1], two]);
        store.flat.clear();
        assert_eq!(read(&store.views[0]), [0, 0]);
    }

    #[test]
    fn memory_of_gathered_parameters_and_of_gradients_serves_the_next_buckets() {
        let backend = Candle::new(1).unwrap();
        let param = |kept| Param {
            kept,
            ..Param::new(
                "weight",
                ty([2], DType::F32),
                Init::Constant(0.0),
                ParamRole::Weight,
            )
        };
        let held = vec![0.5_f32, 1.0, 2.0, 3.0];
        for (dtype, kept) in [(DType::F32, None), (DType::BF16, Some(DType::BF16))] {
            let params = [param(kept), param(kept)];
            let mut places = Vec::new();
            for _ in 0..3 {
                let all = backend.gather_buffer(&held, 1..3, dtype, 2, 4).unwrap();
                all.read(&mut |bytes| places.push(bytes.as_ptr().addr()));
                let values = backend.param_values(&params, &[0, 2], all).unwrap();
                let [other, own] = values.try_into().unwrap();
                drop(other);
                // The last value over the memory is no whole of it.
                let copy = backend.into_buffer(own).unwrap();
                assert_eq!(into_vec::<f32>(copy).unwrap(), [1.0, 2.0]);
            }
            assert_eq!(places, [places[0]; 3], "{dtype}");
            let whole = backend.gather_buffer(&held, 0..2, dtype, 0, 2).unwrap();
            let values = backend.param_values(&params[..1], &[0], whole).unwrap();
            let copy = backend.into_buffer(values.into_iter().next().unwrap());
            assert_eq!(into_vec::<f32>(copy.unwrap()).unwrap(), [0.5, 1.0]);
        }
        let mut places = Vec::new();
        for _ in 0..3 {
            let mut grads = backend.bucket_buffer(1000).unwrap();
            grads.write(&mut |bytes| {
                assert!(bytes.iter().all(|byte| *byte == 0));
                bytes.fill(7);
                places.push(bytes.as_ptr().addr());
            });
        }
        assert_eq!(places, [places[0]; 3]);
    }

    #[test]
    fn elements_are_converted_as_candle_converts_them() {
        let backend = Candle::new(1).unwrap();
        let numbers = [0.0, 1.0, 2.5, -3.75, 300.0, 70_000.0, 16_777_217.0, -1e30];
        for from in DType::ALL {
            let numbers = Tensor::new(&numbers, &Device::Cpu).unwrap();
            let numbers = numbers.to_dtype(from.into()).unwrap();
            for to in DType::ALL {
                let call = Call {
                    name: "cast",
                    op: &Op::Cast { dtype: to },
                    results: &[ty([8], to)],
                    context: &RunContext::default(),
                };
                let value = backend.value_of(&numbers).unwrap();
                let cast = backend.run(call, vec![value]).unwrap().remove(0);
                let cast = Candle::tensor_of(&cast).unwrap();
                let expected = numbers.to_dtype(to.into()).unwrap();
                assert_eq!(cast.dtype(), expected.dtype());
                let f64s = |t: Tensor| {
                    t.to_dtype(candle_core::DType::F64)
                        .unwrap()
                        .to_vec1::<f64>()
                };
                assert_eq!(
                    f64s(cast).unwrap(),
                    f64s(expected).unwrap(),
                    "{from} to {to}"
                );
            }
        }
    }

    #[test]
    fn losses_and_messages_do_not_pile_up_in_the_pool() {
        let backend = Candle::new(1).unwrap();
        let (rows, classes) = (ty([6, 5], DType::F32), ty([6], DType::I64));
        let call = Call {
            name: "loss",
            op: &Op::CrossEntropy {
                label_smoothing: 0.0,
            },
            results: &[ty([], DType::F64), ty([6], DType::F32)],
            context: &RunContext::default(),
        };
        let mut kept = Vec::new();
        for _ in 0..200 {
            let logits = backend
                .from_buffer(&rows, Box::new(vec![0.5_f32; 30]))
                .unwrap();
            let labels = backend
                .from_buffer(&classes, Box::new(vec![1_i64; 6]))
                .unwrap();
            drop(backend.run(call, vec![logits, labels]).unwrap());
            kept.push(backend.pool.kept());
        }
        assert_eq!(kept[0], kept[199], "pieces and bytes");
        assert_eq!(kept[199], (2, 8 + 6 * 4), "one loss and its logarithms");
        assert_eq!(backend.memory().live_bytes(), 0);
    }
}
