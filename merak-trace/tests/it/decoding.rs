//! Positions that pass one by one, with a cache, give the same as together.

use crate::support::{backends, context, numbers, params, value};
use merak_trace::{
    Batch, Continuation, Interpreter, KvCache, NextPositions, Result, RunContext, SharedBackend,
    SingleRank, StageCuts, StageProgram, Tail,
    models::{self, Head, TraceOptions, Visible},
};
use serde_json::{Value as Json, json};
use std::sync::Arc;

const VOCAB: usize = 23;
/// Lengths of three sequences.
const LENGTHS: [usize; 3] = [7, 4, 8];
/// The length by which positions are scaled, in models that scale them.
const CONTEXT: usize = 8;

/// What the encoder reads for each sequence, in models that have one.
const SOURCES: [usize; 3] = [3, 1, 5];

/// A model's forward for one sequence of `len` positions; of as many after those of the encoder,
/// if there is one.
fn interpreter(
    backend: &SharedBackend,
    config: &Json,
    len: usize,
    source: Option<usize>,
) -> Interpreter {
    let model = models::from_config(config).expect("a valid configuration");
    let options = TraceOptions {
        context: Some(CONTEXT),
        target_seq: Some(len),
        unpadded: true,
        ..TraceOptions::training(1, source.unwrap_or(len)).with_head(Head::Logits)
    };
    let graph = model.trace(&options).expect("it traces");
    let program = StageProgram::inference(&graph, &StageCuts::whole(&graph), 0);
    let program = Arc::new(program.expect("one stage"));
    Interpreter::new(program, Arc::clone(backend), Arc::new(SingleRank))
}

/// The token of a sequence at a position.
fn token(sequence: usize, position: usize) -> f64 {
    ((position * position + 5 * sequence + 1) % VOCAB) as f64
}

/// The logits of positions of sequences, `[V]` each: those of `at` alone where they are given.
fn pass(
    backend: &SharedBackend,
    config: &Json,
    pieces: &[(usize, std::ops::Range<usize>)],
    cache: Option<&mut KvCache>,
    at: Option<&[usize]>,
) -> Vec<Vec<f64>> {
    let tokens = |pieces: &[(usize, std::ops::Range<usize>)]| -> Vec<f64> {
        let of_piece = |(sequence, range): &(usize, std::ops::Range<usize>)| -> Vec<_> {
            let range = range.clone();
            range.map(|position| token(*sequence, position)).collect()
        };
        pieces.iter().flat_map(of_piece).collect()
    };
    // The encoder reads the same numbers as the decoder, in other lengths.
    let has_encoder = config["model_type"] == "t5";
    let source = |(sequence, range): &(usize, std::ops::Range<usize>)| {
        let is_first = has_encoder && range.start == 0;
        (*sequence, 0..if is_first { SOURCES[*sequence] } else { 0 })
    };
    let sources: Vec<_> = pieces.iter().map(source).collect();
    let (ids, encoded) = (tokens(pieces), tokens(&sources));
    let of_encoder = has_encoder.then_some(encoded.len());
    let runner = interpreter(backend, config, ids.len(), of_encoder);
    let params = params(backend, &runner.program().graph);
    let inputs = runner.program().inputs.iter().map(|port| {
        let ty = runner.program().graph.ty(port.value);
        let is_encoders = has_encoder && port.name == "input_ids";
        let numbers = if is_encoders { &encoded } else { &ids };
        (port.name.clone(), value(backend, ty, numbers))
    });
    let batch: Batch = inputs.collect();
    let context = RunContext {
        training: false,
        ..context()
    };
    let tail = at.map(|at| interpreter(backend, config, at.len(), of_encoder));
    let forwarded = match cache {
        None => runner.forward(&params.views, &batch, Vec::new(), context),
        Some(cache) => {
            let pieces = pieces
                .iter()
                .zip(&sources)
                .map(|((sequence, range), source)| NextPositions {
                    sequence: *sequence as u64,
                    positions: range.len(),
                    source: source.1.len(),
                });
            let pieces: Vec<_> = pieces.collect();
            let next = Continuation {
                cache,
                pieces: &pieces,
                tail: tail.as_ref().zip(at).map(|(interpreter, positions)| Tail {
                    interpreter,
                    positions,
                }),
            };
            runner.forward_cached(&params.views, &batch, Vec::new(), context, next)
        }
    };
    let logits = numbers(backend, &forwarded.expect("it runs").outputs[0]);
    logits.chunks_exact(VOCAB).map(<[f64]>::to_vec).collect()
}

