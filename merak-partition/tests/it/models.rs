//! Segments and stages of real models.

use insta::assert_snapshot;
use merak_partition::{
    Partition, SegmentOptions, Segments, SplitMethod, SplitRule, StageMethod, recompute_plan,
    segment, stages,
};
use merak_trace::{
    DType, Graph, Init, Op, RecomputePlan, StageProgram, TensorType, fx,
    models::{self, Model, TraceOptions},
    op::WeightLayout,
};
use serde_json::json;

fn gpt2(layers: usize) -> Box<dyn Model> {
    models::from_config(&json!({ "model_type": "gpt2", "n_layer": layers }))
        .expect("the configuration is complete")
}

fn llama(layers: usize) -> Box<dyn Model> {
    let config = json!({ "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": layers, "num_attention_heads": 4, "max_position_embeddings": 32 });
    models::from_config(&config).expect("the configuration is complete")
}

fn traced(model: Box<dyn Model>) -> (Box<dyn Model>, Graph) {
    let graph = model.trace(&TraceOptions::training(1, 32));
    (model, graph.expect("the model traces"))
}

fn cut(graph: &Graph, model: &dyn Model, method: SplitMethod, num_stages: usize) -> Segments {
    segment(
        graph,
        &SegmentOptions::for_model(&model.info(), num_stages).with_method(method),
    )
    .expect("the model is cut")
}

/// The scope of the first and the last node of a segment.
fn ends<'a>(graph: &'a Graph, segments: &Segments, segment: usize) -> (&'a str, &'a str) {
    let nodes = segments.nodes(segment);
    (
        &graph.nodes()[nodes.start].scope,
        &graph.nodes()[nodes.end - 1].scope,
    )
}

#[test]
fn gpt2_small_has_26_segments_of_the_known_sizes() {
    let (model, graph) = traced(gpt2(12));
    let segments = cut(&graph, &*model, SplitMethod::FarthestMinDeps, 4);
    assert!(
        matches!(
            segments.rule,
            SplitRule::FarthestMinDeps {
                target: 24,
                budget: 3_544_000,
                ..
            }
        ),
        "{:?}",
        segments.rule
    );
    assert_eq!(segments.len(), 26);
    assert_eq!(segments.params[0], 50_257 * 768 + 1024 * 768);
    for layer in 0..12 {
        assert_eq!(
            segments.params[1 + 2 * layer..3 + 2 * layer],
            [2_363_904, 4_723_968]
        );
    }
    assert_eq!(
        segments.params[25],
        2 * 768,
        "the tied head counts where the embeddings are"
    );
    assert_eq!(
        ends(&graph, &segments, 0),
        ("transformer.wte", "transformer")
    );
    assert_eq!(
        ends(&graph, &segments, 1),
        ("transformer.h.0.ln_1", "transformer.h.0")
    );
    assert_eq!(
        ends(&graph, &segments, 2),
        ("transformer.h.0.ln_2", "transformer.h.0")
    );
    assert_eq!(ends(&graph, &segments, 25), ("transformer.ln_f", "loss"));
    assert!(
        segments
            .crossing(&graph)
            .iter()
            .all(|values| values.len() == 1)
    );
}

#[test]
fn an_untied_head_and_logits_as_output_give_the_same_segments() {
    let (model, graph) = traced(gpt2(12));
    let expected = cut(&graph, &*model, SplitMethod::FarthestMinDeps, 4).bounds;
    let untied = TraceOptions {
        untie: true,
        ..TraceOptions::training(1, 32)
    };
    let segments = cut(
        &model.trace(&untied).unwrap(),
        &*model,
        SplitMethod::FarthestMinDeps,
        4,
    );
    assert_eq!(segments.bounds, expected);
    let logits = TraceOptions::training(1, 32).with_head(models::Head::Logits);
    let segments = cut(
        &model.trace(&logits).unwrap(),
        &*model,
        SplitMethod::FarthestMinDeps,
        4,
    );
    assert_eq!(segments.bounds[..26], expected[..26]);
}

#[test]
fn nearest_min_deps_sets_the_final_norm_and_the_head_apart() {
    let (model, graph) = traced(gpt2(12));
    let segments = cut(&graph, &*model, SplitMethod::NearestMinDeps, 4);
    assert_eq!(segments.len(), 27);
    assert_eq!(
        ends(&graph, &segments, 24),
        ("transformer.h.11.ln_2", "transformer.h.11")
    );
    assert_eq!(
        ends(&graph, &segments, 25),
        ("transformer.ln_f", "transformer.ln_f")
    );
    assert_eq!(ends(&graph, &segments, 26), ("lm_head", "loss"));
}

