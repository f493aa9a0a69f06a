//! Block devices as media: having one alone, and what others may have left on it.
//!
//! A device that holds zeros where an arena begins may still be somebody's: tables and file systems
//! keep second copies far behind, and who empties the beginning of a disk may want the rest of it.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use kvdepot_host::block;
use kvdepot_host::fork::LockFd;
use kvdepot_media::Kind;

use crate::clock;
use crate::error::Error;
use crate::format::layout;
use crate::format::owner::{self, Owner};
use crate::medium::Medium;
use crate::size;

/// How long a device is waited for that an owner has just let go: its descriptors are closed one
/// after the other.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// A place on a device.
#[derive(Clone, Copy, Debug)]
enum At {
    Begin(u64),
    /// Bytes before its end.
    End(u64),
}

const MIB: u64 = 1 << 20;

/// Where others write what they know their devices by. A new device holds zeros there;
/// `docs/tiers/nvme.md` has the same table.
const PLACES: [(At, u64, &str); 8] = [
    (
        At::Begin(0),
        MIB,
        "partition tables, file systems, RAID, LVM, LUKS",
    ),
    (At::Begin(MIB), 4096, "LUKS's second header, VMFS"),
    (At::Begin(2 * MIB), 4096, "LUKS's second header, VMFS"),
    (At::Begin(4 * MIB), 4096, "LUKS's second header"),
    (At::Begin(64 * MIB), 4096, "Btrfs's second superblock"),
    (At::Begin(256 << 30), 4096, "Btrfs's third superblock"),
    (At::End(3087 * 512), 4096, "Promise's RAID"),
    (
        At::End(MIB),
        MIB,
        "GPT's backup, RAID, ZFS, DRBD, bcachefs, HFS+",
    ),
];

/// Some of them by name, for errors.
const SIGNS: [(At, &[u8], &str); 15] = [
    (At::Begin(512), b"EFI PART", "a GPT"),
    (At::Begin(4096), b"EFI PART", "a GPT"),
    (At::Begin(512), b"LABELONE", "a volume of LVM"),
    (At::Begin(0), b"LUKS\xba\xbe", "LUKS"),
    (At::Begin(1080), b"\x53\xef", "ext2, ext3 or ext4"),
    (At::Begin(0), b"XFSB", "XFS"),
    (At::Begin(65_600), b"_BHRfS_M", "Btrfs"),
    (At::Begin(1024), b"\x10\x20\xf5\xf2", "F2FS"),
    (At::Begin(3), b"NTFS    ", "NTFS"),
    (At::Begin(4086), b"SWAPSPACE2", "swap"),
    (At::Begin(0), b"\xfc\x4e\x2b\xa9", "a part of a RAID (md)"),
    (
        At::Begin(4096),
        b"\xfc\x4e\x2b\xa9",
        "a part of a RAID (md)",
    ),
    // Behind those of what lies in its partitions.
    (At::Begin(510), b"\x55\xaa", "a partition table (MBR)"),
    (At::End(512), b"EFI PART", "the backup of a GPT"),
    (At::End(4096), b"EFI PART", "the backup of a GPT"),
];

impl At {
    /// `None` for what a device of `len` bytes does not have.
    fn offset(self, len: u64) -> Option<u64> {
        match self {
            At::Begin(at) => Some(at).filter(|at| *at < len),
            At::End(before) => len.checked_sub(before),
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Begin(0) => f.write_str("its start"),
            At::Begin(at) => write!(f, "{}", size::show(*at)),
            At::End(before) => write!(f, "{} before its end", size::show(*before)),
        }
    }
}

/// A block device by calls through the page cache, which take any range, and its whole length: an
/// arena has no more of it than whole pages.
struct Whole {
    file: File,
    len: u64,
}

impl Whole {
    /// `None` for other media.
    fn of(medium: &dyn Medium) -> Result<Option<Whole>, Error> {
        if medium.opened().kind() != Kind::Block {
            return Ok(None);
        }
        let fd = medium.opened().fd()?;
        let len = block::geometry(fd)?.bytes;
        let file = File::from(kvdepot_host::fds::twin(fd)?);
        Ok(Some(Whole { file, len }))
    }

    fn places(&self) -> impl Iterator<Item = (u64, u64, At, &'static str)> {
        let within = |(place, len, what): (At, u64, &'static str)| {
            let at = place.offset(self.len)?;
            Some((at, len.min(self.len - at), place, what))
        };
        PLACES.into_iter().filter_map(within)
    }

    /// What lies there, and where, unless all places are zero.
    fn found(&self) -> io::Result<Option<String>> {
        for (place, magic, what) in SIGNS {
            let mut bytes = vec![0; magic.len()];
            if let Some(at) = place.offset(self.len)
                && self.file.read_exact_at(&mut bytes, at).is_ok()
                && bytes == magic
            {
                return Ok(Some(what.to_owned()));
            }
        }
        for (at, len, place, what) in self.places() {
            let mut bytes = vec![0; len as usize];
            self.file.read_exact_at(&mut bytes, at)?;
            if bytes.iter().any(|byte| *byte != 0) {
                return Ok(Some(format!("data at {place} (possibly {what})")));
            }
        }
        Ok(None)
    }

