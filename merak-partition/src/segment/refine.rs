//! More cuts where there are fewer segments than stages.

use crate::{Error, Result, borders::Borders};
use std::{cmp::Reverse, ops::Range};

/// Splits segments until there are `num_stages`.
///
/// Each time the segment with most parameters is split where the fewest counted values cross. Ties
/// go to the fewest bytes, then to the most even parameters, then to the last border. A cut that
/// leaves parameters on both sides goes before any that does not, since a stage without parameters
/// only waits.
pub(super) fn until(bounds: &mut Vec<usize>, borders: &Borders, num_stages: usize) -> Result<()> {
    let mut sums = vec![0];
    let mut readers = vec![0];
    for node in 0..borders.num_nodes() {
        sums.push(sums[node] + borders.params[node]);
        readers.push(readers[node] + usize::from(borders.reads_params[node]));
    }
    let prefix = Prefix {
        borders,
        sums,
        readers,
    };
    while bounds.len() - 1 < num_stages {
        let best = [true, false]
            .into_iter()
            .find_map(|both_sides| prefix.best_cut(bounds, both_sides));
        let Some((segment, border)) = best else {
            return Err(Error::NoLegalCut {
                segments: bounds.len() - 1,
                num_stages,
            });
        };
        bounds.insert(segment + 1, border);
    }
    Ok(())
}

struct Prefix<'a> {
    borders: &'a Borders,
    /// Parameters of all nodes before each border.
    sums: Vec<usize>,
    /// Nodes before each border that read parameters.
    readers: Vec<usize>,
}

impl Prefix<'_> {
    /// The segment with most parameters that can be cut, and where.
    fn best_cut(&self, bounds: &[usize], both_sides: bool) -> Option<(usize, usize)> {
        let mut segments: Vec<_> = (0..bounds.len() - 1).collect();
        segments.sort_by_key(|&s| Reverse(self.sums[bounds[s + 1]] - self.sums[bounds[s]]));
        segments
            .into_iter()
            .find_map(|s| Some((s, self.best_border(bounds[s]..bounds[s + 1], both_sides)?)))
    }

    fn best_border(&self, nodes: Range<usize>, both_sides: bool) -> Option<usize> {
        let Range { start, end } = nodes;
        let holds = |from: usize, to: usize| self.readers[to] > self.readers[from];
        let legal = (start + 1..end).filter(|&border| self.borders.allows(border));
        let legal =
            legal.filter(|&border| !both_sides || (holds(start, border) && holds(border, end)));
        legal.min_by_key(|&border| {
            let unevenness =
                (self.sums[border] - self.sums[start]).abs_diff(self.sums[end] - self.sums[border]);
            (
                self.borders.counted[border],
                self.borders.bytes[border],
                unevenness,
                Reverse(border),
            )
        })
    }
}
