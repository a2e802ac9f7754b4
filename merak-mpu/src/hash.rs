//! One number for many bytes, the same in every process and on every host.

/// The 64-bit FNV-1a hash (Fowler, Noll and Vo) of some bytes. Random numbers depend on it, so it
/// never changes.
///
/// ```
/// assert_eq!(merak_mpu::hash::fnv1a(*b"a"), 0xaf63_dc4c_8601_ec8c);
/// ```
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