    fn wipe(&self) -> io::Result<()> {
        for (at, len, ..) in self.places() {
            self.file.write_all_at(&vec![0; len as usize], at)?;
        }
        self.file.sync_all()
    }
}

/// What of somebody else's lies on a block device, and where; `None` where nothing does, and for
/// other media.
pub(crate) fn found(medium: &dyn Medium) -> Result<Option<String>, Error> {
    let Some(device) = Whole::of(medium)? else {
        return Ok(None);
    };
    if !block::uses(medium.opened().fd()?)?.is_known() {
        return Ok(Some(
            "unknown data: sysfs is not mounted, so the use of the device cannot be checked".into(),
        ));
    }
    let fail = |error| failed("read", medium, error);
    device.found().map_err(fail)
}

/// Removes what others have left on a block device for themselves to know it by.
pub(crate) fn wipe(medium: &dyn Medium) -> Result<(), Error> {
    match Whole::of(medium)? {
        Some(device) => device.wipe().map_err(|error| failed("wipe", medium, error)),
        None => Ok(()),
    }
}

fn failed(operation: &'static str, medium: &dyn Medium, source: io::Error) -> Error {
    let subject = medium.opened().name();
    kvdepot_media::Error::Io {
        operation,
        subject,
        source,
    }
    .into()
}

/// Refuses a device that has partitions, or that somebody else uses. `refused` makes an error of
/// what is allowed.
pub(crate) fn check(medium: &dyn Medium, refused: &impl Fn(String) -> Error) -> Result<(), Error> {
    if medium.opened().kind() != Kind::Block {
        return Ok(());
    }
    let uses = block::uses(medium.opened().fd()?)?;
    if !uses.partitions.is_empty() {
        return Err(refused(format!(
            "a disk without partitions, or one of the partitions of this disk: {}",
            uses.partitions.join(", ")
        )));
    }
    match uses.is_used() {
        true => Err(refused(format!(
            "a device that is not in use; this device is {uses}"
        ))),
        false => Ok(()),
    }
}

/// Takes a block device for this process alone, which has the owner's lock; `None` for other media.
pub(crate) fn claim(
    path: &Path,
    medium: &dyn Medium,
    refused: &impl Fn(String) -> Error,
) -> Result<Option<LockFd>, Error> {
    if medium.opened().kind() != Kind::Block {
        return Ok(None);
    }
    check(medium, refused)?;
    let begun = clock::now();
    loop {
        if let Some(claim) = block::claim(medium.opened().fd()?)? {
            return Ok(Some(claim));
        }
        if begun.elapsed() >= PATIENCE {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    check(medium, refused)?;
    let uses = block::uses(medium.opened().fd()?)?;
    // By another node of the device, where its locks are not seen.
    let mut page = [0; owner::LEN];
    let last = medium.read_at(layout::OWNER, &mut page).ok();
    let last = last
        .and_then(|()| Owner::decode(&page))
        .map_or_else(String::new, |owner| {
            format!(
                " (last opened by process {} on host {})",
                owner.pid, owner.host
            )
        });
    tracing::warn!(path = %path.display(), %uses,
        "cannot open the block device exclusively: the device is in use");
    Err(refused(format!(
        "a device that is not in use; this device is {uses}{last}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(len: u64) -> Whole {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        Whole { file, len }
    }

    #[test]
    fn what_others_leave_is_found_wherever_it_is_and_goes() {
        // Not of whole pages.
        let len = (80 << 20) + 512;
        for (place, magic, what) in SIGNS {
            let device = device(len);
            assert_eq!(device.found().unwrap(), None);
            let at = place.offset(len).unwrap();
            device.file.write_all_at(magic, at).unwrap();
            assert_eq!(device.found().unwrap().as_deref(), Some(what));
            device.wipe().unwrap();
            assert_eq!(device.found().unwrap(), None, "{what}");
        }
        for at in [
            0,
            MIB - 1,
            MIB,
            2 * MIB + 4095,
            4 * MIB,
            64 * MIB,
            len - 3087 * 512,
            len - 1,
        ] {
            let device = device(len);
            device.file.write_all_at(&[1], at).unwrap();
            assert!(device.found().unwrap().is_some(), "{at}");
            device.wipe().unwrap();
            assert_eq!(device.found().unwrap(), None, "{at}");
        }
    }

    #[test]
    fn what_a_small_device_does_not_have_is_not_looked_for() {
        for len in [256 << 10, MIB, 2 * MIB + 512] {
            let device = device(len);
            assert_eq!(device.found().unwrap(), None);
            device.wipe().unwrap();
            assert_eq!(device.file.metadata().unwrap().len(), len);
        }
    }
}
