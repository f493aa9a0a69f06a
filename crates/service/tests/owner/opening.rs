//! What a start refuses, and leaves behind when it fails; what a close lets go.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{self, Place, Served, config_of, has, namespace, put};
use kvdepot_store::{Config, Error};
use kvdepot_testkit::child::{self, Child};
use serde_json::json;

fn refusal(config: &Config) -> String {
    kvdepot_service::open(config).err().unwrap().to_string()
}

fn names(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

#[test]
fn nothing_is_made_beside_the_nodes_of_devices() {
    let name = format!("kvdepot-test-{}", std::process::id());
    let there = Path::new("/dev").join(&name);
    let place = Place::new("Dax", "", "1MiB");
    let link = place.dir().join("link");
    std::os::unix::fs::symlink("/dev", &link).unwrap();
    for path in [there.clone(), link.join(&name)] {
        let config = place.with_path(&path);
        let text = refusal(&config);
        assert!(
            text.starts_with(&format!("dax.path: {}", path.display())),
            "{text}"
        );
        assert!(
            text.contains("daxctl") && text.contains("outside /dev"),
            "{text}"
        );
        assert_eq!(
            kvdepot_service::check(&config).unwrap_err().to_string(),
            text
        );
    }
    let depot = place.serve();
    let added = depot.add_device(&there, Some(1 << 20));
    assert!(added.unwrap_err().to_string().contains("daxctl"));
    assert!(!there.exists());
}

#[test]
fn what_a_failed_start_has_made_goes_again() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let listening = UnixListener::bind(place.socket()).unwrap();
    let text = refusal(&place.config());
    assert!(text.contains("on which no other server listens"), "{text}");
    assert_eq!(names(place.dir()), [place.socket()]);
    drop(listening);
    // What was there before stays.
    let depot = place.serve();
    assert_eq!(put(&namespace(&depot), &[1, 2], 5000), [true; 2]);
    depot.close();
    let listening = UnixListener::bind(place.socket()).unwrap();
    refusal(&place.config());
    drop(listening);
    let depot = place.serve();
    assert!(has(&namespace(&depot), &[1, 2], 5000));
}

#[test]
fn a_start_that_is_not_kept_leaves_nothing() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    drop(kvdepot_service::start(&place.config()).unwrap());
    assert_eq!(names(place.dir()), [""; 0].map(PathBuf::from));
    let depot = kvdepot_service::start(&place.config()).unwrap().keep();
    assert_eq!(put(&namespace(&depot), &[1, 2], 5000), [true; 2]);
    depot.close();
    // What was there before stays.
    drop(kvdepot_service::start(&place.config()).unwrap());
    assert!(has(&namespace(&place.serve()), &[1, 2], 5000));
}

#[test]
fn a_start_that_is_not_kept_leaves_what_somebody_else_put_in_place_of_its_file() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let started = kvdepot_service::start(&place.config()).unwrap();
    std::fs::remove_file(place.arena()).unwrap();
    std::fs::write(place.arena(), "of somebody else").unwrap();
    drop(started);
    assert!(place.arena().exists());
    std::fs::remove_file(place.arena()).unwrap();
    // Nor is it missed where nothing is.
    let started = kvdepot_service::start(&place.config()).unwrap();
    std::fs::remove_file(place.arena()).unwrap();
    drop(started);
    assert_eq!(names(place.dir()), [""; 0].map(PathBuf::from));
}

#[test]
fn a_signal_ends_the_wait_for_another_owner_and_undoes_the_start() {
    const TEST: &str = "opening::a_signal_ends_the_wait_for_another_owner_and_undoes_the_start";
    if child::role().is_some() {
        let _depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
        child::say("open");
        child::sleep_until_killed();
    }
    let place = Place::new("Dax", "", "1MiB");
    // A process of its own: one's own process is not waited for.
    let mut owner = Child::start(TEST, "owner", &[("spec", &place.spec())]);
    owner.expect("open");
    let fresh = place.dir().join("fresh");
    let devices = json!([{"path": &fresh, "capacity": "1MiB"}, {"path": place.arena()}]);
    let several = json!({"socket": "off", "lock_wait": "1h", "dax": {"devices": devices}});
    let several = Config::new("Dax", &several).unwrap();
    // Once it waits for the second device, it has made the first.
    let begun = Instant::now();
    let answer = std::thread::scope(|scope| {
        let start = scope
            .spawn(|| kvdepot_store::interruptible(pressed, || kvdepot_service::open(&several)));
        while !fresh.exists() && begun.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        assert!(fresh.exists());
        PRESSED.store(true, Ordering::Relaxed);
        start.join().unwrap()
    });
    assert!(matches!(answer.err(), Some(Error::Interrupted)));
    assert!(!fresh.exists());
}

