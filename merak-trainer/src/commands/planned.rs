//! A model that is planned under arguments, with what its work costs.

use super::{environment, model::Loaded, output};
use merak_ckpt::words::{Bytes, plain};
use merak_partition::{ScheduleChoice, SplitRule, StepCosts};
use merak_trace::models::Objective;
use merak_trainer::{
    CheckedArguments, Cluster, CostCache, CostModel, Degrees, FasterSchedule, FirstSteps, Plan,
    PlanInputs, Prediction, Result, Workload, World, cluster_costs, metrics::Page,
    threads_per_rank,
};
use std::{fmt::Write as _, sync::Arc};

/// A model and its plan.
pub(crate) struct Planned {
    pub(crate) args: CheckedArguments,
    pub(crate) model: Loaded,
    /// What the plan is made from.
    pub(crate) inputs: PlanInputs,
    pub(crate) plan: Arc<Plan>,
    /// How long a step will take, where times are known.
    pub(crate) prediction: Option<Prediction>,
    costs: CostModel,
    /// The machines of the plan where they are others than this one.
    pub(crate) cluster: Option<Cluster>,
    /// The unit of the costs that the plan was made by, for people.
    pub(crate) unit: &'static str,
    /// The file that keeps measured times.
    cost_cache: Option<CostCache>,
    faster: Option<FasterSchedule>,
}

/// The file that keeps measured times, if there is a place for one.
pub(crate) fn cost_cache(args: &CheckedArguments, keeps: bool) -> Option<CostCache> {
    let file = args.cost_cache.clone().or_else(environment::cost_cache);
    file.map(|file| CostCache { file, keeps })
}

impl Planned {
    /// Plans by counted operations. `args` are complete.
    pub(crate) fn new(model: Loaded, args: CheckedArguments) -> Result<Self> {
        let inputs = PlanInputs::read(Arc::clone(&model.model), &args)?;
        let plan = Arc::new(Plan::new(&inputs, &args)?);
        let costs = CostModel::Counted;
        Ok(Self {
            args,
            model,
            inputs,
            plan,
            prediction: None,
            unit: costs.unit(),
            costs,
            cluster: None,
            cost_cache: None,
            faster: None,
        })
    }

    /// The same for a run that trains nothing.
    pub(crate) fn frozen(self) -> Self {
        let plan = Arc::unwrap_or_clone(self.plan).frozen();
        Self {
            plan: Arc::new(plan),
            ..self
        }
    }

    /// Measures the costs of the work, and plans again where the plan depends on them. A file keeps
    /// them where `keeps` says so.
    ///
    /// # Communication
    /// Between processes, what shares the measured costs.
    pub(crate) fn measure(&mut self, keeps: bool, world: &World) -> Result<()> {
        let cache = cost_cache(&self.args, keeps);
        self.costs = CostModel::of(&self.inputs, &self.args, cache.as_ref(), world)?;
        self.cost_cache = cache;
        let (costs, args) = (self.costs.clone(), self.args.clone());
        self.plan_by(&costs.under(&args))
    }

    /// Takes the costs of a described cluster, and plans again where the plan depends on them.
    pub(crate) fn place_on(&mut self, cluster: &Cluster) -> Result<()> {
        let costs = cluster_costs(cluster, &self.args)?;
        self.cluster = Some(*cluster);
        self.plan_by(&costs)
    }

    fn plan_by(&mut self, costs: &dyn StepCosts) -> Result<()> {
        if self.args.searches() {
            let plan = Plan::with_costs(&self.inputs, &self.args, costs)?;
            self.plan = Arc::new(plan);
        }
        self.prediction = self.plan.predict(costs)?;
        self.faster = self.plan.faster_schedule(costs)?;
        self.unit = costs.unit();
        Ok(())
    }

    /// The comparison of the first steps with their prediction, where there is one whose times are
    /// kept.
    pub(crate) fn first_steps(&self) -> Option<FirstSteps> {
        let (prediction, cache) = self.prediction.as_ref().zip(self.cost_cache.clone())?;
        Some(FirstSteps::new(
            &self.args,
            &self.costs,
            cache,
            prediction.step(),
        ))
    }

    /// The page of a plan that does not run; `config` is TOML.
    pub(crate) fn page(&self, workloads: &[Workload], config: String) -> Result<Page> {
        let info = &self.plan.draft.info;
        Ok(Page {
            title: format!(
                "{}, {} parameters, {} layers",
                info.family,
                self.plan.graph.num_elements(),
                info.num_layers
            ),
            plan: Arc::clone(&self.plan),
            prediction: self.prediction.clone(),
            unit: self.unit,
            memory: self.plan.memory(&self.args, workloads)?,
            peak: None,
            config,
            total_steps: None,
        })
    }

    /// The plan, for people, with the data where they are known, and warnings before the table.
    pub(crate) fn describe(&self, data: Option<&str>, warnings: &str) -> Result<String> {
        let (args, plan) = (&self.args, &self.plan);
        let mut text = String::new();
        let trained: usize = plan.trained_params().map(|param| param.full.numel()).sum();
        let all = plan.graph.num_elements();
        let trained = if trained == all {
            String::new()
        } else {
            format!(", {trained} trained")
        };
        let _ = writeln!(
            text,
            "model     {}: {all} parameters{trained}, {} layers",
            plan.draft.info.family, plan.draft.info.num_layers
        );
        if let Some(data) = data {
            let _ = writeln!(text, "data      {data}");
        }
        let _ = writeln!(
            text,
            "ranks     {} = {}, {}",
            args.world_size(),
            in_words(args.degrees()),
            match self.cluster {
                Some(_) => "a device each".to_owned(),
                None => format!("{} compute threads each", threads_per_rank(args)),
            }
        );
        let _ = writeln!(
            text,
            "batch     {} samples of {} = {} per microbatch x {} microbatches x dp {}",
            args.global_batch(),
            self.sample_size(),
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            args.dp
        );
        self.describe_schedule(&mut text);
        let _ = writeln!(text);
        text += warnings;
        self.warn_in(&mut text);
        text += &plan.partition_report()?.to_text(output::columns());
        self.describe_faster(&mut text);
        Ok(output::fitted(&plain(&text)))
    }