#[test]
fn layer_split_follows_the_table_of_the_family() {
    let (model, graph) = traced(gpt2(3));
    let segments = cut(&graph, &*model, SplitMethod::LayerSplit, 2);
    let starts: Vec<_> = (0..segments.len())
        .map(|s| ends(&graph, &segments, s).0)
        .collect();
    assert_eq!(
        starts,
        [
            "transformer.wte",
            "transformer.h.0.ln_1",
            "transformer.h.1.ln_1",
            "transformer.h.2.ln_1",
            "transformer.ln_f"
        ]
    );

    let (model, graph) = traced(llama(11));
    let segments = cut(&graph, &*model, SplitMethod::LayerSplit, 2);
    assert_eq!(segments.len(), 12, "layers 1 and 10 are different points");
    assert_eq!(
        ends(&graph, &segments, 11).0,
        "model.layers.10.input_layernorm"
    );
}

#[test]
fn split_points_are_modules_or_parameters() {
    let (model, graph) = traced(gpt2(3));
    let mut options =
        SegmentOptions::for_model(&model.info(), 2).with_method(SplitMethod::LayerSplit);
    options.split_points = ["transformer.h.1.mlp.c_fc.weight", "lm_head.weight"]
        .map(str::to_owned)
        .to_vec();
    let segments = segment(&graph, &options).unwrap();
    let starts: Vec<_> = (0..segments.len())
        .map(|s| ends(&graph, &segments, s).0)
        .collect();
    assert_eq!(
        starts,
        ["transformer.wte", "transformer.h.1.mlp.c_fc", "lm_head"]
    );
}

