//! Copy kernels: with which instructions a copy thread moves leaves, and how many in turns.
//!
//! A processor does not say which kernel is fast on it. Four leaves in turns are ahead on some, and
//! take half of the speed on others. So the kernels are measured, by a process that has moved 256
//! MiB, in a thread of its own. The result is kept in the cache directory for the processes of a
//! week.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kvdepot_host::{cpu, dirs};
use kvdepot_plan::Span;

use crate::buffer::Buffer;
use crate::error::Result;
use crate::memory::choice::choose;
pub use crate::memory::choice::{CopyKernel, chosen};
use crate::memory::kernel::Isa;
use crate::memory::mover::{Mover, Units};
use crate::memory::staged::Direct;
use crate::memory::{Mapping, Pages};
use crate::simulated::is_simulated;

/// The lengths of leaves that are measured: for small ones, and for large ones.
const LENGTHS: [u64; 2] = [64 << 10, 1 << 20];

/// Bytes of each area, and how many of them are moved at a time. Streaming stores drive them out of
/// the caches, so that they are read from memory when they are moved back.
const AREA: u64 = 8 << 20;
const MOVED: u64 = 4 << 20;

/// Measurements of each kernel, and the time after which no more begin.
const ROUNDS: usize = 8;
const ROUNDS_LEAST: usize = 4;
const LONGEST: Duration = Duration::from_millis(300);

/// Bytes that a process moves before it looks for the fastest kernels: less than a second of work,
/// and more than most commands move.
const WARM: i64 = 256 << 20;

/// Least speed of another kernel than the default, over the default's. Largest distance between the
/// quartiles of a kernel's measurements, as a part of the median.
const GAIN: f64 = 1.03;
const SPREAD: f64 = 0.10;

/// Time after which the kernels are measured again; the second, if the measurements lay too far
/// apart.
const SETTLED: Duration = Duration::from_secs(7 * 24 * 3600);
const UNSETTLED: Duration = Duration::from_secs(3600);

/// The beginning of the names of the files with results, in the cache directory.
pub const FILES: &str = "copy-kernel-";

/// The version of the kernels: another one measures again.
const VERSION: u32 = 1;

/// Bytes that this process moves until it looks for the fastest kernels; none once it has begun.
static LEFT: AtomicI64 = AtomicI64::new(WARM);

/// Notes that so many bytes are moved. Once they are [`WARM`], a thread chooses the kernels that
/// the cache directory names for this machine, or measures them.
pub(crate) fn moves(bytes: u64) {
    if LEFT.load(Ordering::Relaxed) <= 0 {
        return;
    }
    let bytes = bytes.min(WARM as u64) as i64;
    let before = LEFT.fetch_sub(bytes, Ordering::Relaxed);
    if before <= 0 || before > bytes || is_simulated() || CopyKernel::all().len() < 2 {
        return;
    }
    // Without the thread, or the memory, the default stays.
    let _thread = cpu::spawn("kvdepot-kernels", || match kept() {
        Some(Kept { kernels, .. }) => choose(kernels),
        None => drop(calibrate()),
    });
}

/// The speed of a kernel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Speed {
    /// The kernel.
    pub kernel: CopyKernel,
    /// Length in bytes of the leaves that were moved.
    pub leaf: u64,
    /// Median of the measured speeds in bytes per second.
    pub bytes_per_second: f64,
    /// Lower quartile of the measured speeds in bytes per second. Kernels are compared by it: what
    /// other programs disturb is slower in everyday use too.
    pub lower_quartile: f64,
    /// Distance between the quartiles of the measured speeds, as a part of the median.
    pub spread: f64,
}

/// Measured speeds of all kernels, and the kernels that were chosen.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Calibration {
    /// The kernels for leaves below 512 KiB, and for longer ones.
    pub kernels: [CopyKernel; 2],
    /// False if the measurements of the default lay too far apart. The default stays then.
    pub is_settled: bool,
    /// True if the result was written to the cache directory.
    pub is_kept: bool,
    /// The speed of each kernel with each length of leaves.
    pub speeds: Vec<Speed>,
}

/// A result in the cache directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Kept {
    /// The kernels for leaves below 512 KiB, and for longer ones.
    pub kernels: [CopyKernel; 2],
    /// False if the measurements of the default lay too far apart.
    pub is_settled: bool,
}

/// Measures all kernels, which takes some 100 ms, notes the result in the cache directory, and uses
/// it in this process.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) if the memory cannot be allocated.
pub fn calibrate() -> Result<Calibration> {
    let mut calibration = Calibration::measure()?;
    choose(calibration.kernels);
    // If that fails, the next process measures again.
    let dir = dirs::own_cache_dir();
    calibration.is_kept = dir.is_some_and(|dir| note(&dir.join(name()), &calibration).is_ok());
    Ok(calibration)
}

