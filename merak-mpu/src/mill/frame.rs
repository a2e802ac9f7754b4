//! What processes send each other on the connections between them.

use crate::{
    Buffer, DType, Message, Packet, Rank, ReduceOp,
    call::{Call, Fingerprint, Parts},
    control::wire::{Decoder, Encoder, Malformed},
    zeros,
};

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 32;

/// Longest payload after a header that is read before anything is done with it.
pub(super) const MOST_PAYLOAD: usize = 64 << 20;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Name, members and count of the group that the sender gives this number.
    Group = 1,
    /// A collective, with the data of the sender's first move where they are few.
    Call = 2,
    /// Data of the first move, straight into a buffer.
    First = 3,
    /// Data of the second move.
    Second = 4,
    /// Types and shapes of a message's packets, with their elements where they are few.
    Message = 5,
    /// The elements of one packet.
    Packet = 6,
    /// The sender starts nothing more.
    End = 7,
    /// All that came before the receiver's end has been read.
    Ack = 8,
}

/// The head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// The sender's number of the group.
    pub(super) group: u32,
    /// The sequence number of a collective, or the tag of a message.
    pub(super) number: u64,
    /// Where the data begin within their piece; in a call or a message, the length of its
    /// description.
    pub(super) start: usize,
    /// Bytes after the header.
    pub(super) len: usize,
}

impl Header {
    /// A header without numbers.
    pub(super) fn of(kind: Kind) -> Self {
        Self {
            kind,
            group: 0,
            number: 0,
            start: 0,
            len: 0,
        }
    }

    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.group.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.start as u64).to_le_bytes());
        bytes[24..32].copy_from_slice(&(self.len as u64).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder(bytes);
        let kind = match decoder.byte()? {
            1 => Kind::Group,
            2 => Kind::Call,
            3 => Kind::First,
            4 => Kind::Second,
            5 => Kind::Message,
            6 => Kind::Packet,
            7 => Kind::End,
            8 => Kind::Ack,
            _ => return Err(Malformed),
        };
        decoder.take(3)?;
        let group = decoder.take(4)?.try_into().map_err(|_| Malformed)?;
        let header = Self {
            kind,
            group: u32::from_le_bytes(group),
            number: decoder.number()?,
            start: decoder.size()?,
            len: decoder.size()?,
        };
        let is_data = matches!(kind, Kind::First | Kind::Second | Kind::Packet);
        if !is_data && (header.len > MOST_PAYLOAD || header.start > header.len) {
            return Err(Malformed);
        }
        Ok(header)
    }
}

/// A group as processes name it: its name, members, and how many of this name and members were
/// made before.
pub(super) type GroupKey = (String, Vec<Rank>, usize);

pub(super) fn encode_group((name, members, nth): &GroupKey) -> Vec<u8> {
    let mut encoder = Encoder::default();
    encoder.text(name).ranks(members).size(*nth);
    encoder.0
}

pub(super) fn decode_group(bytes: &[u8]) -> Result<GroupKey, Malformed> {
    let mut decoder = Decoder(bytes);
    let key = (
        decoder.text()?,
        decoder.list(Decoder::rank)?,
        decoder.size()?,
    );
    decoder.end()?;
    Ok(key)
}

pub(super) fn encode_call(fingerprint: &Fingerprint) -> Vec<u8> {
    let Fingerprint { call, dtype, parts } = fingerprint;
    let (kind, detail) = match call {
        Call::AllReduce(op) => (0, of_op(*op)),
        Call::ReduceScatter(op) => (1, of_op(*op)),
        Call::AllGather => (2, 0),
        Call::Gather { root } => (3, *root),
        Call::Broadcast { root } => (4, *root),
        Call::AllToAll => (5, 0),
        Call::Barrier => (6, 0),
        Call::ReduceScatterInPlace(op) => (7, of_op(*op)),
        Call::AllGatherInPlace => (8, 0),
        Call::GatherInPlace { root } => (9, *root),
    };
    let mut encoder = Encoder::of(kind);
    encoder.0.push(of_dtype(*dtype));
    encoder.size(detail);
    match parts {
        Parts::Equal(len) => {
            encoder.0.push(0);
            encoder.size(*len);
        }
        Parts::Listed(lengths) => {
            encoder.0.push(1);
            encoder.sizes(lengths.iter().copied());
        }
    }
    encoder.0
}

