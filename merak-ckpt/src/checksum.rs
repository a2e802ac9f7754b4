//! The checksum of files and slices.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::io::{self, Write};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// XXH3, 64 bits, seed 0; printed as 16 hexadecimal digits.
///
/// It finds damage, not forgery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Checksum(pub u64);

impl Checksum {
    /// The checksum of these bytes.
    ///
    /// ```
    /// use merak_ckpt::Checksum;
    ///
    /// assert_eq!(Checksum::of(b"").to_string(), "2d06800538d394c2");
    /// ```
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxh3_64(bytes))
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parsed = u64::from_str_radix(&text, 16).ok().map(Self);
        parsed
            .filter(|checksum| checksum.to_string() == text)
            .ok_or_else(|| {
                D::Error::custom(format!("checksum `{text}` is not 16 hexadecimal digits"))
            })
    }
}

/// Passes bytes on to a writer, counting and hashing them.
pub(crate) struct HashingWriter<W> {
    inner: W,
    /// Absent where the checksum is not needed.
    hasher: Option<Xxh3>,
    written: u64,
}

impl<W: Write> HashingWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self {
            inner,
            hasher: Some(Xxh3::new()),
            written: 0,
        }
    }

    /// Counts only; the checksum is that of no bytes.
    pub(crate) fn without_hash(inner: W) -> Self {
        Self {
            hasher: None,
            ..Self::new(inner)
        }
    }

    /// The writer, the number of bytes and their checksum.
    pub(crate) fn finish(self) -> (W, u64, Checksum) {
        let hasher = self.hasher.unwrap_or_default();
        (self.inner, self.written, Checksum(hasher.digest()))
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&bytes[..n]);
        }
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back_is_the_identity_and_other_spellings_are_refused() {
        let checksum = Checksum(0x00ab_0000_0000_0001);
        let json = serde_json::to_string(&checksum).unwrap();
        assert_eq!(serde_json::from_str::<Checksum>(&json).unwrap(), checksum);
        for text in [
            "\"ab\"",
            "\"00AB000000000001\"",
            "\"+0ab000000000001\"",
            "7",
        ] {
            assert!(serde_json::from_str::<Checksum>(text).is_err(), "{text}");
        }
    }
}
