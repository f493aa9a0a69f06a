"""A server that remembers, as its clients see it: real servers, kills, plain HTTP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp.server.app")

from server_harness import (
    PIECE_TOKENS,
    Answer,
    Conversation,
    Server,
    assert_same,
    disk_bytes,
    turn,
)

NAMES = ("Ann", "Bob", "Cas")
TURNS = 10
# The server is killed behind these.
KILLS = (3, 7)


@pytest.fixture(scope="module")
def plain(server_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """llama-cpp-python's own server, without a cache."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with Server(server_model, log, None) as server:
        yield server


@pytest.fixture(scope="module")
def expected(plain: Server) -> dict[tuple[str, int], Answer]:
    """What three conversations get from it, by turns."""
    talks = [Conversation(name) for name in NAMES]
    return {(talk.name, turn): talk.ask(plain) for turn in range(TURNS) for talk in talks}


def test_interleaved_conversations_go_on_over_kills(
    server_model: Path, tmp_path: Path, expected: dict[tuple[str, int], Answer]
) -> None:
    talks = [Conversation(name) for name in NAMES]
    first, last = 0, dict.fromkeys(NAMES, 0)
    for end in (*KILLS, TURNS):
        with Server(server_model, tmp_path / "log", tmp_path / "depot") as server:
            for turn in range(first, end):
                for talk in talks:
                    answer = talk.ask(server)
                    assert_same(answer, expected[talk.name, turn])
                    assert last[talk.name] <= answer.cached < answer.prompt
                    last[talk.name] = answer.whole_pieces
            server.settle()
            server.kill()
        first = end


def test_what_waits_is_written_before_a_signal_ends_it(server_model: Path, tmp_path: Path) -> None:
    for how in (signal.SIGTERM, signal.SIGINT):
        talk = Conversation(how.name)
        with Server(server_model, tmp_path / "log", tmp_path / "depot") as server:
            before = talk.ask(server)
            assert server.stop(how) == 0, server.tail()
            assert "Traceback" not in server.tail()
        with Server(server_model, tmp_path / "log", tmp_path / "depot") as server:
            assert talk.ask(server).cached >= before.whole_pieces


def test_an_open_stream_is_kept_at_the_end(server_model: Path, tmp_path: Path) -> None:
    messages = Conversation("Ann").messages
    with Server(server_model, tmp_path / "log", tmp_path / "depot") as server:
        wants = turn(messages, stream=True, logprobs=False, max_tokens=300)
        events = server.events(wants)
        next(events)
        next(events)
        assert server.stop() == 0, server.tail()
        events.close()
    with Server(server_model, tmp_path / "log", tmp_path / "depot") as server:
        assert server.chat(messages).cached >= PIECE_TOKENS


