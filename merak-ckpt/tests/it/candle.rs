//! Parameters in and out of candle's variables.

use crate::tensors::{Library, laws};
use candle_core::{DType as CandleType, Device, Tensor, Var};
use merak_mpu::DType;

impl Library for Tensor {
    const TYPES: &[DType] = &[DType::F64, DType::F32, DType::BF16, DType::F16, DType::U32];

    fn var(values: &[f32], sizes: &[usize], dtype: DType) -> Self {
        let tensor = Tensor::from_slice(values, sizes, &Device::Cpu);
        let tensor = tensor.and_then(|tensor| tensor.to_dtype(dtype.into()));
        let var = tensor.and_then(|tensor| Var::from_tensor(&tensor));
        var.expect("the numbers of a test fit").into_inner()
    }

    fn shorts(sizes: &[usize]) -> Self {
        Tensor::zeros(sizes, CandleType::I16, &Device::Cpu).expect("the numbers of a test fit")
    }

    fn values(&self) -> Vec<f32> {
        let flat = self.to_dtype(CandleType::F32).and_then(|x| x.flatten_all());
        flat.and_then(|flat| flat.to_vec1())
            .expect("the numbers of a test fit")
    }

    fn columns(&self, start: usize, len: usize) -> Self {
        self.narrow(self.rank() - 1, start, len)
            .expect("the numbers of a test fit")
    }
}

laws!(Tensor);
