//! Tensors of other libraries in collectives and messages.

#[cfg(any(feature = "candle", feature = "tch"))]
use crate::DType;
use crate::{Buffer, Error, Group, Packet, ReduceOp, Result};

/// A tensor of a tensor library, as collectives and messages see it.
///
/// The features `candle` and `tch` implement it for the tensors of these libraries; a library of
/// one's own needs these four methods.
///
/// A pending operation on a tensor is one on its buffer:
/// `group.start_all_reduce(tensor.lend()?, op)`.
pub trait HostTensor: Sized {
    /// Sizes of the dimensions, slowest first.
    fn sizes(&self) -> Vec<usize>;

    /// The tensor's memory, to be read and overwritten until the buffer is dropped. A strided
    /// tensor lends a copy, and gets the elements back then. Tensors that share memory are not lent
    /// at once, on any rank of the process.
    ///
    /// # Errors
    /// [`Error::BadTensor`] where the elements are not in host memory, of another type than a
    /// [`DType`](crate::DType), or lent already.
    fn lend(&self) -> Result<Box<dyn Buffer>>;

    /// The tensor's elements in row-major order, to be read. They stay where they lie, unless the
    /// tensor is strided or a variable, whose elements change with the next step.
    ///
    /// # Errors
    /// [`Error::BadTensor`] where the elements are not in host memory, or of another type than a
    /// [`DType`](crate::DType).
    fn share(&self) -> Result<Box<dyn Buffer>>;

    /// A tensor of these sizes over the elements of a buffer. What [`HostTensor::lend`] or
    /// [`HostTensor::share`] gave becomes the tensor's memory without a copy, and so does a `Vec`
    /// in candle; libtorch copies it.
    ///
    /// # Errors
    /// [`Error::BadTensor`] where the library has no such elements, or another number of them.
    fn from_buffer(sizes: &[usize], buffer: Box<dyn Buffer>) -> Result<Self>;
}

impl Packet {
    /// A tensor on its way: the packet shares the tensor's memory where it can.
    ///
    /// A tensor whose packet was sent is never changed in place, as by
    /// [`Group::all_reduce_tensor`]: copy it first. Between threads the receiver's tensor has its
    /// memory. Between processes the engine may read it after the send is done, and nothing tells
    /// when it has.
    ///
    /// # Errors
    /// As [`HostTensor::share`].
    pub fn of_tensor<T: HostTensor>(tensor: &T) -> Result<Self> {
        Ok(Self {
            shape: tensor.sizes(),
            data: tensor.share()?,
        })
    }

    /// The packet as a tensor.
    ///
    /// # Errors
    /// As [`HostTensor::from_buffer`].
    pub fn into_tensor<T: HostTensor>(self) -> Result<T> {
        T::from_buffer(&self.shape, self.data)
    }
}

/// Collectives and messages of tensors.
///
/// The collectives that keep a tensor's shape work in its own memory, so every tensor that shares
/// the memory sees the result, and an autograd engine knows nothing of it.
impl Group {
    /// Reduces tensors of one shape element by element; every member's own tensor has the result.
    ///
    /// # Errors
    /// As [`HostTensor::lend`] and [`Group::all_reduce`].
    pub fn all_reduce_tensor<T: HostTensor>(&self, tensor: &T, op: ReduceOp) -> Result<()> {
        self.all_reduce(tensor.lend()?, op).map(drop)
    }

    /// Copies the elements of member `root` into every member's own tensor of the same shape.
    ///
    /// # Errors
    /// As [`HostTensor::lend`] and [`Group::broadcast`].
    pub fn broadcast_tensor<T: HostTensor>(&self, tensor: &T, root: usize) -> Result<()> {
        self.broadcast(tensor.lend()?, root).map(drop)
    }

    /// Cuts `[N * d, ..]` along its first dim, sends the `p`-th `[d, ..]` to member `p`, and puts
    /// what comes from member `p` in its place.
    ///
    /// # Errors
    /// As [`HostTensor::lend`] and [`Group::all_to_all`]; [`Error::BadTensor`] where `N` does not
    /// divide the first dim.
    pub fn all_to_all_tensor<T: HostTensor>(&self, tensor: &T) -> Result<()> {
        self.part_of(tensor.sizes())?;
        self.all_to_all(tensor.lend()?).map(drop)
    }

