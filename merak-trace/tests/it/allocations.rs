//! Once warm, a step takes no fresh memory for tensors: freed memory is used again.

use crate::support::{backend, context, grad_store, interpreter, params, value};
use merak_trace::{
    Graph,
    models::{self, TraceOptions},
};
use serde_json::{Value as Json, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::Range;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes from which an allocation counts: half of the smallest activation of the models below.
const LARGE: usize = 16 << 10;

/// Large allocations of all threads.
static LARGE_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts large allocations.
struct Counting;

fn count(bytes: usize) {
    if bytes >= LARGE {
        LARGE_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

#[expect(unsafe_code, reason = "allocators cannot be written without")]
// SAFETY: all calls go to the system's allocator; counting touches no memory that it returns.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the promises that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts in a process of its own, without the allocations of other tests.
#[test]
fn a_warm_step_makes_no_large_allocation() {
    let mut own = Command::new(std::env::current_exe().expect("it runs"));
    own.args(["--ignored", "--exact", "allocations::of_a_warm_step"]);
    let output = own.output().expect("it runs again");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "counts the allocations of all threads: alone in a process, which the test above starts"]
fn of_a_warm_step() {
    for threads in [1, 2, 3] {
        for config in [
            json!({ "model_type": "gpt2", "vocab_size": 512, "n_positions": SEQ, "n_embd": 64, "n_layer": 2,
                "n_head": 2 }),
            json!({ "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2 }),
            json!({ "model_type": "bert", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
                "num_hidden_layers": 2, "num_attention_heads": 4 }),
            json!({ "model_type": "t5", "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
                "num_heads": 4 }),
        ] {
            let steps = large_allocations(&config, threads);
            let what = format!("{} on {threads} threads: {steps:?}", config["model_type"]);
            assert!(steps[0] > 20, "the first step takes memory, {what}");
            let fresh = steps[2..].iter().filter(|&&count| count > 0).count();
            // Work falls to threads by chance, and each thread takes its working memory once.
            let most = if threads == 1 { 0 } else { STEPS / 2 };
            assert!(fresh <= most, "{what}");
        }
    }
}

/// Length of a sequence.
const SEQ: usize = 64;
/// Steps of a training.
const STEPS: usize = 16;

/// The large allocations of each step: forward, backward and update.
fn large_allocations(config: &Json, threads: usize) -> [usize; STEPS] {
    let model = models::from_config(config).expect("a valid configuration");
    let options = TraceOptions::training(2, SEQ);
    let graph = model.trace(&options).expect("a model");
    let backend = backend(threads);
    let runner = interpreter(&backend, &graph);
    let program = runner.program();
    let mut params = params(&backend, &program.graph);
    let mut store = grad_store(&backend, program);
    let places = places(&program.graph);
    let ports = graph.inputs().iter();
    let batch = ports
        .map(|port| {
            let ty = graph.ty(port.value);
            let ids: Vec<_> = match port.name.as_str() {
                "attention_mask" => vec![1.0; ty.numel()],
                "token_type_ids" => vec![0.0; ty.numel()],
                _ => (0..ty.numel()).map(|i| (i * 7 % 512) as f64).collect(),
            };
            (port.name.clone(), value(&backend, ty, &ids))
        })
        .collect();
    [(); STEPS].map(|()| {
        let before = LARGE_ALLOCATIONS.load(Ordering::Relaxed);
        let mut forwarded = runner
            .forward(&params.views, &batch, Vec::new(), context())
            .expect("runs forward");
        runner
            .backward(
                &mut forwarded.frame,
                &params.views,
                Vec::new(),
                1.0,
                &mut store,
            )
            .expect("runs backward");
        drop(forwarded);
        for (port, grad) in program.grads.iter().zip(&store.buffers) {
            let place = &places[port.param.index()];
            params.flat.write(&mut |bytes| {
                let own = &mut bytemuck::cast_slice_mut::<u8, f32>(bytes)[place.clone()];
                grad.read(&mut |grad| {
                    for (param, grad) in own.iter_mut().zip(bytemuck::cast_slice::<_, f32>(grad)) {
                        *param -= 1e-3 * grad;
                    }
                });
            });
        }
        LARGE_ALLOCATIONS.load(Ordering::Relaxed) - before
    })
}

/// Where each parameter lies in the flat buffer.
fn places(graph: &Graph) -> Vec<Range<usize>> {
    let mut end = 0;
    let params = graph.params().iter();
    params
        .map(|param| {
            let begin = end;
            end += param.local.numel();
            begin..end
        })
        .collect()
}
