"""Measures questions about long documents: `make bench-long-doc-qa`.

Two vLLM servers with kvdepot's connector answer the same questions, several in flight. In the first
round, each server computes and stores every document. In the second round, one server restores the
KV data of a document in one batch, and the other server one chunk at a time. The servers start in
turns, and the idle server is stopped. vLLM's own prefix cache is off, so that every hit comes from
kvdepot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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

QUESTION_TOKENS = 40
OUTPUT_TOKENS = 8
GIB = 1 << 30
WAYS = ("batch", "chunk")


class Reader:
    """One server and what it has restored."""

    def __init__(self, way: str, options: argparse.Namespace, work: Path, arenas: Path) -> None:
        self.way = way
        self.loads = work / f"loads-{way}.jsonl"
        self.loads.touch()
        self._read = 0
        held = options.documents * (options.tokens + 2 * QUESTION_TOKENS) * KV_BYTES_PER_TOKEN
        transfer = {
            "kv_connector": "LongDocConnector",
            "kv_connector_module_path": "long_doc_qa.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "pipeline": "Dax",
                # A probe would compute a part of the first document.
                "probe_every": 0,
                "dax": {"path": str(arenas / way), "capacity": int(held * 1.25) + GIB // 4},
            },
        }
        longest = options.tokens + QUESTION_TOKENS + OUTPUT_TOKENS
        paths = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.server = Server(
            f"restores by {way}",
            work / "model",
            log=work / f"{way}.log",
            arguments=[
                "--no-enable-prefix-caching",
                "--max-model-len",
                str(longest + 64),
                # Attention in float32 is slow on a GPU, and both servers are in its memory.
                *(
                    ["--gpu-memory-utilization", str(options.gpu_memory), "--dtype", "bfloat16"]
                    if options.gpu_memory
                    else []
                ),
                "--kv-transfer-config",
                json.dumps(transfer),
            ],
            environment={
                "PYTHONPATH": os.pathsep.join(paths),
                "KVDEPOT_BENCH_RESTORE": way,
                "KVDEPOT_BENCH_LOADS": str(self.loads),
                "KVDEPOT_BENCH_LOADERS": str(options.loaders),
            },
            kv_space_gib=-(-options.in_flight * longest * KV_BYTES_PER_TOKEN // GIB) + 1,
            say=say,
        )
        self.server.wait_ready()
        for prompt in measure.prompts(2, 300, seed=1):
            measure.ask(self.server, prompt)
            measure.ask(self.server, prompt)
        self.server.pause()

    def ask_all(self, prompts: list[list[int]], in_flight: int) -> dict[str, float]:
        """Mean TTFT, time of the round and mean time that a query spent restoring, in ms."""
        with self.server.running():
            start = time.perf_counter()
            with ThreadPoolExecutor(in_flight) as pool:
                answers = list(
                    pool.map(
                        lambda prompt: measure.ask(
                            self.server, prompt, output_tokens=OUTPUT_TOKENS
                        ),
                        prompts,
                    )
                )
            taken = time.perf_counter() - start
            measure.wait_until_written(self.server)
        lines = self.loads.read_text().splitlines()
        loads = [json.loads(line) for line in lines[self._read :]]
        self._read = len(lines)
        return {
            "ttft": statistics.mean(answer.ttft_ms for answer in answers),
            "query_round": taken * 1e3,
            "restore": sum(load["seconds"] for load in loads) * 1e3 / len(prompts),
            "restored_gib": sum(load["bytes"] for load in loads) / GIB,
            "cached_tokens": min(answer.cached_tokens for answer in answers),
        }


def run(options: argparse.Namespace, work: Path, arenas: Path) -> dict[str, list[dict[str, float]]]:
    """What each server measured, in each pass of the second round."""
    subprocess.run(
        [sys.executable, "-m", "vllm_demo.model", str(work / "model")],
        cwd=EXAMPLES,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    documents = measure.prompts(options.documents, options.tokens, seed=options.tokens)
    readers = [Reader(way, options, work, arenas) for way in WAYS]

    def questions(number: int) -> list[list[int]]:
        asked = measure.prompts(options.documents, QUESTION_TOKENS, seed=number)
        return [document + question for document, question in zip(documents, asked, strict=True)]

    for reader in readers:
        found = reader.ask_all(questions(-1), options.in_flight)
        say(f"  {reader.way}: computed; TTFT {found['ttft']:.0f} ms")
    passes: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.passes):
        # Both orders: each goes first in every second pass.
        for reader in readers if number % 2 == 0 else readers[::-1]:
            found = reader.ask_all(questions(number), options.in_flight)
            if found["cached_tokens"] < options.tokens // 128 * 128:
                raise ServerError(f"{reader.way}: {found['cached_tokens']:.0f} tokens were hits")
            passes[reader.way].append(found)
            say(
                f"  {reader.way}, pass {number}: restored in {found['restore']:.1f} ms a query, "
                f"TTFT {found['ttft']:.0f} ms, round {found['query_round']:.0f} ms"
            )
    return passes


def rows(
    options: argparse.Namespace, passes: dict[str, list[dict[str, float]]]
) -> list[dict[str, object]]:
    """The batch against chunk by chunk, pass by pass: below 1 is better."""
    case = {
        "documents": options.documents,
        "tokens": options.tokens,
        "in_flight": options.in_flight,
        "loaders": options.loaders,
    }
    found: list[dict[str, object]] = []
    for metric in ("restore", "ttft", "query_round"):
        batch, chunk = ([one[metric] for one in passes[way]] for way in WAYS)
        ratio = statistics.median(ours / theirs for ours, theirs in zip(batch, chunk, strict=True))
        found.append(
            {
                "bench": "long_doc_qa",
                "case": case,
                "metric": f"{metric}_over_per_chunk",
                "unit": "ms",
                "value": round(statistics.median(batch), 2),
                "limit": round(statistics.median(chunk), 2),
                "ratio": round(ratio, 3),
                "rounds": len(batch),
            }
        )
    return found


def main() -> int:
    """Measure, and print one row a metric."""
    parser = program.parser("long_doc_qa", __doc__)
    parser.add_argument(
        "--documents",
        type=int,
        default=6,
        help="number of documents; 30 in the full benchmark (default: 6)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=4000,
        help="tokens per document, at least 256; 10000 in the full benchmark (default: 4000)",
    )
    parser.add_argument(
        "--in-flight", type=int, default=5, help="questions in flight at a time (default: 5)"
    )
    parser.add_argument(
        "--loaders",
        type=int,
        default=1,
        help="number of questions whose documents are restored chunk by chunk at the same time "
        "(default: 1, as in the thread of a worker)",
    )
    parser.add_argument(
        "--passes", type=int, default=4, help="repetitions of the second round (default: 4)"
    )
    parser.add_argument(
        "--arenas",
        type=Path,
        default=Path("/dev/shm"),
        help="folder for the arenas (default: /dev/shm)",
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        help="fraction of a GPU's memory for each of the two servers, up to 0.45 (default: the "
        "servers run on the CPU)",
    )
    options = parser.parse_args()
    least = min(options.documents, options.in_flight, options.loaders, options.passes)
    if least < 1 or options.tokens < 256:
        parser.error("documents, in-flight, loaders and passes are at least 1, tokens at least 256")
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
            metric = str(row["metric"]).removesuffix("_over_per_chunk")
            print(
                f"{metric:<13}{row['value']:>10} ms in one batch{row['limit']:>10} ms chunk by "
                f"chunk{row['ratio']:>8} times"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
