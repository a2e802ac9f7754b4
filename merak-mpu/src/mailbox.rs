//! Messages that were sent to one rank, until it takes them.

use crate::{
    Message,
    bell::{Bell, lock},
};
use std::{collections::BTreeMap, sync::Mutex};

/// The messages of one sender and tag.
#[derive(Debug, Default)]
struct Channel {
    sent: u64,
    posted: u64,
    taken: u64,
    /// By number, counted from the first message sent.
    messages: BTreeMap<u64, Message>,
}

/// All channels to one member of a group, by (sender, tag).
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// Rings for each message that comes.
    pub(crate) bell: Bell,
    channels: Mutex<BTreeMap<(usize, u64), Channel>>,
}

impl Mailbox {
    /// Adds a message to its channel.
    pub(crate) fn put(&self, from: usize, tag: u64, message: Message) {
        {
            let mut channels = lock(&self.channels);
            let channel = channels.entry((from, tag)).or_default();
            channel.messages.insert(channel.sent, message);
            channel.sent += 1;
        }
        self.bell.ring();
    }

    /// Posts a receipt and returns the number of the message that it will get.
    pub(crate) fn post(&self, from: usize, tag: u64) -> u64 {
        let mut channels = lock(&self.channels);
        let channel = channels.entry((from, tag)).or_default();
        channel.posted += 1;
        channel.posted - 1
    }

    /// Whether a message is there.
    pub(crate) fn has(&self, from: usize, tag: u64, number: u64) -> bool {
        lock(&self.channels)
            .get(&(from, tag))
            .is_some_and(|channel| channel.messages.contains_key(&number))
    }

    /// Takes a message out, and forgets a channel on which nothing is under way.
    pub(crate) fn take(&self, from: usize, tag: u64, number: u64) -> Option<Message> {
        let mut channels = lock(&self.channels);
        let channel = channels.get_mut(&(from, tag))?;
        let message = channel.messages.remove(&number)?;
        channel.taken += 1;
        if channel.taken == channel.sent && channel.taken == channel.posted {
            channels.remove(&(from, tag));
        }
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Packet;

    fn message(value: u8) -> Message {
        vec![Packet {
            shape: vec![1],
            data: Box::new(vec![value]),
        }]
    }

    fn value(message: Option<Message>) -> u8 {
        let packet = message.unwrap().remove(0);
        crate::into_vec::<u8>(packet.data).unwrap()[0]
    }

    #[test]
    fn receipts_get_messages_in_the_order_they_were_posted() {
        let mailbox = Mailbox::default();
        let (first, second) = (mailbox.post(0, 7), mailbox.post(0, 7));
        assert!(!mailbox.has(0, 7, first));
        mailbox.put(0, 7, message(10));
        mailbox.put(0, 7, message(11));
        assert_eq!(value(mailbox.take(0, 7, second)), 11);
        assert_eq!(value(mailbox.take(0, 7, first)), 10);
    }

    #[test]
    fn a_channel_without_traffic_is_forgotten() {
        let mailbox = Mailbox::default();
        for round in 0..3 {
            mailbox.put(1, round, message(1));
            let number = mailbox.post(1, round);
            assert!(mailbox.take(1, round, number).is_some());
        }
        assert!(lock(&mailbox.channels).is_empty());
    }
}
