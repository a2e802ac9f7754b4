//! What decides how long a step takes: measured, kept, and used.

use std::time::Duration;

use merak_mpu::{ChosenEngine, testing};
use merak_pipe::{Action, Kind, ScheduleKind};
use merak_trainer::{
    Callback, CostCache, CostModel, Error, FirstSteps, Measurement, Plan, PlanError, Prediction,
    Profile, Result, StepReport, TrainerControl, Workload, World,
};
use tempfile::{TempDir, tempdir};

use crate::support::Case;

/// A file of times in a folder.
fn kept_in(folder: &TempDir) -> CostCache {
    CostCache {
        file: folder.path().join("costs.json"),
        keeps: true,
    }
}

fn predicted(case: &Case, costs: &CostModel) -> Prediction {
    let args = case.arguments();
    let plan = Plan::with_costs(&case.inputs(), &args, &costs.under(&args))
        .expect("the case can be planned");
    let prediction = plan
        .predict(&costs.under(&args))
        .expect("its stages have programs");
    prediction.expect("times were measured")
}

#[test]
fn measured_times_are_kept_under_what_changes_them() {
    let folder = tempdir().expect("a temporary folder");
    let cache = kept_in(&folder);
    let case = Case::gpt2().on((1, 1, 2));
    let measure = |case: &Case| {
        let costs = CostModel::of(
            &case.inputs(),
            &case.arguments(),
            Some(&cache),
            &World::of_threads(),
        );
        let costs = costs.expect("the nodes of a small model run");
        let file = std::fs::read_to_string(&cache.file).expect("the times are kept");
        (predicted(case, &costs).costs, file)
    };
    let (first, file) = measure(&case);
    // The same question has the same answer, and so the same plan, without another run.
    assert_eq!(measure(&case), (first, file.clone()));
    // Another sequence has other nodes; another number of ranks or threads is another machine to
    // each of them.
    let (_, longer) = measure(&case.clone().with("seq_length", 16));
    assert!(longer.len() > file.len());
    let (_, alone) = measure(&case.clone().on((1, 1, 1)));
    assert!(alone.len() > longer.len());
    // A cache that may not write leaves the file as it is.
    let looked = CostCache {
        keeps: false,
        ..cache.clone()
    };
    let other = case.with("per_device_train_batch_size", 3);
    CostModel::of(
        &other.inputs(),
        &other.arguments(),
        Some(&looked),
        &World::of_threads(),
    )
    .expect("the nodes run");
    let unchanged = std::fs::read_to_string(&cache.file).expect("the times are kept");
    assert_eq!(unchanged, alone);
}

#[test]
fn processes_have_the_same_costs_which_a_file_keeps_under_what_connects_them() {
    let folder = tempdir().expect("a temporary folder");
    let cache = kept_in(&folder);
    let case = Case::gpt2().on((1, 2, 2));
    let (inputs, args) = (case.inputs(), case.arguments());
    let of_all = || {
        testing::world(4, |member| {
            let world = World::of_process(member, ChosenEngine::Tcp).expect("it is new");
            let args = world.place(args.clone());
            let costs = CostModel::of(&inputs, &args, Some(&cache), &world);
            Option::<Profile>::from(costs.expect("the nodes run")).expect("times were measured")
        })
    };
    let first = of_all();
    assert!(first.iter().all(|costs| *costs == first[0]));
    let kept = std::fs::read_to_string(&cache.file).expect("the times are kept");
    assert!(kept.contains("by tcp on hosts 4 x 0"), "{kept}");
    assert_eq!(of_all(), first, "what is kept is not measured again");
    let costs = CostModel::of(&inputs, &args, Some(&cache), &World::of_threads());
    costs.expect("the nodes run");
    let both = std::fs::read_to_string(&cache.file).expect("the times are kept");
    assert!(both.len() > kept.len(), "threads have times of their own");
}

#[test]
fn every_family_is_measured_on_any_degrees() {
    let cases = [
        ("gpt2", Case::gpt2().with_dropout(0.1)),
        ("llama", Case::llama()),
    ];
    for (family, case) in cases.into_iter().chain(Case::relatives()) {
        for degrees in [(1, 1, 2), (2, 2, 1)] {
            let case = case.clone().on(degrees);
            let costs = CostModel::of(
                &case.inputs(),
                &case.arguments(),
                None,
                &World::of_threads(),
            );
            let costs = costs.expect("the nodes of a small model run");
            let prediction = predicted(&case, &costs);
            let what = format!("{family} {degrees:?}");
            assert!(prediction.update > 0.0, "{what}");
            let per_stage = &prediction.costs;
            let all = [
                &per_stage.forward,
                &per_stage.input_grad,
                &per_stage.weight_grad,
            ];
            assert!(
                all.into_iter().flatten().all(|seconds| *seconds > 0.0),
                "{what}"
            );
            // Ranks recompute all but the last stage's last chunk.
            assert!(per_stage.recompute[0] > 0.0, "{what}");
            assert!(prediction.step() > prediction.simulation.makespan, "{what}");
        }
    }
}

