//! Resource limits of the machine and of its control group.
//!
//! Defaults use these limits. For example, a container that may use 8 GiB of a 1 TiB host must not
//! get a cache of half a terabyte.
//!
//! Both generations of control groups are supported, also at the same time. A limit of any ancestor
//! applies, so all visible ancestors are read. Inside a container the path that the kernel reports
//! is often the host's; then the topmost visible group is that of the container.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::io::Errno;

use super::{Error, Result, cpu};

/// Returns the bytes of memory that this process may use: the machine's, or less if a control group
/// sets a limit. Swap space does not count.
///
/// # Errors
///
/// [`Error::Path`] or [`Error::Malformed`] if `/proc` or `/sys` cannot be read.
pub fn memory_allowed() -> Result<u64> {
    Limits::of_host().memory()
}

/// Returns the maximum number of descriptors that this process may have open now.
#[must_use]
pub fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |most| {
        usize::try_from(most).unwrap_or(usize::MAX)
    })
}

/// Returns the number of processors that unpinned threads can use (see [`cpu::reset_affinity`]), at
/// least 1.
///
/// It is the size of the control group's processor set, or less if the group has a quota (rounded
/// up).
///
/// # Errors
///
/// [`Error::Path`] or [`Error::Malformed`] if `/proc` or `/sys` cannot be read.
pub fn cpus_of_group() -> Result<usize> {
    Limits::of_host().cpus()
}

/// Returns the smaller of [`cpus_of_group`] and the number of processors on which the calling
/// thread may run now.
///
/// # Errors
///
/// The errors of [`cpus_of_group`] and [`cpu::affinity_count`].
pub fn cpus_of_thread() -> Result<usize> {
    Ok(cpus_of_group()?.min(cpu::affinity_count()?).max(1))
}

/// Returns the bytes that an unprivileged user can still write to the file system of `path`.
///
/// If `path` does not exist, its nearest existing parent counts.
///
/// # Errors
///
/// [`Error::Path`] if the file system cannot be queried.
pub fn disk_free(path: &Path) -> Result<u64> {
    let mut candidate = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    loop {
        match rustix::fs::statvfs(candidate) {
            Ok(stat) => return Ok(stat.f_bavail.saturating_mul(stat.f_frsize)),
            Err(Errno::INTR) => {}
            Err(Errno::NOENT) => {
                candidate = match candidate.parent() {
                    Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
                    Some(parent) => parent,
                    None => return Err(Error::path("find", path)(Errno::NOENT)),
                };
            }
            Err(errno) => return Err(Error::path("get the free space of", candidate)(errno)),
        }
    }
}

/// Returns true if `directory` is below `/dev` in the same file system, so that new files would be
/// among device nodes.
///
/// It is false for a separate file system below `/dev`, such as `/dev/shm`.
#[must_use]
pub fn is_of_devices(directory: &Path) -> bool {
    let nodes = Path::new("/dev");
    let device = |path: &Path| fs::metadata(path).map(|at| at.dev()).ok();
    let below = directory
        .canonicalize()
        .is_ok_and(|path| path.starts_with(nodes));
    below && device(directory) == device(nodes)
}

/// Checks that this user may create files in `directory`.
///
/// # Errors
///
/// The error of the system if not.
pub fn can_make_files(directory: &Path) -> io::Result<()> {
    use rustix::fs::Access;
    rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK).map_err(Into::into)
}

/// Returns true if the file system of `directory` is in memory, so that its files do not survive a
/// reboot.
#[must_use]
pub fn is_of_memory(directory: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58F6;
    const HUGETLBFS: u64 = 0x9584_58F6;
    let kind = rustix::fs::statfs(directory).map(|system| system.f_type as u64 & 0xFFFF_FFFF);
    kind.is_ok_and(|kind| [TMPFS, RAMFS, HUGETLBFS].contains(&kind))
}

/// Returns true if `directory` is on an overlayfs, such as the writable layer of a container, which
/// is deleted with the container.
#[must_use]
pub fn is_of_container(directory: &Path) -> bool {
    const OVERLAYFS: u64 = 0x794C_7630;
    let kind = rustix::fs::statfs(directory).map(|system| system.f_type as u64 & 0xFFFF_FFFF);
    kind.is_ok_and(|kind| kind == OVERLAYFS)
}

/// The limits below one root directory, so that files of another machine can be read too.
#[derive(Clone, Debug)]
pub struct Limits {
    root: PathBuf,
}

impl Limits {
    /// Returns the limits of this machine.
    #[must_use]
    pub fn of_host() -> Limits {
        Limits::at("/")
    }

    /// Returns the limits that `proc` and `sys` below `root` describe.
    pub fn at(root: impl Into<PathBuf>) -> Limits {
        Limits { root: root.into() }
    }

    /// Returns the bytes of memory that a process may use; see [`memory_allowed`].
    ///
    /// # Errors
    ///
    /// [`Error::Path`] or [`Error::Malformed`] if a file cannot be read.
    pub fn memory(&self) -> Result<u64> {
        let mut bytes = self.memory_of_machine()?;
        for group in self.groups("memory", "memory.max")? {
            bytes = bytes.min(read_limit(&group)?.unwrap_or(u64::MAX));
        }
        for group in self.groups("memory", "memory.limit_in_bytes")? {
            bytes = bytes.min(read_limit(&group)?.unwrap_or(u64::MAX));
        }
        Ok(bytes)
    }

