//! What an engine does with a depot of its own: its scheduler pins, a worker of it loads.

use std::time::Duration;

use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Depot, Error, Key, Namespace, Pin};

use super::players::{fields, hash, key_of, number};

/// Longest wait for a batch: far beyond what any takes, and below what the parent waits.
const PATIENCE: Duration = Duration::from_secs(15);

/// `key:length` of each block: what the worker has read, or that it has not.
pub fn load(
    depot: &Depot,
    ns: &Namespace,
    mover: &mut Option<Mover>,
    words: &[&str],
) -> Result<String, Error> {
    let words: Vec<Vec<&str>> = words.iter().map(|word| fields(word)).collect();
    let keys: Vec<Key> = words.iter().map(|word| key_of(word[0])).collect();
    let pins = ns.pin(&keys, false)?;
    let attached = match mover.take() {
        Some(attached) => attached,
        None => Mover::attach(&depot.socket().unwrap(), Some(1), true)?,
    };
    let mover = mover.insert(attached);
    let held: Vec<Pin> = pins.iter().flatten().cloned().collect();
    let lens = words.iter().zip(&pins).filter(|(_, pin)| pin.is_some());
    let lens: Vec<usize> = lens.map(|(word, _)| number(word[1]) as usize).collect();
    // Blocks of other lengths are other blocks.
    law_of_lengths(&held, &lens)?;
    let buffers: Vec<Buffer> = lens
        .iter()
        .map(|len| Buffer::from_vec(vec![0xEE; *len]))
        .collect();
    let placements: Vec<Vec<u8>> = held.iter().map(Pin::placement).collect();
    let job = mover.load(&placements, &BlockBuffers::whole(buffers.clone()), 0)?;
    if !job.wait(Some(PATIENCE)) {
        return Ok("HANGS".into());
    }
    let wrong = held.iter().zip(job.corrupt()).filter(|(_, wrong)| *wrong);
    let wrong: Vec<Pin> = wrong.map(|(pin, _)| pin.clone()).collect();
    ns.discard(&wrong);
    let sums = job.checksums();
    ns.unpin(&held, wrong.is_empty());
    let mut read = sums.iter().zip(&buffers);
    let each = pins.iter().map(|pin| {
        let read = pin.as_ref().and_then(|_| read.next());
        match read {
            Some((Some(_), buffer)) => format!("Done={}", hash(&buffer.to_vec())),
            _ => "Miss".to_owned(),
        }
    });
    Ok(each.collect::<Vec<_>>().join(" "))
}

fn law_of_lengths(held: &[Pin], lens: &[usize]) -> Result<(), Error> {
    let same = held
        .iter()
        .zip(lens)
        .all(|(pin, len)| pin.bytes() == *len as u64);
    match same {
        true => Ok(()),
        false => Err(Error::input("len", "of a pin", "that of the block")),
    }
}
