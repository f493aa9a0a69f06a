"""What vLLM's scheduler spends in kvdepot for a prompt: looked up, waiting, admitted."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_lookups import MODELS, Lookups, hashes
from vllm.v1.kv_offload.base import LookupResult

STEP_MS = 10
"""How long a step of the engine is taken to be, where a tier answers after so many milliseconds."""

# Targets, in microseconds for each block.
FIRST_NEAR, ALL_LATE, ADMIT = 0.6, 2.0, 1.0
# The same in milliseconds for each further step, up to so many blocks.
REPEAT = ((8192, 0.2), (30000, 0.5))

THERE = LookupResult.HIT


def rows(sizes: list[int], late_ms: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of all models and tiers."""
    for model in MODELS:
        for late in late_ms:
            for blocks in sizes:
                with tempfile.TemporaryDirectory(prefix="kvdepot-") as folder:
                    # A waiting prompt keeps pins in a quarter of a tier.
                    room = 5 * 4096 * blocks * (2 if model == "hybrid" else 1)
                    engine = Lookups(
                        Path(folder), model, capacity=str(room + (16 << 20)), delay=late // STEP_MS
                    )
                    try:
                        yield from _rows(engine, model, blocks, late, rounds)
                    finally:
                        engine.close()


def _rows(
    engine: Lookups, model: str, blocks: int, late_ms: int, rounds: int
) -> Iterator[dict[str, Any]]:
    prompt = hashes("prompt", blocks)
    engine.put(prompt)
    taken = [_round(engine, prompt, number) for number in range(rounds + 1)][1:]
    first, reference, repeat, admit = (statistics.median(each) for each in zip(*taken, strict=True))
    if late_ms:
        limits = {"first_lookup_ms": blocks * ALL_LATE / 1e3}
    else:
        limits = {"first_lookup_ms": reference + blocks * FIRST_NEAR / 1e3}
    groups = len(engine.fronts)
    limits["repeat_lookup_ms"] = next((ms for most, ms in REPEAT if blocks <= most), REPEAT[-1][1])
    limits["admit_ms"] = blocks * groups * ADMIT / 1e3
    values = {"first_lookup_ms": first, "repeat_lookup_ms": repeat, "admit_ms": admit}
    case = {"blocks": blocks, "model": model, "pipeline": "Cache", "late_ms": late_ms}
    for metric, value in values.items():
        limit = limits[metric]
        row = {"bench": "vllm_step", "case": case, "metric": metric, "unit": "ms"}
        row |= {"value": round(value, 4), "limit": round(limit, 4)}
        row |= {"ratio": round(limit / value, 3), "rounds": rounds, "limit_name": "the target"}
        yield row


def _round(engine: Lookups, prompt: list[bytes], number: int) -> tuple[float, ...]:
    """Milliseconds of a first lookup, of the same where the manager finds each block, of further
    steps, and of an admission."""
    request = engine.request(prompt)
    first = 0.0
    while True:
        took, matched = _timed(engine.look, request)
        first += took
        if matched is not None:
            break
        first += _timed(engine.end_step)[0]
    further = []
    for step in range(5):
        # Others store and evict in every step.
        other = hashes(f"other {number} {step}", 16)
        engine.remove(hashes(f"other {number} {step - 1}", 16))
        took = _timed(engine.end_step)[0] if step else 0.0
        engine.store(other)
        further.append(took + _timed(engine.look, request)[0])
    prepared = 0.0
    manager = engine.manager
    load, store = manager.prepare_load, manager.prepare_store

    def prepare(call: Any, *arguments: Any) -> Any:
        nonlocal prepared
        took, answer = _timed(call, *arguments)
        prepared += took
        return answer

    manager.prepare_load = lambda *given: prepare(load, *given)
    manager.prepare_store = lambda *given: prepare(store, *given)
    jobs = engine.admit(request, matched)
    loading = prepared
    engine.offer(request)
    del manager.prepare_load, manager.prepare_store
    for job in jobs:
        engine.loaded(job)
    engine.end_step()
    engine.finish(request)

    always = engine.request(prompt)
    manager.lookup = lambda key, context: THERE
    with engine.one_by_one():
        reference = _timed(engine.look, always)[0]
    del manager.lookup
    engine.finish(always)
    engine.end_step()
    # Each of the two is one call for all blocks.
    return first, reference, statistics.median(further), max(loading, prepared - loading)


def _timed(call: Any, *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = call(*arguments)
    return (time.perf_counter() - start) * 1e3, answer
