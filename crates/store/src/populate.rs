//! Media made present in a process ahead of their use: the first copies would otherwise stop for a
//! page fault every few KiB.

use std::sync::Arc;

use kvdepot_arena::Error;
use kvdepot_arena::gate::Gate;
use kvdepot_host::cpu;
use kvdepot_media::Mapping;

/// What is populated at once: some milliseconds, for which closing waits, and anybody who wants
/// to change this process's mappings.
const STEP: u64 = 16 << 20;

/// Populates media, near to far, until the gate is closed. Memory that nobody has touched yet is
/// allocated by it; of a file only what is in memory already is mapped.
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

/// The same in a thread of its own.
pub fn aside(media: Vec<Arc<Mapping>>, gate: Arc<Gate>) -> Result<(), Error> {
    let run = move || {
        // Whatever the calling thread is pinned to.
        let _slower_without = cpu::reset_affinity();
        // Closed meanwhile, or short of memory: then the pages come when they are touched.
        if let Err(error) = now(&media, &gate) {
            tracing::debug!(%error, "media are not populated ahead");
        }
    };
    let spawned = std::thread::Builder::new()
        .name("kvdepot-present".into())
        .spawn(run);
    spawned.map(drop).map_err(|source| Error::Io {
        path: "thread".into(),
        source,
    })
}
