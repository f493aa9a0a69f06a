"""Measures writes, hits and promotions under vLLM for repeated prompts: `make bench-churn`.

54 prompts of 2,432 tokens with 24 prefixes are requested in random order, four at a time. The depot
(`Cache|Dax`) holds three quarters of the blocks of all prompts. vLLM's own prefix cache is large
enough for all prompts in one run, and off in the other run. `kvdepot bench churn` repeats the same
requests without an engine, and compares with an exact LRU order.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import program
from program import say

BENCH = Path(__file__).resolve().parent.parent
EXAMPLES = BENCH.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from vllm_demo import measure  # noqa: E402
from vllm_demo.model import KV_BYTES_PER_TOKEN  # noqa: E402
from vllm_demo.server import Server, ServerError, no_survivors  # noqa: E402

PROMPTS = 54
PREFIXES = 24
BLOCK_TOKENS = 128
PREFIX_TOKENS = 9 * BLOCK_TOKENS
OWN_TOKENS = 10 * BLOCK_TOKENS
IN_FLIGHT = 4
OUTPUT_TOKENS = 2
# Hundredths of what the prompts need together.
CACHE, DAX = 17, 58
# Prompts are drawn by their rank to this power.
ORDERS = {"uniform": 0.0, "skewed": 1.14}
ENGINES = ("large", "none")
GIB = 1 << 30


def history(requests: int, order: str) -> list[list[int]]:
    """So many prompts, the same for an order."""
    prefixes = measure.prompts(PREFIXES, PREFIX_TOKENS, seed=1)
    own = measure.prompts(PROMPTS, OWN_TOKENS, seed=2)
    # One token more, because an engine computes the last one of a prompt anyway.
    prompts = [prefixes[at % PREFIXES] + tokens + [7] for at, tokens in enumerate(own)]
    weights = [(rank + 1) ** -ORDERS[order] for rank in range(PROMPTS)]
    return random.Random(23).choices(prompts, weights, k=requests)


def run(options: argparse.Namespace, engine: str, work: Path) -> list[dict[str, object]]:
    """The rows of one server."""
    needed = (PREFIXES * PREFIX_TOKENS + PROMPTS * OWN_TOKENS) * KV_BYTES_PER_TOKEN
    cache, dax = needed * CACHE // 100, needed * DAX // 100
    longest = PREFIX_TOKENS + OWN_TOKENS + 1 + OUTPUT_TOKENS
    arena = options.arenas / f"churn-{engine}"
    transfer = {
        "kv_connector": "KvdepotConnector",
        "kv_connector_module_path": "kvdepot.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "pipeline": "Cache|Dax",
            "admission": options.policy,
            "cache": {"capacity": cache},
            "dax": {"path": str(arena), "capacity": dax + (1 << 20)},
        },
    }
    own = needed if engine == "large" else IN_FLIGHT * longest * KV_BYTES_PER_TOKEN
    server = Server(
        f"engine's cache {engine}",
        work / "model",
        log=work / f"{engine}.log",
        arguments=[
            *(["--no-enable-prefix-caching"] if engine == "none" else []),
            "--max-model-len",
            str(longest + 64),
            "--kv-transfer-config",
            json.dumps(transfer),
        ],
        kv_space_gib=own // GIB + 2,
        say=say,
    )
    try:
        server.wait_ready()
        prompts = history(options.requests, options.order)
        asked = served = 0
        start = said = time.monotonic()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = pool.map(
                lambda prompt: measure.ask(server, prompt, output_tokens=OUTPUT_TOKENS), prompts
            )
            for number, answer in enumerate(answers, 1):
                asked += answer.prompt_tokens
                served += answer.cached_tokens
                if time.monotonic() - said > 15:
                    said = time.monotonic()
                    say(f"  {number} of {len(prompts)} prompts, {said - start:.0f} s")
        measure.wait_until_written(server)
        time.sleep(1)  # The depot's figures are published twice a second.

        def total(name: str, **labels: str) -> float:
            return measure.metric(server, f"kvdepot_{name}_total", **labels)

        far = total("hit_bytes", tier="Dax")
        values = {"stored_over_capacity": total("stored_bytes", tier="Dax") / dax}
        if engine == "none":
            values["token_hit_rate"] = served / asked
            values["promoted_over_hit"] = total("promoted_bytes") / max(far, 1)
    finally:
        server.stop()
        arena.unlink(missing_ok=True)
    case = {
        "engine_cache": engine,
        "order": options.order,
        "policy": options.policy,
        "requests": options.requests,
    }
    return [
        {
            "bench": "vllm_churn",
            "case": case,
            "metric": metric,
            "unit": "",
            "value": round(value, 4),
            "rounds": 1,
        }
        for metric, value in values.items()
    ]


def main() -> int:
    """Measure, and print one row a metric."""
    parser = program.parser("churn", __doc__)
    parser.add_argument(
        "--requests",
        type=int,
        default=300,
        help="number of requests, at least 1; 3277 in the full benchmark (default: 300)",
    )
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default="skewed",
        help="distribution of the prompts over the requests (default: skewed)",
    )
    parser.add_argument(
        "--policy",
        choices=("learned", "all"),
        default="learned",
        help="admission policy of the depot (default: learned)",
    )
    parser.add_argument(
        "--engine-cache",
        choices=ENGINES,
        help="prefix cache of vLLM: for all prompts, or off (default: both)",
    )
    parser.add_argument(
        "--arenas",
        type=Path,
        default=Path("/dev/shm"),
        help="folder for the arenas (default: /dev/shm)",
    )
    options = parser.parse_args()
    if options.requests < 1:
        parser.error(f"--requests is {options.requests}; allowed: 1 or more")
    engines = [options.engine_cache] if options.engine_cache else list(ENGINES)
    with tempfile.TemporaryDirectory(prefix="kvdepot-") as work:
        subprocess.run(
            [sys.executable, "-m", "vllm_demo.model", str(Path(work) / "model")],
            cwd=EXAMPLES,
            check=True,
            stderr=subprocess.DEVNULL,
        )
        try:
            with no_survivors():
                for engine in engines:
                    for row in run(options, engine, Path(work)):
                        if options.json:
                            print(json.dumps(row), flush=True)
                        else:
                            print(f"{engine:<8}{row['metric']:<22}{row['value']:>9}", flush=True)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
