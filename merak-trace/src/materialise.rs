//! Starting values of parameters: a rank fills its own slices only.

use crate::{
    Init, LocalBox, Param,
    kernels::{self, Distribution, Float, InitKey, TensorBox, Threads},
};
use merak_mpu::{Coord, DType, Element, hash::fnv1a};

/// Most elements that are drawn at a time, unless one row is longer.
const BLOCK: usize = 1 << 20;

/// Fills `out` with the starting values of a parameter's slice on the rank at `place`; room behind
/// the end of a cut dimension is zero.
///
/// A value depends only on the seed, the parameter's name and the index of the element in the full
/// tensor.
///
/// ```
/// use merak_trace::{
///     Axis, Coord, DType, Init, Param, ParamRole, Placement, TensorType, Threads, initial_values,
/// };
/// let full = TensorType::new([4, 6], DType::F32);
/// let mut param = Param::new("w", full, Init::Normal(0.02), ParamRole::Weight);
/// let mut whole = vec![0.0_f32; 24];
/// initial_values(&Threads::one(), 42, &param, Coord::default(), &mut whole);
/// param.place(Axis::Tensor, Placement::shard(0, 4), 2)?;
/// let mut half = vec![0.0_f32; 12];
/// let second = Coord::default().with(Axis::Tensor, 1);
/// initial_values(&Threads::one(), 42, &param, second, &mut half);
/// assert_eq!(whole[12..], half);
/// # Ok::<(), merak_trace::Error>(())
/// ```
///
/// # Panics
/// When `out` and the local tensor differ in length, or `T` is neither `f32` nor `f64`.
pub fn initial_values<T: Element>(
    threads: &Threads,
    seed: u64,
    param: &Param,
    place: Coord,
    out: &mut [T],
) {
    assert_eq!(
        out.len(),
        param.local.numel(),
        "one value per element of {}",
        param.name
    );
    out.fill(T::zeroed());
    each_initial_values(threads, seed, param, place, &mut |first, values| {
        out[first..][..values.len()].copy_from_slice(values);
    });
}

/// Passes the values of [`initial_values`] to `show` a few at a time, with the index of their first
/// in the local tensor; none are of the room behind the end of a cut dimension. A caller that keeps
/// them in another type converts them there.
///
/// # Panics
/// When `T` is neither `f32` nor `f64`.
pub fn each_initial_values<T: Element>(
    threads: &Threads,
    seed: u64,
    param: &Param,
    place: Coord,
    show: &mut dyn FnMut(usize, &[T]),
) {
    match T::DTYPE {
        DType::F32 => draw::<f32>(threads, seed, param, place, &mut |first, values| {
            show(first, bytemuck::cast_slice(values));
        }),
        DType::F64 => draw::<f64>(threads, seed, param, place, &mut |first, values| {
            show(first, bytemuck::cast_slice(values));
        }),
        other => unreachable!("starting values are drawn in f32 or f64, not in {other}"),
    }
}

/// [`each_initial_values`] in one of the types of the kernels.
fn draw<T: Float>(
    threads: &Threads,
    seed: u64,
    param: &Param,
    place: Coord,
    show: &mut dyn FnMut(usize, &[T]),
) {
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
        name: fnv1a(param.name.bytes()),
    };
    let mut values = Vec::new();
    let boxes = param.placements.local_boxes(&param.full, place);
    for piece in boxes.into_iter().flat_map(blocks) {
        values.clear();
        values.resize(piece.size.iter().product(), T::ZERO);
        let place = TensorBox {
            full: &param.full.shape,
            start: &piece.offset,
            local: &piece.size,
        };
        kernels::init(threads, key, distribution, place, &mut values);
        let mut rest = values.as_slice();
        for range in piece.local_ranges(&param.local.shape) {
            let (run, after) = rest.split_at(range.len());
            show(range.start, run);
            rest = after;
        }
    }
}

/// Cuts a box along dimension 0 into blocks.
fn blocks(piece: LocalBox) -> impl Iterator<Item = LocalBox> {
    let rows = piece.size.first().copied().unwrap_or(1);
    let width: usize = piece.size.iter().skip(1).product();
    let step = (BLOCK / width.max(1)).max(1);
    (0..rows).step_by(step).map(move |row| {
        let mut block = piece.clone();
        if let Some(size) = block.size.first_mut() {
            block.offset[0] += row;
            block.local[0] += row;
            *size = step.min(rows - row);
        }
        block
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, ParamRole, Placement, Shard, TensorType};

    #[test]
    fn slices_of_a_fused_projection_join_to_the_whole() {
        let full = TensorType::new([3, 8], DType::F32);
        let mut param = Param::new("c_attn.weight", full, Init::Normal(1.0), ParamRole::Weight);
        let mut whole = vec![0.0_f64; 24];
        initial_values(&Threads::one(), 1, &param, Coord::default(), &mut whole);
        let parts = vec![4, 2, 2];
        let placement = Placement::Shard(Shard::new(1, parts));
        param.place(Axis::Tensor, placement, 2).unwrap();
        for rank in 0..2 {
            let mut local = vec![0.0_f64; 12];
            let place = Coord::default().with(Axis::Tensor, rank);
            initial_values(&Threads::one(), 1, &param, place, &mut local);
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

    #[test]
    fn padding_behind_a_cut_vocabulary_is_zero() {
        let full = TensorType::new([3, 2], DType::F32);
        let mut param = Param::new("wte", full, Init::Normal(1.0), ParamRole::Embedding);
        let placement = Placement::shard(0, 3);
        param.place(Axis::Tensor, placement, 2).unwrap();
        let mut local = vec![f32::NAN; 4];
        let last = Coord::default().with(Axis::Tensor, 1);
        initial_values(&Threads::one(), 1, &param, last, &mut local);
        assert!(local[..2].iter().all(|x| x.is_normal()));
        assert_eq!(local[2..], [0.0, 0.0]);
    }
}
