"""Measures the costs and savings of kvdepot's llama.cpp server against llama-cpp-python's server.

    PYTHONPATH=bench:tests/llama_cpp python -m llama_server [--json]

Restart: after conversations of ten turns, the server is stopped and started again, and then answers
turn 11, as the first and as the second request of the new process. The limit is the time of turn 11
in a process that has just answered turn 10. The time to compute all tokens is measured too.

Without reuse: a server with kvdepot's cache and a server without run at the same time, and receive
new prompts in turn, one at a time, and three without a pause.

A streaming client measures the time to the first token of each turn. The model has random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_models
import program
from program import say
from server_harness import TEXT, Server, turn

TURNS = 10
ANSWER_TOKENS = 24
BURST = 3
# Those of the tests are too small to be timed.
SIZES = {
    "EMBEDDING": 512,
    "HEADS": 8,
    "KV_HEADS": 8,
    "HEAD": 64,
    "FEED_FORWARD": 1536,
    "CONTEXT": 32768,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass
class Times:
    """Milliseconds, a value a round."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)


def words(seed: object, letters: int) -> str:
    """So many random letters, as many tokens."""
    return "".join(random.Random(str(seed)).choices(LETTERS, k=letters))


def ask(server: Server, messages: list[dict[str, str]]) -> tuple[float, float, str, int]:
    """Milliseconds to the first token and to the end of the stream, text, cached tokens."""
    wants: dict[str, Any] = {"stream": True, "logprobs": False, "max_tokens": ANSWER_TOKENS}
    wants |= {"stream_options": {"include_usage": True}} | TEXT
    began, first, text, cached = time.perf_counter(), 0.0, "", -1
    for chunk in server.events(turn(messages, **wants)):
        for choice in chunk["choices"]:
            # The role comes before anything is computed.
            if not first and choice["delta"].get("content"):
                first = time.perf_counter() - began
            text += choice["delta"].get("content") or ""
        if usage := chunk.get("usage"):
            cached = usage["prompt_tokens_details"]["cached_tokens"]
    whole = time.perf_counter() - began
    return (first or whole) * 1e3, whole * 1e3, text, cached


class Talk:
    """One conversation, of turns of the same length whatever its seed."""

    def __init__(self, seed: object, turn_tokens: int) -> None:
        self.seed, self.turn_tokens = seed, turn_tokens
        self.messages = [{"role": "system", "content": words((seed, "system"), turn_tokens)}]

    def question(self, number: int) -> list[dict[str, str]]:
        """All that is sent for a turn."""
        said = words((self.seed, number), self.turn_tokens)
        return [*self.messages, {"role": "user", "content": said}]

    def ten_turns(self, server: Server) -> None:
        """Turns 1 to 10."""
        for number in range(TURNS):
            self.messages = self.question(number)
            answer = ask(server, self.messages)[2]
            self.messages.append({"role": "assistant", "content": answer})


def restarts(options: argparse.Namespace, model: Path, work: Path) -> dict[str, Times]:
    """TTFT of turn 11: of the first and the second request after a restart, and computed."""
    found = {name: Times() for name in ("first", "second", "computed")}
    for number in range(options.rounds):
        depot, log = work / f"restart-{number}", work / "restart.log"
        talks = [Talk((number, name), options.turn_tokens) for name in ("a", "b", "live")]
        with Server(model, log, depot, *flags(options)) as server:
            for talk in talks:
                talk.ten_turns(server)
            live = ask(server, talks[2].question(TURNS))
            server.settle()
            server.stop()
        with Server(model, log, depot, *flags(options)) as server:
            answers = [ask(server, talk.question(TURNS)) for talk in talks[:2]]
            server.stop()
        with Server(model, log, None, *flags(options)) as plain:
            ask(plain, [{"role": "user", "content": "wakes it up"}])
            computed = ask(plain, talks[0].question(TURNS))
        tokens = [live[3], *(answer[3] for answer in answers)]
        if min(tokens) < TURNS * options.turn_tokens:
            raise SystemExit(f"{tokens} tokens were reused: fewer than ten turns'")
        # With flash attention llama.cpp's own answers depend on how a prompt was cut into batches.
        if answers[0][2] != computed[2] and not options.flash_attn:
            raise SystemExit("turn 11 is another text than computed without states")
        for name, answer in zip(found, [*answers, computed], strict=True):
            found[name].ours.append(answer[0])
            found[name].theirs.append(live[0])
        say(f"  turn 11: {live[0]:.0f} ms, restarted {answers[0][0]:.0f} and {answers[1][0]:.0f}")
    return found


