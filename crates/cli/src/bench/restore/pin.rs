//! `pin_over_echo`: a pin through the socket of a served depot, beyond an echo of the same bytes
//! over a socket of the same kind.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use kvdepot_store::Key;
use serde_json::json;

use super::served::Served;
use crate::bench::media::spec;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;

const KEYS: usize = 256;
/// Calls of a round, whose median counts.
const CALLS: usize = 200;
const BLOCK: usize = 4096;
/// Bytes of a frame's head; of a request before its keys, and a key; of an answer for a key. They
/// are those of the protocol between clients and owners.
const HEAD: usize = 16;
const REQUEST: usize = HEAD + 16 + 1 + 4;
const ANSWER_EACH: usize = 1 + 44 + 8;

pub(super) fn run(dir: &Path, rounds: usize, report: &mut Report<'_>) -> Result<(), Error> {
    let served = Served::new(dir, KEYS, BLOCK, 1)?;
    let keys = served.keys.clone();
    let client = kvdepot_service::connect(&served.socket(), Some(1))?;
    let ns = client.namespace(&spec())?;
    let pin = |keys: &[Key]| {
        let start = Instant::now();
        let pins = ns.pin(keys, true)?;
        let seconds = start.elapsed().as_secs_f64();
        let pins: Vec<_> = pins.into_iter().flatten().collect();
        if pins.len() != keys.len() {
            return Err(Error::Bench("a block could not be pinned".into()));
        }
        ns.unpin(&pins, false);
        Ok(seconds)
    };
    let (mut near, far) = UnixStream::pair().map_err(Error::io("a socket"))?;
    let sizes = (REQUEST + 32 * KEYS, HEAD + ANSWER_EACH * KEYS);
    let echo = std::thread::spawn(move || answer(far, sizes));
    let request = vec![1; sizes.0];
    let mut reply = vec![0; sizes.1];
    let mut over = Vec::new();
    for round in 0..=rounds {
        let (mut pins, mut echoes) = (Vec::new(), Vec::new());
        for _ in 0..CALLS {
            report.interrupt.check()?;
            pins.push(pin(&keys)?);
            let start = Instant::now();
            near.write_all(&request).map_err(Error::io("a socket"))?;
            near.read_exact(&mut reply).map_err(Error::io("a socket"))?;
            echoes.push(start.elapsed().as_secs_f64());
        }
        if round > 0 {
            over.push((median(pins) - median(echoes)) * 1e6);
        }
    }
    drop(near);
    if echo.join().is_err() {
        return Err(Error::Bench("the echo ended early".into()));
    }
    report.row(Row {
        bench: "restore",
        case: json!({"keys": KEYS}),
        metric: "pin_over_echo",
        unit: "us",
        value: median(over),
        limit: None,
        ratio: None,
        rounds,
        limit_name: None,
    })
}

/// The echo's other end.
fn answer(mut socket: UnixStream, (request, reply): (usize, usize)) {
    let mut read = vec![0; request];
    let written = vec![2; reply];
    while socket.read_exact(&mut read).is_ok() && socket.write_all(&written).is_ok() {}
}
