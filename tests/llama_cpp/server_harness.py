"""Real servers as processes, and plain HTTP clients of them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdepot.llama_cpp.states import PIECE_TOKENS
from vllm_demo.server import free_port

START_S = 120
ANSWER_S = 120
N_CTX = 2048
SYSTEM = "You answer as briefly as you can, and never tell anybody why. " * 2


@dataclass
class Answer:
    """What a client has got."""

    text: str
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def completion(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def whole_pieces(self) -> int:
        """What a later prompt that begins with this one finds of it at least, whatever became of
        its answer: text that is not its tokens' own is other tokens when it comes again."""
        return (self.prompt - 1) // PIECE_TOKENS * PIECE_TOKENS

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])


class Server:
    """One server in a process of its own. Without a depot it is llama-cpp-python's own."""

    def __init__(
        self,
        model: Path,
        log: Path,
        depot: Path | str | None,
        *flags: str,
        config: Path | None = None,
    ) -> None:
        self.log = log
        self.port = free_port()
        self.key = ""
        module = "llama_cpp.server" if depot is None else "kvdepot.llama_cpp"
        own = () if depot is None else ("--depot", str(depot))
        settings = ["--model", str(model), "--n_ctx", str(N_CTX), "--chat_format", "chatml"]
        if config is not None:
            settings = ["--config_file", str(config)]
        command = [sys.executable, "-m", module, *settings, *own, *flags]
        # The environment's is taken beside a file too.
        environment = os.environ | {"PORT": str(self.port)}
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.attempt("GET", "/v1/models")
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(f"the server did not start:\n{self.tail()}") from None
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.kill()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self, how: int = signal.SIGTERM) -> int:
        """End it by a signal; its exit status."""
        self.process.send_signal(how)
        return self.process.wait(timeout=ANSWER_S)

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        status, answer = self.attempt(method, path, body)
        assert status == 200, f"{method} {path}: {status} {answer}"
        return answer

    def attempt(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The status of an answer, and its body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, self.headers())
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def chat(self, messages: list[dict[str, str]], **options: Any) -> Answer:
        """One turn, greedy unless `options` say otherwise, with the tokens' logprobs."""
        answer = self.request("POST", "/v1/chat/completions", turn(messages, **options))
        choice = answer["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [(one["token"], one["logprob"]) for one in content]
        return Answer(choice["message"]["content"], answer["usage"], logprobs)

    def stream(self, messages: list[dict[str, str]], **options: Any) -> Answer:
        """The same turn as a stream, read to its end."""
        answer = Answer("")
        for chunk in self.events(turn(messages, stream=True, logprobs=False, **options)):
            answer.chunks.append(chunk)
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                answer.text += choice["delta"].get("content") or ""
        return answer

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream; whoever stops early hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            text = json.dumps(body)
            connection.request("POST", "/v1/chat/completions", text, self.headers())
            response = connection.getresponse()
            assert response.status == 200, response.read()
            while line := response.readline():
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            connection.close()

    def cache(self) -> dict[str, Any]:
        """What the cache says of itself."""
        statistics: dict[str, Any] = self.get("/extras/kvdepot")["cache"]
        return statistics

    def settle(self) -> None:
        """Wait until nothing waits to be written."""
        deadline = time.monotonic() + ANSWER_S
        while self.cache()["waiting_bytes"]:
            assert time.monotonic() < deadline, f"still waiting: {self.cache()}"
            time.sleep(0.01)


# None of the special tokens is drawn, of which two end an answer, nor bytes that are no text by
# themselves: those the server holds back. Text that lacks any is other tokens when it comes again.
TEXT = {"logit_bias": {str(token): -100 for token in (*range(5), *range(5 + 128, 5 + 256))}}


def turn(messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    """A request's body."""
    greedy = {"temperature": 0.0, "max_tokens": 12, "logprobs": True, "top_logprobs": 1}
    return {"messages": messages} | greedy | options


class Conversation:
    """A client that keeps its own history and sends all of it, as chat clients do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turns = 0
        self.messages = [{"role": "system", "content": f"{name}. {SYSTEM}"}]

    def ask(self, server: Server, **options: Any) -> Answer:
        self.turns += 1
        question = f"Question {self.turns} of {self.name}: what comes behind {self.turns**5}?"
        self.messages.append({"role": "user", "content": question})
        answer = server.chat(self.messages, **options)
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer


def assert_same(ours: Answer, reference: Answer) -> None:
    """The same tokens, and logprobs as close as two ways to compute a prompt have them."""
    assert ours.text == reference.text
    assert [token for token, _ in ours.logprobs] == [token for token, _ in reference.logprobs]
    for (_, one), (_, other) in zip(ours.logprobs, reference.logprobs, strict=True):
        assert abs(one - other) < 1e-3


def disk_bytes(directory: Path) -> int:
    """What its files have on disk; those that go meanwhile have nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
