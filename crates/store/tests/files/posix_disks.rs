//! The tier `Posix` on file systems of disks: full before the capacity is, and read-only all at
//! once. They lie on loop devices, which only a privileged user has.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says why it is skipped"
)]

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use crate::common::{eventually, get, has, namespace, put};
use crate::folder::{at_rest, open, open_with};
use crate::realm;
use crate::realm::User;
use kvdepot_store::Outcome;
use kvdepot_testkit::child;
use serde_json::json;

const MIB: u64 = 1 << 20;

/// Runs a program; what it says where it fails or is not there.
fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let done = Command::new(program).args(arguments).output();
    let done = done.map_err(|error| format!("{program}: {error}"))?;
    let said = || format!("{program}: {}", String::from_utf8_lossy(&done.stderr));
    done.status.success().then_some(()).ok_or_else(said)
}

/// Makes a file system of a kind, which options of its program may follow.
fn make(kind: &str, image: &str) -> Result<(), String> {
    let mut words = kind.split(' ');
    let program = format!("mkfs.{}", words.next().unwrap_or_default());
    let arguments: Vec<&str> = words.chain(["-q", image]).collect();
    run(&program, &arguments)
}

/// Runs `body` where such a file system is mounted, of so many MiB, in a child whose mounts end
/// with it; skips where there is none.
fn on_disk(test: &str, kind: &str, mib: u64, body: impl FnOnce(&Path)) {
    if let Some(role) = child::role() {
        assert_eq!(role, kind);
        let home = child::value("home");
        let home = Path::new(&home);
        let (image, at) = (home.join("image"), home.join("mounted"));
        fs::create_dir(&at).unwrap();
        File::create(&image).unwrap().set_len(mib * MIB).unwrap();
        let names = [&image, &at].map(|path| path.to_str().unwrap());
        // Nobody else sees it.
        let made = run("mount", &["--make-rprivate", "/"])
            .and_then(|()| make(kind, names[0]))
            .and_then(|()| run("mount", &["-o", "loop", names[0], names[1]]));
        if let Err(reason) = made {
            return child::say(&format!("skipped: no {kind} is to be had here: {reason}"));
        }
        body(&at);
        eventually("that nobody has it open", || {
            run("umount", &[names[1]]).is_ok()
        });
        return child::say("done");
    }
    let dir = tempfile::tempdir().unwrap();
    let home = [("home", dir.path().to_str().unwrap())];
    match realm::start(test, kind, &home, User::Same, &[]) {
        Ok(mut child) => match child.line().unwrap().as_str() {
            "done" => {}
            line => {
                assert!(line.starts_with("skipped: "), "{line}");
                println!("{line}");
            }
        },
        Err(error) => println!("skipped: no mounts for this user: {error}"),
    }
}

fn fills_up(at: &Path, mib: u64) {
    const LEN: usize = 1 << 20;
    let roomy = || json!({"capacity": "4GiB", "fan_out": 16});
    let depot = open_with("Posix", at, roomy());
    let ns = namespace(&depot);
    let stored: Vec<u64> = (0..mib + mib / 2)
        .filter(|number| put(&ns, &[*number], LEN) == [true])
        .collect();
    // One may find that others have taken what was made free for it.
    assert!(stored.len() as u64 * 10 > mib * 14, "{}", stored.len());
    let newest = &stored[stored.len() - 10..];
    assert!(has(&ns, newest, LEN), "the newest stay");
    let outcomes = get(&ns, &stored, LEN);
    assert!(outcomes.contains(&Outcome::Miss), "more than there is room");
    assert!(depot.stats().tiers[0].evicted_blocks > 0);
    // All that may go goes, and then nothing is stored that is not whole.
    ns.clear().unwrap();
    let other = at.join("other");
    assert!(std::io::copy(&mut std::io::repeat(1), &mut File::create(&other).unwrap()).is_err());
    assert_eq!(put(&ns, &[9000], LEN), [false]);
    assert_eq!(get(&ns, &[9000], LEN), [Outcome::Miss]);
    fs::remove_file(other).unwrap();
    assert_eq!(put(&ns, &[9000], LEN), [true]);
    at_rest(&depot);
    depot.close();
    let depot = open_with("Posix", at, roomy());
    assert!(has(&namespace(&depot), &[9000], LEN));
    depot.close();
}

#[test]
fn ext4_is_full_before_the_capacity() {
    on_disk(
        "posix_disks::ext4_is_full_before_the_capacity",
        "ext4",
        64,
        |at| fills_up(at, 64),
    );
}

#[test]
fn xfs_is_full_before_the_capacity() {
    on_disk(
        "posix_disks::xfs_is_full_before_the_capacity",
        "xfs",
        320,
        |at| fills_up(at, 320),
    );
}

#[test]
fn files_are_evicted_where_times_are_of_whole_seconds() {
    const LEN: usize = 64 << 10;
    let test = "posix_disks::files_are_evicted_where_times_are_of_whole_seconds";
    on_disk(test, "ext4 -I 128", 64, |at| {
        let depot = open_with("Posix", at, json!({"capacity": "8MiB", "fan_out": 16}));
        let ns = namespace(&depot);
        // Some in one second, and all of the directory in each of the next ones.
        for number in 0..400 {
            assert_eq!(put(&ns, &[number], LEN), [true], "{number}");
        }
        assert!(depot.stats().tiers[0].evicted_blocks > 200);
        assert!(has(&ns, &[399], LEN));
        depot.close();
    });
}

#[test]
fn what_turns_read_only_under_a_depot_stores_nothing_and_loses_nothing() {
    const LEN: usize = 70_001;
    let test = "posix_disks::what_turns_read_only_under_a_depot_stores_nothing_and_loses_nothing";
    on_disk(test, "ext4", 64, |at| {
        let name = at.to_str().unwrap();
        for (turn, pipeline) in (0..).zip(["Posix", "Cache|Posix"]) {
            let depot = open_with(pipeline, at, json!({"durability": "power"}));
            let ns = namespace(&depot);
            let before: Vec<u64> = (turn * 100..turn * 100 + 5).collect();
            assert_eq!(put(&ns, &before, LEN), [true; 5]);
            // As ext4 does by itself after an error of its disk; asked for it politely, it refuses,
            // as files are open that are written.
            run("mount", &["-o", "remount,abort", name]).unwrap();
            let refused = fs::write(at.join("probe"), "").unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
            let during: Vec<u64> = (turn * 100 + 10..turn * 100 + 15).collect();
            assert_eq!(put(&ns, &during, LEN), [false; 5], "{pipeline}");
            assert!(has(&ns, &before, LEN), "{pipeline}: what is there is read");
            at_rest(&depot);
            depot.close();
            drop((ns, depot));
            // Its journal makes it right when it is mounted again.
            eventually("that nobody has it open", || run("umount", &[name]).is_ok());
            let image = at.with_file_name("image");
            run("mount", &["-o", "loop", image.to_str().unwrap(), name]).unwrap();
            let depot = open(at);
            let ns = namespace(&depot);
            assert!(has(&ns, &before, LEN), "{pipeline}: acknowledged");
            for outcome in get(&ns, &during, LEN) {
                assert_eq!(outcome, Outcome::Miss, "{pipeline}: not acknowledged");
            }
            assert_eq!(put(&ns, &during, LEN), [true; 5]);
            depot.close();
        }
    });
}
