//! Memory of objects with the buffer protocol, read without PyO3's own view of it, which refuses
//! an exporter without dimensions.

use std::ffi::CStr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::memory::{Home, Place};

/// A contiguous range that an exporter keeps in place while this lives.
pub(crate) struct View(Box<ffi::Py_buffer>);

impl View {
    /// The memory of `object`, which may have gaps.
    ///
    /// # Errors
    /// As [`View::of`], and BufferError for elements behind pointers.
    pub(crate) fn strided(object: &Bound<'_, PyAny>) -> PyResult<View> {
        let view = Self::filled(object)?;
        match view.0.suboffsets.is_null() {
            true => Ok(view),
            false => Err(PyBufferError::new_err("the elements are pointers")),
        }
    }

    /// The memory of `object`; `None` where it has gaps.
    ///
    /// # Errors
    /// What the exporter raises, TypeError for an object without the protocol, and BufferError for
    /// elements that are or have pointers: as bytes they are worth nothing elsewhere, and whoever
    /// follows what was written over one crashes.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
        Self::get(object, b'A')
    }

    /// As [`View::of`], where the order of the bytes is that of the elements: `None` also where
    /// columns come one after another.
    ///
    /// # Errors
    /// As [`View::of`].
    pub(crate) fn in_rows(object: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
        Self::get(object, b'C')
    }

    fn get(object: &Bound<'_, PyAny>, order: u8) -> PyResult<Option<View>> {
        let view = Self::filled(object)?;
        // SAFETY: the exporter has filled it in. `A` is either order of the dimensions.
        let whole = unsafe { ffi::PyBuffer_IsContiguous(&raw const *view.0, order.cast_signed()) };
        Ok((whole != 0).then_some(view))
    }

    fn filled(object: &Bound<'_, PyAny>) -> PyResult<View> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: `object` is one; `view` is writable, and stays where it is, as exporters may
        // have pointers into it. What is read of it is the exporter's until it is released.
        let failed =
            unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_FULL_RO) };
        if failed != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let view = View(view);
        if has_pointers(view.format()) {
            let format = String::from_utf8_lossy(view.format());
            let text = format!("elements that contain pointers (format {format})");
            return Err(PyBufferError::new_err(text));
        }
        Ok(view)
    }

    /// The elements, in the notation of Python's `struct` with the additions of PEP 3118.
    fn format(&self) -> &[u8] {
        match self.0.format.is_null() {
            true => b"B",
            // SAFETY: the exporter keeps the text there while the view is held.
            false => unsafe { CStr::from_ptr(self.0.format) }.to_bytes(),
        }
    }

    /// The address of the first byte.
    pub(crate) fn addr(&self) -> usize {
        self.0.buf.expose_provenance()
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        // Not negative in a buffer that an exporter has filled in.
        usize::try_from(self.0.len).unwrap_or(0)
    }

    /// Bytes of an element.
    pub(crate) fn item(&self) -> usize {
        usize::try_from(self.0.itemsize).unwrap_or(0)
    }

    /// Elements, and bytes from one to the next, in each dimension.
    pub(crate) fn dimensions(&self) -> (Vec<usize>, Vec<isize>) {
        let Ok(count @ 1..) = usize::try_from(self.0.ndim) else {
            return (Vec::new(), Vec::new());
        };
        // SAFETY: the exporter keeps `ndim` numbers at what is not null while the view is held.
        let numbers = |at: *const isize| unsafe { std::slice::from_raw_parts(at, count) };
        let size = |size: &isize| usize::try_from(*size).unwrap_or(0);
        let shape: Vec<usize> = match self.0.shape.is_null() {
            true => vec![self.len() / self.item().max(1)],
            false => numbers(self.0.shape).iter().map(size).collect(),
        };
        if !self.0.strides.is_null() {
            return (shape, numbers(self.0.strides).to_vec());
        }
        // Asked for them or not, ctypes has none: its elements lie side by side.
        let mut next = self.item().cast_signed();
        let mut strides = vec![0; shape.len()];
        for (stride, size) in strides.iter_mut().zip(&shape).rev() {
            *stride = next;
            next = next.saturating_mul(size.cast_signed());
        }
        (shape, strides)
    }

    /// From the first to the last byte of any element.
    pub(crate) fn extent(&self) -> Place {
        let (mut begin, mut end) = (self.addr(), self.addr().saturating_add(self.item()));
        let (shape, strides) = self.dimensions();
        for (size, stride) in shape.iter().zip(strides) {
            let far = stride.unsigned_abs().saturating_mul(size.saturating_sub(1));
            match stride < 0 {
                true => begin = begin.saturating_sub(far),
                false => end = end.saturating_add(far),
            }
        }
        if self.len() == 0 {
            end = begin;
        }
        let home = Some(Home::Processor);
        Place { begin, end, home }
    }

    /// Whether it may be written.
    pub(crate) fn is_writable(&self) -> bool {
        self.0.readonly == 0
    }

    /// A copy of the bytes.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        let len = self.len();
        let mut bytes = Vec::with_capacity(len);
        if len > 0 {
            // SAFETY: the exporter keeps `len` readable bytes there while the view is held;
            // `bytes` has room for them. They are copied raw: another thread may change them
            // meanwhile, and any byte is a valid u8.
            unsafe {
                std::ptr::copy_nonoverlapping(self.0.buf.cast::<u8>(), bytes.as_mut_ptr(), len);
                bytes.set_len(len);
            }
        }
        bytes
    }
}

/// Whether a format has Python objects, C pointers, functions or texts by pointer among its
/// elements.
fn has_pointers(format: &[u8]) -> bool {
    let mut codes = format.iter().copied();
    while let Some(code) = codes.next() {
        match code {
            // The name of a field, up to the next colon.
            b':' => while codes.next().is_some_and(|one| one != b':') {},
            b'O' | b'P' | b'&' | b'X' | b'z' => return true,
            // NumPy's complex numbers; alone, ctypes' pointer to wide characters.
            b'Z' if !matches!(codes.next(), Some(b'e' | b'f' | b'd' | b'g')) => return true,
            _ => {}
        }
    }
    false
}

impl Drop for View {
    fn drop(&mut self) {
        // A view is made and dropped inside a call, by a thread with the interpreter.
        Python::attach(|_| {
            // SAFETY: filled in by the exporter, and released once.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        });
    }
}
