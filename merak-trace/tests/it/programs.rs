//! Stage cuts, recomputation and the halves of the backward change no bit.

use crate::support::{
    backend, context, floats, grad_store, interpreter, loss_and_grads, numbers, params, value,
};
use merak_trace::{
    Batch, DType, Error, Graph, Hop, Init, Interpreter, Op, Overlap, ParamRole, Port,
    RecomputePlan, RunContext, SingleRank, StageCuts, StageProgram, TensorType, Value, fx,
    models::{self, TraceOptions},
};
use serde_json::{Value as Json, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

const BATCH: usize = 2;
const SEQ: usize = 6;

fn gpt2(tied: bool) -> Json {
    json!({ "model_type": "gpt2", "vocab_size": 23, "n_positions": 8, "n_embd": 12, "n_layer": 3, "n_head": 3,
        "tie_word_embeddings": tied })
}

fn trace(config: &Json) -> Graph {
    models::from_config(config)
        .and_then(|model| model.trace(&TraceOptions::training(BATCH, SEQ)))
        .expect("a valid configuration")
}

fn batch(graph: &Graph) -> Batch {
    let backend = backend(1);
    let ids = |shift: usize| {
        (0..BATCH * SEQ)
            .map(|i| ((i * 7 + shift) % 23) as f64)
            .collect::<Vec<_>>()
    };
    let inputs = graph.inputs().iter().enumerate();
    inputs
        .map(|(i, port)| {
            (
                port.name.clone(),
                value(&backend, graph.ty(port.value), &ids(i)),
            )
        })
        .collect()
}

/// Gradients by parameter name and use.
type Grads = BTreeMap<(String, usize), Vec<f64>>;

#[derive(Clone, Copy)]
enum Backward {
    Whole,
    Halves,
    RecomputeFirst,
}

/// Loss and gradients of a model cut into stages that run one after the other.
fn run_stages(
    graph: &Graph,
    bounds: Vec<usize>,
    recompute: &RecomputePlan,
    mode: Backward,
) -> (f64, Grads) {
    let backend = backend(1);
    let batch = batch(graph);
    let cuts = StageCuts::new(graph, bounds).expect("valid bounds");
    let mut stages = Vec::new();
    let mut sent: Vec<Value> = Vec::new();
    let mut loss = 0.0;
    for stage in 0..cuts.num_stages() {
        let program =
            StageProgram::training(graph, &cuts, stage, recompute).expect("differentiable");
        let runner = Interpreter::new(
            Arc::new(program),
            Arc::clone(&backend),
            Arc::new(SingleRank),
        );
        let params = params(&backend, &runner.program().graph);
        let store = grad_store(&backend, runner.program());
        let forwarded = runner
            .forward(&params.views, &batch, sent, context())
            .expect("runs forward");
        sent = forwarded.send;
        if let Some(output) = forwarded.outputs.first() {
            loss = numbers(&backend, output)[0];
        }
        stages.push((runner, params, store, forwarded.frame));
    }
    let mut grads = Grads::new();
    let mut returned = Vec::new();
    for (runner, params, mut store, mut frame) in stages.into_iter().rev() {
        let views = &params.views;
        if matches!(mode, Backward::RecomputeFirst) {
            runner.recompute(&mut frame, views).expect("recomputes");
        }
        returned = match mode {
            Backward::Halves => {
                let back = runner
                    .backward_input(&mut frame, views, returned, 0.25)
                    .expect("input half");
                runner
                    .backward_weight(&mut frame, views, &mut store)
                    .expect("weight half");
                back
            }
            Backward::Whole | Backward::RecomputeFirst => runner
                .backward(&mut frame, views, returned, 0.25, &mut store)
                .expect("runs backward"),
        };
        assert_eq!(frame.live_bytes(), 0, "a finished microbatch keeps nothing");
        for (grad, buffer) in runner.program().grads.iter().zip(&store.buffers) {
            let name = runner.program().graph.param(grad.param).name.clone();
            grads.insert((name, grad.use_index), floats(DType::F32, &**buffer));
        }
    }
    (loss, grads)
}

/// Bounds after the nodes whose names have these endings.
fn cut_after(graph: &Graph, ends: &[&str]) -> Vec<usize> {
    let position = |end: &&str| {
        1 + graph
            .nodes()
            .iter()
            .rposition(|node| node.name.ends_with(end))
            .expect("such a node")
    };
    let mut bounds = vec![0];
    bounds.extend(ends.iter().map(position));
    bounds.push(graph.nodes().len());
    bounds
}

#[test]
fn stages_recompute_and_halves_change_no_bit() {
    for tied in [true, false] {
        let graph = trace(&gpt2(tied));
        let whole = vec![0, graph.nodes().len()];
        let none = RecomputePlan::default();
        let (loss, grads) = run_stages(&graph, whole.clone(), &none, Backward::Whole);
        assert!(loss.is_finite() && grads.len() == graph.params().len() + usize::from(tied));

        let three = cut_after(&graph, &["h.0.add_2", "h.1.add"]);
        // A cut in the middle of a block sends the residual stream and the branch.
        let inside = cut_after(&graph, &["h.0.attn.attention", "h.1.mlp.gelu_tanh"]);
        let block = |i: usize| cut_after(&graph, &[&*format!("h.{i}.add_2")])[1];
        let chunks = RecomputePlan {
            chunks: vec![block(0)..block(1), block(1)..block(2)],
            nodes: Vec::new(),
        };
        // Single operations, next to each other and beside a chunk too.
        let single = RecomputePlan {
            chunks: vec![block(0)..block(0), block(1)..block(2)],
            nodes: (0..graph.nodes().len())
                .filter(|node| node % 3 > 0)
                .collect(),
        };
        for bounds in [whole, three, inside] {
            for (plan, mode) in [
                (&none, Backward::Whole),
                (&none, Backward::Halves),
                (&chunks, Backward::Whole),
                (&chunks, Backward::Halves),
                (&chunks, Backward::RecomputeFirst),
                (&single, Backward::Whole),
                (&single, Backward::RecomputeFirst),
            ] {
                let (other_loss, other) = run_stages(&graph, bounds.clone(), plan, mode);
                assert_eq!(loss.to_bits(), other_loss.to_bits());
                assert!(grads == other, "gradients differ with bounds {bounds:?}");
            }
        }
    }
}

#[test]
fn recomputation_keeps_less() {
    let graph = trace(&gpt2(true));
    let block = |i: usize| cut_after(&graph, &[&*format!("h.{i}.add_2")])[1];
    let kept = |chunks, nodes| {
        let plan = RecomputePlan { chunks, nodes };
        let program = StageProgram::training(&graph, &StageCuts::whole(&graph), 0, &plan)
            .expect("differentiable");
        let backend = backend(1);
        let runner = Interpreter::new(
            Arc::new(program),
            Arc::clone(&backend),
            Arc::new(SingleRank),
        );
        let params = params(&backend, &runner.program().graph);
        runner
            .forward(&params.views, &batch(&graph), Vec::new(), context())
            .expect("runs forward")
            .frame
            .live_bytes()
    };
    let (all, some) = (
        kept(Vec::new(), Vec::new()),
        kept(vec![block(0)..block(1), block(1)..block(2)], Vec::new()),
    );
    assert!(some * 2 < all, "{some} of {all} bytes are kept");
    let norms = graph.nodes().iter().enumerate();
    let norms = norms.filter(|(_, node)| matches!(node.op, Op::LayerNorm { .. }));
    let without_norms = kept(Vec::new(), norms.map(|(index, _)| index).collect());
    assert!(
        without_norms < all,
        "{without_norms} of {all} bytes are kept"
    );
}

#[test]
fn thread_counts_change_no_bit() {
    let graph = trace(&gpt2(true));
    let batch = batch(&graph);
    let one = loss_and_grads(&graph, &batch, 1);
    for threads in [2, 3] {
        assert!(one == loss_and_grads(&graph, &batch, threads));
    }
}

#[test]
fn llama_runs_forward_and_backward() {
    let config = json!({ "model_type": "llama", "vocab_size": 23, "hidden_size": 12, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 8 });
    let graph = trace(&config);
    let (loss, grads) = loss_and_grads(&graph, &batch(&graph), 1);
    assert!(loss.is_finite());
    assert!(
        grads
            .iter()
            .all(|grad| grad.iter().all(|x| x.is_finite()) && grad.iter().any(|&x| x != 0.0))
    );
}

#[test]
fn a_batch_without_an_input_is_refused_by_name() {
    let graph = trace(&gpt2(true));
    let backend = backend(1);
    let runner = interpreter(&backend, &graph);
    let params = params(&backend, &runner.program().graph);
    let error = runner
        .forward(&params.views, &Batch::new(), Vec::new(), context())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "input \"input_ids\" of type i64[2, 6] was not given; the batch has "
    );
}