def nothing_to_reuse(
    options: argparse.Namespace, model: Path, work: Path
) -> dict[tuple[str, int], Times]:
    """TTFT and the whole answer of fresh prompts, with and without the cache."""
    found = {(what, count): Times() for what in ("ttft", "total") for count in (1, BURST)}
    with (
        Server(model, work / "ours.log", work / "fresh", *flags(options)) as ours,
        Server(model, work / "plain.log", None, *flags(options)) as plain,
    ):
        for number in range(-1, options.rounds):
            for count in (1, BURST):
                sides = [(ours, "ours"), (plain, "theirs")]
                for server, side in sides if number % 2 else sides[::-1]:
                    prompts = [
                        words((number, count, side, at), options.fresh) for at in range(count)
                    ]
                    answers = [
                        ask(server, [{"role": "user", "content": prompt}]) for prompt in prompts
                    ]
                    if side == "ours":
                        ours.settle()
                    if number < 0:
                        continue  # the first one warms up
                    for what, at in (("ttft", 0), ("total", 1)):
                        total = sum(answer[at] for answer in answers)
                        getattr(found[what, count], side).append(total)
    return found


def flags(options: argparse.Namespace) -> list[str]:
    """Of both servers."""
    longest = max((TURNS + 2) * (options.turn_tokens + 2 * ANSWER_TOKENS + 64), options.fresh + 256)
    given = {"n_ctx": longest, "logits_all": False, "verbose": False}
    given["flash_attn"] = options.flash_attn
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def row(metric: str, case: dict[str, Any], times: Times) -> dict[str, Any]:
    """The median of the rounds' ratios, and the medians."""
    over = [ours / theirs for ours, theirs in zip(times.ours, times.theirs, strict=True)]
    return {
        "bench": "llama_server",
        "case": case,
        "metric": metric,
        "unit": "ms",
        "value": round(statistics.median(times.ours), 2),
        "limit": round(statistics.median(times.theirs), 2),
        "ratio": round(statistics.median(over), 4),
        "rounds": len(over),
    }


def measure(options: argparse.Namespace, model: Path, work: Path) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    tokens = {"turn_tokens": options.turn_tokens}
    for request, times in restarts(options, model, work).items():
        rows.append(row("turn_11_over_live", {**tokens, "request": request}, times))
    for (what, count), times in nothing_to_reuse(options, model, work).items():
        case = {"tokens": options.fresh, "requests": count, "time": what}
        rows.append(row("attached_over_plain", case, times))
    return rows


def main() -> int:
    """Measure, and print one row a metric and case."""
    parser = program.parser("llama_server", __doc__)
    parser.add_argument(
        "--flash-attn", action="store_true", help="use flash attention in both servers"
    )
    parser.add_argument(
        "--turn-tokens",
        type=int,
        default=200,
        help="tokens per user message, at least 1 (default: 200)",
    )
    parser.add_argument(
        "--fresh",
        type=int,
        default=2000,
        help="tokens per prompt without a stored prefix, at least 1 (default: 2000)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds, at least 1 (default: 5)"
    )
    parser.add_argument(
        "--model", type=Path, help="GGUF file (default: a model with random weights)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the depots (default: the system's temporary folder)"
    )
    options = parser.parse_args()
    if min(options.rounds, options.turn_tokens, options.fresh) < 1:
        parser.error("--rounds, --turn-tokens and --fresh are at least 1")
    with tempfile.TemporaryDirectory(prefix="kvdepot-", dir=options.folder) as work:
        model = options.model or random_model(Path(work))
        rows = measure(options, model, Path(work))
    for one in rows:
        if options.json:
            print(json.dumps(one))
            continue
        case = " ".join(str(value) for value in one["case"].values())
        value, limit = (f"{one[name]:.1f} ms" for name in ("value", "limit"))
        print(f"{one['metric']:<22}{case:<24}{value:>12}{limit:>12}{one['ratio']:>9.3f}")
    return 0


def random_model(work: Path) -> Path:
    """A model that takes some time: 12 layers, 24 KiB of keys and values a token."""
    for name, size in SIZES.items():
        setattr(llama_models, name, size)
    return llama_models.llama(work / "random.gguf", layers=12)


if __name__ == "__main__":
    sys.exit(main())
