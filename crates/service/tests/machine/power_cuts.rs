//! Power cuts, really tried: what tiers write under `durability: power` goes to a disk through a
//! log of writes (the device mapper's `log-writes`), and what the disk may hold at any moment is
//! made again from the log, opened, and compared with what had been acknowledged by then.
//!
//! `make test-vm` runs this in a virtual machine. `KVDEPOT_TEST_DISKS` names three disks, of
//! which everything is lost: the one that is written, the one for the log, and the one that is
//! made again. `KVDEPOT_TEST_CUTS` is how often the power fails at flushes of each case,
//! and how often before one has ended.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and its output is for the person who reads it"
)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::common::{get, namespace, put};
use kvdepot_media::file::Aligned;
use kvdepot_service::open;
use kvdepot_store::{Config, Depot, Namespace, Outcome};
use kvdepot_testkit::Rng;
use kvdepot_testkit::write_log::{Replay, WriteLog};
use serde_json::json;

/// Bytes of the disk, all of which is zeros at first.
const DISK: usize = 48 << 20;
const MIB: usize = 1 << 20;

/// The device that the writes go through, and where its file system is mounted.
const LOGGED: &str = "/dev/mapper/kvdepot-logged";
const NAME: &str = "kvdepot-logged";

/// Threads that put blocks, so that commits share syncs.
const PUTTERS: u64 = 3;

/// Those acknowledged last that may not have been evicted yet.
const RECENT: usize = 3;

/// What is put where.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    tier: &'static str,
    /// On an ext4 of the disk, or on the disk itself.
    in_files: bool,
    durability: &'static str,
    capacity: &'static str,
    /// Whether others must go for what is put.
    evicts: bool,
    blocks: u64,
}

const CASES: [Case; 5] = [
    Case {
        name: "Nvme on the disk",
        tier: "Nvme",
        in_files: false,
        durability: "power",
        capacity: "24MiB",
        evicts: false,
        blocks: 60,
    },
    Case {
        name: "Nvme on the disk, evicting",
        tier: "Nvme",
        in_files: false,
        durability: "power",
        capacity: "1MiB",
        evicts: true,
        blocks: 90,
    },
    Case {
        name: "Nvme in a file of ext4",
        tier: "Nvme",
        in_files: true,
        durability: "power",
        capacity: "16MiB",
        evicts: false,
        blocks: 40,
    },
    Case {
        name: "Posix on ext4",
        tier: "Posix",
        in_files: true,
        durability: "power",
        capacity: "24MiB",
        evicts: false,
        blocks: 60,
    },
    Case {
        name: "Posix on ext4, evicting",
        tier: "Posix",
        in_files: true,
        durability: "power",
        capacity: "2MiB",
        evicts: true,
        blocks: 90,
    },
];

/// What promises nothing of power cuts: that blocks are missing here shows that cuts are tried.
const CONTROLS: [Case; 2] = [
    Case {
        name: "Nvme on the disk, process",
        durability: "process",
        ..CASES[0]
    },
    Case {
        name: "Posix on ext4, process",
        durability: "process",
        ..CASES[3]
    },
];

/// Bytes of a block: less than a page, and more than a record's.
fn len_of(number: u64) -> usize {
    const LENGTHS: [usize; 6] = [1, 4096, 4097, 20_000, 65_536, 100_001];
    LENGTHS[number as usize % LENGTHS.len()]
}

fn run(program: &str, args: &[&str]) {
    let ran = Command::new(program)
        .args(args)
        // The nodes of devices are made by the program itself.
        .env("DM_DISABLE_UDEV", "1")
        .output();
    let ran = ran.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{program} {args:?}: {text}");
}

struct Disks {
    written: String,
    log: String,
    again: String,
    mount: tempfile::TempDir,
}

impl Case {
    fn path(&self, device: &str, mount: &Path) -> PathBuf {
        match (self.in_files, self.tier) {
            (false, _) => device.into(),
            (true, "Nvme") => mount.join("arena"),
            (true, _) => mount.join("blocks"),
        }
    }

    fn open(&self, path: &Path) -> Depot {
        let section = json!({
            "path": path.to_str().unwrap(),
            "capacity": self.capacity,
            "durability": self.durability,
        });
        let mut settings = json!({"socket": "off", "lanes": 2});
        settings[self.tier.to_ascii_lowercase()] = section;
        open(&Config::new(self.tier, &settings).unwrap()).unwrap()
    }
}

impl Disks {
    fn named() -> Disks {
        let disks = std::env::var("KVDEPOT_TEST_DISKS");
        let disks = disks.expect("KVDEPOT_TEST_DISKS names three disks");
        let [written, log, again] = disks.split(' ').collect::<Vec<_>>()[..] else {
            panic!("KVDEPOT_TEST_DISKS: {disks:?}");
        };
        Disks {
            written: written.to_owned(),
            log: log.to_owned(),
            again: again.to_owned(),
            mount: tempfile::tempdir().unwrap(),
        }
    }

    fn mount(&self, device: &str) {
        run(
            "mount",
            &["-t", "ext4", device, self.mount.path().to_str().unwrap()],
        );
    }

    fn unmount(&self) {
        run("umount", &[self.mount.path().to_str().unwrap()]);
    }

