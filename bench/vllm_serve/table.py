"""What is made of the requests: the guide's table, rows, and the two ratios that have targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from .client import Request

FULL, OWN, DEPOT = "full compute", "vLLM's own prefix cache", "kvdepot"
METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "p90", "p99")


@dataclass(frozen=True)
class Case:
    """What was asked."""

    tokens: int
    hit: int
    """Hundredths of each prompt that had been stored before."""
    concurrency: int


@dataclass
class Cell:
    """What one contender answered."""

    requests: list[Request] = field(default_factory=list)
    first: int = 0
    """Requests of the first round: after a restart nothing is in memory."""
    from_disk: float = 0.0
    """The share of the restored bytes that came from the last tier."""

    def values(self, metric: str) -> list[float]:
        """One number a request, or a token."""
        if metric == "itl":
            return [itl for request in self.requests for itl in request.itls]
        return [getattr(request, metric) for request in self.requests]

    def of(self, metric: str, statistic: str) -> float:
        """In ms."""
        values = sorted(self.values(metric))
        if statistic == "mean":
            return statistics.mean(values)
        if statistic == "median":
            return statistics.median(values)
        # As numpy does it, and so vLLM's own table.
        place = int(statistic[1:]) / 100 * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return values[low] + (values[high] - values[low]) * (place - low)


Results = dict[Case, dict[str, Cell]]


def lines(results: Results) -> Iterator[str]:
    """The table, as the guide has it: ms, and how many times faster than full compute."""
    for case, cells in results.items():
        full = cells[FULL]
        yield ""
        yield f"{case.tokens} tokens, {case.hit} % hit, {case.concurrency} at a time"
        heads = "".join(f"{metric.upper() + ' mean':>12}{'p90':>9}{'p99':>9}" for metric in METRICS)
        yield f"  {'':<25}{'n':>4}{heads}{'TTFT ×':>9}{'E2EL ×':>9}{'disk':>7}"
        for name, cell in cells.items():
            shown = "".join(
                f"{cell.of(metric, statistic):>{12 if statistic == 'mean' else 9}.1f}"
                for metric in METRICS
                for statistic in STATISTICS
            )
            times = "".join(
                f"{full.of(metric, 'mean') / cell.of(metric, 'mean'):>9.2f}"
                for metric in ("ttft", "e2el")
            )
            disk = f"{cell.from_disk:>7.0%}" if name == DEPOT else ""
            yield f"  {name:<25}{len(cell.requests):>4}{shown}{times}{disk}"


def rows(results: Results, pipeline: str, rounds: int) -> Iterator[dict[str, object]]:
    """One row a number; `ratio` is full compute's over it."""
    for case, cells in results.items():
        for name, cell in cells.items():
            described: dict[str, object] = {
                "tokens": case.tokens,
                "hit": case.hit,
                "concurrency": case.concurrency,
                "contender": name,
                "requests": len(cell.requests),
            }
            if name == DEPOT:
                described |= {"pipeline": pipeline, "from_disk": round(cell.from_disk, 3)}
            for metric in METRICS:
                for statistic in STATISTICS:
                    value = cell.of(metric, statistic)
                    limit = cells[FULL].of(metric, statistic)
                    yield {
                        "bench": "vllm_serve",
                        "case": described,
                        "metric": f"{metric}_{statistic}",
                        "unit": "ms",
                        "value": round(value, 2),
                        "limit": round(limit, 2),
                        "ratio": round(limit / value, 3),
                        "rounds": rounds,
                    }


def targets(
    results: Results, tokens: int, restored: int, raw: float, pipeline: str
) -> Iterator[dict[str, object]]:
    """The two that have targets, of medians: one request at a time, at `tokens` tokens."""
    described = {"tokens": tokens, "concurrency": 1, "pipeline": pipeline}
    whole = results.get(Case(tokens, 100, 1))
    if whole is not None and raw > 0:
        value = statistics.median(whole[DEPOT].values("ttft")[: whole[DEPOT].first])
        read = restored / raw * 1e3
        limit = read + 1.3 * whole[OWN].of("ttft", "median")
        yield {
            "bench": "vllm_serve",
            "case": {**described, "hit": 100, "raw_gb_s": round(raw / 1e9, 2)},
            "metric": "ttft_over_raw_read_and_own",
            "unit": "ms",
            "rounds": whole[DEPOT].first,
            "value": round(value, 2),
            "limit": round(limit, 2),
            "ratio": round(limit / value, 3),
            "over_full": round(whole[FULL].of("ttft", "median") / value, 2),
            "target": 1.0,
        }
    most = results.get(Case(tokens, 80, 1))
    if most is not None:
        value, limit = (most[name].of("ttft", "median") for name in (DEPOT, OWN))
        yield {
            "bench": "vllm_serve",
            "case": {**described, "hit": 80},
            "metric": "ttft_over_own",
            "unit": "ms",
            "rounds": len(most[DEPOT].requests),
            "value": round(value, 2),
            "limit": round(limit, 2),
            "ratio": round(limit / value, 3),
            "over_full": round(most[FULL].of("ttft", "median") / value, 2),
            "target": 0.91,
        }
