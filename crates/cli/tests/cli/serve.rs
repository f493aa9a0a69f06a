//! `serve`: a depot for other processes, from a signal to the next.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvdepot_store::Depot;
use serde_json::Value;

use crate::home::{Home, get, put, spec};

/// A running service. Killed when dropped.
struct Service {
    child: Child,
    socket: String,
}

impl Service {
    fn start(home: &Home, args: &[&str]) -> Service {
        let mut all = vec!["serve", "--json"];
        all.extend(args);
        let mut child = home
            .command(&all)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let row: Value = serde_json::from_str(&line).unwrap_or_default();
        assert_eq!(row["event"], "serving", "{line}");
        let socket = row["socket"].as_str().unwrap().to_owned();
        Service { child, socket }
    }

    fn connect(&self) -> Depot {
        Depot::connect(Path::new(&self.socket), Some(1)).unwrap()
    }

    /// Ends it as a service manager does; the exit status.
    fn end(mut self) -> i32 {
        let sent = Command::new("kill")
            .arg(self.child.id().to_string())
            .status();
        assert!(sent.unwrap().success());
        self.child.wait().unwrap().code().unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _ended = self.child.wait();
    }
}

#[test]
fn serve_keeps_the_blocks_of_its_clients_over_a_restart() {
    let home = Home::new();
    let arena = home.path("arena");
    let config = home.path("depot.yaml");
    let text = format!("dax:\n  path: {}\n  capacity: 4MiB\n", arena.display());
    std::fs::write(&config, text).unwrap();
    let config = config.to_str().unwrap();
    let args = ["Cache|Dax", "--config", config, "-o", "cache.capacity=1MiB"];
    let service = Service::start(&home, &args);
    assert_eq!(
        service.socket,
        home.path("run/kvdepot/kvdepot.sock").to_str().unwrap()
    );
    let client = service.connect();
    put(&client.namespace(&spec("a")).unwrap(), 0..20, 5000);
    client.close();
    let socket = service.socket.clone();
    assert_eq!(service.end(), 0);
    assert!(!Path::new(&socket).exists());
    let path = home.path("other.sock");
    let mut args = args.to_vec();
    args.extend(["--socket", path.to_str().unwrap()]);
    let service = Service::start(&home, &args);
    let client = service.connect();
    assert_eq!(client.opening().blocks, 20);
    get(&client.namespace(&spec("a")).unwrap(), 0..20, 5000);
}

#[test]
fn serve_names_what_is_wrong_and_who_owns_the_arena() {
    let home = Home::new();
    let arena = home.path("arena");
    let path = format!("dax.path={}", arena.display());
    let args = ["Dax", "-o", &path, "-o", "dax.capacity=1MiB"];
    let service = Service::start(&home, &args);
    let mut again = vec![
        "serve",
        "--socket",
        "/tmp/unused.sock",
        "-o",
        "lock_wait=0s",
    ];
    again.extend(args);
    let ran = home.run(&again);
    assert_eq!(ran.status, 2);
    let owner = format!("process {}", service.child.id());
    assert!(ran.stderr.contains(&owner), "{}", ran.stderr);
    for (args, word) in [
        (&["serve", "-o", "dax.capcity=1GiB"][..], "capcity"),
        (&["serve", "-o", "nonsense"], "NAME=VALUE"),
        (&["serve", "-o", "socket=off"], "the path to listen at"),
        (&["serve", "-o", "socket_mode=0999"], "octal"),
        (&["serve", "Tape"], "Tape"),
        (&["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ] {
        let ran = home.run(args);
        assert_eq!(ran.status, 2, "{args:?}");
        assert!(ran.stderr.contains(word), "{args:?}: {}", ran.stderr);
    }
}

/// Sockets in the runtime directory.
fn sockets(home: &Home) -> Vec<String> {
    let entries = std::fs::read_dir(home.path("run/kvdepot")).into_iter();
    let names = entries.flatten().flatten().map(|entry| entry.file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_owners_that_were_killed_leave_is_named_and_removed() {
    let home = Home::new();
    let runtime = home.path("run/kvdepot");
    let start = |name: &str| {
        let path = runtime.join(name);
        let socket = path.to_str().unwrap();
        Service::start(
            &home,
            &["Cache", "-o", "cache.capacity=1MiB", "--socket", socket],
        )
    };
    let doctor = || {
        let (status, rows) = home.json(&["doctor"]);
        assert_eq!(status, 0);
        let row = rows.into_iter().find(|row| row["check"] == "sockets");
        row.map(|row| row["value"].as_str().unwrap().to_owned())
    };
    let living = start("living.sock");
    let names = ["a.sock", "b.sock", "c.sock"];
    let killed = |count: usize| {
        // All are there before the first is killed: the next would sweep.
        let services: Vec<Service> = names[..count].iter().map(|name| start(name)).collect();
        drop(services);
    };
    killed(1);
    assert_eq!(doctor().unwrap(), "a.sock: its owner was killed");
    killed(3);
    assert!(doctor().unwrap().contains("3 owners were killed"));
    assert_eq!(sockets(&home).len(), 4);
    // The living one is kept, and says so.
    let removed = home.run(&["rm", "--all", "--yes"]);
    assert_eq!(removed.status, 1, "{}{}", removed.stdout, removed.stderr);
    assert_eq!(sockets(&home), ["living.sock"]);
    assert_eq!(doctor(), None);
    killed(2);
    let next = start("next.sock");
    assert_eq!(sockets(&home), ["living.sock", "next.sock"]);
    let client = living.connect();
    put(&client.namespace(&spec("a")).unwrap(), 0..3, 5000);
    // Nobody takes a path at which somebody listens.
    let socket = runtime.join("living.sock");
    let refused = home.run(&["serve", "Cache", "--socket", socket.to_str().unwrap()]);
    assert_eq!(refused.status, 2);
    assert!(
        refused.stderr.contains("a path where nobody listens"),
        "{}",
        refused.stderr
    );
    assert_eq!(next.end(), 0);
    assert_eq!(sockets(&home), ["living.sock"]);
}
