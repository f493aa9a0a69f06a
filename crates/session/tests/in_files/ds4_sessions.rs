//! ds4's files as sessions and back.

use std::path::Path;

use crate::files;
use kvdepot_session::{Error, Sessions, Spec, export, export_ds4, import, import_ds4};
use kvdepot_store::{Config, NamespaceSpec};
use kvdepot_testkit::child::{self, Child};
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;

fn sessions(home: &Path) -> Sessions {
    let settings = json!({
        "socket": "off", "lanes": 1, "lookup_timeout": "60s", "cache": {"capacity": "64MiB"},
        "posix": {"path": home.join("posix"), "capacity": "256MiB"},
    });
    let config = Config::new("Cache|Posix", &settings).unwrap();
    let depot = kvdepot_service::open(&config).unwrap();
    let spec = Spec::new(NamespaceSpec {
        model: "ds4".into(),
        dtype: "q2".into(),
        block_tokens: 256,
        ..NamespaceSpec::default()
    });
    Sessions::open(depot, &spec).unwrap()
}

#[test]
fn a_file_comes_back_to_the_byte_also_from_another_depot() {
    let (home, away) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let one = sessions(home.path());
    let path = home.path().join("a.kv");
    let whole = files::flash(&path, 1000, 1, b"trailer");
    let imported = import_ds4(&one, &path).unwrap();
    assert_eq!(imported.tokens, 1000);
    let back = home.path().join("back.kv");
    assert_eq!(
        export_ds4(&one, imported.id, &back).unwrap(),
        whole.len() as u64
    );
    assert!(std::fs::read(&back).unwrap() == whole);
    let archive = home.path().join("a.kvs");
    export(&one, imported.id, &archive).unwrap();
    let other = sessions(away.path());
    import(&other, &archive).unwrap();
    export_ds4(&other, imported.id, &back).unwrap();
    assert!(std::fs::read(&back).unwrap() == whole);
    let found = other
        .lookup_text(b"the rendered text, and more", 1)
        .unwrap();
    assert_eq!(found[0].tokens.len(), 1000);
}

#[test]
fn a_longer_file_shares_what_it_begins_with_and_other_bits_stay_theirs() {
    let home = tempfile::tempdir().unwrap();
    let one = sessions(home.path());
    let path = |name: &str| home.path().join(name);
    let short = files::flash(&path("short.kv"), 1024, 1, b"");
    let long = files::flash(&path("long.kv"), 1280, 1, b"");
    // The same tokens, computed in other steps.
    let other = files::flash(&path("other.kv"), 1280, 2, b"");
    let ids: Vec<_> = ["short.kv", "long.kv"]
        .iter()
        .map(|name| import_ds4(&one, &path(name)).unwrap().id)
        .collect();
    let before = one.list().len();
    for (id, whole) in ids.iter().zip([&short, &long]) {
        export_ds4(&one, *id, &path("back.kv")).unwrap();
        assert!(std::fs::read(path("back.kv")).unwrap() == *whole);
    }
    let id = import_ds4(&one, &path("other.kv")).unwrap().id;
    export_ds4(&one, id, &path("back.kv")).unwrap();
    assert!(std::fs::read(path("back.kv")).unwrap() == other);
    // Of the same tokens one manifest holds, the last.
    assert_eq!(one.list().len(), before);
    export_ds4(&one, ids[0], &path("back.kv")).unwrap();
    assert!(std::fs::read(path("back.kv")).unwrap() == short);
}

#[test]
fn what_is_no_file_of_ds4_is_refused_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let one = sessions(home.path());
    let path = home.path().join("a.kv");
    let whole = files::flash(&path, 600, 1, b"");
    for len in [0, 10, 60, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).unwrap();
        let refused = import_ds4(&one, &path).unwrap_err();
        assert!(matches!(refused, Error::Malformed { .. }), "{refused}");
    }
    assert!(one.list().is_empty());
}

