//! `serve`: a depot for other processes, from a signal to the next.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvdepot_store::Depot;
use serde_json::Value;

use crate::home::{Home, Ran, get, key, put, signal, spec};

/// A running service. Killed when dropped.
pub(crate) struct Service {
    child: Child,
    socket: String,
    http: Option<String>,
}

impl Service {
    pub(crate) fn start(home: &Home, args: &[&str]) -> Service {
        let mut all = vec!["serve", "--json"];
        all.extend(args);
        Service::of(&mut home.command(&all))
    }

    fn of(command: &mut Command) -> Service {
        let mut child = command
            .stdin(Stdio::null())
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
        let http = row["http"].as_str().map(str::to_owned);
        Service {
            child,
            socket,
            http,
        }
    }

    fn connect(&self) -> Depot {
        kvdepot_service::connect(Path::new(&self.socket), Some(1)).unwrap()
    }

    /// Ends it as a service manager does; the exit status.
    pub(crate) fn end(self) -> i32 {
        self.end_by("-TERM")
    }

    fn end_by(mut self, name: &str) -> i32 {
        signal(self.child.id(), name);
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
fn without_a_home_that_can_be_written_serve_uses_another_directory_or_names_the_option() {
    let home = Home::new();
    let command = |cache: &str| {
        let mut command = home.command(&["serve", "--json", "Dax", "-o", "dax.capacity=4MiB"]);
        command.env("HOME", cache).env_remove("XDG_CACHE_HOME");
        command
    };
    let own = format!("kvdepot-{}/cache/arena.kvd", kvdepot_host::peer::own_uid());
    // Nobody makes a directory there.
    for none in ["/proc/none", "/dev/null"] {
        assert_eq!(Service::of(&mut command(none)).end(), 0, "{none}");
        assert!(home.path(&own).exists(), "{none}");
    }
    let ran = Ran::of(
        command("/proc/none")
            .env("TMPDIR", "/proc/none")
            .output()
            .unwrap(),
    );
    assert_ne!(ran.status, 0);
    let said = ["dax.path", "XDG_CACHE_HOME", "/proc/none"];
    assert!(
        said.iter().all(|word| ran.stderr.contains(word)),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_directory_is_looked_at_through_the_service_that_has_it_open_also_after_a_restart() {
    let home = Home::new();
    let at = format!("posix.path={}", home.path("blocks").display());
    let args = ["Posix", "-o", &at, "-o", "posix.capacity=64MiB"];
    let service = Service::start(&home, &args);
    put(
        &service.connect().namespace(&spec("a")).unwrap(),
        0..7,
        5000,
    );
    put(&service.connect().namespace(&spec("b")).unwrap(), 0..2, 300);
    assert_eq!(service.end(), 0);
    let service = Service::start(&home, &args);
    let shown = format!("unix:{}", service.socket);
    let (status, rows) = home.json(&["ls", &shown]);
    assert_eq!((status, rows.len()), (0, 2), "{rows:?}");
    assert_eq!(rows[0]["blocks"], 7);
    assert_eq!(rows[0]["description"], spec("a").describe());
    assert_eq!(home.json(&["ls", &shown, "--blocks"]).1.len(), 9);
    let (_, rows) = home.json(&["stat", &shown]);
    let tier = &rows[0]["stats"]["tiers"][0];
    assert!(
        tier["blocks"].is_null() && tier["live_bytes"].as_u64() > Some(0),
        "{tier}"
    );
    let ran = home.run(&["stat", &shown]);
    let about = format!("Posix 64 MiB at {}", home.path("blocks").display());
    assert!(ran.stdout.contains(&about), "{}", ran.stdout);
    let line = ran.stdout.lines().find(|line| line.contains("blocks  "));
    assert!(line.unwrap().contains(" -, "), "{}", ran.stdout);
    // Other tests may serve some, too.
    let (_, rows) = home.json(&["ls"]);
    let mut rows = rows.into_iter();
    let row = rows.find(|row| row["depot"] == shown.as_str()).unwrap();
    assert!(row["blocks"].is_null(), "{row:?}");
    let b = spec("b").id().unwrap().to_string();
    let (status, rows) = home.json(&["rm", &shown, "--namespace", &b]);
    assert_eq!((status, &rows[0]["blocks"]), (0, &2.into()));
    let one = key(3).to_string();
    let (status, rows) = home.json(&["rm", &shown, "--key", &one]);
    assert_eq!((status, &rows[0]["blocks"]), (0, &1.into()));
    let (_, rows) = home.json(&["ls", &shown]);
    assert_eq!(rows[0]["blocks"], 6);
    // The directory itself says where else to ask.
    let ran = home.run(&["ls", home.path("blocks").to_str().unwrap()]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("unix:SOCKET"), "{}", ran.stderr);
}

/// The status and the body of a page.
fn page(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    let (status, _) = head.split_once("\r\n").unwrap();
    (status.to_owned(), body.to_owned())
}

#[test]
fn serve_shows_its_metrics_and_its_state_over_http() {
    let home = Home::new();
    let small = ["Cache", "-o", "cache.capacity=1MiB"];
    let service = Service::start(&home, &[&small[..], &["--http", "127.0.0.1:0"]].concat());
    let address = service.http.clone().unwrap();
    let file = format!("{}.http", service.socket);
    let published = std::fs::read_to_string(&file).unwrap();
    assert_eq!(published, format!("{address}\n"));
    let client = service.connect();
    put(&client.namespace(&spec("a")).unwrap(), 0..3, 5000);
    client.close();
    for (path, says) in [("/healthz", "ok\n"), ("/readyz", "ready\n")] {
        let (status, body) = page(&address, path);
        assert_eq!((status.as_str(), body.as_str()), ("HTTP/1.1 200 OK", says));
    }
    let (_, metrics) = page(&address, "/metrics");
    let line = "kvdepot_live_blocks{tier=\"Cache\"} 3";
    assert!(metrics.lines().any(|one| one == line), "{metrics}");
    // The same as of the command, which is a client.
    let (_, stats) = page(&address, "/stats");
    let stats: Value = serde_json::from_str(&stats).unwrap();
    let shown = format!("unix:{}", service.socket);
    let (_, rows) = home.json(&["stat", &shown]);
    assert_eq!(rows[0], stats);
    assert_eq!(service.end(), 0);
    assert!(TcpStream::connect(&address).is_err());
    assert!(!Path::new(&file).exists());
    // By the configuration too, and at a path.
    let path = home.path("h.sock");
    let option = format!("http=unix:{}", path.display());
    let service = Service::start(&home, &[&small[..], &["-o", &option]].concat());
    assert_eq!(service.http.as_deref(), option.strip_prefix("http="));
    UnixStream::connect(&path).unwrap();
    assert_eq!(service.end(), 0);
    assert!(!path.exists());
}

#[test]
fn the_runtime_directory_is_made_for_the_socket_of_http_too() {
    let home = Home::new();
    let (socket, path) = (home.path("s.sock"), home.path("run/kvdepot/h.sock"));
    assert!(!path.parent().unwrap().exists());
    let address = format!("unix:{}", path.display());
    let small = ["Cache", "-o", "cache.capacity=1MiB"];
    let places = ["--socket", socket.to_str().unwrap(), "--http", &address];
    let service = Service::start(&home, &[&small[..], &places].concat());
    assert_eq!(service.http.as_deref(), Some(address.as_str()));
    UnixStream::connect(&path).unwrap();
    assert_eq!(service.end(), 0);
}

#[test]
fn each_instance_has_a_socket() {
    let home = Home::new();
    let small = ["Cache", "-o", "cache.capacity=1MiB"];
    let start = |instance: &str| {
        let name = format!("instance={instance}");
        Service::start(&home, &[&small[..], &["-o", &name]].concat())
    };
    let plain = Service::start(&home, &small);
    let (a, b) = (start("a"), start("b"));
    let names = ["kvdepot-a.sock", "kvdepot-b.sock", "kvdepot.sock"];
    assert_eq!(sockets(&home), names);
    for service in [plain, a, b] {
        service.connect().close();
        assert_eq!(service.end(), 0);
    }
    assert_eq!(sockets(&home), [""; 0]);
}

#[test]
fn without_a_terminal_a_server_goes_on_after_sighup() {
    let home = Home::new();
    let service = Service::start(&home, &["Cache", "-o", "cache.capacity=1MiB"]);
    signal(service.child.id(), "-HUP");
    let client = service.connect();
    put(&client.namespace(&spec("a")).unwrap(), 0..3, 5000);
    client.close();
    assert_eq!(service.end(), 0);
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    let home = Home::new();
    for name in ["INT", "HUP"] {
        let started = home.command(&["serve", "Cache", "-o", "cache.capacity=1MiB", "--json"]);
        let mut command = Command::new("sh");
        let script = format!("trap '' {name}; exec \"$0\" \"$@\"");
        command.arg("-c").arg(script);
        command.arg(started.get_program()).args(started.get_args());
        for (name, value) in started.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let service = Service::of(command.current_dir(home.dir.path()));
        signal(service.child.id(), &format!("-{name}"));
        service.connect().close();
        assert_eq!(service.end(), 0);
    }
}

#[test]
fn a_socket_is_listed_by_its_whole_path_wherever_it_was_named_from() {
    let home = Home::new();
    let service = Service::start(
        &home,
        &[
            "Cache",
            "-o",
            "cache.capacity=1MiB",
            "--socket",
            "./kvdepot-here.sock",
        ],
    );
    let path = home.path("kvdepot-here.sock");
    assert_eq!(Path::new(&service.socket), path);
    let ran = home.run(&["ls"]);
    let name = format!("unix:{}", path.display());
    assert!(ran.stdout.contains(&name), "{}", ran.stdout);
    let deep = home.path(&"d".repeat(100));
    std::fs::create_dir(&deep).unwrap();
    let mut command = home.command(&["serve", "Cache", "--socket", "./a.sock"]);
    let ran = Ran::of(command.current_dir(&deep).output().unwrap());
    let len = deep.join("a.sock").as_os_str().len();
    let says = format!("at most 107 bytes (limit of Unix sockets); this path has {len}");
    assert!(ran.stderr.contains(&says), "{}", ran.stderr);
    assert_eq!(service.end(), 0);
}

#[test]
fn a_signal_ends_the_wait_for_another_owner_and_leaves_nothing() {
    let home = Home::new();
    let (used, fresh) = (home.path("used"), home.path("fresh"));
    let dax = format!("dax.path={}", used.display());
    let owner = Service::start(&home, &["Dax", "-o", &dax, "-o", "dax.capacity=1MiB"]);
    let config = home.path("depot.yaml");
    let [first, second] = [&fresh, &used].map(|path| path.display().to_string());
    let text = format!(
        "lock_wait: 1h\ndax:\n  devices: [{{path: {first}, capacity: 1MiB}}, {{path: {second}}}]\n"
    );
    std::fs::write(&config, text).unwrap();
    let config = config.to_str().unwrap();
    let socket = home.path("other.sock");
    let args = [
        "serve",
        "Dax",
        "--config",
        config,
        "--socket",
        socket.to_str().unwrap(),
    ];
    let mut waiting = Service {
        child: home.command(&args).stderr(Stdio::piped()).spawn().unwrap(),
        socket: String::new(),
        http: None,
    };
    // By then it has made the first device, and waits for the second.
    let mut line = String::new();
    BufReader::new(waiting.child.stderr.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let (arena, pid) = (used.display().to_string(), owner.child.id());
    assert!(
        line.contains("waiting until the process closes the arena"),
        "{line}"
    );
    assert!(line.contains(&arena), "{line}");
    assert!(line.contains(&format!("pid={pid}")), "{line}");
    assert!(fresh.exists());
    assert_eq!(waiting.end_by("-INT"), 0);
    assert!(!fresh.exists());
    assert_eq!(owner.end(), 0);
}

#[test]
fn a_live_depot_is_listed_described_and_cleared_by_digest() {
    let home = Home::new();
    let none = home.run(&["ls"]);
    let here = home.dir.path().to_str().unwrap();
    assert!(!none.stdout.contains(here), "{}", none.stdout);
    // Else it has named those of other tests, and of others on this machine.
    if none.stdout.is_empty() {
        assert_eq!(none.status, 0);
        assert!(
            none.stderr.contains("no running depot found"),
            "{}",
            none.stderr
        );
    }
    let path = home.path("arena");
    let dax = format!("dax.path={}", path.display());
    let args = [
        "Cache|Dax",
        "-o",
        &dax,
        "-o",
        "dax.capacity=4MiB",
        "-o",
        "cache.capacity=1MiB",
    ];
    let service = Service::start(&home, &args);
    let client = service.connect();
    put(&client.namespace(&spec("a")).unwrap(), 0..20, 5000);
    put(&client.namespace(&spec("b")).unwrap(), 0..3, 300);
    assert!(client.drain(std::time::Duration::from_secs(30)));
    let at = format!("unix:{}", service.socket);
    let ran = home.run(&["ls"]);
    assert!(
        ran.stdout.contains(&at) && ran.stdout.contains("Cache 1 MiB"),
        "{}",
        ran.stdout
    );
    let (_, rows) = home.json(&["ls"]);
    let ours = rows.iter().find(|row| row["depot"] == at).unwrap();
    assert_eq!(ours["blocks"], 23);
    let (_, rows) = home.json(&["ls", &at]);
    let a = spec("a").id().unwrap().to_string();
    assert_eq!(
        (&rows[0]["namespace"], &rows[0]["blocks"]),
        (&a.clone().into(), &20.into())
    );
    let ran = home.run(&["ls", &at, "--namespace", &a[..8]]);
    assert!(
        ran.stdout.contains("model=a dtype=float32"),
        "{}",
        ran.stdout
    );
    let (_, blocks) = home.json(&["ls", &at, "--blocks", "--namespace", &a]);
    assert_eq!(blocks.len(), 20, "each once, though in two tiers");
    assert!(blocks.iter().all(|block| block["length"] == 5000));
    // What is cut is said to be.
    for (args, says) in [
        (&["--limit", "1"][..], "1 of 2 namespaces shown (--limit)"),
        (&["--limit", "2"], ""),
        (
            &["--blocks", "--limit", "7"],
            "7 of 23 blocks shown (--limit)",
        ),
        (&["--blocks", "--limit", "23"], ""),
    ] {
        let ran = home.run(&[&["ls", at.as_str()], args].concat());
        assert_eq!(ran.status, 0, "{args:?}");
        let cut = !says.is_empty() && ran.stderr.contains(says) || says == ran.stderr;
        assert!(cut, "{args:?}: {}", ran.stderr);
    }
    let ran = home.run(&["stat", &at]);
    assert!(ran.stdout.contains("evicted"), "{}", ran.stdout);
    for place in [at.as_str(), path.to_str().unwrap()] {
        let ran = home.run(&["stat", place, "--metrics"]);
        assert!(
            ran.stdout.contains("kvdepot_live_blocks{"),
            "{}",
            ran.stdout
        );
    }
    let (status, rows) = home.json(&["rm", &at, "--namespace", &a[..8]]);
    assert_eq!((status, &rows[0]["removed"]), (0, &true.into()));
    let removed = |row: &Value| (row["blocks"].as_u64(), row["bytes"].as_u64());
    assert_eq!(removed(&rows[0]), (Some(20), Some(100_000)));
    assert_eq!(client.namespace(&spec("a")).unwrap().blocks().unwrap(), []);
    let (_, rows) = home.json(&["ls", &at, "--namespace", &a]);
    assert!(rows.iter().all(|row| row["blocks"] == 0), "{rows:?}");
    // By the arena's path too: its owner does it.
    let arena = path.to_str().unwrap();
    let key = key(1).to_string();
    let ran = home.run(&["rm", arena, "--key", &key]);
    let says = format!("removed 1 block, 300 B, from {at}\n");
    assert_eq!((ran.status, ran.stdout), (0, says));
    let left = client.namespace(&spec("b")).unwrap().blocks().unwrap();
    assert_eq!(left.len(), 2);
    let help = format!("hint: {at} queries");
    for (args, says) in [
        (&["verify", &at][..], "allowed: an arena"),
        (&["rm", &at], "allowed: an arena"),
        (&["ls", "unix:/none"], "/none"),
        (&["ls", "unix:"], "followed by the path of a socket"),
        (&["ls", &service.socket], &help),
        (&["stat", &service.socket], &help),
    ] {
        let ran = home.run(args);
        assert_eq!(ran.status, 2, "{args:?}: {}", ran.stdout);
        assert!(ran.stderr.contains(says), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn who_only_looks_whether_somebody_listens_is_not_worth_a_warning() {
    let home = Home::new();
    let mut service = Service::start(&home, &["Cache", "-o", "cache.capacity=1MiB"]);
    for _ in 0..3 {
        drop(UnixStream::connect(&service.socket).unwrap());
    }
    // Heard after those.
    service.connect().close();
    let mut stderr = service.child.stderr.take().unwrap();
    assert_eq!(service.end(), 0);
    let mut text = String::new();
    stderr.read_to_string(&mut text).unwrap();
    assert_eq!(text, "");
}

#[test]
fn an_arena_in_memory_is_said_to_be_gone_at_the_next_boot() {
    let home = Home::new();
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let path = format!("dax.path={}", memory.path().join("arena").display());
    let args = ["Dax", "-o", &path, "-o", "dax.capacity=1MiB"];
    for says in [true, false] {
        let mut service = Service::start(&home, &args);
        let mut stderr = service.child.stderr.take().unwrap();
        assert_eq!(service.end(), 0);
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        assert_eq!(text.contains("a reboot deletes the arena"), says, "{text}");
    }
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
        (&["serve", "-o", "=nonsense"], "NAME=VALUE"),
        (&["serve", "--socket", "unix:a.sock"], "without unix:"),
        (
            &["serve", "-o", "socket=off"],
            "the path of the socket to listen on",
        ),
        (&["serve", "Cache", "-o", "pipeline=Dax"], "Cache is given"),
        (
            &["serve", "--socket", "./a", "-o", "socket=./b"],
            "./a is given",
        ),
        (&["serve", "--http", "0.0.0.0:9410"], "a proxy with TLS"),
        (&["serve", "--http", "9410"], "an IP address with a port"),
        (
            &["serve", "--http", "127.0.0.1:0", "-o", "http=off"],
            "127.0.0.1:0 is given",
        ),
        (&["serve", "-o", "socket_mode=0999"], "octal"),
        (&["serve", "-o", "socket_mode=432"], "octal"),
        // Which is right, and read before what is not.
        (
            &["serve", "-o", "socket_mode=660", "-o", "instance=7", "Tape"],
            "Tape",
        ),
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
        let amiss = rows.iter().any(|row| row["status"] == "warn");
        assert_eq!(status, i32::from(amiss));
        let row = rows.into_iter().find(|row| row["check"] == "sockets");
        row.map(|row| {
            assert_eq!(row["status"], "advice", "the next depot removes them");
            row["value"].as_str().unwrap().to_owned()
        })
    };
    let living = start("living.sock");
    let names = ["a.sock", "b.sock", "c.sock"];
    let killed = |count: usize| {
        // All are there before the first is killed: the next would sweep.
        let services: Vec<Service> = names[..count].iter().map(|name| start(name)).collect();
        drop(services);
    };
    killed(1);
    assert_eq!(doctor().unwrap(), "a.sock: its server was killed");
    killed(3);
    assert!(doctor().unwrap().contains("3 servers were killed"));
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
        refused
            .stderr
            .contains("a path on which no other server listens"),
        "{}",
        refused.stderr
    );
    assert_eq!(next.end(), 0);
    assert_eq!(sockets(&home), ["living.sock"]);
}

#[test]
fn what_is_logged_is_what_the_variable_names() {
    let home = Home::new();
    // Each says twice that the service manager cannot be told.
    let log = |level: &str| {
        let mut command = home.command(&["serve", "Cache", "-o", "cache.capacity=1MiB"]);
        command
            .envs([("KVDEPOT_LOG", level), ("NOTIFY_SOCKET", "/nowhere")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let sent = Command::new("kill").arg(child.id().to_string()).status();
        assert!(sent.is_ok());
        Ran::of(child.wait_with_output().unwrap())
    };
    for level in ["", "warn", "INFO"] {
        let ran = log(level);
        assert!(
            ran.stderr.contains("cannot notify systemd"),
            "{}",
            ran.stderr
        );
    }
    for level in ["off", "error"] {
        let ran = log(level);
        assert_eq!((ran.status, ran.stderr.as_str()), (0, ""), "{level}");
    }
    let ran = log("loud");
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("off, error, warn"), "{}", ran.stderr);
}