#[test]
fn a_sent_output_is_freed_unless_the_backward_reads_it() {
    let graph = trace(&gpt2(false));
    let backend = backend(1);
    let batch = batch(&graph);
    // Cuts where the backward reads all values that pass, and where it reads none of them.
    let (mut freed, mut kept) = (0, 0);
    for cut in 1..graph.nodes().len() {
        let bounds = vec![0, cut, graph.nodes().len()];
        let cuts = StageCuts::new(&graph, bounds).expect("valid bounds");
        let program = StageProgram::training(&graph, &cuts, 0, &RecomputePlan::default());
        let program = program.expect("differentiable");
        let backward = program.backward.iter();
        let read: BTreeSet<_> = backward
            .flat_map(|&node| program.graph.node(node).inputs.iter().copied())
            .collect();
        let is_read = |hop: &Hop| read.contains(&hop.value);
        let num_read = program.send.iter().filter(|hop| is_read(hop)).count();
        let num_sent = program.send.len();
        let bytes: usize = program.send.iter().map(|hop| hop.ty.size_bytes()).sum();
        let runner = Interpreter::new(
            Arc::new(program),
            Arc::clone(&backend),
            Arc::new(SingleRank),
        );
        let params = params(&backend, &runner.program().graph);
        let forwarded = runner
            .forward(&params.views, &batch, Vec::new(), context())
            .expect("runs forward");
        let before = backend.memory().live_bytes();
        drop(forwarded.send);
        let gone = before - backend.memory().live_bytes();
        if num_read == num_sent {
            kept += 1;
            assert_eq!(gone, 0, "the backward reads what is sent at {cut}");
        } else if num_read == 0 {
            freed += usize::from(gone == bytes);
        }
        drop(forwarded.frame);
    }
    assert!(freed > 0 && kept > 0, "{freed} freed, {kept} kept");
}

