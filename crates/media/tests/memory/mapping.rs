//! Mappings: what they promise, and what they refuse.

use kvdepot_media::{Access, Error, Flush, Kind, Mapping, Opened, Pages, page_size};
use std::fs::Permissions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// What every writable medium does.
fn conformance(medium: &Arc<Mapping>) {
    let len = medium.len();
    assert_eq!(medium.access(), Access::ReadWrite);
    medium.populate_write(0, len).unwrap();
    medium.populate_read(1, len - 1).unwrap();
    medium.populate_resident(1, len - 1).unwrap();
    let bytes: Vec<u8> = (0..100_000).map(|i| (i * 7 + i / 256) as u8).collect();
    medium.write_from(4097, &bytes).unwrap();
    let mut read = vec![0; bytes.len()];
    medium.read_into(4097, &mut read).unwrap();
    assert!(read == bytes);
    medium.write_from(len - 3, &[1, 2, 3]).unwrap();
    medium.sync(4097, 100_000, Flush::Power).unwrap();
    medium.sync(0, len, Flush::None).unwrap();
    medium.sync(len, 0, Flush::Power).unwrap();

    // Another mapping of the same medium sees the same bytes.
    let reader = medium.try_clone_fd(Access::ReadOnly).unwrap();
    let reader = Mapping::from_fd(reader, len, Access::ReadOnly).unwrap();
    assert_eq!(reader.kind(), medium.kind());
    reader.read_into(4097, &mut read).unwrap();
    assert!(read == bytes);
    assert_eq!(reader.buffer(len - 3, 3).unwrap().to_vec(), [1, 2, 3]);

    // A reader cannot write, whatever it tries.
    let fixed = reader.write_from(0, &[1]);
    assert!(matches!(fixed, Err(Error::ReadOnly { .. })), "{fixed:?}");
    assert!(matches!(
        reader.populate_write(0, 1),
        Err(Error::ReadOnly { .. })
    ));
    assert!(!reader.buffer(0, 10).unwrap().is_writable());
    assert!(matches!(
        reader.try_clone_fd(Access::ReadWrite),
        Err(Error::ReadOnly { .. })
    ));
    let fd = reader.try_clone_fd(Access::ReadOnly).unwrap();
    assert!(matches!(
        Mapping::from_fd(fd, len, Access::ReadWrite),
        Err(Error::Io { .. })
    ));

    // A writer can.
    let writer = medium.try_clone_fd(Access::ReadWrite).unwrap();
    let writer = Mapping::from_fd(writer, len, Access::ReadWrite).unwrap();
    writer.write_from(0, &[42]).unwrap();
    assert_eq!(medium.buffer(0, 1).unwrap().to_vec(), [42]);

    // Nothing reaches beyond the end.
    let end = |result: Result<(), Error>| matches!(result, Err(Error::OutOfBounds { .. }));
    assert!(end(medium.write_from(len - 2, &[0; 3])));
    assert!(end(medium.read_into(u64::MAX, &mut [0; 3])));
    assert!(end(medium.buffer(len, 1).map(drop)));
    assert!(end(medium.sync(1, len, Flush::Power)));
    assert!(end(medium.populate_read(len - 1, 2)));
    assert!(end(medium.populate_resident(len - 1, 2)));
    assert!(end(medium.populate_write(u64::MAX, 2)));
}

#[test]
fn every_medium_keeps_the_contract() {
    // Not a multiple of a page, and the last page has its end in the middle.
    let len = (1 << 20) + 777;
    let memory = Mapping::anonymous("kvdepot-test", len).unwrap();
    assert_eq!(
        (memory.kind(), memory.len(), memory.path()),
        (Kind::Anonymous, len, None)
    );
    conformance(&memory);
    let mut places = vec![tempfile::tempdir().unwrap()];
    places.extend(tempfile::tempdir_in("/dev/shm"));
    for place in places {
        let path = place.path().join("arena");
        let file = Mapping::create(&path, len).unwrap();
        assert_eq!(
            (file.kind(), file.len(), file.path()),
            (Kind::File, len, Some(&*path))
        );
        conformance(&file);
        drop(file);
        let file = Mapping::open(&path, Access::ReadWrite).unwrap();
        assert_eq!((file.kind(), file.len()), (Kind::File, len));
        assert_eq!(
            file.buffer(len - 3, 3).unwrap().to_vec(),
            [1, 2, 3],
            "the bytes are kept"
        );
        conformance(&file);
        let reader = Mapping::open(&path, Access::ReadOnly).unwrap();
        assert_eq!(reader.buffer(0, 1).unwrap().to_vec(), [42]);
        assert!(matches!(
            reader.write_from(0, &[1]),
            Err(Error::ReadOnly { .. })
        ));
    }
}

