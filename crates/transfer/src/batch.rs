//! From requests to slices: checked, joined where they continue each other, cut, handed on.

use std::sync::Arc;

use kvdepot_plan::{Join, Limits, Piece as Planned, Planner, Ready, Span};

use crate::error::Fault;
use crate::flight::{Flight, Op, Piece};
use crate::local::Movers;
use crate::memory::{Lookup, Region};
use crate::remote::{Opened, Remote};
use crate::task::{Load, Progress};
use crate::window::Window;
use crate::wire::ROWS_MAX;

/// Transfer of one range, as part of a batch.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvdepot_media::Buffer;
/// # use kvdepot_transfer::{Config, Engine, Options, Rights};
/// use kvdepot_transfer::{Op, Request};
///
/// # let target = Arc::new(Engine::start(Config::default())?);
/// # let memory = Buffer::from_vec(vec![7; 4096]);
/// # let _published = target.publish(b"pages", &[memory], Rights::READ, None)?;
/// # let engine = Engine::start(Config { listen: None, ..Config::default() })?;
/// # let pages = Buffer::from_vec(vec![0; 4096]);
/// # let _registered = engine.register(&[pages.clone()])?;
/// # let remote = engine.open(target.address().expect("it listens"), b"pages")?;
/// // Reads four ranges of 64 bytes, and leaves gaps between them.
/// let requests = [0, 256, 512, 768].map(|offset| Request {
///     op: Op::Read,
///     local: pages.addr() as u64 + offset,
///     remote: &remote,
///     offset,
///     len: 64,
/// });
/// let task = engine.run(requests.into_iter(), Options::default())?;
/// assert!(task.is_done());
/// # assert_eq!(pages.to_vec()[256..][..65], [&[7; 64][..], &[0]].concat());
/// # Ok::<_, kvdepot_transfer::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made by callers")]
pub struct Request<'a> {
    /// Direction of the transfer.
    pub op: Op,
    /// Address of the range in this process, in registered memory.
    pub local: u64,
    /// Memory of a peer.
    pub remote: &'a Remote,
    /// Offset of the range in the memory of the peer, in bytes.
    pub offset: u64,
    /// Length of the range, in bytes; at least 1.
    pub len: u64,
}

/// Slices of one window and one way.
struct Stream {
    remote: Arc<Opened>,
    op: Op,
    planner: Planner,
    /// Its lane 0 is this one of the peer's.
    turn: usize,
}

/// Requests that continue each other.
struct Run {
    stream: usize,
    first: u32,
    count: u32,
    span: Span,
}

/// A batch that is being planned.
pub(crate) struct Plan<'a> {
    join: &'a Join<Load>,
    movers: &'a Movers,
    /// Whose it is.
    engine: [u8; 16],
    limits: Limits,
    streams: Vec<Stream>,
    run: Option<Run>,
    region: Option<Region>,
    /// The only slice of the batch, where it was not handed on yet.
    only: Option<(usize, usize, Flight)>,
    handed: usize,
    /// The first slice waits for the second, in case there is none.
    holds_first: bool,
}