#[test]
fn whoever_waits_for_an_arena_whose_start_fails_makes_it() {
    const TEST: &str = "opening::whoever_waits_for_an_arena_whose_start_fails_makes_it";
    if child::role().is_some() {
        let go = PathBuf::from(child::value("go"));
        let started = kvdepot_service::start(&config_of(&child::value("spec"))).unwrap();
        child::say("started");
        while !go.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // It is not kept, as where something fails behind it.
        drop(started);
        child::sleep_until_killed();
    }
    let place = Place::new("Dax", "", "1MiB").with("", "lock_wait", "60s");
    let go = place.dir().join("go");
    let values = [("spec", &*place.spec()), ("go", go.to_str().unwrap())];
    let mut first = Child::start(TEST, "first", &values);
    first.expect("started");
    let arena = place.arena().display().to_string();
    let depot = std::thread::scope(|scope| {
        let dax = json!({"path": place.arena(), "capacity": "1MiB"});
        let alone = json!({"socket": "off", "lock_wait": "60s", "dax": dax});
        let alone = Config::new("Dax", &alone).unwrap();
        let waits = scope.spawn(move || kvdepot_service::open(&alone));
        common::eventually("the wait", || mapped(&arena) == 1);
        std::fs::write(&go, "").unwrap();
        waits.join().unwrap().unwrap()
    });
    assert!(depot.opening().created && place.arena().exists());
    assert_eq!(put(&namespace(&depot), &[1, 2], 5000), [true; 2]);
    depot.close();
    assert!(has(&namespace(&place.serve()), &[1, 2], 5000));
}

static PRESSED: AtomicBool = AtomicBool::new(false);

fn pressed() -> bool {
    PRESSED.load(Ordering::Relaxed)
}

#[test]
fn of_several_devices_none_that_was_made_stays_when_another_is_refused() {
    let place = Place::new("Dax", "", "1MiB");
    let owner = place.serve();
    let fresh = place.dir().join("fresh");
    let devices = json!([{"path": &fresh, "capacity": "1MiB"}, {"path": place.arena()}]);
    let several = json!({"socket": "off", "lock_wait": "0s", "dax": {"devices": devices}});
    let several = Config::new("Dax", &several).unwrap();
    let error = kvdepot_service::open(&several).err().unwrap();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    assert!(!fresh.exists());
    owner.close();
    kvdepot_service::open(&several).unwrap();
    assert!(fresh.exists());
}

#[test]
fn a_check_refuses_what_an_opening_does_and_makes_nothing() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let other = place.dir().join("other");
    std::fs::write(&other, vec![7; 1 << 20]).unwrap();
    let missing = place.dir().join("missing/arena");
    let note = place.dir().join("note");
    std::fs::write(&note, "mine").unwrap();
    let [empty, short] = [0, 4096].map(|length| {
        let path = place.dir().join(length.to_string());
        std::fs::write(&path, vec![0; length]).unwrap();
        path
    });
    let depot = place.serve();
    depot.close();
    let before = names(place.dir());
    let path = |path: &Path| json!({"dax": {"path": path}});
    let new = json!({"path": place.dir().join("new"), "capacity": "1MiB"});
    let twice = json!([&new, &new]);
    let around = place
        .dir()
        .join("../")
        .join(place.dir().file_name().unwrap());
    let roundabout = json!([&new, {"path": around.join("./new"), "capacity": "1MiB"}]);
    for (settings, says) in [
        (path(&missing), "an existing"),
        (path(&other), "not a kvdepot arena"),
        (path(place.dir()), "a directory"),
        (path(&note), "not a kvdepot arena; use another path"),
        (
            path(&empty),
            "not empty: an arena needs at least 256 KiB; remove the file",
        ),
        (
            path(&short),
            "the medium is too small (4 KiB): an arena needs at least 256 KiB; remove the file",
        ),
        (
            json!({"dax": {"path": place.dir().join("new"), "capacity": "1MiB", "records": 9000}}),
            "at least 1.2 MiB for an arena of 9000 records",
        ),
        (
            json!({"dax": {"path": place.arena(), "capacity": "2MiB"}}),
            "the size of the existing arena",
        ),
        (
            json!({"dax": {"path": place.arena(), "format": "true"}}),
            "a valid arena",
        ),
        (
            json!({"dax": {"path": place.dir().join("new"), "capacity": "8KiB"}}),
            "at least 256 KiB for an arena of 64 records",
        ),
        (
            json!({"dax": {"path": place.dir().join("new"), "capacity": "4096TiB"}}),
            "the free space of",
        ),
        (json!({"dax": {"devices": twice}}), "already listed"),
        (json!({"dax": {"devices": roundabout}}), "already listed"),
        (json!({"socket": &other}), "does not exist, or a socket"),
        (
            json!({"socket": place.dir()}),
            "does not exist, or a socket",
        ),
        (json!({"cache": {"capacity": "4096TiB"}}), "the memory"),
        (json!({"staging_slab": "4096TiB"}), "memory"),
        (
            json!({"lanes": 3, "staging_slab": "320KiB"}),
            "staging_slab: 320 KiB is not allowed; allowed: at least 64KiB per region (6 staging_regions)",
        ),
        (json!({"socket": "/dev/kvdepot.sock"}), "outside /dev"),
        (json!({"socket": missing}), "an existing"),
        (
            json!({"socket": format!("/{}", "x".repeat(120))}),
            "107 bytes",
        ),
    ] {
        let mut all = json!({"socket": "off", "cache": {"capacity": "1MiB"}});
        all["dax"] = json!({"path": place.arena(), "capacity": "4MiB"});
        for (name, value) in settings.as_object().unwrap() {
            all[name] = value.clone();
        }
        let text = match Config::new("Cache|Dax", &all) {
            // What no machine can open is refused by the options alone.
            Err(error) => error.to_string(),
            Ok(config) => {
                let text = kvdepot_service::check(&config).unwrap_err().to_string();
                assert_eq!(refusal(&config), text);
                text
            }
        };
        assert!(text.contains(says), "{text}");
        assert_eq!(names(place.dir()), before, "{text}");
    }
    kvdepot_service::check(&place.config()).unwrap();
    // What a process owns is its own affair.
    let _owner = place.serve();
    kvdepot_service::check(&place.config()).unwrap();
}

