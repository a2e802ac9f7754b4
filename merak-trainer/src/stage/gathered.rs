//! Parameters that replicas divide: a bucket of them is gathered before its use and freed after it.

use super::{ParamMemory, StageParams};
use crate::error::Result;
use merak_mpu::{DType, into_vec};
use merak_trace::{
    Error as TraceError, Param, Params, Phase, Result as TraceResult, SharedBackend, StageProgram,
    Value,
};
use merak_zero::{Gatherer, PendingBucket, ZeroOptimizer, ZeroStage};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The parameters of one stage, as its nodes read them.
#[derive(Debug)]
pub(crate) struct StageValues {
    program: Arc<StageProgram>,
    /// For each parameter of the program.
    places: Vec<Place>,
    memory: ParamMemory,
    buckets: Option<Arc<Buckets>>,
    /// The visits of each kind of pass that was made, by its phases.
    courses: Mutex<BTreeMap<Vec<Phase>, Arc<[Visit]>>>,
    pass: Mutex<Pass>,
}

/// Where a stage finds a parameter.
#[derive(Debug, Clone)]
enum Place {
    /// In memory.
    Held(Value),
    /// In memory; after a step, it waits for a bucket that other ranks send.
    Arriving { value: Value, bucket: usize },
    /// Among the parameters of a bucket.
    Gathered { bucket: usize, index: usize },
}

/// One read of a parameter that is gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Visit {
    bucket: usize,
    /// The bucket that is read next, whose gathering starts meanwhile.
    next: Option<usize>,
    /// Whether the bucket is not read again soon.
    is_last: bool,
}

/// How far the pass in hand has come.
#[derive(Debug, Default)]
struct Pass {
    course: Arc<[Visit]>,
    visits: usize,
}

impl StageValues {
    /// The parameters of a program; `places` are their positions in the rank's table.
    pub(super) fn new(
        program: &Arc<StageProgram>,
        places: &[usize],
        params: &StageParams,
        buckets: Option<&Arc<Buckets>>,
    ) -> Self {
        let place = |&index: &usize| {
            let value = params.views[index].clone();
            match (value, params.last_buckets[index], buckets) {
                (None, _, Some(buckets)) => buckets.place_of[&index].clone(),
                (None, _, None) => unreachable!("an undivided parameter lies in memory"),
                (Some(value), Some(bucket), _) => Place::Arriving { value, bucket },
                (Some(value), None, _) => Place::Held(value),
            }
        };
        Self {
            program: Arc::clone(program),
            memory: params.memory(),
            places: places.iter().map(place).collect(),
            buckets: buckets.cloned(),
            courses: Mutex::default(),
            pass: Mutex::default(),
        }
    }

    /// Begins a pass of these phases. Behind a forward, the group of replicas is there for
    /// gradients, so that all parameters arrive before.
    pub(super) fn begin(&self, phases: &[Phase]) -> TraceResult<()> {
        if phases != [Phase::Forward] {
            self.memory.settle().map_err(of_zero)?;
        }
        let Some(buckets) = &self.buckets else {
            return Ok(());
        };
        let mut courses = lock(&self.courses);
        let known = courses.get(phases).cloned();
        let course = known.unwrap_or_else(|| {
            let course = self.course(phases);
            courses.insert(phases.to_vec(), Arc::clone(&course));
            course
        });
        drop(courses);
        buckets.begin_with(course.first().map(|visit| visit.bucket));
        *lock(&self.pass) = Pass { course, visits: 0 };
        Ok(())
    }

    /// The visits of a pass of these phases.
    fn course(&self, phases: &[Phase]) -> Arc<[Visit]> {
        let reads = self.program.param_reads(phases).into_iter();
        let read = reads.filter_map(|param| match self.places[param.index()] {
            Place::Held(_) | Place::Arriving { .. } => None,
            Place::Gathered { bucket, .. } => Some(bucket),
        });
        course(&read.collect::<Vec<_>>()).into()
    }

    /// The next visit of the pass, if it is one to this bucket.
    fn visit(&self, bucket: usize) -> Visit {
        let mut pass = lock(&self.pass);
        let number = pass.visits;
        pass.visits += 1;
        let visit = pass.course.get(number).copied();
        // A program that reads in another order than foreseen gathers for each read.
        visit
            .filter(|visit| visit.bucket == bucket)
            .unwrap_or(Visit {
                bucket,
                next: None,
                is_last: true,
            })
    }
}

