//! Prefaulting of media, so that the first copies do not stop for a page fault every few KiB.

use std::sync::Arc;

use kvdepot_arena::Error;
use kvdepot_arena::gate::Gate;
use kvdepot_host::cpu;
use kvdepot_media::Mapping;

/// What is populated at once: some milliseconds, for which closing waits, and anybody who wants
/// to change this process's mappings.
const STEP: u64 = 16 << 20;

/// Prefaults `media`, first to last, until `gate` is closed.
///
/// Memory that is still untouched is allocated. Of a file, only the pages that are already in
/// memory are mapped.
///
/// # Errors
///
/// * [`Error::Closed`] if `gate` is closed.
/// * [`Error::Media`] if the system rejects a request, for example for lack of memory.
pub fn now(media: &[Arc<Mapping>], gate: &Arc<Gate>) -> Result<(), Error> {
    for medium in media {
        let mut at = 0;
        while at < medium.len() {
            let _pass = gate.enter()?;
            medium.populate_resident(at, STEP.min(medium.len() - at))?;
            at += STEP;
        }
    }
    Ok(())
}

/// Prefaults `media` on a separate thread, like [`now`].
///
/// # Errors
///
/// [`Error::Io`] if the thread cannot be started.
pub fn aside(media: Vec<Arc<Mapping>>, gate: Arc<Gate>) -> Result<(), Error> {
    let run = move || {
        // Whatever the calling thread is pinned to.
        let _slower_without = cpu::reset_affinity();
        // Closed meanwhile, or short of memory: then the pages come when they are touched.
        if let Err(error) = now(&media, &gate) {
            tracing::debug!(%error, "cannot allocate media in advance");
        }
    };
    let spawned = std::thread::Builder::new()
        .name("kvdepot-present".into())
        .spawn(run);
    spawned.map(drop).map_err(|source| Error::Io {
        path: "cannot start a thread".into(),
        source,
    })
}
