//! Memory of messages that have left, and of buffers that a collective has used up, for those that
//! come.

use crate::{Buffer, DType, Element};
use std::{any::Any, collections::VecDeque};

/// Fewer bytes come from the allocator as fast.
const LEAST_BYTES: usize = 1 << 20;

/// Most bytes that are kept.
const MOST_BYTES: usize = 256 << 20;

/// Vectors whose elements nobody needs any more. The system clears the pages of fresh memory before
/// a message can be written there, which takes a good part of the time that its bytes need to come.
#[derive(Debug, Default)]
pub(super) struct Packets(VecDeque<Box<dyn Buffer>>);

impl Packets {
    /// Keeps a buffer that nobody needs any more, the newest first, if it is a vector and not too
    /// small.
    pub(super) fn keep(&mut self, data: Box<dyn Buffer>) {
        if !(LEAST_BYTES..=MOST_BYTES).contains(&data.size_bytes()) || !is_vector(&*data) {
            return;
        }
        self.0.push_back(data);
        while self.0.iter().map(|kept| kept.size_bytes()).sum::<usize>() > MOST_BYTES {
            self.0.pop_front();
        }
    }

    /// Memory for `len` elements, with any content.
    pub(super) fn take(&mut self, dtype: DType, len: usize) -> Option<Box<dyn Buffer>> {
        let mut kept = self.0.iter();
        let place = kept.position(|kept| kept.dtype() == dtype && kept.len() == len)?;
        self.0.remove(place)
    }

    /// Memory of `len` elements of the same kind, with any content.
    pub(super) fn take_like(&mut self, data: &dyn Buffer, len: usize) -> Box<dyn Buffer> {
        let kept = if is_vector(data) {
            self.take(data.dtype(), len)
        } else {
            None
        };
        kept.unwrap_or_else(|| data.zeros_like(len))
    }
}

/// Whether the buffer is a vector and no memory of another kind.
fn is_vector(data: &dyn Buffer) -> bool {
    fn of<T: Element>(data: &dyn Any) -> bool {
        data.is::<Vec<T>>()
    }
    let is = match data.dtype() {
        DType::F64 => of::<f64>,
        DType::F32 => of::<f32>,
        DType::BF16 => of::<half::bf16>,
        DType::F16 => of::<half::f16>,
        DType::I64 => of::<i64>,
        DType::U32 => of::<u32>,
        DType::U8 => of::<u8>,
    };
    is(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = LEAST_BYTES / 4;

    #[test]
    fn what_is_sent_serves_for_the_same_type_and_length() {
        let mut packets = Packets::default();
        packets.keep(Box::new(vec![7.0_f32; LEN]));
        packets.keep(Box::new(vec![0_u32; LEN - 1]));
        assert!(packets.take(DType::U32, LEN - 1).is_none(), "it is small");
        assert!(
            packets.take(DType::U32, LEN).is_none(),
            "it has another type"
        );
        assert!(packets.take(DType::F32, LEN).is_some());
        assert!(packets.take(DType::F32, LEN).is_none(), "it is taken");
    }

    #[test]
    fn the_oldest_make_room() {
        let mut packets = Packets::default();
        let quarter = MOST_BYTES / 4;
        for less in 0..6 {
            packets.keep(Box::new(vec![0_u8; quarter - less]));
        }
        let is_kept = |less| packets.0.iter().any(|kept| kept.len() == quarter - less);
        assert_eq!([0, 1, 2, 5].map(is_kept), [false, false, true, true]);
        packets.keep(Box::new(vec![0_u8; MOST_BYTES + 1]));
        assert_eq!(packets.0.len(), 4);
    }
}
