//! `kvdepot doctor`: what this machine offers, what could be better, and what is amiss.
//!
//! A script that starts something only where all is well asks for the exit status, so it is 1 for
//! what keeps kvdepot from working or storing alone, and not for what would make it faster.

mod shared;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use kvdepot_host::dir::Dir;
use kvdepot_host::{block, dirs, limits, socket};
use kvdepot_media::Mapping;
use kvdepot_media::copy_kernel::{self, CopyKernel};
use kvdepot_media::file::Hands;
use kvdepot_store::Config;
use kvdepot_store::inspect::Inspection;
use serde::Serialize;
use serde_json::json;

use super::served;
use super::stat::{Summary, orphans_of};
use crate::args::{DoctorArgs, targets};
use crate::error::Error;
use crate::leftovers;
use crate::output::{Output, Table, bytes, count, some};

/// One line of the report.
#[derive(Serialize)]
struct Check {
    check: &'static str,
    /// `ok`, `advice` (it works, and could do better) or `warn` (it does not).
    status: &'static str,
    value: String,
    hint: Option<String>,
}

impl Check {
    fn ok(check: &'static str, value: impl Into<String>) -> Check {
        Check {
            check,
            status: "ok",
            value: value.into(),
            hint: None,
        }
    }

    fn advice(check: &'static str, value: impl Into<String>, hint: impl Into<String>) -> Check {
        Check {
            status: "advice",
            hint: Some(hint.into()),
            ..Check::ok(check, value)
        }
    }

    fn warn(check: &'static str, value: impl Into<String>, hint: impl Into<String>) -> Check {
        Check {
            status: "warn",
            ..Check::advice(check, value, hint)
        }
    }
}

pub(crate) fn run(args: &DoctorArgs, output: &mut Output) -> Result<i32, Error> {
    let mut checks = kernels(args.calibrate)?;
    checks.extend([processors(), memory(), cache()]);
    checks.extend(dax(Path::new("/sys/bus/dax/devices")));
    checks.extend(disks(Path::new("/sys/class/block")));
    checks.push(huge_pages(
        Path::new("/sys/kernel/mm/transparent_hugepage"),
        &fs::read_to_string("/proc/meminfo").unwrap_or_default(),
        huge_bytes_given(),
    ));
    checks.push(shared_memory());
    checks.push(ring());
    checks.extend(args.path.as_deref().map(direct).transpose()?);
    checks.extend(disk_and_arena()?);
    checks.extend(nvme_arena());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    checks.push(shared::threefs(&mounts));
    checks.push(shared::objects(|name| std::env::var_os(name).is_some()));
    checks.push(runtime());
    checks.extend(sockets());
    checks.extend(orphans());
    let status = exit_status(&checks);
    if output.is_json() {
        for check in &checks {
            output.object(check)?;
        }
        return Ok(status);
    }
    let mut table = Table::new(&["status", "check", "value"]);
    for check in checks {
        let status = check.status.to_owned();
        table.row([status, check.check.into(), check.value]);
        if let Some(hint) = check.hint {
            table.row(["".into(), "".into(), format!("hint: {hint}")]);
        }
    }
    output.table(&table)?;
    Ok(status)
}

fn exit_status(checks: &[Check]) -> i32 {
    let amiss = checks.iter().any(|check| check.status == "warn");
    if amiss {
        crate::status::PROBLEMS
    } else {
        crate::status::OK
    }
}

/// The copy kernels of this machine; with `measures` they are measured again.
fn kernels(measures: bool) -> Result<Vec<Check>, Error> {
    const AGAIN: &str = "measure again while no other program runs: kvdepot doctor --calibrate";
    const DIFFER: &str = "the measurements differed by more than 10 %";
    let all = CopyKernel::all();
    if cfg!(target_arch = "x86_64") && all.len() == 1 {
        let hint = "copies with checksums are several times faster with AVX2";
        return Ok(vec![Check::advice("copy kernel", all[0].name(), hint)]);
    }
    let mut checks = Vec::new();
    let mut known = copy_kernel::kept().map(|kept| (kept.kernels, kept.is_settled));
    if measures {
        let calibration = copy_kernel::calibrate()?;
        for speed in &calibration.speeds {
            let (name, leaf) = (speed.kernel.name(), bytes(speed.leaf));
            let (rate, spread) = (speed.bytes_per_second / 1e9, speed.spread * 100.0);
            let value = format!("{name}, {leaf}: {rate:.1} GB/s, quartiles {spread:.0} % apart");
            checks.push(Check::ok("copy kernel", value));
        }
        if !calibration.is_kept {
            let hint = "other processes measure again; set XDG_CACHE_HOME to a directory that \
                        this user can write";
            checks.push(Check::advice(
                "copy kernel",
                "the result was not stored",
                hint,
            ));
        }
        known = Some((calibration.kernels, calibration.is_settled));
    }
    checks.push(match known {
        Some((_, false)) => {
            let value = format!("{} (the default; {DIFFER})", all[0].name());
            Check::advice("copy kernel", value, AGAIN)
        }
        Some(([small, large], _)) if small == large => Check::ok("copy kernel", small.name()),
        Some(([small, large], _)) => {
            let (small, large) = (small.name(), large.name());
            Check::ok(
                "copy kernel",
                format!("{small} below 512 KiB, {large} from 512 KiB"),
            )
        }
        None => Check::ok(
            "copy kernel",
            format!("{} (not measured yet)", all[0].name()),
        ),
    });
    Ok(checks)
}