#[test]
fn operations_are_counted_where_nothing_is_to_be_measured() {
    let case = Case::gpt2().with("cost_model", "counted");
    let costs = CostModel::of(
        &case.inputs(),
        &case.arguments(),
        None,
        &World::of_threads(),
    )
    .unwrap();
    assert!(matches!(costs, CostModel::Counted));
    let plan = case.plan();
    assert!(
        plan.predict(&costs.under(&case.arguments()))
            .unwrap()
            .is_none()
    );
}

#[test]
fn searches_go_by_measured_times_and_predictions_by_what_they_found() {
    let case = Case::gpt2()
        .on((1, 1, 2))
        .with("partition_method", "exact")
        .with("train_schedule", "auto");
    let costs = CostModel::of(
        &case.inputs(),
        &case.arguments(),
        None,
        &World::of_threads(),
    )
    .unwrap();
    let args = case.arguments();
    let plan = Plan::with_costs(&case.inputs(), &args, &costs.under(&args)).unwrap();
    assert!(plan.partition.method.starts_with("exact by measured times"));
    assert!(plan.search.is_some());
    let counted = case.plan();
    assert!(
        counted
            .partition
            .method
            .starts_with("exact by operation counts")
    );
}

#[test]
fn what_ran_stands_beside_what_was_predicted() -> Result<()> {
    let case = Case::gpt2().on((1, 1, 2));
    let costs = CostModel::of(
        &case.inputs(),
        &case.arguments(),
        None,
        &World::of_threads(),
    )?;
    let prediction = predicted(&case, &costs);
    let ranks = case.on_ranks(|trainer| {
        (0..4).try_for_each(|_| trainer.train_step().map(drop))?;
        assert_eq!(trainer.records().len(), 3, "the first step is left out");
        let spans = trainer.records().flat_map(|record| record.spans.clone());
        Ok(spans.collect::<Vec<_>>())
    });
    let ran = merak_pipe::Timeline { ranks };
    let stages = case.plan().compare_stages(&prediction, &ran)?;
    assert_eq!(
        stages.iter().map(|stage| stage.rank).collect::<Vec<_>>(),
        [0, 1]
    );
    for stage in stages {
        let times = [stage.forward, stage.backward].concat();
        assert!(times.iter().all(|seconds| *seconds > 0.0), "{stage}");
    }
    Ok(())
}

#[test]
fn a_limit_of_memory_moves_the_stages_or_says_what_would_do() {
    let case = Case::gpt2()
        .on((1, 1, 2))
        .with("partition_method", "exact")
        .with("activation_checkpointing", false);
    let plan = |case: &Case| case.try_plan();
    let free = plan(&case).unwrap();
    let limited = |limit: usize| plan(&case.clone().with("autopipe.memory_limit", limit));
    let roomy = limited(1 << 30).unwrap();
    assert_eq!(roomy.partition.stage_bounds, free.partition.stage_bounds);
    let Err(Error::Plan(PlanError::StageMemory { least, .. })) = limited(1000) else {
        unreachable!("no stage fits into a thousand bytes");
    };
    let tight = limited(least).unwrap();
    assert!(matches!(
        limited(least - 1),
        Err(Error::Plan(PlanError::StageMemory { .. }))
    ));
    // The fastest stages keep more than the smallest.
    assert_ne!(tight.partition.stage_bounds, free.partition.stage_bounds);
}

/// A step that took `time`.
fn step(time: Duration) -> StepReport {
    StepReport {
        step: 1,
        loss: 1.0,
        grad_norm: 1.0,
        lr: 1.0,
        loss_scale: None,
        tokens: 1,
        skipped: None,
        skipped_steps: 0,
        data_wait: Duration::ZERO,
        time,
    }
}