#[test]
fn sequences_that_pass_in_pieces_and_together_give_the_logits_of_each_alone_and_whole() {
    let llama = json!({ "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 32, "hidden_size": 12,
        "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1 });
    let gpt2 = json!({ "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 32, "n_embd": 12, "n_layer": 2,
        "n_head": 3 });
    let mut mistral = llama.clone();
    mistral["model_type"] = "mistral".into();
    // A window that is shorter than the sequences.
    mistral["sliding_window"] = 3.into();
    // Positions that are scaled by the length of the text.
    let scaled = |scaling: Json| {
        let mut config = llama.clone();
        config["max_position_embeddings"] = 5.into();
        config["rope_scaling"] = scaling;
        config
    };
    let dynamic = scaled(json!({ "rope_type": "dynamic", "factor": 3.0 }));
    let mut long = scaled(
        json!({ "rope_type": "longrope", "original_max_position_embeddings": 5,
        "short_factor": [1, 1, 1], "long_factor": [1, 2, 4] }),
    );
    long["max_position_embeddings"] = 16.into();
    // Sequences reach the last bucket.
    let t5 = json!({ "model_type": "t5", "vocab_size": VOCAB, "d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2,
        "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6 });
    for backend in backends(1) {
        for config in [&llama, &gpt2, &mistral, &dynamic, &long, &t5] {
            check(&backend, config);
        }
    }
}

/// Compares sequences that pass in pieces with each at once.
fn check(backend: &SharedBackend, config: &Json) {
    let whole: Vec<_> = LENGTHS
        .iter()
        .enumerate()
        .map(|(sequence, &len)| pass(backend, config, &[(sequence, 0..len)], None, None))
        .collect();
    let mut cache = KvCache::default();
    let steps: [&[(usize, std::ops::Range<usize>)]; 5] = [
        &[(0, 0..3), (2, 0..5)],
        &[(0, 3..4), (1, 0..2), (2, 5..6)],
        &[(0, 4..5), (1, 2..3), (2, 6..7)],
        &[(2, 7..8), (1, 3..4)],
        &[(0, 5..7)],
    ];
    for pieces in steps {
        let logits = pass(backend, config, pieces, Some(&mut cache), None);
        let expected = pieces
            .iter()
            .flat_map(|(s, range)| &whole[*s][range.clone()]);
        assert_eq!(logits.len(), expected.clone().count());
        for (found, expected) in logits.iter().zip(expected) {
            assert_near(found, expected, &format!("{config} {pieces:?}"));
        }
    }
    for (sequence, len) in LENGTHS.into_iter().enumerate() {
        assert_eq!(cache.positions(sequence as u64), len);
    }
    // Of two layers, and of the decoder's again for what the encoder read.
    let width = if config["num_key_value_heads"] == 1 {
        6
    } else {
        12
    };
    let bytes = |lengths: &[usize]| 2 * 2 * lengths.iter().sum::<usize>() * width * 4;
    let sources = if config["model_type"] == "t5" {
        SOURCES
    } else {
        [0; 3]
    };
    assert_eq!(cache.size_bytes(), bytes(&LENGTHS) + bytes(&sources));
    cache.remove(1);
    assert_eq!(cache.positions(1), 0);
    let left = bytes(&[LENGTHS[0], LENGTHS[2]]) + bytes(&[sources[0], sources[2]]);
    assert_eq!(cache.size_bytes(), left);

    let pieces = [(0, 0..3), (1, 0..4), (2, 0..5)];
    let newest = [2, 6, 11];
    let logits = pass(
        backend,
        config,
        &pieces,
        Some(&mut KvCache::default()),
        Some(&newest),
    );
    assert_eq!(logits.len(), newest.len());
    for (found, (sequence, range)) in logits.iter().zip(pieces) {
        assert_near(
            found,
            &whole[sequence][range.end - 1],
            &format!("{config} newest"),
        );
    }
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    let are_near = found
        .iter()
        .zip(expected)
        .all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(are_near, "{what}: {found:?}, expected {expected:?}");
}

#[test]
fn positions_that_are_counted_in_documents_do_not_pass_in_pieces() {
    let config = json!({ "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 32, "n_embd": 12, "n_layer": 1,
        "n_head": 3 });
    let model = models::from_config(&config).unwrap();
    let options = TraceOptions {
        visible: Visible::Document,
        ..TraceOptions::training(1, 3).with_head(Head::Logits)
    };
    let graph = model.trace(&options).unwrap();
    let program = StageProgram::inference(&graph, &StageCuts::whole(&graph), 0);
    let program = Arc::new(program.unwrap());
    for backend in backends(1) {
        let groups = Arc::new(SingleRank);
        let runner = Interpreter::new(Arc::clone(&program), Arc::clone(&backend), groups);
        let params = params(&backend, &program.graph);
        let inputs = program.inputs.iter().map(|port| {
            let ty = program.graph.ty(port.value);
            (port.name.clone(), value(&backend, ty, &[1.0; 3]))
        });
        let next = Continuation {
            cache: &mut KvCache::default(),
            pieces: &[NextPositions {
                sequence: 0,
                positions: 3,
                source: 0,
            }],
            tail: None,
        };
        let batch: Batch = inputs.collect();
        let forwarded = runner.forward_cached(&params.views, &batch, Vec::new(), context(), next);
        let error = forwarded.expect_err("it is refused").to_string();
        let reason = "`document_positions` covers whole sequences, which pass in pieces here";
        assert!(error.ends_with(reason), "{error}");
    }
}

/// The logits of the next positions of sequences, which all read the same tokens.
fn next_of(
    backend: &SharedBackend,
    config: &Json,
    pieces: &[NextPositions],
    cache: &mut KvCache,
    context: RunContext,
) -> Result<Vec<f64>> {
    let len = pieces.iter().map(|piece| piece.positions).sum();
    let source = pieces.iter().map(|piece| piece.source).sum();
    let source = (config["model_type"] == "t5").then_some(source);
    let runner = interpreter(backend, config, len, source);
    let params = params(backend, &runner.program().graph);
    let inputs = runner.program().inputs.iter().map(|port| {
        let ty = runner.program().graph.ty(port.value);
        (
            port.name.clone(),
            value(backend, ty, &vec![1.0; ty.numel()]),
        )
    });
    let next = Continuation {
        cache,
        pieces,
        tail: None,
    };
    let batch: Batch = inputs.collect();
    let forwarded = runner.forward_cached(&params.views, &batch, Vec::new(), context, next)?;
    Ok(numbers(backend, &forwarded.outputs[0]))
}

fn piece(sequence: u64, positions: usize) -> NextPositions {
    NextPositions {
        sequence,
        positions,
        source: 0,
    }
}

#[test]
fn pieces_pass_without_dropout_in_any_context() {
    let config = json!({ "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 32, "n_embd": 12, "n_layer": 1,
        "n_head": 3, "attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5 });
    for backend in backends(1) {
        let logits = |training| {
            let context = RunContext {
                training,
                ..context()
            };
            let mut cache = KvCache::default();
            let mut pass = |positions| {
                let pieces = [piece(0, positions)];
                next_of(&backend, &config, &pieces, &mut cache, context).expect("it runs")
            };
            [pass(3), pass(1)].concat()
        };
        assert!(logits(true) == logits(false), "{}", backend.name());
    }
}

#[test]
fn a_sequence_with_two_pieces_in_a_pass_is_refused_and_stays() {
    let config = json!({ "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 32, "n_embd": 12, "n_layer": 1,
        "n_head": 3 });
    for backend in backends(1) {
        let mut cache = KvCache::default();
        let mut pass = |pieces: &[NextPositions]| {
            let passed = next_of(&backend, &config, pieces, &mut cache, context());
            (passed, cache.positions(7))
        };
        pass(&[piece(7, 2)]).0.expect("it runs");
        let (refused, positions) = pass(&[piece(7, 1), piece(4, 2), piece(7, 1)]);
        let error = refused.expect_err("it is refused").to_string();
        assert_eq!(
            error,
            "sequence 7: has several pieces in one pass; its next positions are one piece"
        );
        assert_eq!(positions, 2);
    }
}

#[test]
fn one_position_sees_of_an_encoder_without_input_what_several_do() {
    let config = json!({ "model_type": "t5", "vocab_size": VOCAB, "d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 1,
        "num_heads": 3 });
    for backend in backends(1) {
        let logits = |positions| {
            let pieces = [piece(0, positions)];
            let cache = &mut KvCache::default();
            next_of(&backend, &config, &pieces, cache, context()).expect("it runs")
        };
        let what = format!("on {}", backend.name());
        assert_near(&logits(1), &logits(2)[..VOCAB], &what);
    }
}
