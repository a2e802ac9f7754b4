//! A pickle interpreter that knows tensors and plain containers, and runs nothing.
//!
//! A pickle is a program for a stack machine that may name any function of any Python module and
//! have it called. This interpreter has a list of the few names that a [`Purpose`] needs, each of
//! which is a case of an enum here; every other name, and every opcode that such pickles do not
//! use, is an error that says which. Containers live in an arena and values are small and `Copy`,
//! so that a deeply nested pickle costs no call stack.
//!
//! An opcode costs time for the bytes that it takes and the values that it moves, each of which was
//! pushed once, so the time is linear in the length. What a pickle makes is counted in bytes, with
//! what the allocator adds, and a limit holds for the sum.

mod objects;

pub(super) use objects::{Callable, Class, Heap, Purpose, Storage, Value, View, size};
use objects::{Object, callable};
use std::collections::BTreeMap;

/// Bytes that a value takes in a container that grows by doubling.
const VALUE_BYTES: usize = 2 * size_of::<Value<'_>>();
/// Bytes that a container takes besides its values: its place in the arena, and a block of the
/// allocator.
const CONTAINER_BYTES: usize = 2 * size_of::<Vec<Value<'_>>>() + 16;
/// Bytes that an entry of the memo takes in a tree whose nodes may be half empty.
const MEMO_BYTES: usize = 2 * (size_of::<Value<'_>>() + size_of::<u32>() + 4);

/// Longest name of a storage, which is a number. Any number of storages may have one name, and
/// names are compared.
const MAX_STORAGE_NAME_BYTES: usize = 128;

/// The machine that runs one pickle.
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    purpose: Purpose,
    heap: Heap<'a>,
    stack: Vec<Value<'a>>,
    /// Most values that the stack has held; their memory is counted.
    highest: usize,
    /// Heights of the stack at the open marks.
    marks: Vec<usize>,
    memo: BTreeMap<u32, Value<'a>>,
}

type Outcome<T> = Result<T, String>;

/// Runs the pickle at the start of `bytes`. Returns its value, the objects that it made, and its
/// length. The objects take `limit` bytes at most.
pub(super) fn run(
    bytes: &[u8],
    purpose: Purpose,
    limit: usize,
) -> Outcome<(Value<'_>, Heap<'_>, usize)> {
    let mut machine = Machine {
        bytes,
        at: 0,
        purpose,
        heap: Heap::new(limit),
        stack: Vec::new(),
        highest: 0,
        marks: Vec::new(),
        memo: BTreeMap::new(),
    };
    loop {
        let at = machine.at;
        let opcode = machine.byte()?;
        if opcode == b'.' {
            let value = machine.pop()?;
            return Ok((value, machine.heap, machine.at));
        }
        machine
            .step(opcode)
            .map_err(|reason| format!("{reason} (byte {at} of the pickle)"))?;
    }
}

impl<'a> Machine<'a> {
    fn step(&mut self, opcode: u8) -> Outcome<()> {
        match opcode {
            // PROTO and FRAME: nothing to do.
            0x80 => self.take(1).map(drop),
            0x95 => self.take(8).map(drop),
            b'(' => {
                self.heap.spend(2 * size_of::<usize>())?;
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' => self.pop().map(drop),
            b'q' => {
                let index = self.byte()?;
                self.remember(index.into())
            }
            b'r' => {
                let index = u32::from_le_bytes(self.array()?);
                self.remember(index)
            }
            0x94 => self.remember(self.memo.len() as u32),
            b'h' => {
                let index = self.byte()?;
                self.recall(index.into())
            }
            b'j' => {
                let index = u32::from_le_bytes(self.array()?);
                self.recall(index)
            }
            _ => self.container(opcode),
        }
    }

    /// Opcodes that make or fill a dictionary, a list or a tuple, or the others.
    fn container(&mut self, opcode: u8) -> Outcome<()> {
        match opcode {
            b'}' => self.new_dict(),
            b']' | b')' => self.new_items(Vec::new()),
            b't' => {
                let items = self.pop_to_mark()?;
                self.new_items(items)
            }
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let items = self.pop_many(count)?;
                self.new_items(items)
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.append(&items)
            }
            b's' => {
                let items = self.pop_many(2)?;
                self.insert(&items)
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.insert(&items)
            }
            _ => self.object(opcode),
        }
    }

