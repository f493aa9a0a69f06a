"""One process of the benchmark: `python -m vllm_device.measure PLAN FD`, started by `__main__`.

What it finds goes as JSON lines to the file descriptor, each as soon as it is known; what vLLM says
goes to the standard streams.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from vllm_device.plan import WARM_TOKENS, Plan, prompts

GIB = 1 << 30
# A round of more tokens than these is computed once: it takes half a minute.
LONG_ROUND = 80_000
STREAM_PROMPT = 512
STREAM_TOKENS = 3000
DECODED = 100
DECODE_SECONDS = 12.0
BESIDE = 6
LOADED_PROMPTS = 3


class Report:
    """Where it all goes."""

    def __init__(self, plan: Plan, out: IO[str], device: str) -> None:
        self._plan = plan
        self._out = out
        self.device = device

    def say(self, line: str) -> None:
        """One line of progress."""
        self._write({"say": f"{self._plan.way}: {line}"})

    def row(self, way: str, metric: str, unit: str, value: float, **more: Any) -> None:
        """One number, and what it is of."""
        case = {"way": way} | more.pop("case", {})
        if self._plan.block_size:
            case["block_size"] = self._plan.block_size
        row = {"bench": "vllm_device", "device": self.device, "case": case, "metric": metric}
        self._write({"row": row | {"unit": unit, "value": round(value, 2)} | more})

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()


def device_name() -> str:
    """What the numbers are of."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def reference(report: Report) -> None:
    """Rates of plain copies between pinned memory and the device: no restore is faster."""
    import torch

    if not torch.cuda.is_available():
        report.say("no CUDA device: there is no reference")
        return
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    for name, target, source in (("h2d", device, host), ("d2h", host, device)):
        rates = []
        for _ in range(6):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(GIB / (time.perf_counter() - begun) / 1e9)
        report.row(
            "reference",
            f"pinned_{name}",
            "GB/s",
            statistics.median(rates[1:]),
            rounds=[round(rate, 2) for rate in rates],
        )