#[test]
fn a_new_file_is_private_and_has_its_space() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("arena");
    let _file = Mapping::create(&path, 3 << 20).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
    assert!(
        metadata.blocks() * 512 >= 3 << 20,
        "sparse: {} blocks",
        metadata.blocks()
    );
    let again = Mapping::create(&path, 3 << 20);
    assert!(again.unwrap_err().is_already_exists());
    assert_eq!(
        std::fs::metadata(&path).unwrap().len(),
        3 << 20,
        "the first one is untouched"
    );
}

#[test]
fn a_file_system_without_room_is_an_error_at_creation() {
    let place = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "kvdepot-test"])
        .arg(place.path())
        .output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        println!("skipped: this process may not mount a tmpfs");
        return;
    }
    let path = place.path().join("arena");
    let full = Mapping::create(&path, 64 << 20);
    let left = path.exists();
    let fits = Mapping::create(&path, 1 << 20).map(drop);
    let unmounted = Command::new("umount").arg(place.path()).status().unwrap();
    let error = full.unwrap_err();
    assert!(error.is_no_space(), "{error}");
    assert!(error.to_string().contains("arena"), "{error}");
    assert!(!left, "an unfinished file was left behind");
    fits.unwrap();
    assert!(unmounted.success());
}

#[test]
fn lengths_that_cannot_be_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("arena");
    for len in [0, u64::MAX] {
        for result in [
            Mapping::anonymous("kvdepot-test", len),
            Mapping::create(&path, len),
        ] {
            assert!(
                matches!(
                    result,
                    Err(Error::Invalid {
                        field: "length",
                        ..
                    })
                ),
                "{result:?}"
            );
        }
        assert!(!path.exists());
    }
    std::fs::write(&path, b"").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let empty = Mapping::open(&path, Access::ReadOnly);
    assert!(
        matches!(empty, Err(Error::TooSmall { available: 0, .. })),
        "{empty:?}"
    );
}

#[test]
fn a_descriptor_of_a_shorter_medium_is_refused() {
    let memory = Mapping::anonymous("kvdepot-test", 10_000).unwrap();
    let fd = memory.try_clone_fd(Access::ReadOnly).unwrap();
    let longer = Mapping::from_fd(fd, 10_001, Access::ReadOnly);
    let expected = matches!(
        &longer,
        Err(Error::TooSmall {
            requested: 10_001,
            available: 10_000,
            ..
        })
    );
    assert!(expected, "{longer:?}");
}

#[test]
fn anonymous_memory_keeps_its_length() {
    let memory = Mapping::anonymous("kvdepot-test", 2 * page_size() as u64).unwrap();
    let file = std::fs::File::from(memory.try_clone_fd(Access::ReadWrite).unwrap());
    // Whoever holds a descriptor could otherwise make every reader die of a SIGBUS.
    assert!(file.set_len(10).is_err());
    assert!(file.set_len(1 << 20).is_err());
}

fn refusal(path: &Path) -> String {
    Mapping::open(path, Access::ReadOnly)
        .unwrap_err()
        .to_string()
}

#[test]
fn what_is_no_arena_is_refused_by_its_kind() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let missing = Mapping::open(&at("missing"), Access::ReadWrite).unwrap_err();
    assert!(
        missing.is_not_found() && missing.to_string().contains("missing"),
        "{missing}"
    );
    assert!(refusal(place.path()).contains("a directory"));

    let _listener = UnixListener::bind(at("socket")).unwrap();
    assert!(
        std::fs::metadata(at("socket"))
            .unwrap()
            .file_type()
            .is_socket()
    );
    assert!(refusal(&at("socket")).contains("a socket"));

    // Opening a FIFO for reading would wait for a writer.
    assert!(
        Command::new("mkfifo")
            .arg(at("fifo"))
            .status()
            .unwrap()
            .success()
    );
    assert!(refusal(&at("fifo")).contains("a FIFO"));

    let null = refusal(Path::new("/dev/null"));
    assert!(null.contains("/dev/null") && null.contains("DAX"), "{null}");

    std::fs::write(at("file"), [0; 100]).unwrap();
    std::fs::set_permissions(at("file"), Permissions::from_mode(0o600)).unwrap();
    symlink(at("file"), at("link")).unwrap();
    assert!(refusal(&at("link")).contains("symbolic link"));
    assert!(Mapping::open(&at("file"), Access::ReadOnly).is_ok());
}

