//! What a mill does with the bytes that come.

use super::{
    Mill,
    frame::{self, GroupKey, Header, Kind},
    link::{Body, Link, Reading},
    moves::{EAGER_BYTES, Extent},
    op::GroupState,
};
use crate::{Message, Rank, control::wire::Malformed};
use std::{
    io::{self, ErrorKind},
    mem,
    sync::Arc,
};

impl Mill {
    /// Takes what has come from a rank.
    pub(super) fn read(&mut self, rank: usize) {
        // So that a peer that never stops sending does not keep the others out.
        for _ in 0..64 {
            let Some(link) = self.links[rank].as_ref().filter(|link| link.is_open) else {
                return;
            };
            let outcome = match link.reading {
                Reading::Frame => self.read_frames(rank),
                Reading::Data { .. } => self.read_data(rank),
                Reading::Packets { .. } => self.read_packets(rank),
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return self.lose(rank, "it was closed");
                }
                Err(error) => return self.lose(rank, &error.to_string()),
            }
        }
        // More may be there, and no poll would say so of bytes that are buffered.
        self.counter.waker.wake();
    }

    /// Handles the frames that are buffered, and reads more. False where nothing more is there.
    fn read_frames(&mut self, rank: usize) -> io::Result<bool> {
        loop {
            let Some(link) = self.links[rank].as_mut() else {
                return Ok(false);
            };
            if !link.is_open {
                return Ok(false);
            }
            if !matches!(link.reading, Reading::Frame) {
                return Ok(true);
            }
            let Some((header, payload)) = link.next_frame().map_err(io::Error::other)? else {
                break;
            };
            self.receive(rank, header, &payload)
                .map_err(io::Error::other)?;
        }
        let Some(link) = self.links[rank].as_mut() else {
            return Ok(false);
        };
        match link.fill()? {
            None => Err(ErrorKind::UnexpectedEof.into()),
            Some(read) => Ok(read > 0),
        }
    }

    fn receive(&mut self, rank: usize, header: Header, payload: &[u8]) -> Result<(), Malformed> {
        match header.kind {
            Kind::Group => {
                let key = frame::decode_group(payload)?;
                let group = self.join(rank, &key)?;
                self.link(rank)?.groups.insert(header.group, group);
            }
            Kind::Call => {
                let (call, data) = payload.split_at(header.start);
                let fingerprint = frame::decode_call(call)?;
                let (group, member) = self.place(rank, header)?;
                let key = (group.number, header.number);
                let early = (fingerprint, data.to_vec());
                match self.ops.get(&key) {
                    Some(op) if op.has_called(member) => return Err(Malformed),
                    Some(_) => {
                        self.meet(key, member, early);
                        self.advance(key);
                    }
                    None => {
                        self.early.insert((key, member), early);
                    }
                }
            }
            Kind::First | Kind::Second => {
                let (group, member) = self.place(rank, header)?;
                let op = (group.number, header.number);
                let second = header.kind == Kind::Second;
                let place = self
                    .ops
                    .get(&op)
                    .and_then(|found| found.place(member, second, header.start, header.len));
                let Some(Extent { area, start, len }) = place else {
                    // A poisoned world has forgotten its collectives.
                    return if self.state.verdict().is_some() {
                        Ok(())
                    } else {
                        Err(Malformed)
                    };
                };
                self.link(rank)?.reading = Reading::Data {
                    op,
                    member,
                    second,
                    area,
                    start,
                    left: len,
                };
            }
            Kind::Message => self.receive_message(rank, header, payload)?,
            // It follows its message alone.
            Kind::Packet => return Err(Malformed),
            Kind::End => {
                let link = self.link(rank)?;
                link.has_ended = true;
                link.push(Header::of(Kind::Ack), &[], Body::None);
                self.state.note_end(Rank(rank));
            }
            Kind::Ack => self.link(rank)?.has_acked = true,
        }
        Ok(())
    }

    fn link(&mut self, rank: usize) -> Result<&mut Link, Malformed> {
        self.links[rank].as_mut().ok_or(Malformed)
    }

    /// The group that a peer speaks of, with this process's state of it.
    fn join(&self, rank: usize, key: &GroupKey) -> Result<Arc<GroupState>, Malformed> {
        let members = &key.1;
        let is_group = members.is_sorted_by(|a, b| a < b)
            && members.last().is_some_and(|last| last.0 < self.links.len())
            && members.contains(&Rank(rank));
        if !is_group {
            return Err(Malformed);
        }
        self.groups.join(key, self.state.rank).ok_or(Malformed)
    }

    /// The group of a frame and its sender's rank there.
    fn place(
        &mut self,
        rank: usize,
        header: Header,
    ) -> Result<(Arc<GroupState>, usize), Malformed> {
        let group = self
            .link(rank)?
            .groups
            .get(&header.group)
            .ok_or(Malformed)?;
        let member = group.rank_of(Rank(rank)).ok_or(Malformed)?;
        Ok((Arc::clone(group), member))
    }

    fn receive_message(
        &mut self,
        rank: usize,
        header: Header,
        payload: &[u8],
    ) -> Result<(), Malformed> {
        let (group, member) = self.place(rank, header)?;
        let (shapes, mut data) = payload.split_at(header.start);
        let mut message = frame::decode_shapes(shapes, |dtype, len| self.packets.take(dtype, len))?;
        let whole: usize = message.iter().map(|packet| packet.data.size_bytes()).sum();
        if whole > EAGER_BYTES {
            self.link(rank)?.reading = Reading::Packets {
                group,
                member,
                tag: header.number,
                message,
                packet: 0,
                got: 0,
                begun: false,
            };
            return Ok(());
        }
        if data.len() != whole {
            return Err(Malformed);
        }
        for packet in &mut message {
            let (own, rest) = data.split_at(packet.data.size_bytes());
            packet.data.write(&mut |bytes| bytes.copy_from_slice(own));
            data = rest;
        }
        self.deliver(&group, member, header.number, message);
        Ok(())
    }

    fn deliver(&self, group: &GroupState, member: usize, tag: u64, message: Message) {
        group.mailbox.put(member, tag, message);
        self.state.bell.ring();
    }

    /// Reads bytes into a collective's memory. False where none are there.
    fn read_data(&mut self, rank: usize) -> io::Result<bool> {
        let Some(link) = self.links[rank].as_mut() else {
            return Ok(false);
        };
        let Reading::Data {
            op: key,
            member,
            second,
            area,
            start,
            left,
        } = link.reading
        else {
            return Ok(false);
        };
        let Some(op) = self.ops.get_mut(&key) else {
            return Err(io::Error::other(Malformed));
        };
        let got = match link.buffered().len().min(left) {
            0 if left == 0 => 0,
            0 => {
                let mut got = Ok(Some(0));
                op.write(area, start..start + left, &mut |bytes| {
                    got = link.wire.read(bytes);
                })
                .map_err(io::Error::other)?;
                match got? {
                    Some(0) => return Ok(false),
                    Some(got) => got,
                    None => return Err(ErrorKind::UnexpectedEof.into()),
                }
            }
            got => {
                let source = &link.buffered()[..got];
                op.write(area, start..start + got, &mut |bytes| {
                    bytes.copy_from_slice(source);
                })
                .map_err(io::Error::other)?;
                link.use_up(got);
                got
            }
        };
        link.reading = if got == left {
            Reading::Frame
        } else {
            Reading::Data {
                op: key,
                member,
                second,
                area,
                start: start + got,
                left: left - got,
            }
        };
        op.note_bytes(member, second, got);
        self.advance(key);
        Ok(true)
    }

    /// Reads the elements of a message. False where none are there.
    fn read_packets(&mut self, rank: usize) -> io::Result<bool> {
        let Some(link) = self.links[rank].as_mut() else {
            return Ok(false);
        };
        let mut reading = mem::replace(&mut link.reading, Reading::Frame);
        let more = read_packets(link, &mut reading)?;
        match reading {
            Reading::Packets {
                group,
                member,
                tag,
                message,
                packet,
                ..
            } if packet == message.len() => self.deliver(&group, member, tag, message),
            reading => link.reading = reading,
        }
        Ok(more)
    }
}

