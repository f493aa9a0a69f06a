"""Collects the warnings and errors of the sources: the message index of docs/troubleshooting.md.

    python tests/messages.py             each message, with its kind, file and line
    python tests/messages.py --missing   rows that the index lacks, by area, to be completed
    python tests/messages.py --stale     messages of the index that the sources no longer have

A message is a warning or an error that is logged, the text of an error, or a reason that ends the
text of an error. Messages below the level of a warning are not in the index, nor texts that are
only made of other texts. Each value that a message takes is written as the name that its source
gives it, in braces, or as `{...}`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
HEADING = "## Message index"

CRATES = (
    "arena",
    "capi",
    "cli",
    "host",
    "media",
    "plan",
    "python",
    "service",
    "session",
    "store",
    "transfer",
)

# Simulated media and processes, and tests that a library shares with others.
TESTS = {"conformance", "conformance.rs", "fuzz.rs", "sim.rs", "simulated.rs", "tests", "tests.rs"}

# Functions that log or return the text which their caller passes: file -> function -> kind.
LOGGERS = {
    "crates/service/src/server/accept.rs": {"gone": "reason"},
    "crates/service/src/server/mod.rs": {"refused": "reason"},
    "crates/store/src/tier/posix/blocks.rs": {"warn": "warning"},
    "python/kvdepot/llama_cpp/__main__.py": {"print": "error"},
    "python/kvdepot/llama_cpp/cache.py": {"_fail": "warning"},
    "python/kvdepot/llama_cpp/server.py": {"say": "error"},
    "python/kvdepot/llama_cpp/server_model.py": {"say": "warning"},
    "python/kvdepot/vllm/probes.py": {"say": "warning"},
}
# Lines of these functions that are neither a warning nor an error.
NOTICES = {"states are kept in {description}"}

# Crates whose errors have a field `reason`.
REASONS = ("crates/arena/", "crates/service/", "crates/store/", "crates/transfer/")

# Python's own protocol for names that a module lacks.
NOT_MESSAGES = {"AttributeError"}

# Areas of the index, in its order: the path of their files -> their heading.
AREAS = {
    "crates/arena/src/error.rs": "All interfaces",
    "crates/arena/src/refused.rs": "All interfaces",
    "python/kvdepot/vllm": "vLLM",
    "python/kvdepot/lmcache": "LMCache",
    "python/kvdepot/llama_cpp": "llama.cpp",
    "python/kvdepot/transformers": "Transformers",
    "python/kvdepot/_settings.py": "Settings and weights of engines",
    "python/kvdepot/engine": "Settings and weights of engines",
    "crates/cli": "Command line",
    "crates/store": "Depot",
    "crates/arena": "Arenas",
    "crates/media": "Media and copies",
    "crates/plan": "Media and copies",
    "crates/store/src/tier/alarm.rs": "Asynchronous tiers",
    "crates/store/src/tier/breaker.rs": "Asynchronous tiers",
    "crates/store/src/tier/posix": "Posix and Ds3fs",
    "crates/store/src/tier/s3": "S3",
    "crates/transfer": "Peer and transfer engine",
    "crates/service": "Server, clients and workers",
    "crates/session": "Sessions",
    "crates/host": "Processes and directories",
    "python/kvdepot": "Python package",
    "crates/python": "Python package",
    "crates/capi": "C library",
}


@dataclass(frozen=True)
class Message:
    """One warning or error of the sources."""

    text: str
    file: str
    """Path below the repository."""
    line: int
    kind: str
    """`warning` or `error` for a line of the log, `raised` for the text of an error, `reason` for
    what one ends with."""

    @property
    def area(self) -> str:
        """Where the index has it: by the longest path that leads to its file."""
        parts = self.file.split("/")
        paths = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next(AREAS[path] for path in paths if path in AREAS)


# ---- Rust -------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*)
  | (?P<raw>b?r(?P<hashes>\#*)"(?P<rawtext>.*?)"(?P=hashes))
  | (?P<string>[bc]?"(?P<text>(?:\\.|[^"\\])*)")
  | (?P<char>b?'(?:\\(?:u\{[^}]*\}|x..|.)|[^'\\])')
  | (?P<lifetime>'\w+)
  | (?P<word>\w+)
  | (?P<mark>[^\s\w])
    """,
    re.VERBOSE | re.DOTALL,
)
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}


