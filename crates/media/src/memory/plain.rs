//! Copies without a checksum: what a strong straightforward program would do, to measure against.

use super::kernel;
use crate::buffer::{Buffer, check_range};
use crate::error::{Error, Result};
use kvdepot_plan::Span;

/// A copy method without hashing.
///
/// The fastest method depends on the machine, the length of the pieces and the state of the caches;
/// the limit is the best of all methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Plain {
    /// The C library's `memcpy`.
    Memcpy,
    /// 256-bit streaming stores.
    Streaming,
    /// 256-bit streaming stores that alternate between the two halves of a piece. Two streams of
    /// memory accesses are faster than one.
    StreamingHalves,
    /// 512-bit streaming stores.
    Streaming512,
    /// 512-bit streaming stores that alternate between the four quarters of a piece.
    Streaming512Quarters,
    /// The instruction `rep movsb`.
    RepMovsb,
}

impl Plain {
    /// Returns all methods that this machine supports.
    #[must_use]
    pub fn all() -> Vec<Self> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let mut all = vec![Self::Memcpy, Self::RepMovsb];
            if std::arch::is_x86_feature_detected!("avx2") {
                all.extend([Self::Streaming, Self::StreamingHalves]);
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                all.extend([Self::Streaming512, Self::Streaming512Quarters]);
            }
            all
        }
        #[cfg(any(not(target_arch = "x86_64"), miri))]
        vec![Self::Memcpy]
    }

    /// Returns the name, for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Streaming => "streaming",
            Self::StreamingHalves => "streaming-halves",
            Self::Streaming512 => "streaming-512",
            Self::Streaming512Quarters => "streaming-512-quarters",
            Self::RepMovsb => "rep-movsb",
        }
    }

    /// Copies pieces from `src` to `dst`, in order, in the calling thread.
    ///
    /// The addresses of a piece are offsets in the two buffers. After the call, the bytes are
    /// visible to every thread that synchronizes with this one.
    ///
    /// Streaming stores need a destination aligned to 64 bytes and lengths that are multiples of
    /// 1024. Other pieces, and all pieces on a machine without such stores, are copied with
    /// `memcpy`.
    ///
    /// # Errors
    ///
    /// Before the first byte is copied: [`Error::OutOfBounds`], [`Error::ReadOnly`],
    /// [`Error::Elsewhere`], and [`Error::Overlap`] if the two buffers share memory.
    pub fn copy(self, src: &Buffer, dst: &Buffer, pieces: &[Span]) -> Result<()> {
        src.check_host()?;
        dst.check_host()?;
        if !dst.is_writable() {
            return Err(Error::ReadOnly { addr: dst.addr() });
        }
        if src.addr() < dst.addr() + dst.len() && dst.addr() < src.addr() + src.len() {
            return Err(Error::Overlap {
                tag: 0,
                addr: src.addr().max(dst.addr()) as u64,
            });
        }
        for piece in pieces {
            check_range(piece.src, piece.len, src.len() as u64)?;
            check_range(piece.dst, piece.len, dst.len() as u64)?;
        }
        let way = if Self::all().contains(&self) {
            self
        } else {
            Self::Memcpy
        };
        for piece in pieces {
            let len = piece.len as usize;
            // SAFETY: both ranges were checked above and their buffers do not overlap; the way is
            // one that this machine has.
            unsafe {
                let from = src.as_ptr().add(piece.src as usize);
                way.copy_piece(from, dst.as_mut_ptr().add(piece.dst as usize), len);
            }
        }
        kernel::fence();
        Ok(())
    }

    /// # Safety
    ///
    /// `src` is readable and `dst` writable for `len` bytes, they do not overlap, and this machine
    /// has the way.
    unsafe fn copy_piece(self, src: *const u8, dst: *mut u8, len: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let streams = dst.addr().is_multiple_of(64) && len.is_multiple_of(4 * TURN);
            // SAFETY: the caller's promise, and what was just checked.
            unsafe {
                match self {
                    Self::RepMovsb => return rep_movsb(src, dst, len),
                    Self::Streaming if streams => return stream::<1>(src, dst, len),
                    Self::StreamingHalves if streams => return stream::<2>(src, dst, len),
                    Self::Streaming512 if streams => return stream_512::<1>(src, dst, len),
                    Self::Streaming512Quarters if streams => {
                        return stream_512::<4>(src, dst, len);
                    }
                    _ => {}
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
    }
}

/// Bytes of one part before it is the next one's turn.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const TURN: usize = 256;

/// # Safety
///
/// As `copy_piece`, with AVX2; `dst` is aligned to 32 and `len` a multiple of 256 times `PARTS`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
unsafe fn stream<const PARTS: usize>(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
    for at in (0..len / PARTS).step_by(TURN) {
        for part in 0..PARTS {
            let begin = part * (len / PARTS) + at;
            for at in (begin..begin + TURN).step_by(64) {
                // SAFETY: the turn lies inside its part of the piece.
                unsafe {
                    let low = _mm256_loadu_si256(src.add(at).cast());
                    let high = _mm256_loadu_si256(src.add(at + 32).cast());
                    _mm256_stream_si256(dst.add(at).cast(), low);
                    _mm256_stream_si256(dst.add(at + 32).cast(), high);
                }
            }
        }
    }
}

/// # Safety
///
/// As `stream`, with AVX-512F; `dst` is aligned to 64.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx512f")]
unsafe fn stream_512<const PARTS: usize>(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    for at in (0..len / PARTS).step_by(TURN) {
        for part in 0..PARTS {
            let begin = part * (len / PARTS) + at;
            for at in (begin..begin + TURN).step_by(64) {
                // SAFETY: the turn lies inside its part of the piece.
                unsafe {
                    let line = _mm512_loadu_si512(src.add(at).cast());
                    _mm512_stream_si512(dst.add(at).cast(), line);
                }
            }
        }
    }
}

/// # Safety
///
/// As `copy_piece`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn rep_movsb(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise; the direction flag is clear.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") src => _,
            inout("rdi") dst => _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_copies_every_shape() {
        let len = if cfg!(miri) { 3000 } else { 100_000 };
        let content: Vec<u8> = (0..len).map(|i| (i * 31 + i / 256) as u8).collect();
        let src = Buffer::from_vec(content.clone());
        for way in Plain::all() {
            for (from, to, len) in [(0, 0, 2048), (3, 0, 1024), (64, 17, 512), (1, 2, 1000)] {
                let dst = Buffer::from_vec(vec![0; len + 200]);
                let align = dst.addr().next_multiple_of(64) - dst.addr();
                let piece = Span::new(from, (align + to) as u64, len as u64);
                way.copy(&src, &dst, &[piece]).unwrap();
                let copied = dst.to_vec();
                let at = align + to;
                assert_eq!(
                    copied[at..at + len],
                    content[from as usize..][..len],
                    "{way:?}"
                );
                assert!(
                    copied[..at]
                        .iter()
                        .chain(&copied[at + len..])
                        .all(|&byte| byte == 0)
                );
            }
        }
    }

    #[test]
    fn wrong_pieces_are_refused() {
        let (src, dst) = (
            Buffer::from_vec(vec![1; 100]),
            Buffer::from_vec(vec![0; 100]),
        );
        let copy = |src: &Buffer, dst: &Buffer, piece| Plain::Memcpy.copy(src, dst, &[piece]);
        let beyond = copy(&src, &dst, Span::new(0, 1, 100));
        assert!(matches!(
            beyond,
            Err(Error::OutOfBounds {
                offset: 1,
                len: 100,
                end: 100
            })
        ));
        let same = copy(&src, &src, Span::new(0, 0, 1));
        assert!(matches!(same, Err(Error::Overlap { .. })));
        let fixed = dst.read_only();
        let fixed = copy(&src, &fixed, Span::new(0, 0, 1));
        assert!(matches!(fixed, Err(Error::ReadOnly { .. })));
    }
}