/// Reads elements of the packets of a message, until all have come or none are there. Returns
/// whether more may be there.
fn read_packets(link: &mut Link, reading: &mut Reading) -> io::Result<bool> {
    let Reading::Packets {
        message,
        packet,
        got,
        begun,
        ..
    } = reading
    else {
        return Ok(false);
    };
    while let Some(current) = message.get_mut(*packet) {
        let len = current.data.size_bytes();
        if !*begun {
            let Some((header, _)) = link.next_frame().map_err(io::Error::other)? else {
                return match link.fill()? {
                    None => Err(ErrorKind::UnexpectedEof.into()),
                    Some(read) => Ok(read > 0),
                };
            };
            if header.kind != Kind::Packet || header.len != len {
                return Err(io::Error::other(Malformed));
            }
            *begun = true;
        }
        if *got < len {
            let buffered = link.buffered().len().min(len - *got);
            let mut came = Ok(Some(buffered));
            current.data.write(&mut |bytes| {
                let bytes = &mut bytes[*got..];
                if buffered > 0 {
                    bytes[..buffered].copy_from_slice(&link.buffered()[..buffered]);
                } else {
                    came = link.wire.read(bytes);
                }
            });
            link.use_up(buffered);
            match came? {
                None => return Err(ErrorKind::UnexpectedEof.into()),
                Some(0) => return Ok(false),
                Some(came) => *got += came,
            }
        }
        if *got == len {
            (*packet, *got, *begun) = (*packet + 1, 0, false);
        }
    }
    Ok(true)
}
