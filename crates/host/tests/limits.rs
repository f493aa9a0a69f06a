//! What control groups leave of a machine, read from files as other machines have them.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::fs;
use std::path::Path;

use kvdepot_host::limits::{self, Limits};
use kvdepot_host::{Error, dirs};

const GIB: u64 = 1 << 30;

/// A root directory with 64 GiB of memory and 16 processors, and the given files.
fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Limits) {
    let root = tempfile::tempdir().unwrap();
    let base = [
        (
            "proc/meminfo",
            "MemTotal:       67108864 kB\nMemFree:  1 kB\n",
        ),
        ("sys/devices/system/cpu/online", "0-15\n"),
    ];
    for (name, text) in base.iter().chain(files) {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let limits = Limits::at(root.path());
    (root, limits)
}

fn memory_of(files: &[(&str, &str)]) -> u64 {
    machine(files).1.memory().unwrap()
}

fn cpus_of(files: &[(&str, &str)]) -> usize {
    machine(files).1.cpus().unwrap()
}

#[test]
fn without_control_groups_the_machine_is_the_limit() {
    assert_eq!(memory_of(&[]), 64 * GIB);
    assert_eq!(cpus_of(&[]), 16);
}

#[test]
fn version_2_own_group_binds() {
    let files = [
        ("proc/self/cgroup", "0::/user.slice/job\n"),
        ("sys/fs/cgroup/user.slice/job/memory.max", "8589934592\n"),
        ("sys/fs/cgroup/user.slice/memory.max", "max\n"),
        ("sys/fs/cgroup/user.slice/job/cpu.max", "250000 100000\n"),
    ];
    assert_eq!(memory_of(&files), 8 * GIB);
    assert_eq!(cpus_of(&files), 3);
}

#[test]
fn version_2_an_ancestor_binds_too() {
    let files = [
        ("proc/self/cgroup", "0::/a/b/c\n"),
        ("sys/fs/cgroup/a/b/c/memory.max", "max\n"),
        ("sys/fs/cgroup/a/b/memory.max", "34359738368\n"),
        ("sys/fs/cgroup/a/memory.max", "4294967296\n"),
        ("sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n"),
        ("sys/fs/cgroup/a/cpu.max", "50000 100000\n"),
        ("sys/fs/cgroup/a/b/cpu.max", "400000 100000\n"),
    ];
    assert_eq!(memory_of(&files), 4 * GIB);
    assert_eq!(cpus_of(&files), 1);
}

#[test]
fn a_container_that_sees_the_hosts_path_is_bound_by_the_top_it_sees() {
    for group in ["/docker/0123", "/../../docker/0123", "/"] {
        let line = format!("0::{group}\n");
        let files = [
            ("proc/self/cgroup", line.as_str()),
            ("sys/fs/cgroup/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/cpu.max", "200000 100000\n"),
        ];
        assert_eq!(memory_of(&files), 2 * GIB, "{group}");
        assert_eq!(cpus_of(&files), 2, "{group}");
    }
}

#[test]
fn version_1_is_read_with_its_own_names() {
    let files = [
        (
            "proc/self/cgroup",
            "9:name=systemd:/\n4:memory:/job\n3:cpuset:/\n2:cpu,cpuacct:/job\n",
        ),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "9223372036854771712\n",
        ),
        (
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes",
            "1073741824\n",
        ),
        ("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "500000\n"),
        (
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us",
            "100000\n",
        ),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
    ];
    assert_eq!(memory_of(&files), GIB);
    assert_eq!(cpus_of(&files), 5);
}

#[test]
fn an_unlimited_group_of_version_1_leaves_the_machine() {
    let files = [
        ("proc/self/cgroup", "4:memory:/\n1:cpu:/\n"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "9223372036854771712\n",
        ),
        ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
        ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
    ];
    assert_eq!(memory_of(&files), 64 * GIB);
    assert_eq!(cpus_of(&files), 16);
}

#[test]
fn both_versions_side_by_side_are_both_read() {
    let files = [
        ("proc/self/cgroup", "4:memory:/job\n0::/unit\n"),
        (
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes",
            "3221225472\n",
        ),
        ("sys/fs/cgroup/unified/unit/cpu.max", "700000 100000\n"),
    ];
    assert_eq!(memory_of(&files), 3 * GIB);
    assert_eq!(cpus_of(&files), 7);
}

#[test]
fn the_nearest_group_that_names_processors_counts() {
    let files = [
        ("proc/self/cgroup", "0::/a/b\n"),
        ("sys/fs/cgroup/a/b/cpuset.cpus.effective", "\n"),
        ("sys/fs/cgroup/a/cpuset.cpus.effective", "0-3,8,10-11\n"),
        ("sys/fs/cgroup/cpuset.cpus.effective", "0-15\n"),
    ];
    assert_eq!(cpus_of(&files), 7);
    let files = [
        ("proc/self/cgroup", "3:cpuset:/job\n"),
        ("sys/fs/cgroup/cpuset/job/cpuset.cpus", "4\n"),
    ];
    assert_eq!(cpus_of(&files), 1);
}

#[test]
fn files_that_make_no_sense_are_named() {
    let cases = [
        ("proc/meminfo", "MemTotal: lots\n"),
        ("sys/fs/cgroup/memory.max", "plenty\n"),
        ("sys/fs/cgroup/cpu.max", "100000 0\n"),
        ("sys/fs/cgroup/cpu.max", "100000\n"),
        ("sys/fs/cgroup/cpuset.cpus.effective", "7-3\n"),
        ("proc/self/cgroup", "no colon\n"),
    ];
    for (name, text) in cases {
        let (root, limits) = machine(&[("proc/self/cgroup", "0::/\n")]);
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        let error = limits.memory().and_then(|_| limits.cpus()).expect_err(text);
        assert!(
            matches!(&error, Error::Malformed { what, .. } if *what == path.display().to_string()),
            "{name}: {error}"
        );
    }
}

#[test]
fn this_machine_has_memory_and_processors() {
    let memory = limits::memory_allowed().unwrap();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total: u64 = meminfo
        .split_ascii_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    assert!(memory >= 1 << 20, "{memory}");
    assert!(memory <= total * 1024, "{memory} of {total} KiB");
    let group = limits::cpus_of_group().unwrap();
    let thread = limits::cpus_of_thread().unwrap();
    assert!(thread >= 1 && group >= thread, "{thread} of {group}");
}

#[test]
fn the_free_space_of_a_missing_path_is_that_of_its_parent() {
    let root = tempfile::tempdir().unwrap();
    let missing = root.path().join("not/yet/there");
    let free = limits::disk_free(&missing).unwrap();
    let stat = rustix::fs::statvfs(root.path()).unwrap();
    let size = stat.f_blocks * stat.f_frsize;
    assert!(free > 0 && free <= size, "{free} of {size}");
    assert!(limits::disk_free(Path::new("not-here-at-all/x")).unwrap() > 0);
    assert!(limits::disk_free(Path::new("")).unwrap() > 0);
}

#[test]
fn the_free_space_below_a_file_cannot_be_asked() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    let error = limits::disk_free(&file.join("below")).unwrap_err();
    assert_eq!(
        error.io_kind(),
        Some(std::io::ErrorKind::NotADirectory),
        "{error}"
    );
}

#[test]
fn a_directory_of_another_user_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let theirs = if rustix::process::geteuid().is_root() {
        let path = dirs::private(root.path().join("theirs")).unwrap();
        std::os::unix::fs::chown(&path, Some(54_321), None).unwrap();
        path
    } else {
        "/usr".into()
    };
    let error = dirs::private(&theirs).unwrap_err();
    assert!(
        matches!(&error, Error::NotPrivate { reason, .. } if reason.contains("belongs to uid")),
        "{error}"
    );
}