/// The kernels that are measured; the default is the first.
fn measured() -> impl Iterator<Item = CopyKernel> {
    let all = CopyKernel::all().into_iter();
    all.filter(|kernel| kernel.isa == Isa::best() || kernel.isa != Isa::Portable)
}

/// Returns the result that the cache directory has for this machine; `None` if the kernels were not
/// measured within a week. It creates no directory.
#[must_use]
pub fn kept() -> Option<Kept> {
    read(&dirs::usual_cache_dir()?.join(name()))
}

impl Calibration {
    fn measure() -> Result<Calibration> {
        let areas = Areas::new()?;
        let mut speeds: Vec<(u64, CopyKernel, Vec<f64>)> = Vec::new();
        for leaf in LENGTHS {
            speeds.extend(measured().map(|kernel| (leaf, kernel, Vec::new())));
        }
        let begun = Instant::now();
        // One more, which does not count.
        for round in 0..=ROUNDS {
            if begun.elapsed() > LONGEST && round > ROUNDS_LEAST {
                break;
            }
            let count = speeds.len();
            for at in 0..count {
                let (leaf, kernel, rates) = &mut speeds[(at + round) % count];
                let rate = areas.speed(*kernel, *leaf, round);
                rates.extend((round > 0).then_some(rate));
            }
        }
        let speeds = speeds.into_iter().map(|(leaf, kernel, mut rates)| {
            rates.sort_by(f64::total_cmp);
            let at = |part: usize| rates.get(rates.len() * part / 4).copied().unwrap_or(0.0);
            Speed {
                kernel,
                leaf,
                bytes_per_second: at(2),
                lower_quartile: at(1),
                spread: (at(3) - at(1)) / at(2),
            }
        });
        Ok(Calibration::of(speeds.collect()))
    }

    /// Chooses by measured speeds, of which the first of each length is the default's.
    fn of(speeds: Vec<Speed>) -> Calibration {
        let mut is_settled = true;
        let kernels = LENGTHS.map(|leaf| {
            let mut of_it = speeds.iter().filter(|speed| speed.leaf == leaf);
            let Some(default) = of_it.next() else {
                return CopyKernel::default_here();
            };
            is_settled &= default.spread <= SPREAD;
            let least = default.lower_quartile * GAIN;
            let better = of_it.filter(|one| one.spread <= SPREAD && one.lower_quartile >= least);
            let best = better.max_by(|a, b| a.lower_quartile.total_cmp(&b.lower_quartile));
            best.unwrap_or(default).kernel
        });
        let default = [CopyKernel::default_here(); 2];
        Calibration {
            kernels: if is_settled { kernels } else { default },
            is_settled,
            is_kept: false,
            speeds,
        }
    }
}

/// Memory as media have it, and as callers do: in huge pages or in small ones.
struct Areas {
    medium: Buffer,
    callers: [Buffer; 2],
}

impl Areas {
    fn new() -> Result<Areas> {
        let area = |pages| {
            let area = Mapping::anonymous_of(pages, "kvdepot-kernels", AREA)?;
            area.populate_write(0, AREA)?;
            area.buffer(0, AREA)
        };
        Ok(Areas {
            medium: area(Pages::Huge)?,
            callers: [area(Pages::Huge)?, area(Pages::Small)?],
        })
    }

    /// Bytes per second of a kernel that moves bytes from the medium to both callers and back.
    fn speed(&self, kernel: CopyKernel, leaf: u64, round: usize) -> f64 {
        let at = round as u64 % (AREA / MOVED) * MOVED;
        let mover = Mover {
            kernel: Some(kernel),
            stream_min: 0,
        };
        let begun = Instant::now();
        let mut moved = 0;
        for caller in &self.callers {
            for (from, to) in [(&self.medium, caller), (caller, &self.medium)] {
                let span = |number| {
                    let begin = at + number * leaf;
                    Span::new(from.addr() as u64 + begin, to.addr() as u64 + begin, leaf)
                };
                let leaves = Leaves {
                    len: leaf,
                    spans: (0..MOVED / leaf).map(span).collect(),
                };
                // SAFETY: the areas are this call's alone, and the leaves lie in them, apart. All
                // of them are readable and writable, and the machine has the kernel.
                unsafe { mover.run(&leaves, 0, leaves.spans.len() as u32, &mut Direct) };
                moved += MOVED;
            }
        }
        moved as f64 / begun.elapsed().as_secs_f64()
    }
}

/// Leaves of one length, which are moved from one area to the other.
struct Leaves {
    len: u64,
    spans: Vec<Span>,
}

impl Units for Leaves {
    fn unit(&self, number: u32) -> (&[Span], u64, bool) {
        (&self.spans[number as usize..][..1], self.len, true)
    }

    fn source(&self, number: u32) -> u64 {
        self.spans.get(number as usize).map_or(0, |span| span.src)
    }

    fn report(&self, _number: u32, digest: u128) {
        std::hint::black_box(digest);
    }
}

