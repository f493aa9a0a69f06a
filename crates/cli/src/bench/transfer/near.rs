//! The initiator: an engine over the memory of this process, and what it moves.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_media::{Buffer, stream};
use kvdepot_transfer::{Config, Engine, Op, Options, Registered, Remote, Request, Task};

use super::plain::{EACH, Order};
use super::plan::Batch;
use super::target::{NAME, Target};
use crate::bench::random::Random;
use crate::error::Error;

/// Pieces of a batch that are compared.
const LOOKED_AT: usize = 16;

/// Where the pieces of a batch lie: at random on both sides, so that none continues another.
pub(super) struct Layout {
    pub(super) batch: Batch,
    /// Offsets here, and there.
    pub(super) pieces: Vec<(u64, u64)>,
}

impl Layout {
    pub(super) fn new(batch: Batch) -> Layout {
        let mut random = Random(batch.chunks as u64);
        let mut side = || {
            let mut offsets: Vec<u64> = (0..batch.chunks as u64)
                .map(|number| number * batch.chunk)
                .collect();
            random.shuffle(&mut offsets);
            offsets
        };
        let (near, far) = (side(), side());
        Layout {
            batch,
            pieces: near.into_iter().zip(far).collect(),
        }
    }
}

/// An engine that has opened the target's memory.
pub(super) struct Near {
    pub(super) engine: Arc<Engine>,
    memory: Buffer,
    _registered: Registered,
    remote: Remote,
}

impl Near {
    pub(super) fn new(config: Config, memory: &Buffer, target: &Target) -> Result<Near, Error> {
        let is_shared = config.local;
        let engine = Arc::new(Engine::start(Config {
            listen: None,
            ..config
        })?);
        let registered = engine.register(std::slice::from_ref(memory))?;
        let remote = engine.open(target.engine, NAME)?;
        // Or else one way would be measured under the name of another.
        if remote.is_near() != is_shared || remote.is_rdma() {
            return Err(Error::Bench(format!(
                "shared memory was {}requested, but the engine chose differently",
                if is_shared { "" } else { "not " }
            )));
        }
        Ok(Near {
            engine,
            memory: memory.clone(),
            _registered: registered,
            remote,
        })
    }

    /// The requests of a batch.
    pub(super) fn requests<'a>(
        &'a self,
        op: Op,
        chunk: u64,
        pieces: &'a [(u64, u64)],
    ) -> impl ExactSizeIterator<Item = Request<'a>> {
        let base = self.memory.addr() as u64;
        pieces.iter().map(move |&(here, there)| Request {
            op,
            local: base + here,
            remote: &self.remote,
            offset: there,
            len: chunk,
        })
    }

    /// Moves a batch; its seconds.
    pub(super) fn batch(&self, op: Op, layout: &Layout) -> Result<f64, Error> {
        let start = Instant::now();
        let requests = self.requests(op, layout.batch.chunk, &layout.pieces);
        let task = self.engine.submit(requests, Options::default())?;
        let _over = task.wait(None);
        let seconds = start.elapsed().as_secs_f64();
        done(&task)?;
        Ok(seconds)
    }

    /// Moves pieces one by one; seconds of each.
    pub(super) fn one_by_one(
        &self,
        op: Op,
        chunk: u64,
        pieces: &[(u64, u64)],
    ) -> Result<Vec<f64>, Error> {
        let mut each = Vec::with_capacity(pieces.len());
        for piece in pieces.chunks(1) {
            let start = Instant::now();
            let requests = self.requests(op, chunk, piece);
            let task = self.engine.run(requests, Options::default())?;
            each.push(start.elapsed().as_secs_f64());
            done(&task)?;
        }
        Ok(each)
    }

    /// Refuses pieces that are not the same on both sides; some of them are looked at.
    pub(super) fn check(&self, layout: &Layout, plain: &Streams) -> Result<(), Error> {
        let some = layout.batch.chunk.min(1 << 20) as usize;
        let step = layout.pieces.len().div_ceil(LOOKED_AT);
        for &(here, there) in layout.pieces.iter().step_by(step) {
            plain.is_there(&self.memory, here as usize, there as usize, some)?;
        }
        Ok(())
    }
}

