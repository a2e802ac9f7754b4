//! Backends: they execute nodes and move bytes.

#[cfg(feature = "cpu")]
pub mod candle;
#[cfg(any(feature = "cpu", feature = "tch"))]
mod masters;
#[cfg(any(feature = "cpu", feature = "tch"))]
mod parts;
mod past;
#[cfg(feature = "tch")]
pub mod tch;

#[cfg(feature = "cpu")]
use crate::{
    Error,
    kernels::{DropoutMask, MaskKey, SampleSlice},
    op,
};
use crate::{Op, Param, Result, TensorType, Value, value::MemoryMeter};
use merak_mpu::{Buffer, Coord, DType};
use std::{fmt, ops::Range, sync::Arc};

pub use past::{Following, Past, RelativeBias};

/// Facts about the run for the nodes of one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunContext {
    /// Seed of all random numbers.
    pub seed: u64,
    /// The optimizer step; masks differ from step to step.
    pub step: u64,
    /// Number of the microbatch's first sample, equal on every topology; sample `i` of the
    /// microbatch has the number `sample_base + i`. Dropout masks depend on it.
    pub sample_base: u64,
    /// Whether dropout is active, and attention rounds its factors where the backend rounds those
    /// of linear layers.
    pub training: bool,
    /// This rank's place on the mesh.
    pub place: Coord,
}

impl RunContext {
    /// The mask of a dropout in this step.
    #[cfg(feature = "cpu")]
    pub(crate) fn dropout(&self, spec: &op::DropoutSpec) -> DropoutMask {
        DropoutMask {
            key: MaskKey {
                seed: self.seed,
                step: self.step,
                node: spec.key,
            },
            p: spec.p,
        }
    }

    /// Where a value of that shape lies in the logical tensor of its samples (dimension 0).
    #[cfg(feature = "cpu")]
    pub(crate) fn sample_slice(&self, spec: &op::DropoutSpec, shape: &[usize]) -> SampleSlice {
        let first_sample = self.sample_base;
        let Some((dim, dim_full)) = spec.cut_dim() else {
            return SampleSlice::whole(first_sample, shape[1..].iter().product());
        };
        let local = shape[dim];
        let runs = spec.runs(self.place, local);
        if dim == 0 {
            return SampleSlice::whole(
                first_sample + runs.at(0) as u64,
                shape[1..].iter().product(),
            );
        }
        SampleSlice {
            first_sample,
            outer: shape[1..dim].iter().product(),
            rows: spec.row_runs(self.place, shape[dim - 1]),
            dim_full,
            runs,
            dim_local: local,
            inner: shape[dim + 1..].iter().product(),
        }
    }
}

/// A node as a backend sees it.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// The node's name, for messages.
    pub name: &'a str,
    /// What to compute.
    pub op: &'a Op,
    /// Types of the results.
    pub results: &'a [TensorType],
    /// The run around the node.
    pub context: &'a RunContext,
}

/// Where gradients accumulate: flat buffers, and a range of one of them for each gradient of a
/// program.
#[derive(Debug, Default)]
pub struct GradStore {
    /// The flat buffers.
    pub buffers: Vec<Box<dyn Buffer>>,
    /// Buffer and range of each entry of [`StageProgram::grads`](crate::StageProgram::grads);
    /// several programs follow one another
    /// ([`Interpreter::with_first_slot`](crate::Interpreter::with_first_slot)).
    pub slots: Vec<GradSlot>,
}

#[cfg(feature = "cpu")]
impl GradStore {
    /// The places of the slots to which results of a node are added, in their order.
    ///
    /// # Errors
    /// When there is no such slot, it has not as many elements as its result, or its buffer ends
    /// before it.
    fn targets(&self, call: Call<'_>, slots: &[usize]) -> Result<Vec<GradSlot>> {
        let results = slots.iter().zip(call.results);
        let targets = results.map(|(&slot, ty)| self.target(slot, ty));
        let targets: Result<_, String> = targets.collect();
        targets.map_err(|reason| Error::backend(call.name, reason))
    }