def test_the_second_interrupt_waits_for_no_answer(server_model: Path, tmp_path: Path) -> None:
    talk = Conversation("Ann")
    with (
        Server(server_model, tmp_path / "log", tmp_path / "depot") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        before = talk.ask(server)
        # Neither of the tokens that end an answer.
        wants = {"max_tokens": 1700, "logit_bias": {"2": -100, "4": -100}}
        endless = pool.submit(server.chat, Conversation("Bob").messages, **wants)
        while server.get("/extras/kvdepot")["cache"]["prompts"] < 2:
            assert not endless.done()
        server.process.send_signal(signal.SIGINT)
        while "Shutting down" not in server.tail():
            assert server.process.poll() is None
        assert server.stop(signal.SIGINT) == 130, server.tail()
        assert endless.exception() is not None
    with Server(server_model, tmp_path / "log", tmp_path / "depot") as server:
        assert talk.ask(server).cached >= before.whole_pieces


def test_two_servers_share_one_directory(
    server_model: Path, tmp_path: Path, expected: dict[tuple[str, int], Answer]
) -> None:
    with (
        Server(server_model, tmp_path / "one", tmp_path / "depot") as one,
        Server(server_model, tmp_path / "other", tmp_path / "depot") as other,
        ThreadPoolExecutor(2) as pool,
    ):
        talks = [Conversation(name) for name in NAMES[:2]]
        servers = [one, other]
        before = {talk.name: 0 for talk in talks}
        for turn in range(4):
            # Both answer at the same time, and each goes on with what the other has computed.
            answers = list(pool.map(Conversation.ask, talks, servers))
            for talk, answer in zip(talks, answers, strict=True):
                assert_same(answer, expected[talk.name, turn])
                assert answer.cached >= before[talk.name]
                before[talk.name] = answer.whole_pieces
            one.settle()
            other.settle()
            servers.reverse()


def test_other_weights_of_the_same_shape_reuse_nothing(
    model_files: Callable[..., Path], tmp_path: Path
) -> None:
    talk = Conversation("Dan")
    with Server(model_files("llama", 1), tmp_path / "log", tmp_path / "depot") as server:
        talk.ask(server)
        server.stop()
    with Server(model_files("llama", 2), tmp_path / "log", tmp_path / "depot") as server:
        assert talk.ask(server).cached == 0


@pytest.fixture(scope="module")
def remembering(server_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests that need none of their own."""
    folder = tmp_path_factory.mktemp("remembering")
    with Server(server_model, folder / "log", folder / "depot") as server:
        yield server


def test_streams_end_with_the_usage_where_they_are_asked_for_it(remembering: Server) -> None:
    talk, other = Conversation("Eve"), Conversation("Fay")
    whole = talk.ask(remembering)
    other.ask(remembering)
    messages = talk.messages[:-1]
    asked = remembering.stream(messages, stream_options={"include_usage": True})
    assert asked.text == whole.text
    *before, last = asked.chunks
    assert last["choices"] == []
    assert (last["id"], last["model"]) == (before[-1]["id"], before[-1]["model"])
    assert not any("usage" in chunk for chunk in before)
    assert last["usage"] | {"prompt_tokens_details": None} == whole.usage | {
        "prompt_tokens_details": None
    }
    assert whole.whole_pieces <= asked.cached < whole.prompt
    other.ask(remembering)
    assert remembering.stream(messages).usage == {}
    assert remembering.stream(messages, stream_options={"include_usage": False}).usage == {}


def test_whoever_hangs_up_has_not_computed_in_vain(remembering: Server) -> None:
    talk = Conversation("Gus")
    talk.messages.append({"role": "user", "content": "Go on and on."})
    events = remembering.events(turn(talk.messages, stream=True, logprobs=False, max_tokens=300))
    for _ in range(3):
        next(events)
    events.close()
    Conversation("Hal").ask(remembering)
    assert remembering.chat(talk.messages, max_tokens=1).cached > 0


def test_sampling_is_what_it_was_without_states(remembering: Server, plain: Server) -> None:
    talks = [Conversation(name) for name in ("Ida", "Jon")]
    # Where a request gives none, the server draws a seed from that of the request before.
    for seed in (7, None, 8, None):
        given = {"temperature": 1.5} | ({} if seed is None else {"seed": seed})
        for talk in talks:
            asked = [*talk.messages, {"role": "user", "content": "What comes behind it?"}]
            ours = remembering.chat(asked, **given)
            assert_same(ours, plain.chat(asked, **given))
    assert ours.cached > 0


def test_logprobs_of_the_prompt_are_computed(remembering: Server, plain: Server) -> None:
    def ask(server: Server, prompt: str) -> Any:
        wants = {"echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0.0}
        return server.request("POST", "/v1/completions", {"prompt": prompt} | wants)

    prompt = "What a depot keeps of a prompt has no logits of it. " * 4
    for text in (prompt, "Another one. " * 9, prompt):
        ours, reference = (ask(server, text) for server in (remembering, plain))
        assert ours["choices"][0]["text"] == reference["choices"][0]["text"]
        pairs = zip(
            *(one["choices"][0]["logprobs"]["token_logprobs"] for one in (ours, reference)),
            strict=True,
        )
        assert all(one == other or abs(one - other) < 1e-3 for one, other in pairs)
        assert ours["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_wrong_requests_get_the_answers_of_the_server(remembering: Server, plain: Server) -> None:
    long = [{"role": "user", "content": "too long " * 1000}]
    for body in ({"messages": long}, {"messages": 3}):
        ours, theirs = (
            server.attempt("POST", "/v1/chat/completions", body) for server in (remembering, plain)
        )
        assert ours == theirs
        assert ours[0] >= 400
    assert Conversation("Kay").ask(remembering).prompt > 0


def test_a_directory_holds_no_more_than_its_capacity(server_model: Path, tmp_path: Path) -> None:
    capacity = 2 << 20
    depot = tmp_path / "depot"
    with Server(server_model, tmp_path / "log", depot, "--capacity", str(capacity)) as server:
        written = 0
        for name in range(12):
            talk = Conversation(f"Lot {name}")
            for _ in range(3):
                talk.ask(server)
                server.settle()
                assert disk_bytes(depot) <= capacity
        written = server.cache()["bytes_written"]
        assert written > capacity, "too little was written to fill it"
        assert talk.ask(server).cached > 0
