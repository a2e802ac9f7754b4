//! What a pickle can make, and the few names that it may mention.

use super::Outcome;
use crate::{DType, format};

/// A value on the stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::hf) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    /// A whole number beyond 64 bits, which is never read.
    Wide,
    Text(&'a str),
    /// A list or tuple: its place in the arena.
    Items(usize),
    Dict(usize),
    Storage(usize),
    Tensor(usize),
    /// An object of a class: its place in the arena.
    Object(usize),
    /// An element type; none where it is one that this crate does not know.
    DType(Option<DType>),
    Callable(Callable),
}

/// What a pickle is for, which decides the names that it may mention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::hf) enum Purpose {
    /// A table of tensors, as `torch.save` writes it.
    Tensors,
    /// The `.metadata` of a folder of `torch.distributed.checkpoint`.
    Index,
}

/// What a pickle may call, and the names of types that it may mention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::hf) enum Callable {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    StorageType(DType),
    /// Makes a tuple of a tuple.
    Size,
    /// A call whose result is never read: nothing is called.
    Inert,
    Class(Class),
}

/// Classes of objects that are attributes and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::hf) enum Class {
    Metadata,
    Tensor,
    Bytes,
    Chunk,
    Properties,
    /// The name of an item, and for a tensor which part of it.
    Key,
    /// Where an item lies.
    Place,
    Other,
}

/// An object: its class, and its attributes, a dictionary or a tuple.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object<'a> {
    pub(super) class: Class,
    pub(super) state: Value<'a>,
}

/// Bytes that tensors are views of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::hf) struct Storage<'a> {
    pub(in crate::hf) key: &'a str,
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

/// Most attributes of an object. Its class has fewer; the limit bounds the search, since any number
/// of names may stand for one object.
const MAX_ATTRIBUTES: usize = 32;

/// What a pickle has made.
#[derive(Debug)]
pub(in crate::hf) struct Heap<'a> {
    /// Bytes that may still be taken, and the limit at the start.
    left: usize,
    limit: usize,
    pub(super) items: Vec<Vec<Value<'a>>>,
    pub(super) dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    pub(super) objects: Vec<Object<'a>>,
    pub(in crate::hf) storages: Vec<Storage<'a>>,
    pub(in crate::hf) views: Vec<View>,
}

impl<'a> Heap<'a> {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            left: limit,
            limit,
            items: Vec::new(),
            dicts: Vec::new(),
            objects: Vec::new(),
            storages: Vec::new(),
            views: Vec::new(),
        }
    }

    /// Counts memory that is about to be taken.
    ///
    /// # Errors
    /// Where that is more than the limit.
    pub(in crate::hf) fn spend(&mut self, bytes: usize) -> Outcome<()> {
        let left = self.left.checked_sub(bytes);
        self.left = left.ok_or_else(|| {
            format!(
                "its table takes more than {} bytes of memory: raise the limit (--max-memory)",
                self.limit
            )
        })?;
        Ok(())
    }

    /// The attribute of an object of this class; none where the object has more than
    /// `MAX_ATTRIBUTES`.
    pub(in crate::hf) fn attribute(
        &self,
        value: Value<'a>,
        class: Class,
        name: &str,
    ) -> Option<Value<'a>> {
        let Value::Object(index) = value else {
            return None;
        };
        let object = self.objects[index];
        let is_one = |(key, _): &&(Value<'a>, Value<'a>)| *key == Value::Text(name);
        let entries = self.dict(object.state).filter(|_| object.class == class)?;
        let entries = Some(entries).filter(|entries| entries.len() <= MAX_ATTRIBUTES)?;
        entries.iter().rev().find(is_one).map(|(_, value)| *value)
    }

    /// The attributes of an object of this class whose state is a tuple.
    pub(in crate::hf) fn attributes(&self, value: Value<'a>, class: Class) -> Option<&[Value<'a>]> {
        let Value::Object(index) = value else {
            return None;
        };
        let object = self.objects[index];
        self.items(object.state).filter(|_| object.class == class)
    }

    /// Whether it is an object of this class.
    pub(in crate::hf) fn is_a(&self, value: Value<'a>, class: Class) -> bool {
        matches!(value, Value::Object(index) if self.objects[index].class == class)
    }

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

    pub(in crate::hf) fn sizes(&self, value: Value<'a>) -> Outcome<Vec<usize>> {
        let items = self.items(value).ok_or("a shape is no tuple")?;
        let (ndim, limit) = (items.len(), format::MAX_NDIM);
        if ndim > limit {
            return Err(format!("a shape has {ndim} dims, the limit is {limit}"));
        }
        items.iter().map(|&item| size(item)).collect()
    }
}

