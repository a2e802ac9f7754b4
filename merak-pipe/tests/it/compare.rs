//! The comparison with a step without a pipeline, and the modules that it finds wrong.

use crate::engine::{DEADLINE, Stages};
use merak_pipe::{
    Action, Comparison, Error, Schedule, ScheduleKind, Size, StageId, StageModule,
    compare_with_unpipelined,
};

/// What a module does wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// A gradient carries the stages that made it, and the backward that takes it adds to those of
    /// its rank.
    CarriesGraph,
    /// Results depend on how many forwards came before.
    CountsCalls,
    /// A gradient is no number.
    NotANumber,
}

#[derive(Debug)]
struct Module {
    stages: Stages,
    fault: Fault,
    calls: f64,
}

impl StageModule for Module {
    /// The number, and the stages that made it where it is a gradient.
    type Payload = (f64, Vec<usize>);
    type Error = String;

    fn forward(
        &mut self,
        action: Action,
        input: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, String> {
        let output = self.stages.forward(action, input.map(|(value, _)| value))?;
        self.calls += 1.0;
        let shift = if self.fault == Fault::CountsCalls {
            1e-3 * self.calls
        } else {
            0.0
        };
        Ok(output.map(|value| (value + shift, Vec::new())))
    }

    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, String> {
        let (value, mut graph) =
            grad.map_or((None, Vec::new()), |(value, graph)| (Some(value), graph));
        for stage in &graph {
            if let Some(sum) = self.stages.weight_grads.get_mut(stage) {
                *sum += 1.0;
            }
        }
        if self.fault == Fault::CarriesGraph {
            graph.push(action.stage.0);
        }
        let back = self.stages.backward_input(action, value)?;
        Ok(back.map(|value| (value, graph)))
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), String> {
        self.stages.backward_weight(action)
    }
}

fn compared(schedule: &Schedule, fault: Fault) -> Result<Comparison, Error> {
    let depth = schedule.size.stages();
    let make = |own: &[StageId]| {
        Ok::<_, String>(Module {
            stages: Stages::new(depth, own.iter().map(|stage| stage.0)),
            fault,
            calls: 0.0,
        })
    };
    let results = |module: &Module| {
        let grads = module.stages.weight_grads.iter();
        let number = |grad: &f64| {
            if fault == Fault::NotANumber {
                f64::NAN
            } else {
                *grad
            }
        };
        Ok(grads
            .map(|(stage, grad)| (format!("w{stage}"), vec![number(grad)]))
            .collect())
    };
    compare_with_unpipelined(schedule, make, results, 0.0, DEADLINE)
}

fn generated(kind: ScheduleKind) -> Schedule {
    let size = Size::new(3, 6).with_chunks(kind.default_chunks());
    kind.generate(size).expect("the size is legal")
}

#[test]
fn a_right_module_gives_the_numbers_of_a_step_without_a_pipeline() {
    for kind in ScheduleKind::ALL {
        let schedule = generated(kind);
        let comparison = compared(&schedule, Fault::None).unwrap();
        assert_eq!(comparison.values, schedule.size.stages(), "{kind}");
        assert!(
            comparison.difference.abs() < f64::MIN_POSITIVE,
            "{comparison:?}"
        );
    }
}

#[test]
fn a_gradient_that_carries_its_graph_is_found_where_a_rank_has_several_stages() {
    let error = compared(&generated(ScheduleKind::ZbV), Fault::CarriesGraph).unwrap_err();
    assert!(matches!(error, Error::Unlike { .. }), "{error}");
    assert!(
        error.to_string().contains("what hangs on its payloads"),
        "{error}"
    );
    // With one stage per rank the fault does not show.
    assert!(compared(&generated(ScheduleKind::OneFOneB), Fault::CarriesGraph).is_ok());
}

#[test]
fn a_module_that_depends_on_the_order_of_its_calls_is_found() {
    let error = compared(&generated(ScheduleKind::ZbV), Fault::CountsCalls).unwrap_err();
    assert!(matches!(error, Error::Unlike { .. }), "{error}");
}

#[test]
fn what_is_no_number_on_both_sides_is_the_same_only_to_the_last_bit() {
    assert!(compared(&generated(ScheduleKind::ZbV), Fault::NotANumber).is_ok());
}

#[test]
fn lists_of_another_length_and_modules_that_cannot_be_made_are_told() {
    let schedule = generated(ScheduleKind::OneFOneB);
    let make = |own: &[StageId]| Ok::<_, String>(Stages::new(3, own.iter().map(|stage| stage.0)));
    let company = |stages: &Stages| Ok(vec![("n".into(), vec![1.0; stages.weight_grads.len()])]);
    compare_with_unpipelined(&schedule, make, company, 0.0, DEADLINE).unwrap();
    let v = generated(ScheduleKind::ZbV);
    let make = |own: &[StageId]| Ok::<_, String>(Stages::new(6, own.iter().map(|stage| stage.0)));
    let error = compare_with_unpipelined(&v, make, company, 0.0, DEADLINE).unwrap_err();
    insta::assert_snapshot!(error, @"n has 2 numbers in the pipelined step and 1 without a pipeline");
    let broken = |_: &[StageId]| Err::<Stages, _>("no weights".to_owned());
    let error = compare_with_unpipelined(&v, broken, company, 0.0, DEADLINE).unwrap_err();
    insta::assert_snapshot!(error, @"a module of the comparison could not be made or read");
}

#[test]
fn a_comparison_of_nothing_is_an_error() {
    let schedule = generated(ScheduleKind::OneFOneB);
    let compared = |lists: &[(&str, Vec<f64>)]| {
        let make =
            |own: &[StageId]| Ok::<_, String>(Stages::new(3, own.iter().map(|stage| stage.0)));
        let results = |_: &Stages| {
            let lists = lists.iter();
            Ok(lists
                .map(|(name, list)| ((*name).to_owned(), list.clone()))
                .collect())
        };
        compare_with_unpipelined(&schedule, make, results, 0.0, DEADLINE)
    };
    insta::assert_snapshot!(compared(&[]).unwrap_err(), @"there are no results to compare: the results of a module are lists of numbers, such as its gradients");
    insta::assert_snapshot!(compared(&[("loss", vec![1.0]), ("w", vec![])]).unwrap_err(), @"w has no numbers to compare: the results of a module are lists of numbers, such as its gradients");
    assert_eq!(compared(&[("loss", vec![1.0])]).unwrap().values, 1);
}