    fn target(&self, slot: usize, ty: &TensorType) -> Result<GradSlot, String> {
        let num_slots = self.slots.len();
        let target = self.slots.get(slot).copied();
        let target =
            target.ok_or_else(|| format!("adds {ty} to slot {slot}, but there are {num_slots}"))?;
        let GradSlot {
            buffer,
            offset,
            len,
        } = target;
        if len != ty.numel() {
            return Err(format!("adds {ty} to {len} elements of slot {slot}"));
        }
        let room = self.buffers.get(buffer).map_or(0, |buffer| buffer.len());
        if room < len || room - len < offset {
            return Err(format!(
                "adds {ty} at {offset} of buffer {buffer}, which has {room} elements"
            ));
        }
        Ok(target)
    }
}

/// Takes the gradients of a backward: a [`GradStore`], or what watches one to act on gradients as
/// soon as they are complete.
pub trait GradSink: fmt::Debug {
    /// The store that the nodes add to.
    fn store(&mut self) -> &mut GradStore;

    /// Comes before an addition to a slot, whose buffer must then have the slot's elements.
    ///
    /// # Errors
    /// When there is no memory for them; the backward ends with this error.
    fn open(&mut self, slot: usize) -> Result<()>;

    /// Follows the last addition of a microbatch to a slot. A program adds to each slot once per
    /// microbatch.
    ///
    /// # Errors
    /// When what acts on the gradient fails; the backward ends with this error.
    fn written(&mut self, slot: usize) -> Result<()>;
}

impl GradSink for GradStore {
    fn store(&mut self) -> &mut GradStore {
        self
    }

    fn open(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn written(&mut self, _: usize) -> Result<()> {
        Ok(())
    }
}

/// A range of a flat gradient buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradSlot {
    /// Which buffer.
    pub buffer: usize,
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

/// Flat parameter memory and the tensors that are views of it.
#[derive(Debug)]
pub struct ParamStore {
    /// All parameters end to end; writing it changes the views. Its element type is the one in
    /// which the parameters are kept, or `f32` if it holds the masters of trained 16-bit
    /// parameters.
    pub flat: Box<dyn Buffer>,
    /// One value per parameter of a program, in its order.
    pub views: Vec<Value>,
}

/// The error of a parameter that does not lie at this element of a flat value.
#[cfg(feature = "cpu")]
fn misplaced(param: &Param, offset: usize, flat: &Value) -> Error {
    let (own, there) = (&param.local, flat.ty());
    let reason = format!("of type {own} at {offset} does not fit {there}");
    Error::backend(&param.name, reason)
}

/// The error of a value of this type that another backend has made.
#[cfg(feature = "cpu")]
fn foreign(ty: &TensorType) -> Error {
    let reason = "is no value of this backend and element type";
    Error::backend(ty.to_string(), reason)
}

/// Executes nodes, one at a time. The methods take and return row-major tensors.
#[expect(
    clippy::wrong_self_convention,
    reason = "a backend makes values from bytes and buffers"
)]
pub trait Backend: fmt::Debug + Send + Sync {
    /// The name in configurations and messages.
    fn name(&self) -> &'static str;

    /// The account of the bytes of all values that the backend made.
    fn memory(&self) -> &MemoryMeter;