fn processors() -> Check {
    match (limits::cpus_of_group(), limits::cpus_of_thread()) {
        (Ok(group), Ok(thread)) if thread < group => Check::ok(
            "processors",
            format!("{group} (this process is pinned to {thread}; copy threads use all)"),
        ),
        (Ok(group), _) => Check::ok("processors", group.to_string()),
        (Err(error), _) => Check::advice("processors", error.to_string(), "lanes defaults to 1"),
    }
}

fn memory() -> Check {
    match limits::memory_allowed() {
        Ok(allowed) => Check::ok("memory", format!("{} allowed", bytes(allowed))),
        Err(error) => Check::warn("memory", error.to_string(), "set cache.capacity"),
    }
}

fn cache() -> Check {
    let value = Config::default().cache_capacity();
    match value {
        Ok(capacity) => Check::ok("default Cache", bytes(capacity)),
        Err(error) => Check::warn("default Cache", error.to_string(), "set cache.capacity"),
    }
}

/// What is in a directory, in order.
fn listed(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The DAX devices under a sysfs folder.
fn dax(devices: &Path) -> Vec<Check> {
    let read = |path: &Path| {
        fs::read_to_string(path)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let names = listed(devices);
    if names.is_empty() {
        return vec![Check::ok(
            "DAX",
            "no devices; Dax also accepts any file that can be mapped",
        )];
    }
    names
        .iter()
        .map(|device| {
            let name = device.file_name().unwrap_or_default().to_string_lossy();
            let size = read(&device.join("size")).parse().unwrap_or(0);
            let align = read(&device.join("align")).parse().unwrap_or(0);
            let node = read(&device.join("target_node"));
            let value = format!(
                "/dev/{name}: {}, aligned to {}, node {node}",
                bytes(size),
                bytes(align)
            );
            let driver = fs::read_link(device.join("driver")).unwrap_or_default();
            let driver = driver.file_name().unwrap_or_default().to_string_lossy();
            if driver == "kmem" {
                let hint = "the system uses the device as memory; to use it for Dax: daxctl \
                            reconfigure-device -m devdax";
                return Check::advice("DAX", value, format!("{hint} {name}"));
            }
            let node = Path::new("/dev").join(&*name);
            match fs::File::options().read(true).write(true).open(&node) {
                Ok(_) => Check::ok("DAX", value),
                Err(error) => {
                    let hint = format!("{}: {error}; give this user access", node.display());
                    Check::advice("DAX", value, hint)
                }
            }
        })
        .collect()
}

/// The block devices under a sysfs folder that nobody uses: an `nvme.path` could name them.
fn disks(devices: &Path) -> Vec<Check> {
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let names = listed(devices);
    let check = |device: &PathBuf| {
        let uses = block::uses_of(device);
        // Memory, and drives of media that come and go.
        let is_no_disk = ["loop", "ram", "zram", "sr", "fd"]
            .iter()
            .any(|kind| uses.name.starts_with(kind));
        let sectors: u64 = read(&device.join("size")).trim().parse().unwrap_or(0);
        if is_no_disk || sectors == 0 || uses.is_used() || !uses.partitions.is_empty() {
            return None;
        }
        let node = Path::new("/dev").join(&uses.name);
        let value = format!("{}: {}, not in use", node.display(), bytes(sectors * 512));
        let sector: u32 = read(&device.join("queue/logical_block_size"))
            .trim()
            .parse()
            .unwrap_or(512);
        if sector > 4096 {
            let hint = format!(
                "Nvme supports logical blocks of at most 4096 bytes; this device has {sector}"
            );
            return Some(Check::advice("block device", value, hint));
        }
        match fs::File::options().read(true).write(true).open(&node) {
            Ok(_) => Some(Check::ok("block device", value)),
            Err(error) => {
                let hint = format!("{}: {error}; give this user access", node.display());
                Some(Check::advice("block device", value, hint))
            }
        }
    };
    let found: Vec<Check> = names.iter().filter_map(check).collect();
    match found.is_empty() {
        true => vec![Check::ok(
            "block device",
            "no unused device; Nvme also accepts files",
        )],
        false => found,
    }
}

/// What the system says of huge pages, and what it gives when it is asked.
fn huge_pages(folder: &Path, meminfo: &str, given: u64) -> Check {
    let chosen = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).unwrap_or_default();
        let word = text
            .split('[')
            .nth(1)
            .and_then(|rest| rest.split(']').next());
        word.unwrap_or("unknown").to_owned()
    };
    let (memory, shared) = (chosen("enabled"), chosen("shmem_enabled"));
    let at_faults = matches!(
        shared.as_str(),
        "always" | "advise" | "within_size" | "force"
    );
    let gets = match (given > 0, at_faults) {
        (true, true) => "used for Cache and the staging buffer",
        (true, false) => {
            "used for the staging buffer, and for a Cache that is allocated at startup"
        }
        (false, _) => "not used for Cache and the staging buffer",
    };
    let mut value = format!("memory {memory}, shared memory {shared}: {gets}");
    let number = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.trim().parse::<u64>().ok())
    };
    if let Some(pool) = number("HugePages_Total:").filter(|pool| *pool > 0) {
        let pool = count(pool);
        value += &format!("; {pool} pages are reserved in a pool that kvdepot does not use");
    }
    if given > 0 {
        return Check::ok("huge pages", value);
    }
    let setting = folder.join("shmem_enabled");
    let hint = if at_faults {
        "memory is fragmented: free some, or reboot; copies are slower without huge pages"
            .to_owned()
    } else {
        let setting = setting.display();
        format!(
            "copies are slower without huge pages; to enable them as root: echo advise > {setting}"
        )
    };
    Check::advice("huge pages", value, hint)
}

