//! Memory of objects with the buffer protocol, read without PyO3's own view of it, which refuses
//! an exporter without dimensions.

use pyo3::ffi;
use pyo3::prelude::*;

/// A contiguous range that an exporter keeps in place while this lives.
pub(crate) struct View(Box<ffi::Py_buffer>);

impl View {
    /// The memory of `object`; `None` where it has gaps.
    ///
    /// # Errors
    /// What the exporter raises, and TypeError for an object without the protocol.
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
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: `object` is one; `view` is writable, and stays where it is, as exporters may
        // have pointers into it. Nothing but the address, the length and whether it may be written
        // is read of it.
        let failed =
            unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_FULL_RO) };
        if failed != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let view = View(view);
        // SAFETY: the exporter has filled it in. `A` is either order of the dimensions.
        let whole = unsafe { ffi::PyBuffer_IsContiguous(&raw const *view.0, order.cast_signed()) };
        Ok((whole != 0).then_some(view))
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

impl Drop for View {
    fn drop(&mut self) {
        // A view is made and dropped inside a call, by a thread with the interpreter.
        Python::attach(|_| {
            // SAFETY: filled in by the exporter, and released once.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        });
    }
}
