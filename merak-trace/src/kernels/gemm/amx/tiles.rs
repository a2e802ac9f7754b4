//! The matrix units: their registers and the innermost loop on them.
#![expect(
    unsafe_code,
    reason = "the standard library has no stable functions for these units"
)]

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

use pulp::f32x16;

use super::pack::{LINES, SPLIT, group_len};

/// Whether this processor has the units and the system lets this process use them.
pub(in super::super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const TILE: u32 = 1 << 24;
        const BF16: u32 = 1 << 22;
        let features = __cpuid_count(7, 0).edx;
        features & (TILE | BF16) == TILE | BF16 && permitted()
    })
}

/// Asks the system for the tile registers, which each process has to do because they are large.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and changes nothing but what this process may use.
    let status = unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        )
    };
    status == 0
}

/// Only on Linux is it known how to ask.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Shapes of the eight tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static EIGHT_FULL_TILES: Config = {
    let mut config = Config {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
        tile += 1;
    }
    config
};

/// The sums of 32 rows and 32 columns.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Sums([[f32x16; 2]; LINES]);

impl Sums {
    pub(super) fn new() -> Self {
        Self(bytemuck::Zeroable::zeroed())
    }

    pub(super) fn rows(&self) -> &[[f32x16; 2]; LINES] {
        &self.0
    }
}

/// Multiplies both tiles of a left operand by both of a right one, and adds to the sums.
macro_rules! four_products {
    () => {
        "tdpbf16ps tmm0, tmm4, tmm6
         tdpbf16ps tmm1, tmm4, tmm7
         tdpbf16ps tmm2, tmm5, tmm6
         tdpbf16ps tmm3, tmm5, tmm7"
    };
}

/// The tile registers of this thread, configured until this is dropped.
#[derive(Debug)]
pub(super) struct Tiles {
    /// The registers belong to one thread.
    not_send: PhantomData<*const ()>,
}

impl Tiles {
    /// # Panics
    ///
    /// If the units are not [`available`].
    pub(super) fn configure() -> Self {
        #[cfg(test)]
        if !available() {
            return Self {
                not_send: PhantomData,
            };
        }
        assert!(available(), "the caller asks for tiles where there are any");
        // SAFETY: the instruction exists, as was asserted, and the configuration is 64 bytes of
        // palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const EIGHT_FULL_TILES, options(nostack, readonly));
        }
        Self {
            not_send: PhantomData,
        }
    }

    /// Multiplies a packed strip by a packed panel of the same depth: of split numbers, or of
    /// rounded ones, which are a single part.
    ///
    /// # Panics
    ///
    /// If the operands differ in their number of groups, or one has a partial group.
    #[inline(always)]
    pub(super) fn multiply<const PARTS: usize>(
        &self,
        left: &[u32],
        right: &[u32],
        sums: &mut Sums,
    ) {
        #[cfg(test)]
        if !available() {
            return emulated::multiply::<PARTS>(left, right, sums);
        }
        if PARTS == 1 {
            self.multiply_rounded(left, right, sums);
        } else {
            self.multiply_split(left, right, sums);
        }
    }

    #[expect(
        clippy::unused_self,
        reason = "holding it shows that the tiles are configured"
    )]
    #[inline]
    fn multiply_rounded(&self, left: &[u32], right: &[u32], sums: &mut Sums) {
        let groups = groups(left, right, 1);
        // SAFETY: the tiles are configured on this thread as long as `self` lives. The loop reads
        // `groups` times 2 KiB from both operands, which hold as much, and the last part writes the
        // 4 KiB of `sums`. The registers of the tiles are used nowhere else.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {row}]",
                "tileloadd tmm5, [{a} + {row} + 1024]",
                "tileloadd tmm6, [{b} + {row}]",
                "tileloadd tmm7, [{b} + {row} + 1024]",
                four_products!(),
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {n}",
                "jnz 2b",
                "mov {row}, 128",
                "tilestored [{c} + {row}], tmm0",
                "tilestored [{c} + {row} + 64], tmm1",
                "tilestored [{c} + {row} + 2048], tmm2",
                "tilestored [{c} + {row} + 2112], tmm3",
                a = inout(reg) left.as_ptr() => _,
                b = inout(reg) right.as_ptr() => _,
                c = in(reg) &raw mut *sums,
                n = inout(reg) groups => _,
                row = inout(reg) 64_usize => _,
                options(nostack),
            );
        }
    }

    /// The five smaller products of parts are summed first, while the sums are small, then the
    /// largest.
    #[expect(
        clippy::unused_self,
        reason = "holding it shows that the tiles are configured"
    )]
    #[inline]
    fn multiply_split(&self, left: &[u32], right: &[u32], sums: &mut Sums) {
        let groups = groups(left, right, SPLIT);
        let bytes = size_of_val(left);
        // SAFETY: the tiles are configured on this thread as long as `self` lives. The loops read
        // `groups` times 6 KiB from both operands, which hold as much, and the last part writes the
        // 4 KiB of `sums`. The registers of the tiles are used nowhere else. (a, b) below: part a
        // of the left operand times part b of the right one.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "mov {n}, {groups}",
                "2:",
                // (3, 1)
                "tileloadd tmm4, [{a} + {row} + 4096]",
                "tileloadd tmm5, [{a} + {row} + 5120]",
                "tileloadd tmm6, [{b} + {row}]",
                "tileloadd tmm7, [{b} + {row} + 1024]",
                four_products!(),
                // (2, 1)
                "tileloadd tmm4, [{a} + {row} + 2048]",
                "tileloadd tmm5, [{a} + {row} + 3072]",
                four_products!(),
                // (2, 2)
                "tileloadd tmm6, [{b} + {row} + 2048]",
                "tileloadd tmm7, [{b} + {row} + 3072]",
                four_products!(),
                // (1, 2)
                "tileloadd tmm4, [{a} + {row}]",
                "tileloadd tmm5, [{a} + {row} + 1024]",
                four_products!(),
                // (1, 3)
                "tileloadd tmm6, [{b} + {row} + 4096]",
                "tileloadd tmm7, [{b} + {row} + 5120]",
                four_products!(),
                "add {a}, 6144",
                "add {b}, 6144",
                "dec {n}",
                "jnz 2b",
                "sub {a}, {bytes}",
                "sub {b}, {bytes}",
                "mov {n}, {groups}",
                "3:",
                // (1, 1)
                "tileloadd tmm4, [{a} + {row}]",
                "tileloadd tmm5, [{a} + {row} + 1024]",
                "tileloadd tmm6, [{b} + {row}]",
                "tileloadd tmm7, [{b} + {row} + 1024]",
                four_products!(),
                "add {a}, 6144",
                "add {b}, 6144",
                "dec {n}",
                "jnz 3b",
                "mov {row}, 128",
                "tilestored [{c} + {row}], tmm0",
                "tilestored [{c} + {row} + 64], tmm1",
                "tilestored [{c} + {row} + 2048], tmm2",
                "tilestored [{c} + {row} + 2112], tmm3",
                a = inout(reg) left.as_ptr() => _,
                b = inout(reg) right.as_ptr() => _,
                c = in(reg) &raw mut *sums,
                n = out(reg) _,
                groups = in(reg) groups,
                bytes = in(reg) bytes,
                row = inout(reg) 64_usize => _,
                options(nostack),
            );
        }
    }
}

