//! What ranks tell each other in host memory about memory on devices.

use super::{calls::UniqueId, order::Stamp};
use crate::{
    Buffer, DType, Error, Message, Packet, Rank, Result,
    call::{self, Fingerprint},
    control::wire::{Decoder, Encoder, Malformed},
    hash::fnv1a,
    into_vec,
};

/// Bytes of what a member says of its call, the same for all calls.
const CALL_BYTES: usize = 512;

/// Bytes of a stamp, and of the name of a communicator.
const STAMP_BYTES: usize = 8 + 1 + 128;

/// Stands in a message for bytes that no rank sends.
fn malformed(rank: Rank) -> Error {
    Error::aborted(rank, Malformed.to_string())
}

/// What a member says of its call: a digest of all that must agree, and text for people.
pub(super) fn call(fingerprint: &Fingerprint) -> Vec<u8> {
    let digest = fnv1a(format!("{fingerprint:?}").bytes());
    let mut letter = Encoder::default();
    letter.number(digest);
    letter.0.extend(fingerprint.to_string().bytes());
    letter.0.resize(CALL_BYTES, 0);
    letter.0
}

/// Compares what all members say of the n-th call of their group.
pub(super) fn compare(calls: &[u8], name: &str, members: &[Rank], sequence: u64) -> Result<()> {
    let text = |call: &[u8]| {
        let text = call[8..].split(|byte| *byte == 0).next();
        String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
    };
    let calls = members.iter().zip(calls.chunks(CALL_BYTES));
    let calls: Vec<_> = calls.map(|(rank, call)| (*rank, call)).collect();
    call::compare((name, members), sequence, &calls, |call| text(call))
}

/// A stamp on its way, with the name of the communicator where the receiver may not have it.
pub(super) fn stamp(stamp: Stamp, id: Option<&UniqueId>) -> Vec<u8> {
    let mut letter = Encoder::default();
    letter.number(stamp.0).0.push(u8::from(id.is_some()));
    letter.0.extend(id.unwrap_or(&[0; 128]));
    letter.0
}

fn read_stamp(letter: &[u8]) -> Result<(Stamp, Option<UniqueId>), Malformed> {
    let mut decoder = Decoder(letter);
    let stamp = Stamp(decoder.number()?);
    let has_id = decoder.byte()? == 1;
    let id = decoder.take(128)?.try_into().map_err(|_| Malformed)?;
    decoder.end()?;
    Ok((stamp, has_id.then_some(id)))
}

/// The largest of all members' stamps, and the name that one of them gives.
pub(super) fn stamps(letters: Box<dyn Buffer>, from: Rank) -> Result<(Stamp, Option<UniqueId>)> {
    let letters: Vec<u8> = into_vec(letters)?;
    let mut largest = (Stamp(0), None);
    for letter in letters.chunks(STAMP_BYTES) {
        let (stamp, id) = read_stamp(letter).map_err(|_| malformed(from))?;
        largest = (largest.0.max(stamp), largest.1.or(id));
    }
    Ok(largest)
}

/// A letter as a message.
pub(super) fn post(letter: Vec<u8>) -> Message {
    vec![Packet {
        shape: vec![letter.len()],
        data: Box::new(letter),
    }]
}

/// The stamp in a message of one letter.
pub(super) fn posted_stamp(message: Message, from: Rank) -> Result<(Stamp, Option<UniqueId>)> {
    let letter = message.into_iter().next().ok_or_else(|| malformed(from))?;
    stamps(letter.data, from)
}

/// A packet of a message, as its receiver finds it.
#[derive(Debug)]
pub(super) enum Part {
    /// It is here.
    Here(Packet),
    /// It lies on the sender's device.
    Device { shape: Vec<usize>, dtype: DType },
}

const HERE: u8 = 0;
const ON_DEVICE: u8 = 1;

/// The letter that goes before the packets of a message, some of which stay on the device.
pub(super) fn list<'a>(packets: impl Iterator<Item = (&'a Packet, bool)>) -> Packet {
    let mut letter = Encoder::default();
    for (packet, on_device) in packets {
        if on_device {
            let dtype = DType::ALL.iter().position(|one| *one == packet.dtype());
            letter.0.push(ON_DEVICE);
            letter.0.push(dtype.unwrap_or_default() as u8);
            letter.sizes(packet.shape.iter().copied());
        } else {
            letter.0.push(HERE);
        }
    }
    Packet {
        shape: vec![letter.0.len()],
        data: Box::new(letter.0),
    }
}