class Token(NamedTuple):
    """A word, a mark or a string of Rust."""

    kind: str
    text: str
    line: int


def unescaped(text: str) -> str:
    """The characters of a string literal of Rust."""
    text = re.sub(r"\\\r?\n\s*", "", text)
    text = re.sub(r"\\u\{([0-9a-fA-F_]+)\}", lambda found: chr(int(found[1], 16)), text)
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[1]), text)


def tokens(source: str) -> list[Token]:
    """A file's tokens, without comments."""
    # Comments that nest are not found by an expression.
    source = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), source, flags=re.S)
    found, line, before = [], 1, 0
    for match in TOKEN.finditer(source):
        line += source.count("\n", before, match.start())
        before = match.start()
        if match["raw"] is not None:
            found.append(Token("string", match["rawtext"], line))
        elif match["string"] is not None:
            found.append(Token("string", unescaped(match["text"]), line))
        elif match["comment"] is None:
            found.append(Token("mark" if match["mark"] else "word", match[0], line))
    return found


def end_of_group(code: Sequence[Token], begin: int) -> int:
    """The index behind the bracket that closes the one at `begin`."""
    depth = 0
    for index in range(begin, len(code)):
        if code[index].kind == "mark":
            depth += (code[index].text in OPEN) - (code[index].text in CLOSE)
        if depth == 0:
            return index + 1
    return len(code)


def is_at(code: Sequence[Token], at: int, *texts: str) -> bool:
    """Whether these words and marks begin at `at`."""
    if not 0 <= at <= len(code) - len(texts):
        return False
    return all(
        code[at + index].text == text and code[at + index].kind != "string"
        for index, text in enumerate(texts)
    )


def without_tests(code: list[Token]) -> list[Token]:
    """The tokens without items that only tests have, and without what lints are told."""
    kept, at = [], 0
    while at < len(code):
        if code[at].text in ("expect", "allow") and is_at(code, at + 1, "("):
            at = end_of_group(code, at + 1)
            continue
        if code[at].text == "#" and is_at(code, at + 1, "[", "cfg", "("):
            end = end_of_group(code, at + 1)
            words = {one.text for one in code[at + 4 : end]}
            if words & {"test", "testing", "sim", "fuzzing"} and "not" not in words:
                at = end
                while at < len(code) and not is_at(code, at, ";"):
                    if is_at(code, at, "{"):
                        at = end_of_group(code, at) - 1
                        break
                    if code[at].text in OPEN and code[at].kind == "mark":
                        at = end_of_group(code, at)
                    else:
                        at += 1
                at += 1
                continue
        kept.append(code[at])
        at += 1
    return kept


def arguments(code: Sequence[Token], begin: int) -> list[list[Token]]:
    """The arguments of the call whose bracket is at `begin`."""
    end, at = end_of_group(code, begin) - 1, begin + 1
    found: list[list[Token]] = [[]]
    while at < end:
        if is_at(code, at, ","):
            found.append([])
            at += 1
        elif code[at].kind == "mark" and code[at].text in OPEN:
            behind = end_of_group(code, at)
            found[-1].extend(code[at:behind])
            at = behind
        else:
            found[-1].append(code[at])
            at += 1
    return [one for one in found if one]