/// The groups of two operands, which must be whole and as many.
fn groups(left: &[u32], right: &[u32], parts: usize) -> usize {
    let len = group_len(parts);
    let groups = left.len() / len;
    assert!(groups > 0 && left.len() == groups * len && right.len() == left.len());
    groups
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(test)]
        if !available() {
            return;
        }
        // SAFETY: tiles were configured, so the instruction exists; nothing uses them from here on.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
    }
}

/// The units in software, for tests on processors without them.
#[cfg(test)]
mod emulated {
    use super::*;

    const SIDE: usize = LINES / 2;

    /// Parts of the left and of the right operand, in the order in which their products are added.
    const SMALLER: &[(usize, usize)] = &[(2, 0), (1, 0), (1, 1), (0, 1), (0, 2)];
    const LARGEST: &[(usize, usize)] = &[(0, 0)];

    pub(super) fn multiply<const PARTS: usize>(left: &[u32], right: &[u32], sums: &mut Sums) {
        let groups = groups(left, right, PARTS);
        let sums: &mut [[f32; LINES]; LINES] = bytemuck::cast_mut(&mut sums.0);
        *sums = [[0.0; LINES]; LINES];
        let rounds = [SMALLER, LARGEST];
        for parts in &rounds[usize::from(PARTS == 1)..] {
            for group in 0..groups {
                let tiles = |operand, part| tiles::<PARTS>(operand, group, part);
                for &(a, b) in *parts {
                    add_tiles(tiles(left, a), tiles(right, b), sums);
                }
            }
        }
    }

    /// Both tiles of a part of a group.
    fn tiles<const PARTS: usize>(operand: &[u32], group: usize, part: usize) -> &[u32] {
        let len = 2 * SIDE * SIDE;
        &operand[group * group_len(PARTS) + part * len..][..len]
    }

    fn add_tiles(a: &[u32], b: &[u32], sums: &mut [[f32; LINES]; LINES]) {
        let halves = |pair: u32| [pair << 16, pair & 0xffff_0000].map(f32::from_bits);
        for (a, sums) in a.chunks_exact(SIDE).zip(sums) {
            for (b, sums) in b.chunks_exact(SIDE * SIDE).zip(sums.chunks_exact_mut(SIDE)) {
                for (&a, b) in a.iter().zip(b.chunks_exact(SIDE)) {
                    let [a0, a1] = halves(a);
                    for (&b, sum) in b.iter().zip(&mut *sums) {
                        let [b0, b1] = halves(b);
                        *sum += a0 * b0 + a1 * b1;
                    }
                }
            }
        }
    }
}
