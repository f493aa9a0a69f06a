//! The target: an engine with memory, and plain sockets over the same memory, in a process of this
//! command.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvdepot_media::Buffer;
use kvdepot_transfer::{Config, Engine, Published, Rights};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use super::plain::{self, Order};
use super::plan::{Place, Plan};
use super::spaces::{self, Spaces};
use crate::args::Transfer;
use crate::bench::media::Region;
use crate::bench::reopen::this_command;
use crate::error::Error;
use crate::output::Output;

/// What the target's memory is published under, and ranges of it that were registered one by one.
pub(super) const NAME: &[u8] = b"bench";
pub(super) const RANGES: &[u8] = b"ranges";

/// Bytes of a range that is registered by itself, between which there are as many that are not.
pub(super) const RANGE: usize = 2048;

/// The child: serves until its input ends.
pub(super) fn child(bytes: u64, args: &Transfer, output: &mut Output) -> Result<i32, Error> {
    // The end of its input is not seen by a process that is stopped.
    let _asked = set_parent_process_death_signal(Some(Signal::KILL));
    let memory = Region::new(bytes as usize)?;
    let own = IpAddr::from(args.listen.unwrap_or(Ipv4Addr::LOCALHOST));
    let engine = Arc::new(Engine::start(Config {
        listen: Some((own, 0).into()),
        // Nobody else is in its namespace.
        allow_unauthenticated: args.listen.is_some(),
        ..Plan::new(args, Place::Loopback).config_shared()
    })?);
    let whole = std::slice::from_ref(memory.whole());
    let _published = engine.publish(NAME, whole, Rights::BOTH, None)?;
    let listener = TcpListener::bind((own, 0)).map_err(Error::io("a socket"))?;
    let address = listener.local_addr().map_err(Error::io("a socket"))?;
    let listening = engine.address().ok_or_else(|| failed("no listener"))?;
    let (whole, its) = (memory.whole().clone(), Arc::clone(&engine));
    std::thread::spawn(move || {
        let kept = Mutex::new(None);
        plain::serve(&listener, &whole, &|ranges| {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            // Their name is free from here on.
            *kept = None;
            let (published, nanoseconds) = register(&its, &whole, ranges as usize)?;
            *kept = Some(published);
            Ok(nanoseconds)
        });
    });
    output.line(&format!("{listening} {address}"))?;
    output.flush()?;
    let mut rest = Vec::new();
    io::stdin().read_to_end(&mut rest)?;
    Ok(crate::status::OK)
}

/// Registers and publishes ranges of the memory; nanoseconds of both.
fn register(
    engine: &Arc<Engine>,
    memory: &Buffer,
    ranges: usize,
) -> io::Result<(Published, [u64; 2])> {
    let slice = |number| memory.slice(2 * number * RANGE, RANGE);
    let ranges: Result<Vec<Buffer>, _> = (0..ranges).map(slice).collect();
    let ranges = ranges.map_err(io::Error::other)?;
    let start = Instant::now();
    let registered = engine.register(&ranges).map_err(io::Error::other)?;
    let middle = Instant::now();
    let published = engine.publish(RANGES, &ranges, Rights::BOTH, None);
    let published = published.map_err(io::Error::other)?;
    let spent = [middle - start, middle.elapsed()].map(|time: Duration| time.as_nanos() as u64);
    drop(registered);
    Ok((published, spent))
}

fn failed(what: &str) -> Error {
    Error::Bench(format!("the target: {what}"))
}

/// What a target is started by, and where.
pub(super) struct Site<'a> {
    pub(super) program: &'a OsStr,
    /// Where both ends have networks of their own.
    pub(super) spaces: Option<&'a Spaces>,
}

/// A target that is stopped, until this is dropped.
pub(super) struct Stopped<'a>(&'a Target);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        // Its number is nobody else's before it has been waited for.
        let _goes_on = self.0.signal(Signal::CONT);
    }
}

