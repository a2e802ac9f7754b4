//! Parameters in and out of libtorch's variables.

use crate::tensors::{Library, laws};
use merak_mpu::{DType, HostTensor, tch::kind_of};
use tch::{Device, Kind, Tensor};

impl Library for Tensor {
    const TYPES: &[DType] = &[DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64];

    fn var(values: &[f32], sizes: &[usize], dtype: DType) -> Self {
        let tensor = Tensor::from_buffer(sizes, Box::new(values.to_vec()));
        let kind = kind_of(dtype).expect("a type of libtorch");
        let tensor = tensor.expect("the numbers of a test fit").to_kind(kind);
        tensor.set_requires_grad(dtype.is_float())
    }

    fn shorts(sizes: &[usize]) -> Self {
        let sizes: Vec<i64> = sizes.iter().copied().map(int).collect();
        Tensor::zeros(sizes, (Kind::Int16, Device::Cpu))
    }

    fn values(&self) -> Vec<f32> {
        let flat = self.detach().to_kind(Kind::Float).reshape(-1);
        Vec::try_from(flat).expect("the numbers of a test fit")
    }

    fn columns(&self, start: usize, len: usize) -> Self {
        self.narrow(-1, int(start), int(len))
    }
}

fn int(size: usize) -> i64 {
    i64::try_from(size).expect("a size of a test")
}

laws!(Tensor);
