//! Handles: the objects that a program keeps between calls, each with the process that opened it.

use std::fmt;
use std::ops::Deref;

use kvdepot_store::Origin;

use crate::given::{Out, Place, Plain};
use crate::guard::Failure;

/// An object that a program has opened.
pub struct Handle<T> {
    inner: T,
    origin: Origin,
}

impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Handle")
    }
}

impl<T> Deref for Handle<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

/// A handle as C passes it. Several threads may use one at the same time.
#[repr(transparent)]
pub struct Ref<T>(*mut Handle<T>);

impl<T> fmt::Debug for Ref<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Ref({:p})", self.0)
    }
}

impl<T> Clone for Ref<T> {
    fn clone(&self) -> Ref<T> {
        *self
    }
}

impl<T> Copy for Ref<T> {}

// SAFETY: a pointer.
unsafe impl<T> Plain for Ref<T> {}

impl<T> Ref<T> {
    /// Returns a null handle.
    pub(crate) fn none() -> Ref<T> {
        Ref(std::ptr::null_mut())
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl<T: Send + Sync> Ref<T> {
    /// Returns the object in the process that opened it. A forked process is rejected: its copies
    /// of locks may be held forever.
    pub(crate) fn get(&self, field: &str) -> Result<&T, Failure> {
        if self.0.is_null() {
            return Err(Failure::input(field, "NULL", "an open handle"));
        }
        // SAFETY: not null, and the header asks for one that was opened here and is not closed
        // before the call ends. Handles are only read.
        let handle = unsafe { &*self.0 };
        match handle.origin.is_here() {
            true => Ok(&handle.inner),
            false => Err(Failure::forked()),
        }
    }

    /// Ends the handle and returns its object; `None` for null, and in a forked process, where the
    /// memory is freed with the process.
    pub(crate) fn end(self) -> Option<T> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null, and the header asks for one that was opened here and that nobody uses.
        let is_here = unsafe { (*self.0).origin.is_here() };
        // SAFETY: as above, once; `Made::put` has made it of a box.
        is_here.then(|| unsafe { Box::from_raw(self.0) }.inner)
    }
}

/// A result pointer to a new handle; null until the handle exists.
pub type Made<T> = Out<Ref<T>>;

/// A checked result pointer to a new handle.
#[derive(Debug)]
pub(crate) struct Making<'a, T> {
    place: Place<'a, Ref<T>>,
    origin: Origin,
}

impl<T> Made<T> {
    pub(crate) fn making(&self, field: &str) -> Result<Making<'_, T>, Failure> {
        self.place(field)?.put(Ref::none());
        Ok(Making {
            place: self.place(field)?,
            origin: Origin::here().map_err(kvdepot_store::Error::from)?,
        })
    }
}

/// Creates a handle.
fn made<T: Send + Sync>(inner: T, origin: Origin) -> Ref<T> {
    Ref(Box::into_raw(Box::new(Handle { inner, origin })))
}

impl<T: Send + Sync> Making<'_, T> {
    pub(crate) fn put(self, inner: T) {
        self.place.put(made(inner, self.origin));
    }
}

/// Creates handles for an array.
pub(crate) fn many<T: Send + Sync>(all: Vec<T>) -> Result<Vec<Ref<T>>, Failure> {
    let origin = Origin::here().map_err(kvdepot_store::Error::from)?;
    Ok(all.into_iter().map(|one| made(one, origin)).collect())
}
