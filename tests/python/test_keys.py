"""Keys of tokens: chained, lasting, the same as the page writes down."""

from __future__ import annotations

import array
import hashlib
from typing import Any

import kvdepot
import numpy as np
import pytest
from helpers import needs_torch

pytestmark = pytest.mark.unit


def by_hand(tokens: list[int], block_tokens: int, salt: bytes = b"") -> list[bytes]:
    key = hashlib.sha256(b"kvdepot keys 1" + salt).digest()
    keys = []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[first : first + block_tokens]
        key = hashlib.sha256(key + b"".join(t.to_bytes(4, "little") for t in block)).digest()
        keys.append(key)
    return keys


def test_keys_are_what_the_page_says() -> None:
    tokens = [*range(10), 2**32 - 1, 7, 8]
    assert kvdepot.keys(tokens, 4) == by_hand(tokens, 4)
    assert kvdepot.keys(tokens, 4, salt="tenänt") == by_hand(tokens, 4, "tenänt".encode())
    assert kvdepot.keys(tokens, block_tokens=4, salt=b"\x00\xff") == by_hand(tokens, 4, b"\x00\xff")
    assert kvdepot.keys(tokens, 1) == by_hand(tokens, 1)
    assert kvdepot.keys(tokens, 14) == kvdepot.keys([], 4) == []
    assert kvdepot.keys(tokens, 2**63) == []


FORMS: dict[str, Any] = {
    "tuple": tuple,
    "generator": iter,
    "array": lambda tokens: array.array("I", tokens),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "uint16": lambda tokens: np.array(tokens, np.uint16),
    "every second": lambda tokens: np.repeat(tokens, 2)[::2],
    "numpy's numbers": lambda tokens: [np.int32(token) for token in tokens],
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_come_in_many_forms(form: str) -> None:
    tokens = list(range(100, 140))
    assert kvdepot.keys(FORMS[form](tokens), 16) == by_hand(tokens, 16)


@needs_torch
def test_tokens_of_a_tensor() -> None:
    import torch

    assert kvdepot.keys(torch.arange(40), 16) == by_hand(list(range(40)), 16)
    with pytest.raises(kvdepot.InputError, match=r"tokens\[0\]"):
        kvdepot.keys(torch.arange(40).reshape(2, 20), 16)


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        ([1, 2, -1], {}, r"tokens\[2\].*-1.*ID, 0 to"),
        ([2**32], {}, r"tokens\[0\].*4294967296"),
        ([1.0], {}, r"tokens\[0\]"),
        ("ab", {}, r"tokens\[0\]"),
        (np.zeros(4), {}, r"tokens\[0\]"),
        (np.zeros((2, 4), int), {}, r"tokens\[0\]"),
        (np.int64(5), {}, "tokens.*sequence"),
        (5, {}, "tokens.*sequence"),
        (None, {}, "tokens.*sequence"),
        ([2**70], {}, r"tokens\[0\].*1180591620717411303424.*ID, 0 to"),
        ([1], {"block_tokens": 0}, "block_tokens: 0 .* 1 to 2"),
        ([1], {"block_tokens": -4}, "block_tokens: -4 .* 1 to 2"),
        ([1], {"block_tokens": 2**70}, r"block_tokens: 1180591620717411303424 .* 1 to 2"),
        ([1], {"block_tokens": "4"}, "block_tokens: '4' .* 1 to 2"),
        ([1], {"salt": 5}, "salt.*5.*string or bytes"),
        ([1], {"salt": "\ud800"}, r"salt: '\\ud800' .* UTF-8"),
    ],
)
def test_what_has_no_keys(tokens: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(kvdepot.InputError, match=words):
        kvdepot.keys(tokens, **{"block_tokens": 1, **options})


def test_keys_find_the_prefix_of_a_prompt(ns: kvdepot.Namespace) -> None:
    tokens = list(range(100))
    stored = kvdepot.keys(tokens, 16)
    assert ns.put(stored, [b"block"] * len(stored)).wait(30) == [True] * 6
    assert ns.prefix(kvdepot.keys([*tokens[:70], 9, 9, 9, 9, 9, 9, 9, 9, 9, 9], 16)) == 4
    assert ns.prefix(kvdepot.keys(tokens, 16, salt="other")) == 0