/// Bytes of huge pages that the system gives to memory as `Cache` has it, of some that ask.
fn huge_bytes_given() -> u64 {
    /// A few pages: one alone may be luck.
    const ASKED: u64 = 16 << 20;
    let given = Mapping::anonymous("kvdepot-doctor", ASKED).and_then(|memory| {
        memory.populate_write(0, ASKED)?;
        memory.huge_bytes()
    });
    given.unwrap_or(0)
}

fn shared_memory() -> Check {
    match limits::disk_free(Path::new("/dev/shm")) {
        Ok(free) => Check::ok("/dev/shm", format!("{} free (benchmarks)", bytes(free))),
        Err(error) => Check::advice("/dev/shm", error.to_string(), "benchmarks need --dir"),
    }
}

/// Whether this process has a ring of the kernel, by which `Nvme` and `Posix` read and write.
fn ring() -> Check {
    match Hands::new(1).map(|hands| hands.refused().map(str::to_owned)) {
        Ok(None) => Check::ok("io_uring", "used by Nvme and Posix"),
        Ok(Some(why)) => {
            let hint = "Nvme and Posix use threads instead; for io_uring, allow io_uring_setup, \
                        io_uring_enter and io_uring_register in the container, and set \
                        kernel.io_uring_disabled to 0";
            Check::advice("io_uring", why, hint)
        }
        Err(error) => Check::advice(
            "io_uring",
            error.to_string(),
            "Nvme and Posix must be able to start threads",
        ),
    }
}

/// Whether files in a directory, or that of a file, bypass the page cache.
fn direct(path: &Path) -> Result<Check, Error> {
    if path.to_string_lossy().starts_with("unix:") {
        return Err(Error::Usage {
            field: "PATH",
            value: path.display().to_string(),
            allowed: targets::DOCTOR.into(),
        });
    }
    let is_there = |path: &&Path| path.is_dir();
    let dir = path.ancestors().find(is_there);
    let dir = dir.unwrap_or_else(|| Path::new("."));
    let shown = dir.display();
    Ok(match Dir::open(dir).and_then(|dir| dir.takes_direct()) {
        Ok(true) => Check::ok("direct I/O", format!("in {shown}")),
        Ok(false) => {
            let value = format!("not supported in {shown}");
            let hint = "Nvme and Posix use the page cache there; direct: true is an error";
            Check::advice("direct I/O", value, hint)
        }
        Err(error) => {
            let hint = format!(
                "Nvme and Posix create files there: give this user write access to {shown}"
            );
            Check::warn("direct I/O", error.to_string(), hint)
        }
    })
}

