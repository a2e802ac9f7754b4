//! Keys that name the data: paths, and paths with weights.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{
    range::Range,
    refusal::Refusal,
    setting::{InputPath, Setting},
    strict,
};

/// One or several files and folders, which are read in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputPaths(Vec<InputPath>);

impl InputPaths {
    /// The paths, at least one.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.0.iter().map(|path| &*path.0)
    }

    /// The first path.
    pub fn first(&self) -> &Path {
        &self.0[0].0
    }

    /// How many paths there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl From<PathBuf> for InputPaths {
    fn from(path: PathBuf) -> Self {
        Self(vec![InputPath(path)])
    }
}

impl Setting for InputPaths {
    const IS_LIST: bool = true;

    fn expected(_: Range) -> String {
        "a path or a list of paths".into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let Value::Array(items) = value else {
            return Ok(Self(vec![InputPath::from_value(value)?]));
        };
        let paths: Vec<_> = items
            .iter()
            .map(InputPath::from_value)
            .collect::<Result<_, _>>()?;
        if paths.is_empty() {
            return Err(Refusal::Type);
        }
        Ok(Self(paths))
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        if text.trim_start().starts_with('[') {
            return Self::from_value(&strict::parse_text(text)?);
        }
        // A name may have commas in it: what is there under the whole name is one path.
        if !text.contains(',') || Path::new(text).exists() {
            return InputPath::from_text(text).map(|path| Self(vec![path]));
        }
        let paths = Vec::from_text(text)?;
        if paths.is_empty() {
            return Err(Refusal::Type);
        }
        Ok(Self(paths))
    }

    fn to_value(&self) -> Value {
        match &self.0[..] {
            [one] => one.to_value(),
            many => many.iter().map(InputPath::to_value).collect(),
        }
    }

    fn rebase(&mut self, base: &Path) {
        self.0.iter_mut().for_each(|path| path.rebase(base));
    }
}

/// Paths, each with its share of the samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture(Vec<MixturePart>);

/// One part of a mixture.
#[derive(Debug, Clone, PartialEq)]
pub struct MixturePart {
    /// What is read.
    pub path: InputPaths,
    /// Its share of the samples by the sum of all weights; more than 0.
    pub weight: f64,
}

/// The entries of a part.
const ENTRIES: [&str; 2] = ["path", "weight"];

impl Mixture {
    /// The parts, at least one.
    pub fn parts(&self) -> &[MixturePart] {
        &self.0
    }
}

impl MixturePart {
    fn from_table(table: &Map<String, Value>) -> Result<Self, Refusal> {
        if let Some(unknown) = table.keys().find(|name| !ENTRIES.contains(&&***name)) {
            return Err(super::choice::refuse(unknown, ENTRIES.into_iter(), &[]));
        }
        let entry = |name: &'static str, expected: String| {
            let found = table.get(name).cloned().unwrap_or(Value::Null);
            Refusal::Entry {
                name,
                expected,
                found,
            }
        };
        let path = table.get("path").map(InputPaths::from_value);
        let path = path
            .and_then(Result::ok)
            .ok_or_else(|| entry("path", InputPaths::expected(Range::ANY)))?;
        let weight = table.get("weight").and_then(Value::as_f64);
        let weight = weight
            .filter(|weight| *weight > 0.0 && weight.is_finite())
            .ok_or_else(|| entry("weight", "a number of more than 0".into()))?;
        Ok(Self { path, weight })
    }
}

impl Setting for Mixture {
    const IS_LIST: bool = true;

    fn expected(_: Range) -> String {
        r#"a list of tables such as { path = "a.txt", weight = 0.7 }, outside of a file [{"path":"a.txt","weight":0.7}]"#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let parts = value.as_array().ok_or(Refusal::Type)?;
        if parts.is_empty() {
            return Err(Refusal::Type);
        }
        let part = |part: &Value| MixturePart::from_table(part.as_object().ok_or(Refusal::Type)?);
        parts.iter().map(part).collect::<Result<_, _>>().map(Self)
    }

    fn to_value(&self) -> Value {
        let part = |part: &MixturePart| {
            let (path, weight) = (part.path.to_value(), part.weight.to_value());
            Value::Object(
                [("path".into(), path), ("weight".into(), weight)]
                    .into_iter()
                    .collect(),
            )
        };
        self.0.iter().map(part).collect()
    }

    fn rebase(&mut self, base: &Path) {
        self.0.iter_mut().for_each(|part| part.path.rebase(base));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_are_one_or_many_and_what_is_there_under_a_name_with_commas_is_one() {
        let names = |paths: &InputPaths| -> Vec<String> {
            let names = paths.iter().map(|path| path.display().to_string());
            names.collect()
        };
        let commas = InputPaths::from_text("a, b").unwrap();
        assert_eq!(names(&commas), ["a", "b"]);
        assert_eq!(InputPaths::from_text(","), Err(Refusal::Type));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a,b").display().to_string();
        std::fs::write(&path, "").unwrap();
        assert_eq!(names(&InputPaths::from_text(&path).unwrap()), [path]);
        // A file of the configuration has lists of its own.
        let one = InputPaths::from_value(&json!("c,d")).unwrap();
        assert_eq!(names(&one), ["c,d"]);
        let mut two = InputPaths::from_text(r#"["a", "b"]"#).unwrap();
        assert_eq!(InputPaths::from_value(&two.to_value()).as_ref(), Ok(&two));
        two.rebase(Path::new("/base"));
        assert_eq!(names(&two), ["/base/a", "/base/b"]);
        assert_eq!(InputPaths::from_value(&json!([])), Err(Refusal::Type));
        assert_eq!(InputPaths::from_value(&json!([1])), Err(Refusal::Type));
    }

    #[test]
    fn a_mixture_has_paths_with_weights_above_zero() {
        let value = json!([{"path": "a", "weight": 0.25}, {"path": ["b", "c"], "weight": 2.0}]);
        let mixture = Mixture::from_value(&value).unwrap();
        assert_eq!(mixture.to_value(), value);
        assert_eq!(Mixture::from_text(&value.to_string()), Ok(mixture));
        for wrong in [0.0, -1.0] {
            let refused = Mixture::from_value(&json!([{"path": "a", "weight": wrong}]));
            let is_weight = matches!(&refused, Err(Refusal::Entry { name: "weight", .. }));
            assert!(is_weight, "{refused:?}");
        }
        let missing = Mixture::from_value(&json!([{"weight": 1}]));
        assert!(matches!(missing, Err(Refusal::Entry { name: "path", .. })));
        let unknown = Mixture::from_value(&json!([{"path": "a", "wieght": 1}]));
        assert!(matches!(
            unknown,
            Err(Refusal::Choice {
                nearest: Some(_),
                ..
            })
        ));
        for wrong in [json!([]), json!("a"), json!(["a"])] {
            assert_eq!(Mixture::from_value(&wrong), Err(Refusal::Type));
        }
    }
}
