//! CRC32 of stretches of a file, summed while the file is read.
//!
//! Readers pass on what they read, in any order and in parts of any size. A stretch is checked as
//! soon as each of its bytes has passed. So nothing is read for the check alone, and a stretch of
//! which some bytes never pass is not checked.

use crc32fast::Hasher;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Most parts of a stretch that are held apart. A stretch that is read in more is not checked.
const MAX_PARTS: usize = 1024;

/// A stretch of a file, and what the file says that its bytes sum to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stretch {
    /// Its first byte, and the one after its last.
    pub(crate) bytes: [u64; 2],
    pub(crate) checksum: u32,
    pub(crate) name: String,
}

/// The stretches of a file that are summed.
#[derive(Debug)]
pub(crate) struct Sums(Vec<Sum>);

#[derive(Debug)]
struct Sum {
    stretch: Stretch,
    /// The parts that have passed, apart from each other, by their first bytes: the byte after the
    /// last, and the sum. `None` where there is nothing left to check.
    parts: Mutex<Option<BTreeMap<u64, (u64, Hasher)>>>,
}

impl Sums {
    /// Of stretches that overlap, one is summed. Stretches without a checksum, which is 0 then, are
    /// not.
    pub(crate) fn new(mut stretches: Vec<Stretch>) -> Self {
        stretches.sort_unstable();
        let mut end = 0;
        stretches.retain(|stretch| {
            let [first, last] = stretch.bytes;
            let is_summed = stretch.checksum != 0 && first >= end && last > first;
            if is_summed {
                end = last;
            }
            is_summed
        });
        let sum = |stretch| Sum {
            stretch,
            parts: Mutex::new(Some(BTreeMap::new())),
        };
        Self(stretches.into_iter().map(sum).collect())
    }

    /// Takes note of bytes that were read at `at`.
    ///
    /// # Errors
    /// The reason why they are damaged: a stretch has passed whole, and has another sum.
    pub(crate) fn pass(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        let end = at + bytes.len() as u64;
        let first = self.0.partition_point(|sum| sum.stretch.bytes[1] <= at);
        let touched = self.0[first..].iter();
        let touched = touched.take_while(|sum| sum.stretch.bytes[0] < end);
        for sum in touched {
            let [first, last] = sum.stretch.bytes.map(|bound| bound.clamp(at, end));
            sum.pass(first, &bytes[(first - at) as usize..(last - at) as usize])?;
        }
        Ok(())
    }
}

impl Sum {
    fn pass(&self, first: u64, bytes: &[u8]) -> Result<(), String> {
        let mut guard = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(parts) = &mut *guard else {
            return Ok(());
        };
        add(parts, first, bytes);
        let [begin, end] = self.stretch.bytes;
        let is_whole = |(at, (last, _)): &(&u64, &(u64, Hasher))| **at == begin && *last == end;
        let Some((_, (_, hasher))) = parts.first_key_value().filter(is_whole) else {
            if parts.len() > MAX_PARTS {
                *guard = None;
            }
            return Ok(());
        };
        let found = hasher.clone().finalize();
        check(&self.stretch.name, self.stretch.checksum, found)?;
        *guard = None;
        Ok(())
    }
}

/// Adds the bytes that have not passed before to the parts that have.
fn add(parts: &mut BTreeMap<u64, (u64, Hasher)>, first: u64, bytes: &[u8]) {
    let (mut at, end) = (first, first + bytes.len() as u64);
    while at < end {
        let before = parts.range(..=at).next_back();
        let before = before.map(|(&begin, &(last, _))| (begin, last));
        if let Some((_, last)) = before.filter(|(_, last)| *last > at) {
            at = last;
            continue;
        }
        let next = parts
            .range(at..)
            .next()
            .map_or(end, |(&begin, _)| begin.min(end));
        // The part that ends here goes on.
        let begin = before.map_or(at, |(begin, last)| if last == at { begin } else { at });
        let behind = parts.remove(&next);
        let (last, hasher) = parts.entry(begin).or_insert_with(|| (at, Hasher::new()));
        hasher.update(&bytes[(at - first) as usize..(next - first) as usize]);
        *last = next;
        if let Some((end, behind)) = behind {
            hasher.combine(&behind);
            *last = end;
        }
        at = *last;
    }
}

/// Compares the checksum of an archive's member with the one that the archive has for it; 0 stands
/// for none, as in what `torch.save` writes without computing them.
pub(crate) fn check(name: &str, expected: u32, found: u32) -> Result<(), String> {
    if expected == found || expected == 0 {
        return Ok(());
    }
    Err(format!(
        "member `{name}` has the checksum {found:08x}, expected {expected:08x}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stretch(bytes: [u64; 2], checksum: u32) -> Stretch {
        let name = "data/0".to_owned();
        Stretch {
            bytes,
            checksum,
            name,
        }
    }

    proptest! {
        #[test]
        fn a_stretch_is_checked_once_all_of_it_has_passed_in_any_order(
            reads in prop::collection::vec((0_usize..40, 0_usize..20), 0..30),
            damaged in 10_usize..30,
        ) {
            let good: Vec<_> = (0..60_u8).map(|byte| byte.wrapping_mul(37)).collect();
            let expected = crc32fast::hash(&good[10..30]);
            let mut bad = good.clone();
            bad[damaged] ^= 4;
            let sums = || Sums::new(vec![stretch([10, 30], expected)]);
            let (of_good, of_bad) = (sums(), sums());
            let mut passed = [false; 60];
            for (at, length) in reads {
                let range = at..at + length;
                passed[range.clone()].fill(true);
                let is_whole = passed[10..30].iter().all(|passed| *passed);
                let touches = range.start < 30 && range.end > 10;
                prop_assert_eq!(of_good.pass(at as u64, &good[range.clone()]), Ok(()));
                let found = of_bad.pass(at as u64, &bad[range]);
                prop_assert_eq!(found.is_err(), is_whole && touches);
            }
        }
    }

    #[test]
    fn stretches_that_overlap_are_summed_once_and_those_without_a_sum_never() {
        let sums = Sums::new(vec![
            stretch([0, 4], 1),
            stretch([0, 4], 1),
            stretch([2, 6], 1),
            stretch([6, 8], 0),
        ]);
        assert_eq!(sums.0.len(), 1);
        assert_eq!(sums.pass(4, &[0; 4]), Ok(()));
        let refused = sums.pass(0, &[0; 4]).unwrap_err();
        insta::assert_snapshot!(refused, @"member `data/0` has the checksum 2144df1c, expected 00000001");
    }

    #[test]
    fn a_stretch_in_very_many_parts_takes_no_more_memory() {
        let sums = Sums::new(vec![stretch([0, 1 << 20], 1)]);
        for at in (0..1 << 20).step_by(2) {
            assert_eq!(sums.pass(at, &[0]), Ok(()));
        }
        assert!(sums.0[0].parts.lock().unwrap().is_none());
    }
}
