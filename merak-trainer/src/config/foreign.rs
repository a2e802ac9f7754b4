//! Keys whose type belongs to the crate that acts on it.

use merak_mpu::EngineKind;
use merak_partition::{PartitionMethod, RecomputeOp, ScheduleChoice, SplitMethod};
use merak_tp::SequenceMethod;
use merak_trace::{Overlap, Units};
use merak_zero::{LrSchedulerKwargs, LrSchedulerType, OptimizerKind, ZeroStage};
use serde_json::{Map, Value};

use super::{
    choice::{named_setting, one_of, refuse},
    range::Range,
    refusal::Refusal,
    setting::{Setting, whole},
};

named_setting!(
    EngineKind,
    OptimizerKind,
    PartitionMethod,
    RecomputeOp,
    SequenceMethod,
    SplitMethod
);

named_setting!(
    ScheduleChoice: Self::all().map(Self::as_str).collect::<Vec<_>>(),
    Self::from_name,
    &[]
);

named_setting!(
    LrSchedulerType: Self::ALL.map(Self::as_str),
    |text: &str| serde_json::from_value(Value::from(text)).ok(),
    &[]
);

// The most first.
named_setting!(
    Units: [Self::Matrix, Self::Vector, Self::None].map(Self::as_str),
    Self::from_name,
    &[]
);

/// `none` is stage 0.
impl Setting for ZeroStage {
    fn expected(_: Range) -> String {
        "0, 1, 2 or 3".into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match Option::<usize>::from_value(value)? {
            None | Some(0) => Ok(Self::Replicated),
            Some(1) => Ok(Self::OptimizerState),
            Some(2) => Ok(Self::Gradients),
            Some(3) => Ok(Self::Parameters),
            Some(_) => Err(Refusal::Type),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        Self::from_value(&Option::<usize>::from_text(text)?.to_value())
    }

    fn to_value(&self) -> Value {
        Value::from(u8::from(*self))
    }
}

const OVERLAPS: [Overlap; 4] = [
    Overlap::None,
    Overlap::Linear,
    Overlap::Block,
    Overlap::Blocks,
];

/// The level, 0 to 3.
impl Setting for Overlap {
    fn expected(_: Range) -> String {
        "0, 1, 2 or 3".into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let level = usize::from_value(value)?;
        OVERLAPS.get(level).copied().ok_or(Refusal::Type)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        Self::from_value(&usize::from_text(text)?.to_value())
    }

    fn to_value(&self) -> Value {
        OVERLAPS.iter().position(|overlap| overlap == self).into()
    }
}

/// The one parameter of learning-rate schedules that is no number, and what it may be.
const DECAY: &str = "decay_type";
const DECAYS: [&str; 3] = ["cosine", "linear", "1-sqrt"];

impl Setting for LrSchedulerKwargs {
    fn expected(_: Range) -> String {
        let entries = Self::NUMBERS.map(|entry| format!("`{}` ({})", entry.name, entry.expected));
        let entries = entries.join(", ");
        format!("a table of {entries}, `{DECAY}` ({})", one_of(&DECAYS))
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let table = value.as_object().ok_or(Refusal::Type)?;
        let names = || Self::NUMBERS.iter().map(|entry| entry.name).chain([DECAY]);
        if let Some(unknown) = table
            .keys()
            .find(|name| !names().any(|known| known == *name))
        {
            return Err(refuse(unknown, names(), &[]));
        }
        let mut numbers = Map::new();
        for entry in Self::NUMBERS {
            let Some(value) = table.get(entry.name).filter(|value| !value.is_null()) else {
                continue;
            };
            let integer = whole(value).and_then(|number| u64::try_from(number).ok());
            let is_legal = value.as_f64().is_some_and(|number| entry.allows(number));
            let number = integer.map(Value::from).filter(|_| entry.is_whole);
            let number = number.or_else(|| (!entry.is_whole).then(|| value.clone()));
            let number = number.filter(|_| is_legal).ok_or_else(|| Refusal::Entry {
                name: entry.name,
                expected: entry.expected.into(),
                found: value.clone(),
            })?;
            numbers.insert(entry.name.into(), number);
        }
        if let Some(decay) = table.get(DECAY).filter(|value| !value.is_null()) {
            let name = decay.as_str().ok_or_else(|| Refusal::Entry {
                name: DECAY,
                expected: one_of(&DECAYS),
                found: decay.clone(),
            })?;
            if !DECAYS.contains(&name) {
                return Err(refuse(name, DECAYS.into_iter(), &[]));
            }
            numbers.insert(DECAY.into(), decay.clone());
        }
        serde_json::from_value(Value::Object(numbers)).map_err(|_| Refusal::Type)
    }

