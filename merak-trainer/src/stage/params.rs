//! The parameters of a rank's stages: those that are trained, as the optimizer lays them out, and
//! the frozen ones.

use crate::error::Result;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use merak_mpu::{Buffer, DType, zeros};
use merak_trace::{Backend, Param, Value};
use merak_zero::{Arrivals, Bucket, MappedFloats, ZeroOptimizer};
use std::{
    borrow::Cow,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// The parameters of a rank's stages.
#[derive(Debug)]
pub(crate) struct StageParams {
    memory: ParamMemory,
    /// The element type of copies that nodes read in the place of masters.
    copied: Option<DType>,
    /// Whether the trained parameters are masters in a file.
    in_file: bool,
    /// One value per parameter, in the order in which they were given; none where replicas divide
    /// the parameter.
    pub(crate) views: Vec<Option<Value>>,
    /// For each parameter, the last bucket with elements of it, if it is trained.
    pub(crate) last_buckets: Vec<Option<usize>>,
}

/// Where the masters of trained parameters lie, and the optimizer's state.
#[derive(Debug, Clone)]
pub(crate) enum StateRoom {
    /// Where nodes find the parameters.
    Beside,
    /// In host memory.
    Host,
    /// In files of this folder, mapped into host memory.
    Files(PathBuf),
}

impl StateRoom {
    /// Masters that are not the backend's, all zero.
    fn masters(&self, len: usize) -> Result<Option<Box<dyn Buffer>>> {
        Ok(match self {
            Self::Beside => None,
            Self::Host => Some(zeros(DType::F32, len)),
            // A run that trains nothing makes no file.
            Self::Files(_) if len == 0 => None,
            Self::Files(folder) => Some(Box::new(MappedFloats::zeros(folder, len)?)),
        })
    }

    /// The optimizer with its state there.
    pub(crate) fn of_state(&self, optimizer: ZeroOptimizer) -> Result<ZeroOptimizer> {
        Ok(match self {
            Self::Files(folder) if !optimizer.layout().is_empty() => optimizer.on_disk(folder)?,
            _ => optimizer,
        })
    }
}

/// A handle with which other threads read the memory of parameters; writers wait for its readers.
///
/// Frozen parameters lie apart: no optimizer, gradient or collective touches them.
#[derive(Debug, Clone)]
pub(crate) struct ParamMemory {
    /// First the trained parameters, end to end, or what the rank owns of them, with `f32` masters
    /// for 16-bit ones; then the frozen parameters, a buffer per element type.
    buffers: Arc<RwLock<Vec<Box<dyn Buffer>>>>,
    places: Arc<[Place]>,
    /// How often the parameters were written.
    writes: Arc<AtomicU64>,
    /// What other ranks have stepped and this one has not received.
    arrivals: Arc<Mutex<Option<Arrivals>>>,
}

/// A parameter as it is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Floats<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

impl<'a> Floats<'a> {
    /// The values, converted where they are kept in another type.
    pub(crate) fn values(self) -> Cow<'a, [f32]> {
        floats(self.dtype, self.bytes)
    }
}

/// Takes an index in a parameter, and values from that element on.
type Put<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// The buffer of the trained parameters.
const TRAINED: usize = 0;

/// Where a parameter lies.
#[derive(Debug, Clone)]
struct Place {
    /// Which of the buffers has it.
    buffer: usize,
    /// The type of the buffer's elements.
    dtype: DType,
    /// The number of the parameter's elements.
    numel: usize,
    /// What the rank keeps of them.
    pieces: Vec<KeptPiece>,
}

/// Adjacent elements of a parameter.
#[derive(Debug, Clone)]
struct KeptPiece {
    /// Elements of the parameter.
    local: Range<usize>,
    /// Elements of the buffer.
    range: Range<usize>,
}

impl Place {
    /// A parameter that is kept whole.
    fn whole(buffer: usize, dtype: DType, range: Range<usize>) -> Self {
        Self {
            buffer,
            dtype,
            numel: range.len(),
            pieces: vec![KeptPiece {
                local: 0..range.len(),
                range,
            }],
        }
    }

    /// Where bytes lie of which these are the elements.
    fn bytes(&self, elements: &Range<usize>) -> Range<usize> {
        let size = self.dtype.size_bytes();
        elements.start * size..elements.end * size
    }

    /// Lets `change` see and change all of the parameter, whose kept pieces lie in `bytes`. What is
    /// not kept is zero, and its changes are lost.
    fn change(&self, bytes: &mut [u8], change: impl FnOnce(&mut [u8])) {
        if let [piece] = &*self.pieces
            && piece.local.len() == self.numel
        {
            return change(&mut bytes[self.bytes(&piece.range)]);
        }
        let mut whole = vec![0; self.numel * self.dtype.size_bytes()];
        for piece in &self.pieces {
            let kept = &bytes[self.bytes(&piece.range)];
            whole[self.bytes(&piece.local)].copy_from_slice(kept);
        }
        change(&mut whole);
        for piece in &self.pieces {
            let kept = &mut bytes[self.bytes(&piece.range)];
            kept.copy_from_slice(&whole[self.bytes(&piece.local)]);
        }
    }
}

