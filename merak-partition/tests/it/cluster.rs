//! What a step takes on the machines of a description, against the formulas.

use insta::assert_snapshot;
use merak_mpu::Degrees;
use merak_partition::{Cluster, ClusterCosts, Connection, Counted, ParamBytes, Share, StepCosts};
use merak_trace::{
    Axis, DType, Graph, Op, TensorType,
    models::{self, TraceOptions},
    op::{Cost, Exchange, Reduction},
};
use serde_json::json;
use std::collections::BTreeMap;

/// So fast that it takes no time beside the rest.
const AT_ONCE: f64 = 1e30;

/// Two ranks a host: 1 byte a second within, a tenth of that between; the rest takes no time.
fn cluster() -> Cluster {
    let connection = |bytes_per_s| Connection {
        latency_s: 0.0,
        bytes_per_s,
    };
    Cluster {
        ranks_per_host: 2,
        memory_bytes: 1 << 30,
        flops_per_s: AT_ONCE,
        memory_bytes_per_s: AT_ONCE,
        node_latency_s: 0.0,
        inside: connection(1.0),
        between: connection(0.1),
    }
}

fn degrees([dp, tp, pp, sp]: [usize; 4]) -> Degrees {
    Degrees { dp, tp, pp, sp }
}

fn costs(cluster: &Cluster, of: [usize; 4], kept: ParamBytes) -> ClusterCosts {
    let costs = cluster.costs(degrees(of), 3, kept, 4);
    costs.expect("no degree is 0")
}