#[test]
fn new_devices_need_room_for_all_of_them() {
    let place = Place::new("Dax", "", "1MiB");
    // Each alone would fit; and shares of what is free always do.
    let free = kvdepot_host::limits::disk_free(place.dir()).unwrap();
    let most = format!("{}KiB", free / 1024 * 6 / 10);
    let check = |capacities: [Option<&str>; 2]| {
        let device = |(name, capacity): (&str, Option<&str>)| {
            let path = place.dir().join(name);
            capacity.map_or_else(
                || json!({"path": path}),
                |c| json!({"path": path, "capacity": c}),
            )
        };
        let devices = ["a", "b"].into_iter().zip(capacities).map(device);
        let dax = json!({"devices": devices.collect::<Vec<_>>()});
        let config = Config::new("Dax", &json!({"socket": "off", "dax": dax})).unwrap();
        kvdepot_service::check(&config).map_err(|error| error.to_string())
    };
    let text = check([Some(&most), Some(&most)]).unwrap_err();
    assert!(text.starts_with("dax.devices[1].capacity"), "{text}");
    assert!(text.contains("the free space of"), "{text}");
    for capacities in [[Some(most.as_str()), None], [None, Some(&most)], [None; 2]] {
        check(capacities).unwrap();
    }
    assert_eq!(names(place.dir()), [""; 0].map(PathBuf::from));
}

/// Lines of this process's memory map with this text.
fn mapped(text: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(text)).count()
}

#[test]
fn a_close_lets_memory_and_medium_go_although_a_namespace_is_kept() {
    let place = Place::new("Cache|Dax", "37MiB", "4MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], 5000), [true; 2]);
    let arena = place.arena().display().to_string();
    let memory = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ours = maps.lines().filter(|line| line.contains("kvdepot-cache"));
        let lengths = ours.filter_map(|line| {
            let (begin, end) = line.split(' ').next()?.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some(number(end)? - number(begin)?)
        });
        lengths.filter(|len| *len == 37 << 20).count()
    };
    assert_eq!((memory(), mapped(&arena)), (1, 1));
    let pins = ns.pin(&[common::key(1)], true).unwrap();
    let before = depot.stats();
    depot.close();
    assert_eq!((memory(), mapped(&arena)), (0, 0));
    assert_eq!(depot.stats().tiers[1].blocks, before.tiers[1].blocks);
    ns.unpin(&[pins[0].clone().unwrap()], false);
    assert!(matches!(
        ns.contains(&[common::key(1)]),
        Err(Error::Closed(_))
    ));
    let again = place.serve();
    assert!(has(&namespace(&again), &[1, 2], 5000));
}

#[test]
fn another_depot_of_this_process_is_named_at_once() {
    let place = Place::new("Dax", "", "1MiB").with("", "lock_wait", "60s");
    let ns = namespace(&place.serve());
    let begun = Instant::now();
    let error = kvdepot_service::open(&place.config()).err().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30));
    let text = error.to_string();
    assert!(matches!(error, Error::Locked { pid, .. } if pid == std::process::id()));
    assert!(
        text.contains("another depot of this process") && text.contains("close that depot"),
        "{text}"
    );
    drop(ns);
    place.serve();
}
