//! Writing cache lines back to the memory under them, for media that survive a power cut.
//!
//! Streaming stores bypass the caches, but what surrounds them (unaligned edges, records) does
//! not, so every line of a range is written back whatever stored it.
//!
//! On ARM "written back" has two meanings: to where all processors see the same (`dc cvac`), which
//! may be a cache that a power cut empties, and to where memory is persistent (`dc cvap`), which
//! the system says that a processor has (`DCPOP`). Without the latter nothing here outlives a
//! power cut.

/// Writes the line of an address back; the address is mapped.
type Method = unsafe fn(usize);

/// Writes every cache line of the range back to its memory and waits until it has arrived there.
///
/// # Safety
///
/// The range is mapped.
pub(super) unsafe fn write_back(addr: usize, len: usize) {
    let line = line_size();
    let mut at = addr / line * line;
    let write_back_line = method();
    while at < addr + len {
        // SAFETY: the line holds bytes of the range, which is mapped, so it is mapped as well.
        unsafe { write_back_line(at) };
        at += line;
    }
    complete();
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use super::Method;
    use std::arch::asm;
    use std::sync::OnceLock;

    /// Bit in `ebx` of CPUID leaf 7 for `clflushopt`, which does not wait for the line before.
    const CLFLUSHOPT: u32 = 1 << 23;
    /// Bit in `ebx` of CPUID leaf 7 for `clwb`, which also leaves the line in the cache.
    const CLWB: u32 = 1 << 24;

    pub(super) fn line_size() -> usize {
        64
    }

    pub(super) fn method() -> Method {
        static BITS: OnceLock<u32> = OnceLock::new();
        let bits = *BITS.get_or_init(|| {
            if std::arch::x86_64::__cpuid(0).eax < 7 {
                return 0;
            }
            std::arch::x86_64::__cpuid_count(7, 0).ebx
        });
        match bits {
            bits if bits & CLWB != 0 => clwb,
            bits if bits & CLFLUSHOPT != 0 => clflushopt,
            _ => clflush,
        }
    }

    /// # Safety
    ///
    /// The processor has the instruction and the address is mapped.
    unsafe fn clwb(at: usize) {
        // SAFETY: the caller's promise; the instruction changes no byte.
        unsafe { asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags)) }
    }

    /// # Safety
    ///
    /// As `clwb`.
    unsafe fn clflushopt(at: usize) {
        // SAFETY: the caller's promise; the instruction changes no byte.
        unsafe { asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)) }
    }

    /// # Safety
    ///
    /// The address is mapped; every x86-64 processor has the instruction.
    unsafe fn clflush(at: usize) {
        // SAFETY: the caller's promise; the instruction changes no byte.
        unsafe { asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags)) }
    }

    pub(super) fn complete() {
        // SAFETY: a fence touches no memory.
        unsafe { asm!("sfence", options(nostack, preserves_flags)) }
    }

    /// Every method with the bit that says that the processor has it.
    #[cfg(all(test, not(miri)))]
    pub(super) fn all() -> [(u32, Method); 3] {
        [(CLWB, clwb), (CLFLUSHOPT, clflushopt), (0, clflush)]
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use super::Method;
    use std::arch::asm;

    pub(super) fn line_size() -> usize {
        let register: u64;
        // SAFETY: reading this register is allowed to user programs under Linux.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) register, options(nomem, nostack)) };
        // Bits 16 to 19: log2 of the words (4 bytes) in the smallest data cache line.
        4 << ((register >> 16) & 0xF)
    }

    /// Bit of the hardware capabilities for `dc cvap`.
    const DCPOP: u64 = 1 << 16;

    pub(super) fn method() -> Method {
        // SAFETY: it reads what the kernel has told this process.
        let has = unsafe { libc::getauxval(libc::AT_HWCAP) };
        if has & DCPOP != 0 { persist } else { clean }
    }

    /// # Safety
    ///
    /// The processor has the instruction and the address is mapped.
    unsafe fn persist(at: usize) {
        // By its number, because assemblers know the name for ARMv8.2 and later alone:
        // `dc cvap` is `sys #3, c7, c12, #1`.
        // SAFETY: the caller's promise; cleaning a line changes no byte.
        unsafe { asm!("sys #3, c7, c12, #1, {}", in(reg) at, options(nostack, preserves_flags)) }
    }

    /// # Safety
    ///
    /// The address is mapped.
    unsafe fn clean(at: usize) {
        // SAFETY: the caller's promise; cleaning a line changes no byte.
        unsafe { asm!("dc cvac, {}", in(reg) at, options(nostack, preserves_flags)) }
    }

    pub(super) fn complete() {
        // SAFETY: a barrier touches no memory.
        unsafe { asm!("dsb sy", options(nostack, preserves_flags)) }
    }
}

use arch::{complete, line_size, method};

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn every_method_of_this_processor_keeps_the_bytes() {
        let bytes: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        // SAFETY: the range is that of a live vector.
        unsafe { write_back(bytes.as_ptr().addr() + 3, 900) };
        #[cfg(target_arch = "x86_64")]
        for (bit, write_back_line) in arch::all() {
            if std::arch::x86_64::__cpuid_count(7, 0).ebx & bit == bit {
                // SAFETY: the processor has the instruction, and the vector is live.
                unsafe { write_back_line(bytes.as_ptr().addr()) };
            }
        }
        assert!(bytes.iter().enumerate().all(|(i, &b)| b == i as u8));
    }
}
