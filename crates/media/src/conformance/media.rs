//! Media that exist wherever there is memory.

use super::{Medium, Room};
use crate::buffer::Buffer;
use crate::carrier::{Alignment, Carrier, Op, Receipt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

/// Memory of this process.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "there is nothing to it")]
pub struct InMemory;

impl Medium for InMemory {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn room(&self, len: usize) -> Room {
        let buffer = Buffer::from_vec(vec![0; len]);
        let (look, fill) = (buffer.clone(), buffer.clone());
        Room {
            buffer,
            look: Box::new(move || look.to_vec()),
            fill: Box::new(move |bytes| fill.write_at(0, bytes).unwrap()),
        }
    }
}

/// Bytes that only a carrier reaches, which carries at once.
#[derive(Debug)]
pub struct Store {
    bytes: Mutex<Vec<u8>>,
    alignment: Alignment,
}

impl Store {
    /// An empty one.
    #[must_use]
    pub fn new(alignment: Alignment) -> Arc<Self> {
        let bytes = Mutex::default();
        Arc::new(Self { bytes, alignment })
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn perform(&self, mut receipt: Receipt) {
        let (mut bytes, len) = (self.bytes(), receipt.len());
        let Alignment { at, memory } = self.alignment;
        let place = receipt.memory().addr();
        assert!(
            (receipt.at() | len as u64).is_multiple_of(at),
            "{receipt:?}"
        );
        assert!(place.is_multiple_of(memory.unwrap_or(1)), "{receipt:?}");
        let begin = receipt.at() as usize;
        let there = bytes.len().saturating_sub(begin).min(len);
        let part = &mut bytes[begin..begin + there];
        match receipt.op() {
            Op::Read => receipt.fill(0, part),
            Op::Write => receipt.copy_to(0, part),
        }
        drop(bytes);
        receipt.carried(there);
    }

    fn room(self: &Arc<Self>, carrier: Arc<dyn Carrier>, len: usize) -> Room {
        let begin = {
            let mut bytes = self.bytes();
            let begin = bytes.len().next_multiple_of(4096);
            bytes.resize((begin + len).next_multiple_of(4096), 0);
            begin
        };
        let (look, fill) = (Arc::clone(self), Arc::clone(self));
        Room {
            buffer: Buffer::carried(carrier, begin, len, true),
            look: Box::new(move || look.bytes()[begin..begin + len].to_vec()),
            fill: Box::new(move |bytes| {
                fill.bytes()[begin..begin + len].copy_from_slice(bytes);
            }),
        }
    }
}

impl Carrier for Store {
    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        for receipt in receipts {
            self.perform(receipt);
        }
    }
}

impl Medium for Arc<Store> {
    fn name(&self) -> String {
        format!("a store of {:?}", self.alignment)
    }

    fn alignment(&self) -> usize {
        self.alignment.at as usize
    }

    fn room(&self, len: usize) -> Room {
        Store::room(self, Arc::clone(self) as Arc<dyn Carrier>, len)
    }
}

/// A store that carries late, on a thread of its own, and in no order.
#[derive(Debug)]
pub struct Late {
    store: Arc<Store>,
    asked: Mutex<mpsc::Sender<Receipt>>,
}

impl Late {
    /// An empty one; `seed` gives the order.
    #[must_use]
    pub fn new(alignment: Alignment, seed: u64) -> Arc<Self> {
        let store = Store::new(alignment);
        let (sender, receiver) = mpsc::channel();
        let late = Arc::clone(&store);
        // It ends with the last sender.
        std::thread::spawn(move || answer(&late, &receiver, seed));
        Arc::new(Self {
            store,
            asked: Mutex::new(sender),
        })
    }
}

/// Answers in an order that `seed` gives, once several wait or no more come.
fn answer(store: &Store, asked: &mpsc::Receiver<Receipt>, mut seed: u64) {
    const PILE: usize = 4;
    const QUIET: Duration = Duration::from_micros(300);
    let mut pile = Vec::new();
    loop {
        let next = match pile.is_empty() {
            true => asked
                .recv()
                .map_err(|_| mpsc::RecvTimeoutError::Disconnected),
            false => asked.recv_timeout(QUIET),
        };
        let is_late = match next {
            Ok(receipt) => {
                pile.push(receipt);
                pile.len() > PILE
            }
            Err(mpsc::RecvTimeoutError::Timeout) => true,
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        };
        if is_late {
            seed = seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            store.perform(pile.swap_remove((seed >> 33) as usize % pile.len()));
        }
    }
    for receipt in pile.into_iter().rev() {
        store.perform(receipt);
    }
}

impl Carrier for Late {
    fn alignment(&self) -> Alignment {
        self.store.alignment
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        for receipt in receipts {
            // Its thread lives as long as this, so nothing comes back.
            drop(asked.send(receipt));
        }
    }
}

impl Medium for Arc<Late> {
    fn name(&self) -> String {
        format!("a late {}", Medium::name(&self.store))
    }

    fn alignment(&self) -> usize {
        Medium::alignment(&self.store)
    }

    fn room(&self, len: usize) -> Room {
        self.store.room(Arc::clone(self) as Arc<dyn Carrier>, len)
    }
}