    /// Opcodes that name something of a module, call it or make an object of it, or the others.
    fn object(&mut self, opcode: u8) -> Outcome<()> {
        match opcode {
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(callable(self.purpose, module, name)?)
            }
            0x93 => match self.pop_many(2)?[..] {
                [Value::Text(module), Value::Text(name)] => {
                    self.push(callable(self.purpose, module, name)?)
                }
                _ => Err("a name is no text".to_owned()),
            },
            b'Q' => self.storage(),
            b'R' => self.call(),
            // NEWOBJ
            0x81 => match self.pop_many(2)?[..] {
                [Value::Callable(Callable::Class(class)), Value::Items(_)] => {
                    self.new_object(class)
                }
                _ => Err("it makes an object of no class".to_owned()),
            },
            // BUILD: attributes of an object, or of a dictionary (`_metadata`), which tensors do
            // not need.
            b'b' => match self.pop_many(2)?[..] {
                [Value::Dict(dict), _] => self.push(Value::Dict(dict)),
                [Value::Object(object), state] => {
                    self.heap.objects[object].state = state;
                    self.push(Value::Object(object))
                }
                _ => Err("it sets attributes of something else than a dictionary".to_owned()),
            },
            _ => self.literal(opcode),
        }
    }

    /// Opcodes that push a number, a text or the like.
    fn literal(&mut self, opcode: u8) -> Outcome<()> {
        match opcode {
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Value::Int(value.into()))
            }
            b'K' => {
                let value = self.byte()?;
                self.push(Value::Int(value.into()))
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.push(Value::Int(value.into()))
            }
            0x8A => self.long(),
            b'G' => {
                let value = f64::from_be_bytes(self.array()?);
                self.push(Value::Float(value))
            }
            b'X' => {
                let length = u32::from_le_bytes(self.array()?);
                self.text(length as usize)
            }
            // SHORT_BINUNICODE and SHORT_BINSTRING
            0x8C | b'U' => {
                let length = self.byte()?;
                self.text(length.into())
            }
            _ => Err(format!(
                "opcode 0x{opcode:02x} is not one that tables of tensors use"
            )),
        }
    }

    fn push(&mut self, value: Value<'a>) -> Outcome<()> {
        if self.stack.len() == self.highest {
            self.heap.spend(VALUE_BYTES)?;
            self.highest += 1;
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Outcome<Value<'a>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err("it takes more values than there are".to_owned());
        }
        self.stack
            .pop()
            .ok_or_else(|| "the stack is empty".to_owned())
    }

    fn pop_many(&mut self, count: usize) -> Outcome<Vec<Value<'a>>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(start) if start >= floor => Ok(self.stack.drain(start..).collect()),
            _ => Err("it takes more values than there are".to_owned()),
        }
    }

    fn pop_to_mark(&mut self) -> Outcome<Vec<Value<'a>>> {
        let mark = self.marks.pop().ok_or("there is no mark")?;
        Ok(self.stack.drain(mark..).collect())
    }

    fn take(&mut self, count: usize) -> Outcome<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..count).ok_or("the pickle ends too early")?;
        self.at += count;
        Ok(taken)
    }

    fn byte(&mut self) -> Outcome<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn array<const N: usize>(&mut self) -> Outcome<[u8; N]> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("as many were taken"))
    }

    fn line(&mut self) -> Outcome<&'a str> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().take(1024).position(|&byte| byte == b'\n');
        let line = self.take(end.ok_or("a name has no end")?)?;
        self.at += 1;
        std::str::from_utf8(line).map_err(|_| "a name is not UTF-8".to_owned())
    }

    fn text(&mut self, length: usize) -> Outcome<()> {
        let text = std::str::from_utf8(self.take(length)?);
        self.push(Value::Text(text.map_err(|_| "a text is not UTF-8")?))
    }

    /// A number of any length; those beyond 64 bits are noted as such.
    fn long(&mut self) -> Outcome<()> {
        let length = self.byte()?;
        let bytes = self.take(length.into())?;
        let sign = bytes
            .last()
            .map_or(0, |byte| if byte & 0x80 == 0 { 0 } else { 0xFF });
        let mut wide = [sign; 8];
        if bytes.len() > wide.len() {
            return self.push(Value::Wide);
        }
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    fn new_items(&mut self, items: Vec<Value<'a>>) -> Outcome<()> {
        self.heap
            .spend(CONTAINER_BYTES + items.len() * VALUE_BYTES)?;
        self.heap.items.push(items);
        self.push(Value::Items(self.heap.items.len() - 1))
    }

    fn new_dict(&mut self) -> Outcome<()> {
        self.heap.spend(CONTAINER_BYTES)?;
        self.heap.dicts.push(Vec::new());
        self.push(Value::Dict(self.heap.dicts.len() - 1))
    }

    fn new_object(&mut self, class: Class) -> Outcome<()> {
        self.heap.spend(2 * size_of::<Object<'_>>())?;
        let state = Value::None;
        self.heap.objects.push(Object { class, state });
        self.push(Value::Object(self.heap.objects.len() - 1))
    }

    fn append(&mut self, items: &[Value<'a>]) -> Outcome<()> {
        self.heap.spend(items.len() * VALUE_BYTES)?;
        match self.stack.last() {
            Some(&Value::Items(index)) => {
                self.heap.items[index].extend_from_slice(items);
                Ok(())
            }
            _ => Err("it appends to something else than a list".to_owned()),
        }
    }

    fn insert(&mut self, items: &[Value<'a>]) -> Outcome<()> {
        self.heap.spend(items.len() * VALUE_BYTES)?;
        let (pairs, rest) = items.as_chunks::<2>();
        match self.stack.last() {
            Some(&Value::Dict(index)) if rest.is_empty() => {
                self.heap.dicts[index].extend(pairs.iter().map(|&[key, value]| (key, value)));
                Ok(())
            }
            _ => Err("it inserts into something else than a dictionary".to_owned()),
        }
    }

    fn remember(&mut self, index: u32) -> Outcome<()> {
        self.heap.spend(MEMO_BYTES)?;
        let value = *self.stack.last().ok_or("there is nothing to remember")?;
        self.memo.insert(index, value);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Outcome<()> {
        let value = self.memo.get(&index).copied();
        self.push(value.ok_or_else(|| format!("nothing is remembered as {index}"))?)
    }

    /// BINPERSID: `("storage", type, key, location, elements)`, in old files with a sixth
    /// member, which says that the storage is a part of another.
    fn storage(&mut self) -> Outcome<()> {
        let id = self.pop()?;
        let members = self.heap.items(id).ok_or("a persistent id is no tuple")?;
        let (key, dtype, len) = match *members {
            [
                Value::Text("storage"),
                Value::Callable(Callable::StorageType(dtype)),
                Value::Text(key),
                _,
                len,
            ]
            | [
                Value::Text("storage"),
                Value::Callable(Callable::StorageType(dtype)),
                Value::Text(key),
                _,
                len,
                Value::None,
            ] => (key, dtype, size(len)?),
            _ => return Err("a persistent id names no storage".to_owned()),
        };
        if key.len() > MAX_STORAGE_NAME_BYTES {
            let (length, limit) = (key.len(), MAX_STORAGE_NAME_BYTES);
            return Err(format!(
                "the name of a storage has {length} bytes, the limit is {limit}"
            ));
        }
        self.heap.spend(2 * size_of::<Storage<'_>>())?;
        self.heap.storages.push(Storage { key, dtype, len });
        self.push(Value::Storage(self.heap.storages.len() - 1))
    }

    /// REDUCE: one of the calls that make a tensor, a dictionary, or something that is never read.
    fn call(&mut self) -> Outcome<()> {
        let called = self.pop_many(2)?;
        let arguments = self.heap.items(called[1]).ok_or("arguments are no tuple")?;
        match (called[0], arguments) {
            (Value::Callable(Callable::OrderedDict), []) => self.new_dict(),
            (
                Value::Callable(Callable::RebuildTensor),
                &[Value::Storage(storage), offset, shape, strides, ..],
            ) => {
                let view = View {
                    storage,
                    offset: size(offset)?,
                    shape: self.heap.sizes(shape)?,
                    strides: self.heap.sizes(strides)?,
                };
                self.heap.spend(
                    2 * size_of::<View>() + 2 * view.shape.len() * size_of::<usize>() + 32,
                )?;
                self.heap.views.push(view);
                self.push(Value::Tensor(self.heap.views.len() - 1))
            }
            (Value::Callable(Callable::RebuildParameter), &[Value::Tensor(tensor), ..]) => {
                self.push(Value::Tensor(tensor))
            }
            (Value::Callable(Callable::Size), &[Value::Items(sizes)]) => {
                self.push(Value::Items(sizes))
            }
            (Value::Callable(Callable::Inert), _) => self.push(Value::None),
            (called, _) => Err(format!("it calls {called:?} with other arguments")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 256 << 20;

    fn run(bytes: &[u8]) -> Outcome<(Value<'_>, Heap<'_>, usize)> {
        super::run(bytes, Purpose::Tensors, LIMIT)
    }

    fn refusal(bytes: &[u8]) -> String {
        run(bytes).map(|(value, ..)| value).unwrap_err()
    }

    #[test]
    fn names_outside_the_list_are_refused_and_nothing_is_called() {
        let messages = [
            refusal(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."),
            refusal(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93."),
            refusal(b"cbuiltins\ngetattr\n."),
            refusal(b"(ios\nsystem\n."),
            refusal(b"\x80\x02ccollections\nOrderedDict\n)\x81."),
        ];
        insta::assert_snapshot!(messages.join("\n"), @"
        it asks for `os.system`, which no table of tensors needs (byte 2 of the pickle)
        it asks for `builtins.eval`, which no table of tensors needs (byte 18 of the pickle)
        it asks for `builtins.getattr`, which no table of tensors needs (byte 0 of the pickle)
        opcode 0x69 is not one that tables of tensors use (byte 1 of the pickle)
        it makes an object of no class (byte 28 of the pickle)
        ");
    }

    #[test]
    fn broken_programs_are_refused() {
        for bytes in [
            &b""[..],
            b".",
            b"(.",
            b"N(0.",
            b"h\x00.",
            b"q\x00.",
            b"u.",
            b"]Ns.",
            b"}(Nu.",
            b"X\xff\xff\xff\xffabc.",
            b"\x8a\x09abc.",
            b"cos",
            b"NQ.",
            b"NNR.",
            b"NNb.",
            b"\x86.",
        ] {
            assert!(run(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn nesting_of_any_depth_and_cycles_cost_no_call_stack() {
        let deep = [&b")"[..], &b"\x85".repeat(1 << 20), b"."].concat();
        assert!(matches!(run(&deep), Ok((Value::Items(_), ..))));
        // A list that holds itself.
        assert!(matches!(run(b"]q\x00h\x00a."), Ok((Value::Items(0), ..))));
    }

    #[test]
    fn a_pickle_that_would_fill_memory_is_refused() {
        let limit = 8 << 20;
        for flood in [
            b"N".repeat(4 << 20),
            b"]".repeat(4 << 20),
            b"(".repeat(4 << 20),
            [&b"]"[..], &b"Na".repeat(2 << 20)].concat(),
            [&b"N"[..], &b"r\x01\x00\x00\x00".repeat(1 << 20)].concat(),
        ] {
            let message = super::run(&flood, Purpose::Tensors, limit).map(|(value, ..)| value);
            let message = message.unwrap_err();
            assert!(
                message.contains("more than 8388608 bytes of memory"),
                "{message}"
            );
        }
    }

    #[test]
    fn what_is_named_again_and_again_is_not_copied() {
        // A key that 300,000 storages have, one of 1 MiB, and tensors of a shape with 100,000 dims.
        let key = |length: u32| {
            let length = length.to_le_bytes();
            let name = b"k".repeat(u32::from_le_bytes(length) as usize);
            [&b"X"[..], &length, &name].concat()
        };
        let start = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n";
        let storages = |length| {
            let all = b"h\x00Q0".repeat(300_000);
            [&start[..], &key(length), b"NK\x01tq\x00", &all, b"."].concat()
        };
        assert_eq!(run(&storages(128)).unwrap().1.storages.len(), 300_000);
        assert!(refusal(&storages(1 << 20)).contains("has 1048576 bytes, the limit is 128"));
        let shape = [&b"("[..], &b"K\x01".repeat(100_000), b"tq\x01"].concat();
        let tensor = [
            &b"ctorch._utils\n_rebuild_tensor_v2\n("[..],
            start,
            b"X\x01\x00\x00\x000NK\x01tQK\x00",
            &shape,
            b"h\x01tR.",
        ];
        assert!(refusal(&tensor.concat()).contains("100000 dims, the limit is 16"));
    }

    #[test]
    fn whole_numbers_of_any_length_keep_their_sign() {
        let value = |bytes: &[u8]| match run(bytes) {
            Ok((Value::Int(value), ..)) => value,
            other => unreachable!("{other:?}"),
        };
        assert_eq!(value(b"\x8a\x00."), 0);
        assert_eq!(value(b"\x8a\x01\xff."), -1);
        assert_eq!(value(b"\x8a\x03\x00\x00\x01."), 65536);
        assert_eq!(value(b"J\xfe\xff\xff\xff."), -2);
    }
}