pub(super) fn decode_call(bytes: &[u8]) -> Result<Fingerprint, Malformed> {
    let mut decoder = Decoder(bytes);
    let (kind, dtype, detail) = (decoder.byte()?, dtype(decoder.byte()?)?, decoder.size()?);
    let call = match kind {
        0 => Call::AllReduce(op(detail)?),
        1 => Call::ReduceScatter(op(detail)?),
        2 => Call::AllGather,
        3 => Call::Gather { root: detail },
        4 => Call::Broadcast { root: detail },
        5 => Call::AllToAll,
        6 => Call::Barrier,
        7 => Call::ReduceScatterInPlace(op(detail)?),
        8 => Call::AllGatherInPlace,
        9 => Call::GatherInPlace { root: detail },
        _ => return Err(Malformed),
    };
    let parts = match decoder.byte()? {
        0 => Parts::Equal(decoder.size()?),
        1 => Parts::Listed(decoder.sizes()?.into()),
        _ => return Err(Malformed),
    };
    decoder.end()?;
    Ok(Fingerprint { call, dtype, parts })
}

/// The types and shapes of a message.
pub(super) fn encode_shapes(message: &Message) -> Vec<u8> {
    let mut encoder = Encoder::default();
    encoder.size(message.len());
    for packet in message {
        encoder.0.push(of_dtype(packet.dtype()));
        encoder.sizes(packet.shape.iter().copied());
        encoder.size(packet.data.len());
    }
    encoder.0
}

/// The packets that a message will have, in memory with any content that `kept` has for a type and
/// a number of elements, else with zeros for elements.
pub(super) fn decode_shapes(
    bytes: &[u8],
    mut kept: impl FnMut(DType, usize) -> Option<Box<dyn Buffer>>,
) -> Result<Message, Malformed> {
    let mut decoder = Decoder(bytes);
    let message = decoder.list(|item| {
        let dtype = dtype(item.byte()?)?;
        let shape = item.sizes()?;
        let len = item.size()?;
        if let Some(data) = kept(dtype, len) {
            return Ok(Packet { shape, data });
        }
        let bytes = len.checked_mul(dtype.size_bytes()).ok_or(Malformed)?;
        // Memory that is not there is an error and no abort.
        let mut room = Vec::<u8>::new();
        room.try_reserve_exact(bytes).map_err(|_| Malformed)?;
        drop(room);
        Ok(Packet {
            shape,
            data: zeros(dtype, len),
        })
    })?;
    decoder.end()?;
    Ok(message)
}

fn of_op(op: ReduceOp) -> usize {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 1,
        ReduceOp::Min => 2,
    }
}

fn op(number: usize) -> Result<ReduceOp, Malformed> {
    match number {
        0 => Ok(ReduceOp::Sum),
        1 => Ok(ReduceOp::Max),
        2 => Ok(ReduceOp::Min),
        _ => Err(Malformed),
    }
}

fn of_dtype(dtype: DType) -> u8 {
    let place = DType::ALL.iter().position(|other| *other == dtype);
    place.unwrap_or_default() as u8
}

fn dtype(number: u8) -> Result<DType, Malformed> {
    DType::ALL
        .get(usize::from(number))
        .copied()
        .ok_or(Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_come_out_as_they_went_in() {
        let header = Header {
            kind: Kind::First,
            group: 3,
            number: 1 << 40,
            start: 5,
            len: 1 << 33,
        };
        assert_eq!(Header::decode(&header.encode()), Ok(header));
        let key = ("tensor".to_owned(), vec![Rank(0), Rank(2)], 1);
        assert_eq!(decode_group(&encode_group(&key)), Ok(key));
        for call in [
            Call::ReduceScatter(ReduceOp::Min),
            Call::ReduceScatterInPlace(ReduceOp::Max),
            Call::AllGatherInPlace,
            Call::Gather { root: 2 },
            Call::GatherInPlace { root: 1 },
            Call::AllToAll,
        ] {
            for dtype in DType::ALL {
                for parts in [Parts::Equal(7), Parts::Listed([0, 9].into())] {
                    let fingerprint = Fingerprint { call, dtype, parts };
                    assert_eq!(decode_call(&encode_call(&fingerprint)), Ok(fingerprint));
                }
            }
        }
        let message = vec![Packet {
            shape: vec![2, 3],
            data: zeros(DType::BF16, 6),
        }];
        let found = decode_shapes(&encode_shapes(&message), |_, _| None).unwrap();
        assert_eq!((found[0].dtype(), found[0].data.len()), (DType::BF16, 6));
        assert_eq!(found[0].shape, [2, 3]);
    }

    #[test]
    fn a_packet_of_more_elements_than_memory_has_is_refused() {
        let mut frame = Encoder::default();
        frame.size(1).0.push(of_dtype(DType::F64));
        frame.sizes([0].into_iter()).size(usize::MAX / 16);
        assert!(decode_shapes(&frame.0, |_, _| None).is_err());
    }

    proptest! {
        #[test]
        fn bytes_of_a_stranger_are_no_frame(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Header::decode(&bytes);
            let _ = decode_group(&bytes);
            let _ = decode_call(&bytes);
            let _ = decode_shapes(&bytes[..bytes.len().min(24)], |_, _| None);
        }
    }
}
