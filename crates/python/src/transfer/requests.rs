//! Requests of a batch: tuples one by one, or columns without a loop in Python.

use std::collections::HashMap;
use std::sync::Arc;

use kvdepot_store::config::nearest;
use kvdepot_transfer::{Op, REQUESTS_MAX, Remote, Request};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyString, PyTuple};

use super::held;
use super::shared::Shared;
use crate::errors;
use crate::view::View;

/// The columns, in the order of a tuple.
const COLUMNS: [&str; 5] = ["op", "local", "remote", "offset", "length"];

const ROW: &str = "a tuple (op, local, remote, offset, length)";

const NUMBERS: &str = "a whole number, 0 to 2^64 - 1, or one per request: a sequence, or an array \
                       or other buffer of 64-bit integers in native byte order";

const OPS: &str = "\"read\" or \"write\"";

/// One value for all requests, or one for each.
enum Column<T> {
    Same(T),
    Each(Vec<T>),
}

impl<T: Copy> Column<T> {
    fn at(&self, index: usize) -> T {
        match self {
            Column::Same(value) => *value,
            Column::Each(values) => values[index],
        }
    }

    fn len(&self) -> Option<usize> {
        match self {
            Column::Same(_) => None,
            Column::Each(values) => Some(values.len()),
        }
    }
}

/// Requests as they were given.
pub(super) struct Requests {
    op: Column<Op>,
    local: Column<u64>,
    /// By their positions in `remotes`.
    remote: Column<usize>,
    offset: Column<u64>,
    length: Column<u64>,
    remotes: Vec<Remote>,
    count: usize,
}

impl Requests {
    /// Of one sequence of tuples, or of columns by their names.
    pub(super) fn read(
        py: Python<'_>,
        shared: &Arc<Shared>,
        rows: Option<&Bound<'_, PyAny>>,
        columns: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Requests> {
        let columns = columns.filter(|columns| !columns.is_empty());
        match (rows, columns) {
            (Some(rows), None) => of_rows(py, shared, rows),
            (None, Some(columns)) => of_columns(py, shared, columns),
            (None, None) => {
                let allowed = "a sequence of tuples, or one keyword argument per column";
                Err(errors::input(py, "requests", "None", allowed))
            }
            (Some(_), Some(columns)) => {
                let names = errors::shown(columns.keys().as_any());
                let value = format!("both a sequence and the columns {names}");
                Err(errors::input(py, "requests", value, "only one of them"))
            }
        }
    }

    /// For an engine.
    pub(super) fn all(&self) -> impl ExactSizeIterator<Item = Request<'_>> + Send {
        (0..self.count).map(|index| Request {
            op: self.op.at(index),
            local: self.local.at(index),
            remote: &self.remotes[self.remote.at(index)],
            offset: self.offset.at(index),
            len: self.length.at(index),
        })
    }
}

/// Remotes that were given, each once.
struct Remotes<'a, 'py> {
    py: Python<'py>,
    shared: &'a Arc<Shared>,
    /// Positions in `all` by the addresses of objects, which `given` keeps.
    known: HashMap<usize, usize>,
    given: Vec<Bound<'py, PyAny>>,
    all: Vec<Remote>,
}

impl<'a, 'py> Remotes<'a, 'py> {
    fn new(py: Python<'py>, shared: &'a Arc<Shared>) -> Remotes<'a, 'py> {
        Remotes {
            py,
            shared,
            known: HashMap::new(),
            given: Vec::new(),
            all: Vec::new(),
        }
    }

    fn number(&mut self, given: &Bound<'py, PyAny>, field: &dyn Fn() -> String) -> PyResult<usize> {
        let at = given.as_ptr() as usize;
        if let Some(number) = self.known.get(&at) {
            return Ok(*number);
        }
        let Ok(remote) = given.cast::<held::Remote>() else {
            let shown = errors::shown(given);
            return Err(errors::input(
                self.py,
                field(),
                shown,
                "a Remote, as `open` returns it",
            ));
        };
        self.all.push(remote.get().of(self.py, self.shared, field)?);
        self.given.push(given.clone());
        self.known.insert(at, self.given.len() - 1);
        Ok(self.given.len() - 1)
    }
}

fn too_many(py: Python<'_>, count: usize) -> PyErr {
    errors::input(py, "requests", count, format!("at most {REQUESTS_MAX}"))
}

