//! Numbers of bytes as people write them.

use crate::words::brief;

/// Units by their names in small letters, longer names first.
const UNITS: [(&str, u64); 13] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
];

/// Why a text is no number of bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a whole number of bytes below 2^64 as in 1000000, 64KiB, 256M or 5GB, found `{}`",
    brief(found)
)]
pub struct BadByteSize {
    /// The text.
    pub found: String,
}

/// Reads a number of bytes: `1000`, `5GB` (powers of 1000), `256MiB` or `256M` (powers of 1024, as
/// `dd` and `truncate` read them), in capitals or small letters.
///
/// # Errors
/// When it is no whole number, has an unknown unit, or does not fit into 64 bits.
///
/// ```
/// use merak_ckpt::parse_byte_size;
/// assert_eq!(parse_byte_size("64KiB"), parse_byte_size("64k"));
/// assert_eq!(parse_byte_size("1M"), Ok(1 << 20));
/// ```
pub fn parse_byte_size(text: &str) -> Result<u64, BadByteSize> {
    let small = text.trim().to_ascii_lowercase();
    let unit = UNITS.iter().find_map(|(unit, size)| {
        let number = small.strip_suffix(unit)?;
        Some((number, *size))
    });
    let (number, size) = unit.unwrap_or((&small, 1));
    let number = number.trim().parse::<u64>().ok();
    let bytes = number.and_then(|number| number.checked_mul(size));
    bytes.ok_or_else(|| BadByteSize {
        found: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_decimal_and_binary_units() {
        let sizes = [
            "7", "5GB", "256MiB", "3 KB", "0B", "1M", "64K", "2 G", "64KiB",
        ];
        let sizes = sizes.map(|text| parse_byte_size(text).unwrap());
        let expected = [
            7,
            5_000_000_000,
            256 << 20,
            3_000,
            0,
            1 << 20,
            64 << 10,
            2 << 30,
            64 << 10,
        ];
        assert_eq!(sizes, expected);
        for text in ["", "GB", "M", "-1", "1.5GB", "99999999999TB", "1gbit", "k1"] {
            assert!(parse_byte_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_unit_is_the_same_in_capitals_and_in_small_letters() {
        for (unit, size) in UNITS {
            for unit in [unit.to_owned(), unit.to_uppercase()] {
                assert_eq!(parse_byte_size(&format!("3{unit}")), Ok(3 * size), "{unit}");
                assert_eq!(
                    parse_byte_size(&format!(" 3 {unit} ")),
                    Ok(3 * size),
                    "{unit}"
                );
            }
        }
    }
}
