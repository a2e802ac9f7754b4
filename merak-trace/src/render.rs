//! Graphs as text, Graphviz and JSON.

use crate::{Graph, Node, Op, Port, ValueId};
use serde_json::{Value as Json, json};
use std::fmt::Write as _;

/// How a graph is written out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One line per node, with types and module paths.
    Text,
    /// Graphviz, one cluster per module.
    Dot,
    /// Nodes, values and parameters as objects.
    Json,
}

/// Writes a graph in the given format.
///
/// ```
/// use merak_trace::{DType, TensorType, fx, render};
/// let graph = fx::trace(DType::F32, |module| {
///     let x = module.input("x", TensorType::new([2], DType::F32));
///     let y = module.sub("double").add(&x, &x)?;
///     module.output("y", &y);
///     Ok(())
/// })?;
/// let text = render::graph(&graph, render::Format::Text);
/// assert!(text.contains("%1: f32[2] = add(%0, %0)"));
/// # Ok::<(), merak_trace::Error>(())
/// ```
pub fn graph(graph: &Graph, format: Format) -> String {
    match format {
        Format::Text => text(graph),
        Format::Dot => dot(graph),
        Format::Json => format!("{:#}", to_json(graph)),
    }
}

fn text(graph: &Graph) -> String {
    let mut out = String::new();
    let port = |kind: &str, Port { name, value }: &Port| {
        format!("{kind} {value}: {} = \"{name}\"\n", graph.ty(*value))
    };
    out.extend(graph.inputs().iter().map(|input| port("input ", input)));
    for node in graph.nodes() {
        let results: Vec<_> = node
            .outputs
            .iter()
            .map(|&id| format!("{id}: {}", graph.ty(id)))
            .collect();
        let operands: Vec<_> = node.inputs.iter().map(|&id| operand(graph, id)).collect();
        let line = format!(
            "{} = {}({})",
            results.join(", "),
            node.op.name(),
            operands.join(", ")
        );
        let _ = writeln!(
            out,
            "{line:<96} # {}",
            if node.scope.is_empty() {
                "(root)"
            } else {
                &node.scope
            }
        );
    }
    out.extend(graph.outputs().iter().map(|output| port("output", output)));
    let _ = writeln!(
        out,
        "# {} nodes, {} parameters with {} elements",
        graph.nodes().len(),
        graph.params().len(),
        graph.num_elements()
    );
    out
}

/// A parameter by its name and local type, another value by its number.
fn operand(graph: &Graph, id: ValueId) -> String {
    graph.param_of(id).map_or_else(
        || id.to_string(),
        |param| {
            let param = graph.param(param);
            format!("{}{:?}", param.name, param.local.shape)
        },
    )
}

fn dot(graph: &Graph) -> String {
    let mut out = String::from(
        "digraph model {\n  rankdir=TB;\n  node [shape=box, fontname=\"monospace\", fontsize=10];\n",
    );
    for port in graph.inputs() {
        let _ = writeln!(
            out,
            "  \"{}\" [shape=ellipse, label=\"{}\\n{}\"];",
            port.value,
            escape(&port.name),
            graph.ty(port.value)
        );
    }
    for node in graph.nodes() {
        let ty = node
            .outputs
            .first()
            .map(|&id| graph.ty(id).to_string())
            .unwrap_or_default();
        let style = if node.op.communicates().is_some() {
            ", style=filled, fillcolor=lightgoldenrod"
        } else {
            ""
        };
        let _ = writeln!(
            out,
            "  \"{}\" [label=\"{}\\n{}\\n{ty}\"{style}];",
            escape(&node.name),
            node.op.name(),
            escape(&node.scope)
        );
        for &input in &node.inputs {
            if let Some(from) = source_name(graph, input) {
                let _ = writeln!(
                    out,
                    "  \"{}\" -> \"{}\";",
                    escape(&from),
                    escape(&node.name)
                );
            }
        }
    }
    for port in graph.outputs() {
        if let Some(from) = source_name(graph, port.value) {
            let _ = writeln!(
                out,
                "  \"output {}\" [shape=ellipse];\n  \"{}\" -> \"output {0}\";",
                escape(&port.name),
                escape(&from)
            );
        }
    }
    out.push_str("}\n");
    out
}

/// The drawn box that a value comes from; parameters have none.
fn source_name(graph: &Graph, value: ValueId) -> Option<String> {
    if graph.param_of(value).is_some() {
        return None;
    }
    Some(graph.producer(value).map_or_else(
        || value.to_string(),
        |node| graph.node(node).name.to_string(),
    ))
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

/// A graph as an object with the lists `inputs`, `params`, `nodes` and `outputs`.
pub fn to_json(graph: &Graph) -> Json {
    let port = |port: &Port| json!({ "name": port.name, "value": port.value, "type": graph.ty(port.value) });
    json!({
        "inputs": graph.inputs().iter().map(port).collect::<Vec<_>>(),
        "params": graph.params(),
        "nodes": graph.nodes().iter().map(|node| node_json(graph, node)).collect::<Vec<_>>(),
        "outputs": graph.outputs().iter().map(port).collect::<Vec<_>>(),
    })
}

fn node_json(graph: &Graph, node: &Node) -> Json {
    let attributes = match serde_json::to_value(&node.op) {
        Ok(Json::Object(mut map)) => map.values_mut().next().map_or(Json::Null, Json::take),
        _ => Json::Null,
    };
    let operands: Vec<_> = node
        .inputs
        .iter()
        .map(|&id| {
            graph
                .param_of(id)
                .map_or(json!(id), |p| json!(graph.param(p).name))
        })
        .collect();
    json!({
        "name": &*node.name,
        "scope": &*node.scope,
        "op": Op::name(&node.op),
        "attributes": attributes,
        "inputs": operands,
        "outputs": node.outputs.iter().map(|&id| json!({ "value": id, "type": graph.ty(id) })).collect::<Vec<_>>(),
    })
}