#[test]
fn times_that_the_first_steps_contradict_are_measured_again_by_the_next_run() {
    let folder = tempdir().expect("a temporary folder");
    let cache = kept_in(&folder);
    let (case, args) = (Case::gpt2(), Case::gpt2().arguments());
    let measured = || {
        let costs = CostModel::of(&case.inputs(), &args, Some(&cache), &World::of_threads());
        costs.expect("the nodes of a small model run")
    };
    let kept = || std::fs::read_to_string(&cache.file).expect("the times are kept");
    let is_doubted = || kept().contains("\"doubt\": \"open\"");
    let steps = |costs: &CostModel, cache: &CostCache, predicted: f64, taken: u64| {
        let mut first = FirstSteps::new(&args, costs, cache.clone(), predicted);
        // The first step touches memory, and one of the others met other load.
        for millis in [9000, taken, taken, 800, taken, taken, 9000, 9000] {
            first.on_step(
                &step(Duration::from_millis(millis)),
                &mut TrainerControl::default(),
            );
        }
    };
    let costs = measured();
    let measurement = costs.measurement().expect("times were measured");
    assert_eq!(measurement.age(), "just now");
    let days = Duration::from_hours(72);
    let old = Measurement {
        at: measurement.at - days,
        ..measurement
    };
    assert_eq!(old.age(), "3 days ago");
    let file = kept();
    steps(&costs, &cache, 0.1, 129);
    steps(&costs, &cache, 0.1, 78);
    let looks = CostCache {
        keeps: false,
        ..cache.clone()
    };
    steps(&costs, &looks, 0.1, 300);
    assert_eq!(kept(), file, "they agree, or may not write");
    for taken in [131, 76] {
        std::fs::write(&cache.file, &file).expect("the file can be written");
        steps(&costs, &cache, 0.1, taken);
        assert!(is_doubted(), "{taken} ms");
    }
    let again = measured();
    assert!(!is_doubted());
    assert_ne!(
        predicted(&case, &again).costs,
        predicted(&case, &costs).costs
    );
    // A measurement that came out the same is not doubted once more.
    let worn = |costs: &CostModel| costs.measurement().expect("times were measured").is_worn();
    if kept().contains("\"doubt\": \"settled\"") && !worn(&again) {
        steps(&again, &cache, 0.1, 300);
        assert!(!is_doubted());
    }
    assert_eq!(
        predicted(&case, &measured()).costs,
        predicted(&case, &again).costs
    );
}

#[test]
fn settled_times_that_are_old_or_unsteady_are_doubted_again() {
    let folder = tempdir().expect("a temporary folder");
    let cache = kept_in(&folder);
    let (case, args) = (Case::gpt2(), Case::gpt2().arguments());
    let costs = || {
        let costs = CostModel::of(&case.inputs(), &args, Some(&cache), &World::of_threads());
        costs.expect("the nodes of a small model run")
    };
    costs();
    let text = std::fs::read_to_string(&cache.file).expect("the times are kept");
    let document: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let measured_at = |document: &serde_json::Value| {
        let profiles = document["profiles"].as_object().expect("a table");
        let first = profiles.values().next().expect("one was kept");
        first[0]["measured_at"].as_u64().expect("seconds")
    };
    let now = measured_at(&document);
    for (age, spread, is_doubted) in [(0, 0.1, false), (30 * 86_400, 0.1, true), (0, 0.9, true)] {
        let mut kept = document.clone();
        let profiles = kept["profiles"].as_object_mut().expect("a table");
        let profile = &mut profiles.values_mut().next().expect("one was kept")[0];
        profile["doubt"] = "settled".into();
        profile["measured_at"] = (now - age).into();
        profile["spread"] = spread.into();
        let text = serde_json::to_string_pretty(&kept).expect("it is JSON");
        std::fs::write(&cache.file, text).expect("the file can be written");
        let costs = costs();
        let measurement = costs.measurement().expect("times were measured");
        assert!(measurement.is_contradicted);
        assert_eq!(measurement.is_worn(), is_doubted);
        let mut first = FirstSteps::new(&args, &costs, cache.clone(), 0.1);
        for _ in 0..8 {
            first.on_step(
                &step(Duration::from_millis(300)),
                &mut TrainerControl::default(),
            );
        }
        let text = std::fs::read_to_string(&cache.file).expect("the times are kept");
        assert_eq!(
            text.contains("\"doubt\": \"open\""),
            is_doubted,
            "{age} {spread}"
        );
    }
}

