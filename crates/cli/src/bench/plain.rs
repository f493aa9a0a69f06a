//! The limit of a copy: the same pieces copied by the best plain ways on as many threads.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Instant;

use kvdepot_media::{Buffer, Plain};
use kvdepot_plan::Span;

use crate::error::Error;

/// The copy loop of a limit.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// Without a checksum.
    Plain(Plain),
    /// With a checksum, in one simple loop.
    #[cfg(feature = "peers")]
    Fused(kvdepot_peers::Fused),
}

impl From<Plain> for Way {
    fn from(plain: Plain) -> Way {
        Way::Plain(plain)
    }
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Plain(plain) => plain.name(),
            #[cfg(feature = "peers")]
            Way::Fused(fused) => fused.name(),
        }
    }

    fn copy(self, src: &Buffer, dst: &Buffer, pieces: &[Span]) -> Result<(), kvdepot_media::Error> {
        match self {
            Way::Plain(plain) => plain.copy(src, dst, pieces),
            #[cfg(feature = "peers")]
            Way::Fused(fused) => {
                std::hint::black_box(fused.copy(src, dst, pieces));
                Ok(())
            }
        }
    }
}

/// What one run copies.
struct Job {
    way: Way,
    src: Buffer,
    dst: Buffer,
    /// One share a thread.
    shares: Vec<Vec<Span>>,
}

/// When a thread started and ended.
type Ran = Result<(Instant, Instant), kvdepot_media::Error>;

/// Threads that wait for work, like lanes.
pub(super) struct Crew {
    jobs: Vec<Sender<Arc<Job>>>,
    results: Receiver<Ran>,
    threads: Vec<JoinHandle<()>>,
}

impl Crew {
    pub(super) fn new(threads: usize) -> Result<Crew, Error> {
        let barrier = Arc::new(Barrier::new(threads));
        let (sender, results) = channel();
        let mut crew = Crew {
            jobs: Vec::new(),
            results,
            threads: Vec::new(),
        };
        for number in 0..threads {
            let (jobs, inbox) = channel::<Arc<Job>>();
            let (barrier, sender) = (Arc::clone(&barrier), sender.clone());
            let run = move || {
                // Where the lanes may run; slower if it fails, nothing else.
                let _cpus = kvdepot_host::cpu::reset_affinity();
                for job in inbox {
                    barrier.wait();
                    let start = Instant::now();
                    let copied = job.way.copy(&job.src, &job.dst, &job.shares[number]);
                    let ran = copied.map(|()| (start, Instant::now()));
                    // Nobody waits any more when the crew is dropped.
                    let _sent = sender.send(ran);
                }
            };
            let thread = std::thread::Builder::new()
                .name(format!("plain-{number}"))
                .spawn(run)
                .map_err(Error::io("cannot start a thread"))?;
            crew.jobs.push(jobs);
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    /// Copies the pieces; seconds from the first start to the last end.
    pub(super) fn copy(
        &self,
        way: impl Into<Way>,
        src: &Buffer,
        dst: &Buffer,
        pieces: &[Span],
    ) -> Result<f64, Error> {
        let share = pieces.len().div_ceil(self.jobs.len()).max(1);
        let mut shares: Vec<Vec<Span>> = pieces.chunks(share).map(<[Span]>::to_vec).collect();
        shares.resize(self.jobs.len(), Vec::new());
        let job = Arc::new(Job {
            way: way.into(),
            src: src.clone(),
            dst: dst.clone(),
            shares,
        });
        let gone = |_| Error::Bench("a copy thread ended early".into());
        for inbox in &self.jobs {
            inbox
                .send(Arc::clone(&job))
                .map_err(|error| gone(error.to_string()))?;
        }
        let mut range: Option<(Instant, Instant)> = None;
        for _ in &self.jobs {
            let ran = self
                .results
                .recv()
                .map_err(|error| gone(error.to_string()))?;
            let (start, end) = ran?;
            let (first, last) = range.unwrap_or((start, end));
            range = Some((first.min(start), last.max(end)));
        }
        let (first, last) = range.ok_or_else(|| gone(String::new()))?;
        Ok((last - first).as_secs_f64())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.jobs.clear();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("internal error: copy thread panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_copies_its_share() {
        let src = Buffer::from_vec((0..4096u32).map(|n| n as u8).collect());
        for threads in [1, 2, 3] {
            let crew = Crew::new(threads).unwrap();
            for _ in 0..3 {
                let dst = Buffer::from_vec(vec![0; 4096]);
                let pieces: Vec<Span> = (0..8)
                    .map(|n| Span::new(n * 512, (7 - n) * 512, 512))
                    .collect();
                assert!(crew.copy(Plain::Memcpy, &src, &dst, &pieces).unwrap() > 0.0);
                for n in 0..8 {
                    let (from, to) = (src.to_vec(), dst.to_vec());
                    assert_eq!(from[n * 512..][..512], to[(7 - n) * 512..][..512]);
                }
            }
        }
    }

    #[test]
    fn a_refused_copy_is_an_error() {
        let crew = Crew::new(2).unwrap();
        let (src, dst) = (Buffer::from_vec(vec![0; 8]), Buffer::from_vec(vec![0; 8]));
        assert!(
            crew.copy(Plain::Memcpy, &src, &dst, &[Span::new(0, 4, 8)])
                .is_err()
        );
    }
}