#[test]
fn files_that_others_may_write_become_private_when_asked_and_those_of_others_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("arena");
    std::fs::write(&path, [0; 100]).unwrap();
    let mode_of = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    // As the `fsGroup` of a pod leaves it, and worse; and one that others read.
    for mode in [0o660, 0o620, 0o602, 0o666, 0o644] {
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let opened = Opened::open(&path, Access::ReadWrite).unwrap();
        assert_eq!(mode_of(), mode, "it may be another program's");
        let before = Some(mode).filter(|mode| mode & 0o022 != 0);
        assert_eq!(opened.make_private().unwrap(), before);
        assert_eq!(mode_of(), if before.is_some() { 0o600 } else { mode });
        assert_eq!(opened.make_private().unwrap(), None);
    }
    if std::os::unix::fs::chown(&path, Some(12_345), None).is_err() {
        println!("skipped: this process may not give files away");
        return;
    }
    let message = refusal(&path);
    assert!(
        message.contains("uid 12345") && message.contains("chown"),
        "{message}"
    );
}

#[test]
fn a_mapping_outlives_its_arc_through_a_buffer() {
    let memory = Mapping::anonymous("kvdepot-test", 1 << 16).unwrap();
    memory.write_from(100, b"still here").unwrap();
    let buffer = memory.buffer(100, 10).unwrap();
    drop(memory);
    assert_eq!(buffer.to_vec(), b"still here");
}

#[test]
fn a_descriptor_of_something_else_is_refused() {
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let refused = Mapping::from_fd(OwnedFd::from(socket), 1, Access::ReadOnly);
    assert!(refused.unwrap_err().to_string().contains("a socket"));
}

/// Whether the system lets shared memory have huge pages when it is asked for them.
fn system_has_huge_pages() -> bool {
    let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let setting = std::fs::read_to_string(setting).unwrap_or_default();
    let free = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = free.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let free = free.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok());
    !setting.is_empty() && !setting.contains("[deny]") && free.unwrap_or(0) > 1 << 20
}

#[test]
fn populated_memory_has_huge_pages_and_keeps_its_bytes() {
    // Begins and ends inside of huge pages.
    let (offset, len) = ((3 << 20) + 5, (21 << 20) + 77);
    let memory = Mapping::anonymous("kvdepot-test", 32 << 20).unwrap();
    let bytes: Vec<u8> = (0..len).map(|i: u64| (i * 7 + i / 256) as u8).collect();
    memory.write_from(offset, &bytes).unwrap();
    // Another mapping's view of it must follow.
    let fd = memory.try_clone_fd(Access::ReadWrite).unwrap();
    let other = Mapping::from_fd(fd, memory.len(), Access::ReadWrite).unwrap();
    other.write_from(0, &[9]).unwrap();
    memory.populate_write(offset, len).unwrap();
    let mut read = vec![0; bytes.len()];
    for view in [&memory, &other] {
        view.read_into(offset, &mut read).unwrap();
        assert!(read == bytes);
        assert_eq!(view.buffer(0, 1).unwrap().to_vec(), [9]);
        let begin = view.buffer(0, 1).unwrap().addr();
        assert!(begin.is_multiple_of(2 << 20), "{begin:x} for huge pages");
    }
    if system_has_huge_pages() {
        // Those that lie inside of what was populated, as far as memory is not in pieces.
        let huge = memory.huge_bytes().unwrap();
        assert!((2 << 20..=20 << 20).contains(&huge), "{huge}");
    }
    other.write_from(offset, &[42]).unwrap();
    assert_eq!(memory.buffer(offset, 1).unwrap().to_vec(), [42]);
}

#[test]
fn memory_of_small_pages_has_no_huge_ones() {
    let memory = Mapping::anonymous_of(Pages::Small, "kvdepot-test", 16 << 20).unwrap();
    memory.populate_write(0, 16 << 20).unwrap();
    assert_eq!(memory.huge_bytes().unwrap(), 0);
}
