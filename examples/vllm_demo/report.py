"""The table, and the same figures as JSON."""

from __future__ import annotations

from statistics import median

from .measure import Answer, largest_difference
from .rounds import BLOCK_TOKENS, Round

# vLLM's own prefix cache differs by some 1e-5; a wrong block by far more than this.
MAX_LOGPROB_DIFFERENCE = 1e-3


def figures(kept: Round) -> dict[str, float | int | bool]:
    """The figures of one prompt length; times are medians in milliseconds, counts of tokens
    totals over the prompts."""
    served = kept.hit + kept.restart + kept.miss
    reference = kept.baseline + kept.baseline + kept.baseline
    pairs = list(zip(served, reference, strict=True))
    return {
        "prompt_tokens": sum(a.prompt_tokens for a in kept.baseline),
        "prompts": len(kept.baseline),
        "full_ms": _ttft(kept.baseline),
        "own_cache_ms": _ttft(kept.own),
        "hit_ms": _ttft(kept.hit),
        "restart_ms": _ttft(kept.restart),
        "own_cache_at_restart_ms": _ttft(kept.own_at_restart),
        "miss_ms": _ttft(kept.miss),
        "baseline_miss_ms": _ttft(kept.baseline),
        "miss_ratio": round(
            median(a.ttft_ms / b.ttft_ms for a, b in zip(kept.miss, kept.baseline, strict=True)), 4
        ),
        "cached_tokens_hit": sum(a.cached_tokens for a in kept.hit),
        "cached_tokens_restart": sum(a.cached_tokens for a in kept.restart),
        "identical_tokens": all(a.tokens == b.tokens for a, b in pairs),
        "max_logprob_difference": max(largest_difference(a, b) for a, b in pairs),
        "own_cache_logprob_difference": max(
            largest_difference(a, b) for a, b in zip(kept.own, kept.baseline, strict=True)
        ),
        "miss_path_ms": round(median(kept.miss_path_ms), 3),
        "miss_cpu_ms": round(median(kept.miss_cpu_ms), 3),
    }


def _ttft(answers: list[Answer]) -> float:
    return round(median(a.ttft_ms for a in answers), 2)


def all_figures(rounds: dict[int, Round], first: str = "") -> dict[str, float | int | bool]:
    """The figures of all lengths; `first` and `_16k` or the like are added to the keys."""
    everything: dict[str, float | int | bool] = {}
    for i, (n, kept) in enumerate(rounds.items()):
        suffix = f"_{n // 1000}k" if i or first else ""
        everything |= {f"{key}{first}{suffix}": value for key, value in figures(kept).items()}
    return everything


def failures(rounds: dict[int, Round]) -> list[str]:
    """What is not as kvdepot promises, a sentence each."""
    found = []
    for n, kept in rounds.items():
        f = figures(kept)
        if not f["identical_tokens"]:
            found.append(f"{n} tokens: not the greedy tokens of the run without kvdepot")
        if not f["max_logprob_difference"] <= MAX_LOGPROB_DIFFERENCE:
            found.append(
                f"{n} tokens: a logprob differs by {f['max_logprob_difference']:.1e}, "
                f"more than {MAX_LOGPROB_DIFFERENCE:.0e}"
            )
        if cached := sum(a.cached_tokens for a in kept.baseline + kept.miss):
            found.append(f"first time, {n} tokens: {cached} tokens came from a cache")
        # vLLM always computes the last token.
        stored = len(kept.baseline) * ((n - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        for name in ("hit", "restart"):
            served, counted = f[f"cached_tokens_{name}"], kept.external_hits[name]
            if served != stored:
                found.append(f"{name}, {n} tokens: {served} tokens were served of {stored} stored")
            if counted != served:
                found.append(
                    f"{name}, {n} tokens: usage reports {served} cached tokens, "
                    f"vllm:external_prefix_cache_hits_total {counted}"
                )
    return found


def table(rounds: dict[int, Round]) -> str:
    """The table that the demo prints."""
    lines = []
    for n, kept in rounds.items():
        f = figures(kept)
        same = "yes" if f["identical_tokens"] else "NO"
        lines += [
            f"{n:,} tokens, {f['prompts']} prompts: time to the first token (median)",
            row("full compute", f["full_ms"], f["full_ms"]),
            row("vLLM's own prefix cache", f["own_cache_ms"], f["full_ms"]),
            row("kvdepot", f["hit_ms"], f["full_ms"]),
            row("kvdepot, server restarted", f["restart_ms"], f["full_ms"]),
            row("kvdepot, first time (stores)", f["miss_ms"], f["full_ms"]),
            f"  tokens served (vLLM's count)         {f['cached_tokens_hit']:>10,} of "
            f"{f['prompt_tokens']:,}; after the restart {f['cached_tokens_restart']:,}",
            f"  same greedy tokens                   {same:>10}",
            f"  largest logprob difference           {f['max_logprob_difference']:>10.1e}"
            f" (vLLM's own cache {f['own_cache_logprob_difference']:.1e})",
            f"  cost of storing: {f['miss_path_ms']:.1f} ms on the request's path, "
            f"{f['miss_cpu_ms']:.0f} ms CPU of kvdepot's threads",
            "",
        ]
    return "\n".join(lines)


def row(name: str, ms: float, full: float) -> str:
    """One line of a table: a time, and how much shorter it is than `full`."""
    return f"  {name:<36} {ms:>10,.1f} ms {full / ms:>8.1f} x"