impl Params for StageValues {
    fn value(&self, param: usize) -> TraceResult<Value> {
        let (bucket, index) = match &self.places[param] {
            Place::Held(value) => return Ok(value.clone()),
            Place::Arriving { value, bucket } => {
                self.memory.wait_through(*bucket).map_err(of_zero)?;
                return Ok(value.clone());
            }
            Place::Gathered { bucket, index } => (*bucket, *index),
        };
        let buckets = self
            .buckets
            .as_ref()
            .expect("places in buckets come with them");
        buckets.read(self.visit(bucket), index)
    }
}

/// A bucket stays while at most this number of other buckets is read before it is read again.
const OTHERS_BEFORE_RETURN: usize = 1;

/// The visits of a pass that reads buckets in this order. The last bucket stays, since the next
/// pass may begin with it, as a backward does after its forward.
fn course(reads: &[usize]) -> Vec<Visit> {
    let visit = |(at, &bucket): (usize, &usize)| {
        let rest = &reads[at + 1..];
        let until = rest.iter().position(|&read| read == bucket);
        let others = until.map(|until| rest[..until].iter().collect::<BTreeSet<_>>().len());
        Visit {
            bucket,
            next: rest.iter().copied().find(|&read| read != bucket),
            is_last: match others {
                Some(others) => others > OTHERS_BEFORE_RETURN,
                None => reads.last() != Some(&bucket),
            },
        }
    };
    reads.iter().enumerate().map(visit).collect()
}

/// The buckets of a rank's divided parameters.
#[derive(Debug)]
pub(crate) struct Buckets {
    gatherer: Gatherer,
    memory: ParamMemory,
    backend: SharedBackend,
    contents: Vec<Contents>,
    /// Whether buckets stay from one write of the parameters to the next: those of weights in 16
    /// bits, in stages 1 and 2.
    stay: bool,
    /// By position in the rank's table.
    place_of: BTreeMap<usize, Place>,
    states: Mutex<States>,
}

/// The parameters of a bucket.
#[derive(Debug, Default)]
struct Contents {
    params: Vec<Param>,
    offsets: Vec<usize>,
}

impl Contents {
    /// The element type in which the bucket is gathered: that of its parameters if it is one.
    fn dtype(&self) -> DType {
        let mut dtypes = self.params.iter().map(Param::kept_dtype);
        let first = dtypes.next().unwrap_or(DType::F32);
        if dtypes.all(|dtype| dtype == first) {
            first
        } else {
            DType::F32
        }
    }
}

#[derive(Debug)]
struct States {
    buckets: Vec<State>,
    /// Whether buckets stay.
    pinned: bool,
    /// The writes that the values follow.
    writes: u64,
}

/// What a rank has of a bucket beside its own part.
#[derive(Debug, Default)]
enum State {
    #[default]
    Freed,
    UnderWay(PendingBucket),
    Here(Vec<Value>),
}

impl Buckets {
    /// The buckets of the trained parameters among `table`; `None` where they are not divided.
    pub(super) fn new(
        table: &[Param],
        optimizer: &ZeroOptimizer,
        memory: ParamMemory,
        backend: &SharedBackend,
    ) -> Option<Arc<Self>> {
        if !optimizer.divides_params() {
            return None;
        }
        let layout = optimizer.layout();
        let mut contents: Vec<Contents> = Vec::new();
        contents.resize_with(layout.buckets().len(), Contents::default);
        let mut place_of = BTreeMap::new();
        let trained = table
            .iter()
            .enumerate()
            .filter(|(_, param)| param.trainable);
        for (position, (index, param)) in trained.enumerate() {
            let start = layout.range(position).start;
            // A parameter without elements may lie after the last bucket.
            let buckets = layout.buckets();
            let last = buckets.len().saturating_sub(1);
            let bucket = buckets.partition_point(|b| b.flat.end <= start).min(last);
            let of_bucket = &mut contents[bucket];
            let place = Place::Gathered {
                bucket,
                index: of_bucket.params.len(),
            };
            of_bucket.params.push(param.clone());
            of_bucket.offsets.push(start - buckets[bucket].flat.start);
            place_of.insert(index, place);
        }
        Some(Arc::new(Self {
            gatherer: optimizer.gatherer(),
            memory,
            backend: Arc::clone(backend),
            states: Mutex::new(States {
                buckets: contents.iter().map(|_| State::Freed).collect(),
                pinned: false,
                writes: 0,
            }),
            contents,
            stay: optimizer.config().stage < ZeroStage::Parameters,
            place_of,
        }))
    }

