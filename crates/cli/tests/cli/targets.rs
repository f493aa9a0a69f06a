//! What a command's positional argument may be: what its help names is taken, and all else is
//! refused with what is allowed.

use std::fs;
use std::os::unix::net::UnixListener;

use kvdepot_store::{Config, Depot};
use serde_json::json;

use crate::home::{Home, Ran, arena, key, put, spec};

/// Everything that somebody may give a command, by its kind.
struct Targets {
    home: Home,
    served: Depot,
    listener: UnixListener,
}

const KINDS: [&str; 11] = [
    "an arena",
    "unix:SOCKET",
    "a socket's path",
    "a tier's directory",
    "a block's file",
    "a session's file",
    "a directory of sessions' files",
    "an empty directory",
    "another file",
    "nothing",
    "a pipeline",
];

impl Targets {
    fn new() -> Targets {
        let home = Home::new();
        arena(&home.path("arena"));
        let settings = json!({
            "socket": home.path("served.sock"), "cache": {"capacity": "8MiB"},
        });
        let served = kvdepot_service::open(&Config::new("Cache", &settings).unwrap()).unwrap();
        put(&served.namespace(&spec("a")).unwrap(), 0..1, 5000);
        let listener = UnixListener::bind(home.path("other.sock")).unwrap();
        let made = Targets {
            home,
            served,
            listener,
        };
        fs::write(made.home.path("tokens.json"), "[1,2,3,4]").unwrap();
        fs::write(made.home.path("rows"), [7; 400]).unwrap();
        let option = format!("posix.path={}", made.home.path("kv").display());
        let saved = made.home.run(&[
            "session",
            "save",
            "Posix",
            "-o",
            &option,
            "-o",
            "posix.capacity=64MiB",
            "--tokens",
            "tokens.json",
            "--rows",
            "rows",
            "--model",
            "m",
            "--dtype",
            "f16",
            "--json",
        ]);
        assert_eq!(saved.status, 0, "{}", saved.stderr);
        let id = saved.rows()[0]["session"].as_str().unwrap().to_owned();
        fs::create_dir(made.home.path("files")).unwrap();
        fs::create_dir(made.home.path("empty")).unwrap();
        fs::write(made.home.path("note.txt"), "mine").unwrap();
        let to = made.home.path("one.kvs");
        let to = to.to_str().unwrap();
        let ran = made
            .home
            .run(&["session", "export", "Posix", "-o", &option, &id, to]);
        assert_eq!(ran.status, 0, "{}", ran.stderr);
        fs::copy(to, made.home.path("files/one.kvs")).unwrap();
        made
    }

