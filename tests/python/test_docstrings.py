"""The docstrings of the compiled module: complete in its stub, the same in the module, and run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kvdepot
import pytest
from kvdepot import _native

pytestmark = pytest.mark.unit

STUB = Path(__file__).parents[2] / "python/kvdepot/_native.pyi"

Definition = ast.ClassDef | ast.FunctionDef

SECTIONS = ("Args", "Returns", "Raises", "Example")
QUESTIONS = re.compile(r"(What|Who|Whom|Whose|How|Where|Whether|Which|When|Why|As|None)\b|The same")
WORDS_MAX = 35


@dataclass(frozen=True)
class Item:
    """A class, function, method or property of the stub."""

    name: str
    node: Definition
    doc: str
    owner: Item | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def decorators(self) -> set[str]:
        return {one.id for one in self.node.decorator_list if isinstance(one, ast.Name)}

    @property
    def is_called(self) -> bool:
        return isinstance(self.node, ast.FunctionDef) and "property" not in self.decorators

    @property
    def returns(self) -> bool:
        """True for a function whose result is something else than None."""
        annotation = getattr(self.node, "returns", None)
        return annotation is not None and ast.unparse(annotation) != "None"

    @property
    def sections(self) -> dict[str, str]:
        """The description, and each section by its name."""
        parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", self.doc, flags=re.MULTILINE)
        return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}

    @property
    def entries(self) -> list[str]:
        """The names in `Args`."""
        return re.findall(r"^    (\w+): \S", self.sections.get("Args", ""), re.MULTILINE)

    @property
    def parameters(self) -> list[str]:
        """The parameters that a caller passes: for a class, those of its constructor."""
        call: Definition | None = self.node
        if isinstance(call, ast.ClassDef):
            calls = [one for one in call.body if isinstance(one, ast.FunctionDef)]
            call = next((one for one in calls if one.name == "__new__"), None)
        if not isinstance(call, ast.FunctionDef):
            return []
        all_of_it = [*call.args.posonlyargs, *call.args.args, *call.args.kwonlyargs]
        return [one.arg for one in all_of_it if one.arg not in ("self", "cls")]


def items(source: str) -> list[Item]:
    """The public names of a stub, and their members."""

    def read(node: ast.stmt, owner: Item | None = None) -> Iterator[Item]:
        if not isinstance(node, Definition):
            return
        name = f"{owner}.{node.name}" if owner else node.name
        item = Item(name, node, ast.get_docstring(node) or "", owner)
        hidden = node.name.startswith("_") and node.name != "__await__"
        if not hidden and "type_check_only" not in item.decorators:
            yield item
            for member in node.body:
                yield from read(member, item)

    return [item for node in ast.parse(source).body for item in read(node)]


def offences(source: str) -> list[str]:
    """The rules that docstrings of a stub break."""
    found = []
    for item in items(source):
        sections = item.sections
        summary = sections[""].split("\n\n")[0].strip()
        if not summary.endswith((".", "`")):
            found.append(f"{item}: no summary")
        if QUESTIONS.match(item.doc):
            found.append(f"{item}: opens with a question word")
        if "Error" not in item.name and item.entries != item.parameters:
            found.append(f"{item}: Args {item.entries} for {item.parameters}")
        if item.is_called and item.returns != ("Returns" in sections):
            found.append(f"{item}: Returns")
        is_class = isinstance(item.node, ast.ClassDef) and "Error" not in item.name
        if (item.is_called or is_class) and ">>>" not in sections.get("Example", ""):
            found.append(f"{item}: no example")
        prose = " ".join(item.doc.split("\nExample:")[0].split())
        for sentence in re.split(r"(?<=[.!?]) ", prose):
            if len(sentence.split()) > WORDS_MAX + 2:  # the name of a section and of an argument
                found.append(f"{item}: a long sentence: {sentence}")
    return found


ITEMS = items(STUB.read_text(encoding="utf-8"))


def test_every_public_name_has_a_complete_docstring() -> None:
    assert {item.name for item in ITEMS if item.owner is None} >= {
        name for name in _native.__all__ if not name.startswith("_")
    }
    assert offences(STUB.read_text(encoding="utf-8")) == []


WHOLE = "Stores.\n\nArgs:\n    key: K.\n\nReturns:\n    A.\n\nExample:\n    >>> 1\n    1\n"


@pytest.mark.parametrize(
    ("old", "new", "offence"),
    [
        ("Stores.", "", "no summary"),
        ("Stores.", "How long it is.", "question word"),
        ("key: K.", "keys: K.", "Args"),
        ("Returns:\n    A.\n\n", "", "Returns"),
        (">>> 1", "1", "no example"),
        ("Stores.", f"Stores {'all ' * 40}.", "long sentence"),
    ],
)
def test_a_docstring_that_lacks_something_is_seen(old: str, new: str, offence: str) -> None:
    def found(doc: str) -> list[str]:
        return offences(f"def put(key: int) -> int:\n    {doc!r}")

    assert found(WHOLE) == []
    assert any(offence in one for one in found(WHOLE.replace(old, new)))


def compiled(item: Item) -> str:
    """The docstring of an item in the compiled module."""
    thing: object = _native
    for name in item.name.split("."):
        thing = getattr(thing, name)
    return inspect.getdoc(thing) or ""


def test_the_module_has_the_docstrings_of_the_stub() -> None:
    # The module omits the examples, and in its longest files `Raises`.
    for item in ITEMS:
        # The interpreter has a docstring of its own for it.
        if item.node.name == "__await__":
            continue
        ours, theirs = compiled(item).split(), item.doc.split()
        assert ours == theirs[: len(ours)], item.name
        least = re.split(r"^(?:Raises|Example):", item.doc, flags=re.MULTILINE)[0].split()
        assert len(ours) >= len(least), f"{item}: the stub says more"


def llama_state() -> bytes:
    """A state of four tokens and one layer, as `llama_state_seq_get_data` writes it."""
    count, row = 4, 8
    cells = b"".join(struct.pack("<iIi", at, 1, 0) for at in range(count))
    table = struct.pack("<iQ", 1, row) + bytes(range(count * row))
    head = struct.pack("<IiII", 0xAF143CD8, 0, 1, count)
    return head + cells + struct.pack("<II", 0, 1) + table + table


def run(item: Item, scope: dict[str, object]) -> list[str]:
    """Runs an example, after that of its class; the failures in words."""
    failures: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for one in filter(None, [item.owner, item]):
        example = one.sections.get("Example", "")
        test = doctest.DocTestParser().get_doctest(example, scope, one.name, str(STUB), 0)
        # In the same scope, and not in a copy of it.
        test.globs = scope
        runner.run(test, out=failures.append, clear_globs=False)
    return failures


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The names of an example, which is run in an empty directory."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"kvdepot": kvdepot, "state": llama_state()}
    yield names
    # The last one first: a stream or a snapshot ends before its depot.
    for name in reversed(list(names)):
        value = names.pop(name)
        if type(value).__module__.startswith("kvdepot") and hasattr(value, "close"):
            value.close()


EXAMPLES = [item for item in ITEMS if ">>>" in item.sections.get("Example", "")]


@pytest.mark.parametrize("item", EXAMPLES, ids=str)
def test_an_example_runs(item: Item, scope: dict[str, object]) -> None:
    failures = run(item, scope)
    assert not failures, "\n".join(failures)


def test_an_example_that_is_wrong_is_seen(scope: dict[str, object]) -> None:
    (item,) = items(f"def put(key: int) -> int:\n    {WHOLE.replace('>>> 1', '>>> 2')!r}")
    assert run(item, scope)
