//! Arguments from C: strings, arrays, structs, and result pointers.
//!
//! Each type is a pointer as C passes it, with a private field. Only C callers make one, by the
//! contract of the header. Therefore the rest of this crate can read it with safe functions.

use std::ffi::{CStr, CString, c_char};
use std::marker::PhantomData;
use std::slice;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::guard::Failure;

/// No limit, no value, or unknown (`KVD_NONE`); never a valid number of the interface.
pub const NONE: u64 = u64::MAX;

/// A type for which all bit patterns are valid values.
///
/// # Safety
/// Implement it only for integers, raw pointers, and structs of them whose padding is not read.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty),*) => {$(
        // SAFETY: integers, and arrays of them.
        unsafe impl Plain for $type {}
    )*};
}

plain!(u8, i8, u32, u64, usize, [u8; 16], [u8; 32]);

// SAFETY: a pointer.
unsafe impl<T> Plain for *const T {}

/// A struct to which later versions may add fields. Its first field is the size in bytes that the
/// caller knows.
///
/// # Safety
/// The type is `repr(C)`, and its first field is a `usize`.
pub unsafe trait Growing: Plain {
    /// Size of the first version in bytes.
    const FIRST: usize;
}

/// Returns the error of a null or unaligned pointer.
fn refused<T>(field: &str, at: *const T) -> Option<Failure> {
    if at.is_null() {
        return Some(Failure::input(field, "NULL", "a pointer that is not NULL"));
    }
    let unaligned = || {
        let allowed = format!("an address that is a multiple of {}", align_of::<T>());
        Failure::input(field, format!("{at:p}"), allowed)
    };
    (!at.is_aligned()).then(unaligned)
}

/// A string that ends with a zero byte.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Text(*const c_char);

// SAFETY: a pointer.
unsafe impl Plain for Text {}

impl Text {
    /// Returns the string, which must be UTF-8.
    pub(crate) fn read(&self, field: &str) -> Result<&str, Failure> {
        self.maybe(field)?
            .ok_or_else(|| Failure::input(field, "NULL", "a string"))
    }

    /// Returns the string, or `None` for a null pointer.
    pub(crate) fn maybe(&self, field: &str) -> Result<Option<&str>, Failure> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY: it is not null, as was just looked at; the header asks for a zero at its end, and
        // that nobody changes it during the call, and `self` does not outlive that.
        let bytes = unsafe { CStr::from_ptr(self.0) };
        let text = bytes.to_str().map_err(|_| {
            let value = bytes.to_string_lossy();
            Failure::input(field, format!("{value:?}"), "a string in UTF-8")
        });
        text.map(Some)
    }
}

/// A pointer to one value, or to the first element of an array, that kvdepot reads.
#[derive(Debug)]
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> In<T> {
        *self
    }
}

impl<T> Copy for In<T> {}

// SAFETY: a pointer.
unsafe impl<T> Plain for In<T> {}

impl<T: Plain> In<T> {
    /// Returns true for a null pointer.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Returns the array of `len` elements.
    pub(crate) fn slice(&self, field: &str, len: usize) -> Result<&[T], Failure> {
        if len == 0 {
            return Ok(&[]);
        }
        if let Some(failure) = refused(field, self.0) {
            return Err(failure);
        }
        fits::<T>(field, len)?;
        // SAFETY: not null and aligned (`refused`), no longer than memory (`fits`); the header asks
        // that so many are there and that nobody changes them during the call; any bits are one.
        Ok(unsafe { slice::from_raw_parts(self.0, len) })
    }
}