#[test]
fn a_session_that_has_lost_its_trailer_is_no_file() {
    let home = tempfile::tempdir().unwrap();
    let one = sessions(home.path());
    let path = home.path().join("a.kv");
    files::flash(&path, 600, 1, b"of another engine");
    let back = home.path().join("back.kv");
    let refused = |one: &Sessions, id| {
        let refused = export_ds4(one, id, &back).unwrap_err();
        assert!(matches!(refused, Error::Malformed { .. }), "{refused}");
        let left = std::fs::read_dir(home.path()).unwrap().count();
        assert_eq!(left, 2, "the ds4 file and the tier alone");
    };
    // Gone.
    let id = import_ds4(&one, &path).unwrap().id;
    let all = one.depot().namespaces().unwrap();
    let is_objects = |about: &Option<String>| {
        about
            .as_deref()
            .unwrap_or_default()
            .ends_with("session objects")
    };
    let objects = all.iter().find(|one| is_objects(&one.description)).unwrap();
    let objects = one.depot().namespace_by_id(objects.id);
    let trailers = objects
        .blocks()
        .unwrap()
        .into_iter()
        .filter(|(_, len)| *len == 17);
    let trailers: Vec<_> = trailers.map(|(key, _)| key).collect();
    assert_eq!(objects.remove(&trailers).unwrap(), 1);
    refused(&one, id);
    // Rotten.
    let id = import_ds4(&one, &path).unwrap().id;
    assert!(export_ds4(&one, id, &back).is_ok());
    std::fs::remove_file(&back).unwrap();
    one.depot().close();
    let folders = std::fs::read_dir(home.path().join("posix/blocks")).unwrap();
    let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
    let mut changed = 0;
    for file in files.map(|file| file.unwrap().path()) {
        let mut bytes = std::fs::read(&file).unwrap();
        if let Some(at) = bytes
            .windows(17)
            .position(|some| some == b"of another engine")
        {
            bytes[at] ^= 1;
            std::fs::write(&file, bytes).unwrap();
            changed += 1;
        }
    }
    assert_eq!(changed, 1);
    refused(&sessions(home.path()), id);
}

#[test]
fn a_file_that_is_written_is_its_users_alone() {
    use std::os::unix::fs::PermissionsExt;
    let home = tempfile::tempdir().unwrap();
    let one = sessions(home.path());
    let path = home.path().join("a.kv");
    files::flash(&path, 600, 1, b"");
    let id = import_ds4(&one, &path).unwrap().id;
    let back = home.path().join("back.kv");
    // In place of one that others may read.
    std::fs::write(&back, b"before").unwrap();
    std::fs::set_permissions(&back, std::fs::Permissions::from_mode(0o644)).unwrap();
    export_ds4(&one, id, &back).unwrap();
    let mode = back.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn an_export_that_is_killed_leaves_nothing() {
    const TEST: &str = "ds4_sessions::an_export_that_is_killed_leaves_nothing";
    if child::role().is_some() {
        let home = child::value("home");
        let one = sessions(Path::new(&home));
        let id = one.list()[0].id;
        // The kernel ends a process that writes beyond the limit.
        for (resource, most) in [(Resource::Core, 0), (Resource::Fsize, 4096)] {
            let mut limit = getrlimit(resource);
            limit.current = Some(most);
            setrlimit(resource, limit).unwrap();
        }
        child::say("exports");
        export_ds4(&one, id, &Path::new(&home).join("back.kv")).unwrap();
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let one = sessions(home.path());
    let path = home.path().join("a.kv");
    let whole = files::flash(&path, 1000, 1, b"");
    import_ds4(&one, &path).unwrap();
    one.depot().close();
    let mut exporter = Child::start(TEST, "exporter", &[("home", home.path().to_str().unwrap())]);
    exporter.expect("exports");
    assert!(!exporter.wait().success());
    let left = || {
        let left = std::fs::read_dir(home.path()).unwrap();
        let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<String> = left.collect();
        left.sort();
        left
    };
    let mut after = left();
    // Where a file system has no files without names, the next export removes what is left.
    after.retain(|name| !name.starts_with(".kvdepot-session-"));
    assert_eq!(after, ["a.kv", "posix"]);
    let one = sessions(home.path());
    let back = home.path().join("back.kv");
    export_ds4(&one, one.list()[0].id, &back).unwrap();
    assert!(std::fs::read(&back).unwrap() == whole);
    assert_eq!(left(), ["a.kv", "back.kv", "posix"]);
}
