"""Compares restoring a llama.cpp prompt from a depot with computing the prompt.

    PYTHONPATH=bench:tests/llama_cpp python -m llama_restore [--json]

Each round computes the prompt, and then restores the prompt from a newly opened depot, as a new
process would. The measured time includes opening the depot, reading files that are not in the page
cache, verification, and loading the state into llama.cpp. Computing and restoring both end with the
logits of the next token, whose bytes must be equal. The model has random weights.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
import program
from kvdepot.llama_cpp import States
from llama_child import NEXT, logits_after, open_depot, tokens_of
from llama_server.__main__ import random_model


def forget(folder: Path) -> None:
    """Take a depot's files out of the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def computed(llama: Any, prompt: list[int]) -> tuple[float, str]:
    """Seconds until the logits behind a prompt are there, and their digest."""
    llama.reset()
    began = time.perf_counter()
    llama.eval(prompt)
    logits = logits_after(llama)
    return time.perf_counter() - began, logits


def restored(llama: Any, depot_folder: Path, prompt: list[int]) -> tuple[float, str]:
    """The same of a prompt that is stored."""
    forget(depot_folder)
    llama.reset()
    began = time.perf_counter()
    with open_depot(str(depot_folder)) as depot:
        cached = States(llama, depot).restore([*prompt, NEXT])
        logits = logits_after(llama)
        took = time.perf_counter() - began
    if cached != len(prompt):
        raise SystemExit(f"{cached} of {len(prompt)} tokens were restored")
    return took, logits


def measure(llama: Any, folder: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """The row of a prompt of so many tokens."""
    prompt = tokens_of(tokens)
    llama.eval(prompt)
    with open_depot(str(folder)) as depot:
        States(llama, depot).save()
    both: list[tuple[float, float]] = []
    for number in range(rounds):
        # Whoever comes second finds warm caches of the processor: in turn.
        order = [restored, computed] if number % 2 else [computed, restored]
        found = {}
        for how in order:
            arguments = (llama, folder, prompt) if how is restored else (llama, prompt)
            found[how] = how(*arguments)  # type: ignore[operator]
        if found[restored][1] != found[computed][1]:
            raise SystemExit("restored, the next token has other logits than computed")
        both.append((found[restored][0], found[computed][0]))
        print(
            f"  restored {both[-1][0] * 1e3:.0f} ms, computed {both[-1][1] * 1e3:.0f} ms",
            file=sys.stderr,
            flush=True,
        )
    return {
        "bench": "session",
        "case": {"engine": "llama.cpp", "tokens": tokens},
        "metric": "restore_over_prefill",
        "unit": "times",
        "value": round(statistics.median(theirs / ours for ours, theirs in both), 2),
        "limit": None,
        "ratio": None,
        "rounds": rounds,
    }


def main() -> int:
    """Measure, and print a row a prompt."""
    parser = program.parser("llama_restore", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument(
        "--tokens",
        type=int,
        action="append",
        help="tokens of the prompt; repeatable (default: 4096)",
    )
    parser.add_argument(
        "--model", type=Path, help="GGUF file (default: a model with random weights)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the depot (default: the system's temporary folder)"
    )
    options = parser.parse_args()
    prompts = options.tokens or [4096]
    if min([options.rounds, *prompts]) < 1:
        parser.error("--rounds and --tokens are at least 1")
    with tempfile.TemporaryDirectory(prefix="kvdepot-", dir=options.folder) as work:
        model = options.model or random_model(Path(work))
        settings = {"n_threads": os.cpu_count(), "flash_attn": True, "verbose": False}
        for tokens in prompts:
            llama = llama_cpp.Llama(str(model), n_ctx=tokens + 64, **settings)
            row = measure(llama, Path(work) / f"depot-{tokens}", tokens, options.rounds)
            llama.close()
            if options.json:
                print(json.dumps(row))
                continue
            print(f"{row['metric']}  llama.cpp, {tokens} tokens: {row['value']:.1f} times faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
