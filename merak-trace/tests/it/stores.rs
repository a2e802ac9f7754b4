//! Values, parameters and gradient stores that do not fit a program are refused, and numbers
//! without a row or a class.

use crate::support::{
    backend, backends, context, floats, grad_store, host_backends, interpreter, params, value,
};
use merak_trace::{
    Batch, DType, GradSlot, GradStore, Graph, Init, Interpreter, RecomputePlan, SharedBackend,
    SingleRank, StageCuts, StageProgram, TensorType, Value, fx, op::WeightLayout,
};
use std::sync::Arc;

/// Two linear layers and the sum of what they make.
fn graph() -> Graph {
    let graph = fx::trace(DType::F32, |module| {
        let mut x = module.input("x", TensorType::new([2, 3], DType::F32));
        for name in ["first", "second"] {
            let init = Init::Normal(1.0);
            x = module
                .sub(name)
                .linear(&x, 3, WeightLayout::OutIn, false, init)?;
        }
        module.output("loss", &module.sum(&x)?);
        Ok(())
    });
    graph.expect("the operands fit")
}

fn batch(backend: &SharedBackend) -> Batch {
    let x = value(backend, &TensorType::new([2, 3], DType::F32), &[1.0; 6]);
    Batch::from([("x".to_owned(), x)])
}

/// What a backward says to a store.
fn with_store(backend: &SharedBackend, change: impl FnOnce(&mut GradStore)) -> String {
    let runner = interpreter(backend, &graph());
    let params = params(backend, &runner.program().graph).views;
    let forwarded = runner.forward(&params, &batch(backend), Vec::new(), context());
    let mut frame = forwarded.expect("it runs").frame;
    let mut store = grad_store(backend, runner.program());
    change(&mut store);
    let done = runner.backward(&mut frame, &params, Vec::new(), 1.0, &mut store);
    done.expect_err("it is refused").to_string()
}

