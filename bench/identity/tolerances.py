"""Measures the differences between stored blocks and computed blocks of engines.

The program compares equal engines, and engines with a difference that is left out of the namespace.
For each element type it prints three values: the largest difference between equal engines, in other
batches, chunks and after decoding; the tolerance of probes; and the smallest difference that a
probe must detect. The largest difference of equal engines must be at most half of the tolerance,
and the tolerance at most a quarter of the smallest difference to detect.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import program

from identity import models
from identity.__main__ import kvdepot
from identity.cases import CHANGES, Case
from identity.engines import Engine, Engines, Prompt

# Cases whose change is taken out of the namespace, so that probes have to find it.
HOLES = (
    "weights",
    "RoPE in config.json",
    "length under LongRoPE",
    "LoRA files",
    "LoRA modules",
    "processor options",
    "processor files",
    "weights reloaded in memory",
)


@dataclass(frozen=True)
class Shape:
    """A model, and how its engines compute."""

    name: str
    elements: str
    """The type of the keys and values."""
    make: Callable[[Path], Path]
    options: dict[str, Any]
    tokens: tuple[int, int] = (70, 900)
    """Of a prompt: at least, and fewer than."""
    first: str = "detect"
    """`probe_first`."""


def _moe(directory: Path) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = models.SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    return models.save(directory, 0, lambda: MixtralForCausalLM(MixtralConfig(**shape)))


def shapes(real: Path | None) -> Iterator[Shape]:
    """All that runs here; `real` is the directory of a real model."""
    for elements in ("float32", "float16", "bfloat16"):
        yield Shape(f"random, {elements}", elements, models.llama, {"dtype": elements})
        yield Shape(f"experts, {elements}", elements, _moe, {"dtype": elements})
        if real is not None:
            yield Shape(f"real, {elements}", elements, lambda _: real, {"dtype": elements})
    # Its blocks have more tokens than a probe may cost: the first hit is compared as a whole.
    hybrid = {"dtype": "bfloat16", "max_model_len": 4096}
    yield Shape("states", "bfloat16", models.qwen3_next, hybrid, (1100, 2300), "gate")
    for elements in ("fp8_e4m3", "fp8_e5m2"):
        options = {"dtype": "bfloat16", "kv_cache_dtype": elements}
        yield Shape(f"random, {elements}", elements, models.llama, options)
        if real is not None:
            yield Shape(f"real, {elements}", elements, lambda _: real, options)


def _prompts(count: int, vocabulary: int, shape: Shape) -> list[Prompt]:
    drawn = random.Random(shape.name)
    return [
        Prompt([drawn.randrange(10, vocabulary) for _ in range(drawn.randrange(*shape.tokens))])
        for _ in range(count)
    ]


def healthy(engines: Engines, shape: Shape, count: int) -> tuple[list[float], dict[str, int]]:
    """Differences that the probes of equal engines find, and what came of their blocks."""
    differences: list[float] = []
    results: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="tolerances") as at:
        model = shape.make(Path(at) / "model")
        config = json.loads((model / "config.json").read_text())
        vocabulary = min(config["vocab_size"] - 10, 1 << 15)
        first = Engine(str(model), shape.options, connector=kvdepot(Path(at) / "arena", {}))
        first = replace(first, output_tokens=80)
        asked = _prompts(count, vocabulary, shape)
        answers = engines.ask(replace(first, together=True), asked)
        # What was decoded is computed as a prompt now.
        again = [
            Prompt([*prompt.tokens, *answer.tokens, 7, 8])
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        probing = kvdepot(Path(at) / "arena", {"probe_every": 1, "probe_first": shape.first})
        for together, batched in ((False, 2048), (True, 96), (True, 2048)):
            engine = replace(
                first,
                output_tokens=2,
                together=together,
                connector=probing,
                options=shape.options | {"max_num_batched_tokens": batched, "max_num_seqs": 8},
            )
            engines.ask(engine, again)
            differences += engines.probed.differences
            for result, blocks in engines.probed.results.items():
                results[result] = results.get(result, 0) + blocks
    return differences, results


def hole(engines: Engines, case: Case, options: dict[str, Any]) -> list[float]:
    """Differences of the first block that a probe compares, with a change left out of names."""
    with tempfile.TemporaryDirectory(prefix="tolerances") as at:
        here = Path(at)
        first, second = case.make(here)
        connector = kvdepot(here / "arena", case.settings | {"probe_every": 1})
        both = {"connector": connector, "holes": list(case.holes)}
        engines.ask(_with(first, options, both, at), case.prompts(here))
        case.meanwhile(here)
        engines.ask(_with(second, options, both, at), (case.asked or case.prompts)(here))
        return engines.probed.differences


def _with(engine: Engine, options: dict[str, Any], both: dict[str, Any], home: str) -> Engine:
    # Nothing of the user's own is quarantined.
    environment = engine.environment | {"XDG_CACHE_HOME": home}
    return replace(engine, options=engine.options | options, environment=environment, **both)


def main() -> int:
    """The table; 1 where the differences leave no room for the tolerance."""
    options = program.parser("identity.tolerances", __doc__)
    options.add_argument(
        "--prompts", type=int, default=40, help="number of prompts per kind of engine (default: 40)"
    )
    options.add_argument(
        "--model", type=Path, help="directory of a real model to compare in addition"
    )
    options.add_argument(
        "--only", default="", help="part of the names of the comparisons to run (default: all)"
    )
    given = options.parse_args()
    import torch
    from kvdepot.vllm.comparing import TOLERANCES

    most: dict[str, float] = {}
    least: dict[str, float] = {}
    probes = 0
    with Engines() as engines:
        for shape in shapes(given.model and given.model.resolve()):
            if given.only not in shape.name:
                continue
            program.say(shape.name)
            try:
                # A real model takes a hundred times as long.
                count = max(2, given.prompts // (10 if "real" in shape.name else 1))
                differences, results = healthy(engines, shape, count)
            except RuntimeError as error:
                program.say(f"{shape.name} does not run here: {str(error)[:200]}")
                continue
            probes += len(differences)
            most[shape.elements] = max(most.get(shape.elements, 0.0), *differences)
            _say(given.json, shape.name, max(differences), len(differences), results)
        for elements in most:
            kind = {"kv_cache_dtype": elements, "dtype": "bfloat16"}
            chosen = kind if elements.startswith("fp8") else {"dtype": elements}
            for case in (case for case in CHANGES if case.name in HOLES):
                program.say(f"{case.name}, {elements}")
                differences = hole(engines, case, chosen)
                least[elements] = min(least.get(elements, 1e9), *differences[:1])
                _say(given.json, f"{case.name}, {elements}", differences[0], 1, {})
    print(f"{probes} blocks of equal engines were compared")
    bad = False
    for elements, largest in most.items():
        name = elements.replace("fp8", "float8").replace("e4m3", "e4m3fn")
        tolerance = TOLERANCES[getattr(torch, name)]
        bad |= largest > tolerance / 2 or least[elements] < 4 * tolerance
        print(
            f"{elements:10} equal engines {largest:.2g}  tolerance {tolerance:.2g}  "
            f"smallest of a hole {least[elements]:.2g}"
        )
    return int(bad)


def _say(as_json: bool, name: str, difference: float, blocks: int, results: dict[str, int]) -> None:
    row = {"bench": "tolerances", "of": name, "largest": difference, "blocks": blocks}
    if as_json:
        print(json.dumps(row | {"results": results}), flush=True)
    else:
        print(f"{name:48} {difference:10.3g}  {blocks} blocks {results or ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
