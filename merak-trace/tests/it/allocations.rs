//! Once warm, a step takes no fresh memory for tensors: what is freed serves again.

use crate::support::{backend, context, grad_store, interpreter, params, value};
use merak_trace::models::{self, TraceOptions};
use serde_json::json;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Bytes from which an allocation counts: half of the smallest activation of the models below.
const LARGE: usize = 16 << 10;

thread_local! {
    static LARGE_ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts large allocations of each thread.
struct Counting;

fn count(bytes: usize) {
    if bytes >= LARGE {
        LARGE_ALLOCATIONS.set(LARGE_ALLOCATIONS.get() + 1);
    }
}

#[expect(unsafe_code, reason = "allocators cannot be written without")]
// SAFETY: all of it is left to the system's allocator; counting touches no memory that it hands out.
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

#[test]
fn a_warm_microbatch_makes_no_large_allocation() {
    const SEQ: usize = 64;
    for config in [
        json!({ "model_type": "gpt2", "vocab_size": 512, "n_positions": SEQ, "n_embd": 64, "n_layer": 2, "n_head": 2 }),
        json!({ "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2 }),
    ] {
        let model = models::from_config(&config).expect("a valid configuration");
        let graph = model
            .trace(&TraceOptions::training(2, SEQ))
            .expect("a model");
        let backend = backend(1);
        let runner = interpreter(&backend, &graph);
        let params = params(&backend, &runner.program().graph);
        let mut store = grad_store(&backend, runner.program());
        let ids: Vec<_> = (0..2 * SEQ).map(|i| (i * 7 % 512) as f64).collect();
        let ports = graph.inputs().iter();
        let batch = ports
            .map(|port| {
                (
                    port.name.clone(),
                    value(&backend, graph.ty(port.value), &ids),
                )
            })
            .collect();
        let mut step = || {
            let before = LARGE_ALLOCATIONS.get();
            let mut forwarded = runner
                .forward(&params.views, &batch, Vec::new(), context())
                .expect("runs forward");
            let frame = &mut forwarded.frame;
            runner
                .backward(frame, &params.views, Vec::new(), 1.0, &mut store)
                .expect("runs backward");
            LARGE_ALLOCATIONS.get() - before
        };
        let cold = step();
        assert!(cold > 20, "the first microbatch takes memory: {cold}");
        step();
        assert_eq!(step(), 0, "of {}", config["model_type"]);
    }
}
