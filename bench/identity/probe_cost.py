"""Measures the cost of a probe: the time to the first token of a hit with and without a probe.

One engine serves the same stored prompts, in turns with a probe for every hit and without probes.
The engine's own prefix cache is emptied before each request. The average cost of probes per request
is the difference of the two times, divided by the default of `probe_every`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import program

from identity.__main__ import kvdepot

# Of the mean cost of probes, relative to the time to the first token of a hit.
TARGET = 0.005
PROMPTS = 10


def main() -> int:
    """The figures; 1 where a probe costs more than it may."""
    options = program.parser_with_model("identity.probe_cost", __doc__, tokens=2000, requests=1000)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="probe-cost") as at:
        served, probed, moved, largest = _measure(given, Path(at))
    from kvdepot.vllm import settings

    every = settings.SETTINGS.by_name["probe_every"].default
    assert isinstance(every, int)
    hit, with_probe = statistics.mean(served), statistics.mean(probed)
    share = (with_probe - hit) / every / hit
    row = {
        "bench": "probe_cost",
        "tokens": given.tokens,
        "requests": len(probed),
        "hit_ms": 1000 * hit,
        "hit_median_ms": 1000 * statistics.median(served),
        "probed_ms": 1000 * with_probe,
        "probed_median_ms": 1000 * statistics.median(probed),
        "path_ms": 1000 * moved,
        "share": share,
        "largest_difference": largest,
    }
    if given.json:
        print(json.dumps(row))
    else:
        print(
            f"a hit of {given.tokens} tokens: {1000 * hit:.2f} ms; probed {1000 * with_probe:.2f} "
            f"ms, {1000 * moved:.3f} ms of it on kvdepot's own path; at probe_every: {every} "
            f"{share:.3%} of a hit; largest difference {largest:.3g}"
        )
    return int(share > TARGET)


def _measure(given: Any, here: Path) -> tuple[list[float], list[float], float, float]:
    """Seconds of hits, of hits that are probed, how much more of them kvdepot's calls took, and the
    largest difference that was found."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=given.model,
        dtype="bfloat16",
        max_model_len=given.tokens + 256,
        enable_prefix_caching=True,
        disable_log_stats=True,
        enforce_eager=True,
        kv_transfer_config=kvdepot(here / "arena", {"probe_every": 1}),
    )
    core: Any = llm.llm_engine.engine_core
    manager = core.engine_core.scheduler.connector.manager
    seconds: dict[str, float] = {}
    path = manager.collector.path

    def noted(source: str, took: float) -> None:
        seconds[now] = seconds.get(now, 0.0) + took
        path(source, took)

    manager.collector.path = noted
    drawn = random.Random(1)
    prompts = [[drawn.randrange(10, 10_000) for _ in range(given.tokens)] for _ in range(PROMPTS)]
    sampling = SamplingParams(temperature=0, max_tokens=1)
    now = "store"
    for prompt in prompts:
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    times: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(2 * given.requests):
        now = ("off", "on")[number % 2]
        manager.probes._every = number % 2
        # Stores and comparisons of the request before end here.
        llm.generate([{"prompt_token_ids": [5] * 3}], sampling, use_tqdm=False)
        assert llm.reset_prefix_cache()
        start = time.perf_counter()
        prompt = prompts[number // 2 % PROMPTS]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        times[now].append(time.perf_counter() - start)
        assert output.num_cached_tokens
    core.shutdown()
    more = (seconds.get("on", 0.0) - seconds.get("off", 0.0)) / given.requests
    return times["off"], times["on"], more, manager.collector.largest_difference


if __name__ == "__main__":
    sys.exit(main())
