"""Measures simultaneous requests for one stored prefix, whose blocks are to be read only once.

One engine answers the same requests in turns from its own prefix cache, and from kvdepot after this
cache was emptied. The limit is the time with the engine's own cache, plus one and a half times the
time in which a single request loads the prefix. The program also prints the bytes that kvdepot
read, divided by the bytes of the prefix.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import program

QUESTION_TOKENS = 20
LOAD_FACTOR = 1.5
MOST_BYTES = 1.1


def main() -> int:
    """The figures; 1 where the burst takes longer, or reads more, than it may."""
    options = program.parser_with_model("burst", __doc__, tokens=7936, requests=32)
    options.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="burst") as at:
        seconds, read = _measure(given, Path(at))
    own, depot, one, none = (statistics.median(seconds[way]) for way in seconds)
    load = one - none
    limit = own + LOAD_FACTOR * load
    row = {
        "bench": "burst",
        "tokens": given.tokens,
        "requests": given.requests,
        "own_cache_s": own,
        "kvdepot_s": depot,
        "load_s": load,
        "limit_s": limit,
        "read_over_prefix": read,
    }
    if given.json:
        print(json.dumps(row))
    else:
        print(
            f"{given.requests} requests over {given.tokens} tokens: {own:.3f} s from vLLM's own "
            f"cache, {depot:.3f} s from kvdepot; one load {load:.3f} s, so the limit is "
            f"{limit:.3f} s; read {read:.2f} x the prefix"
        )
    return int(depot > limit or read > MOST_BYTES)


def _measure(given: Any, here: Path) -> tuple[dict[str, list[float]], float]:
    """Seconds of each way in each round, and bytes read by a burst over those of the prefix."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=given.model,
        dtype="bfloat16",
        max_model_len=given.tokens + 256,
        max_num_seqs=given.requests,
        disable_log_stats=True,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "pipeline": "Dax",
                "dax": {"path": str(here / "arena"), "capacity": "2GiB"},
                "probe_every": 0,
            },
        },
    )
    core: Any = llm.llm_engine.engine_core
    manager = core.engine_core.scheduler.connector.manager
    drawn = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(10, 10_000) for _ in range(count)]

    prefix = tokens(given.tokens)
    sampling = SamplingParams(temperature=0, max_tokens=1)

    def ask(count: int, begin: list[int] = prefix) -> float:
        prompts: Any = [
            {"prompt_token_ids": [*begin, *tokens(QUESTION_TOKENS)]} for _ in range(count)
        ]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def emptied() -> None:
        # What was stored before ends in the steps of this one.
        ask(1, [5])
        assert llm.reset_prefix_cache()

    def read() -> int:
        return int(manager.depot.stats()["tiers"]["Dax"]["hit_bytes"])

    ask(1)
    emptied()
    before = read()
    ask(1)
    whole = read() - before
    ways: dict[str, Callable[[], float]] = {
        "own": lambda: ask(given.requests),
        "kvdepot": lambda: ask(given.requests),
        "one": lambda: ask(1),
        "one, from its own cache": lambda: ask(1),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    bytes_read = []
    for _ in range(given.rounds):
        for way, run in ways.items():
            if way in ("kvdepot", "one"):
                emptied()
            before = read()
            seconds[way].append(run())
            if way == "kvdepot":
                bytes_read.append((read() - before) / whole)
    core.shutdown()
    return seconds, statistics.median(bytes_read)


if __name__ == "__main__":
    sys.exit(main())