    /// Reduces `[N * d, ..]`; member `r` gets the `r`-th `[d, ..]`. A group of one gives the tensor
    /// itself.
    ///
    /// # Errors
    /// As [`HostTensor::lend`] and [`Group::reduce_scatter`]; [`Error::BadTensor`] where `N` does
    /// not divide the first dim.
    pub fn reduce_scatter_tensor<T: HostTensor>(&self, tensor: &T, op: ReduceOp) -> Result<T> {
        let sizes = self.part_of(tensor.sizes())?;
        T::from_buffer(&sizes, self.reduce_scatter(tensor.lend()?, op)?)
    }

    /// Joins one `[d, ..]` of each member along the first dim, in rank order, to `[N * d, ..]` on
    /// every member; scalars become `[N]`. A group of one gives the tensor itself.
    ///
    /// # Errors
    /// As [`HostTensor::lend`] and [`Group::all_gather`].
    pub fn all_gather_tensor<T: HostTensor>(&self, tensor: &T) -> Result<T> {
        let mut sizes = tensor.sizes();
        match sizes.first_mut() {
            Some(first) => *first *= self.world_size(),
            None => sizes.push(self.world_size()),
        }
        T::from_buffer(&sizes, self.all_gather(tensor.lend()?)?)
    }

    /// Sends a tensor to group rank `to`; never waits for the receiver.
    ///
    /// The message shares the memory of the tensor, unless [`HostTensor::share`] copies, so the
    /// tensor is never changed in place afterwards: see [`Packet::of_tensor`].
    ///
    /// # Errors
    /// As [`HostTensor::share`] and [`Group::send`].
    pub fn send_tensor<T: HostTensor>(&self, to: usize, tag: u64, tensor: &T) -> Result<()> {
        self.send(to, tag, vec![Packet::of_tensor(tensor)?])
    }

    /// Waits for the next message of `tag` from group rank `from`, which is one tensor.
    ///
    /// # Errors
    /// As [`Group::recv`] and [`HostTensor::from_buffer`]; [`Error::PacketCount`] where the message
    /// has another number of packets.
    pub fn recv_tensor<T: HostTensor>(&self, from: usize, tag: u64) -> Result<T> {
        let message = self.recv(from, tag)?;
        let [packet] = <[Packet; 1]>::try_from(message).map_err(|message| Error::PacketCount {
            expected: 1,
            found: message.len(),
        })?;
        packet.into_tensor()
    }

    /// The sizes of one member's part of a tensor that is cut along its first dim.
    fn part_of(&self, mut sizes: Vec<usize>) -> Result<Vec<usize>> {
        let parts = self.world_size();
        match sizes.first_mut() {
            Some(first) if first.is_multiple_of(parts) => *first /= parts,
            None if parts == 1 => {}
            _ => {
                return Err(Error::BadTensor {
                    shape: sizes,
                    reason: format!("its first dim cannot be cut into {parts} equal parts"),
                });
            }
        }
        Ok(sizes)
    }
}

/// Refuses sizes of another number of elements than a buffer has; a peer may send any.
#[cfg(any(feature = "candle", feature = "tch"))]
pub(crate) fn check_sizes(sizes: &[usize], buffer: &dyn Buffer) -> Result<()> {
    let times = |numel: usize, &size: &usize| numel.checked_mul(size);
    let numel = sizes.iter().try_fold(1, times);
    if numel == Some(buffer.len()) {
        return Ok(());
    }
    Err(Error::BadTensor {
        shape: sizes.to_vec(),
        reason: format!("it is made of a buffer of {} elements", buffer.len()),
    })
}

/// Why a tensor of another device is not lent.
#[cfg(any(feature = "candle", feature = "tch"))]
pub(crate) fn not_in_host_memory(found: impl std::fmt::Debug) -> String {
    format!("it lies on {found:?}, expected Cpu")
}

/// Why a tensor of other elements is not lent.
#[cfg(any(feature = "candle", feature = "tch"))]
pub(crate) fn unknown_elements(found: impl std::fmt::Debug) -> String {
    let known = DType::ALL.map(DType::as_str).join(", ");
    format!("its elements are {found:?}, expected one of {known}")
}
