//! The default backend: candle tensors in host memory, with fused kernels for the operations that
//! decide the speed.

mod accumulate;
mod attention;
mod elementwise;
mod loss;
mod moves;
mod norm;
mod pool;
mod products;
mod run;
mod storage;

use crate::{
    Backend, Call, Error, Following, GradStore, Param, ParamStore, Result, TensorType, Value,
    kernels::Threads, value::MemoryMeter,
};
use candle_core::{Device, Tensor};
use merak_mpu::{Buffer, DType, into_vec, zeros};
use pool::{Pool, Pooled};
use storage::{Handle, Kept, Scalar, at, elements, kept, steal};

/// Runs nodes on the CPU, on the compute threads of one rank.
///
/// Results do not depend on the number of threads. Memory of freed values is kept and reused.
///
/// Frozen parameters of f32 may be [kept](Param::kept) in bf16. Products and lookups widen the
/// elements as they load them; other operations widen them in temporary memory. All results are
/// those of an f32 parameter with the same values.
#[derive(Debug)]
pub struct Candle {
    threads: Threads,
    pool: Pool,
    memory: MemoryMeter,
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
            pool: Pool::default(),
            memory: MemoryMeter::default(),
        })
    }

    /// Wraps memory that the pool gets back.
    fn wrap<T: Pooled>(&self, ty: &TensorType, data: Vec<T>) -> Result<Value> {
        let lease = self.memory.lease(ty.size_bytes());
        let tensor =
            Tensor::from_vec(data, ty.shape.as_slice(), &Device::Cpu).map_err(at("allocation"))?;
        Ok(Handle::new(tensor, Some(self.pool.clone()), Some(lease)).into_value(ty.clone()))
    }

    /// Wraps memory that is freed after its last use.
    fn wrap_once<T: Scalar>(&self, ty: &TensorType, data: Vec<T>) -> Result<Value> {
        let tensor =
            Tensor::from_vec(data, ty.shape.as_slice(), &Device::Cpu).map_err(at("allocation"))?;
        Ok(
            Handle::new(tensor, None, Some(self.memory.lease(ty.size_bytes())))
                .into_value(ty.clone()),
        )
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
        run::run(self, call, inputs)
    }

    fn attend(
        &self,
        call: Call<'_>,
        operands: [Value; 3],
        sequences: &mut [Following<'_>],
    ) -> Result<Value> {
        attention::attend(self, call, &operands, sequences)
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
            return Err(Error::Backend {
                node: ty.to_string(),
                reason: format!("cannot be made of {} bytes", bytes.len()),
            });
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
            return Err(Error::Backend {
                node: ty.to_string(),
                reason,
            });
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

    fn grad_buffer(&self, dtype: DType, len: usize) -> Box<dyn Buffer> {
        zeros(dtype, len)
    }

    fn param_store(&self, params: &[Param], offsets: &[usize], len: usize) -> Result<ParamStore> {
        storage::param_store(params, offsets, len, &self.pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Op, RunContext};

    fn ty<const N: usize>(shape: [usize; N], dtype: DType) -> TensorType {
        TensorType::new(shape, dtype)
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