impl<T: Growing> In<T> {
    /// Reads a struct of this or another version. Fields that the caller does not know are zero,
    /// and fields that this library does not know must be zero.
    pub(crate) fn read(&self, field: &str) -> Result<T, Failure> {
        if let Some(failure) = refused(field, self.0) {
            return Err(failure);
        }
        // SAFETY: not null and aligned (`refused`), and the first field of every version is its
        // size (`Growing`), which is there.
        let size = unsafe { self.0.cast::<usize>().read() };
        size_is_one::<T>(field, size)?;
        // SAFETY: the caller says that so many bytes are there; bytes have no alignment.
        let bytes = unsafe { slice::from_raw_parts(self.0.cast::<u8>(), size) };
        let known = size.min(size_of::<T>());
        if bytes[known..].iter().any(|byte| *byte != 0) {
            let allowed = format!("zeros after the {known} bytes that this library knows");
            return Err(Failure::input(field, "fields of a later version", allowed));
        }
        let mut read = std::mem::MaybeUninit::<T>::zeroed();
        // SAFETY: `known` bytes are in both, which do not overlap; any bits are a value (`Plain`),
        // the zeros behind them too.
        Ok(unsafe {
            read.as_mut_ptr()
                .cast::<u8>()
                .copy_from_nonoverlapping(self.0.cast(), known);
            read.assume_init()
        })
    }
}

/// Rejects a length beyond the address space.
fn fits<T>(field: &str, len: usize) -> Result<(), Failure> {
    let bytes = len.checked_mul(size_of::<T>());
    match bytes.filter(|bytes| isize::try_from(*bytes).is_ok()) {
        Some(_) => Ok(()),
        None => {
            let allowed = format!("at most {}", isize::MAX as usize / size_of::<T>().max(1));
            Err(Failure::input(format!("{field}_len"), len, allowed))
        }
    }
}

/// Largest size of a struct of any version, in bytes; a larger one was not initialized.
const STRUCT_MAX: usize = 4096;

fn size_is_one<T: Growing>(field: &str, size: usize) -> Result<(), Failure> {
    match (T::FIRST..=STRUCT_MAX).contains(&size) {
        true => Ok(()),
        false => {
            let allowed = format!("the sizeof of the struct, {} or more", T::FIRST);
            Err(Failure::input(
                format!("{field}.struct_size"),
                size,
                allowed,
            ))
        }
    }
}

/// A pointer to a result, or to the first element of an array, that kvdepot writes.
#[derive(Debug)]
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Out<T> {
        *self
    }
}

impl<T> Copy for Out<T> {}

/// A result pointer that was checked.
#[derive(Debug)]
pub(crate) struct Place<'a, T>(*mut T, PhantomData<&'a mut T>);

impl<T: Plain> Out<T> {
    /// Checks the pointer, before the call does anything, so that no result is lost.
    pub(crate) fn place(&self, field: &str) -> Result<Place<'_, T>, Failure> {
        match refused(field, self.0) {
            None => Ok(Place(self.0, PhantomData)),
            Some(failure) => Err(failure),
        }
    }

    /// Checks an optional pointer: `None` for null.
    pub(crate) fn wanted(&self, field: &str) -> Result<Option<Place<'_, T>>, Failure> {
        match self.0.is_null() {
            true => Ok(None),
            false => self.place(field).map(Some),
        }
    }

    /// Checks the pointer of an array with `len` elements, before the call does anything.
    pub(crate) fn room(&self, field: &str, len: usize) -> Result<(), Failure> {
        match len {
            0 => Ok(()),
            _ => self.place(field).map(drop),
        }
    }

    /// Copies `values` into an array of `len` elements.
    pub(crate) fn fill(&self, field: &str, len: usize, values: &[T]) -> Result<(), Failure> {
        if values.len() > len {
            let allowed = format!("at least {}", values.len());
            return Err(Failure::input(format!("{field}_len"), len, allowed));
        }
        if values.is_empty() {
            return Ok(());
        }
        if let Some(failure) = refused(field, self.0) {
            return Err(failure);
        }
        // SAFETY: not null and aligned (`refused`); the header asks for room for `len`, of which
        // there are as many as values; the caller's array is not one of ours.
        unsafe {
            self.0
                .copy_from_nonoverlapping(values.as_ptr(), values.len())
        };
        Ok(())
    }
}