impl StageParams {
    /// Makes room for parameters; `optimizer` is that of the trained ones among them, whose masters
    /// lie where `room` says.
    pub(crate) fn new(
        backend: &dyn Backend,
        params: &[Param],
        optimizer: &ZeroOptimizer,
        room: &StateRoom,
    ) -> Result<Self> {
        let (mut places, lens) = laid_out(params, optimizer);
        let last_buckets = last_buckets(params, optimizer);
        let mut views = vec![None; params.len()];
        let mut buffers = Vec::with_capacity(lens.len());
        let mut in_file = false;
        for (buffer, len) in lens.into_iter().enumerate() {
            let is_master = buffer == TRAINED && optimizer.config().has_masters;
            let masters = if is_master { room.masters(len)? } else { None };
            in_file |= masters.is_some() && matches!(room, StateRoom::Files(_));
            if buffer == TRAINED && optimizer.divides_params() {
                let trained = places.iter_mut().filter(|place| place.buffer == TRAINED);
                trained.for_each(|place| place.dtype = DType::F32);
                buffers.push(match masters {
                    Some(masters) => masters,
                    None => backend.grad_buffer(DType::F32, len)?,
                });
                continue;
            }
            let own = (0..params.len()).filter(|&index| places[index].buffer == buffer);
            let own: Vec<_> = own.collect();
            let of_buffer: Vec<_> = own.iter().map(|&i| params[i].clone()).collect();
            let offsets = own.iter().map(|&i| places[i].pieces[0].range.start);
            let offsets: Vec<_> = offsets.collect();
            let store = match masters {
                Some(masters) => backend.param_copies(&of_buffer, &offsets, masters)?,
                None => backend.param_store(&of_buffer, &offsets, len)?,
            };
            for (index, view) in own.into_iter().zip(store.views) {
                views[index] = Some(view);
                places[index].dtype = store.flat.dtype();
            }
            buffers.push(store.flat);
        }
        Ok(Self {
            copied: copied(params, &places, &views),
            in_file,
            views,
            last_buckets,
            memory: ParamMemory {
                buffers: Arc::new(RwLock::new(buffers)),
                places: places.into(),
                writes: Arc::default(),
                arrivals: Arc::default(),
            },
        })
    }

    /// A handle for reading the parameters on another thread.
    pub(crate) fn memory(&self) -> ParamMemory {
        self.memory.clone()
    }

    /// Whether replicas divide a parameter.
    pub(crate) fn is_divided(&self, index: usize) -> bool {
        self.views[index].is_none()
    }

    /// The element type in which a parameter is kept: `f32` for a trained one, even if nodes read
    /// another.
    pub(crate) fn dtype(&self, index: usize) -> DType {
        self.memory.places[index].dtype
    }

    /// Bytes of all of them in memory, with the 16-bit copies of masters.
    pub(crate) fn num_bytes(&self) -> usize {
        let buffers = self.memory.buffers.read();
        let buffers = buffers.unwrap_or_else(PoisonError::into_inner);
        let kept: usize = buffers.iter().map(|buffer| buffer.size_bytes()).sum();
        let copy = self.copied.map_or(0, DType::size_bytes);
        let in_file = if self.in_file {
            buffers[TRAINED].size_bytes()
        } else {
            0
        };
        kept + buffers[TRAINED].len() * copy - in_file
    }

    /// Bytes of masters in a file.
    pub(crate) fn num_file_bytes(&self) -> usize {
        let buffers = self.memory.buffers.read();
        let buffers = buffers.unwrap_or_else(PoisonError::into_inner);
        if self.in_file {
            buffers[TRAINED].size_bytes()
        } else {
            0
        }
    }