/// The target's process, as the other one has it.
pub(super) struct Target {
    child: Child,
    tell: Option<ChildStdin>,
    /// Where its engine listens.
    pub(super) engine: SocketAddr,
    plain: SocketAddr,
    control: TcpStream,
}

impl Target {
    pub(super) fn start(site: &Site<'_>, bytes: u64, plan: &Plan) -> Result<Target, Error> {
        let program = this_command(site.program);
        let config = plan.config();
        let mut command = match site.spaces {
            None => Command::new(&program),
            Some(spaces) => spaces.far(&program),
        };
        command
            .args(["bench", "transfer", "--child", &bytes.to_string()])
            .args(["--window", &config.window.to_string()]);
        if site.spaces.is_some() {
            command.args(["--listen", &spaces::FAR.to_string()]);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::io(program))?;
        let tell = child.stdin.take();
        let connected = Self::connect(&mut child);
        let Ok((engine, plain, control)) = connected else {
            // What it says has said why.
            drop(tell);
            let _ended = child.wait();
            return Err(failed("its process ended early"));
        };
        Ok(Target {
            child,
            tell,
            engine,
            plain,
            control,
        })
    }

    fn connect(child: &mut Child) -> Result<(SocketAddr, SocketAddr, TcpStream), Error> {
        let mut line = String::new();
        let output = child.stdout.take().ok_or_else(|| failed("no output"))?;
        BufReader::new(output).read_line(&mut line)?;
        let mut addresses = line.split_whitespace().map(str::parse);
        let (Some(Ok(engine)), Some(Ok(plain))) = (addresses.next(), addresses.next()) else {
            return Err(failed("no addresses"));
        };
        Ok((engine, plain, connect(plain)?))
    }

    /// A plain connection.
    pub(super) fn connection(&self) -> Result<TcpStream, Error> {
        connect(self.plain)
    }

    /// Ends it in the middle of whatever it does.
    pub(super) fn kill(&self) -> Result<(), Error> {
        self.signal(Signal::KILL)
    }

    /// Has it do nothing for a while.
    pub(super) fn stop(&self) -> Result<Stopped<'_>, Error> {
        self.signal(Signal::STOP).map(|()| Stopped(self))
    }

    fn signal(&self, signal: Signal) -> Result<(), Error> {
        let sent = kill_process(Pid::from_child(&self.child), signal);
        sent.map_err(|error| Error::io("the target")(error.into()))
    }

    fn ask<const COUNT: usize>(&self, order: Order) -> Result<[u64; COUNT], Error> {
        let answer = || -> io::Result<[u64; COUNT]> {
            order.tell(&self.control)?;
            let mut words = [0; COUNT];
            for word in &mut words {
                let mut bytes = [0; 8];
                (&self.control).read_exact(&mut bytes)?;
                *word = u64::from_le_bytes(bytes);
            }
            Ok(words)
        };
        answer().map_err(Error::io("the target"))
    }

    /// Processor time of both processes, in seconds.
    pub(super) fn processor_seconds(&self) -> Result<f64, Error> {
        let [far] = self.ask(Order::Clock)?;
        let near = kvdepot_host::cpu::process_time();
        Ok(near.as_secs_f64() + far as f64 / 1e9)
    }

    /// Has it register ranges; seconds of registering and of publishing them.
    pub(super) fn register(&self, ranges: usize) -> Result<[f64; 2], Error> {
        let ranges = ranges as u64;
        let nanoseconds = self.ask::<2>(Order::Register { ranges })?;
        Ok(nanoseconds.map(|nanoseconds| nanoseconds as f64 / 1e9))
    }
}

fn connect(address: SocketAddr) -> Result<TcpStream, Error> {
    let socket = TcpStream::connect(address).map_err(Error::io("the target"))?;
    socket.set_nodelay(true).map_err(Error::io("the target"))?;
    Ok(socket)
}

impl Drop for Target {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.tell.take());
        let _ended = self.child.wait();
    }
}