/// The least free disk with which the default arena is of use: some thousand tokens of a model
/// of medium size.
const DISK_MIN: u64 = 5 << 30;

fn disk_and_arena() -> Result<Vec<Check>, Error> {
    let config = Config::default();
    let path = match config.arena_path() {
        Ok(path) => path,
        Err(error) => {
            let hint = "set HOME or XDG_CACHE_HOME to a directory of this user";
            return Ok(vec![Check::warn("default arena", error.to_string(), hint)]);
        }
    };
    let shown = path.display();
    let free = limits::disk_free(&path)?;
    let value = format!("{} free for {shown}", bytes(free));
    let disk = if free < DISK_MIN && !path.exists() {
        let hint = "the default arena takes 20 % of the free disk space; set dax.path to a file on \
                    a larger file system";
        Check::advice("disk", value, hint)
    } else {
        Check::ok("disk", value)
    };
    // As a start that names none would: for want of room or rights, or for what lies there.
    let would_open = Config::new("Dax", &json!({"socket": "off"}))?.check();
    if !path.exists() {
        if let Err(error) = would_open {
            let hint = "to use the pipelines Dax and Cache|Dax, set dax.path to another location";
            let arena = Check::warn("default arena", error.to_string(), hint);
            return Ok(vec![disk, arena]);
        }
        let size = bytes(config.arena_capacity()?);
        let arena = Check::ok(
            "default arena",
            format!("not created yet; its size would be {size}"),
        );
        return Ok(vec![disk, arena]);
    }
    Ok(vec![disk, arena_at("default arena", &path, would_open)])
}

/// The default arena of `Nvme`, where there is one.
fn nvme_arena() -> Option<Check> {
    let path = Config::default().nvme_path().ok()?;
    let would_open = Config::new("Nvme", &json!({"socket": "off"})).and_then(|nvme| nvme.check());
    path.exists()
        .then(|| arena_at("default Nvme arena", &path, would_open))
}

/// What an arena holds, and whether it is sound.
fn arena_at(
    name: &'static str,
    path: &Path,
    would_open: Result<(), kvdepot_store::Error>,
) -> Check {
    let shown = path.display();
    let found = Inspection::open(path).map_err(Error::from);
    match found.and_then(|found| Summary::of(&found)) {
        Ok(summary) => {
            let blocks = some(summary.blocks, "block");
            let (live, of) = (bytes(summary.live_bytes), bytes(summary.capacity_bytes));
            let value = format!("{blocks}, {live} of {of}, owner: {}", summary.owner());
            if summary.damaged_records > 0 || !summary.damaged_superblocks.is_empty() {
                let hint =
                    format!("damaged records or superblocks; kvdepot verify {shown} lists them");
                Check::warn(name, value, hint)
            } else if let Err(error) = would_open {
                Check::warn(
                    name,
                    value,
                    format!("a depot cannot open this arena: {error}"),
                )
            } else {
                Check::ok(name, value)
            }
        }
        Err(error) => {
            let hint = format!(
                "to create a new arena, run kvdepot rm {shown} or set format: true (the content is \
                 lost)"
            );
            Check::warn(name, error.to_string(), hint)
        }
    }
}

fn runtime() -> Check {
    match dirs::runtime_dir() {
        Ok(path) => Check::ok("runtime directory", path.display().to_string()),
        Err(error) => Check::warn(
            "runtime directory",
            error.to_string(),
            "sockets of depots are there; set XDG_RUNTIME_DIR or socket: PATH",
        ),
    }
}

/// What owners that were killed have left.
fn sockets() -> Option<Check> {
    let left = socket::deserted(&dirs::runtime_dir().ok()?);
    let names = left.iter().filter_map(|path| path.file_name());
    let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
    let value = match &names[..] {
        [] => return None,
        [one] => format!("{one}: its server was killed"),
        [first, .., last] => format!("{first} … {last}: {} servers were killed", names.len()),
    };
    let hint = "kvdepot rm --all, or the next depot that opens, removes these sockets";
    Some(Check::advice("sockets", value, hint))
}

