"""vLLM's own serving benchmark (`vllm bench serve`), asked again and again by one process.

The `vllm` command fails where vLLM's package has another name, as on the CPU; the module behind it
does not, and its imports take longer than most of its runs here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import string
from dataclasses import dataclass
from pathlib import Path

from vllm_demo.server import Server, ServerError

SEED = 123456
OUTPUT_TOKENS = 2
# The tokenizer has none of these in a longer token: each is one, whatever stands beside it.
LETTERS = [letter for letter in string.ascii_uppercase if letter != "A"]


@dataclass(frozen=True)
class Request:
    """The times of one request, in ms."""

    ttft: float
    itls: tuple[float, ...]
    e2el: float

    @property
    def tpot(self) -> float:
        """Time of each token but the first."""
        return (self.e2el - self.ttft) / max(OUTPUT_TOKENS - 1, 1)


def prompts(tokens: int, count: int, seed: int) -> list[str]:
    """Random prompts of so many tokens, the same for a seed."""
    # The module's own ones repeat a run of the vocabulary. With a small one, prompts of several
    # lengths and seeds would begin alike, and what should be computed would be a hit.
    chance = random.Random(f"{seed} {tokens}")
    return ["".join(chance.choices(LETTERS, k=tokens)) for _ in range(count)]


def continued(some: list[str], shared: int, seed: int) -> list[str]:
    """The same prompts with other tokens behind the first `shared` ones."""
    tails = prompts(len(some[0]) - shared, len(some), seed)
    return [one[:shared] + tail for one, tail in zip(some, tails, strict=True)]


class Client:
    """The benchmark module."""

    def __init__(self, model: Path, work: Path) -> None:
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
        # Here, because it takes ten seconds: the servers start meanwhile.
        from vllm.benchmarks import serve
        from vllm.benchmarks.datasets import SampleRequest

        self._serve = serve
        self._sample = SampleRequest
        self._parser = argparse.ArgumentParser()
        serve.add_cli_args(self._parser)
        self._model = model
        self._log = work / "benchmark.log"

    def ask(self, server: Server, some: list[str], concurrency: int) -> list[Request]:
        """These prompts, in this order, so many at a time."""
        arguments = self._parser.parse_args(
            [
                *("--backend", "openai"),
                *("--base-url", f"http://127.0.0.1:{server.port}"),
                *("--endpoint", "/v1/completions"),
                *("--model", str(self._model)),
                *("--served-model-name", "demo"),
                *("--dataset-name", "random"),
                *("--random-input-len", str(len(some[0]))),
                *("--random-output-len", str(OUTPUT_TOKENS)),
                *("--num-prompts", str(len(some))),
                *("--seed", str(SEED)),
                *("--max-concurrency", str(concurrency)),
                # It would send the first prompt once more, before the others.
                *("--ready-check-timeout-sec", "0"),
                "--ignore-eos",
                "--disable-tqdm",
                "--save-detailed",
            ]
        )
        made = [
            self._sample(
                prompt=prompt,
                prompt_len=len(prompt),
                expected_output_len=OUTPUT_TOKENS,
                request_id=str(number),
            )
            for number, prompt in enumerate(some)
        ]
        self._serve.get_samples = lambda *_: made
        with self._log.open("a") as log, contextlib.redirect_stdout(log):
            found = self._serve.main(arguments)
        if found["completed"] != len(some):
            errors = [error for error in found["errors"] if error]
            failed = len(some) - found["completed"]
            raise ServerError(f"{server.name}: {failed} failed: {errors[:1]}")
        return [
            Request(ttft * 1e3, tuple(itl * 1e3 for itl in itls), (ttft + sum(itls)) * 1e3)
            for ttft, itls in zip(found["ttfts"], found["itls"], strict=True)
        ]
