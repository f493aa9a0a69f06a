"""Settings of the engines' connectors: each is declared once, and read, refused and described by
its declaration.

What a connector does not declare is the depot's, and `kvdepot.check` knows that. The tables of
docs/engines are what `Schema.table` writes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kvdepot
from kvdepot import _native

# What begins a pipeline that another process serves.
SERVICE = "unix:"

GIB = 1 << 30


@dataclass(frozen=True)
class Kind:
    """What a value may be."""

    allowed: str
    """In words, for errors and tables."""
    parse: Callable[[Any], Any]
    """Raises KeyError, TypeError or ValueError for what it may not be."""
    secret: bool = False
    """Whether errors do not show the value."""

    def read(self, name: str, value: object) -> Any:
        """The value as the connector wants it; `kvdepot.ConfigError` names it otherwise."""
        try:
            return self.parse(value)
        except (KeyError, TypeError, ValueError):
            raise wrong(name, NOT_SHOWN if self.secret else value, self.allowed) from None


class _NotShown:
    def __repr__(self) -> str:
        return "(not shown)"


NOT_SHOWN = _NotShown()
"""Stands for a secret in an error."""


@dataclass(frozen=True)
class Setting:
    """One setting, under one name or several that mean the same."""

    names: tuple[str, ...]
    kind: Kind
    help: str = ""
    """For the table. Without it there is no row: a key that only has to be known."""
    default: object = None
    """As one would write it."""
    option: str | None = None
    """The depot's option that it sets; None for one that the connector reads itself."""


class Schema:
    """The settings that a connector declares."""

    def __init__(self, *settings: Setting) -> None:
        self.settings = settings
        self.by_name = {name: setting for setting in settings for name in setting.names}

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        """Remove what is declared from `given`: the values by their names, defaults too."""
        values: dict[str, Any] = {}
        for setting in self.settings:
            name, default = setting.names[0], setting.default
            values[name] = None if default is None else setting.kind.read(name, default)
        for name in [name for name in given if name in self.by_name]:
            setting = self.by_name[name]
            values[setting.names[0]] = setting.kind.read(name, given.pop(name))
        return values

    def near(self, name: str) -> str | None:
        """The declared name that is most like this one, whatever section it was given in."""
        close = difflib.get_close_matches(name.rpartition(".")[2], self.by_name, n=1)
        return close[0] if close else None

    def unknown(self, name: str) -> kvdepot.ConfigError:
        """An error that names the setting and the nearest one that exists."""
        near = self.near(name)
        hint = f"; did you mean {near!r}?" if near else ""
        return kvdepot.ConfigError(
            f"{name}: unknown setting; allowed: {', '.join(self.by_name)}{hint}"
        )

    def table(self) -> list[str]:
        """The rows of a page: names, what is allowed, the default, the meaning."""
        rows = ["| name | value | default | meaning |", "| --- | --- | --- | --- |"]
        for setting in self.settings:
            if setting.help:
                names = ", ".join(f"`{name}`" for name in setting.names)
                cells = (names, setting.kind.allowed, _shown(setting.default), setting.help)
                rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        return rows


def check(
    schema: Schema,
    pipeline: str,
    depot: Mapping[str, Any],
    *,
    origin: Mapping[str, str] | None = None,
    where: str = "",
) -> None:
    """Refuse a depot's settings as it would itself, but by the names that were given.

    `origin` has the name behind an option, where it is another; `where` says what else may stand
    there. Each of an engine's processes checks them, on whatever machine: what is there is looked
    at by the one that opens the depot.
    """
    try:
        kvdepot.check(pipeline, depot, options_only=True)
    except kvdepot.ConfigError as error:
        option, colon, rest = str(error).partition(": ")
        given = (origin or {}).get(option, option)
        if given != option:
            raise kvdepot.ConfigError(f"{given}{colon}{rest} ({option} of kvdepot)") from error
        near = schema.near(option) if "unknown option" in rest else None
        if near:
            raise kvdepot.ConfigError(f"{error}; or did you mean {near!r}?") from error
        if where:
            own = ", ".join(name for name, setting in schema.by_name.items() if setting.help)
            raise kvdepot.ConfigError(
                f"{error} (in {where}; other keys allowed there: {own})"
            ) from error
        raise


def wrong(name: str, value: object, allowed: str) -> kvdepot.ConfigError:
    """An error that names the setting, its value and what is allowed."""
    return kvdepot.ConfigError(f"{name}: {value!r} is not allowed; it must be {allowed}")


# ---- kinds -----------------------------------------------------------------------------------


def one_of(words: Iterable[str]) -> Kind:
    """One of these words."""
    known = tuple(words)
    return Kind("one of " + ", ".join(map(repr, known)), lambda value: known[known.index(value)])


def optional(kind: Kind) -> Kind:
    """As `kind`, and None for nothing."""
    return Kind(kind.allowed, lambda value: None if value is None else kind.parse(value))


def text(allowed: str = "a text") -> Kind:
    """Any text."""
    return Kind(allowed, _text)


def left_out(reason: str) -> Kind:
    """Something that cannot be switched on."""
    return Kind(f"left out: {reason}", _refuse)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _word(value: Any) -> str:
    if not _text(value).strip():
        raise ValueError
    return str(value).strip()


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    return words[str(value).strip().lower()]


def _number(value: Any, least: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ValueError
    return value


def _count(value: Any, least: int = 1) -> int:
    number = _number(int(value) if isinstance(value, str) else value, least)
    if not isinstance(number, int):
        raise TypeError
    return number


def _size(value: Any) -> int:
    return _count(_native._size(value) if isinstance(value, str) else value)


def _gib(value: Any) -> int:
    number = _number(float(value) if isinstance(value, str) else value, 1 / GIB)
    if number == math.inf:
        raise ValueError
    return int(number * GIB)


def _duration(value: Any) -> float:
    return float(_number(_native._duration(value) if isinstance(value, str) else value, 0))


def _refuse(value: Any) -> None:
    if value:
        raise ValueError


def _shown(default: object) -> str:
    if default is None:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


ANY = Kind("what the engine takes", lambda value: value)
TRUE_OR_FALSE = Kind("true or false", _bool)
WORD = Kind("a text that is not empty", _word)
# Environment variables have nothing but texts.
FLAG = Kind("true or false", _flag)
COUNT = Kind("a whole number from 1", _count)
COUNT_OR_NONE = Kind("a whole number from 0", lambda value: _count(value, 0))
SIZE = Kind("a size such as '64KiB' or a whole number of bytes from 1", _size)
GIBS = Kind("a number of GiB above 0, such as 64 or 0.5", _gib)
DURATION = Kind("a duration such as '500ms' or '2s'", _duration)