#[test]
fn a_faster_schedule_in_the_same_memory_is_told() {
    let costs = CostModel::Counted;
    let told = |schedule: &str, microbatches: usize, pp: usize| {
        let case = Case::gpt2()
            .on((1, 1, pp))
            .with("activation_checkpointing", false)
            .with("per_device_train_batch_size", 1)
            .with("train_schedule", schedule)
            .with_microbatches(microbatches);
        let found = case.plan().faster_schedule(&costs.under(&case.arguments()));
        found.expect("the stages have costs")
    };
    // Few microbatches: weight gradients fill the gaps, and 1f1b keeps as many activations on its
    // first rank.
    let found = told("1f1b", 2, 2).expect("a shorter schedule");
    assert!(
        [ScheduleKind::ZbH1, ScheduleKind::ZbH2].contains(&found.kind),
        "{found:?}"
    );
    assert!(found.gain > 0.05 && found.gain < 0.5, "{found:?}");
    let [now, then] = found.memory;
    assert!(0 < now && then * 10 <= now * 11, "{found:?}");
    // The suggested schedule leaves nothing to suggest, and one rank has nothing to wait for.
    assert_eq!(told(found.kind.as_str(), 2, 2), None);
    assert_eq!(told("1f1b", 2, 1), None);
}

#[test]
fn a_faster_schedule_that_keeps_more_is_not_told() {
    let case = |schedule: &str| {
        let case = Case::gpt2().on((1, 1, 2)).with_microbatches(2);
        case.with("train_schedule", schedule)
            .with("per_device_train_batch_size", 64)
    };
    // Recomputed values are kept until the weight gradients are made.
    let (own, other) = (case("1f1b"), case("zb_h1"));
    let fullest = |case: &Case| {
        let needs = case.plan().memory(&case.arguments(), &[Workload::Training]);
        let needs = needs.expect("the stages have programs").into_iter();
        needs.map(|need| need.total()).max().expect("a rank")
    };
    assert!(fullest(&other) * 10 > fullest(&own) * 11);
    let found = own
        .plan()
        .faster_schedule(&CostModel::Counted.under(&own.arguments()));
    assert_eq!(found.expect("the stages have costs"), None);
}

/// The bytes that each rank of a plan's pipeline needs to train, and those of them for activations.
fn needs(case: &Case, plan: &Plan) -> Vec<(usize, usize)> {
    let needs = plan.memory(&case.arguments(), &[Workload::Training]);
    let needs = needs.expect("the stages have programs").into_iter();
    needs.map(|need| (need.total(), need.activations)).collect()
}

fn fullest(case: &Case) -> usize {
    let needs = needs(case, &case.plan()).into_iter();
    needs.map(|(total, _)| total).max().expect("a rank")
}

/// The schedules and the recomputation of the tests of memory, on 16 sequences at once.
fn large(schedule: &str, recomputes: bool, (pp, chunks): (usize, usize)) -> Case {
    let case = Case::gpt2().on((1, 1, pp)).with_microbatches(6);
    case.with("train_schedule", schedule)
        .with("virtual_stages", chunks)
        .with("activation_checkpointing", recomputes)
        .with("per_device_train_batch_size", 16)
}

/// The makespan that a search found, and that of the best named schedule in the same memory.
fn searched(case: &Case) -> (f64, f64) {
    let plan = case.plan();
    let search = plan.search.as_ref().expect("a schedule is searched");
    let (_, named) = search
        .start
        .expect("the usual schedule keeps its own memory");
    (search.simulation.makespan, named)
}

#[test]
fn a_searched_schedule_needs_no_more_bytes_than_the_usual_one() {
    for recomputes in [true, false] {
        for size in [(2, 1), (4, 1), (2, 2)] {
            let case = |schedule| large(schedule, recomputes, size);
            let [own, most] = ["auto", "interleaved_1f1b"].map(|schedule| fullest(&case(schedule)));
            let what = format!("{size:?} recomputes {recomputes}");
            assert!(own <= most, "{what}: {own} of {most}");
            if size.1 == 1 {
                let (found, named) = searched(&case("auto"));
                assert!(found <= named, "{what}");
            }
        }
    }
    // There is room for some halves between whole backwards, and so less waiting.
    let (found, named) = searched(&large("auto", true, (4, 1)));
    assert!(found < 0.99 * named, "{found} {named}");
    let plan = large("auto", true, (4, 1)).plan();
    let actions = &plan.schedule.actions;
    let has = |kind| actions.iter().flatten().any(|action| action.kind == kind);
    assert!(has(Kind::Backward) && has(Kind::WeightGrad));
}

