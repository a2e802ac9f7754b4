//! Readable names of the modules that a stage runs.

use merak_trace::Graph;
use std::{collections::BTreeMap, ops::Range};

/// For each module path of a graph and the paths above it, the range of nodes below it.
pub(super) struct ModuleRanges<'a>(BTreeMap<&'a str, Range<usize>>);

impl<'a> ModuleRanges<'a> {
    pub(super) fn of(graph: &'a Graph) -> Self {
        let mut ranges: BTreeMap<&str, Range<usize>> = BTreeMap::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            for path in prefixes(&node.scope) {
                ranges.entry(path).or_insert(index..index).end = index + 1;
            }
        }
        Self(ranges)
    }

    /// The largest modules that lie within a range of nodes, lists of layers folded.
    ///
    /// A module that reaches beyond the range is listed only if the range reads parameters of the
    /// module itself; the glue between its children is left out.
    pub(super) fn names(&self, graph: &'a Graph, nodes: Range<usize>) -> Vec<String> {
        let mut names: Vec<&str> = Vec::new();
        let mut glue: Vec<&str> = Vec::new();
        for node in &graph.nodes()[nodes.clone()] {
            let whole = prefixes(&node.scope)
                .find(|path| self.is_within(path, &nodes) && !self.is_list(path));
            let has_params = node
                .inputs
                .iter()
                .any(|&input| graph.param_of(input).is_some());
            match whole {
                Some(path) => push_new(&mut names, path),
                None if has_params => push_new(&mut names, &node.scope),
                None => push_new(&mut glue, &node.scope),
            }
        }
        fold(if names.is_empty() { &glue } else { &names })
    }

    fn is_within(&self, path: &str, nodes: &Range<usize>) -> bool {
        let below = &self.0[path];
        nodes.start <= below.start && below.end <= nodes.end
    }

    /// Whether the children of a module are numbered.
    fn is_list(&self, path: &str) -> bool {
        let below = format!("{path}.");
        let next = self.0.range(&*below..).next();
        next.and_then(|(child, _)| child.strip_prefix(&*below))
            .is_some_and(|child| number(child.split('.').next().unwrap_or(child)).is_some())
    }
}

fn push_new<'a>(names: &mut Vec<&'a str>, name: &'a str) {
    if !names.contains(&name) {
        names.push(name);
    }
}

/// A path and the paths above it, shortest first; none for the root.
fn prefixes(path: &str) -> impl Iterator<Item = &str> {
    let above = path.match_indices('.').map(|(dot, _)| &path[..dot]);
    above.chain(Some(path).filter(|path| !path.is_empty()))
}

fn number(component: &str) -> Option<usize> {
    component.parse().ok()
}

/// Neighbours `h.0`, `h.1`, `h.2` become `h.0-2`; the parts `h.3.ln_1`, `h.3.attn` become
/// `h.3.{ln_1, attn}`.
fn fold(names: &[&str]) -> Vec<String> {
    let mut folded: Vec<Fold<'_>> = Vec::new();
    for name in names {
        let next = Fold::new(name);
        if !folded.last_mut().is_some_and(|last| last.takes(&next)) {
            folded.push(next);
        }
    }
    folded.iter().map(Fold::name).collect()
}

/// Neighbours of one parent.
struct Fold<'a> {
    parent: &'a str,
    children: Vec<&'a str>,
}

impl<'a> Fold<'a> {
    fn new(name: &'a str) -> Self {
        let (parent, child) = name.rsplit_once('.').unwrap_or(("", name));
        Self {
            parent,
            children: vec![child],
        }
    }

    fn takes(&mut self, next: &Self) -> bool {
        let (last, child) = (self.children[self.children.len() - 1], next.children[0]);
        let follows = number(child).is_some_and(|n| n.checked_sub(1) == number(last) && n > 0);
        let is_part = |name| number(name).is_none();
        let of_one_layer = self.parent.rsplit('.').next().and_then(number).is_some()
            && is_part(last)
            && is_part(child);
        let takes = self.parent == next.parent && (follows || of_one_layer);
        if takes {
            self.children.push(child);
        }
        takes
    }

    fn name(&self) -> String {
        let (first, last) = (self.children[0], self.children[self.children.len() - 1]);
        let dot = if self.parent.is_empty() { "" } else { "." };
        match self.children.len() {
            1 if first.is_empty() => "(root)".to_owned(),
            1 => format!("{}{dot}{first}", self.parent),
            _ if number(first).is_some() => format!("{}{dot}{first}-{last}", self.parent),
            _ => format!("{}{dot}{{{}}}", self.parent, self.children.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_fold_into_ranges_and_parts_of_a_layer_into_braces() {
        let names = [
            "wte", "h.0", "h.1", "h.2", "h.3.ln_1", "h.3.attn", "h.5", "ln_f",
        ];
        assert_eq!(
            fold(&names),
            ["wte", "h.0-2", "h.3.{ln_1, attn}", "h.5", "ln_f"]
        );
        assert_eq!(
            fold(&["h.9", "h.10", "g.11", "0", "1"]),
            ["h.9-10", "g.11", "0-1"]
        );
        assert_eq!(fold(&[""]), ["(root)"]);
    }

    #[test]
    fn the_paths_above_a_path_are_its_whole_components() {
        assert_eq!(
            prefixes("a.bc.d").collect::<Vec<_>>(),
            ["a", "a.bc", "a.bc.d"]
        );
        assert_eq!(prefixes("").count(), 0);
    }
}