/// The name of the file with the result for this machine: the model of its processor, and how many
/// kernels it can run.
fn name() -> String {
    format!("{FILES}{}-{}", model(), CopyKernel::all().len())
}

/// The processor's family, model and stepping, as one number.
fn model() -> String {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let (vendor, version) = (std::arch::x86_64::__cpuid(0), std::arch::x86_64::__cpuid(1));
        format!("{:08x}-{:08x}", vendor.ebx, version.eax)
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    std::env::consts::ARCH.to_owned()
}

/// Reads which kernels were chosen: `None` if they are to be measured.
fn read(file: &Path) -> Option<Kept> {
    let text = fs::read_to_string(file).ok()?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let [version, state, small, large] = words[..] else {
        return None;
    };
    let (is_settled, longest) = match state {
        "settled" => (true, SETTLED),
        _ => (false, UNSETTLED),
    };
    let written = fs::metadata(file).and_then(|at| at.modified()).ok()?;
    let age = SystemTime::now().duration_since(written).ok()?;
    let is_known = version == VERSION.to_string() && age <= longest;
    let kernels = [CopyKernel::from_name(small)?, CopyKernel::from_name(large)?];
    is_known.then_some(Kept {
        kernels,
        is_settled,
    })
}

/// Writes what [`read`] reads. Another process may do so at the same time.
fn note(file: &Path, calibration: &Calibration) -> std::io::Result<()> {
    let state = match calibration.is_settled {
        true => "settled",
        false => "unsettled",
    };
    let [small, large] = calibration.kernels.map(CopyKernel::name);
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let unfinished = Path::new(&name);
    let written = fs::write(unfinished, format!("{VERSION} {state} {small} {large}\n"))
        .and_then(|()| fs::rename(unfinished, file));
    if written.is_err() {
        let _removed = fs::remove_file(unfinished);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed_of(kernel: CopyKernel, leaf: u64, rate: f64, spread: f64) -> Speed {
        Speed {
            kernel,
            leaf,
            bytes_per_second: rate,
            lower_quartile: rate,
            spread,
        }
    }

    #[test]
    fn a_kernel_is_chosen_if_it_is_clearly_faster_and_its_measurements_agree() {
        let default = CopyKernel::default_here();
        let other = CopyKernel {
            isa: Isa::Portable,
            ways: 1,
            fetches: false,
        };
        let chosen = |rates: [(f64, f64); 2]| {
            let mut speeds = vec![
                speed_of(default, LENGTHS[0], 10.0, 0.01),
                speed_of(other, LENGTHS[0], 9.0, 0.01),
            ];
            let [(first, spread), (second, its)] = rates;
            speeds.push(speed_of(default, LENGTHS[1], first, spread));
            speeds.push(speed_of(other, LENGTHS[1], second, its));
            let calibration = Calibration::of(speeds);
            (calibration.kernels, calibration.is_settled)
        };
        let (same, large) = ([default; 2], [default, other]);
        assert_eq!(chosen([(10.0, 0.05), (20.0, 0.05)]), (large, true));
        assert_eq!(chosen([(10.0, 0.05), (10.2, 0.05)]), (same, true));
        assert_eq!(chosen([(10.0, 0.05), (20.0, 0.2)]), (same, true));
        assert_eq!(chosen([(10.0, 0.2), (20.0, 0.05)]), (same, false));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it measures")]
    fn every_kernel_is_measured() {
        let calibration = Calibration::measure().unwrap();
        let kernels: Vec<CopyKernel> = measured().collect();
        assert_eq!(calibration.speeds.len(), 2 * kernels.len());
        assert!(
            calibration
                .speeds
                .iter()
                .all(|one| one.bytes_per_second > 0.0)
        );
        assert!(calibration.kernels.iter().all(|one| kernels.contains(one)));
    }

    #[test]
    fn what_was_chosen_is_read_again_unless_it_is_of_another_version() {
        let dir = std::env::temp_dir().join(format!("kvdepot-kernels-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("kernels");
        assert_eq!(read(&file), None);
        for kernel in CopyKernel::all() {
            for is_settled in [true, false] {
                let calibration = Calibration {
                    kernels: [kernel, CopyKernel::default_here()],
                    is_settled,
                    is_kept: false,
                    speeds: Vec::new(),
                };
                note(&file, &calibration).unwrap();
                let kernels = calibration.kernels;
                let kept = Kept {
                    kernels,
                    is_settled,
                };
                assert_eq!(read(&file), Some(kept));
            }
        }
        for text in [
            "",
            "1 settled avx2-4",
            "2 settled portable portable",
            "1 settled x y",
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(read(&file), None, "{text}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn names_are_of_kernels() {
        for kernel in CopyKernel::all() {
            assert_eq!(CopyKernel::from_name(kernel.name()), Some(kernel));
        }
        assert_eq!(CopyKernel::from_name("mmx"), None);
        assert_eq!(CopyKernel::all()[0], CopyKernel::default_here());
    }
}
