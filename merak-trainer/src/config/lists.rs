//! Entries of the lists of layers that tensor parallelism splits.

use merak_tp::Mapping;
use serde_json::{Value, json};

use super::{range::Range, refusal::Refusal, setting::Setting};

/// Linear layers by the ratio of their input to their output features, and how they are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitRatio(pub Mapping);

impl Setting for SplitRatio {
    fn expected(_: Range) -> String {
        r#"inputs, outputs and "col" or "row", as [1, 3, "col"]"#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let mapping = serde_json::from_value::<Mapping>(value.clone()).ok();
        let counts = mapping.filter(|mapping| mapping.input > 0 && mapping.output > 0);
        counts.map(Self).ok_or(Refusal::Type)
    }

    fn to_value(&self) -> Value {
        let Mapping {
            input,
            output,
            kind,
        } = self.0;
        json!([input, output, kind.to_string()])
    }
}

/// A layer or parameter of which each rank keeps a slice, and the dimension that is sliced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSlice(pub String, pub usize);

impl Setting for WeightSlice {
    fn expected(_: Range) -> String {
        r#"a name and a dimension, as ["relative_attention_bias", 1]"#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let Some([name, dim]) = value.as_array().map(Vec::as_slice) else {
            return Err(Refusal::Type);
        };
        let name = name.as_str().ok_or(Refusal::Type)?;
        Ok(Self(name.to_owned(), usize::from_value(dim)?))
    }

    fn to_value(&self) -> Value {
        json!([self.0, self.1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_they_are_written() {
        let ratios = Vec::<SplitRatio>::from_text(r#"[[1, 3, "col"], [4, 1, "row"]]"#).unwrap();
        assert_eq!(ratios.to_value(), json!([[1, 3, "col"], [4, 1, "row"]]));
        let slices = Vec::<WeightSlice>::from_text(r#"[["wpe", 1]]"#).unwrap();
        assert_eq!(slices, [WeightSlice("wpe".into(), 1)]);
        for wrong in [r#"[[1, 3, "both"]]"#, r#"[[0, 3, "col"]]"#, "[[1, 3]]", "1"] {
            assert_eq!(
                Vec::<SplitRatio>::from_text(wrong),
                Err(Refusal::Type),
                "{wrong}"
            );
        }
        for wrong in [r#"[["wpe"]]"#, r#"[["wpe", -1]]"#, r#"[[1, "wpe"]]"#] {
            assert_eq!(
                Vec::<WeightSlice>::from_text(wrong),
                Err(Refusal::Type),
                "{wrong}"
            );
        }
    }
}