impl Out<u8> {
    /// Returns the array of `len` bytes, to be written in place.
    #[expect(
        clippy::mut_from_ref,
        reason = "it is the caller's memory, not this pointer's"
    )]
    pub(crate) fn bytes(&self, field: &str, len: usize) -> Result<&mut [u8], Failure> {
        if len == 0 {
            return Ok(&mut []);
        }
        if let Some(failure) = refused(field, self.0) {
            return Err(failure);
        }
        fits::<u8>(field, len)?;
        // SAFETY: not null (`refused`), no longer than memory (`fits`); the header asks that so
        // many are there, and that they are nobody else's, no other argument's either, during the
        // call.
        Ok(unsafe { slice::from_raw_parts_mut(self.0, len) })
    }
}

impl<T: Plain> Place<'_, T> {
    pub(crate) fn put(self, value: T) {
        // SAFETY: `place` has refused null and unaligned ones, and the header asks for room for
        // one.
        unsafe { self.0.write(value) };
    }
}

/// A checked result pointer to a struct that may grow.
#[derive(Debug)]
pub(crate) struct SizedPlace<'a, T> {
    at: *mut T,
    size: usize,
    _call: PhantomData<&'a mut T>,
}

impl<T: Growing> Out<T> {
    /// Checks the pointer and the size that the caller has set, before the call does anything.
    pub(crate) fn sized(&self, field: &str) -> Result<SizedPlace<'_, T>, Failure> {
        let place = self.place(field)?;
        // SAFETY: not null and aligned (`place`), and the first field of every version is its size
        // (`Growing`), which the header asks to be set.
        let size = unsafe { place.0.cast::<usize>().read() };
        size_is_one::<T>(field, size)?;
        Ok(SizedPlace {
            at: place.0,
            size,
            _call: PhantomData,
        })
    }
}

impl<T: Growing> SizedPlace<'_, T> {
    /// Writes the fields that both versions know, and zeros after them. The size stays as it is.
    pub(crate) fn put(self, value: &T) {
        let (head, known) = (size_of::<usize>(), self.size.min(size_of::<T>()));
        let (from, to) = ((&raw const *value).cast::<u8>(), self.at.cast::<u8>());
        // SAFETY: the caller says that `size` bytes are there, of which `known` are in a value too,
        // and no version is shorter than its size (`size_is_one`).
        unsafe {
            to.add(head)
                .copy_from_nonoverlapping(from.add(head), known - head);
            to.add(known).write_bytes(0, self.size - known);
        }
    }
}

/// A string for the caller, who frees it with `kvd_string_free`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Given(*mut c_char);

// SAFETY: a pointer.
unsafe impl Plain for Given {}

impl Given {
    pub(crate) fn new(text: &str) -> Given {
        Given(
            CString::new(text.replace('\0', "?"))
                .unwrap_or_default()
                .into_raw(),
        )
    }
}

/// Implements `kvd_string_free`.
// SAFETY: the prefix is kvdepot's, and the header declares each name once.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_string_free(text: Given) {
    if !text.0.is_null() {
        // SAFETY: not null, and the header asks for one that `Given::new` has made, once.
        drop(unsafe { CString::from_raw(text.0) });
    }
}

/// Converts a duration in milliseconds; `KVD_NONE` is `None`, without a limit.
pub(crate) fn span(milliseconds: u64) -> Option<Duration> {
    (milliseconds != NONE).then(|| Duration::from_millis(milliseconds))
}

/// Converts a time in milliseconds since 1970; 0 is now.
pub(crate) fn moment(milliseconds: u64) -> Duration {
    match milliseconds {
        0 => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
        given => Duration::from_millis(given),
    }
}

/// Converts a number; `KVD_NONE` is `None`.
pub(crate) fn maybe(number: u64) -> Option<u64> {
    (number != NONE).then_some(number)
}

/// Converts a flag, 0 or 1.
pub(crate) fn flag(field: &str, number: u32) -> Result<bool, Failure> {
    match number {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::input(field, other, "0 or 1")),
    }
}
