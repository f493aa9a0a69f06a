//! The copy kernels, and the choice of one for a length of leaves.

use std::sync::atomic::{AtomicU8, Ordering};

use super::kernel::Isa;

/// Most leaves that a copy thread moves in turns. Measured on Zen 3 and Zen 4: four streams are as
/// fast as a plain copy in two, which is the best plain copy; two streams with the hash are some
/// 5 % slower. More do not fit the registers.
pub(crate) const WAYS: usize = 4;

/// The length from which on leaves are moved by the kernel for large ones.
const LARGE: u64 = 512 << 10;

/// A way to move the bytes of leaves and to compute their checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyKernel {
    pub(crate) isa: Isa,
    /// Leaves that a copy thread moves in turns.
    pub(crate) ways: usize,
    /// True if the kernel also prefetches where the processor's own prefetcher would.
    pub(crate) fetches: bool,
}

/// All kernels of this architecture. The default is the first that the machine supports.
const KERNELS: &[(&str, CopyKernel)] = &[
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx2-4", kernel(Isa::Avx2, WAYS, false)),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx2-4-fetch", kernel(Isa::Avx2, WAYS, true)),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx2-1", kernel(Isa::Avx2, 1, false)),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx2-1-fetch", kernel(Isa::Avx2, 1, true)),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx512-4", kernel(Isa::Avx512, WAYS, false)),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx512-4-fetch", kernel(Isa::Avx512, WAYS, true)),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx512-1", kernel(Isa::Avx512, 1, false)),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    ("avx512-1-fetch", kernel(Isa::Avx512, 1, true)),
    ("portable", kernel(Isa::Portable, WAYS, false)),
];

pub(crate) const fn kernel(isa: Isa, ways: usize, fetches: bool) -> CopyKernel {
    CopyKernel { isa, ways, fetches }
}

impl CopyKernel {
    /// Returns all kernels that this machine supports; the default is the first.
    #[must_use]
    pub fn all() -> Vec<CopyKernel> {
        let isas = Isa::all();
        let here = KERNELS
            .iter()
            .filter(|(_, kernel)| isas.contains(&kernel.isa));
        here.map(|(_, kernel)| *kernel).collect()
    }

    /// Returns the name, such as `avx2-4-fetch`: the instruction set, how many leaves a copy thread
    /// moves in turns, and `fetch` if it fetches what comes later by instructions.
    #[must_use]
    pub fn name(self) -> &'static str {
        let named = KERNELS.iter().find(|(_, kernel)| *kernel == self);
        named.map_or("portable", |(name, _)| name)
    }

    /// Returns the kernel with a name, if this machine supports it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<CopyKernel> {
        CopyKernel::all()
            .into_iter()
            .find(|kernel| kernel.name() == name)
    }

    pub(crate) fn default_here() -> CopyKernel {
        kernel(Isa::best(), WAYS, false)
    }
}

/// The kernels that were chosen, as numbers in [`KERNELS`], for small and for large leaves.
static CHOSEN: [AtomicU8; 2] = [const { AtomicU8::new(u8::MAX) }; 2];

/// Returns the kernel for leaves of `len` bytes.
#[must_use]
pub fn chosen(len: u64) -> CopyKernel {
    let number = CHOSEN[usize::from(len >= LARGE)].load(Ordering::Relaxed);
    let kernel = KERNELS.get(usize::from(number));
    kernel.map_or_else(CopyKernel::default_here, |(_, kernel)| *kernel)
}

pub(crate) fn choose(kernels: [CopyKernel; 2]) {
    for (chosen, wanted) in CHOSEN.iter().zip(kernels) {
        let number = KERNELS.iter().position(|(_, kernel)| *kernel == wanted);
        chosen.store(number.unwrap_or(usize::MAX) as u8, Ordering::Relaxed);
    }
}