#[test]
fn a_store_without_room_for_a_gradient_is_refused_by_its_node() {
    for backend in backends(1) {
        let messages = [
            with_store(&backend, |store| store.slots.truncate(1)),
            with_store(&backend, |store| store.slots[1].len = 8),
            with_store(&backend, |store| store.slots[1].len = 10),
            with_store(&backend, |store| store.slots[1].offset = 1),
            with_store(&backend, |store| store.slots[1].offset = usize::MAX),
            with_store(&backend, |store| store.slots[1].buffer = 2),
        ];
        insta::allow_duplicates! {
            insta::assert_snapshot!(messages.join("\n"), @"
            second.linear_grad_weight: adds f32[3, 3] to slot 1, but there are 1
            second.linear_grad_weight: adds f32[3, 3] to 8 elements of slot 1
            second.linear_grad_weight: adds f32[3, 3] to 10 elements of slot 1
            second.linear_grad_weight: adds f32[3, 3] at 1 of buffer 1, which has 9 elements
            second.linear_grad_weight: adds f32[3, 3] at 18446744073709551615 of buffer 1, which has 9 elements
            second.linear_grad_weight: adds f32[3, 3] at 0 of buffer 2, which has 0 elements
            ");
        }
    }
}

#[test]
fn a_buffer_of_another_element_type_is_refused() {
    let backend = backend(1);
    let message = with_store(&backend, |store| {
        let wide = backend.grad_buffer(DType::F64, 9);
        store.buffers[1] = wide.expect("room for it");
    });
    insta::assert_snapshot!(message, @"second.linear_grad_weight: adds f32[3, 3] to a buffer of f64");
}

#[test]
fn parameters_of_another_number_or_type_are_refused() {
    let backend = backend(1);
    let runner = interpreter(&backend, &graph());
    let forward = |params: Vec<Value>| {
        let forwarded = runner.forward(&params, &batch(&backend), Vec::new(), context());
        forwarded.expect_err("it is refused").to_string()
    };
    let views = || params(&backend, &runner.program().graph).views;
    let mut few = views();
    few.truncate(1);
    let mut other = views();
    other[1] = value(&backend, &TensorType::new([9], DType::F32), &[0.0; 9]);
    insta::assert_snapshot!(forward(few), @"the program reads at least 2 parameters, found 1");
    insta::assert_snapshot!(forward(other), @r#""second.weight" should be f32[3, 3], found f32[9]"#);
}

#[test]
fn values_of_other_stages_in_another_number_are_refused() {
    let (backend, graph) = (backend(1), graph());
    let cuts = StageCuts::new(&graph, vec![0, 1, graph.nodes().len()]).expect("valid bounds");
    let stage = |stage| {
        let program = StageProgram::training(&graph, &cuts, stage, &RecomputePlan::default());
        let program = Arc::new(program.expect("differentiable"));
        Interpreter::new(program, Arc::clone(&backend), Arc::new(SingleRank))
    };
    let (first, second) = (stage(0), stage(1));
    let of = |runner: &Interpreter| params(&backend, &runner.program().graph).views;
    let run = |received| second.forward(&of(&second), &batch(&backend), received, context());
    insta::assert_snapshot!(run(Vec::new()).unwrap_err(), @"expected 1 of the values of the stage before, found 0");
    let hidden = || value(&backend, &TensorType::new([2, 3], DType::F32), &[0.5; 6]);
    insta::assert_snapshot!(run(vec![hidden(), hidden()]).unwrap_err(), @"expected 1 of the values of the stage before, found 2");
    let forwarded = first.forward(&of(&first), &batch(&backend), Vec::new(), context());
    let mut frame = forwarded.expect("it runs").frame;
    let mut store = grad_store(&backend, first.program());
    let error = first.backward(&mut frame, &of(&first), Vec::new(), 1.0, &mut store);
    insta::assert_snapshot!(error.unwrap_err(), @"expected 1 of the gradients of sent values, found 0");
}

#[test]
fn slots_need_no_buffers_of_their_own() {
    let backend = backend(1);
    let runner = interpreter(&backend, &graph());
    let params = params(&backend, &runner.program().graph).views;
    let forwarded = runner.forward(&params, &batch(&backend), Vec::new(), context());
    let mut frame = forwarded.expect("it runs").frame;
    let slot = |offset| GradSlot {
        buffer: 0,
        offset,
        len: 9,
    };
    let mut store = GradStore {
        buffers: vec![backend.grad_buffer(DType::F32, 18).expect("room for it")],
        slots: vec![slot(9), slot(0)],
    };
    let done = runner.backward(&mut frame, &params, Vec::new(), 1.0, &mut store);
    done.expect("it fits");
    let forwarded = runner.forward(&params, &batch(&backend), Vec::new(), context());
    let mut frame = forwarded.expect("it runs").frame;
    let mut apart = grad_store(&backend, runner.program());
    let done = runner.backward(&mut frame, &params, Vec::new(), 1.0, &mut apart);
    done.expect("it fits");
    let [first, second] = [0, 1].map(|buffer| floats(DType::F32, &*apart.buffers[buffer]));
    assert_ne!(first, second);
    assert_eq!(
        floats(DType::F32, &*store.buffers[0]),
        [second, first].concat()
    );
}

#[test]
fn an_id_without_a_row_and_a_label_without_a_class_are_refused_on_the_processor() {
    let graph = fx::trace(DType::F32, |module| {
        let ty = TensorType::new([3], DType::I64);
        let (ids, labels) = (module.input("ids", ty.clone()), module.input("labels", ty));
        let init = Init::Normal(1.0);
        let (logits, _) = module.sub("table").embedding(&ids, 4, 5, init)?;
        module.output("loss", &module.cross_entropy(&logits, &labels, 0.0)?);
        Ok(())
    });
    let graph = graph.expect("the operands fit");
    for backend in host_backends(1) {
        let runner = interpreter(&backend, &graph);
        let params = params(&backend, &runner.program().graph).views;
        let run = |ids: [f64; 3], labels: [f64; 3]| {
            let ty = TensorType::new([3], DType::I64);
            let batch = [("ids", ids), ("labels", labels)];
            let batch = batch.map(|(name, ids)| (name.to_owned(), value(&backend, &ty, &ids)));
            runner.forward(&params, &Batch::from(batch), Vec::new(), context())
        };
        run([0.0, 3.0, 1.0], [4.0, -100.0, 0.0]).expect("all are in range");
        let refused = |ids, labels| run(ids, labels).unwrap_err().to_string();
        let messages = [
            refused([0.0, 4.0, 1.0], [0.0; 3]),
            refused([0.0, 1.0, -1.0], [0.0; 3]),
            refused([0.0; 3], [0.0, -100.0, 5.0]),
            refused([0.0; 3], [-1.0, 0.0, 0.0]),
        ];
        insta::allow_duplicates! {
            insta::assert_snapshot!(messages.join("\n"), @"
            table.embedding: id 4 at position 1 is out of range, expected 0 to 3
            table.embedding: id -1 at position 2 is out of range, expected 0 to 3
            cross_entropy: label 5 at position 2 is out of range, expected 0 to 4 or -100 to ignore it
            cross_entropy: label -1 at position 0 is out of range, expected 0 to 4 or -100 to ignore it
            ");
        }
    }
}