    /// Gathers all buckets, which stay until [`Buckets::unpin`]. All replicas call it together.
    ///
    /// # Communication
    /// An all-gather of each bucket over the data x sequence group.
    pub(super) fn pin(&self) -> Result<()> {
        for bucket in 0..self.contents.len() {
            let visit = Visit {
                bucket,
                next: (bucket + 1 < self.contents.len()).then_some(bucket + 1),
                is_last: false,
            };
            self.visit(visit, |_| ())?;
        }
        lock(&self.states).pinned = true;
        Ok(())
    }

    /// Frees all buckets but those that stay.
    pub(super) fn unpin(&self) {
        let mut states = lock(&self.states);
        states.pinned = false;
        if !self.stay {
            states.buckets.fill_with(State::default);
            // A pass has few of them at once.
            self.backend.free_buckets();
        }
    }

    /// Bytes of the weights that stay.
    pub(super) fn num_resident_bytes(&self) -> usize {
        let params = self.contents.iter().flat_map(|bucket| &bucket.params);
        let bytes = params.map(Param::kept_bytes);
        if self.stay { bytes.sum() } else { 0 }
    }

    /// The values of all divided parameters in `f32`, in the order of the layout. All replicas call
    /// it together.
    ///
    /// # Communication
    /// An all-gather of each bucket over the data x sequence group.
    pub(super) fn values(&self) -> Result<Vec<Vec<f32>>> {
        let mut all = Vec::new();
        for (bucket, contents) in self.contents.iter().enumerate() {
            let gathered = self.start(bucket, DType::F32)?.wait()?;
            let gathered: Vec<f32> = into_vec(gathered)?;
            let params = contents.params.iter().zip(&contents.offsets);
            all.extend(
                params.map(|(param, &offset)| {
                    gathered[offset..offset + param.local.numel()].to_vec()
                }),
            );
        }
        Ok(all)
    }

    /// Frees the buckets of the pass before, but for the one that the next begins with.
    fn begin_with(&self, first: Option<usize>) {
        let mut states = lock(&self.states);
        if !(states.pinned || self.stay) {
            let others = states.buckets.iter_mut().enumerate();
            let others = others.filter(|(bucket, _)| Some(*bucket) != first);
            others.for_each(|(_, state)| *state = State::Freed);
        }
    }

    /// Reads a parameter of a bucket.
    fn read(&self, visit: Visit, index: usize) -> TraceResult<Value> {
        self.visit(visit, |values| values[index].clone())
    }

    /// Shows the values of a bucket, which is gathered if it is not here, and freed if this is its
    /// last visit.
    fn visit<R>(&self, visit: Visit, look: impl FnOnce(&[Value]) -> R) -> TraceResult<R> {
        let mut states = lock(&self.states);
        let writes = self.memory.writes();
        if states.writes != writes {
            states.writes = writes;
            states.buckets.fill_with(State::default);
        }
        let state = std::mem::take(&mut states.buckets[visit.bucket]);
        let values = match state {
            State::Here(values) => values,
            State::UnderWay(pending) => self.arrived(visit.bucket, pending)?,
            State::Freed => {
                let dtype = self.contents[visit.bucket].dtype();
                self.arrived(visit.bucket, self.start(visit.bucket, dtype)?)?
            }
        };
        let seen = look(&values);
        if states.pinned || self.stay || !visit.is_last {
            states.buckets[visit.bucket] = State::Here(values);
        }
        if let Some(next) = visit.next
            && matches!(states.buckets[next], State::Freed)
        {
            let pending = self.start(next, self.contents[next].dtype())?;
            states.buckets[next] = State::UnderWay(pending);
        }
        Ok(seen)
    }

    /// Starts to gather a bucket in an element type.
    fn start(&self, bucket: usize, dtype: DType) -> TraceResult<PendingBucket> {
        let (part, (at, len)) = (self.gatherer.own_part(bucket), self.gatherer.place(bucket));
        let all = (self.memory)
            .with_trained(|kept| self.backend.gather_buffer(kept, part, dtype, at, len))?;
        self.gatherer.start(bucket, all).map_err(of_zero)
    }

