//! Parameters come into being: a rank fills its own slices, and only those.

use crate::{
    Init, LocalBox, Param,
    hash::name_hash,
    kernels::{self, Distribution, Float, InitKey, TensorBox, Threads},
};

/// Fills `out` with the starting values of what rank `rank` of `degree` holds of a parameter.
///
/// A value depends only on the seed, the parameter's name and the index of the element in the full tensor.
///
/// ```
/// use merak_trace::{DType, Init, Param, ParamRole, Placement, TensorType, initial_values, kernels::Threads};
/// let full = TensorType::new([4, 6], DType::F32);
/// let mut param = Param::new("w", full, Init::Normal(0.02), ParamRole::Weight);
/// let mut whole = vec![0.0_f32; 24];
/// initial_values(&Threads::one(), 42, &param, 0, 1, &mut whole);
/// param.place(Placement::shard(0, 4), 2);
/// let mut half = vec![0.0_f32; 12];
/// initial_values(&Threads::one(), 42, &param, 1, 2, &mut half);
/// assert_eq!(whole[12..], half);
/// ```
///
/// # Panics
/// When `out` has not as many elements as the local tensor.
pub fn initial_values<T: Float>(
    threads: &Threads,
    seed: u64,
    param: &Param,
    rank: usize,
    degree: usize,
    out: &mut [T],
) {
    assert_eq!(
        out.len(),
        param.local.numel(),
        "one value per element of {}",
        param.name
    );
    let distribution = match param.init {
        Init::Normal(std) => Distribution::Normal { mean: 0.0, std },
        Init::Uniform(bound) => Distribution::Uniform {
            low: -bound,
            high: bound,
        },
        Init::Constant(value) => Distribution::Constant(value),
    };
    let key = InitKey {
        seed,
        name: name_hash(&param.name),
    };
    for piece in param.placement.local_boxes(&param.full, rank, degree) {
        let mut values = vec![T::ZERO; piece.size.iter().product()];
        let place = TensorBox {
            full: &param.full.shape,
            start: &piece.offset,
            local: &piece.size,
        };
        kernels::init(threads, key, distribution, place, &mut values);
        put(&piece, &param.local.shape, &values, out);
    }
}

/// Copies the elements of a box to their place in the local tensor.
fn put<T: Copy>(piece: &LocalBox, local: &[usize], values: &[T], out: &mut [T]) {
    if values.is_empty() {
        return;
    }
    let inner: usize = local.iter().skip(piece.dim + 1).product();
    let (run, stride) = if local.is_empty() {
        (1, 1)
    } else {
        (piece.size[piece.dim] * inner, local[piece.dim] * inner)
    };
    let rows = values.chunks_exact(run).zip(out.chunks_exact_mut(stride));
    rows.for_each(|(from, to)| to[piece.local_start * inner..][..run].copy_from_slice(from));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ParamRole, Placement, Shard, TensorType};
    use merak_mpu::DType;

    #[test]
    fn slices_of_a_fused_projection_join_to_the_whole() {
        let full = TensorType::new([3, 8], DType::F32);
        let mut param = Param::new("c_attn.weight", full, Init::Normal(1.0), ParamRole::Weight);
        let mut whole = vec![0.0_f64; 24];
        initial_values(&Threads::one(), 1, &param, 0, 1, &mut whole);
        param.place(
            Placement::Shard(Shard {
                dim: 1,
                parts: vec![4, 2, 2],
            }),
            2,
        );
        for rank in 0..2 {
            let mut local = vec![0.0_f64; 12];
            initial_values(&Threads::one(), 1, &param, rank, 2, &mut local);
            let columns = [[0, 1, 4, 6], [2, 3, 5, 7]][rank];
            for row in 0..3 {
                for (i, column) in columns.into_iter().enumerate() {
                    assert_eq!(
                        local[row * 4 + i].to_bits(),
                        whole[row * 8 + column].to_bits()
                    );
                }
            }
        }
    }
}