    /// Shows the values of every parameter in `f32`, in the program's order; `divided` are those of
    /// the trained ones where replicas divide them.
    pub(crate) fn read_floats(&self, divided: &[Vec<f32>], look: &mut dyn FnMut(&[Floats<'_>])) {
        self.memory.read(&mut |kept| {
            let (mut kept, mut divided) = (kept.iter(), divided.iter());
            let places = self.memory.places.iter().zip(&self.views);
            let floats = places.map(|(place, view)| {
                let own = place.pieces.iter().map(|_| kept.next());
                let own = own.last().flatten();
                let bytes = match view {
                    Some(_) => own.copied(),
                    None => divided.next().map(|values| bytemuck::cast_slice(values)),
                };
                Floats {
                    dtype: place.dtype,
                    bytes: bytes.unwrap_or_default(),
                }
            });
            look(&floats.collect::<Vec<_>>());
        });
    }

    /// Lets `change` see and change the bytes of each parameter as it is kept, given with its
    /// position in the program. Of a divided parameter the rank takes the changes of what it owns.
    pub(crate) fn write(&mut self, change: &mut dyn FnMut(usize, &mut [u8])) {
        let places = Arc::clone(&self.memory.places);
        self.change(|buffers| {
            for (number, buffer) in buffers.iter_mut().enumerate() {
                buffer.write(&mut |bytes| {
                    let all = places.iter().enumerate();
                    for (index, place) in all.filter(|(_, place)| place.buffer == number) {
                        place.change(bytes, |bytes| change(index, bytes));
                    }
                });
            }
        });
    }

    /// As [`StageParams::write`], with values in `f32`, rounded where they are kept in 16 bits.
    pub(crate) fn write_floats(&mut self, change: &mut dyn FnMut(usize, &mut [f32])) {
        let places = Arc::clone(&self.memory.places);
        self.write(&mut |index, bytes| match places[index].dtype {
            dtype @ (DType::BF16 | DType::F16) => {
                let mut values = floats(dtype, bytes).into_owned();
                change(index, &mut values);
                narrow(dtype, &values, bytes);
            }
            _ => change(index, bytemuck::cast_slice_mut(bytes)),
        });
    }

    /// Lets `values` write new values of each parameter, a few at a time; they are rounded where
    /// they are kept in 16 bits.
    pub(crate) fn fill(&mut self, values: &mut dyn FnMut(usize, &mut Put<'_>)) {
        let places = Arc::clone(&self.memory.places);
        self.write(&mut |index, bytes| {
            let dtype = places[index].dtype;
            values(index, &mut |first, values| {
                let size = dtype.size_bytes();
                let bytes = &mut bytes[first * size..][..values.len() * size];
                match dtype {
                    DType::BF16 | DType::F16 => narrow(dtype, values, bytes),
                    _ => bytemuck::cast_slice_mut(bytes).copy_from_slice(values),
                }
            });
        });
    }

    /// Hands the memory of the trained parameters to `update`.
    pub(crate) fn update<R>(&mut self, update: impl FnOnce(&mut dyn Buffer) -> R) -> R {
        self.change(|buffers| update(&mut *buffers[TRAINED]))
    }

    /// Lets parameters of other ranks arrive when they are [waited
    /// for](ParamMemory::wait_through).
    pub(crate) fn expect(&mut self, arrivals: Arrivals) {
        *self.memory.arrivals() = arrivals.first_missing().map(|_| arrivals);
    }

    fn change<R>(&mut self, change: impl FnOnce(&mut [Box<dyn Buffer>]) -> R) -> R {
        self.memory.check_settled();
        self.memory.writes.fetch_add(1, Ordering::Relaxed);
        let buffers = self.memory.buffers.write();
        change(&mut buffers.unwrap_or_else(PoisonError::into_inner))
    }
}

impl ParamMemory {
    /// The pieces that the rank keeps, in the program's order: the position of the parameter, and
    /// the elements.
    pub(crate) fn pieces(&self) -> Vec<(usize, Range<usize>)> {
        let places = self.places.iter().enumerate();
        let pieces = places.flat_map(|(index, place)| {
            let pieces = place.pieces.iter();
            pieces.map(move |piece| (index, piece.local.clone()))
        });
        pieces.collect()
    }

    /// How often the parameters were written.
    pub(crate) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// Waits until a bucket of the optimizer's layout, and those before it, have arrived.
    ///
    /// # Communication
    /// After a step in ZeRO stages 1 and 2, an all-gather of each bucket over the replicas.
    pub(crate) fn wait_through(&self, bucket: usize) -> merak_zero::Result<()> {
        let mut arrivals = self.arrivals();
        if let Some(missing) = &mut *arrivals {
            let mut buffers = self.buffers.write().unwrap_or_else(PoisonError::into_inner);
            missing.wait_through(bucket, &mut *buffers[TRAINED])?;
            if missing.first_missing().is_none() {
                *arrivals = None;
            }
        }
        Ok(())
    }

    fn arrivals(&self) -> MutexGuard<'_, Option<Arrivals>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all buckets, as [`ParamMemory::wait_through`].
    pub(crate) fn settle(&self) -> merak_zero::Result<()> {
        self.wait_through(usize::MAX)
    }

    /// Buckets arrive before the memory is read or changed as a whole.
    fn check_settled(&self) {
        debug_assert!(self.arrivals().is_none(), "parameters are under way");
    }

    /// Shows the first buffer, which has the trained parameters.
    pub(crate) fn with_trained<R>(&self, look: impl FnOnce(&dyn Buffer) -> R) -> R {
        self.check_settled();
        let buffers = self.buffers.read();
        look(&*buffers.unwrap_or_else(PoisonError::into_inner)[TRAINED])
    }

    /// Shows the bytes of every piece as it is kept, in the order of [`ParamMemory::pieces`].
    pub(crate) fn read(&self, look: &mut dyn FnMut(&[&[u8]])) {
        self.check_settled();
        let buffers = self.buffers.read();
        let buffers = buffers.unwrap_or_else(PoisonError::into_inner);
        read_together(&buffers, &[], &mut |bytes| {
            let pieces = self.places.iter().flat_map(|place| {
                let pieces = place.pieces.iter();
                pieces.map(|piece| &bytes[place.buffer][place.bytes(&piece.range)])
            });
            look(&pieces.collect::<Vec<_>>());
        });
    }
}

/// Where each parameter lies, and the elements of each buffer.
fn laid_out(params: &[Param], optimizer: &ZeroOptimizer) -> (Vec<Place>, Vec<usize>) {
    // Elements of each buffer; frozen parameters have a buffer per element type.
    let mut lens = vec![optimizer.num_params()];
    let mut trained = trained_pieces(optimizer).into_iter();
    let mut frozen: Vec<DType> = Vec::new();
    let place = |param: &Param| {
        let dtype = param.kept_dtype();
        if param.trainable {
            return Place {
                buffer: TRAINED,
                dtype,
                numel: param.local.numel(),
                pieces: trained.next().expect("the optimizer has all trained ones"),
            };
        }
        let known = frozen.iter().position(|known| *known == dtype);
        let index = known.unwrap_or_else(|| {
            frozen.push(dtype);
            lens.push(0);
            frozen.len() - 1
        });
        let buffer = TRAINED + 1 + index;
        let start = lens[buffer];
        lens[buffer] += param.local.numel();
        Place::whole(buffer, dtype, start..lens[buffer])
    };
    let places = params.iter().map(place).collect();
    (places, lens)
}

/// For each parameter, the last bucket with elements of it, if it is trained.
fn last_buckets(params: &[Param], optimizer: &ZeroOptimizer) -> Vec<Option<usize>> {
    let layout = optimizer.layout();
    let mut trained = 0..layout.params().len();
    let last = |param: &Param| {
        let range = layout.range(param.trainable.then(|| trained.next())??);
        let behind = |bucket: &Bucket| bucket.flat.start < range.end;
        layout.buckets().partition_point(behind).checked_sub(1)
    };
    params.iter().map(last).collect()
}

/// The element type of copies that nodes read in the place of masters.
fn copied(params: &[Param], places: &[Place], views: &[Option<Value>]) -> Option<DType> {
    let mut whole = params
        .iter()
        .zip(places)
        .zip(views)
        .filter(|(_, view)| view.is_some());
    whole.find_map(|((param, place), _)| {
        let read = param.kept_dtype();
        (read != place.dtype).then_some(read)
    })
}

/// What the rank keeps of each trained parameter, in the order of the layout.
fn trained_pieces(optimizer: &ZeroOptimizer) -> Vec<Vec<KeptPiece>> {
    let layout = optimizer.layout();
    if !optimizer.divides_params() {
        let whole = |index| {
            let range = layout.range(index);
            vec![KeptPiece {
                local: 0..range.len(),
                range,
            }]
        };
        return (0..layout.params().len()).map(whole).collect();
    }
    let mut pieces = vec![Vec::new(); layout.params().len()];
    let mut end = 0;
    for (index, local) in optimizer.state().owned() {
        let start = end;
        end += local.len();
        pieces[index].push(KeptPiece {
            local,
            range: start..end,
        });
    }
    pieces
}

/// Shows the bytes of some buffers at once, after those that were `seen`.
fn read_together(buffers: &[Box<dyn Buffer>], seen: &[&[u8]], look: &mut dyn FnMut(&[&[u8]])) {
    let Some((first, rest)) = buffers.split_first() else {
        return look(seen);
    };
    first.read(&mut |bytes| {
        let seen: Vec<_> = seen.iter().copied().chain([bytes]).collect();
        read_together(rest, &seen, look);
    });
}

/// Floats of any size as `f32`.
pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Cow<'_, [f32]> {
    match dtype {
        DType::BF16 => bytemuck::cast_slice::<_, bf16>(bytes).to_f32_vec().into(),
        DType::F16 => bytemuck::cast_slice::<_, f16>(bytes).to_f32_vec().into(),
        _ => bytemuck::cast_slice(bytes).into(),
    }
}

fn narrow(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::BF16 => {
            bytemuck::cast_slice_mut::<_, bf16>(bytes).convert_from_f32_slice(values);
        }
        _ => bytemuck::cast_slice_mut::<_, f16>(bytes).convert_from_f32_slice(values),
    }
}