    fn memory_of_machine(&self) -> Result<u64> {
        let path = self.root.join("proc/meminfo");
        let text = fs::read_to_string(&path).map_err(Error::path("read", &path))?;
        let kibibytes = text
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))
            .and_then(|rest| rest.trim().strip_suffix("kB"))
            .and_then(|number| number.trim().parse::<u64>().ok());
        match kibibytes {
            Some(kibibytes) => Ok(kibibytes.saturating_mul(1024)),
            None => Err(Error::malformed(&path, text, "a line \"MemTotal: … kB\"")),
        }
    }

    /// Returns the number of processors that unpinned threads can use; see [`cpus_of_group`].
    ///
    /// # Errors
    ///
    /// [`Error::Path`] or [`Error::Malformed`] if a file cannot be read.
    pub fn cpus(&self) -> Result<usize> {
        let count = self.cpu_set()?;
        let quota = usize::try_from(self.cpu_quota()?).unwrap_or(usize::MAX);
        Ok(count.min(quota).max(1))
    }

    /// The processors of the nearest group that names some, or else the machine's.
    fn cpu_set(&self) -> Result<usize> {
        let mut files = Vec::new();
        for name in [
            "cpuset.cpus.effective",
            "cpuset.effective_cpus",
            "cpuset.cpus",
        ] {
            files.extend(self.groups("cpuset", name)?);
        }
        files.push(self.root.join("sys/devices/system/cpu/online"));
        for file in files {
            let Some(text) = read_if_there(&file)? else {
                continue;
            };
            match count_list(&text) {
                Some(0) => {}
                Some(count) => return Ok(count),
                None => return Err(Error::malformed(&file, text, "a list such as 0-3,8")),
            }
        }
        // Without /sys. The kernel answers for this thread, which is the most there is to know.
        cpu::affinity_count()
    }

    /// Whole processors' worth of time, rounded up; `u64::MAX` without a quota.
    fn cpu_quota(&self) -> Result<u64> {
        let mut least = u64::MAX;
        for file in self.groups("cpu", "cpu.max")? {
            let Some(text) = read_if_there(&file)? else {
                continue;
            };
            let mut words = text.split_ascii_whitespace();
            let (quota, period) = (words.next(), words.next());
            if quota == Some("max") {
                continue;
            }
            let quota = quota.and_then(|quota| quota.parse::<u64>().ok());
            let period = period.and_then(|period| period.parse::<u64>().ok());
            match (quota, period) {
                (Some(quota), Some(period @ 1..)) => least = least.min(quota.div_ceil(period)),
                _ => return Err(Error::malformed(&file, text, "\"max\" or two numbers")),
            }
        }
        for file in self.groups("cpu", "cpu.cfs_quota_us")? {
            let quota = read_limit(&file)?;
            let period = read_limit(&file.with_file_name("cpu.cfs_period_us"))?;
            if let (Some(quota), Some(period @ 1..)) = (quota, period) {
                least = least.min(quota.div_ceil(period));
            }
        }
        Ok(least)
    }

    /// The file `name` in this process's group for `controller` and in all its ancestors, nearest
    /// first. The files need not exist.
    fn groups(&self, controller: &str, name: &str) -> Result<Vec<PathBuf>> {
        let path = self.root.join("proc/self/cgroup");
        let text = read_if_there(&path)?.unwrap_or_default();
        let mounts = self.root.join("sys/fs/cgroup");
        let mut files = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(group)) =
                (fields.next(), fields.next(), fields.next())
            else {
                return Err(Error::malformed(
                    &path,
                    text,
                    "lines of number:controllers:path",
                ));
            };
            if controllers.is_empty() {
                // Version 2 alone is mounted at the top; beside version 1 it is in "unified".
                for mount in [mounts.clone(), mounts.join("unified")] {
                    climb(&mount, group, name, &mut files);
                }
            } else if controllers.split(',').any(|c| c == controller) {
                // The folder has the name of all controllers in it, with a link for each.
                for mount in [mounts.join(controller), mounts.join(controllers)] {
                    climb(&mount, group, name, &mut files);
                }
            }
        }
        Ok(files)
    }
}

/// Adds `name` under `mount/group` and under each ancestor of it, up to the mount.
fn climb(mount: &Path, group: &str, name: &str, files: &mut Vec<PathBuf>) {
    let group = Path::new(group);
    // A group outside the visible tree ("/../..") has no path here; its visible ancestor is the
    // top.
    let is_outside = group.components().any(|part| part == Component::ParentDir);
    let inside = if is_outside {
        Path::new("")
    } else {
        group.strip_prefix("/").unwrap_or(group)
    };
    for ancestor in inside.ancestors() {
        let file = mount.join(ancestor).join(name);
        if !files.contains(&file) {
            files.push(file);
        }
    }
}

/// A number, or `None` for no limit: no file, "max", or the −1 of version 1.
fn read_limit(file: &Path) -> Result<Option<u64>> {
    let Some(text) = read_if_there(file)? else {
        return Ok(None);
    };
    match text.trim() {
        "max" | "-1" => Ok(None),
        number => match number.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Error::malformed(file, text, "a number or \"max\"")),
        },
    }
}

/// How many numbers a list such as `0-3,8` holds; `None` when it is no such list.
fn count_list(text: &str) -> Option<usize> {
    let mut count: usize = 0;
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

/// A file that is not there, or hidden from this user, sets no limit that could be known.
fn read_if_there(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(Error::path("read", path)(error)),
    }
}
