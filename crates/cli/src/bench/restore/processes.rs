//! `processes_over_one`: several processes that restore from one served depot at once, against one
//! process with as many lanes.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use serde_json::json;

use super::served::{Served, keys};
use crate::args::Restore;
use crate::bench::media::Region;
use crate::bench::media::spec;
use crate::bench::reopen::this_command;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;
use crate::output::Output;

const PROCESSES: usize = 4;
const BLOCK: usize = 1 << 20;
/// Blocks of a run, over all processes; of each destination there are two sets, in turns, so that
/// no cache holds them.
const BLOCKS: usize = 256;
/// Calls of a run.
const CALLS: usize = 4;
/// What a child says when it is ready, and when it has done as it was told.
const READY: &str = "ready";
const DONE: &str = "done";

/// The child: restores its share each time a line tells it to.
pub(super) fn child(socket: &Path, args: &Restore, output: &mut Output) -> Result<i32, Error> {
    let (share, of) = args.share.unwrap_or((0, 1));
    let depot = kvdepot_service::connect(socket, Some(PROCESSES / of))?;
    let ns = depot.namespace(&spec())?;
    let count = BLOCKS / of;
    let keys = &keys(BLOCKS)[share * count..(share + 1) * count];
    let memory = Region::new(2 * count * BLOCK)?;
    depot.populate_aside()?;
    output.line(READY)?;
    output.flush()?;
    let mut lines = std::io::stdin().lines();
    while let Some(Ok(_)) = lines.next() {
        for call in 0..CALLS {
            let first = call % 2 * count;
            let buffers = memory.buffers(BLOCK, first..first + count)?;
            if ns.get(keys.to_vec(), buffers)?.wait(None)?.contains(&false) {
                return Err(Error::Bench("a block was not restored".into()));
            }
        }
        output.line(DONE)?;
        output.flush()?;
    }
    depot.close();
    Ok(crate::status::OK)
}

/// One child and its pipes.
struct Worker {
    child: Child,
    tell: Option<ChildStdin>,
    hear: BufReader<ChildStdout>,
}

impl Worker {
    fn start(program: &OsStr, socket: &Path, share: usize, of: usize) -> Result<Worker, Error> {
        let program = this_command(program);
        let mut child = Command::new(&program)
            .args([
                "bench",
                "restore",
                "--share",
                &format!("{share}/{of}"),
                "--child",
            ])
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::io(program))?;
        let (tell, hear) = (child.stdin.take(), child.stdout.take());
        let hear = hear.ok_or_else(|| Error::Bench("a worker process has no output".into()))?;
        let mut worker = Worker {
            child,
            tell,
            hear: BufReader::new(hear),
        };
        worker.expect(READY)?;
        Ok(worker)
    }

    fn go(&mut self) -> Result<(), Error> {
        let told = self.tell.as_mut().map(|tell| tell.write_all(b"go\n"));
        told.transpose().map_err(Error::io("a process")).map(drop)
    }

    fn expect(&mut self, word: &str) -> Result<(), Error> {
        let mut line = String::new();
        self.hear.read_line(&mut line)?;
        if line.trim_end() == word {
            return Ok(());
        }
        Err(Error::Bench("a worker process ended early".into()))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.tell.take());
        let mut rest = Vec::new();
        let _read = self.hear.read_to_end(&mut rest);
        let _ended = self.child.wait();
    }
}

fn time(workers: &mut [Worker]) -> Result<f64, Error> {
    let start = Instant::now();
    workers.iter_mut().try_for_each(Worker::go)?;
    workers
        .iter_mut()
        .try_for_each(|worker| worker.expect(DONE))?;
    Ok(start.elapsed().as_secs_f64())
}

pub(super) fn run(
    dir: &Path,
    program: &OsStr,
    rounds: usize,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let served = Served::new(dir, BLOCKS, BLOCK, 1)?;
    let socket = served.socket();
    let mut one = [Worker::start(program, &socket, 0, 1)?];
    let many = (0..PROCESSES).map(|share| Worker::start(program, &socket, share, PROCESSES));
    let mut many = many.collect::<Result<Vec<_>, Error>>()?;
    let times = Rounds::run(rounds, 1, &report.interrupt, |contender| match contender {
        0 => time(&mut one),
        _ => time(&mut many),
    })?;
    let gigabytes = (CALLS * BLOCKS * BLOCK) as f64 / 1e9;
    report.row(Row {
        bench: "restore",
        case: json!({"processes": PROCESSES}),
        metric: "processes_over_one",
        unit: "GB/s",
        value: gigabytes / times.value(),
        limit: Some(gigabytes / times.median(0)),
        ratio: times.ratio(),
        rounds,
        limit_name: Some("one process with as many lanes"),
    })
}
