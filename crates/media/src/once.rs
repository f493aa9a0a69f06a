//! Bytes that others may change at any moment, read once.
//!
//! The memory that is moved here is shared with other processes, and with threads that know nothing
//! of the lanes: a caller may change a source, or name one destination in two calls. What is read
//! then may be any mixture, and nothing else must come of it. To the compiler, though, such memory
//! is nobody else's, so it may read a byte again instead of keeping it, and then what is hashed is
//! not what is stored. So what has been read passes through here before it is used: an instruction
//! that is none, whose result the compiler must take as it is.
//!
//! What is written at once by two is a mixture as well. Nothing is concluded from it but by reading
//! it, which verifies.

/// A word as it was read.
#[inline(always)]
pub(crate) fn word(word: u64) -> u64 {
    #[cfg(not(miri))]
    {
        let mut word = word;
        // SAFETY: no instruction; the register keeps what it has.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) word, options(nomem, nostack, preserves_flags));
        }
        word
    }
    #[cfg(miri)]
    word
}

/// 32 bytes as they were read.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn vector(vector: std::arch::x86_64::__m256i) -> std::arch::x86_64::__m256i {
    let mut vector = vector;
    // SAFETY: no instruction; the register keeps what it has.
    unsafe {
        std::arch::asm!(
            "/* {0} */", inout(ymm_reg) vector, options(nomem, nostack, preserves_flags)
        );
    }
    vector
}

/// 64 bytes as they were read.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn wide_vector(vector: std::arch::x86_64::__m512i) -> std::arch::x86_64::__m512i {
    let mut vector = vector;
    // SAFETY: no instruction; the register keeps what it has.
    unsafe {
        std::arch::asm!(
            "/* {0} */", inout(zmm_reg) vector, options(nomem, nostack, preserves_flags)
        );
    }
    vector
}

/// Copies bytes to memory that nobody else knows.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `len` bytes, and they do not overlap.
#[inline]
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
    // For all that the compiler knows, it changes what is at either place.
    #[cfg(not(miri))]
    // SAFETY: no instruction.
    unsafe {
        std::arch::asm!(
            "/* {0} {1} */", in(reg) src, in(reg) dst, options(nostack, preserves_flags)
        );
    }
}