/// Whether all packets of a message are here.
pub(super) fn is_whole(message: &Message) -> bool {
    let mut whole = true;
    if let Some(list) = message.first() {
        list.data
            .read(&mut |letter| whole = letter.iter().all(|byte| *byte == HERE));
    }
    whole
}

/// Splits a message into its parts.
pub(super) fn parts(message: Message, from: Rank) -> Result<Vec<Part>> {
    let mut packets = message.into_iter();
    let list = packets.next().ok_or_else(|| malformed(from))?;
    let list: Vec<u8> = into_vec(list.data)?;
    let mut decoder = Decoder(&list);
    let mut parts = Vec::new();
    while decoder.end().is_err() {
        let part = match decoder.byte() {
            Ok(HERE) => packets.next().map(Part::Here),
            Ok(ON_DEVICE) => on_device(&mut decoder).ok(),
            _ => None,
        };
        parts.push(part.ok_or_else(|| malformed(from))?);
    }
    Ok(parts)
}

fn on_device(decoder: &mut Decoder<'_>) -> Result<Part, Malformed> {
    let dtype = DType::ALL.get(usize::from(decoder.byte()?));
    let shape = decoder.sizes()?;
    Ok(Part::Device {
        shape,
        dtype: *dtype.ok_or(Malformed)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ReduceOp,
        call::{Call, Parts},
    };

    fn packet(len: usize) -> Packet {
        Packet {
            shape: vec![len],
            data: Box::new(vec![1.0_f32; len]),
        }
    }

    #[test]
    fn calls_of_any_kind_are_compared_in_full() {
        let of = |lengths: Vec<usize>| {
            call(&Fingerprint {
                call: Call::ReduceScatter(ReduceOp::Sum),
                dtype: DType::BF16,
                parts: Parts::Listed(lengths.into()),
            })
        };
        let members = [Rank(3), Rank(5)];
        let long: Vec<usize> = (0..1000).collect();
        let mut other = long.clone();
        other.swap(800, 801);
        let check = |a: &Vec<usize>, b: &Vec<usize>| {
            let calls = [of(a.clone()), of(b.clone())].concat();
            compare(&calls, "data", &members, 7)
        };
        assert!(check(&long, &long).is_ok());
        let error = check(&long, &other).unwrap_err().to_string();
        assert!(
            error.starts_with("operation 7 of group data [3, 5] differs: rank 3 called"),
            "{error}"
        );
        assert!(error.contains("reduce_scatter(sum) of 499500 bf16 in parts of 0, 1"));
    }

    #[test]
    fn the_largest_stamp_counts_and_one_member_names_the_communicator() {
        let letters = [
            stamp(Stamp(7), Some(&[3; 128])),
            stamp(Stamp(9), None),
            stamp(Stamp(8), None),
        ];
        let read = stamps(Box::new(letters.concat()), Rank(0)).unwrap();
        assert_eq!(read, (Stamp(9), Some([3; 128])));
        assert!(stamps(Box::new(vec![0_u8; 9]), Rank(0)).is_err());
    }

    #[test]
    fn parts_come_out_in_the_order_of_the_packets() {
        let packets = [packet(2), packet(5), packet(3)];
        let list = list(packets.iter().zip([false, true, false]));
        let [first, _, third] = packets;
        let message = vec![list, first, third];
        assert!(!is_whole(&message));
        let parts = parts(message, Rank(1)).unwrap();
        let told: Vec<_> = parts
            .iter()
            .map(|part| match part {
                Part::Here(packet) => format!("here {:?}", packet.shape),
                Part::Device { shape, dtype } => format!("{dtype} {shape:?}"),
            })
            .collect();
        assert_eq!(told, ["here [2]", "f32 [5]", "here [3]"]);
    }

    #[test]
    fn messages_that_no_rank_sends_are_errors() {
        assert!(parts(Vec::new(), Rank(1)).is_err());
        for letter in [vec![HERE], vec![ON_DEVICE], vec![7], vec![ON_DEVICE, 99]] {
            assert!(parts(post(letter), Rank(1)).is_err());
        }
    }
}
