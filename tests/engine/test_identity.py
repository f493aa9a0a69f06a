"""Two engines, one after the other: the second is served nothing that another configuration
computed, and everything that its own did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from identity.__main__ import run
from identity.cases import CHANGES, FEATURES, HARMLESS, Case
from identity.engines import Engines

# The others take minutes.
ALWAYS = (
    "length under LongRoPE",
    "LoRA modules",
    "weights reloaded in memory",
    "processor options",
    # That something is served at all.
    "nothing",
)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Engines() as started:
        yield started


def cases(of: tuple[Case, ...]) -> list[object]:
    marks = {True: (), False: (pytest.mark.stress,)}
    return [pytest.param(case, id=case.name, marks=marks[case.name in ALWAYS]) for case in of]


@pytest.mark.parametrize("case", cases(CHANGES))
def test_what_has_changed_is_not_served(
    engines: Engines, case: Case, request: pytest.FixtureRequest
) -> None:
    if missing := case.needs():
        pytest.skip(f"needs {missing}")
    with_control = request.node.get_closest_marker("stress") is not None
    row = run(engines, case, with_control=with_control)
    if "sampled" not in case.name:
        assert row.stale == 0
    assert not row.says_nothing, "the same without its part of the name must be served"


@pytest.mark.parametrize("case", cases((*FEATURES, *HARMLESS)))
def test_what_changes_nothing_is_served(engines: Engines, case: Case) -> None:
    row = run(engines, case)
    assert (row.stale, row.needless_miss) == (0, 0)
