//! A forked child owns nothing: alone in its process, because it forks.

#![expect(unsafe_code, reason = "forks, and asks for the pages under an address")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvdepot_media::{Buffer, Copier, CopierConfig, Failure, Mapping, PartId};

/// Whether the page at `addr` is mapped.
fn is_mapped(addr: usize) -> bool {
    let mut resident = 0;
    // SAFETY: the call looks at page tables only, and writes one byte for one page.
    let answer = unsafe { libc::mincore(std::ptr::without_provenance_mut(addr), 1, &mut resident) };
    answer == 0
}

/// What the child finds wrong; 0 if nothing.
fn in_child(copier: Copier, memory: std::sync::Arc<Mapping>, addr: usize) -> i32 {
    if is_mapped(addr) {
        return 1;
    }
    let mut batch = copier.batch();
    let (src, dst) = (Buffer::from_vec(vec![1; 8]), Buffer::from_vec(vec![0; 8]));
    let id = PartId::whole([0; 16], [0; 32]);
    batch
        .part(&id, &[src], std::slice::from_ref(&dst), None, 0)
        .unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        sender.send(done.part(0).unwrap().1).unwrap()
    });
    if !ticket.is_done() || receiver.recv().unwrap() != Err(Failure::Closed) {
        return 2;
    }
    if dst.to_vec() != [0; 8] {
        return 3;
    }
    // Whatever the child maps where the parent had its memory stays the child's.
    let page = kvdepot_media::page_size();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let wanted = std::ptr::without_provenance_mut(addr);
    // SAFETY: the address is not mapped, and the flag refuses to replace anything.
    let got = unsafe { libc::mmap(wanted, page, libc::PROT_READ, flags, -1, 0) };
    drop((copier, memory));
    if got != wanted || !is_mapped(addr) {
        return 4;
    }
    0
}

#[test]
fn a_forked_child_has_no_mapping_and_no_lanes() {
    let copier = Copier::new(CopierConfig::default()).unwrap();
    let memory = Mapping::anonymous("kvdepot-test", 1 << 20).unwrap();
    let addr = memory.buffer(0, 1).unwrap().addr();
    memory.write_from(0, &[7]).unwrap();
    assert!(is_mapped(addr));
    // SAFETY: the child calls nothing that another thread of the parent could hold locked: the
    // lanes are idle, and the C library's allocator handles forks itself.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: ends this process without the parent's exit handlers.
            unsafe { libc::_exit(in_child(copier, memory, addr)) }
        }));
        // SAFETY: as above.
        unsafe { libc::_exit(if wrong.is_err() { 100 } else { 101 }) }
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0);
    assert_eq!(memory.buffer(0, 1).unwrap().to_vec(), [7]);
}
