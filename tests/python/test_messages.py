"""Every warning and error of the sources is explained in docs/troubleshooting.md, and no other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    """The script, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("kvdepot_messages", ROOT / "tests/messages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Its data classes look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


messages = load()
PAGE = messages.PAGE.read_text(encoding="utf-8")


def test_every_message_is_in_the_index() -> None:
    lacking = [f"{one.text} ({one.file}:{one.line})" for one in messages.missing(PAGE)]
    assert not lacking, "rows for them: python tests/messages.py --missing"


def test_every_row_of_the_index_is_a_message() -> None:
    assert not messages.stale(PAGE), "python tests/messages.py --stale"


def test_every_row_says_what_to_do_and_is_in_its_area() -> None:
    rows = messages.indexed(PAGE)
    assert all(len(text) > 10 and "to" + "do" not in text.lower() for text in rows.values())
    areas = {}
    for one in messages.messages():
        areas.setdefault(messages.cell(one.text), one.area)
    assert {row: messages.headings(PAGE)[row] for row in areas} == areas


def test_functions_that_log_for_others_are_there() -> None:
    for file, functions in messages.LOGGERS.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in functions:
            assert f"{name}(" in source, f"{file} has no {name}: change LOGGERS"
            without = {file: {key: kind for key, kind in functions.items() if key != name}}
            with pytest.MonkeyPatch.context() as patch:
                read = messages.of_rust if file.endswith(".rs") else messages.of_python
                all_of_it = list(read(file, source))
                patch.setattr(messages, "LOGGERS", without)
                assert len(list(read(file, source))) < len(all_of_it), f"{file}: {name}"


def test_a_message_without_a_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    new = messages.Message("a message of {name}", "crates/store/src/lib.rs", 7, "warning")
    found = [*messages.messages(), new]
    monkeypatch.setattr(messages, "messages", lambda: found)
    assert messages.missing(PAGE) == [new]
    row = f"{messages.cell(new.text)}"
    assert not messages.missing(f"{PAGE}| {row} | what to do |\n")
    monkeypatch.setattr(messages, "messages", lambda: found[:-1])
    assert messages.stale(f"{PAGE}| {row} | what to do |\n") == [row]


RUST = r"""
//! tracing::warn!("in a comment");
fn f() {
    tracing::warn!(path = %path.display(), "a {} of \"one\": \
        {error}");
    tracing::error!("{error}");
    tracing::info!("no warning");
    warn!(%error, "also {count:?} {{braces}}");
}
#[derive(thiserror::Error)]
#[non_exhaustive]
enum Error {
    #[error("{path}: {0}", path = path.display())]
    Io(String),
    #[error(transparent)]
    Other(Other),
    #[error("cannot {operation}")]
    Os,
}
fn g() -> Error { Error::Full { reason: format!("all {most} are in use") } }
#[cfg(test)]
mod tests {
    fn h() { tracing::warn!("in a test"); }
}
impl std::fmt::Display for Error {
    fn fmt(&self, to: &mut Formatter) -> Result { write!(to, r#"a raw "{text}""#) }
}
"""

PYTHON = '''
"""raise ValueError("in a docstring")"""
message = "a constant text"
logger.warning("a %s of %d%%: %.2f", name, len(all), self._share)
logger.info("no warning")
logger.exception("a fault " "in two parts")
raise kvdepot.ConfigError(f"{option}: {value!r} is wrong, {len(all)} too")
raise Reconfigure.HttpError(409, message)
raise AttributeError("no message of kvdepot")
raise ValueError("one" if this else f"other {self.name}") from error
'''


def test_messages_of_rust() -> None:
    found = list(messages.of_rust("crates/store/src/x.rs", RUST))
    assert [(one.kind, one.text) for one in found] == [
        ("warning", 'a {...} of "one": {error}'),
        ("error", "{error}"),
        ("warning", "also {count} {braces}"),
        ("raised", "{path}: {...}"),
        ("raised", "cannot {operation}"),
        ("reason", "all {most} are in use"),
        ("raised", 'a raw "{text}"'),
    ]
    assert found[0].line == 4


def test_messages_of_python() -> None:
    found = list(messages.of_python("python/kvdepot/x.py", PYTHON))
    assert {(one.kind, one.text) for one in found} == {
        ("warning", "a {name} of {...}%: {share}"),
        ("error", "a fault in two parts"),
        ("raised", "{option}: {value} is wrong, {...} too"),
        ("raised", "a constant text"),
        ("raised", "one"),
        ("raised", "other {name}"),
    }
