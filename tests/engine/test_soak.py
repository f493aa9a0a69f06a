"""Half an hour with room for little more than one prompt, preempted and aborted requests."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import engine_soak
from engine_fleet import make_models, model_directory
from identity import models
from identity.__main__ import kvdepot
from identity.engines import Answer, Engine, Engines, Prompt

pytestmark = [pytest.mark.engine, pytest.mark.stress, pytest.mark.timeout(7200)]

# Of all shapes together.
SECONDS = float(os.environ.get("KVDEPOT_SOAK_SECONDS", 1800))


def windows(_: Path) -> Path:
    make_models([("gemma3", "0", "--sliding")])
    return model_directory("gemma3")


@dataclass(frozen=True)
class Shape:
    make: Callable[[Path], Path]
    vocabulary: int
    device_blocks: int
    tokens: int
    options: dict[str, Any]


SHAPES = {
    "sliding windows": Shape(windows, 500, 40, 480, {}),
    # vLLM computes them in bfloat16 alone on a CPU.
    "states": Shape(models.qwen3_next, 300, 12, 3000, {"max_model_len": 4096, "dtype": "bfloat16"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_stay_right(shape: str, tmp_path: Path, seed: int) -> None:
    given = SHAPES[shape]
    model = str(given.make(tmp_path / "model"))
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
    } | given.options
    settings = {
        "pipeline": "Cache|Dax",
        "cache": {"capacity": "4MiB"},
        "dax": {"path": str(tmp_path / "arena"), "capacity": "16MiB"},
        "probe_every": 5,
    }
    found = engine_soak.run(
        engine_soak.Soak(
            model=model,
            vocabulary=given.vocabulary,
            options=options | {"num_gpu_blocks_override": given.device_blocks},
            connector=kvdepot(tmp_path / "arena", settings),
            tokens=given.tokens,
            seconds=SECONDS / len(SHAPES),
            seed=seed,
        ),
        tmp_path / "cache",
    )
    print(dataclasses.replace(found, samples=[]), len(found.samples), "samples")
    assert found.left == dict.fromkeys(found.left, 0)
    assert min(found.aborted, found.preempted, found.loaded, found.evicted) > 0
    assert found.resets > 0
    assert found.served >= 10
    assert found.probed.get("agreed", 0) > 0
    assert found.probed.get("differed", 0) == 0
    with Engines() as engines:
        reference = Engine(model, options, output_tokens=engine_soak.OUTPUT_TOKENS)
        expected = engines.ask(reference, [Prompt(prompt) for prompt, _, _ in found.samples])
    others = 0
    for (prompt, tokens, logprobs), whole in zip(found.samples, expected, strict=True):
        ours = Answer(tokens, logprobs, 0)
        same = Answer(whole.tokens[: len(tokens)], whole.logprobs[: len(tokens)], 0)
        if options["dtype"] == "float32":
            assert not ours.differs(same), f"a prompt of {len(prompt)} tokens"
        else:
            # The last digits depend on what is computed together.
            difference = abs(ours.logprobs[0] - same.logprobs[0])
            assert difference <= 0.5, f"a prompt of {len(prompt)} tokens"
            others += ours.tokens != same.tokens
    assert others <= len(found.samples) // 5
