//! The numbers that a key takes.

use std::{
    fmt::{self, Display},
    ops::{Bound, RangeBounds},
};

/// The numbers that a key takes, from a smallest to a largest one; either may be missing or left
/// out itself.
///
/// The check of a value, the help and the page of keys all read it. It prints as words that follow
/// "must be": `at least 1`, `from 0 to 1`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    low: Bound<f64>,
    high: Bound<f64>,
}

impl Range {
    /// Every number.
    pub const ANY: Self = Self {
        low: Bound::Unbounded,
        high: Bound::Unbounded,
    };

    /// These numbers from `limit` on.
    #[must_use]
    pub const fn at_least(self, limit: i64) -> Self {
        self.at_least_f64(limit as f64)
    }

    /// These numbers from `limit` on, which need not be an integer.
    #[must_use]
    pub const fn at_least_f64(self, limit: f64) -> Self {
        Self {
            low: Bound::Included(limit),
            ..self
        }
    }

    /// These numbers above `limit`.
    #[must_use]
    pub const fn more_than(self, limit: i64) -> Self {
        Self {
            low: Bound::Excluded(limit as f64),
            ..self
        }
    }

    /// These numbers up to `limit`.
    #[must_use]
    pub const fn at_most(self, limit: i64) -> Self {
        self.at_most_f64(limit as f64)
    }

    /// These numbers up to `limit`, which need not be an integer.
    #[must_use]
    pub const fn at_most_f64(self, limit: f64) -> Self {
        Self {
            high: Bound::Included(limit),
            ..self
        }
    }

    /// These numbers below `limit`.
    #[must_use]
    pub const fn less_than(self, limit: i64) -> Self {
        Self {
            high: Bound::Excluded(limit as f64),
            ..self
        }
    }

    /// Whether the range has this number; NaN lies in [`Range::ANY`] alone.
    pub fn contains(self, number: f64) -> bool {
        (self.low, self.high).contains(&number)
    }

    /// The numbers of a kind, such as `an integer`, that lie in the range.
    pub(crate) fn of(self, kind: &str) -> String {
        match (self.low, self.high) {
            (Bound::Unbounded, Bound::Unbounded) => kind.to_owned(),
            (Bound::Included(_), Bound::Included(_)) => format!("{kind} {self}"),
            _ => format!("{kind} of {self}"),
        }
    }
}

impl Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Bound::Included(low), Bound::Included(high)) = (self.low, self.high) {
            return write!(f, "from {} to {}", Limit(low), Limit(high));
        }
        match self.low {
            Bound::Included(limit) => write!(f, "at least {}", Limit(limit))?,
            Bound::Excluded(limit) => write!(f, "more than {}", Limit(limit))?,
            Bound::Unbounded => {}
        }
        if self.low != Bound::Unbounded && self.high != Bound::Unbounded {
            f.write_str(" and ")?;
        }
        match self.high {
            Bound::Included(limit) => write!(f, "at most {}", Limit(limit)),
            Bound::Excluded(limit) => write!(f, "less than {}", Limit(limit)),
            Bound::Unbounded => Ok(()),
        }
    }
}

/// A limit for messages; one with many digits gets an exponent.
struct Limit(f64);

impl Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(limit) = self;
        if *limit == 0.0 || (1e-6..1e9).contains(&limit.abs()) {
            write!(f, "{limit}")
        } else {
            write!(f, "{limit:e}")
        }
    }
}

/// A number for messages; very large and very small ones get an exponent.
pub(crate) struct Number(pub(crate) f64);

impl Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number) = self;
        if *number == 0.0 || (1e-6..1e15).contains(&number.abs()) {
            write!(f, "{number}")
        } else {
            write!(f, "{number:e}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_the_numbers_that_its_words_name() {
        let any = Range::ANY;
        for (range, words, inside, outside) in [
            (any.at_least(1), "at least 1", vec![1.0, 1e300], vec![0.0]),
            (any.more_than(0), "more than 0", vec![1e-300], vec![0.0]),
            (any.at_most(8), "at most 8", vec![-1e300, 8.0], vec![8.5]),
            (
                any.at_least(0).at_most(1),
                "from 0 to 1",
                vec![0.0, 1.0],
                vec![-1e-300, 1.1],
            ),
            (
                any.at_least(0).less_than(1),
                "at least 0 and less than 1",
                vec![0.0, 0.999],
                vec![1.0],
            ),
            (
                any.more_than(0).at_most(1_000_000_000),
                "more than 0 and at most 1e9",
                vec![1e9],
                vec![0.0, 1.1e9],
            ),
            (
                any.at_least_f64(1e-9),
                "at least 1e-9",
                vec![1e-9],
                vec![0.0, 9e-10],
            ),
        ] {
            assert_eq!(range.to_string(), words);
            assert!(inside.iter().all(|x| range.contains(*x)), "{words}");
            assert!(!outside.iter().any(|x| range.contains(*x)), "{words}");
            assert!(!range.contains(f64::NAN), "{words}");
        }
        assert!(any.contains(f64::INFINITY));
        assert_eq!(any.at_least(1).of("an integer"), "an integer of at least 1");
        assert_eq!(
            any.at_least(0).at_most(1).of("a number"),
            "a number from 0 to 1"
        );
        assert_eq!(any.of("a number"), "a number");
    }
}
