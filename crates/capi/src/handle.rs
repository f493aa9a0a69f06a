//! Handles: what a program has between calls, and which process it is of.

use std::fmt;
use std::ops::Deref;

use kvdepot_store::Origin;

use crate::given::{Out, Place, Plain};
use crate::guard::Failure;

/// Something that a program has opened.
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

/// A handle as C passes it. Several threads may have one at a time.
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
    /// No handle.
    pub(crate) fn none() -> Ref<T> {
        Ref(std::ptr::null_mut())
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl<T: Send + Sync> Ref<T> {
    /// What is behind it, in the process that has opened it: a fork has a copy of its locks, which
    /// may be held for ever.
    pub(crate) fn get(&self, field: &str) -> Result<&T, Failure> {
        if self.0.is_null() {
            return Err(Failure::input(field, "NULL", "one that was opened"));
        }
        // SAFETY: not null, and the header asks for one that was opened here and is not closed
        // before the call ends. Handles are only read.
        let handle = unsafe { &*self.0 };
        match handle.origin.is_here() {
            true => Ok(&handle.inner),
            false => Err(Failure::forked()),
        }
    }

    /// Ends it; null is none. In a fork it stays: its memory goes with the process.
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

/// A place for a new handle, null until there is one.
pub type Made<T> = Out<Ref<T>>;

/// Such a place that was looked at.
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

/// A new handle.
fn made<T: Send + Sync>(inner: T, origin: Origin) -> Ref<T> {
    Ref(Box::into_raw(Box::new(Handle { inner, origin })))
}

impl<T: Send + Sync> Making<'_, T> {
    pub(crate) fn put(self, inner: T) {
        self.place.put(made(inner, self.origin));
    }
}

/// Handles for an array of places.
pub(crate) fn many<T: Send + Sync>(all: Vec<T>) -> Result<Vec<Ref<T>>, Failure> {
    let origin = Origin::here().map_err(kvdepot_store::Error::from)?;
    Ok(all.into_iter().map(|one| made(one, origin)).collect())
}
