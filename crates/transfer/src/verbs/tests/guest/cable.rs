//! Two Soft-RoCE devices of one machine that reach each other by a virtual cable, and not within
//! it.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The cable between `left` (10.9.0.1, rxe0) and `right` (10.9.0.2, rxe1), until it is dropped.
pub(super) struct Cable;

/// The rules by which packets to the own addresses leave the machine, and are taken when they come
/// back: the table of those addresses is asked first for what comes in, and last for what goes out.
const RULES: [&str; 5] = [
    "ip rule add pref 10 iif left lookup local",
    "ip rule add pref 11 iif right lookup local",
    "ip rule add pref 20 to 10.9.0.0/24 lookup 100",
    "ip rule add pref 30 lookup local",
    "ip rule del pref 0",
];

impl Cable {
    /// Lays it anew.
    pub(super) fn lay() -> Self {
        println!(); // What is said begins lines of its own.
        Self::run("ip link set lo up");
        Self::run("ip link add left type veth peer name right");
        for (end, number) in [("left", 1), ("right", 2)] {
            for (setting, value) in [("accept_local", "1"), ("rp_filter", "0")] {
                for which in ["all", end] {
                    let path = format!("/proc/sys/net/ipv4/conf/{which}/{setting}");
                    fs::write(path, value).unwrap();
                }
            }
            let mac = format!("02:00:00:00:00:0{number}");
            Self::run(&format!("ip link set {end} address {mac} mtu 4200 up"));
            Self::run(&format!("ip address add 10.9.0.{number}/24 dev {end}"));
        }
        for rule in RULES {
            Self::run(rule);
        }
        let cable = Self;
        cable.mend();
        Self::run("rdma link add rxe0 type rxe netdev left");
        Self::run("rdma link add rxe1 type rxe netdev right");
        // Addresses come to a device's table a little later.
        wait_for("addresses", || {
            [("rxe0", "0a09:0001"), ("rxe1", "0a09:0002")]
                .iter()
                .all(|(device, end)| {
                    let gids = format!("/sys/class/infiniband/{device}/ports/1/gids");
                    let entries = fs::read_dir(gids).into_iter().flatten().flatten();
                    let mut gids =
                        entries.filter_map(|entry| fs::read_to_string(entry.path()).ok());
                    gids.any(|gid| gid.trim_end().ends_with(end))
                })
        });
        cable
    }

    /// Links, and the ways between them, which go when a link does.
    pub(super) fn mend(&self) {
        for (end, peer) in [("left", 2), ("right", 1)] {
            Self::run(&format!("ip link set {end} up"));
            Self::run(&format!(
                "ip route replace 10.9.0.{peer} dev {end} table 100"
            ));
            let mac = format!("02:00:00:00:00:0{peer}");
            Self::run(&format!(
                "ip neigh replace 10.9.0.{peer} lladdr {mac} dev {end}"
            ));
        }
        wait_for("links", || {
            ["left", "right"].iter().all(|end| {
                let state = fs::read_to_string(format!("/sys/class/net/{end}/operstate"));
                state.is_ok_and(|state| state.trim_end() == "up")
            })
        });
    }

    /// Runs a command of a few words, which must succeed.
    pub(super) fn run(command: &str) {
        if let Err(said) = attempt(command) {
            panic!("{command}: {said}");
        }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for command in [
            "ip rule add pref 0 lookup local",
            "rdma link delete rxe0",
            "rdma link delete rxe1",
            "ip link delete left",
            "ip rule del pref 10",
            "ip rule del pref 11",
            "ip rule del pref 20",
            "ip rule del pref 30",
        ] {
            if let Err(said) = attempt(command) {
                println!("{command}: {said}");
            }
        }
    }
}

fn attempt(command: &str) -> Result<(), String> {
    let mut words = command.split_ascii_whitespace();
    let mut program = Command::new(words.next().unwrap_or_default());
    let ran = program
        .args(words)
        .output()
        .map_err(|error| error.to_string())?;
    match ran.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&ran.stderr).trim_end().to_owned()),
    }
}

fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_there() {
        assert!(begin.elapsed() < Duration::from_secs(30), "no {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
