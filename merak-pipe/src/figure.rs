//! Numbers as people read them.

use std::fmt;

/// A number for people: with four digits after the point at most, and of a number below 1 with
/// four that are not leading zeros; one that has many zeros with an exponent.
///
/// ```
/// use merak_pipe::Figure;
/// let numbers = [0.0, 12.5, 59.76666630000001, 3.0000000000000013, 0.0012345678, 1e-320, 2e22];
/// let texts = numbers.map(|number| Figure(number).to_string());
/// assert_eq!(texts, ["0", "12.5", "59.7667", "3", "0.001235", "1e-320", "2e22"]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure(pub f64);

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number) = *self;
        if !has_few_zeros(number) {
            return f.write_str(&exact(number));
        }
        let power = number.abs().log10().floor();
        let digits = if power < 0.0 { 3.0 - power } else { 4.0 };
        let digits = if number == 0.0 { 0 } else { digits as usize };
        let text = format!("{number:.digits$}");
        if text.contains('.') {
            f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
        } else {
            f.write_str(&text)
        }
    }
}

fn has_few_zeros(number: f64) -> bool {
    number == 0.0 || (1e-5..1e16).contains(&number.abs())
}

/// A number as it is, without a point where it is whole; one that has many zeros with an exponent.
pub(crate) fn exact(number: f64) -> String {
    if has_few_zeros(number) {
        format!("{number}")
    } else {
        format!("{number:e}")
    }
}
