//! What a pickle can make, and the few names that it may mention.

use super::Outcome;
use crate::DType;

/// A value on the stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::hf) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// A number of another kind, which no table of tensors looks at.
    Number,
    Text(&'a str),
    /// A list or tuple: its place in the arena.
    Items(usize),
    Dict(usize),
    Storage(usize),
    Tensor(usize),
    Callable(Callable),
}

/// What a pickle may call, and the names of types that it may mention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::hf) enum Callable {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    StorageType(DType),
}

/// Bytes that tensors are views of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::hf) struct Storage {
    pub(in crate::hf) key: String,
    pub(in crate::hf) dtype: DType,
    /// Elements.
    pub(in crate::hf) len: usize,
}

/// A view of a storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::hf) struct View {
    pub(in crate::hf) storage: usize,
    /// First element in the storage.
    pub(in crate::hf) offset: usize,
    pub(in crate::hf) shape: Vec<usize>,
    pub(in crate::hf) strides: Vec<usize>,
}

/// What a pickle has made.
#[derive(Debug, Default)]
pub(in crate::hf) struct Heap<'a> {
    pub(super) items: Vec<Vec<Value<'a>>>,
    pub(super) dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    pub(in crate::hf) storages: Vec<Storage>,
    pub(in crate::hf) views: Vec<View>,
}

impl<'a> Heap<'a> {
    /// The entries of a dictionary; a later entry of the same key has replaced the earlier one
    /// for Python, so callers look at the last.
    pub(in crate::hf) fn dict(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match value {
            Value::Dict(index) => Some(&self.dicts[index]),
            _ => None,
        }
    }

    /// The members of a list or tuple.
    pub(in crate::hf) fn items(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match value {
            Value::Items(index) => Some(&self.items[index]),
            _ => None,
        }
    }

    pub(super) fn sizes(&self, value: Value<'a>) -> Outcome<Vec<usize>> {
        let items = self.items(value).ok_or("a shape is no tuple")?;
        items.iter().map(|&item| size(item)).collect()
    }
}

/// What a name stands for, where it is one of the few.
pub(super) fn callable(module: &str, name: &str) -> Outcome<Callable> {
    let storage = |dtype| Ok(Callable::StorageType(dtype));
    match (module, name) {
        ("collections", "OrderedDict") => Ok(Callable::OrderedDict),
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => Ok(Callable::RebuildTensor),
        ("torch._utils", "_rebuild_parameter") => Ok(Callable::RebuildParameter),
        ("torch", "DoubleStorage") => storage(DType::F64),
        ("torch", "FloatStorage") => storage(DType::F32),
        ("torch", "BFloat16Storage") => storage(DType::BF16),
        ("torch", "HalfStorage") => storage(DType::F16),
        ("torch", "LongStorage") => storage(DType::I64),
        ("torch", "IntStorage") => storage(DType::I32),
        ("torch", "ShortStorage") => storage(DType::I16),
        ("torch", "CharStorage") => storage(DType::I8),
        ("torch", "ByteStorage") => storage(DType::U8),
        ("torch", "BoolStorage") => storage(DType::Bool),
        _ => {
            let shown: String = format!("{module}.{name}").chars().take(80).collect();
            Err(format!(
                "it asks for `{shown}`, which no table of tensors needs"
            ))
        }
    }
}

/// A size or offset.
pub(super) fn size(value: Value<'_>) -> Outcome<usize> {
    match value {
        Value::Int(value) => {
            usize::try_from(value).map_err(|_| format!("a size or offset is {value}"))
        }
        _ => Err("a size or offset is no whole number".to_owned()),
    }
}
