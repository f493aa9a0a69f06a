"""The story's table, its figures, and what of it is not as kvdepot promises."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from .measure import Answer, largest_difference
from .report import MAX_LOGPROB_DIFFERENCE, row
from .story import BLOCK_TOKENS, WITH, WITHOUT, Asked, Result, Served


def figures(result: Result) -> dict[str, float | int | bool]:
    """All figures; times in milliseconds, each from the story's own requests."""
    first, own, restart, second = result.asked
    computed = [asked.alone.answer.ttft_ms for asked in _computed(result)]
    return {
        "prompt_tokens": first.alone.answer.prompt_tokens,
        "prompts": 1,
        "full_ms": round(median(computed), 2),
        "own_cache_ms": _ms(own.alone),
        "hit_ms": _ms(result.hit),
        "restart_ms": _ms(restart.depot),
        "own_cache_at_restart_ms": _ms(result.again_alone),
        "second_server_ms": _ms(second.depot),
        "miss_ms": _ms(first.depot),
        "baseline_miss_ms": _ms(first.alone),
        "miss_ratio": round(first.depot.answer.ttft_ms / first.alone.answer.ttft_ms, 4),
        "cached_tokens_hit": result.hit.from_kvdepot,
        "cached_tokens_restart": restart.depot.from_kvdepot,
        "cached_tokens_second_server": second.depot.from_kvdepot,
        "identical_tokens": all(a.tokens == b.tokens for a, b in _pairs(result)),
        "max_logprob_difference": max(largest_difference(a, b) for a, b in _pairs(result)),
        "own_cache_logprob_difference": largest_difference(
            result.again_alone.answer, restart.alone.answer
        ),
        "miss_path_ms": round(result.storing_path_ms, 3),
        "miss_cpu_ms": round(result.storing_cpu_ms, 3),
    }


def times(result: Result) -> list[tuple[str, float]]:
    """The rows of table and chart: a name, and milliseconds to the first token."""
    f = figures(result)
    return [
        ("computed", f["full_ms"]),
        ("vLLM's own prefix cache", f["own_cache_ms"]),
        ("kvdepot, vLLM's cache emptied", f["hit_ms"]),
        ("kvdepot, server killed and restarted", f["restart_ms"]),
        ("kvdepot, second server", f["second_server_ms"]),
        ("kvdepot, first time (stores)", f["miss_ms"]),
    ]


def table(result: Result) -> str:
    """The table that the demo prints."""
    f = figures(result)
    computed = [_ms(asked.alone) for asked in _computed(result)]
    same = "yes" if f["identical_tokens"] else "NO"
    return "\n".join(
        [
            f"{f['prompt_tokens']:,} tokens of document and question: time to the first token",
            *(row(name, ms, f["full_ms"]) for name, ms in times(result)),
            f"  tokens from kvdepot (vLLM's count)   {f['cached_tokens_restart']:>10,} after the "
            f"restart; second server {f['cached_tokens_second_server']:,}",
            f"  same answers, token by token         {same:>10}",
            f"  largest logprob difference           {f['max_logprob_difference']:>10.1e}"
            f" (vLLM's own cache {f['own_cache_logprob_difference']:.1e})",
            f"  cost of storing: {f['miss_path_ms']:.1f} ms of the request's time, "
            f"{f['miss_cpu_ms']:.0f} ms CPU of kvdepot's threads;",
            f"  vLLM alone computed in {min(computed) / 1e3:.2f} to {max(computed) / 1e3:.2f} s, "
            "median above",
        ]
    )


def failures(result: Result) -> list[str]:
    """Sentences on everything that is not as promised; empty if all is."""
    found = []
    for number, asked in enumerate(result.asked, 1):
        for label, served in ((WITHOUT, asked.alone), (WITH, asked.depot)):
            where = f"question {number}, {label}"
            if asked.question.word not in served.answer.text:
                found.append(
                    f"{where}: the answer has no {asked.question.word!r}: {served.answer.text!r}"
                )
            counted = served.from_vllm + served.from_kvdepot
            if counted != served.answer.cached_tokens:
                found.append(
                    f"{where}: usage reports {served.answer.cached_tokens} cached tokens, vLLM's "
                    f"counters {counted}"
                )
    for number, (ours, reference) in enumerate(_pairs(result), 1):
        name = f"question {number}" if number <= len(result.asked) else "the last hit"
        if ours.tokens != reference.tokens:
            found.append(f"{name}: not the tokens of vLLM alone")
        if not (difference := largest_difference(ours, reference)) <= MAX_LOGPROB_DIFFERENCE:
            found.append(
                f"{name}: a logprob differs by {difference:.1e}, more than "
                f"{MAX_LOGPROB_DIFFERENCE:.0e}"
            )
    return found + list(_wrong_caches(result))


def _wrong_caches(result: Result) -> Iterator[str]:
    """Whose cache served which request: vLLM's own, kvdepot's, or neither."""
    shared = result.document_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    first, own, restart, second = result.asked
    expected: list[tuple[str, Served, int, int]] = [
        *_both("question 1", first, (0, 0), (0, 0)),
        *_both("question 2", own, (shared, 0), (shared, 0)),
        *_both("question 3", restart, (0, 0), (0, shared)),
        *_both("question 4", second, (0, 0), (0, shared)),
        ("the last hit", result.hit, 0, shared),
    ]
    for name, served, from_vllm, from_kvdepot in expected:
        for cache, tokens, wanted in (
            ("vLLM's own cache", served.from_vllm, from_vllm),
            ("kvdepot", served.from_kvdepot, from_kvdepot),
        ):
            # The questions may begin alike, so that a cache serves a block more.
            if (tokens > 0) if wanted == 0 else (tokens < wanted):
                yield f"{name}: {tokens} tokens from {cache}, {wanted} expected"


def _both(
    name: str, asked: Asked, alone: tuple[int, int], depot: tuple[int, int]
) -> list[tuple[str, Served, int, int]]:
    return [
        (f"{name}, {WITHOUT}", asked.alone, *alone),
        (f"{name}, {WITH}", asked.depot, *depot),
    ]


def _computed(result: Result) -> list[Asked]:
    """The questions that vLLM alone computed."""
    first, _, restart, second = result.asked
    return [first, restart, second]


def _pairs(result: Result) -> list[tuple[Answer, Answer]]:
    """Answers with kvdepot, each beside the same question's without it."""
    pairs = [(asked.depot.answer, asked.alone.answer) for asked in result.asked]
    return [*pairs, (result.hit.answer, result.asked[0].alone.answer)]


def _ms(served: Served) -> float:
    return round(served.answer.ttft_ms, 2)
