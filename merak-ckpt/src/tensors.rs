//! Parameters in the tensors of another library.

use crate::shard::{Outgoing, Sink, Supply, write_from};
use crate::{
    BoxError, Checkpoint, DType, Draft, Error, Kind, Layout, Piece, Result, Shard, ShardKind,
};
use merak_mpu::{Buffer, HostTensor, zeros};
use std::collections::BTreeMap;

/// A tensor's memory and how it lies in the global tensor.
struct Lent<'a> {
    name: &'a str,
    dtype: DType,
    layout: Layout,
    buffer: Box<dyn Buffer>,
}

/// Supplies slices from the memory of tensors.
struct Memory<'a>(Vec<&'a dyn Buffer>);

impl Checkpoint {
    /// Reads parameters into the tensors of their names, where they lie, whichever topology wrote
    /// them. Floating-point elements are converted to the type of their tensor.
    ///
    /// `layout` tells from a tensor's name and sizes which part of the parameter it is:
    /// `|_, sizes| Ok(Layout::whole(sizes))` unless tensor parallelism cuts it.
    ///
    /// After an error the tensors may be partly written.
    ///
    /// # Errors
    /// [`Error::Tensor`] where a tensor is not in host memory, and as [`Checkpoint::read_as`].
    ///
    /// # Examples
    #[cfg_attr(feature = "candle", doc = "```")]
    #[cfg_attr(not(feature = "candle"), doc = "```ignore")]
    /// use candle_core::{Device, Var};
    /// use merak_ckpt::{Checkpoint, Header, Layout, Store};
    /// use std::collections::BTreeMap;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let folder = tempfile::tempdir()?;
    /// let weight = Var::new(&[[1.0_f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
    /// let vars = BTreeMap::from([("weight".to_owned(), weight)]);
    ///
    /// let draft = Store::in_output_dir(folder.path()).begin(10)?;
    /// let shard = draft.write_tensors(0, &vars, |_, sizes| Ok(Layout::whole(sizes)))?;
    /// draft.commit(vec![shard], Header::default(), &[])?;
    ///
    /// // A rank that holds the last column.
    /// let weight = Var::new(&[[0.0_f32], [0.0]], &Device::Cpu)?;
    /// let column = BTreeMap::from([("weight".to_owned(), weight)]);
    /// let layout = |_: &str, _: &[usize]| Layout::shard(&[2, 2], 1, 1..2);
    /// Checkpoint::open(folder.path())?.read_tensors(&column, layout)?;
    /// assert_eq!(column["weight"].to_vec2::<f32>()?, [[2.0], [4.0]]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn read_tensors<T: HostTensor>(
        &self,
        tensors: &BTreeMap<String, T>,
        layout: impl Fn(&str, &[usize]) -> Result<Layout>,
    ) -> Result<()> {
        for (name, tensor) in tensors {
            let Lent {
                dtype,
                layout,
                mut buffer,
                ..
            } = lend(name, tensor, &layout)?;
            let piece = Piece::parameter(name, dtype, &layout);
            self.read_buffer(&piece, &mut *buffer)?;
        }
        Ok(())
    }

    /// Reads a whole parameter as a new tensor of the type in which it is stored.
    ///
    /// # Errors
    /// [`Error::Tensor`] where the library has no such elements, and as [`Checkpoint::read`].
    pub fn read_tensor<T: HostTensor>(&self, name: &str) -> Result<T> {
        let entry = self.tensor(&Kind::Parameter, name)?;
        let failed = |source: BoxError| Error::Tensor {
            name: name.to_owned(),
            source,
        };
        let dtype = merak_mpu::DType::from_name(entry.dtype.as_str());
        let dtype = dtype.ok_or_else(|| failed(format!("its type is {}", entry.dtype).into()))?;
        let mut buffer = zeros(dtype, entry.shape.iter().product());
        let layout = Layout::whole(&entry.shape);
        self.read_buffer(&Piece::parameter(name, entry.dtype, &layout), &mut *buffer)?;
        T::from_buffer(&entry.shape, buffer).map_err(|error| failed(error.into()))
    }

    fn read_buffer(&self, piece: &Piece<'_>, buffer: &mut dyn Buffer) -> Result<()> {
        let mut outcome = Ok(());
        buffer.write(&mut |bytes| outcome = self.read_as(piece, bytes));
        outcome
    }
}

impl Draft {
    /// Writes a rank's parameters, as [`Draft::write_shard`] does, from the memory of their
    /// tensors.
    ///
    /// `layout` tells from a tensor's name and sizes which part of the parameter it is. Where
    /// several ranks hold a tensor, one of them writes it.
    ///
    /// # Errors
    /// [`Error::Tensor`] where a tensor is not in host memory, and as [`Draft::write_shard`].
    pub fn write_tensors<T: HostTensor>(
        &self,
        index: usize,
        tensors: &BTreeMap<String, T>,
        layout: impl Fn(&str, &[usize]) -> Result<Layout>,
    ) -> Result<Shard> {
        let lent = tensors.iter();
        let lent = lent.map(|(name, tensor)| lend(name, tensor, &layout));
        let lent: Vec<Lent<'_>> = lent.collect::<Result<_>>()?;
        let pieces: Vec<_> = lent
            .iter()
            .map(|lent| Piece::parameter(lent.name, lent.dtype, &lent.layout))
            .collect();
        for (piece, lent) in pieces.iter().zip(&lent) {
            piece.check_buffer(lent.buffer.len() * lent.dtype.size_bytes())?;
        }
        let memory = Memory(lent.iter().map(|lent| &*lent.buffer).collect());
        let file = ShardKind::Model.file_name(index);
        write_from(
            &self.path(),
            &file,
            &pieces.iter().collect::<Vec<_>>(),
            &memory,
        )
    }
}

impl Supply for Memory<'_> {
    fn supply(&self, slices: &[Outgoing<'_>], sink: &mut Sink<'_>) -> Result<()> {
        for (index, slice) in slices.iter().enumerate() {
            let mut outcome = Ok(());
            self.0[slice.index].read(&mut |bytes| {
                outcome = sink(index, &slice.gathered(bytes));
            });
            outcome?;
        }
        Ok(())
    }
}

fn lend<'a, T: HostTensor>(
    name: &'a str,
    tensor: &T,
    layout: &impl Fn(&str, &[usize]) -> Result<Layout>,
) -> Result<Lent<'a>> {
    let buffer = tensor.lend().map_err(|source| Error::Tensor {
        name: name.to_owned(),
        source: source.into(),
    })?;
    let dtype = buffer.dtype().as_str().parse();
    Ok(Lent {
        name,
        dtype: dtype.expect("files have every type of buffers"),
        layout: layout(name, &tensor.sizes())?,
        buffer,
    })
}
