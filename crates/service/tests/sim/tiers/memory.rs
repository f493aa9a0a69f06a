//! Where a tier's bytes lie: memory, or what only a carrier reaches.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvdepot_media::{Alignment, Buffer, Carrier, Op, Receipt};

/// The bytes of one block.
#[derive(Clone)]
pub enum Memory {
    Here(Buffer),
    Carried(Arc<Carried>),
}

/// Bytes that a carrier reaches. Each carry is a step of the schedule.
#[derive(Debug)]
pub struct Carried(Mutex<Vec<u8>>);

impl Memory {
    pub fn new(len: usize, carried: bool) -> Memory {
        match carried {
            true => Memory::Carried(Arc::new(Carried(Mutex::new(vec![0; len])))),
            false => Memory::Here(Buffer::from_vec(vec![0; len])),
        }
    }

    pub fn buffer(&self) -> Buffer {
        match self {
            Memory::Here(buffer) => buffer.clone(),
            Memory::Carried(bytes) => {
                let len = bytes.bytes().len();
                Buffer::carried(Arc::clone(bytes) as _, 0, len, true)
            }
        }
    }

    pub fn to_vec(&self) -> Vec<u8> {
        match self {
            Memory::Here(buffer) => buffer.to_vec(),
            Memory::Carried(bytes) => bytes.bytes().clone(),
        }
    }

    /// Turns a byte over.
    pub fn flip(&self, at: usize) {
        match self {
            Memory::Here(buffer) => {
                let byte = buffer.to_vec()[at] ^ 1;
                buffer.write_at(at, &[byte]).unwrap();
            }
            Memory::Carried(bytes) => bytes.bytes()[at] ^= 1,
        }
    }

    /// Whether they are the same bytes, not equal ones.
    pub fn is(&self, other: &Memory) -> bool {
        match (self, other) {
            (Memory::Here(one), Memory::Here(other)) => one.addr() == other.addr(),
            (Memory::Carried(one), Memory::Carried(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Carried {
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Carrier for Carried {
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        for mut receipt in receipts {
            let at = receipt.at() as usize;
            let len = {
                let mut bytes = self.bytes();
                let len = bytes.len().saturating_sub(at).min(receipt.len());
                let range = &mut bytes[at..at + len];
                match receipt.op() {
                    Op::Read => receipt.fill(0, range),
                    Op::Write => receipt.copy_to(0, range),
                }
                len
            };
            receipt.carried(len);
        }
    }
}