def of_format(text: str) -> str:
    """A format string of Rust with its values' names."""

    def value(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        name = (found[1] or "").split(":")[0].strip()
        return f"{{{name}}}" if re.fullmatch(r"[A-Za-z_]\w*", name) else "{...}"

    return re.sub(r"\{\{|\}\}|\{([^{}]*)\}", value, text)


def has_reasons(file: str) -> bool:
    """Whether `reason` is a field of an error in this file's crate."""
    return file.startswith(REASONS)


def strings(code: Sequence[Token], kind: str, file: str) -> Iterator[Message]:
    """Each string, as a format."""
    for one in code:
        if one.kind == "string":
            yield Message(of_format(one.text), file, one.line, kind)


# What a file with a message has, in any case.
SIGNS = re.compile(
    r"\b(warn|error)!|#\[error|\bDisplay for|\breason\b|\b(corrupt|Closed)\(|-> String"
)


def of_rust(file: str, source: str) -> Iterator[Message]:
    """The messages of a file of Rust."""
    if file not in LOGGERS and not SIGNS.search(source):
        return
    code = without_tests(tokens(source))
    loggers = LOGGERS.get(file, {})
    for at, token in enumerate(code):
        if token.kind != "word":
            continue
        if token.text in ("warn", "error") and is_at(code, at + 1, "!", "("):
            kind = "warning" if token.text == "warn" else "error"
            # Fields come before the text, and its values after it.
            texts = [one for one in arguments(code, at + 2) if one[0].kind == "string"]
            yield from strings([one[0] for one in texts[:1]], kind, file)
        elif token.text == "error" and is_at(code, at - 1, "[", "error", "("):
            yield from strings(arguments(code, at + 1)[0][:1], "raised", file)
        elif token.text in loggers and is_at(code, at + 1, "(") and not is_at(code, at - 1, "fn"):
            group = code[at + 1 : end_of_group(code, at + 1)]
            yield from strings(group, loggers[token.text], file)
        elif token.text == "impl" and is_display_of_error(code, at):
            yield from strings(body(code, at), "raised", file)
        elif token.text == "fn" and file.endswith("/error.rs") and is_to_string(code, at):
            yield from strings(body(code, at), "reason", file)
        elif token.text == "reason" and code[at + 1].text in (":", "=") and has_reasons(file):
            yield from strings(expression(code, at + 2), "reason", file)
        elif token.text in ("corrupt", "Closed") and is_at(code, at + 1, "(") and has_reasons(file):
            yield from strings(code[at + 1 : end_of_group(code, at + 1)], "reason", file)


def head(code: Sequence[Token], at: int) -> list[str]:
    """The words and marks of the item at `at`, before its body."""
    end = next((i for i in range(at, len(code)) if is_at(code, i, "{") or is_at(code, i, ";")), at)
    return [one.text for one in code[at:end]]


def body(code: Sequence[Token], at: int) -> Sequence[Token]:
    """The body of the item at `at`."""
    begin = at + len(head(code, at))
    return code[begin : end_of_group(code, begin)]


def expression(code: Sequence[Token], begin: int) -> Sequence[Token]:
    """The tokens from `begin` to the end of the field or statement."""
    end = begin
    while end < len(code) and not (code[end].kind == "mark" and code[end].text in ",;)]}"):
        end = end_of_group(code, end) if code[end].text in OPEN else end + 1
    return code[begin:end]


def is_display_of_error(code: Sequence[Token], at: int) -> bool:
    """Whether the `impl` at `at` is the text of an error."""
    words = head(code, at)
    return words[-3:-1] == ["Display", "for"] and words[-1] in ("Error", "Failure", "Refused")


def is_to_string(code: Sequence[Token], at: int) -> bool:
    """Whether the function at `at` returns a text."""
    return head(code, at)[-3:] == ["-", ">", "String"]


# ---- Python -----------------------------------------------------------------------------------


def name_of(value: ast.expr) -> str:
    """A value of a message: its name, where it has one."""
    if isinstance(value, ast.Name):
        return f"{{{value.id.strip('_')}}}"
    if isinstance(value, ast.Attribute):
        return f"{{{value.attr.strip('_')}}}"
    return "{...}"


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The texts that a file's names are assigned."""
    return {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def texts_of(value: ast.expr, values: Sequence[ast.expr] | None = None) -> Iterator[str]:
    """The texts that an expression may be; with `values` it is a format of `logging`."""
    if isinstance(value, ast.IfExp):
        yield from texts_of(value.body, values)
        yield from texts_of(value.orelse, values)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        text = value.value
        if values is not None:
            names = iter([name_of(one) for one in values])
            text = re.sub(
                r"%(%|[-#0 +]*[\d.]*[a-z])",
                lambda found: "%" if found[1] == "%" else next(names, "{...}"),
                text,
            )
        yield text
    elif isinstance(value, ast.JoinedStr):
        parts = (
            part.value if isinstance(part, ast.Constant) else name_of(part.value)
            for part in value.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
        yield "".join(str(part) for part in parts)


def last_name(function: ast.expr) -> str:
    """The name of a called function, without where it is."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def of_python(file: str, source: str) -> Iterator[Message]:
    """The messages of a file of Python."""
    loggers = LOGGERS.get(file, {})
    tree = ast.parse(source)
    known = constants(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        if name in ("warning", "error", "exception", "critical") and node.args:
            kind = "warning" if name == "warning" else "error"
            for text in texts_of(node.args[0], node.args[1:]):
                yield Message(text, file, node.lineno, kind)
        elif name in loggers:
            for text in texts_of(node.args[0], node.args[1:]):
                yield Message(text, file, node.lineno, loggers[name])
        elif name.endswith("Error") and name not in NOT_MESSAGES:
            # Some take a number first.
            for argument in node.args:
                if isinstance(argument, ast.Name):
                    argument = known.get(argument.id, argument)
                for text in texts_of(argument):
                    yield Message(text, file, node.lineno, "raised")


# ---- the index --------------------------------------------------------------------------------


def has_words(text: str) -> bool:
    """Whether a message says anything besides its values."""
    return bool(re.search(r"[A-Za-z]{2}", re.sub(r"\{[^}]*\}", "", text)))


@functools.cache
def messages() -> list[Message]:
    """All messages of the sources, in the order of their files."""
    found: list[Message] = []
    for crate in CRATES:
        for path in sorted((ROOT / "crates" / crate / "src").rglob("*.rs")):
            inner = path.relative_to(ROOT / "crates" / crate / "src").parts
            if not TESTS & set(inner):
                file = path.relative_to(ROOT).as_posix()
                found.extend(of_rust(file, path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "python" / "kvdepot").rglob("*.py")):
        found.extend(of_python(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
    return [
        one
        for one in found
        if has_words(one.text)
        and one.text not in NOTICES
        # Not what stands for a value that a text names in any case.
        and (one.kind != "reason" or (" " in one.text and not one.text.startswith(":")))
    ]


def cell(text: str) -> str:
    """A message as the index has it."""
    ticks = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}".replace("|", "\\|").replace("\n", " ")


def rows(page: str) -> Iterator[tuple[str, str, str]]:
    """The rows of a page's index: heading, message, meaning."""
    _, _, index = page.partition(f"{HEADING}\n")
    heading = ""
    for line in index.splitlines():
        cells = [one.strip() for one in re.split(r"(?<!\\)\|", line)]
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("| `") and len(cells) == 4:
            yield heading, cells[1], cells[2]


def indexed(page: str) -> dict[str, str]:
    """The index of a page: message -> meaning."""
    return {message: meaning for _, message, meaning in rows(page)}


def headings(page: str) -> dict[str, str]:
    """The index of a page: message -> the heading above it."""
    return {message: heading for heading, message, _ in rows(page)}


def missing(page: str) -> list[Message]:
    """Messages that a page's index lacks, each once."""
    known = indexed(page)
    lacking: dict[str, Message] = {}
    for one in messages():
        if cell(one.text) not in known:
            lacking.setdefault(cell(one.text), one)
    return list(lacking.values())


def stale(page: str) -> list[str]:
    """Messages of a page's index that the sources do not have."""
    cells = {cell(one.text) for one in messages()}
    return [one for one in indexed(page) if one not in cells]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="rows that the index lacks")
    parser.add_argument("--stale", action="store_true", help="rows without a message")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if options.missing:
        lacking = missing(page)
        for area in dict.fromkeys(AREAS.values()):
            if area not in {one.area for one in lacking}:
                continue
            print(f"\n### {area}\n\n| message | meaning, and what to do |\n| --- | --- |")
            for one in (one for one in lacking if one.area == area):
                print(f"| {cell(one.text)} | {one.kind}, {one.file}:{one.line} |")
    if options.stale:
        print("\n".join(stale(page)))
    if not options.missing and not options.stale:
        for one in messages():
            print(f"{one.file}:{one.line}: {one.kind}: {one.text}")


if __name__ == "__main__":
    sys.exit(main())