    /// A schedule that would be faster, if there is one.
    fn describe_faster(&self, text: &mut String) {
        let Some(FasterSchedule { kind, gain, memory }) = self.faster else {
            return;
        };
        let [now, then] = memory.map(|bytes| Bytes(bytes as u64));
        let _ = writeln!(
            text,
            "\nfaster    {kind} would shorten a step by {:.0} %, by {}, in at most {:.0} % more memory ({then} on the fullest rank, now \
             {now}): set \"train_schedule\" to \"{kind}\" (schedules with other numbers of stages per rank are not compared)",
            100.0 * gain,
            self.unit,
            100.0 * FasterSchedule::MORE_MEMORY,
        );
    }

    /// Warns of what the arguments ask for in vain.
    fn warn_in(&self, text: &mut String) {
        for unmatched in &self.plan.draft.tensor.unmatched {
            let _ = writeln!(
                text,
                "warning: the tensor-parallel pattern \"{unmatched}\" matches nothing"
            );
        }
        if let SplitRule::LayerSplit { moved, .. } = &self.plan.partition.segments.rule {
            for point in moved {
                let _ = writeln!(text, "warning: {point}");
            }
        }
        if self.args.asks_for_recomputation() && self.plan.recomputes_nothing() {
            let _ = writeln!(
                text,
                "warning: nothing is recomputed: the last stage, and shards without parameters or with embeddings, keep \
                 their activations under these keys"
            );
        }
    }

    /// The schedule, how it was found, and what it is predicted to take.
    fn describe_schedule(&self, text: &mut String) {
        let (args, plan) = (&self.args, &self.plan);
        let _ = write!(text, "schedule  {}", plan.schedule.name);
        let _ = match args.pipeline_size().chunks {
            1 => writeln!(text),
            chunks => writeln!(text, ", {chunks} stages per rank"),
        };
        if let Some(found) = &plan.search {
            let gain = match found.start {
                Some((named, least)) => {
                    let gain = 100.0 * (1.0 - found.simulation.makespan / least);
                    format!("{gain:.1} % shorter than {named}")
                }
                None => "within a limit of memory that no named schedule keeps".to_owned(),
            };
            let (unit, stopped) = (self.unit, found.stopped);
            let _ = writeln!(text, "          {gain}, by {unit}; {stopped}");
        }
        if plan.search.is_none() && args.train_schedule == ScheduleChoice::Searched {
            let _ = writeln!(
                text,
                "          auto: no shorter schedule was found within the memory"
            );
        }
        self.describe_split(text);
        if let Some(prediction) = &self.prediction {
            let _ = writeln!(text, "time      {prediction}");
            if let Some(measurement) = self.measurement() {
                let _ = writeln!(text, "          {measurement}");
            }
        }
    }

    /// Why layers are split over ranks as they are, and what is gathered for that.
    fn describe_split(&self, text: &mut String) {
        let split = &self.plan.draft.tensor;
        let gathered = split.gathers.first().map(|first| {
            let bytes: usize = split.gathers.iter().map(|gather| gather.bytes).sum();
            format!(
                "gathers of split values: {}, {} a microbatch, the first of {} for {}; `merak trace` lists them",
                split.gathers.len(),
                Bytes(bytes as u64),
                first.value,
                first.needed_by
            )
        });
        let choices = split.choices.iter().map(ToString::to_string);
        for (index, line) in choices.chain(gathered).enumerate() {
            let head = if index == 0 { "tensor" } else { "" };
            let _ = writeln!(text, "{head:9} {line}");
        }
    }

    /// When the times behind the prediction were measured, for people.
    fn measurement(&self) -> Option<String> {
        let measured = self.costs.measurement()?;
        let age = measured.age();
        let percent = 100.0 * measured.spread;
        let steady = if measured.is_unsteady() {
            ": the machine was busy, and the prediction may be off"
        } else if measured.is_contradicted {
            "; steps took another time before, and the prediction may be off"
        } else if measured.is_worn() {
            ": that is long ago, and the prediction may be off"
        } else {
            ""
        };
        Some(format!(
            "by times measured {age}, whose repetitions differed by {percent:.0} %{steady}"
        ))
    }

    /// What a sample is, for people.
    fn sample_size(&self) -> String {
        let plan = &self.plan;
        match (plan.draft.model.objective(), plan.draft.target_length) {
            (Objective::ImageClassification, _) => "an image".to_owned(),
            (_, Some(target)) => format!("{} tokens and {target} to write", plan.draft.seq_length),
            _ => format!("{} tokens", plan.draft.seq_length),
        }
    }
}

/// Degrees, the sequence's only where ranks share sequences.
pub(crate) fn in_words(degrees: Degrees) -> String {
    let Degrees { dp, tp, pp, sp } = degrees;
    let shared = if sp > 1 {
        format!(" x sp {sp}")
    } else {
        String::new()
    };
    format!("dp {dp} x tp {tp} x pp {pp}{shared}")
}
