"""The pictures in docs/plots show the rows that are in bench/runs."""

from __future__ import annotations

import itertools
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import plots
import pytest
from vllm_demo import chart

pytestmark = pytest.mark.unit

AGAIN = "its rows have changed since it was drawn: run `make plots`, look at it, and commit it"


def committed(name: str) -> str:
    return (plots.PLOTS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", plots.DRAWN)
def test_a_picture_carries_the_hash_of_its_rows(name: str) -> None:
    hash_of_rows = plots.carried(plots.drawn(name))
    assert "sha256: " in hash_of_rows
    assert plots.carried(committed(name)) == hash_of_rows, f"{name}: {AGAIN}"


@pytest.mark.parametrize("name", plots.DRAWN)
def test_a_picture_is_the_one_that_make_plots_draws(name: str) -> None:
    assert committed(name) == plots.drawn(name), f"{name}: run `make plots`"


@pytest.mark.parametrize(
    ("name", "file", "figure", "other"),
    [
        ("ttft.svg", plots.DEMO, '"hit_ms": 293.42', '"hit_ms": 293.43'),
        ("bandwidth.svg", plots.CUDA, '"value":17.61', '"value":17.62'),
        ("peers.svg", plots.UCM, '"ratio": 0.879', '"ratio": 0.878'),
    ],
    ids=plots.DRAWN,
)
def test_a_changed_row_changes_the_hash(
    name: str, file: str, figure: str, other: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(plots.RUNS, runs)
    text = (runs / file).read_text(encoding="utf-8")
    assert figure in text
    (runs / file).write_text(text.replace(figure, other), encoding="utf-8")
    assert plots.carried(plots.drawn(name, runs)) != plots.carried(committed(name))


def test_a_row_that_no_picture_shows_changes_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(plots.RUNS, runs)
    with (runs / plots.MEMORY).open("a", encoding="utf-8") as file:
        file.write('{"bench": "memory", "case": {}, "metric": "other", "value": 1}\n')
    assert plots.drawn("bandwidth.svg", runs) == committed("bandwidth.svg")


@pytest.mark.parametrize("name", plots.DRAWN)
def test_a_picture_has_a_title_and_a_description(name: str) -> None:
    root = ElementTree.fromstring(committed(name))
    names = {"svg": "http://www.w3.org/2000/svg"}
    labels = root.attrib["aria-labelledby"].split()
    described = [root.find(f"svg:{tag}", names) for tag in ("title", "desc")]
    assert [one.attrib["id"] for one in described if one is not None] == labels
    assert all(one is not None and one.text for one in described)


def test_labels_do_not_overlap() -> None:
    heights = chart._apart([100.0, 101.0, 40.0, 198.0, 199.0], 200.0)
    assert heights[2] == 40.0
    ordered = sorted(heights)
    assert all(below - above >= chart.LINE for above, below in itertools.pairwise(ordered))
    assert ordered[-1] <= 200.0


def test_a_value_outside_of_an_axis_is_an_error() -> None:
    axis = chart.linear("GB/s", [3.0, 17.5])
    assert [name for _, name in axis.ticks] == ["0", "5", "10", "15", "20"]
    assert axis.place(10.0) == 0.5
    with pytest.raises(ValueError, match="is outside of the axis"):
        axis.place(21.0)
    assert [name for _, name in chart.decades("ms", [40.0, 499.0]).ticks] == ["10", "100", "1,000"]
