//! A forked child has no rings of a 3FS: alone in its process, because it forks.

#![expect(unsafe_code, reason = "forks, and says where the double's 3FS is")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvdepot_media::file::{File, Hands, UsrbioConfig};
use kvdepot_media::{Buffer, Copier, CopierConfig, PartId};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Reads what is in a file, through the slab.
fn read(copier: &Copier, file: &Arc<File>) -> Vec<u8> {
    let (mut batch, to) = (copier.batch(), Buffer::from_vec(vec![0; 100_000]));
    let (id, from) = (PartId::whole([0; 16], [0; 32]), file.buffer(0, 100_000));
    let here = std::slice::from_ref(&to);
    batch.part(&id, &[from], here, None, 0).unwrap();
    let (sender, ended) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| sender.send(done.is_clean()).unwrap());
    assert!(ticket.wait(Some(Duration::from_secs(60))) && ended.recv().unwrap());
    to.to_vec()
}

/// How much memory 3FS knows, and how much of it has a name.
fn links(folder: &Path) -> (usize, usize) {
    let links = std::fs::read_dir(folder.join("3fs-virt/iovs")).unwrap();
    let named: Vec<bool> = links.map(|link| link.unwrap().path().exists()).collect();
    (named.len(), named.iter().filter(|named| **named).count())
}

#[test]
fn a_forked_child_lets_go_of_nothing_that_its_parent_has() {
    let folder = tempfile::tempdir().unwrap();
    // SAFETY: the only test of this process, before anything else runs.
    unsafe { std::env::set_var("KVDEPOT_DOUBLE_3FS", folder.path()) };
    let config = UsrbioConfig {
        library: kvdepot_testkit::double::build("usrbio"),
        path: folder.path().to_owned(),
        streams: 1,
        running: 8,
        waiting: 64,
        patience: Duration::from_secs(60),
    };
    let hands = Hands::usrbio(&config).unwrap();
    let plain = tempfile::NamedTempFile::new_in(folder.path()).unwrap();
    plain.as_file().write_all_at(&[7; 100_000], 0).unwrap();
    let file = File::new(plain.reopen().unwrap(), &hands).unwrap();
    let copier = Copier::new(CopierConfig::default()).unwrap();
    assert_eq!(read(&copier, &file), [7; 100_000]);
    let before = links(folder.path());
    assert_eq!(before, (3, 1), "two rings and the slab");
    // SAFETY: the child calls nothing that another thread of the parent could hold locked: all of
    // them sleep.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((copier, file, hands));
        // SAFETY: ends this process without the parent's exit handlers.
        unsafe { libc::_exit(7) }
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7);
    assert_eq!(links(folder.path()), before);
    plain.as_file().write_all_at(&[9; 100_000], 0).unwrap();
    assert_eq!(read(&copier, &file), [9; 100_000]);
    assert_eq!(hands.bounced(), 0);
}