    /// Has a case's blocks put to the disk, from when it was empty. The log says when each was
    /// acknowledged.
    fn write(&self, case: &Case) {
        fill(&self.written, &vec![0; DISK]);
        let table = format!("0 {} log-writes {} {}", DISK / 512, self.written, self.log);
        run("dmsetup", &["create", NAME, "--table", &table]);
        if case.in_files {
            let options = ["-q", "-F", "-b", "4096", "-J", "size=4", "-E", "nodiscard"];
            run("mkfs.ext4", &[&options[..], &[LOGGED]].concat());
            self.mount(LOGGED);
        }
        let depot = case.open(&case.path(LOGGED, self.mount.path()));
        let ns = namespace(&depot);
        mark("begin");
        let next = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..PUTTERS {
                scope.spawn(|| put_all(&ns, &next, case.blocks));
            }
        });
        mark("end");
        drop(ns);
        depot.close();
        // With the last of it a directory of blocks is let go.
        drop(depot);
        if case.in_files {
            self.unmount();
        }
        run("dmsetup", &["remove", NAME]);
    }

    /// Lets the power fail, again and again; how many acknowledged blocks were lost.
    fn check(&self, case: &Case, rng: &mut Rng) -> Result<usize, String> {
        let log = WriteLog::open(File::open(&self.log).unwrap()).unwrap();
        let marks = log.marks();
        let at = |wanted: &str| {
            let found = marks.iter().find(|(_, word)| word == wanted);
            found.unwrap().0
        };
        let (begin, end) = (at("begin"), at("end"));
        let cuts: usize = std::env::var("KVDEPOT_TEST_CUTS").map_or(16, |n| n.parse().unwrap());
        let mut chosen: Vec<(usize, bool)> = Vec::new();
        let boundaries = log.boundaries();
        let within = |count: &usize| (begin + 2..=end + 1).contains(count);
        let mut boundaries: Vec<usize> = boundaries.into_iter().filter(within).collect();
        // Without `power` there may be none but the end, which has everything.
        boundaries.push(end + 1);
        for cut in 0..cuts {
            chosen.push((*rng.pick(&boundaries), false));
            // All that the flush is for is under way: a record, too, whose payload was not synced.
            chosen.push((*rng.pick(&boundaries) - 1, true));
            if cut % 4 == 0 {
                let anywhere = rng.between(begin as u64, end as u64 + 1) as usize;
                chosen.push((anywhere, false));
            }
        }
        chosen.push((end + 1, false));
        chosen.sort_unstable();
        let mut replay = Replay::new(&log, DISK);
        let mut lost = 0;
        for (count, in_any_order) in &chosen {
            let any = in_any_order.then_some(&mut *rng);
            let disk = replay.cut(*count, any).unwrap();
            fill(&self.again, &disk);
            let acknowledged = marks.iter().filter(|(index, _)| index < count);
            let acknowledged: Vec<u64> = acknowledged
                .filter_map(|(_, word)| word.parse().ok())
                .collect();
            let found = self.look(case, &acknowledged);
            lost +=
                found.map_err(|said| format!("after {count} of {} entries: {said}", log.len()))?;
        }
        println!(
            "ok: {}: {} entries, {} flushes, power cut {} times, {lost} acknowledged blocks lost",
            case.name,
            log.len(),
            boundaries.len() - 1,
            chosen.len()
        );
        Ok(lost)
    }

    /// Looks for all blocks after a cut: those that are there are right. How many are not that
    /// should be.
    fn look(&self, case: &Case, acknowledged: &[u64]) -> Result<usize, String> {
        if case.in_files {
            self.mount(&self.again);
        }
        let depot = case.open(&case.path(&self.again, self.mount.path()));
        let ns = namespace(&depot);
        let promised = match case.evicts {
            true => &acknowledged[acknowledged.len().saturating_sub(RECENT)..],
            false => acknowledged,
        };
        let mut lost = 0;
        for number in 0..case.blocks {
            match get(&ns, &[number], len_of(number))[0] {
                Outcome::Done => {}
                Outcome::Miss => lost += usize::from(promised.contains(&number)),
                // Found in time, but an order of writes was not kept.
                other if case.durability == "power" => {
                    return Err(format!("block {number} is {other:?}"));
                }
                _ => lost += usize::from(promised.contains(&number)),
            }
        }
        drop(ns);
        depot.close();
        // With the last of it a directory of blocks is let go.
        drop(depot);
        if case.in_files {
            self.unmount();
        }
        Ok(lost)
    }
}

fn put_all(ns: &Namespace, next: &AtomicU64, blocks: u64) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= blocks {
            return;
        }
        assert_eq!(put(ns, &[number], len_of(number)), [true]);
        mark(&number.to_string());
    }
}

/// Has the log say something behind what is durable now.
fn mark(word: &str) {
    run("dmsetup", &["message", NAME, "0", "mark", word]);
}

/// Writes a disk from its beginning, past the page cache.
fn fill(disk: &str, bytes: &[u8]) {
    let mut options = File::options();
    options.write(true);
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_DIRECT);
    let file = options.open(disk).unwrap();
    let mut piece = Aligned::new(MIB);
    for (at, bytes) in (0..).step_by(MIB).zip(bytes.chunks(MIB)) {
        piece[..bytes.len()].copy_from_slice(bytes);
        file.write_all_at(&piece[..bytes.len()], at).unwrap();
    }
    file.sync_all().unwrap();
}

#[test]
#[ignore = "needs a device mapper with log-writes; make test-vm runs it in a virtual machine"]
fn what_is_acknowledged_outlives_power_cuts() {
    println!();
    let disks = Disks::named();
    let mut rng = Rng::for_test("power_cuts");
    for case in &CASES {
        disks.write(case);
        let lost = disks.check(case, &mut rng);
        assert_eq!(lost, Ok(0), "{}", case.name);
    }
    for case in &CONTROLS {
        disks.write(case);
        let lost = disks.check(case, &mut rng).unwrap();
        assert!(lost > 0, "{}: nothing is lost without a flush?", case.name);
    }
}