#[test]
fn a_searched_schedule_uses_the_limit_of_memory_that_is_given() {
    let case = large("auto", true, (4, 1));
    let (usual, _) = searched(&case);
    let least = fullest(&case);
    let mut before = usual;
    for percent in [110, 130, 1000] {
        let limit = least * percent / 100;
        let case = case.clone().with("autopipe.memory_limit", limit);
        assert!(fullest(&case) <= limit);
        let (found, named) = searched(&case);
        assert!(
            found <= named && found <= 1.01 * before,
            "{percent} %: {found}"
        );
        before = found;
    }
    // Then it is as short as zb_h2, which needs more than the usual schedule.
    assert!(before < 0.99 * usual, "{before} {usual}");
    assert!(fullest(&large("zb_h2", true, (4, 1))) > least);
}

#[test]
fn a_limit_of_memory_that_no_schedule_keeps_is_refused_with_what_would_do() {
    for recompute in ["full", "budget"] {
        let mut case = large("auto", true, (4, 1)).with("recompute", recompute);
        if recompute == "budget" {
            case = case.with("activation_memory_budget", 1 << 30);
        }
        let usual = case.clone().with("train_schedule", "interleaved_1f1b");
        let needed = fullest(&usual);
        let limited = |limit: usize| {
            let case = case.clone().with("autopipe.memory_limit", limit);
            case.try_plan()
        };
        let error = limited(1000).unwrap_err();
        let text = error.to_string();
        let Error::Plan(PlanError::ScheduleMemory { needed: told, .. }) = error else {
            unreachable!("no schedule fits into a thousand bytes: {text}");
        };
        assert!(told <= needed, "{text}");
        let start =
            "\"autopipe.memory_limit\" is 0.98 KiB, but no schedule that was tried keeps it";
        assert!(text.starts_with(start), "{text}");
        limited(told).unwrap();
    }
}

#[test]
fn the_searches_for_stages_and_for_a_schedule_say_the_same_of_one_limit() {
    for (method, recomputes) in [("autopipe", false), ("exact", true)] {
        let case = |schedule| large(schedule, recomputes, (4, 1)).with("partition_method", method);
        let told = ["1f1b", "auto"].map(|schedule| {
            let limited = |limit: usize| case(schedule).with("autopipe.memory_limit", limit);
            let told = match limited(1000).try_plan() {
                Err(Error::Plan(PlanError::StageMemory { least, .. })) => least,
                Err(Error::Plan(PlanError::ScheduleMemory { needed, .. })) => needed,
                _ => unreachable!("nothing fits into a thousand bytes"),
            };
            // What is told is what the ranks of the plan need, and what keeps them is no less.
            for limit in [told, told + 1, told + told / 50, told + told / 10, 2 * told] {
                let needed = fullest(&limited(limit));
                assert!(needed <= limit, "{method} {schedule}: {needed} of {limit}");
            }
            // A schedule without a name may need less.
            let is_refused = limited(told - 1).try_plan().is_err();
            assert!(is_refused || schedule == "auto", "{method} {schedule}");
            told
        });
        let [named, searched] = told;
        assert!(searched <= named, "{method}: {told:?}");
    }
}

/// The peak of a rank's values, microbatch by microbatch.
fn walked(plan: &Plan, actions: &[Action]) -> usize {
    let mut held = std::collections::BTreeMap::new();
    let mut peak = 0;
    for action in actions {
        let program = plan.training_program(action.stage.0);
        let live = program.expect("operations have gradients").live_bytes();
        held.remove(&(action.stage, action.microbatch));
        let others: usize = held.values().sum();
        let (during, left) = match action.kind {
            Kind::Forward => (live.forward, live.kept),
            Kind::Backward => (live.backward, 0),
            Kind::InputGrad => (live.input_half, live.between_halves),
            Kind::WeightGrad => (live.weight_half, 0),
            Kind::Recompute => unreachable!("these schedules recompute within the backward"),
        };
        peak = peak.max(others + during);
        held.insert((action.stage, action.microbatch), left);
    }
    peak
}

#[test]
fn the_bytes_of_a_schedule_are_those_of_its_values_one_by_one() {
    for recomputes in [true, false] {
        // Batches, which are the same under all schedules, come on top.
        let mut batches = None;
        for schedule in ["1f1b", "zb_h2", "auto"] {
            let case = large(schedule, recomputes, (2, 1));
            let plan = case.plan();
            let ranks = plan.schedule.actions.iter().zip(needs(&case, &plan));
            let rest = ranks.map(|(actions, (_, bytes))| bytes - walked(&plan, actions));
            let rest: Vec<_> = rest.collect();
            assert_eq!(*batches.get_or_insert(rest.clone()), rest, "{schedule}");
        }
    }
}
