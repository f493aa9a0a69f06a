//! What the owner asks this process's lanes to move.
//!
//! Files of blocks are opened first, which may take as long as their file system does: in a thread
//! of its own, so that the one that hears the owner waits for no medium. That thread waits until
//! moves have closed theirs where many are open: a process may have a thousand descriptors, and
//! most of them are its own affair.

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{Error, Identity, parts};
use kvdepot_host::cpu::spawn;
use kvdepot_host::dir::Access;
use kvdepot_media::{Batch, Buffer, Done, Ticket};
use kvdepot_store::{Errand, Op, Outcome, Outside, plan};
use parking_lot::Mutex;

use super::{Call, Link};
use crate::frame::Out;
use crate::frame::rows::MoveRow;
use crate::frame::verbs as say;

/// Most files that moves have open at a time; an owner asks for no more in one.
const OPEN_MAX: usize = 512;

/// A thread that plans moves in turn; started by the first that has files, it ends with its link.
#[derive(Default)]
pub(super) struct Opener {
    jobs: OnceLock<Option<Sender<Job>>>,
    /// Batches that may have files open, and how many, oldest first.
    open: Mutex<VecDeque<(usize, Ticket)>>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Opener {
    /// Has `job` done there, or here where there is no thread.
    fn run(&self, job: Job) {
        let jobs = self.jobs.get_or_init(|| {
            let (sender, jobs) = channel::<Job>();
            let run = move || jobs.into_iter().for_each(|job| job());
            spawn("kvdepot-opener", run).ok().map(|_thread| sender)
        });
        let Some(jobs) = jobs else {
            return job();
        };
        if let Err(left) = jobs.send(job) {
            left.0();
        }
    }

    /// Waits until so many more files may be open.
    fn wait_for(&self, files: usize) {
        loop {
            let first = {
                let mut open = self.open.lock();
                open.retain(|(_, batch)| !batch.is_done());
                let count: usize = open.iter().map(|(files, _)| files).sum();
                match count + files > OPEN_MAX {
                    true => open.pop_front(),
                    false => None,
                }
            };
            let Some((_, batch)) = first else { return };
            let _done = batch.wait(None);
        }
    }
}

impl Link {
    /// Moves blocks as the owner asks, and reports.
    pub(super) fn start_move(
        self: &Arc<Link>,
        number: u64,
        call: Arc<Call>,
        asked: &say::Move<'_>,
    ) -> Result<(), Error> {
        let block = |(row, file): (&MoveRow, Option<Outside>)| {
            let index = row.index.get() as usize;
            let Some(key) = call.keys.get(index).copied() else {
                return Err(Error::input(
                    "index",
                    index,
                    "the index of a key of the call",
                ));
            };
            let namespace = call.namespace;
            let place = row.place.of(Identity { namespace, key }, file.as_ref())?;
            Ok((index, place, file))
        };
        let blocks = asked.blocks.iter().zip(asked.files.each()).map(block);
        let blocks = blocks.collect::<Result<Vec<Errand>, _>>()?;
        {
            // Whoever ends the link sees this, or is seen here.
            let tasks = self.tasks.lock();
            if tasks.over {
                return Ok(());
            }
            *call.moving.lock() += 1;
        }
        let (link, task) = (Arc::clone(self), asked.task);
        let is_in_file = blocks.iter().any(|(_, _, file)| file.is_some());
        let run = move || link.run_move(number, task, call, blocks);
        match is_in_file {
            true => self.opener.run(Box::new(run)),
            false => run(),
        }
        Ok(())
    }

    fn run_move(self: &Arc<Link>, number: u64, task: u64, call: Arc<Call>, blocks: Vec<Errand>) {
        let files = blocks.iter().filter(|(_, _, file)| file.is_some()).count();
        if files > 0 {
            self.opener.wait_for(files);
        }
        let mut batch = self.mover.copier.batch();
        batch.of_call(Arc::as_ptr(&call).addr());
        if call.options.staged
            && let Err(error) = batch.stage()
        {
            // Cannot be: the call has made the slab. A direct copy is right as well.
            tracing::error!(%error,
                "internal error: cannot stage a get; copying without a staging buffer");
        }
        let bytes = match call.op {
            Op::Put => Bytes::New,
            Op::Get => Bytes::Verified,
        };
        let mut verdicts = Verdicts::new(bytes, blocks.len());
        let mut ends = Vec::new();
        for (tag, block) in blocks.iter().enumerate() {
            match self.plan((&mut batch, &mut ends), &call, block, tag as u32) {
                Ok(Outcome::Done) => verdicts.planned(tag, block.1.parts.into()),
                Ok(Outcome::Corrupt) => verdicts.corrupt(tag),
                Ok(_) => {}
                Err(error) => tracing::error!(%error,
                    "internal error: cannot plan the copy of a block; the block is not copied"),
            }
        }
        let link = Arc::clone(self);
        let done = move |done: &mut Done<'_>| {
            verdicts.count(done);
            let moved = verdicts.all();
            // After the bytes, before the report: the owner's step leaves these alone.
            if call.op == Op::Get {
                let here = blocks.iter().zip(&moved);
                let here = here.filter(|(_, moved)| matches!(moved, Moved::Done(_)));
                call.task
                    .settle(here.map(|((index, ..), _)| (*index, Outcome::Done)));
            }
            let report = say::Moved {
                moved: moved.iter().map(Into::into).collect(),
            };
            link.outbox
                .send(&link.socket, Out::new(&report).number(number));
            let last = {
                let mut moving = call.moving.lock();
                *moving -= 1;
                *moving == 0
            };
            if call.task.is_done() {
                link.tasks.lock().under_way.remove(&task);
            } else if last && link.tasks.lock().over {
                link.give_up(&call);
            }
        };
        let ticket = self.mover.copier.submit(batch, done);
        if files > 0 {
            self.opener.open.lock().push_back((files, ticket));
        }
    }

    fn plan(
        &self,
        (batch, buffers): (&mut Batch, &mut Vec<Buffer>),
        call: &Call,
        (index, place, file): &Errand,
        tag: u32,
    ) -> Result<Outcome, Error> {
        let access = match call.op {
            Op::Put => Access::Write,
            Op::Get => Access::Read,
        };
        let Some(reached) = self.mover.reach(place, file.as_ref(), access) else {
            return Ok(Outcome::Miss);
        };
        let (ends, index) = (reached.ends(), *index);
        if call.op == Op::Get {
            return plan(batch, (ends, buffers), place, &call.buffers, index, tag);
        }
        if place.len != call.buffers.bytes(index) {
            return Ok(Outcome::Length);
        }
        ends.buffers(place, 0, place.len, buffers)?;
        let id = parts::part_id(&place.identity, 0, 1);
        batch.part(&id, call.buffers.pieces(index), buffers, None, tag)?;
        Ok(Outcome::Done)
    }
}