    /// The values of a bucket that has been gathered.
    fn arrived(&self, bucket: usize, pending: PendingBucket) -> TraceResult<Vec<Value>> {
        let buffer = pending.wait().map_err(of_zero)?;
        let Contents { params, offsets } = &self.contents[bucket];
        self.backend.param_values(params, offsets, buffer)
    }
}

fn of_zero(error: merak_zero::Error) -> TraceError {
    TraceError::Params(Box::new(error))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{CheckedArguments, Config},
        plan::{Plan, PlanInputs},
        stage::RankStages,
    };
    use merak_mpu::{Mpu, threads};
    use merak_trace::{ParamId, models};
    use std::error::Error;

    type Outcome<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

    /// A model on two replicas of stage 3, with a bucket for each parameter. A forward reads every
    /// parameter once.
    fn divided(bf16: bool) -> (Arc<Plan>, CheckedArguments) {
        let line = [
            "--dp=2".to_owned(),
            "--zero_stage=3".to_owned(),
            "--zero_reduce_bucket_size=1".to_owned(),
            format!("--bf16={bf16}"),
        ];
        let args = Config::load(None, [], &line).unwrap().check().unwrap();
        let model = models::from_config(&serde_json::json!({
            "model_type": "gpt2", "vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2,
            "tie_word_embeddings": false,
        }));
        let inputs = PlanInputs::read(model.unwrap().into(), &args).unwrap();
        (Arc::new(Plan::new(&inputs, &args).unwrap()), args)
    }

    /// Samples the live bytes of a rank whose weights have elements of `width` bytes, at every read
    /// of two forwards and a backward.
    fn sample(rank: &RankStages, width: usize) -> Outcome<()> {
        let (stage, memory) = (&rank.stages[0], rank.backend.memory());
        let program = stage.interpreter.program();
        let bytes_of = |param: &Param| width * param.local.numel();
        let bytes = |param: ParamId| bytes_of(&program.params()[param.index()]);
        let resident = memory.live_bytes();
        let live = || memory.live_bytes() - resident;
        let reads = program.param_reads(&[Phase::Forward]);
        assert_eq!(reads.len(), program.params().len());
        for _ in 0..2 {
            stage.values.begin(&[Phase::Forward])?;
            for (at, &param) in reads.iter().enumerate() {
                let value = stage.values.value(param.index())?;
                assert_eq!(live(), bytes(param));
                drop(value);
                // The last bucket stays, since the next pass may begin with it.
                let is_last = at + 1 == reads.len();
                assert_eq!(live(), if is_last { bytes(param) } else { 0 });
            }
        }
        let backward = [
            Phase::Recompute,
            Phase::BackwardInput,
            Phase::BackwardWeight,
        ];
        let largest = program.params().iter().map(bytes_of).max().unwrap_or(0);
        stage.values.begin(&backward)?;
        for param in program.param_reads(&backward) {
            let value = stage.values.value(param.index())?;
            // One that is read again soon stays beside it.
            assert!(live() <= bytes(param) + largest);
            drop(value);
        }
        Ok(())
    }

    #[test]
    fn the_live_bytes_of_a_pass_are_those_of_the_bucket_that_it_reads_in_each_type() {
        for (bf16, width) in [(false, 4), (true, 2)] {
            let (plan, args) = divided(bf16);
            let options = threads::WorldOptions::default();
            let ran = threads::run(2, options, |member| -> Outcome<()> {
                let mpu = Arc::new(Mpu::new(member, plan.draft.degrees)?);
                let rank = RankStages::new(Arc::clone(&plan), mpu, &args, 1, None)?;
                sample(&rank, width)
            });
            ran.unwrap();
        }
    }

    #[test]
    fn a_pass_fetches_the_next_bucket_meanwhile_and_frees_one_that_it_does_not_need_soon() {
        // Both ends of a model with tied embeddings read the first bucket.
        let visits = course(&[0, 1, 1, 2, 1, 3, 0]);
        let told: Vec<_> = visits.iter().map(|v| (v.next, v.is_last)).collect();
        let expected = [
            (Some(1), true),
            (Some(2), false),
            (Some(2), false),
            (Some(1), true),
            (Some(3), true),
            (Some(0), true),
            (None, false),
        ];
        assert_eq!(told, expected);
    }
}