#[test]
fn stages_and_values_that_there_are_not_are_refused() {
    let graph = trace(&gpt2(false));
    let cuts = StageCuts::whole(&graph);
    let refused = |graph: &Graph, stage| {
        let program = StageProgram::inference(graph, &cuts, stage);
        program.expect_err("no such stage").to_string()
    };
    assert_eq!(refused(&graph, 1), "there is no stage 1 of 1");
    let mut other = Graph::new();
    assert!(StageProgram::inference(&other, &cuts, 0).is_err());
    let value = graph.nodes()[0].outputs[0];
    let added = other.add_node(&Arc::from("h"), Op::SumAll, vec![value]);
    assert!(matches!(added, Err(Error::NoValue { num_values: 0, .. })));
}

#[test]
fn a_loss_of_another_type_than_its_gradient_is_refused() {
    let training = |ty: TensorType| {
        let graph = fx::trace(DType::F32, |module| {
            let x = module.input("x", ty);
            module.output("loss", &module.scale(&x, 2.0)?);
            Ok(())
        });
        let graph = graph.expect("the operands fit");
        let cuts = StageCuts::whole(&graph);
        StageProgram::inference(&graph, &cuts, 0).expect("nothing is differentiated");
        StageProgram::training(&graph, &cuts, 0, &RecomputePlan::default())
    };
    let refused = |ty| training(ty).unwrap_err().to_string();
    // As many bytes as the number that the gradient starts from.
    let per_sample = TensorType::new([2], DType::F32);
    insta::assert_snapshot!(refused(per_sample), @r#"output "loss" should be f64[], found f32[2]: end it with `Module::sum`"#);
    insta::assert_snapshot!(refused(TensorType::scalar(DType::F32)), @r#"output "loss" should be f64[], found f32[]: end it with `Module::sum`"#);
    assert!(training(TensorType::scalar(DType::F64)).is_ok());
}

#[test]
fn a_statistic_that_a_later_stage_prints_has_no_gradient() {
    let graph = fx::trace(DType::F32, |module| {
        let x = module.input("x", TensorType::new([2, 3], DType::F32));
        let [w, b] = ["w", "b"].map(|name| {
            let init = Init::Constant(1.0);
            module.param(name, &[3], init, ParamRole::Weight)
        });
        let x = module.mul(&x, &x)?;
        let normed = module.apply(Op::LayerNorm { eps: 1e-5 }, &[&x, &w?, &b?])?;
        module.output("spread", &module.sum(&normed[2])?);
        module.output("loss", &module.sum(&normed[0])?);
        Ok(())
    });
    let graph = graph.expect("the operands fit");
    let cuts = StageCuts::new(&graph, vec![0, 2, graph.nodes().len()]).expect("valid bounds");
    let [first, last] = [0, 1].map(|stage| {
        let plan = RecomputePlan::default();
        StageProgram::training(&graph, &cuts, stage, &plan).expect("differentiable")
    });
    let grads = |hops: &[Hop]| {
        hops.iter()
            .map(|hop| hop.grad.is_some())
            .collect::<Vec<_>>()
    };
    assert_eq!(grads(&first.send), [true, false]);
    assert_eq!(grads(&last.recv), [true, false]);
}

#[test]
fn a_batch_without_samples_has_no_loss_and_no_gradients() {
    let wide = json!({ "model_type": "gpt2", "vocab_size": 150, "n_positions": 8, "n_embd": 128, "n_layer": 1,
        "n_head": 2 });
    let graph = models::from_config(&wide)
        .and_then(|model| model.trace(&TraceOptions::training(0, SEQ)))
        .expect("a valid configuration");
    let empty = |port: &Port| {
        let ty = graph.ty(port.value);
        (port.name.clone(), value(&backend(1), ty, &[]))
    };
    let batch = graph.inputs().iter().map(empty).collect();
    let (loss, grads) = loss_and_grads(&graph, &batch, 2);
    assert!(loss == 0.0, "{loss}");
    assert!(grads.iter().flatten().all(|&x| x == 0.0));
}

#[test]
fn an_extended_model_overlaps_what_the_original_does() {
    let graph = trace(&gpt2(true)).with_overlap(Overlap::Block);
    let copy = fx::extend(
        &graph,
        |_| (),
        |original| Ok::<_, Error>(original.copy()?.outputs),
    );
    assert_eq!(copy.expect("nothing is changed").overlap(), Overlap::Block);
}

#[test]
fn the_masks_of_a_sample_are_the_same_alone_and_among_others_in_any_dimension() {
    let backend = backend(1);
    let dropped = |samples: usize, sample_base: u64| {
        let ty = TensorType::new([3, 5, samples, 4], DType::F32);
        let graph = fx::trace(DType::F32, |module| {
            let x = module.input("x", ty.clone());
            module.output("y", &module.dropout_by(&x, 2, 0.5)?);
            Ok(())
        });
        let graph = graph.expect("the operands fit");
        let program = StageProgram::inference(&graph, &StageCuts::whole(&graph), 0);
        let program = Arc::new(program.expect("one stage"));
        let runner = Interpreter::new(program, Arc::clone(&backend), Arc::new(SingleRank));
        let x = value(&backend, &ty, &vec![1.0; ty.numel()]);
        let batch = Batch::from([("x".to_owned(), x)]);
        let context = RunContext {
            sample_base,
            ..context()
        };
        let forwarded = runner.forward(&Vec::new(), &batch, Vec::new(), context);
        numbers(&backend, &forwarded.expect("it runs").outputs[0])
    };
    let (both, alone) = (dropped(2, 6), [dropped(1, 6), dropped(1, 7)]);
    for (row, numbers) in both.chunks_exact(4).enumerate() {
        assert_eq!(numbers, &alone[row % 2][row / 2 * 4..][..4]);
    }
    assert!(alone[0] != alone[1]);
}
