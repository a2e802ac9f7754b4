//! CRC32 of stretches of a file, summed while the file is read.
//!
//! Readers pass on what they read, in any order and in parts of any size. A stretch is checked as
//! soon as each of its bytes has passed. The rest of a stretch that was read in part is read at the
//! end, by [`Sums::finish`], so that no byte is read twice for the check.
//!
//! The parts that have passed are held apart until they meet. Where there are too many of them, the
//! shortest gaps between them are read at once.

use crc32fast::Hasher;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// Most parts of a stretch that are held apart.
const MAX_PARTS: usize = 1024;
/// Most bytes of a gap that are read at once.
const BLOCK_BYTES: u64 = 1 << 20;

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
    /// The parts that have passed; `None` where there is nothing left to check.
    parts: Mutex<Option<Parts>>,
}

/// Parts of a stretch, apart from each other, by their first bytes: the byte after the last, and
/// the sum.
type Parts = BTreeMap<u64, (u64, Hasher)>;

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

    /// Takes note of bytes that were read at `at` of the file.
    ///
    /// # Errors
    /// The reason why they are damaged: a stretch has passed whole, and has another sum.
    pub(crate) fn pass(&self, file: &File, at: u64, bytes: &[u8]) -> Result<(), String> {
        let end = at + bytes.len() as u64;
        let first = self.0.partition_point(|sum| sum.stretch.bytes[1] <= at);
        let touched = self.0[first..].iter();
        let touched = touched.take_while(|sum| sum.stretch.bytes[0] < end);
        for sum in touched {
            let [first, last] = sum.stretch.bytes.map(|bound| bound.clamp(at, end));
            let bytes = &bytes[(first - at) as usize..(last - at) as usize];
            sum.with_parts(|parts| {
                add(parts, first, bytes);
                if parts.len() > MAX_PARTS {
                    close_shortest(parts, file)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Reads the rest of each stretch that has passed in part, and checks it.
    ///
    /// # Errors
    /// As [`Sums::pass`]; the reason why the rest cannot be read.
    pub(crate) fn finish(&self, file: &File) -> Result<(), String> {
        self.0.iter().try_for_each(|sum| {
            sum.with_parts(|parts| {
                if parts.is_empty() {
                    return Ok(());
                }
                let [begin, end] = sum.stretch.bytes;
                let rest = gaps(parts, begin, Some(end));
                rest.into_iter().try_for_each(|gap| close(parts, gap, file))
            })
        })
    }
}

impl Sum {
    /// Changes the parts, unless the stretch is checked already; checks it once they are one.
    fn with_parts(
        &self,
        change: impl FnOnce(&mut Parts) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut guard = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(parts) = &mut *guard else {
            return Ok(());
        };
        change(parts)?;
        let [begin, end] = self.stretch.bytes;
        let is_whole = |(at, (last, _)): &(&u64, &(u64, Hasher))| **at == begin && *last == end;
        if let Some((_, (_, hasher))) = parts.first_key_value().filter(is_whole) {
            let found = hasher.clone().finalize();
            check(&self.stretch.name, self.stretch.checksum, found)?;
            *guard = None;
        }
        Ok(())
    }
}

/// The gaps between the parts, with the one after `begin` and the one before `end`.
fn gaps(parts: &Parts, begin: u64, end: Option<u64>) -> Vec<Range<u64>> {
    let ends = parts.values().map(|(last, _)| *last);
    let begins = parts.keys().copied().chain(end);
    let gaps = std::iter::once(begin).chain(ends).zip(begins);
    let gaps = gaps.map(|(from, to)| from..to);
    gaps.filter(|gap| !gap.is_empty()).collect()
}

/// Reads the shorter half of the gaps between the parts.
fn close_shortest(parts: &mut Parts, file: &File) -> Result<(), String> {
    let first = parts.keys().next().copied().unwrap_or(0);
    let mut gaps = gaps(parts, first, None);
    gaps.sort_by_key(|gap| gap.end - gap.start);
    gaps.truncate(gaps.len().div_ceil(2));
    gaps.into_iter().try_for_each(|gap| close(parts, gap, file))
}

/// Reads a gap between parts.
fn close(parts: &mut Parts, gap: Range<u64>, file: &File) -> Result<(), String> {
    let mut block = vec![0; BLOCK_BYTES.min(gap.end - gap.start) as usize];
    for at in gap.clone().step_by(BLOCK_BYTES as usize) {
        let block = &mut block[..BLOCK_BYTES.min(gap.end - at) as usize];
        let read = file.read_exact_at(block, at);
        read.map_err(|error| format!("it cannot be read: {error}"))?;
        add(parts, at, block);
    }
    Ok(())
}

/// Adds the bytes that have not passed before to the parts that have.
fn add(parts: &mut Parts, first: u64, bytes: &[u8]) {
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

    /// A file with these bytes.
    fn file(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().expect("a temporary file");
        file.write_all_at(bytes, 0).expect("it can be written");
        file
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
            let [good_file, bad_file] = [file(&good), file(&bad)];
            let mut passed = [false; 60];
            for (at, length) in reads {
                let range = at..at + length;
                passed[range.clone()].fill(true);
                let is_whole = passed[10..30].iter().all(|passed| *passed);
                let touches = range.start < 30 && range.end > 10;
                let good = &good[range.clone()];
                prop_assert_eq!(of_good.pass(&good_file, at as u64, good), Ok(()));
                let found = of_bad.pass(&bad_file, at as u64, &bad[range]);
                prop_assert_eq!(found.is_err(), is_whole && touches);
            }
            let is_touched = passed[10..30].contains(&true);
            prop_assert_eq!(of_good.finish(&good_file), Ok(()));
            prop_assert_eq!(of_bad.finish(&bad_file).is_err(), is_touched);
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
        let file = file(&[0; 8]);
        assert_eq!(sums.0.len(), 1);
        assert_eq!(sums.pass(&file, 4, &[0; 4]), Ok(()));
        let refused = sums.pass(&file, 0, &[0; 4]).unwrap_err();
        insta::assert_snapshot!(refused, @"member `data/0` has the checksum 2144df1c, expected 00000001");
    }

    #[test]
    fn a_stretch_in_very_many_parts_is_checked_and_takes_no_more_memory() {
        let good: Vec<_> = (0..1 << 16).map(|index: u32| (index / 7) as u8).collect();
        let mut bad = good.clone();
        bad[777] ^= 1;
        for bytes in [&good, &bad] {
            let file = file(bytes);
            let end = bytes.len() as u64;
            let sums = Sums::new(vec![stretch([0, end], crc32fast::hash(&good))]);
            // Pairs with gaps of one and of nine bytes.
            let pairs = (0..bytes.len()).step_by(12).map(|at| [at, at + 2]);
            for at in pairs.flatten() {
                sums.pass(&file, at as u64, &bytes[at..=at]).unwrap();
                let parts = sums.0[0].parts.lock().unwrap();
                assert!(parts.as_ref().is_some_and(|parts| parts.len() <= MAX_PARTS));
            }
            assert_eq!(sums.finish(&file).is_ok(), *bytes == good);
        }
    }
}
