"""`python -m vllm_demo`: measure kvdepot under a real vLLM server and print the table."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from . import report
from .rounds import BLOCK_TOKENS, Demo, Plan
from .server import ServerError, double_of_3fs, no_survivors

EXAMPLES = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the demo; 0 when the output was the same and everything stored was served."""
    arguments = _arguments()
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {line}", flush=True)

    plan = Plan(
        work=arguments.work.resolve(),
        python=arguments.python,
        sizes=dict(arguments.prompts),
        pipeline=arguments.pipeline,
    )
    plan.work.mkdir(parents=True, exist_ok=True)
    if double := double_of_3fs():
        say(double)
    try:
        with no_survivors():
            say("making a small model with random weights (less than half a minute)")
            subprocess.run(
                [plan.python, "-m", "vllm_demo.model", str(plan.work / "model")],
                cwd=EXAMPLES,
                check=True,
                stderr=subprocess.DEVNULL,
            )
            rounds = Demo(plan, say).run()
    except KeyboardInterrupt:
        print("\ninterrupted; every server has been stopped", file=sys.stderr)
        return 130
    except ServerError as error:
        print(f"\n{error}\n\nlogs: {plan.work}/*.log", file=sys.stderr)
        return 1
    report.write(rounds, arguments.json)
    say("done")
    print(f"\n{report.table(rounds)}\nwritten to {arguments.json}")
    if double:
        print(double)
    failures = report.failures(rounds)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm_demo", description=__doc__)
    parser.add_argument(
        "--prompts",
        metavar="TOKENS:COUNT",
        type=_size,
        nargs="+",
        default=[(8000, 2)],
        help="prompt lengths and how many prompts of each (default: 8000:2); "
        f"not multiples of the block of {BLOCK_TOKENS} tokens",
    )
    parser.add_argument(
        "--full",
        dest="prompts",
        action="store_const",
        const=[(8000, 7), (16040, 3)],
        help="as --prompts 8000:7 16040:3, which takes a quarter of an hour on two cores",
    )
    parser.add_argument(
        "--pipeline",
        default=Plan.pipeline,
        help="tiers near to far (default: %(default)s); with Ds3fs --work is a folder of a 3FS, or "
        "make demo runs a double of its library",
    )
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="model, arena, logs")
    parser.add_argument("--json", type=Path, default=Path("build/demo.json"), help="the figures")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has vLLM and kvdepot"
    )
    return parser.parse_args()


def _size(text: str) -> tuple[int, int]:
    tokens, _, count = text.partition(":")
    size = int(tokens), int(count or 1)
    if size[0] <= BLOCK_TOKENS or size[0] % BLOCK_TOKENS == 0 or size[1] < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: more than {BLOCK_TOKENS} tokens, not a multiple of {BLOCK_TOKENS} (there "
            "vLLM's own cache recomputes a whole block and the comparison would flatter kvdepot), "
            "and at least one prompt"
        )
    return size


if __name__ == "__main__":
    sys.exit(main())