/// The value that a name stands for; an error for a name that is not allowed.
pub(super) fn callable<'a>(purpose: Purpose, module: &str, name: &str) -> Outcome<Value<'a>> {
    let found = match purpose {
        Purpose::Tensors => of_tensors(module, name).map(Value::Callable),
        Purpose::Index => of_index(module, name),
    };
    found.ok_or_else(|| {
        let shown: String = format!("{module}.{name}").chars().take(80).collect();
        let what = match purpose {
            Purpose::Tensors => "table of tensors",
            Purpose::Index => "index of a distributed checkpoint",
        };
        format!("it asks for `{shown}`, which no {what} needs")
    })
}

fn of_tensors(module: &str, name: &str) -> Option<Callable> {
    let dtype = match (module, name) {
        ("collections", "OrderedDict") => return Some(Callable::OrderedDict),
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => {
            return Some(Callable::RebuildTensor);
        }
        ("torch._utils", "_rebuild_parameter") => return Some(Callable::RebuildParameter),
        ("torch", "DoubleStorage") => DType::F64,
        ("torch", "FloatStorage") => DType::F32,
        ("torch", "BFloat16Storage") => DType::BF16,
        ("torch", "HalfStorage") => DType::F16,
        ("torch", "LongStorage") => DType::I64,
        ("torch", "IntStorage") => DType::I32,
        ("torch", "ShortStorage") => DType::I16,
        ("torch", "CharStorage") => DType::I8,
        ("torch", "ByteStorage") => DType::U8,
        ("torch", "BoolStorage") => DType::Bool,
        _ => return None,
    };
    Some(Callable::StorageType(dtype))
}

fn of_index<'a>(module: &str, name: &str) -> Option<Value<'a>> {
    let class = match (module, name) {
        ("torch.distributed.checkpoint.metadata", class) => match class {
            "Metadata" => Class::Metadata,
            "TensorStorageMetadata" => Class::Tensor,
            "BytesStorageMetadata" => Class::Bytes,
            "ChunkStorageMetadata" => Class::Chunk,
            "TensorProperties" => Class::Properties,
            "MetadataIndex" => Class::Key,
            "StorageMeta" => Class::Other,
            "_MEM_FORMAT_ENCODING" => return Some(Value::Callable(Callable::Inert)),
            _ => return None,
        },
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo") => Class::Place,
        ("torch", "Size") => return Some(Value::Callable(Callable::Size)),
        ("torch", name) => {
            let found = dtype(name);
            return (found.is_some() || is_other_dtype(name)).then_some(Value::DType(found));
        }
        ("collections", "OrderedDict") => return Some(Value::Callable(Callable::OrderedDict)),
        ("torch.serialization", "_get_layout")
        | (
            "pathlib" | "pathlib._local",
            "PosixPath" | "WindowsPath" | "PurePosixPath" | "PureWindowsPath",
        ) => return Some(Value::Callable(Callable::Inert)),
        _ => return None,
    };
    Some(Value::Callable(Callable::Class(class)))
}

/// The element type that torch has under this name.
fn dtype(name: &str) -> Option<DType> {
    Some(match name {
        "float64" => DType::F64,
        "float32" => DType::F32,
        "bfloat16" => DType::BF16,
        "float16" => DType::F16,
        "int64" => DType::I64,
        "int32" => DType::I32,
        "int16" => DType::I16,
        "int8" => DType::I8,
        "uint64" => DType::U64,
        "uint32" => DType::U32,
        "uint16" => DType::U16,
        "uint8" => DType::U8,
        "bool" => DType::Bool,
        _ => return None,
    })
}

/// Whether torch has an element type of this name that files of ours cannot have.
fn is_other_dtype(name: &str) -> bool {
    const STARTS: [&str; 4] = ["complex", "quint", "qint", "float"];
    STARTS.iter().any(|start| name.starts_with(start))
}

/// A size or offset.
pub(in crate::hf) fn size(value: Value<'_>) -> Outcome<usize> {
    match value {
        Value::Int(value) => {
            usize::try_from(value).map_err(|_| format!("a size or offset is {value}"))
        }
        _ => Err("a size or offset is no whole number".to_owned()),
    }
}
