"""Measures hits of vLLM through LMCache's connector and server: `make bench-lmcache-ttft`.

Each prompt is computed once. In each round, the prompt is requested twice: after LMCache's DRAM was
emptied, so that every chunk comes from kvdepot, and then with all chunks in LMCache's DRAM. The
second time is the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
sys.path[:0] = [str(HERE), str(EXAMPLES)]

from server import LMCacheServer  # noqa: E402
from vllm_demo import measure  # noqa: E402
from vllm_demo.model import KV_BYTES_PER_TOKEN  # noqa: E402
from vllm_demo.server import Server, ServerError, no_survivors  # noqa: E402

CHUNK = 256
GIB = 1 << 30


def say(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def run(options: argparse.Namespace, work: Path, arenas: Path) -> dict[str, list[float]]:
    """TTFT in milliseconds: computed, out of kvdepot, out of LMCache's DRAM."""
    model = work / "model"
    command = [sys.executable, "-m", "vllm_demo.model", str(model)]
    subprocess.run(command, cwd=EXAMPLES, check=True, stderr=subprocess.DEVNULL)
    held = options.prompts * options.tokens * KV_BYTES_PER_TOKEN / GIB
    adapter = {
        "type": "native_plugin",
        "module_path": "kvdepot.lmcache",
        "class_name": "KvdepotNative",
        "adapter_params": {
            "device_path": str(arenas / "arena"),
            "max_dax_size": round(held * 1.5 + 0.25, 2),
        },
    }
    lmcache = LMCacheServer(work, l1_gib=round(held * 1.5 + 0.5, 2))
    lmcache.start(json.dumps(adapter))
    try:
        vllm = Server(
            "vLLM",
            model,
            log=work / "vllm.log",
            arguments=["--max-model-len", str(options.tokens + 256), "--no-enable-prefix-caching"]
            + ["--kv-transfer-config", lmcache.transfer()],
            kv_space_gib=-(-options.tokens * KV_BYTES_PER_TOKEN // GIB) + 1,
            say=say,
        )
        vllm.wait_ready()
        for prompt in measure.prompts(1, 600, seed=1) * 2:
            measure.ask(vllm, prompt)
        prompts = measure.prompts(options.prompts, options.tokens, seed=options.tokens)
        times: dict[str, list[float]] = {"full": [], "kvdepot": [], "dram": []}
        full = [measure.ask(vllm, prompt) for prompt in prompts]
        times["full"] = [answer.ttft_ms for answer in full]
        say(f"  computed: {statistics.median(times['full']):.0f} ms")
        least = (options.tokens - 1) // CHUNK * CHUNK
        for round_number in range(options.rounds + 1):
            for prompt, reference in zip(prompts, full, strict=True):
                lmcache.empty_dram()
                for source in ("kvdepot", "dram"):
                    answer = measure.ask(vllm, prompt)
                    lmcache.settle()
                    far = measure.largest_difference(answer, reference)
                    if answer.cached_tokens < least or far > 1e-3:
                        raise ServerError(
                            f"{source}: {answer.cached_tokens} tokens were hits, logprobs differ "
                            f"by {far}"
                        )
                    if round_number > 0:  # the first warms up
                        times[source].append(answer.ttft_ms)
        return times
    finally:
        lmcache.stop()


def rows(options: argparse.Namespace, times: dict[str, list[float]]) -> list[dict[str, object]]:
    """Kvdepot's hits against LMCache's own, and against computing."""
    ours, theirs = times["kvdepot"], times["dram"]
    full, value = statistics.median(times["full"]), statistics.median(ours)
    shared = {
        "bench": "lmcache_ttft",
        "case": {"tokens": options.tokens, "prompts": options.prompts},
        "unit": "ms",
        "value": round(value, 1),
        "rounds": options.rounds,
    }
    over = statistics.median(mine / its for mine, its in zip(ours, theirs, strict=True))
    dram = round(statistics.median(theirs), 1)
    return [
        {**shared, "metric": "hit_over_lmcache_dram", "limit": dram, "ratio": round(over, 3)},
        {
            **shared,
            "metric": "full_over_hit",
            "limit": round(full, 1),
            "ratio": round(full / value, 1),
        },
    ]


def main() -> int:
    """Measure, and print one row a metric."""
    parser = argparse.ArgumentParser(prog="bench/lmcache/ttft.py", description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=8000, help="tokens per prompt (default: 8000)"
    )
    parser.add_argument("--prompts", type=int, default=3, help="number of prompts (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON Lines (one object per line) instead of a table",
    )
    parser.add_argument(
        "--arenas",
        type=Path,
        default=Path("/dev/shm"),
        help="folder for the arena (default: /dev/shm)",
    )
    options = parser.parse_args()
    if min(options.prompts, options.rounds) < 1 or options.tokens < 2 * CHUNK:
        parser.error(f"prompts and rounds are at least 1, tokens at least {2 * CHUNK}")
    with (
        tempfile.TemporaryDirectory(prefix="kvdepot-") as work,
        tempfile.TemporaryDirectory(prefix="kvdepot-", dir=options.arenas) as arenas,
    ):
        try:
            with no_survivors():
                found = rows(options, run(options, Path(work), Path(arenas)))
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    for row in found:
        if options.json:
            print(json.dumps(row))
        else:
            print(f"{row['metric']:<24}{row['value']:>10} ms{row['limit']:>10} ms{row['ratio']:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