/// Who keeps the owner of an arena from storing anything: of the default arenas, and of those that
/// live depots of this user have open.
fn orphans() -> Vec<Check> {
    // Where there are none to be found, another line says why.
    let mut paths: BTreeSet<PathBuf> = leftovers::default_arenas().into_iter().flatten().collect();
    for socket in served::sockets().unwrap_or_default() {
        if let Ok(depot) = kvdepot_service::connect_within(&socket, Some(1), Some(served::PATIENCE))
        {
            let devices = depot.devices().unwrap_or_default();
            paths.extend(devices.into_iter().map(|device| device.path));
            depot.close();
        }
    }
    let check = |path: PathBuf| {
        let names = orphans_of(&Inspection::open(&path).ok()?);
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let hint = format!(
            "workers of an earlier owner may still write; nothing is stored until they exit: {}",
            names.join(", ")
        );
        (!names.is_empty()).then(|| Check::warn("orphans", path.display().to_string(), hint))
    };
    paths.into_iter().filter_map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_no_problem_and_a_warning_is_one() {
        let mut checks = vec![Check::ok("a", "1"), Check::advice("b", "2", "better: 3")];
        assert_eq!(exit_status(&checks), crate::status::OK);
        checks.push(Check::warn("c", "4", "must be 5"));
        assert_eq!(exit_status(&checks), crate::status::PROBLEMS);
    }

    #[test]
    fn dax_devices_are_listed_with_what_keeps_them_from_use() {
        let root = std::env::temp_dir().join(format!("kvdepot-doctor-{}", std::process::id()));
        let device = root.join("dax9.9");
        fs::create_dir_all(&device).unwrap();
        for (name, text) in [("size", "4294967296\n"), ("align", "2097152\n")] {
            fs::write(device.join(name), text).unwrap();
        }
        fs::write(device.join("target_node"), "2\n").unwrap();
        let found = dax(&root);
        std::os::unix::fs::symlink("/bus/dax/drivers/kmem", device.join("driver")).unwrap();
        let used = dax(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            found[0].value,
            "/dev/dax9.9: 4 GiB, aligned to 2 MiB, node 2"
        );
        assert!(found[0].hint.as_ref().unwrap().contains("/dev/dax9.9"));
        assert!(used[0].hint.as_ref().unwrap().contains("daxctl"));
        assert_eq!(dax(&root)[0].status, "ok");
    }

    #[test]
    fn block_devices_are_listed_unless_somebody_uses_them() {
        let root = tempfile::tempdir().unwrap();
        let none = disks(root.path());
        assert_eq!((none.len(), none[0].status), (1, "ok"));
        for (name, sectors) in [
            ("sdx", 16),
            ("sdy", 16),
            ("sdz", 16),
            ("sr9", 16),
            ("sdv", 0),
        ] {
            let device = root.path().join(name);
            fs::create_dir_all(device.join("queue")).unwrap();
            fs::write(device.join("size"), sectors.to_string()).unwrap();
        }
        let within = |path: &str| root.path().join(path);
        fs::create_dir_all(within("sdy/holders/dm-0")).unwrap();
        fs::create_dir_all(within("sdz/sdz1")).unwrap();
        fs::write(within("sdz/sdz1/partition"), "1\n").unwrap();
        let found = disks(root.path());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].value, "/dev/sdx: 8 KiB, not in use");
        assert!(found[0].hint.as_ref().unwrap().contains("/dev/sdx"));
        fs::write(within("sdx/queue/logical_block_size"), "16384\n").unwrap();
        let found = disks(root.path());
        assert!(found[0].hint.as_ref().unwrap().contains("at most 4096"));
    }

    #[test]
    fn huge_pages_are_reported_with_what_would_help() {
        let root = tempfile::tempdir().unwrap();
        let with = |shared: &str, meminfo: &str, given: u64| {
            fs::write(root.path().join("enabled"), "always [madvise] never\n").unwrap();
            fs::write(root.path().join("shmem_enabled"), shared).unwrap();
            huge_pages(root.path(), meminfo, given)
        };
        let all = with("always [advise] never\n", "HugePages_Total:       0\n", 4);
        let text = "memory madvise, shared memory advise: used for Cache and the staging buffer";
        assert_eq!((all.value.as_str(), all.hint), (text, None));
        let asked = with("always advise [never]\n", "HugePages_Total:      12\n", 4);
        let resident = "used for the staging buffer, and for a Cache that is allocated at startup";
        assert!(asked.value.contains(resident), "{}", asked.value);
        assert!(
            asked.value.contains("12 pages are reserved"),
            "{}",
            asked.value
        );
        let denied = with("always advise never [deny]\n", "", 0);
        assert_eq!(denied.status, "advice");
        assert!(denied.hint.unwrap().contains("echo advise > "));
        let pieces = with("always [advise] never\n", "", 0);
        assert!(pieces.hint.unwrap().contains("fragmented"));
    }
}
