//! Tensors of pages: the first dimension counts them, and what one holds lies in one piece.

use pyo3::exceptions::PyBufferError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::errors;
use crate::memory::{Home, Place};
use crate::storage;
use crate::view::View;

/// Pages of one length, evenly spaced.
pub(crate) struct Pages {
    pub(crate) addr: usize,
    /// Bytes from each page to the next.
    pub(crate) stride: isize,
    /// Bytes of a page.
    pub(crate) len: usize,
    pub(crate) count: usize,
    pub(crate) writable: bool,
    pub(crate) home: Home,
    /// The memory that they must not leave.
    pub(crate) place: Place,
}

/// What is read of a tensor, or of an object with the buffer protocol.
struct Described {
    addr: usize,
    shape: Vec<usize>,
    /// In bytes.
    strides: Vec<isize>,
    item: usize,
    writable: bool,
    place: Place,
}

impl Pages {
    /// The pages of `object`; what keeps its memory is added to `kept`. `Err` carries the reason
    /// in words.
    pub(crate) fn of(
        object: &Bound<'_, PyAny>,
        kept: &mut Vec<Py<PyAny>>,
    ) -> Result<Pages, String> {
        let described = match storage::of(object) {
            Some(owner) => tensor(object, owner, kept),
            None => array(object, kept),
        };
        described
            .map_err(|error| error.value(object.py()).to_string())?
            .pages()
    }
}

/// A tensor of PyTorch, whatever its elements are.
fn tensor(
    object: &Bound<'_, PyAny>,
    owner: Bound<'_, PyAny>,
    kept: &mut Vec<Py<PyAny>>,
) -> PyResult<Described> {
    let py = object.py();
    let place = storage::place(&owner)?;
    let item: usize = object
        .call_method0(intern!(py, "element_size"))?
        .extract()?;
    let strides: Vec<isize> = object.call_method0(intern!(py, "stride"))?.extract()?;
    let in_bytes = |stride: isize| stride.saturating_mul(item.cast_signed());
    kept.push(owner.unbind());
    Ok(Described {
        addr: object.call_method0(intern!(py, "data_ptr"))?.extract()?,
        shape: object.getattr(intern!(py, "shape"))?.extract()?,
        strides: strides.into_iter().map(in_bytes).collect(),
        item,
        writable: true,
        place,
    })
}

fn array(object: &Bound<'_, PyAny>, kept: &mut Vec<Py<PyAny>>) -> PyResult<Described> {
    // Holds the exporter's memory in place, and is let go by dropping a reference.
    let memory = PyMemoryView::from(object)
        .map_err(|_| PyBufferError::new_err(format!("{} object", errors::kind(object))))?;
    let view = View::strided(&memory)?;
    let (shape, strides) = view.dimensions();
    kept.push(memory.into_any().unbind());
    Ok(Described {
        addr: view.addr(),
        shape,
        strides,
        item: view.item(),
        writable: view.is_writable(),
        place: view.extent(),
    })
}

impl Described {
    fn pages(self) -> Result<Pages, String> {
        let home = self.place.home;
        let home = home.ok_or("a tensor that is neither in host memory nor on a CUDA device")?;
        let (&[count, _, ..], &[stride, ..]) = (&*self.shape, &*self.strides) else {
            return Err(format!("a tensor of shape {:?}", self.shape));
        };
        let mut len = self.item;
        for (size, stride) in self.shape.iter().zip(&self.strides).skip(1).rev() {
            if *size > 1 && *stride != len.cast_signed() {
                return Err("a tensor whose pages have gaps or are not in row-major order".into());
            }
            len = len
                .checked_mul(*size)
                .ok_or("a tensor with invalid dimensions")?;
        }
        if len == 0 || count == 0 || self.addr == 0 {
            return Err(format!(
                "a tensor of shape {:?}, which is empty",
                self.shape
            ));
        }
        if count > 1 && stride.unsigned_abs() < len {
            return Err("a tensor whose pages overlap".into());
        }
        Ok(Pages {
            addr: self.addr,
            stride,
            len,
            count,
            writable: self.writable,
            home,
            place: self.place,
        })
    }
}