fn graph() -> Graph {
    let config = json!({ "model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 4 });
    let model = models::from_config(&config).expect("the configuration is complete");
    let options = TraceOptions::training(1, 4);
    model.trace(&options).expect("the model traces")
}

fn close(found: f64, expected: f64) {
    let error = (found - expected).abs();
    assert!(error <= 1e-9 * expected.abs(), "{found} {expected}");
}

#[test]
fn a_node_takes_its_operations_or_its_bytes_whichever_is_longer_and_a_latency() {
    let graph = graph();
    let sum = |cluster: Cluster| -> f64 {
        let costs = costs(&cluster, [1; 4], ParamBytes::default());
        graph.nodes().iter().map(|n| costs.node(&graph, n)).sum()
    };
    let with_kernel = || graph.nodes().iter().filter(|node| node.op.has_kernel());
    let computing = sum(Cluster {
        flops_per_s: 1e9,
        ..cluster()
    });
    let counted = graph.nodes().iter().map(|n| Counted.node(&graph, n));
    close(computing, counted.sum());
    let moving = sum(Cluster {
        memory_bytes_per_s: 1.0,
        ..cluster()
    });
    let moved = with_kernel().map(|node| Cost::of(&graph, node).bytes as f64);
    close(moving, moved.sum());
    let starting = sum(Cluster {
        node_latency_s: 1.0,
        ..cluster()
    });
    close(starting, with_kernel().count() as f64);
}

#[test]
fn ranks_of_several_hosts_exchange_over_what_connects_hosts() {
    let message = |of| costs(&cluster(), of, ParamBytes::default()).message(7);
    close(message([1, 1, 2, 1]), 7.0);
    // The stages of a pipeline with tp 2 are on a host each.
    close(message([1, 2, 2, 1]), 70.0);

    let split = summing();
    for (of, per_byte) in [([1, 2, 1, 1], 1.0), ([1, 4, 1, 1], 10.0)] {
        let costs = costs(&cluster(), of, ParamBytes::default());
        let ranks = of[1] as f64;
        let node = split
            .nodes()
            .iter()
            .find(|node| node.op.communicates() == Some(Axis::Tensor));
        let node = node.expect("the graph sums over ranks");
        let bytes = Exchange::of(&split, node)
            .expect("it is exchanged")
            .rank_bytes as f64;
        // A ring sends each rank's share 2 (n - 1) times.
        let rounds = 2.0 * (ranks - 1.0);
        close(costs.node(&split, node), per_byte * rounds * bytes / ranks);
    }
}

/// A graph with an all-reduce of 16 numbers over the tensor axis.
fn summing() -> Graph {
    let mut graph = Graph::new();
    let x = graph.add_input("x", TensorType::new([4, 4], DType::F32));
    let sum = Op::AllReduce {
        axis: Axis::Tensor,
        op: Reduction::Sum,
    };
    let summed = graph.add_node(&"".into(), sum, vec![x]);
    graph.add_output("y", summed.expect("the types fit")[0]);
    graph
}

#[test]
fn replicas_exchange_gradients_and_weights_as_their_stage_of_zero_does() {
    let replicas = 4;
    let divided = |bytes| Share {
        bytes,
        ranks: replicas,
    };
    let whole = ParamBytes::default();
    let stage_1 = ParamBytes {
        state: divided(8),
        ..whole
    };
    let stage_2 = ParamBytes {
        gradient: divided(4),
        ..stage_1
    };
    let stage_3 = ParamBytes {
        weight_ranks: replicas,
        ..stage_2
    };
    let elements = 1000;
    // One pass over 4 bytes an element by a ring of four: three of its four parts.
    let pass = 4.0 * elements as f64 * 3.0 / 4.0 * 10.0;
    // Three microbatches: stage 2 reduces each, stage 3 gathers for each forward and backward too.
    for (kept, passes) in [(whole, 2.0), (stage_1, 2.0), (stage_2, 4.0), (stage_3, 9.0)] {
        let costs = costs(&cluster(), [replicas, 1, 1, 1], kept);
        let update = costs.update(elements, 0).expect("times are known");
        close(update, passes * pass);
    }
    // Both ways for weight and state, once for the gradient; weights of 16 bits have a master too.
    let memory = Cluster {
        memory_bytes_per_s: 1.0,
        ..cluster()
    };
    for (weight_bytes, expected) in [(4, 28.0), (2, 32.0)] {
        let alone = memory.costs(degrees([1; 4]), 3, whole, weight_bytes);
        let alone = alone.expect("no degree is 0").update(elements, 0);
        close(alone.expect("times are known"), 1000.0 * expected);
    }
    let tied = costs(&cluster(), [1, 1, 2, 1], whole).update(elements, 10);
    close(tied.expect("times are known"), 40.0);
}

#[test]
fn a_description_is_read_by_its_keys_and_refused_with_what_is_wrong() {
    let keys = [
        ("ranks_per_host", 8.0),
        ("memory_bytes", 8e10),
        ("flops_per_s", 5e14),
        ("memory_bytes_per_s", 3e12),
        ("inside.latency_s", 5e-6),
        ("inside.bytes_per_s", 3e11),
        ("between.latency_s", 1e-5),
        ("between.bytes_per_s", 4e10),
    ];
    let numbers = || -> BTreeMap<String, f64> {
        let keys = keys.into_iter();
        keys.map(|(key, number)| (key.to_owned(), number)).collect()
    };
    let read = Cluster::of(&numbers()).expect("it is complete");
    assert_eq!(
        (read.ranks_per_host, read.memory_bytes),
        (8, 80_000_000_000)
    );
    assert_eq!(read.node_latency_s.to_bits(), 0.0_f64.to_bits());
    assert_eq!(read.between.bytes_per_s.to_bits(), 4e10_f64.to_bits());
    let refused = |key: &str, number: Option<f64>| {
        let mut numbers = numbers();
        match number {
            Some(number) => drop(numbers.insert(key.to_owned(), number)),
            None => drop(numbers.remove(key)),
        }
        Cluster::of(&numbers).expect_err("it is wrong").to_string()
    };
    assert_snapshot!(refused("flop_per_s", Some(1.0)), @r#"a cluster has no flop_per_s; did you mean "flops_per_s"?"#);
    assert_snapshot!(refused("inside.bytes_per_s", None), @"inside.bytes_per_s is missing");
    assert_snapshot!(refused("ranks_per_host", Some(1.5)), @"ranks_per_host is 1.5, expected a number that is whole and at least 1");
    assert_snapshot!(refused("flops_per_s", Some(0.0)), @"flops_per_s is 0, expected a number that is above 0");
    assert_snapshot!(refused("between.latency_s", Some(-1.0)), @"between.latency_s is -1, expected a number that is at least 0");
    assert_snapshot!(refused("memory_bytes", Some(f64::INFINITY)), @"memory_bytes is inf, expected a number that is above 0");
}