    /// The argument of a kind.
    fn of(&self, kind: &str) -> String {
        let path = |name: &str| self.home.path(name).display().to_string();
        match kind {
            "an arena" => path("arena"),
            "unix:SOCKET" => format!("unix:{}", path("served.sock")),
            "a socket's path" => path("other.sock"),
            "a tier's directory" => path("kv"),
            "a block's file" => {
                let folders = fs::read_dir(self.home.path("kv/blocks")).unwrap();
                let each = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap());
                let mut files = each.map(|file| file.unwrap().path());
                files.next().unwrap().display().to_string()
            }
            "a session's file" => path("one.kvs"),
            "a directory of sessions' files" => path("files"),
            "an empty directory" => path("empty"),
            "another file" => path("note.txt"),
            "nothing" => path("absent"),
            "a pipeline" => "Cache".into(),
            other => panic!("{other}"),
        }
    }

    fn run(&self, command: &[&str], kind: &str, more: &[&str]) -> Ran {
        let target = self.of(kind);
        self.home.run(&[command, &[target.as_str()], more].concat())
    }

    /// Checks a command with each kind: `taken` are those that it takes, and `names` is what a
    /// refusal says of the others.
    fn check(&self, (command, more): (&[&str], &[&str]), taken: &[&str], names: &[&str]) {
        assert!(taken.iter().all(|kind| KINDS.contains(kind)));
        for kind in KINDS {
            let ran = self.run(command, kind, more);
            let said = format!("{command:?} {kind}: {}{}", ran.stdout, ran.stderr);
            if taken.contains(&kind) {
                assert!(ran.status < 2, "{said}");
                continue;
            }
            assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{said}");
            assert!(names.iter().all(|name| ran.stderr.contains(name)), "{said}");
        }
    }

    /// The text of a command's help about its argument, in one line.
    fn help(&self, command: &[&str]) -> String {
        let ran = self.home.run(&[command, &["--help"]].concat());
        let text = ran.stdout.split("Arguments:").nth(1).unwrap();
        let text = text.split("Options:").next().unwrap();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn each_command_takes_what_its_help_names_and_refuses_all_else_with_what_is_allowed() {
    let all = Targets::new();
    let arena = "an arena (a file, a DAX or a block device)";
    let socket = "unix:SOCKET (a running depot)";
    let directory = "a directory of the tier Posix";
    let (zero, yes) = (key(0).to_string(), ["--yes"]);
    let by_key = ["--key", zero.as_str()];

    for command in ["ls", "stat"] {
        let names = [arena, socket];
        all.check((&[command], &[]), &["an arena", "unix:SOCKET"], &names);
        let help = all.help(&[command]).to_lowercase();
        assert!(
            names.iter().all(|name| help.contains(&name.to_lowercase())),
            "{help}"
        );
        assert!(!help.contains("directory"), "{help}");
    }
    let taken = ["an arena", "a tier's directory", "a block's file"];
    let names = [arena, directory, "the file of one block"];
    all.check((&["verify"], &[]), &taken, &names);
    let help = all.help(&["verify"]).to_lowercase();
    assert!(
        names.iter().all(|name| help.contains(&name.to_lowercase())),
        "{help}"
    );
    assert!(!help.contains("unix:"), "{help}");
    // What it removes comes last of all.
    let names = [arena, "with --namespace or --key also unix:SOCKET"];
    all.check((&["rm"], &by_key), &["an arena", "unix:SOCKET"], &names);
    let help = all.help(&["rm"]).to_lowercase();
    assert!(
        names.iter().all(|name| help.contains(&name.to_lowercase())),
        "{help}"
    );

    // A path of any kind may be that of a tier to come, which has no files in it yet.
    let paths: Vec<&str> = KINDS
        .into_iter()
        .filter(|kind| *kind != "unix:SOCKET")
        .collect();
    all.check((&["doctor"], &[]), &paths, &["a path on this machine"]);

    // All of these would serve, but for what a pipeline needs.
    all.check(
        (&["serve"], &["-o", "cache.capacity=none"]),
        &[],
        &["allowed: "],
    );
    for kind in KINDS.into_iter().filter(|kind| *kind != "a pipeline") {
        let ran = all.run(&["serve"], kind, &[]);
        assert!(
            ran.stderr.contains("such as \"Cache|Dax\""),
            "{kind}: {}",
            ran.stderr
        );
    }

    let depots = ["unix:SOCKET", "a tier's directory", "a pipeline"];
    let files = [
        "a session's file",
        "a directory of sessions' files",
        "an empty directory",
    ];
    let names = [
        "a pipeline, such as",
        socket,
        directory,
        "a session file",
        "a directory of session files",
    ];
    for command in ["ls", "verify"] {
        all.check(
            (&["session", command], &[]),
            &[&depots[..], &files].concat(),
            &names,
        );
    }
    let help = all.help(&["session", "ls"]).to_lowercase();
    assert!(
        names.iter().all(|name| help.contains(&name.to_lowercase())),
        "{help}"
    );

    all.check((&["rm"], &yes), &["an arena"], &["an arena"]);
    drop(all.listener);
    all.served.close();
}

#[test]
fn a_depot_is_named_by_its_directory_in_each_command_about_sessions() {
    let all = Targets::new();
    let kv = all.of("a tier's directory");
    let kv = kv.as_str();
    let run = |args: &[&str]| {
        let ran = all.home.run(&[&["session"][..], args].concat());
        assert_eq!(ran.status, 0, "{args:?}: {}", ran.stderr);
        ran
    };
    let rows = run(&["ls", kv, "--json"]).rows();
    assert_eq!((rows.len(), &rows[0]["dtype"]), (1, &"f16".into()));
    let id = rows[0]["session"].as_str().unwrap().to_owned();
    let table = run(&["ls", kv]).stdout;
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0][..4], ["SESSION", "MODEL", "DTYPE", "TOKENS"]);
    assert_eq!(lines[1][..4], [&id[..16], "m", "f16", "4"]);
    assert!(run(&["show", kv, &id[..9]]).stdout.contains("m, f16"));
    assert!(run(&["verify", kv]).stdout.contains("complete"));
    let copy = all.home.path("copy.kvs");
    let copy = copy.to_str().unwrap();
    run(&["export", kv, &id, copy]);
    run(&["restore", kv, "--tokens", "tokens.json", "--rows", "back"]);
    assert_eq!(fs::read(all.home.path("back")).unwrap(), [7; 400]);
    run(&["rm", kv, &id]);
    let none = run(&["ls", kv]);
    assert!(
        none.stderr.contains("no sessions in this depot"),
        "{}",
        none.stderr
    );
    assert_eq!(run(&["ls", kv, "--json"]).stderr, "");
    // Into the depot, and no file beside its own.
    run(&["import", kv, copy]);
    run(&["trim", kv, "--to", "1KiB"]);
    let more = [
        "--tokens",
        "tokens.json",
        "--rows",
        "rows",
        "--model",
        "m",
        "--dtype",
        "f16",
    ];
    run(&[&["save", kv][..], &more].concat());
    assert_eq!(run(&["ls", kv, "--json"]).rows().len(), 1);
    let names = fs::read_dir(kv)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    assert!(
        names
            .into_iter()
            .all(|name| !name.to_string_lossy().ends_with(".kvs"))
    );

    // Corrupt blocks are found as with the pipeline's own name.
    let block = all.of("a block's file");
    crate::home::flip(block.as_ref(), fs::metadata(&block).unwrap().len() - 1);
    let option = format!("posix.path={kv}");
    let (one, other) = (
        all.home.run(&["session", "verify", kv]),
        all.home.run(&["session", "verify", "Posix", "-o", &option]),
    );
    assert_eq!((one.status, &one.stdout), (other.status, &other.stdout));

    for command in ["ls", "verify"] {
        let empty = all.run(&["session", command], "an empty directory", &[]);
        assert!(
            empty
                .stderr
                .contains("is not a directory of the tier Posix"),
            "{}",
            empty.stderr
        );
    }
    // Without a / it is a pipeline, and the hint says how a path is named.
    for command in [&["session", "ls"][..], &["serve"]] {
        let ran = all.home.run(&[command, &["kv"]].concat());
        assert!(
            ran.stderr.contains("hint: ") && ran.stderr.contains("posix.path=kv"),
            "{}",
            ran.stderr
        );
    }
}

#[test]
fn what_rm_would_refuse_it_does_not_ask_about() {
    let all = Targets::new();
    for kind in KINDS.into_iter().filter(|kind| *kind != "an arena") {
        let ran = all.run(&["rm"], kind, &[]);
        assert_eq!(ran.status, 2, "{kind}");
        assert!(!ran.stderr.contains("--yes"), "{kind}: {}", ran.stderr);
    }
    let ran = all.run(&["rm"], "a tier's directory", &[]);
    let says = format!("rm -r {} removes it", all.of("a tier's directory"));
    assert!(ran.stderr.contains(&says), "{}", ran.stderr);
    let asked = all.run(&["rm"], "an arena", &[]);
    assert!(asked.stderr.contains("hint: --yes"), "{}", asked.stderr);
}
