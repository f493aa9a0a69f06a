"""Two engines, one after the other: the second is served nothing that another configuration
computed, and everything that its own did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import forks
import pytest
from identity.__main__ import run, served
from identity.cases import CHANGES, FEATURES, HARMLESS, Case
from identity.engines import Engine, Engines, Prompt

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
    variables = {
        # Each engine would compile what counts log probabilities, for seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # Threads that wait for each other at every step would wait for other tests.
        "OMP_NUM_THREADS": "1",
    }
    with Engines(forks.command(forks.VLLM), **variables) as started:
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


# In these, one part is left out of the names, as if nobody had thought of it.
HOLES = (
    "length under LongRoPE",
    "processor files",
    "LoRA modules",
    "weights reloaded in memory",
)
ALWAYS_PROBED = (HOLES[0], "detect")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        pytest.param(
            name, first, marks=() if (name, first) == ALWAYS_PROBED else pytest.mark.stress
        )
        for name in HOLES
        for first in ("detect", "gate")
    ],
)
def test_what_is_missing_in_a_name_is_noticed_by_a_probe(
    engines: Engines,
    name: str,
    first: str,
    tmp_path: Path,
) -> None:
    """The first hit is probed. It may have been served, but no later one of its namespace is; with
    a gate, none."""
    (case,) = (case for case in CHANGES if case.name == name)

    def prompts(at: Path) -> list[Prompt]:
        """The case's, with several beginnings."""
        return [
            replace(prompt, tokens=[number, *prompt.tokens])
            for number in range(20, 26)
            for prompt in case.prompts(at)
        ]

    home = {"XDG_CACHE_HOME": str(tmp_path)}

    def make(at: Path) -> tuple[Engine, Engine]:
        one, other = case.make(at)
        return replace(one, environment=home), replace(other, environment=home)

    settings = {"probe_every": 10**12, "probe_first": first}
    probed = replace(case, make=make, prompts=prompts, settings=settings)
    found = served(engines, probed, case.holes)
    assert engines.probed.results["differed"] > 1
    tokens, differs = found[0]
    assert (tokens > 0 and differs) is (first == "detect")
    assert [tokens for tokens, _ in found[1:]] == [0] * 5
    assert not any(differs for _, differs in found[1:])
    assert (tmp_path / "kvdepot/quarantine").exists()


@pytest.mark.parametrize("case", cases((*FEATURES, *HARMLESS)))
def test_what_changes_nothing_is_served(engines: Engines, case: Case) -> None:
    row = run(engines, case)
    assert (row.stale, row.needless_miss) == (0, 0)
