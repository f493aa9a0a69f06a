"""`make gpu-day`: which slots start, and what is left of a slot that was killed."""

from __future__ import annotations

import argparse
import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu_day import __main__ as day
from gpu_day import pack
from gpu_day.slots import SLOTS, Slot

pytestmark = pytest.mark.unit


def slot(name: str, program: str, seconds: float = 1.0, module: str = "json") -> Slot:
    command = [sys.executable, "-c", program]
    return Slot(name, "a test", seconds, command, command, (module,))


class Day(day.Day):
    """Cuts the slot `cut` as soon as it has a row: no test waits for a time."""

    def _write(self, row: dict[str, Any]) -> None:
        super()._write(row)
        if row.get("slot") == "cut":
            self.cut()


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, slots: list[Slot]
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    monkeypatch.setattr(day, "SLOTS", slots)
    options = argparse.Namespace(
        slot=None,
        rehearse=False,
        runs=folder,
        logs=folder,
        site=folder / "site",
        work=folder,
    )
    file = folder / "2026-01-01-test-gpu-day.jsonl"
    with file.open("a") as rows:
        ended = Day(options, "test", rows, time.monotonic() + 3600).run()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return {one.slot: one.state for one in ended}, found


ROW = 'print(\'{"bench": "b", "case": {}, "metric": "m", "value": 1}\', flush=True)'


def test_a_slot_that_does_not_fit_is_left_out_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slots = [
        slot("long", ROW, seconds=9000),
        slot("short", ROW),
        slot("none", ROW, module="absent_"),
    ]
    states, rows = run(monkeypatch, tmp_path, slots)
    assert states["long"].startswith("skipped: takes 9000 s")
    assert states["short"] == "done"
    assert states["none"] == "skipped: no module absent_"
    assert [row.get("slot") for row in rows] == ["short", None]
    # From now on the measured duration counts.
    again = slot("short", ROW, seconds=9000)
    assert day.expected_seconds(again, "test", tmp_path) < 9000
    assert day.expected_seconds(again, "another device", tmp_path) == 9000


def test_a_slot_that_is_cut_or_fails_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slots = [
        slot("fails", f"{ROW}; print('no row'); raise SystemExit(3)"),
        slot("cut", f"{ROW}; import signal; signal.pause()"),
    ]
    states, rows = run(monkeypatch, tmp_path, slots)
    assert states["fails"].startswith("failed: exit status 3")
    assert states["cut"].startswith("failed: the time was over")
    assert [row.get("slot") for row in rows] == ["fails", None, "cut", None]
    assert "no row" in (tmp_path / "fails.log").read_text()
    # Only a slot that ended is a measure of its duration.
    assert day.expected_seconds(slots[1], "test", tmp_path) == 1.0


def test_each_slot_has_a_command_of_the_tree() -> None:
    for one in SLOTS:
        for command in (one.command, one.rehearsal):
            assert command[:2] == [sys.executable, "-m"]
            module = day.BENCH / command[2].replace(".", "/")
            files = (module.with_suffix(".py"), module / "__main__.py")
            assert command[2] == "kvdepot" or any(file.is_file() for file in files)


def test_parts_hold_every_file_once_and_are_no_larger_than_allowed(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as files:
        for number in range(9):
            files.writestr(f"some/{number}.bin", bytes([number]) * 1000 * (number + 1))
        files.writestr("vllm/vllm-rs", bytes(1 << 20))
    parts = pack.parts_of([wheel], 12_000)
    names = sorted(info.filename for part in parts for _, info in part.files)
    assert names == [f"some/{number}.bin" for number in range(9)]
    assert all(part.size <= 12_000 for part in parts)
    with pytest.raises(SystemExit, match="more than one part"):
        pack.parts_of([wheel], 5000)