    /// Computes a node. An operand given away (not shared) may be overwritten.
    ///
    /// # Errors
    /// When the backend lacks the operation for these types, or operand values are out of range.
    fn run(&self, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>>;

    /// Computes attention for the next positions of several sequences, which lie end to end. The
    /// next keys and values of each are added to its past, and its queries see what is there then,
    /// the last query standing at the last key.
    ///
    /// # Shapes
    /// With N and M the sums of the sequences' next queries and keys, the operands are
    /// `q: [1, N, heads*D]` and `k, v: [1, M, kv_heads*D]`, the result is `[1, N, heads*D]`.
    ///
    /// # Errors
    /// As [`Backend::run`].
    fn attend(
        &self,
        call: Call<'_>,
        operands: [Value; 3],
        bias: Option<&RelativeBias>,
        sequences: &mut [Following<'_>],
    ) -> Result<Value> {
        past::attend(self, call, operands, bias, sequences)
    }

    /// Computes a node and adds its results to the given slots of a store.
    ///
    /// # Errors
    /// As [`Backend::run`].
    fn accumulate(
        &self,
        call: Call<'_>,
        inputs: Vec<Value>,
        store: &mut GradStore,
        slots: &[usize],
    ) -> Result<()>;

    /// Makes a value from the bytes of row-major elements.
    ///
    /// # Errors
    /// When there are not as many bytes as the type needs.
    fn from_bytes(&self, ty: &TensorType, bytes: &[u8]) -> Result<Value>;

    /// Makes a value from a buffer, without a copy where it is the backend's own.
    ///
    /// # Errors
    /// When the buffer does not hold the elements of the type.
    fn from_buffer(&self, ty: &TensorType, buffer: Box<dyn Buffer>) -> Result<Value>;

    /// Turns a value into a buffer, without a copy where nothing else shares it.
    ///
    /// # Errors
    /// When the tensor library fails.
    fn into_buffer(&self, value: Value) -> Result<Box<dyn Buffer>>;

    /// Makes a zeroed buffer for gradients, where the values lie.
    ///
    /// # Errors
    /// When a device has no room for it, or the tensor library no such element type.
    fn grad_buffer(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>>;

    /// Makes a zeroed `f32` buffer for the gradients of a bucket, one of several that come and go:
    /// its memory may serve the next one.
    ///
    /// # Errors
    /// As [`Backend::grad_buffer`].
    fn bucket_buffer(&self, len: usize) -> Result<Box<dyn Buffer>> {
        self.grad_buffer(DType::F32, len)
    }

    /// Frees the memory that is kept for later buckets. Its caller had more buckets at once than
    /// those to come.
    fn free_buckets(&self) {}

    /// Copies parts of a flat `f32` buffer, end to end, into a buffer of its own where the values
    /// lie. Elements are rounded to the nearest of the type, which has 16 bits or is `f32`.
    ///
    /// # Errors
    /// When an element type is another one, the buffer is shorter, or a device fails.
    fn copy_parts(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
        dtype: DType,
    ) -> Result<Box<dyn Buffer>>;

    /// Makes a buffer in which `len` elements are gathered, where the values lie. Those from number
    /// `at` on are a part of a flat `f32` buffer, converted as in [`Backend::copy_parts`]; the
    /// others are not specified.
    ///
    /// # Errors
    /// As [`Backend::copy_parts`]; when the part ends behind the buffer.
    fn gather_buffer(
        &self,
        from: &dyn Buffer,
        part: Range<usize>,
        dtype: DType,
        at: usize,
        len: usize,
    ) -> Result<Box<dyn Buffer>>;

    /// Replaces parts of a flat `f32` buffer of this backend by values that lie end to end.
    ///
    /// # Errors
    /// When the lengths differ, an element type is another one, the buffer is shorter, or a device
    /// fails.
    fn put_parts(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<()>;

    /// Lays out parameters at the given offsets of one flat buffer of `len` elements, filled with
    /// zeros. All parameters of a call are [kept](Param::kept) in one element type.
    ///
    /// # Errors
    /// When a parameter does not fit the buffer or element types are mixed.
    fn param_store(&self, params: &[Param], offsets: &[usize], len: usize) -> Result<ParamStore>;

    /// Lays out trained parameters that are [kept](Param::kept) in 16 bits as copies of `masters`,
    /// `f32` values of the caller in host memory: the flat buffer of the store writes there, and
    /// renews the copies. The copies are of zeros at first, as masters that were never written.
    ///
    /// # Errors
    /// As [`Backend::param_store`]; when the masters are not `f32`, or the parameters need none.
    fn param_copies(
        &self,
        params: &[Param],
        offsets: &[usize],
        masters: Box<dyn Buffer>,
    ) -> Result<ParamStore>;

    /// Parameters whose elements lie at the given offsets of a buffer, which is theirs from now on.
    /// Where the buffer has another element type than a parameter, its elements are converted.
    ///
    /// # Errors
    /// When a parameter does not fit the buffer or cannot be of its type.
    fn param_values(
        &self,
        params: &[Param],
        offsets: &[usize],
        buffer: Box<dyn Buffer>,
    ) -> Result<Vec<Value>>;
}

/// A shared backend.
pub type SharedBackend = Arc<dyn Backend>;