class Measurement:
    """One engine, measured."""

    def __init__(self, plan: Plan, report: Report) -> None:
        # Not before the environment is looked at, and not where only copies are measured.
        from vllm_device.engine import Engine

        self._plan = plan
        self._report = report
        begun = time.perf_counter()
        self.engine = Engine(plan)
        taken = time.perf_counter() - begun
        report.say(f"engine in {taken:.0f} s, {self.engine.gpu_tokens} tokens on the device")

    def run(self) -> None:
        """All of the plan."""
        if self._plan.role == "plain":
            self._warm_plain()
            self._plain()
        else:
            self._warm_stored()
            for tokens in self._plan.tokens:
                self._stored(tokens)
        if self._plan.decode_tokens:
            self._decode()
        self.engine.settle()

    # ---- TTFT --------------------------------------------------------------------------------

    def _prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        return prompts(count, tokens, self._plan.vocabulary, seed)

    def _warm_plain(self) -> None:
        for seed, tokens in enumerate((WARM_TOKENS, max(WARM_TOKENS, self._plan.tokens[0]))):
            self.engine.ask(self._prompts(1, tokens, seed))

    def _plain(self) -> None:
        for tokens, concurrency in itertools.product(self._plan.tokens, self._plan.concurrency):
            asked: list[list[int]] = []
            found = []
            for number in range(1 if tokens * concurrency > LONG_ROUND else self._plan.rounds):
                asked = self._prompts(concurrency, tokens, 1000 * (number + 1) + concurrency)
                found.append(self._round("computed", asked))
            if "computed" in self._plan.ways:
                self._ttft("computed", tokens, concurrency, found, expect_hits=False)
            if "own" in self._plan.ways:
                again = [self._round("own", asked) for _ in range(self._plan.rounds)]
                self._ttft("own", tokens, concurrency, again)

    def _warm_stored(self) -> None:
        """The first load of a process attaches, and compiles what is compiled at its first use."""
        prompt = self._prompts(1, WARM_TOKENS, 7)
        for _ in range(3):
            self.engine.ask(prompt)
            self.engine.forget()

    def _stored(self, tokens: int) -> None:
        asked = self._prompts(max(self._plan.concurrency), tokens, tokens)
        if self._plan.role != "restarted":
            self._prime(asked, tokens)
        if self._plan.role == "prime":
            return
        for concurrency in self._plan.concurrency:
            found = []
            before = self.engine.hits()
            for _ in range(self._plan.rounds):
                self.engine.forget()
                found.append(self._round(self._plan.way, asked[:concurrency]))
            after = self.engine.hits()
            served = {name: after[name] - before.get(name, 0) for name in after}
            self._ttft(self._plan.way, tokens, concurrency, found, served=served)

    def _prime(self, asked: list[list[int]], tokens: int) -> None:
        """Have them stored, one after the other: no queue of a far tier overflows."""
        first = []
        begun = time.perf_counter()
        waited = 0.0
        for prompt in asked:
            first.append(self.engine.ask([prompt])[0].ttft_ms)
            settling = time.perf_counter()
            self.engine.settle()
            waited += time.perf_counter() - settling
        taken = time.perf_counter() - begun
        self._report.row(
            self._plan.way,
            "ttft_storing",
            "ms",
            statistics.median(first),
            case={"tokens": tokens, "concurrency": 1},
            rounds=[round(value, 1) for value in first],
            stored_after_ms=round(waited * 1e3 / len(asked), 1),
        )
        self._report.say(f"{len(asked)} prompts of {tokens} tokens stored in {taken:.1f} s")

    def _round(self, way: str, asked: list[list[int]]) -> tuple[float, float, int]:
        """Mean and last TTFT of a round, and the fewest cached tokens."""
        answers = self.engine.ask(asked)
        times = [answer.ttft_ms for answer in answers]
        found = (statistics.mean(times), max(times), min(each.cached_tokens for each in answers))
        self._report.say(
            f"{way}, {len(asked)} of {len(asked[0]) - 1} tokens: {found[0]:.1f} ms, "
            f"{found[2]} cached"
        )
        return found

    def _ttft(
        self,
        way: str,
        tokens: int,
        concurrency: int,
        found: list[tuple[float, float, int]],
        *,
        expect_hits: bool = True,
        served: dict[str, int] | None = None,
    ) -> None:
        cached = min(each[2] for each in found)
        if expect_hits and cached < tokens - 2 * self.engine.block_tokens:
            self._report.say(f"WARNING: {way}: {cached} of {tokens} tokens were hits")
        self._report.row(
            way,
            "ttft",
            "ms",
            statistics.median(each[0] for each in found),
            case={"tokens": tokens, "concurrency": concurrency},
            last=round(statistics.median(each[1] for each in found), 2),
            cached_tokens=cached,
            rounds=[round(each[0], 2) for each in found],
            **({"served": served} if served else {}),
        )

    # ---- decoding ----------------------------------------------------------------------------

    def _decode(self) -> None:
        """A stream's tokens per second beside prompts that are computed, stored or loaded."""
        tokens = self._plan.decode_tokens
        fresh = self._fresh(tokens)
        kinds: dict[str, Callable[[], list[int]]] = {}
        if self._plan.role == "plain":
            kinds["compute"] = lambda: next(fresh)
        else:
            loaded = self._prompts(LOADED_PROMPTS, tokens, 99)
            for prompt in loaded:
                self.engine.ask([prompt])
                self.engine.settle()
            turns = itertools.cycle(loaded)

            def load() -> list[int]:
                self.engine.forget_idle()
                return next(turns)

            kinds["load"] = load
            kinds["store"] = lambda: next(fresh)
        self.engine.wait_for_pages()
        for kind, feed in kinds.items():
            self.engine.forget()
            self.engine.start_stream(self._prompts(1, STREAM_PROMPT, 5)[0], STREAM_TOKENS)
            self.engine.decode(10, DECODE_SECONDS)
            alone = self.engine.decode(DECODED, DECODE_SECONDS)
            beside = self.engine.decode(DECODED, DECODE_SECONDS, feed, BESIDE)
            self.engine.stop_stream()
            answers = beside.answers
            self._report.row(
                "computed" if self._plan.role == "plain" else self._plan.way,
                "decode_rate",
                "tokens/s",
                beside.rate,
                case={"beside": kind, "tokens": tokens},
                limit=round(alone.rate, 2),
                ratio=round(beside.rate / alone.rate, 3) if alone.rate else None,
                decoded=beside.tokens,
                prompts=len(answers),
                prompt_ttft_ms=round(statistics.median(a.ttft_ms for a in answers), 1)
                if answers
                else None,
                cached_tokens=min((a.cached_tokens for a in answers), default=0),
            )

    def _fresh(self, tokens: int) -> Iterator[list[int]]:
        for seed in itertools.count(5000):
            yield self._prompts(1, tokens, seed)[0]


def main() -> int:
    """Measure, and report."""
    plan = Plan.from_json(sys.argv[1])
    with os.fdopen(int(sys.argv[2]), "w") as out:
        report = Report(plan, out, device_name())
        if plan.role == "reference":
            reference(report)
            return 0
        measurement = Measurement(plan, report)
        try:
            measurement.run()
        finally:
            measurement.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
