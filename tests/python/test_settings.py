"""The connectors' settings: one declaration for what is read, refused and written on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvdepot
import pytest
from kvdepot import _settings
from kvdepot._settings import Kind, Schema, Setting
from kvdepot.lmcache import settings as lmcache_settings
from kvdepot.vllm import settings as vllm_settings

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[2] / "docs/engines"


@pytest.mark.parametrize(
    ("page", "schema"),
    [
        ("vllm.md", vllm_settings.SETTINGS),
        ("vllm.md", vllm_settings.TIER_SETTINGS),
        ("lmcache.md", lmcache_settings.KNOBS),
        ("lmcache.md", lmcache_settings.PLACES),
    ],
)
def test_a_page_has_the_table_that_the_declarations_make(page: str, schema: Schema) -> None:
    table = "\n".join(schema.table())
    assert table in (DOCS / page).read_text(), f"{page} should have\n{table}"


@pytest.mark.parametrize(
    ("kind", "given", "read"),
    [
        (_settings.SIZE, "64GiB", 64 << 30),
        (_settings.SIZE, "1.5 KiB", 1536),
        (_settings.SIZE, 4096, 4096),
        (_settings.DURATION, "250ms", 0.25),
        (_settings.DURATION, "2min", 120.0),
        (_settings.DURATION, 0, 0.0),
        (_settings.COUNT, "8", 8),
        (_settings.GIBS, "0.5", 1 << 29),
        (_settings.FLAG, " On", True),
        (_settings.WORD, " a ", "a"),
        (_settings.one_of(("a", "b")), "b", "b"),
        (_settings.left_out("why"), False, None),
    ],
)
def test_a_value_is_read_as_people_write_it(kind: Kind, given: object, read: object) -> None:
    assert kind.read("name", given) == read


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (_settings.SIZE, value)
        for value in ("64 parsecs", "0", 0, -1, 1.5, True, None, [], "\ud800", float("nan"))
    ]
    + [(_settings.DURATION, value) for value in ("soon", -1, True, None, float("nan"))]
    + [(_settings.COUNT, value) for value in ("one", 0, 1.5, True, None)]
    + [(_settings.GIBS, value) for value in ("64GiB", 0, float("inf"), float("nan"), True)]
    + [(_settings.FLAG, value) for value in ("maybe", 2, None)]
    + [(_settings.TRUE_OR_FALSE, value) for value in ("true", 1)]
    + [(_settings.one_of(("a", "b")), value) for value in ("c", [], None)]
    + [(_settings.left_out("why"), True)],
)
def test_a_wrong_value_is_named_with_what_is_allowed(kind: Kind, given: Any) -> None:
    with pytest.raises(kvdepot.ConfigError) as refused:
        kind.read("the.name", given)
    assert str(refused.value) == f"the.name: {given!r} is not allowed; it must be {kind.allowed}"


def test_a_setting_has_its_default_under_its_first_name() -> None:
    schema = Schema(
        Setting(("wait", "patience"), _settings.DURATION, default="1s"),
        Setting(("salt",), _settings.text()),
    )
    rest: dict[str, Any] = {"patience": "2s", "other": 1}
    assert schema.take(rest) == {"wait": 2.0, "salt": None}
    assert rest == {"other": 1}
    assert schema.take({}) == {"wait": 1.0, "salt": None}
    assert schema.near("dax.patiense") == "patience"
