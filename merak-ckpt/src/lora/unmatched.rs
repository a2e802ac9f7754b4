//! Names among the `target_modules` that no layer has.

use super::config::{ALL_LINEAR, Names, ends_with};
use crate::words::brief;
use merak_mpu::names::{did_you_mean, nearest};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt;

/// A name in a list of `target_modules` that no layer has, while layers have another one; prints as
/// a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnmatchedTarget {
    /// The name.
    pub name: String,
    /// The end of a layer's name that it probably means, if any is similar.
    pub nearest: Option<String>,
}

impl UnmatchedTarget {
    /// Those of the targets that were given, in a model with these layers.
    pub(super) fn all(targets: Option<&Names>, layers: &[&str]) -> Vec<Self> {
        let Some(Names::Listed(names)) = targets else {
            return Vec::new();
        };
        let is_unmatched = |name: &&String| !layers.iter().any(|layer| ends_with(layer, name));
        let unmatched = names.iter().filter(is_unmatched);
        let told = unmatched.map(|name| Self {
            name: name.clone(),
            nearest: nearest_end(name, layers).map(str::to_owned),
        });
        told.collect()
    }
}

impl fmt::Display for UnmatchedTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hint = match nearest(&self.name, [ALL_LINEAR]) {
            Some(text) => in_place_of_the_list(text),
            None => did_you_mean(self.nearest.as_deref()),
        };
        let name = brief(&self.name);
        write!(f, "no layer is \"{name}\" of the `target_modules`{hint}")
    }
}

/// What a message about targets that no layer is ends with: `all-linear`, which is no name in a
/// list, where it was probably meant.
pub(super) fn all_linear_hint(targets: &Value) -> String {
    let meant = |name: &str| nearest(name, [ALL_LINEAR]);
    match targets {
        Value::Array(names) => {
            let mut names = names.iter().filter_map(Value::as_str);
            match names.find_map(meant) {
                Some(text) => in_place_of_the_list(text),
                None => String::new(),
            }
        }
        text => did_you_mean(text.as_str().and_then(meant)),
    }
}

fn in_place_of_the_list(text: &str) -> String {
    format!("; did you mean \"{text}\" in place of the list?")
}

/// The end of a layer's name with as many parts as `name` that is most like it.
fn nearest_end<'a>(name: &str, layers: &[&'a str]) -> Option<&'a str> {
    let dots = name.matches('.').count();
    let end = |layer: &'a str| {
        let before = layer.rmatch_indices('.').nth(dots);
        before.map_or(layer, |(dot, _)| &layer[dot + 1..])
    };
    let ends: BTreeSet<_> = layers.iter().copied().map(end).collect();
    nearest(name, ends)
}
