"""A server that remembers, over depots in trouble, served ones, and models that change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp.server.app")

from server_harness import Conversation, Server, assert_same


def blocks(depot: Path) -> Iterator[Path]:
    """The files of a directory's blocks."""
    for folder, _, names in os.walk(depot):
        for name in names:
            file = Path(folder) / name
            if file.stat().st_size >= 4096:
                yield file


def test_garbage_in_the_directory_is_a_miss(server_model: Path, tmp_path: Path) -> None:
    depot = tmp_path / "depot"
    talk = Conversation("Ann")
    with Server(server_model, tmp_path / "log", depot) as server:
        for _ in range(3):
            talk.ask(server)
        assert server.stop() == 0
    shutil.copytree(depot, tmp_path / "sound")
    with Server(server_model, tmp_path / "log", None) as plain:
        reference = plain.chat(talk.messages)

    def answer() -> int:
        with Server(server_model, tmp_path / "log", depot) as server:
            ours = server.chat(talk.messages)
        assert_same(ours, reference)
        return ours.cached

    assert answer() > 0
    spoilt = 0
    for damage in (_flip_all, _cut_all, _fill_all):
        shutil.rmtree(depot)
        shutil.copytree(tmp_path / "sound", depot)
        for file in blocks(depot):
            damage(file)
            spoilt += 1
        assert answer() == 0, damage.__name__
    assert spoilt > 3


def _flip_all(file: Path) -> None:
    # In the payload, which ends the file.
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    content[-100] ^= 1
    file.write_bytes(content)


def _cut_all(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _fill_all(file: Path) -> None:
    file.write_bytes(os.urandom(file.stat().st_size))


def test_a_directory_that_goes_away_fails_no_request(server_model: Path, tmp_path: Path) -> None:
    depot = tmp_path / "depot"
    talks = [Conversation("Ann"), Conversation("Bob")]
    with Server(server_model, tmp_path / "log", None) as plain:
        expected = [talk.ask(plain) for _ in range(3) for talk in talks]
    talks = [Conversation("Ann"), Conversation("Bob")]
    with Server(server_model, tmp_path / "log", depot) as server:
        for turn in range(3):
            for at, talk in enumerate(talks):
                assert_same(talk.ask(server), expected[2 * turn + at])
            if turn == 0:
                while depot.exists():
                    # The background may write while this empties a directory.
                    shutil.rmtree(depot, ignore_errors=True)
                depot.write_text("a file where the directory was")
        assert server.stop() == 0


@pytest.mark.parametrize(
    "kind", ["gemma", "jamba", pytest.param("mamba", marks=pytest.mark.stress)]
)
def test_windows_and_recurrent_states_come_back(
    model_files: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    names = ("Ann", "Bob")
    with Server(model_files(kind), tmp_path / "plain", None) as plain:
        talks = [Conversation(name) for name in names]
        expected = [talk.ask(plain) for _ in range(4) for talk in talks]
    talks = [Conversation(name) for name in names]
    before = dict.fromkeys(names, 0)
    answers = []
    for turns in (range(2), range(2, 4)):
        with Server(model_files(kind), tmp_path / "log", tmp_path / "depot") as server:
            for _ in turns:
                for talk in talks:
                    answers.append(talk.ask(server))
                    # Of use is what was stored at the very end of a prompt.
                    assert answers[-1].cached >= before[talk.name] - 1
                    assert answers[-1].cached < answers[-1].prompt
                    before[talk.name] = answers[-1].prompt
            server.settle()
            server.kill()
    assert answers[0].cached == 0
    for ours, reference in zip(answers, expected, strict=True):
        assert_same(ours, reference)


def test_models_of_one_server_have_states_of_their_own(
    model_files: Callable[..., Path], tmp_path: Path
) -> None:
    config = tmp_path / "models.json"
    models = [
        {"model": str(model), "model_alias": name, "n_ctx": 1024, "chat_format": "chatml"}
        for name, model in (("one", model_files("llama")), ("other", model_files("llama", 2)))
    ]
    models.append(models[0] | {"model_alias": "embeddings", "embedding": True})
    config.write_text(json.dumps({"models": models, "api_key": "secret"}))
    talk = Conversation("Ann")
    first_model = model_files("llama")
    with Server(first_model, tmp_path / "log", tmp_path / "depot", config=config) as server:
        assert server.attempt("GET", "/extras/kvdepot")[0] == 401
        server.key = "secret"
        first = talk.ask(server, model="one")
        assert talk.ask(server, model="other").cached == 0
        # It was unloaded meanwhile, and what waited was written before.
        assert talk.ask(server, model="one").cached >= first.whole_pieces
        embedded = {"input": "a text", "model": "embeddings"}
        assert server.request("POST", "/v1/embeddings", embedded)["data"][0]["embedding"]
        assert server.get("/extras/kvdepot")["cache"] is None
        assert "embeddings: --embedding: it is for embeddings" in server.log.read_text()
        assert server.stop() == 0


def test_a_served_depot_keeps_states(server_model: Path, tmp_path: Path) -> None:
    socket = tmp_path / "s.sock"
    command = [sys.executable, "-m", "kvdepot", "serve", "Cache|Dax", "-o", f"socket={socket}"]
    command += ["-o", "cache.capacity=16MiB", "-o", "dax.capacity=64MiB"]
    with (tmp_path / "served").open("wb") as log:
        owner = subprocess.Popen(
            [*command, "-o", f"dax.path={tmp_path}/arena"], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while not socket.exists():
            assert owner.poll() is None, "it does not serve"
            assert time.monotonic() < deadline, "it does not serve"
            time.sleep(0.05)
        talk = Conversation("Ann")
        with Server(server_model, tmp_path / "log", f"unix:{socket}") as server:
            before = talk.ask(server)
            assert server.stop() == 0
        with Server(server_model, tmp_path / "log", f"unix:{socket}") as server:
            after = talk.ask(server)
            assert after.cached >= before.whole_pieces
            server.settle()
            # Nobody serves any more: a request is answered all the same.
            owner.kill()
            owner.wait()
            Conversation("Bob").ask(server)
            assert talk.ask(server).prompt > after.prompt
            assert server.stop() == 0
    finally:
        owner.kill()
        owner.wait()
