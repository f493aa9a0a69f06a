"""What the benchmarks that are Python modules share: how they are called, and what they say."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

STARTED = time.monotonic()


def say(line: str) -> None:
    """One line of progress."""
    print(f"{time.monotonic() - STARTED:5.0f} s  {line}", file=sys.stderr, flush=True)


def unwind_on_signals() -> None:
    """Has SIGTERM and SIGHUP unwind the stack, so that no process and no file is left."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark's options, with what it says of itself as its module does."""
    made = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--json",
        action="store_true",
        help="print JSON Lines (one object per line) instead of a table",
    )
    return made


def parser_with_model(
    name: str, about: str | None, *, tokens: int, requests: int
) -> argparse.ArgumentParser:
    """The same for a benchmark that runs one engine in its own process, over a real model."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    made = parser(name, about)
    made.add_argument("--model", required=True, help="directory of the model to use")
    made.add_argument(
        "--tokens", type=int, default=tokens, help=f"tokens per stored prompt (default: {tokens})"
    )
    made.add_argument(
        "--requests",
        type=int,
        default=requests,
        help=f"number of measured requests (default: {requests})",
    )
    return made