/// What is told of given points that were moved.
fn told(segments: &Segments) -> String {
    let SplitRule::LayerSplit { moved, .. } = &segments.rule else {
        return "another rule".to_owned();
    };
    let lines: Vec<_> = moved.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

#[test]
fn a_given_point_within_a_leaf_cuts_behind_it_which_is_told() {
    let (model, graph) = traced(gpt2(3));
    let mut options =
        SegmentOptions::for_model(&model.info(), 2).with_method(SplitMethod::LayerSplit);
    // The third one is where a leaf begins.
    options.split_points = [
        "transformer.h.0.attn",
        "transformer.h.1.mlp.c_proj",
        "transformer.h.1.mlp.c_fc",
        "transformer.h.2",
    ]
    .map(str::to_owned)
    .to_vec();
    assert_eq!(told(&segment(&graph, &options).unwrap()), "");
    options.leaf_modules = ["transformer.h.0", "transformer.h.{i}.mlp"]
        .map(str::to_owned)
        .to_vec();
    let segments = segment(&graph, &options).unwrap();
    let starts: Vec<_> = (0..segments.len())
        .map(|s| ends(&graph, &segments, s).0)
        .collect();
    assert_eq!(
        starts,
        [
            "transformer.wte",
            "transformer.h.1.ln_1",
            "transformer.h.1.mlp.c_fc",
            "transformer.h.1",
            "transformer.h.2.ln_1"
        ]
    );
    assert_snapshot!(told(&segments), @r#"
    the split point "transformer.h.0.attn" lies within the leaf module "transformer.h.0": the cut is behind it, before "transformer.h.1.ln_1.layer_norm"
    the split point "transformer.h.1.mlp.c_proj" lies within the leaf module "transformer.h.{i}.mlp": the cut is behind it, before "transformer.h.1.add_2"
    "#);
}

#[test]
fn a_given_point_within_a_leaf_that_the_model_ends_with_cuts_nothing_which_is_told() {
    let graph = fx::trace(DType::F32, |root| {
        let mut x = root.input("x", TensorType::new([2, 3], DType::F32));
        for name in ["m.0", "m.1", "m.2"] {
            let module = root.sub(name);
            x = module.linear(&x, 3, WeightLayout::OutIn, false, Init::Normal(1.0))?;
        }
        root.output("y", &x);
        Ok(())
    });
    let options = SegmentOptions {
        split_points: vec!["m.{i}".to_owned()],
        leaf_modules: vec!["m".to_owned()],
        num_stages: 1,
        ..SegmentOptions::default()
    };
    let options = options.with_method(SplitMethod::LayerSplit);
    let segments = segment(&graph.unwrap(), &options).unwrap();
    assert_eq!(segments.bounds, [0, 3]);
    assert_snapshot!(told(&segments), @r#"the split point "m.{i}" lies within the leaf module "m": there is no cut, as the model ends with it"#);
}

#[test]
fn blocks_that_stay_whole_are_cut_at_their_borders_alone() {
    let (model, graph) = traced(gpt2(3));
    let mut options = SegmentOptions::for_model(&model.info(), 2);
    let within = |options: &SegmentOptions| {
        let segments = segment(&graph, options).unwrap();
        let scope = |node: usize| graph.nodes()[node].scope.to_string();
        let block = |node| scope(node).split('.').take(3).collect::<Vec<_>>().join(".");
        let borders = segments.bounds[1..segments.len()].iter();
        let inner = borders.filter(|&&border| block(border - 1) == block(border));
        inner.count()
    };
    assert_eq!(within(&options), 3, "between attention and MLP");
    options.leaf_modules = vec!["transformer.h.{i}".to_owned()];
    assert_eq!(within(&options), 0);
}

#[test]
fn llama_is_never_cut_right_after_its_embedding() {
    let (model, graph) = traced(llama(4));
    for method in [SplitMethod::FarthestMinDeps, SplitMethod::NearestMinDeps] {
        let segments = cut(&graph, &*model, method, 8);
        for &border in &segments.bounds[1..segments.len()] {
            assert!(
                !matches!(graph.nodes()[border - 1].op, Op::Embedding { .. }),
                "{method}"
            );
        }
    }
}

#[test]
fn a_model_with_few_segments_is_refined_to_the_number_of_stages() {
    let (model, graph) = traced(gpt2(1));
    let segments = cut(&graph, &*model, SplitMethod::FarthestMinDeps, 6);
    assert_eq!((segments.len(), segments.refined), (6, 2));
    let reads = |node: usize| {
        graph.nodes()[node]
            .inputs
            .iter()
            .any(|&input| graph.param_of(input).is_some())
    };
    assert!(
        (0..6).all(|s| segments.nodes(s).any(reads)),
        "a stage without parameters only waits"
    );
}

#[test]
fn parameters_are_balanced_as_well_as_can_be() {
    let (model, graph) = traced(gpt2(12));
    let segments = cut(&graph, &*model, SplitMethod::FarthestMinDeps, 4);
    // The embeddings outweigh a third of the blocks, so the first stage is the largest in any
    // partition.
    assert_eq!(
        stages(&segments, &StageMethod::Parameters, 4).unwrap(),
        [0, 1, 5, 15, 26]
    );
}

#[test]
fn stage_programs_can_be_made_from_the_cuts() {
    let (model, graph) = traced(gpt2(4));
    let options = SegmentOptions::for_model(&model.info(), 4);
    let partition = Partition::new(&graph, &options, &StageMethod::Uniform).unwrap();
    let cuts = partition.cuts(&graph).unwrap();
    assert_eq!(
        (0..4).map(|stage| cuts.nodes(stage)).collect::<Vec<_>>(),
        (0..4)
            .map(|stage| partition.nodes_of(stage))
            .collect::<Vec<_>>()
    );
    assert_eq!(
        (0..4)
            .map(|stage| partition.params_of(stage))
            .sum::<usize>(),
        graph.num_elements()
    );
}

#[test]
fn recompute_spares_the_embeddings_and_the_last_chunk_of_the_last_stage() {
    let (model, graph) = traced(gpt2(2));
    let options = SegmentOptions::for_model(&model.info(), 2);
    let partition = Partition::new(&graph, &options, &StageMethod::Uniform).unwrap();
    // Chunks by the segments at their ends: embeddings, attention 0, MLP 0 | attention 1, MLP 1,
    // head.
    let plan = |stage, chunk, most| {
        let chunks = recompute_plan(&graph, &partition, stage, chunk, most).chunks;
        let segment = |node| {
            partition
                .segments
                .bounds
                .iter()
                .position(|&bound| bound == node)
                .expect("chunks end with segments")
        };
        chunks
            .iter()
            .map(|chunk| (segment(chunk.start), segment(chunk.end)))
            .collect::<Vec<_>>()
    };
    assert_eq!(plan(0, 1, usize::MAX), [(1, 2), (2, 3)]);
    assert_eq!(plan(1, 1, usize::MAX), [(3, 4), (4, 5)]);
    assert_eq!(
        plan(0, 2, usize::MAX),
        [(2, 3)],
        "the first chunk has the embeddings"
    );
    assert_eq!(plan(1, 2, usize::MAX), [(3, 5)]);
    assert_eq!(
        [
            plan(1, 3, usize::MAX),
            plan(0, 0, usize::MAX),
            plan(0, 1, 0)
        ],
        [const { Vec::new() }; 3]
    );
    // Only the first of them, even within a chunk.
    assert_eq!(plan(0, 1, 1), [(1, 2)]);
    assert_eq!(plan(1, 2, 1), [(3, 4)]);
}

#[test]
fn programs_grow_linearly_with_the_layers() {
    let nodes = |layers, num_stages| {
        let (model, graph) = traced(gpt2(layers));
        let partition = Partition::new(
            &graph,
            &SegmentOptions::for_model(&model.info(), num_stages),
            &StageMethod::Uniform,
        );
        let cuts = partition
            .expect("the model is cut")
            .cuts(&graph)
            .expect("the cuts are the graph's own");
        let program = |stage| {
            StageProgram::training(&graph, &cuts, stage, &RecomputePlan::default())
                .expect("it differentiates")
        };
        (0..num_stages)
            .map(|stage| program(stage).graph.nodes().len())
            .sum::<usize>()
    };
    let (one, two, four) = (nodes(8, 4), nodes(16, 4), nodes(32, 4));
    assert_eq!(four - two, 2 * (two - one));
    assert_eq!(nodes(32, 16), four, "no node is in two stages");
}
