//! The tensors of a sample, in host memory.

use std::borrow::Cow;

use half::{bf16, f16};
use merak_mpu::DType;

/// Numbers in row-major order: integers (tokens, labels, masks) or floats (pixels).
#[derive(Debug, Clone, PartialEq)]
pub struct SampleTensor {
    shape: Vec<usize>,
    values: Values,
}

#[derive(Debug, Clone, PartialEq)]
enum Values {
    Ints(Vec<i64>),
    Floats(Vec<f32>),
}

impl SampleTensor {
    /// A vector of integers.
    pub fn vector(values: Vec<i64>) -> Self {
        Self {
            shape: vec![values.len()],
            values: Values::Ints(values),
        }
    }

    /// Integers of any shape; `None` unless `values` fill it exactly.
    pub fn new(shape: Vec<usize>, values: Vec<i64>) -> Option<Self> {
        fills(&shape, values.len()).then_some(Self {
            shape,
            values: Values::Ints(values),
        })
    }

    /// Floats of any shape; `None` unless `values` fill it exactly.
    pub fn floats(shape: Vec<usize>, values: Vec<f32>) -> Option<Self> {
        fills(&shape, values.len()).then_some(Self {
            shape,
            values: Values::Floats(values),
        })
    }

    /// The sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        match self.values {
            Values::Ints(_) => DType::I64,
            Values::Floats(_) => DType::F32,
        }
    }

    /// The integers; empty for a tensor of floats.
    pub fn ints(&self) -> &[i64] {
        match &self.values {
            Values::Ints(values) => values,
            Values::Floats(_) => &[],
        }
    }

    /// The same integers, to be changed; `None` for a tensor of floats.
    pub(super) fn ints_mut(&mut self) -> Option<&mut [i64]> {
        match &mut self.values {
            Values::Ints(values) => Some(values),
            Values::Floats(_) => None,
        }
    }

    /// The bytes of the elements, in the machine's order.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.values {
            Values::Ints(values) => bytemuck::cast_slice(values),
            Values::Floats(values) => bytemuck::cast_slice(values),
        }
    }

    /// The bytes of the elements, with floats converted to the floating-point type `dtype`.
    pub(crate) fn bytes_as(&self, dtype: DType) -> Cow<'_, [u8]> {
        let Values::Floats(values) = &self.values else {
            return Cow::Borrowed(self.as_bytes());
        };
        let values = values.iter();
        match dtype {
            DType::BF16 => values
                .flat_map(|&x| bf16::from_f32(x).to_ne_bytes())
                .collect(),
            DType::F16 => values
                .flat_map(|&x| f16::from_f32(x).to_ne_bytes())
                .collect(),
            DType::F64 => values.flat_map(|&x| f64::from(x).to_ne_bytes()).collect(),
            _ => Cow::Borrowed(self.as_bytes()),
        }
    }

    pub(crate) fn describe(&self) -> String {
        format!("{} of shape {:?}", self.dtype(), self.shape)
    }

    /// Tensors like this one stacked along a new first dimension of `rows`, filled up with
    /// `padding`.
    pub(super) fn stack(&self, tensors: &[&Self], rows: usize, padding: i64) -> Self {
        let len = rows * self.shape.iter().product::<usize>();
        let values = match self.values {
            Values::Ints(_) => {
                let ints = tensors.iter().flat_map(|tensor| tensor.ints());
                let mut ints: Vec<_> = ints.copied().collect();
                ints.resize(len, padding);
                Values::Ints(ints)
            }
            Values::Floats(_) => {
                let mut all = Vec::with_capacity(len);
                for tensor in tensors {
                    if let Values::Floats(floats) = &tensor.values {
                        all.extend_from_slice(floats);
                    }
                }
                all.resize(len, 0.0);
                Values::Floats(all)
            }
        };
        Self {
            shape: [&[rows], &self.shape[..]].concat(),
            values,
        }
    }
}

fn fills(shape: &[usize], len: usize) -> bool {
    let mut sizes = shape.iter();
    sizes.try_fold(1_usize, |count, size| count.checked_mul(*size)) == Some(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_come_in_the_type_that_a_model_computes_in() {
        let tensor = SampleTensor::floats(vec![2], vec![0.5, -3.0]).unwrap();
        let bytes = |values: [u16; 2]| values.map(u16::to_ne_bytes).concat();
        assert_eq!(*tensor.bytes_as(DType::BF16), bytes([0x3f00, 0xc040]));
        assert_eq!(*tensor.bytes_as(DType::F16), bytes([0x3800, 0xc200]));
        assert_eq!(*tensor.bytes_as(DType::F32), *tensor.as_bytes());
        let ints = SampleTensor::vector(vec![1, 2]);
        assert_eq!(*ints.bytes_as(DType::BF16), *ints.as_bytes());
    }

    #[test]
    fn a_tensor_is_filled_exactly() {
        assert!(SampleTensor::new(vec![2, 3], vec![0; 6]).is_some());
        assert!(SampleTensor::new(vec![2, 3], vec![0; 5]).is_none());
        assert!(SampleTensor::floats(vec![2, 3], vec![0.0; 5]).is_none());
        assert!(SampleTensor::new(vec![usize::MAX, 2], vec![]).is_none());
    }
}
