"""One request and everything worth knowing about it; counters and thread clocks."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .server import Server, ServerError

# Tokens generated for each prompt: enough to see that a wrong block changes the
# greedy continuation, few enough that decoding stays cheap.
OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """What one prompt gave."""

    ttft_ms: float
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    text: str = ""


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """`count` random prompts of exactly `tokens` tokens, the same for a seed."""
    generator = random.Random(seed)
    return [[generator.randrange(3, 250) for _ in range(tokens)] for _ in range(count)]


def ask(server: Server, prompt: list[int], *, output_tokens: int = OUTPUT_TOKENS) -> Answer:
    """Send a prompt of token ids, greedily; the time runs until the first token arrives."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "logprobs": 1}
    return _answer(server, "/v1/completions", body)


def chat(
    server: Server,
    messages: list[dict[str, str]],
    *,
    output_tokens: int,
    on_text: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Send a conversation, greedily; `on_text` gets the answer's text as it arrives.

    The answer ends with its first paragraph.
    """
    body = {
        "messages": messages,
        "max_tokens": output_tokens,
        "stop": ["\n\n"],
        "logprobs": True,
    }
    return _answer(server, "/v1/chat/completions", body, on_text)


def count_tokens(server: Server, messages: list[dict[str, str]]) -> int:
    """Number of tokens of a conversation, without what asks the model for an answer."""
    body = {"model": "demo", "messages": messages, "add_generation_prompt": False}
    with server.post("/tokenize", body) as response:
        return json.loads(response.read())["count"]


def _answer(
    server: Server,
    path: str,
    body: dict[str, Any],
    on_text: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Send one request and read its stream."""
    common = {
        "model": "demo",
        "temperature": 0,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = None
    text = ""
    tokens: list[str] = []
    logprobs: list[float] = []
    usage = None
    with server.post(path, common | body) as stream:
        for line in stream:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ServerError(f"{server.name}: {event['error']}")
            for choice in event.get("choices") or ():
                found = _tokens(choice)
                if found:
                    first = first or time.perf_counter()
                    tokens += [token for token, _ in found]
                    logprobs += [logprob for _, logprob in found]
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                if piece:
                    text += piece
                    on_text(piece)
            usage = event.get("usage") or usage
    if first is None or usage is None:
        raise ServerError(f"{server.name}: the stream ended without a token:\n{server.tail()}")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft_ms=(first - start) * 1e3,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
        text=text,
    )


def _tokens(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens and log probabilities of one event, as completions or chats have them."""
    found = choice.get("logprobs") or {}
    if "content" in found:
        return [(each["token"], each["logprob"]) for each in found["content"] or ()]
    return list(zip(found.get("tokens") or (), found.get("token_logprobs") or (), strict=True))


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)$")


def metric(server: Server, name: str, **labels: str) -> float:
    """Sum of all samples of `name` in /metrics whose labels agree; 0 if none."""
    total = 0.0
    for line in server.get("/metrics")[1].splitlines():
        match = _SAMPLE.match(line)
        if not match or match[1] != name:
            continue
        found = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
        if all(found.get(key) == value for key, value in labels.items()):
            total += float(match[3])
    return total


def warm(server: Server, block_tokens: int) -> None:
    """Send the first requests after a start, which take seconds longer than later ones."""
    for prompt in prompts(2, 3 * block_tokens + 40, seed=1):
        ask(server, prompt)
        ask(server, prompt)


def costs(server: Server) -> tuple[float, float]:
    """Seconds that kvdepot has taken so far: on the requests' path, and of CPU in its threads."""
    return metric(server, "kvdepot_request_path_seconds_total"), depot_thread_seconds(server)


def wait_until_written(server: Server, seconds: float = 120.0) -> float:
    """Wait until kvdepot's metric shows nothing left to write; seconds it took."""
    start = time.monotonic()
    quiet = 0
    while quiet < 3:
        left = metric(server, "kvdepot_pending_bytes")
        quiet = quiet + 1 if left == 0 else 0
        if time.monotonic() - start > seconds:
            raise ServerError(f"{server.name}: {left:.0f} bytes still unwritten after {seconds} s")
        time.sleep(0.1)
    return time.monotonic() - start


def depot_thread_seconds(server: Server) -> float:
    """CPU time of all kvdepot threads of the server, from the kernel's clocks."""
    total = 0.0
    for pid in server.processes():
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                if (task / "comm").read_text().startswith("kvdepot"):
                    total += int((task / "schedstat").read_text().split()[0]) / 1e9
            except OSError:
                continue  # the thread ended between listing and reading
    return total


def largest_difference(ours: Answer, reference: Answer) -> float:
    """Largest logprob difference over the tokens that both have in common."""
    worst = 0.0
    for mine, its, a, b in zip(
        ours.tokens, reference.tokens, ours.logprobs, reference.logprobs, strict=True
    ):
        worst = max(worst, abs(a - b))
        if mine != its:
            break  # after this the two continue different texts
    return worst