fn of_rows(py: Python<'_>, shared: &Arc<Shared>, rows: &Bound<'_, PyAny>) -> PyResult<Requests> {
    let mut remotes = Remotes::new(py, shared);
    let (mut op, mut local, mut remote) = (Vec::new(), Vec::new(), Vec::new());
    let (mut offset, mut length) = (Vec::new(), Vec::new());
    let items = rows.try_iter().map_err(|_| {
        let allowed = "a sequence of tuples (op, local, remote, offset, length)";
        errors::input(py, "requests", errors::shown(rows), allowed)
    })?;
    for (index, row) in items.enumerate() {
        let row = row?;
        if index >= REQUESTS_MAX {
            return Err(too_many(py, index + 1));
        }
        let parts = row.cast::<PyTuple>().ok().filter(|row| row.len() == 5);
        let Some(parts) = parts else {
            let field = format!("requests[{index}]");
            return Err(errors::input(py, field, errors::shown(&row), ROW));
        };
        let named = |name: &str| format!("requests[{index}].{name}");
        let part = |at| parts.get_item(at);
        op.push(one_op(&part(0)?, &|| named("op"))?);
        length.push(number(&part(4)?, &|| named("length"))?);
        local.push(address(&part(1)?, length[index], &|| named("local"))?);
        remote.push(remotes.number(&part(2)?, &|| named("remote"))?);
        offset.push(number(&part(3)?, &|| named("offset"))?);
    }
    Ok(Requests {
        count: op.len(),
        op: Column::Each(op),
        local: Column::Each(local),
        remote: Column::Each(remote),
        offset: Column::Each(offset),
        length: Column::Each(length),
        remotes: remotes.all,
    })
}

fn one_op(given: &Bound<'_, PyAny>, field: &dyn Fn() -> String) -> PyResult<Op> {
    let text = given.cast::<PyString>().ok();
    match text.and_then(|text| text.to_str().ok()) {
        Some("read") => Ok(Op::Read),
        Some("write") => Ok(Op::Write),
        _ => Err(errors::input(
            given.py(),
            field(),
            errors::shown(given),
            OPS,
        )),
    }
}

fn number(given: &Bound<'_, PyAny>, field: &dyn Fn() -> String) -> PyResult<u64> {
    given.extract().map_err(|_| {
        let allowed = "a whole number, 0 to 2^64 - 1";
        errors::input(given.py(), field(), errors::shown(given), allowed)
    })
}

/// An address, or that of an object that has so many bytes.
fn address(given: &Bound<'_, PyAny>, length: u64, field: &dyn Fn() -> String) -> PyResult<u64> {
    if given.is_instance_of::<PyInt>() {
        return number(given, field);
    }
    let refuse = |value: String| {
        let allowed = "an address, or an object with the buffer protocol of `length` bytes or more";
        errors::input(given.py(), field(), value, allowed)
    };
    match View::of(given) {
        Ok(Some(view)) if view.len() as u64 >= length => Ok(view.addr() as u64),
        Ok(Some(view)) => Err(refuse(format!("a buffer of {} bytes", view.len()))),
        Ok(None) => Err(refuse("a buffer with gaps".to_owned())),
        // Such as an integer of NumPy's in an object array.
        Err(_) => given.extract().map_err(|_| refuse(errors::shown(given))),
    }
}

fn of_columns(
    py: Python<'_>,
    shared: &Arc<Shared>,
    columns: &Bound<'_, PyDict>,
) -> PyResult<Requests> {
    for name in columns.keys() {
        let name: String = name.extract()?;
        if !COLUMNS.contains(&&*name) {
            let near = nearest(COLUMNS.into_iter(), &name);
            let near = near.map_or(String::new(), |(near, _)| {
                format!("; did you mean {near:?}?")
            });
            let allowed = format!("one of {}{near}", COLUMNS.join(", "));
            return Err(errors::input(py, name, "an unknown column", allowed));
        }
    }
    let given = |name: &str| {
        let found = columns.get_item(name)?;
        found.ok_or_else(|| errors::input(py, name, "a missing column", "all five columns"))
    };
    let op = ops(&given("op")?)?;
    let local = numbers("local", &given("local")?)?;
    let mut remotes = Remotes::new(py, shared);
    let remote = which(&mut remotes, &given("remote")?)?;
    let offset = numbers("offset", &given("offset")?)?;
    let length = numbers("length", &given("length")?)?;
    let lens = [
        op.len(),
        local.len(),
        remote.len(),
        offset.len(),
        length.len(),
    ];
    let mut first = None;
    for (name, len) in COLUMNS.into_iter().zip(lens) {
        match (first, len) {
            (None, Some(len)) => first = Some((name, len)),
            (Some((other, count)), Some(len)) if len != count => {
                let allowed = format!("one value, or {count} values as in {other}");
                return Err(errors::input(py, name, format!("{len} values"), allowed));
            }
            _ => {}
        }
    }
    let count = first.map_or(1, |(_, count)| count);
    Ok(Requests {
        op,
        local,
        remote,
        offset,
        length,
        remotes: remotes.all,
        count,
    })
}