impl<'a> Plan<'a> {
    /// Of a batch; with `holds_first` one that has a single slice gives it back at the end.
    pub(crate) fn new(
        join: &'a Join<Load>,
        movers: &'a Movers,
        engine: [u8; 16],
        limits: Limits,
        holds_first: bool,
    ) -> Plan<'a> {
        Plan {
            join,
            movers,
            engine,
            limits,
            streams: Vec::new(),
            run: None,
            region: None,
            only: None,
            handed: 0,
            holds_first,
        }
    }

    fn progress(&self) -> &Progress {
        &self.join.payload().progress
    }

    /// Adds a request. Those that cannot be fail at once, and alone: false.
    pub(crate) fn add(&mut self, number: u32, request: &Request<'_>, memory: &Lookup<'_>) -> bool {
        if let Err(fault) = self.check(request, memory) {
            self.progress().refuse(number as usize, fault);
            return false;
        }
        let (local, offset, len) = (request.local, request.offset, request.len);
        let span = Span::new(local, offset, len);
        if let Some(run) = &mut self.run {
            let stream = &self.streams[run.stream];
            let same = stream.op == request.op && Arc::ptr_eq(&stream.remote, &request.remote.0);
            if same && run.first + run.count == number && run.span.continues_in(&span) {
                run.span.len += len;
                run.count += 1;
                return true;
            }
        }
        self.end_run();
        let stream = self.stream(request);
        self.run = Some(Run {
            stream,
            first: number,
            count: 1,
            span,
        });
        true
    }

    fn check(&mut self, request: &Request<'_>, memory: &Lookup<'_>) -> Result<(), Fault> {
        // Another engine's lanes would carry it, whose time this one does not watch.
        if request.remote.0.peer.initiator() != self.engine {
            return Err(Fault::Unknown);
        }
        let window = &request.remote.0.window;
        let (local, len) = (request.local, request.len);
        let known = self
            .region
            .as_ref()
            .is_some_and(|region| region.has(local, len));
        if !known {
            let region = memory.find(local, len).ok_or(Fault::Local)?;
            self.join.payload().hold(&region.owner);
            self.region = Some(region.clone());
        }
        let writable = self.region.as_ref().is_some_and(Region::is_writable);
        match request.op {
            Op::Read if !writable => return Err(Fault::Local),
            Op::Read if !window.rights.read => return Err(Fault::Rights),
            Op::Write if !window.rights.write => return Err(Fault::Rights),
            _ => {}
        }
        let end = request.offset.checked_add(len);
        match end {
            Some(end) if len > 0 && end <= window.len => Ok(()),
            _ => Err(Fault::Range),
        }
    }

    fn stream(&mut self, request: &Request<'_>) -> usize {
        let is_its = |stream: &Stream| {
            stream.op == request.op && Arc::ptr_eq(&stream.remote, &request.remote.0)
        };
        if let Some(known) = self.streams.iter().position(is_its) {
            return known;
        }
        let remote = Arc::clone(&request.remote.0);
        let limits = Limits {
            lanes: remote.peer.lanes(),
            ..self.limits
        };
        let turn = remote.peer.turn();
        let planner = Planner::new(limits).expect("an engine's limits were checked");
        self.streams.push(Stream {
            remote,
            op: request.op,
            planner,
            turn,
        });
        self.streams.len() - 1
    }

    fn end_run(&mut self) {
        let Some(run) = self.run.take() else { return };
        self.progress().run(run.first, run.count, run.span.len);
        let Stream {
            remote,
            op,
            planner,
            turn,
        } = &mut self.streams[run.stream];
        match planner.push_span(run.first, run.span) {
            Ok(ready) if ready.is_empty() => {}
            Ok(ready) => {
                let flights = flights(ready, (*op, &remote.window, *turn), self.join);
                self.hand_on(run.stream, flights);
            }
            // More pieces than 32 bits count: nobody has so much memory.
            Err(_) => self
                .progress()
                .moved(run.first, run.span.len, Some(Fault::Failed)),
        }
    }

    fn hand_on(&mut self, stream: usize, flights: Vec<(usize, Flight)>) {
        for (lane, flight) in flights {
            self.handed += 1;
            if self.handed == 1 && self.holds_first {
                self.only = Some((stream, lane, flight));
                continue;
            }
            self.release_first();
            self.submit(stream, lane, flight);
        }
    }

    fn submit(&self, stream: usize, lane: usize, flight: Flight) {
        submit(&self.streams[stream].remote, self.movers, lane, flight);
    }

    fn release_first(&mut self) {
        if let Some((stream, lane, flight)) = self.only.take() {
            self.submit(stream, lane, flight);
        }
    }

    /// Hands on what is left, but for the only slice of the batch.
    pub(crate) fn finish(mut self) -> Option<(Arc<Opened>, usize, Flight)> {
        self.end_run();
        for number in 0..self.streams.len() {
            let Stream {
                remote,
                op,
                planner,
                turn,
            } = &mut self.streams[number];
            let ready = planner.finish();
            let flights = flights(ready, (*op, &remote.window, *turn), self.join);
            self.hand_on(number, flights);
        }
        let (stream, lane, flight) = self.only.take()?;
        Some((Arc::clone(&self.streams[stream].remote), lane, flight))
    }
}

/// Gives a slice to whoever moves it: from here where that can be, and else a lane of the peer.
pub(crate) fn submit(remote: &Arc<Opened>, movers: &Movers, lane: usize, flight: Flight) {
    if remote.is_near() {
        remote.lend(movers, flight);
    } else if let Err(flight) = remote.post(lane, flight) {
        remote.peer.submit(lane, flight);
    }
}

/// Slices with their lanes, none of more rows than a frame has.
fn flights(
    ready: Ready<'_>,
    (op, window, turn): (Op, &Arc<Window>, usize),
    join: &Join<Load>,
) -> Vec<(usize, Flight)> {
    let mut made = Vec::with_capacity(ready.len());
    let piece = |planned: &Planned| match *planned {
        // Batches are planned from spans alone, each of which is at most a slice long.
        Planned::Unit(_) => None,
        Planned::Span { tag, span } => {
            let len = u32::try_from(span.len).ok()?;
            Some(Piece {
                run: tag,
                len,
                local: span.src,
                offset: span.dst,
            })
        }
    };
    for (slice, planned) in ready {
        for some in planned.chunks(ROWS_MAX) {
            let pieces = some.iter().filter_map(piece).collect();
            let flight = Flight::new(op, Arc::clone(window), pieces, join.guard());
            made.push((slice.lane + turn, flight));
        }
    }
    made
}
