"""Measures requests with restored KV data by vLLM's own serving benchmark: `make bench-vllm`.

Random prompts run twice (`--num-prompts 12 --random-output-len 2 --ignore-eos --seed 123456`), so
that every block is a hit the second time. Other prompts have a stored prefix of 80 %. The times are
measured without a hit (full computation), from vLLM's own prefix cache, and from kvdepot after a
restart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import program
from program import say

BENCH = Path(__file__).resolve().parent.parent
EXAMPLES = BENCH.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from vllm_demo.server import ServerError, double_of_3fs, no_survivors  # noqa: E402

from vllm_serve import table  # noqa: E402
from vllm_serve.evaluation import Evaluation, Plan  # noqa: E402

# Prompts of a length. The guide has 12 of each: one of 16,000 tokens takes half a minute here.
SIZES = {4000: 12, 8000: 12, 16000: 4}
LONG = {32000: 2}
TARGET_TOKENS = 8000


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = program.parser("vllm_serve", __doc__)
    parser.add_argument(
        "--pipeline",
        default="Cache|Posix",
        help="tiers of kvdepot, first to last; the first is Cache (default: Cache|Posix)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="quick run: 3 prompts of 8,000 tokens, 1 at a time"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        action="append",
        help="tokens per prompt, 256 to 32000; repeatable (default: 4000, 8000 and 16000)",
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        help="prompts per length; at most 12, 4 of 16,000 tokens, and 2 of 32,000 (default: 12)",
    )
    parser.add_argument("--long", action="store_true", help="also measure prompts of 32,000 tokens")
    parser.add_argument(
        "--concurrency",
        type=int,
        action="append",
        help="requests in flight, 1 to 8; repeatable (default: 1, 2 and 4)",
    )
    parser.add_argument("--wide", action="store_true", help="also measure 8 requests in flight")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds of requests whose blocks are all stored (default: 3)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bench-vllm"),
        help="folder on the disk to measure; with Ds3fs a folder on a 3FS, otherwise "
        "`make bench-vllm` uses a mock of its library (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    counts = [options.rounds, options.num_prompts or 1, *(options.concurrency or ())]
    if min(counts) < 1 or max(options.concurrency or [1]) > 8:
        parser.error("rounds and num-prompts are at least 1, concurrency is 1 to 8")
    if not all(256 <= tokens <= 32_000 for tokens in options.tokens or ()):
        parser.error("--tokens is 256 to 32000")
    if "|" not in options.pipeline or not options.pipeline.startswith("Cache|"):
        parser.error(f"--pipeline is {options.pipeline}; allowed: Cache| and tiers that last")
    return options


def plan_of(options: argparse.Namespace, work: Path, folder: Path) -> Plan:
    """What these options ask for."""
    sizes = SIZES | (LONG if options.long else {})
    concurrency = tuple(options.concurrency or (1, 2, 4)) + ((8,) if options.wide else ())
    if options.tokens:
        sizes = {tokens: (SIZES | LONG).get(tokens, 12) for tokens in sorted(set(options.tokens))}
    if options.num_prompts:
        sizes = {n: min(options.num_prompts, sizes[n] if n >= 16_000 else 12) for n in sizes}
    if options.quick:
        sizes, concurrency = {TARGET_TOKENS: 3}, (1,)
    # At least one prompt for each that is asked at a time.
    least = max(concurrency)
    return Plan(
        work=work,
        folder=folder,
        pipeline=options.pipeline,
        sizes={n: max(count, least) for n, count in sizes.items()},
        concurrency=concurrency,
        rounds=options.rounds,
    )


def show(evaluation: Evaluation, as_json: bool) -> None:
    """The table, or its rows, and the targets."""
    plan = evaluation.plan
    found = list(
        table.targets(
            evaluation.results,
            TARGET_TOKENS,
            plan.restored(TARGET_TOKENS),
            evaluation.raw,
            plan.pipeline,
        )
    )
    if as_json:
        for row in [*table.rows(evaluation.results, plan.pipeline, plan.rounds), *found]:
            print(json.dumps(row))
        return
    for line in table.lines(evaluation.results):
        print(line)
    print()
    for row in found:
        print(
            f"{row['metric']}: {row['limit']} ms over {row['value']} ms = {row['ratio']} "
            f"(target at least {row['target']}); {row['over_full']} times faster than full compute"
        )


def main() -> int:
    """Measure, and print."""
    options = options_of()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvdepot-") as work,
            tempfile.TemporaryDirectory(prefix="depot-", dir=options.folder.resolve()) as folder,
            no_survivors(),
        ):
            plan = plan_of(options, Path(work), Path(folder))
            say(f"{plan.pipeline}; tokens and prompts {plan.sizes}; at a time {plan.concurrency}")
            subprocess.run(
                [sys.executable, "-m", "vllm_demo.model", str(Path(work) / "model")],
                cwd=EXAMPLES,
                check=True,
                stderr=subprocess.DEVNULL,
            )
            if double := double_of_3fs():
                say(double)
            evaluation = Evaluation(plan, say)
            evaluation.run()
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the servers have ended", file=sys.stderr)
        return 130
    show(evaluation, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