/// Refuses a task that is not.
pub(super) fn done(task: &Task) -> Result<(), Error> {
    match task.is_done() {
        true => Ok(()),
        false => Err(Error::Bench(format!("not transferred: {:?}", task.fault()))),
    }
}

/// Plain connections to the target.
pub(super) struct Streams {
    sockets: Vec<TcpStream>,
    memory: Buffer,
}

impl Streams {
    pub(super) fn new(streams: usize, memory: &Buffer, target: &Target) -> Result<Streams, Error> {
        let sockets = (0..streams).map(|_| target.connection());
        Ok(Streams {
            sockets: sockets.collect::<Result<_, _>>()?,
            memory: memory.clone(),
        })
    }

    /// Moves so many bytes in one piece for each of so many connections, by large calls; seconds.
    pub(super) fn whole(&self, op: Op, bytes: u64, streams: usize) -> Result<f64, Error> {
        let share = bytes.div_ceil(streams as u64);
        let run = |(number, socket): (usize, &TcpStream)| {
            let first = number as u64 * share;
            let range = first as usize..bytes.min(first + share) as usize;
            match op {
                Op::Write => self.take(socket, first, &self.memory, range),
                Op::Read => self.give(socket, first, &self.memory, range),
            }
        };
        let start = Instant::now();
        let mut sockets = self.sockets[..streams].iter().enumerate();
        std::thread::scope(|scope| {
            let first = sockets.next();
            let others: Vec<_> = sockets.map(|one| scope.spawn(move || run(one))).collect();
            let mut result = first.map_or(Ok(()), run);
            for other in others {
                let ended = other.join();
                let ended = ended.unwrap_or_else(|_| Err(gone()));
                result = result.and(ended);
            }
            result
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Refuses bytes there that are not those here.
    pub(super) fn is_there(
        &self,
        memory: &Buffer,
        here: usize,
        there: usize,
        bytes: usize,
    ) -> Result<(), Error> {
        let scratch = Buffer::from_vec(vec![0; bytes]);
        self.give(&self.sockets[0], there as u64, &scratch, 0..bytes)?;
        match memory.slice(here, bytes)?.to_vec() == scratch.to_vec() {
            true => Ok(()),
            false => Err(Error::Bench(
                "the transferred bytes differ from the source".into(),
            )),
        }
    }

    fn take(
        &self,
        mut socket: &TcpStream,
        offset: u64,
        memory: &Buffer,
        range: std::ops::Range<usize>,
    ) -> Result<(), Error> {
        let bytes = range.len() as u64;
        let mut moved = || -> std::io::Result<()> {
            Order::Take { offset, bytes }.tell(socket)?;
            stream::send(socket.as_fd(), memory, range.clone(), EACH)?;
            std::io::Read::read_exact(&mut socket, &mut [0])
        };
        moved().map_err(Error::io("a plain stream"))
    }

    fn give(
        &self,
        socket: &TcpStream,
        offset: u64,
        memory: &Buffer,
        range: std::ops::Range<usize>,
    ) -> Result<(), Error> {
        let bytes = range.len() as u64;
        Order::Give { offset, bytes }
            .tell(socket)
            .and_then(|()| stream::receive(socket.as_fd(), memory, range, EACH))
            .map_err(Error::io("a plain stream"))
    }

    /// Asks and hears so many times, as blocking calls do; seconds of each time.
    pub(super) fn ping_pong(
        &self,
        asked: usize,
        said: usize,
        times: usize,
    ) -> Result<Vec<f64>, Error> {
        use std::io::{Read, Write};
        let mut socket = &self.sockets[0];
        let (question, mut answer) = (vec![1; asked], vec![0; said]);
        let mut all = || -> std::io::Result<Vec<f64>> {
            let order = Order::Answer {
                asked: asked as u64,
                said: said as u64,
                times: times as u64,
            };
            order.tell(socket)?;
            let mut each = Vec::with_capacity(times);
            for _ in 0..times {
                let start = Instant::now();
                socket.write_all(&question)?;
                socket.read_exact(&mut answer)?;
                each.push(start.elapsed().as_secs_f64());
            }
            Ok(each)
        };
        all().map_err(Error::io("a plain stream"))
    }
}

fn gone() -> Error {
    Error::Bench("a thread of a plain stream ended early".into())
}