    fn to_value(&self) -> Value {
        let mut table = serde_json::to_value(self).expect("a struct of numbers is JSON");
        if let Some(table) = table.as_object_mut() {
            table.retain(|_, value| !value.is_null());
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn zero_stage_none_is_stage_0() {
        assert_eq!(ZeroStage::from_text("none"), Ok(ZeroStage::Replicated));
        assert_eq!(
            ZeroStage::from_value(&json!(1.0)),
            Ok(ZeroStage::OptimizerState)
        );
        assert_eq!(ZeroStage::from_text("3"), Ok(ZeroStage::Parameters));
        assert_eq!(ZeroStage::from_text("4"), Err(Refusal::Type));
    }

    #[test]
    fn a_second_name_of_a_schedule_means_the_same() {
        let critical_path = ScheduleChoice::from_text("full_critical_path_1f1b");
        let shifted = ScheduleChoice::Named(merak_pipe::ScheduleKind::ShiftedCriticalPath);
        assert_eq!(critical_path, Ok(shifted));
        assert_eq!(
            LrSchedulerType::from_text("warmup_stable_decay"),
            Ok(LrSchedulerType::Wsd)
        );
        assert!(matches!(
            ScheduleChoice::from_text("inference"),
            Err(Refusal::Choice { .. })
        ));
    }

    #[test]
    fn scheduler_parameters_are_read_back_without_those_unset() {
        let value = json!({"num_decay_steps": 5.0, "decay_type": "linear"});
        let kwargs = LrSchedulerKwargs::from_value(&value).unwrap();
        assert_eq!(kwargs.num_decay_steps, Some(5));
        assert_eq!(
            kwargs.to_value(),
            json!({"num_decay_steps": 5, "decay_type": "linear"})
        );
        for (value, name) in [
            (json!({"num_cycle": 1}), "num_cycles"),
            (json!({"decay_type": "lineal"}), "linear"),
        ] {
            let refused = LrSchedulerKwargs::from_value(&value);
            let nearest = |refusal: &Refusal| matches!(refusal, Refusal::Choice { nearest, .. } if nearest.as_deref() == Some(name));
            assert!(refused.as_ref().is_err_and(nearest), "{refused:?}");
        }
        assert!(LrSchedulerKwargs::from_value(&json!({ "decay_type": "linear" })).is_ok());
        for entry in LrSchedulerKwargs::NUMBERS {
            let name = entry.name;
            assert!(LrSchedulerKwargs::from_value(&json!({ name: 1 })).is_ok());
            for wrong in [json!(-2), json!("x"), json!([1])] {
                let refused = LrSchedulerKwargs::from_value(&json!({ name: wrong }));
                let is_named = |refusal: &Refusal| matches!(refusal, Refusal::Entry { name, .. } if *name == entry.name);
                assert!(refused.as_ref().is_err_and(is_named), "{refused:?}");
            }
            let half = LrSchedulerKwargs::from_value(&json!({ name: 0.5 }));
            assert_eq!(half.is_ok(), !entry.is_whole, "{name}");
        }
    }
}
