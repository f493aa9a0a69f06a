//! Blocks that a client's lanes move: what is under way, and what ends it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_arena::verdict::Moved;
use kvdepot_store::{Errand, Lanes, MovesDone};

use super::Session;
use crate::frame::Out;
use crate::frame::rows::{Files, MoveRow};
use crate::frame::verbs as say;

/// Blocks that a client's lanes are moving: how many, and what follows.
pub(super) type Moving = (usize, MovesDone);

#[derive(Default)]
pub(super) struct Moves {
    /// By number.
    pub(super) waiting: HashMap<u64, Moving>,
    /// Those of the sessions that this process had before: its lanes may still be at them, until
    /// it says that they have stopped.
    pub(super) former: Vec<Moving>,
    /// Nobody hears of new ones: they fail at once.
    pub(super) broken: bool,
    pub(super) over: bool,
}

impl Session {
    /// The client's lanes have stopped.
    pub(super) fn finish(&self, number: u64, moved: &[Moved]) {
        let Some((count, done)) = self.moves.lock().waiting.remove(&number) else {
            return;
        };
        if moved.len() == count {
            done(moved);
        } else {
            done(&vec![Moved::Failed; count]);
        }
        self.moved.notify_all();
    }

    pub(super) fn end_moves(&self, moved: Moved) {
        for (count, done) in self.take_moves() {
            done(&vec![moved; count]);
        }
        self.moved.notify_all();
    }

    /// All that are under way; no other is begun.
    pub(super) fn take_moves(&self) -> Vec<Moving> {
        let mut moves = self.moves.lock();
        moves.over = true;
        let waiting = std::mem::take(&mut moves.waiting).into_values();
        let former = std::mem::take(&mut moves.former);
        waiting.chain(former).collect()
    }
}

/// Ends moves that have not been, or of which nothing is known.
pub(super) fn fail(count: usize, done: MovesDone) {
    done(&vec![Moved::Failed; count]);
}

/// The lanes of one task's client.
pub(super) struct ClientLanes {
    pub(super) session: Arc<Session>,
    pub(super) task: u64,
}

impl Lanes for ClientLanes {
    fn move_blocks(&self, blocks: &[Errand], done: MovesDone) {
        let session = &self.session;
        let number = session.next_move.fetch_add(1, Ordering::Relaxed);
        {
            let mut moves = session.moves.lock();
            if moves.over || moves.broken {
                drop(moves);
                return fail(blocks.len(), done);
            }
            moves.waiting.insert(number, (blocks.len(), done));
        }
        let row = |(index, place, _): &Errand| MoveRow {
            index: (*index as u32).into(),
            place: place.into(),
        };
        let call = say::Move {
            task: self.task,
            blocks: blocks.iter().map(row).collect(),
            files: Files::of(blocks.iter().map(|(_, _, file)| file.clone())),
        };
        session.send(Out::new(&call).number(number));
    }
}
