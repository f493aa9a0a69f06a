"""A vLLM engine that serves for a long time with room for little more than one prompt.

Run as a program, it reads one JSON object, serves, and prints what it found.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_harness import ROOT

AT_ONCE = 4
CONVERSATIONS = 8
OUTPUT_TOKENS = 24
# Of so many answers one is kept, and of those that were served by kvdepot or preempted.
SAMPLED, SAMPLED_OF_THOSE = 100, 10
# How long what was stored may take to be written at the end.
SETTLE_SECONDS = 300.0


@dataclass(frozen=True)
class Soak:
    """What is served, and for how long."""

    model: str
    vocabulary: int
    options: dict[str, Any]
    """Of vLLM."""
    connector: dict[str, Any]
    """The whole of `--kv-transfer-config`."""
    tokens: int
    """Length of the longest prompts."""
    seconds: float
    seed: int


@dataclass
class Found:
    """What came of it."""

    answers: int = 0
    aborted: int = 0
    preempted: int = 0
    resets: int = 0
    """Of vLLM's prefix cache, while requests run."""
    loaded: int = 0
    """Blocks that kvdepot served."""
    evicted: int = 0
    samples: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    """Prompt, tokens and log probabilities of some answers."""
    served: int = 0
    """Of the samples, those that kvdepot served a part of, or that were preempted."""
    probed: dict[str, int] = field(default_factory=dict)
    """Blocks by what came of their probes."""
    left: dict[str, int] = field(default_factory=dict)
    """What is held at the end, when nothing is asked any more."""


def run(soak: Soak, cache: Path) -> Found:
    """Serve, in a process of its own, whose cache directory is `cache`. Raises RuntimeError with
    what it said if that fails."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_CACHE_HOME": str(cache),
        "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "tests/engine"), *sys.path))),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "engine_soak"],
        input=json.dumps(asdict(soak)),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"exit code {ended.returncode}: {ended.stderr[-4000:]}")
    return Found(**json.loads(ended.stdout.splitlines()[-1]))


class _Load:
    """Conversations that go on, begin anew, and are asked about again."""

    def __init__(self, soak: Soak, drawn: random.Random) -> None:
        self._soak, self._drawn = soak, drawn
        self._conversations = [self._some(soak.tokens) for _ in range(CONVERSATIONS)]

    def _some(self, count: int) -> list[int]:
        return self._drawn.choices(range(10, self._soak.vocabulary), k=count)

    def next(self) -> list[int]:
        drawn = self._drawn
        if drawn.random() < 0.05:
            self._conversations[drawn.randrange(CONVERSATIONS)] = self._some(self._soak.tokens)
        # Some are asked about much more often than others.
        number = min(int(drawn.expovariate(0.5)), CONVERSATIONS - 1)
        said = self._conversations[number][: drawn.randrange(1, self._soak.tokens)]
        return said + self._some(drawn.choice([0, 0, 1, 5]))


def _asked_as(request: Any) -> str:
    """The name that a request was given; vLLM adds to it."""
    return str(request.request_id).partition("-")[0]


def _serve(soak: Soak) -> Found:
    from identity.engines import Probed, note_probes
    from kvdepot.vllm.connector import KvdepotConnector
    from kvdepot.vllm.metrics import Collector
    from vllm import EngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine

    found, probed, drawn = Found(), Probed(), random.Random(soak.seed)
    note_probes(probed)
    special: set[str] = set()
    preempt, moved = Scheduler._preempt_request, Collector.moved
    allocated = KvdepotConnector.update_state_after_alloc

    def preempted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found.preempted += 1
        special.add(_asked_as(request))
        return preempt(self, request, *args, **kwargs)

    def is_served(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        if num_external_tokens:
            special.add(_asked_as(request))
        return allocated(self, request, blocks, num_external_tokens)

    def noted(self: Any, op: str, tier: str, blocks: int, length: int) -> None:
        found.loaded += blocks if op == "load" else 0
        moved(self, op, tier, blocks, length)

    Scheduler._preempt_request = preempted  # type: ignore[method-assign]
    KvdepotConnector.update_state_after_alloc = is_served  # type: ignore[method-assign]
    Collector.moved = noted  # type: ignore[method-assign]
    options = soak.options | {"kv_transfer_config": soak.connector, "max_num_seqs": AT_ONCE}
    engine = LLMEngine.from_engine_args(EngineArgs(model=soak.model, **options))
    scheduler = engine.engine_core.engine_core.scheduler
    depot = scheduler.connector.manager.depot
    load = _Load(soak, drawn)
    asked: dict[str, list[int]] = {}
    end = time.monotonic() + soak.seconds
    number = specials = 0
    while asked or time.monotonic() < end:
        while len(asked) < 2 * AT_ONCE and time.monotonic() < end:
            number += 1
            name, prompt = str(number), load.next()
            tokens = drawn.randrange(1, OUTPUT_TOKENS)
            sampling = SamplingParams(
                temperature=0,
                max_tokens=tokens,
                min_tokens=tokens,
                logprobs=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            asked[name] = prompt
        for output in engine.step():
            prompt = asked.pop(output.request_id)
            (said,) = output.outputs
            is_special = output.request_id in special
            special.discard(output.request_id)
            specials += is_special
            if found.answers % SAMPLED == 0 or (is_special and specials % SAMPLED_OF_THOSE == 0):
                pairs = zip(said.token_ids, said.logprobs or [], strict=True)
                logprobs = [one[token].logprob for token, one in pairs]
                found.samples.append((prompt, list(said.token_ids), logprobs))
                found.served += is_special
            found.answers += 1
        if asked and drawn.random() < 0.02:
            name = drawn.choice(sorted(asked))
            engine.abort_request([name])
            del asked[name]
            found.aborted += 1
        if drawn.random() < 0.01:
            # vLLM raises while blocks are being loaded, or still stored.
            with contextlib.suppress(RuntimeError):
                found.resets += engine.reset_prefix_cache(reset_running_requests=True)
    settled = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < settled and (scheduler.has_requests() or depot.pending_bytes()):
        engine.step()
    tiers = depot.stats()["tiers"]
    found.evicted = sum(tier["evicted_blocks"] for tier in tiers.values())
    found.left = {
        "pinned": sum(tier["pinned_blocks"] for tier in tiers.values()),
        "reserved": sum(tier["reserved_blocks"] for tier in tiers.values()),
        "pending": depot.pending_bytes(),
        "requests": int(scheduler.has_requests()),
    }
    found.probed = probed.results
    engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    # What vLLM prints must not get between.
    os.dup2(2, 1)
    result = _serve(Soak(**json.load(sys.stdin)))
    print(json.dumps(asdict(result)), file=answers, flush=True)
    os._exit(0)