fn ops(given: &Bound<'_, PyAny>) -> PyResult<Column<Op>> {
    if given.is_instance_of::<PyString>() {
        return Ok(Column::Same(one_op(given, &|| "op".to_owned())?));
    }
    let items = given.try_iter().map_err(|_| {
        let allowed = format!("{OPS}, or a sequence with one per request");
        errors::input(given.py(), "op", errors::shown(given), allowed)
    })?;
    let ops = items.enumerate().map(|(index, item)| {
        check_count(given.py(), index)?;
        one_op(&item?, &|| format!("op[{index}]"))
    });
    Ok(Column::Each(ops.collect::<PyResult<_>>()?))
}

fn which<'py>(
    remotes: &mut Remotes<'_, 'py>,
    given: &Bound<'py, PyAny>,
) -> PyResult<Column<usize>> {
    if given.is_instance_of::<held::Remote>() {
        return Ok(Column::Same(
            remotes.number(given, &|| "remote".to_owned())?,
        ));
    }
    let py = given.py();
    let items = given.try_iter().map_err(|_| {
        let allowed = "a Remote, or a sequence with one per request";
        errors::input(py, "remote", errors::shown(given), allowed)
    })?;
    let mut all = Vec::new();
    for (index, item) in items.enumerate() {
        check_count(py, index)?;
        all.push(remotes.number(&item?, &|| format!("remote[{index}]"))?);
    }
    Ok(Column::Each(all))
}

/// Whether there may be one more.
fn check_count(py: Python<'_>, before: usize) -> PyResult<()> {
    match before < REQUESTS_MAX {
        true => Ok(()),
        false => Err(too_many(py, before + 1)),
    }
}

fn numbers(field: &str, given: &Bound<'_, PyAny>) -> PyResult<Column<u64>> {
    let py = given.py();
    let wrong = || errors::input(py, field, errors::shown(given), NUMBERS);
    if given.is_instance_of::<PyInt>() {
        return given.extract().map(Column::Same).map_err(|_| wrong());
    }
    if let Ok(array) = PyBuffer::<u64>::get(given) {
        return match elements(py, &array)? {
            Elements::Many(numbers) => Ok(Column::Each(numbers)),
            Elements::One(number) => Ok(Column::Same(number)),
            Elements::Wrong => Err(wrong()),
        };
    }
    if let Ok(array) = PyBuffer::<i64>::get(given) {
        let checked = |index: Option<usize>, number: i64| {
            u64::try_from(number).map_err(|_| {
                let field = index.map_or_else(|| field.to_owned(), |at| format!("{field}[{at}]"));
                errors::input(py, field, number, NUMBERS)
            })
        };
        return match elements(py, &array)? {
            Elements::Many(numbers) => {
                let each = numbers.into_iter().enumerate();
                let each = each.map(|(index, number)| checked(Some(index), number));
                Ok(Column::Each(each.collect::<PyResult<_>>()?))
            }
            Elements::One(number) => Ok(Column::Same(checked(None, number)?)),
            Elements::Wrong => Err(wrong()),
        };
    }
    // Any other buffer is of something else: bytes, floats.
    if View::strided(given).is_ok() {
        return Err(wrong());
    }
    let items = given.try_iter().map_err(|_| wrong())?;
    let each = items.enumerate().map(|(index, item)| {
        check_count(py, index)?;
        number(&item?, &|| format!("{field}[{index}]"))
    });
    Ok(Column::Each(each.collect::<PyResult<_>>()?))
}

/// What an array has.
enum Elements<T> {
    One(T),
    Many(Vec<T>),
    /// Rows, or numbers of the other byte order.
    Wrong,
}

fn elements<T: Element>(py: Python<'_>, array: &PyBuffer<T>) -> PyResult<Elements<T>> {
    // PyO3 would take those for the processor's.
    if matches!(array.format().to_bytes().first(), Some(b'>' | b'!')) {
        return Ok(Elements::Wrong);
    }
    if array.item_count() > REQUESTS_MAX {
        return Err(too_many(py, array.item_count()));
    }
    let numbers = array.to_vec(py)?;
    Ok(match (array.dimensions(), numbers.first()) {
        (1, _) => Elements::Many(numbers),
        (0, Some(number)) => Elements::One(*number),
        _ => Elements::Wrong,
    })
}
