"""The part of a block's name that covers an engine's options.

Every option counts, except those that a list says cannot change keys and values. An option that
equals its default is left out of the text, so that a version of the engine with new options keeps
finding what the one before has stored.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

# Secrets enter no name: neither options nor entries of dictionaries with such a name count.
SECRET = re.compile(
    r"(api|access|private|secret|auth|encryption)_?key|secret|passw(or)?d|passphrase|credential"
    r"|authorization|(^|_)(hf_|auth_|access_|bearer_|session_)?token$",
    re.IGNORECASE,
)
# Nor do the user name and the password in a URL, wherever it stands.
USER = re.compile(r"(?<=://)[^/?#\s]*@")


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a password, a token or a key."""
    return SECRET.search(name.rsplit(".", 1)[-1]) is not None


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every option that differs from its default.

    `config` is a dataclass; options that are dataclasses themselves are walked. One that is set
    where the default is None yields its class first. Secrets are left out.
    """
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if is_secret(name):
            continue
        default = _default(field)
        if dataclasses.is_dataclass(value) and _is_walked(value):
            if default is None:
                yield name, type(value).__name__
            yield from walk(value, f"{name}.")
        elif canonical(value) != canonical(default):
            yield name, value


def names(config_class: type) -> list[str]:
    """The names of a dataclass's own fields."""
    return [field.name for field in dataclasses.fields(config_class)]


def canonical(value: Any) -> Any:
    """The value as JSON has it, the same in every process that means the same."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return USER.sub("", value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {
            str(canonical(key)): canonical(one)
            for key, one in sorted(value.items(), key=lambda pair: str(pair[0]))
            if not is_secret(str(key))
        }
    if isinstance(value, Set):
        return sorted((canonical(one) for one in value), key=repr)
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if isinstance(value, type) or callable(value):
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        return f"{module}.{name or type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {name: getattr(value, name) for name in names(type(value))}
        return {"class": type(value).__name__, **canonical(fields)}
    text = str(value)
    if " at 0x" in text:
        # An object that says nothing but where it lies.
        return {"class": type(value).__name__, **canonical(getattr(value, "__dict__", {}))}
    return text


def text_of(options: Mapping[str, Any]) -> str:
    """Options as one text: equal options, equal text."""
    return json.dumps(canonical(options), sort_keys=True)


def digest_of(value: Any) -> str:
    """64 hex digits for a value."""
    return hashlib.sha256(json.dumps(canonical(value), sort_keys=True).encode()).hexdigest()


def _is_walked(value: Any) -> bool:
    """Configurations of other libraries are values: their defaults say nothing of the engine."""
    return not hasattr(value, "to_json_string")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # pydantic's dataclasses wrap it.
    found = getattr(field.default, "default", field.default)
    factory = getattr(field.default, "default_factory", None)
    if factory is not None:
        return factory()
    return None if found is dataclasses.MISSING or "Undefined" in type(found).__name__ else found
