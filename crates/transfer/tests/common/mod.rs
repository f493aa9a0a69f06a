//! What these tests share: engines, batches, and how late this machine itself is.

// Each test binary uses a part of it.
#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test binary uses a part of it"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod peer;
pub(crate) mod raw;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_media::Buffer;
use kvdepot_transfer::{
    Config, Engine, Op, Options, Published, Registered, Remote, Request, Rights, Status, Task,
};

/// What a task may be behind its time.
pub(crate) const BEHIND: Duration = Duration::from_millis(100);

/// Long enough that nothing takes it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The settings of every engine here: the defaults, over connections.
pub(crate) fn config() -> Config {
    Config {
        local: false,
        ..Config::default()
    }
}

pub(crate) fn engine() -> Arc<Engine> {
    engine_of(config())
}

pub(crate) fn engine_of(config: Config) -> Arc<Engine> {
    Arc::new(Engine::start(config).unwrap())
}

pub(crate) fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut word = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Memory that is registered.
pub(crate) struct Local {
    pub(crate) buffer: Buffer,
    _registered: Registered,
}

impl Local {
    pub(crate) fn of(engine: &Engine, bytes: Vec<u8>) -> Local {
        let buffer = Buffer::from_vec(bytes);
        let registered = engine.register(std::slice::from_ref(&buffer)).unwrap();
        Local {
            buffer,
            _registered: registered,
        }
    }

    pub(crate) fn zeros(engine: &Engine, len: usize) -> Local {
        Local::of(engine, vec![0; len])
    }

    /// A range of it, and one of the remote.
    pub(crate) fn request<'r>(
        &self,
        op: Op,
        remote: &'r Remote,
        (at, offset, len): (u64, u64, u64),
    ) -> Request<'r> {
        Request {
            op,
            local: self.buffer.addr() as u64 + at,
            remote,
            offset,
            len,
        }
    }

    /// Its bytes, when nothing moves any more.
    pub(crate) fn get(&self) -> Vec<u8> {
        self.buffer.to_vec()
    }
}

/// Memory that peers may read and write.
pub(crate) struct Home {
    pub(crate) buffer: Buffer,
    pub(crate) published: Published,
}

impl Home {
    pub(crate) fn of(engine: &Arc<Engine>, name: &[u8], bytes: Vec<u8>) -> Home {
        let buffer = Buffer::from_vec(bytes);
        let published = engine
            .publish(name, std::slice::from_ref(&buffer), Rights::BOTH, None)
            .unwrap();
        Home { buffer, published }
    }

    pub(crate) fn get(&self) -> Vec<u8> {
        self.buffer.to_vec()
    }
}

/// Options with a time.
pub(crate) fn within(timeout: Duration) -> Options {
    Options {
        timeout,
        ..Options::default()
    }
}

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Pieces of `size` that make up `len`, each at the same place on both sides, none next to another.
pub(crate) fn pieces(len: u64, size: u64) -> Vec<(u64, u64, u64)> {
    let count = len.div_ceil(size);
    let starts = (0..count).rev().map(|number| number * size);
    starts.map(|at| (at, at, size.min(len - at))).collect()
}

/// Submits one batch.
pub(crate) fn submit(
    engine: &Engine,
    op: Op,
    local: &Local,
    remote: &Remote,
    pieces: &[(u64, u64, u64)],
    options: Options,
) -> Task {
    let requests = pieces.iter().map(|piece| local.request(op, remote, *piece));
    engine.submit(requests, options).unwrap()
}

/// Waits until a task is over, as long as anybody would.
pub(crate) fn ended(task: &Task) {
    assert!(task.wait(Some(PATIENCE)), "the task hangs");
    assert!(task.statuses().all(|status| status != Status::Pending));
}

/// One batch, from its submission to its end; all of it was done.
pub(crate) fn done(
    engine: &Engine,
    op: Op,
    local: &Local,
    remote: &Remote,
    pieces: &[(u64, u64, u64)],
) {
    let task = submit(engine, op, local, remote, pieces, Options::default());
    ended(&task);
    assert!(task.is_done(), "{op:?}: {:?}", task.fault());
}

/// How late a thread of this process is that sleeps until then: what a machine with other work adds
/// to any promise.
pub(crate) struct Late(std::thread::JoinHandle<Duration>);

impl Late {
    pub(crate) fn at(deadline: Instant) -> Late {
        Late(std::thread::spawn(move || {
            let mut worst = Duration::ZERO;
            // As the engine does: several times in the last moments, and once behind them.
            for early in [60, 40, 20, 0] {
                let then = deadline - ms(early);
                std::thread::sleep(then.saturating_duration_since(Instant::now()));
                worst += then.elapsed();
            }
            worst
        }))
    }

    /// Asserts that this moment is not behind the promise.
    pub(crate) fn assert_in_time(self, deadline: Instant) {
        let behind = deadline.elapsed();
        let machine = self.0.join().unwrap();
        assert!(
            behind <= BEHIND + machine,
            "{behind:?} behind its time, {machine:?} of it this machine"
        );
    }
}

/// Descriptors and threads of this process.
pub(crate) fn held() -> (usize, usize) {
    let count = |what| std::fs::read_dir(what).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// CPU time of this process, to ten milliseconds.
pub(crate) fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // Behind the name, which may have blanks: in user mode and in the kernel, in ticks.
    let (_, behind) = stat.rsplit_once(')').unwrap();
    let ticks = behind.split_whitespace().skip(11).take(2);
    ms(ticks.map(|ticks| ticks.parse::<u64>().unwrap() * 10).sum())
}

/// Waits until something holds.
pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(ms(2));
    }
}
