//! What sysfs says about a device DAX: its size and the alignment of its mappings.
//!
//! The device itself tells neither: its `st_size` is 0, and a mapping beyond its end succeeds and
//! is a `SIGBUS` when touched. So a device whose size is not known is refused.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Size and alignment of a device DAX, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// The size of the device.
    pub(crate) size: u64,
    /// What offset and length of a mapping must be multiples of.
    pub(crate) align: u64,
}

/// Looks up the device with number `rdev` under `sysfs`, normally `/sys`. `device` names it in
/// errors.
pub(crate) fn probe(sysfs: &Path, device: &Path, rdev: u64) -> Result<Geometry> {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let entry = sysfs.join(format!("dev/char/{major}:{minor}"));
    let refuse = |problem: String| Error::Dax {
        path: device.to_path_buf(),
        problem,
    };
    let subsystem = std::fs::read_link(entry.join("subsystem")).map_err(|error| {
        refuse(format!(
            "not a DAX device: {}/subsystem: {error}",
            entry.display()
        ))
    })?;
    if subsystem.file_name().is_none_or(|name| name != "dax") {
        return Err(refuse(format!(
            "device of the subsystem {}; allowed: regular files and DAX devices",
            subsystem.file_name().unwrap_or_default().display()
        )));
    }
    let size = read_number(entry.join("size"))?;
    // Kernels before 5.10 have the alignment at the region only.
    let own = entry.join("align");
    let align = read_number(if own.exists() {
        own
    } else {
        entry.join("dax_region/align")
    })?;
    if !align.is_power_of_two() {
        return Err(refuse(format!(
            "alignment {align} in sysfs is not a power of two"
        )));
    }
    if size < align {
        return Err(refuse(format!(
            "size {size} in sysfs is below the alignment {align}"
        )));
    }
    Ok(Geometry { size, align })
}

fn read_number(path: PathBuf) -> Result<u64> {
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            return Err(Error::Dax {
                path,
                problem: error.to_string(),
            });
        }
    };
    let text = text.trim();
    let number = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    number.map_err(|_| Error::Dax {
        path,
        problem: format!("{text:?} is not a number of bytes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A sysfs with one device, 252:3.
    fn sysfs(subsystem: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("devices/dax0.0");
        std::fs::create_dir_all(device.join("dax_region")).unwrap();
        std::fs::create_dir_all(root.path().join("dev/char")).unwrap();
        symlink("../../devices/dax0.0", root.path().join("dev/char/252:3")).unwrap();
        symlink(format!("../../bus/{subsystem}"), device.join("subsystem")).unwrap();
        for (name, content) in files {
            std::fs::write(device.join(name), content).unwrap();
        }
        root
    }

    fn probed(subsystem: &str, files: &[(&str, &str)]) -> std::result::Result<Geometry, String> {
        let root = sysfs(subsystem, files);
        let rdev = rustix::fs::makedev(252, 3);
        probe(root.path(), Path::new("/dev/dax0.0"), rdev).map_err(|error| error.to_string())
    }

    #[test]
    fn size_and_alignment_come_from_sysfs() {
        let expected = Ok(Geometry {
            size: 136_314_880,
            align: 2 << 20,
        });
        assert_eq!(
            probed("dax", &[("size", "136314880\n"), ("align", "2097152\n")]),
            expected
        );
        let older = [("size", "136314880\n"), ("dax_region/align", "0x200000\n")];
        assert_eq!(probed("dax", &older), expected);
    }

    #[test]
    fn what_cannot_be_trusted_is_refused() {
        for (subsystem, files, says) in [
            (
                "mem",
                &[("size", "1"), ("align", "1")][..],
                "the subsystem mem; allowed",
            ),
            ("dax", &[("align", "4096")], "size"),
            ("dax", &[("size", "4096")], "align"),
            (
                "dax",
                &[("size", "lots"), ("align", "4096")],
                "\"lots\" is not a number",
            ),
            (
                "dax",
                &[("size", "8192"), ("align", "4095")],
                "not a power of two",
            ),
            (
                "dax",
                &[("size", "4096"), ("align", "8192")],
                "below the alignment",
            ),
        ] {
            let message = probed(subsystem, files).unwrap_err();
            assert!(message.contains(says), "{message:?} does not say {says:?}");
        }
        let root = sysfs("dax", &[]);
        let other = rustix::fs::makedev(1, 3);
        let error = probe(root.path(), Path::new("/dev/null"), other)
            .unwrap_err()
            .to_string();
        assert!(error.contains("/dev/null: not a DAX device"), "{error}");
    }
}
