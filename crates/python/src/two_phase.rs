//! Pins and reservations as Python holds them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_store::{Namespace, Pin as StorePin, Reservation as StoreReservation};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::handle::Handle;

/// A published block that stays in place until it is unpinned or this object is dropped.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Pin {
    pin: StorePin,
    namespace: Namespace,
    pub(crate) handle: Arc<Handle>,
    ended: AtomicBool,
}

impl Pin {
    pub(crate) fn new(pin: StorePin, namespace: Namespace, handle: Arc<Handle>) -> Pin {
        let ended = AtomicBool::new(false);
        Pin {
            pin,
            namespace,
            handle,
            ended,
        }
    }

    /// The pin, if it was not ended before; it is from now on.
    pub(crate) fn end(&self) -> Option<StorePin> {
        (!self.ended.swap(true, Ordering::AcqRel)).then(|| self.pin.clone())
    }

    /// The pin, if it was not ended.
    pub(crate) fn live(&self) -> Option<StorePin> {
        (!self.ended.load(Ordering::Acquire)).then(|| self.pin.clone())
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // A forked child has copies of the pins, but they are the parent's to end.
        if let Some(pin) = self.end()
            && !self.handle.forked()
        {
            self.namespace.unpin(&[pin], false);
        }
    }
}

#[pymethods]
impl Pin {
    /// Location of the block, for `Mover.load` and `Mover.verify`.
    ///
    /// Opaque bytes, valid until the pin ends.
    #[getter]
    fn placement<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.pin.placement())
    }

    /// Name of the tier that has the block.
    #[getter]
    fn tier(&self) -> &'static str {
        self.pin.tier()
    }

    /// The 32-byte key of the block.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.pin.key().0)
    }

    /// Size of the block in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.pin.bytes()
    }

    fn __repr__(&self) -> String {
        let ended = if self.ended.load(Ordering::Acquire) {
            ", ended"
        } else {
            ""
        };
        let (key, tier) = (self.pin.key(), self.pin.tier());
        format!("<kvdepot.Pin of {key} in {tier}{ended}>")
    }
}

/// Space for a block that becomes visible with its commit.
///
/// After `placement` was read, only `commit` or `abort` ends the reservation, because a mover may
/// still write. Otherwise it also ends when this object is dropped.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Reservation {
    reservation: StoreReservation,
    length: u64,
    namespace: Namespace,
    pub(crate) handle: Arc<Handle>,
    ended: AtomicBool,
    /// Somebody may have the placement.
    known: AtomicBool,
}

impl Reservation {
    pub(crate) fn new(
        reservation: StoreReservation,
        length: u64,
        namespace: Namespace,
        handle: Arc<Handle>,
    ) -> Reservation {
        Reservation {
            reservation,
            length,
            namespace,
            handle,
            ended: AtomicBool::new(false),
            known: AtomicBool::new(false),
        }
    }

    /// The reservation, if it was not ended before; it is from now on.
    pub(crate) fn end(&self) -> Option<StoreReservation> {
        (!self.ended.swap(true, Ordering::AcqRel)).then(|| self.reservation.clone())
    }

    /// Takes back [`Reservation::end`], of a call that failed: what became of it is not known, and
    /// ending it again does no harm.
    pub(crate) fn end_again(&self) {
        self.ended.store(false, Ordering::Release);
    }

    pub(crate) fn part_count(&self) -> usize {
        self.reservation.parts()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // As for a pin. One that a signal took away from its caller ends here too.
        if !*self.known.get_mut()
            && let Some(reservation) = self.end()
            && !self.handle.forked()
        {
            let namespace = &self.namespace;
            let abort = || namespace.abort(&[reservation]);
            // A call that was waiting for this block may go on here.
            Python::try_attach(|py| py.detach(abort));
        }
    }
}

#[pymethods]
impl Reservation {
    /// Location of the block, for `Mover.store` and `Mover.digest`.
    ///
    /// Opaque bytes, valid until commit or abort.
    #[getter]
    fn placement<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        self.known.store(true, Ordering::Release);
        PyBytes::new(py, &self.reservation.placement())
    }

    /// The 32-byte key of the block.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.reservation.key().0)
    }

    /// Size of the block in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.length
    }

    /// Number of parts: the number of checksums that `commit` requires.
    #[getter]
    fn parts(&self) -> usize {
        self.part_count()
    }

    fn __repr__(&self) -> String {
        let key = self.reservation.key();
        format!("<kvdepot.Reservation of {key}, {} bytes>", self.length)
    }
}
