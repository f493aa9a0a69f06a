"""Compares loaded with computed answers for KV shapes that no other slot has.

`python -m gpu_day.shapes` runs one process per shape. Each process asks tiny random models the same
prompts twice, without and with KV data from `Cache`, then after `/sleep` and wake-up. Every hit is
probed. The rows contain the share of equal tokens, the largest difference between log
probabilities, and the results of the probes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from identity import models
from identity.engines import Probed, note_probes

PROMPT_TOKENS = 400
PROMPTS = 4
OUTPUT_TOKENS = 8
SHAPE_SECONDS = 150


def latent(directory: Path) -> Path:
    """A DeepSeek-V2, whose KV data is one latent vector per token (MLA)."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = models.SHAPE | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": None,
        "first_k_dense_replace": 2,
    }
    return models.save(directory, 0, lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**config)))


def window(directory: Path) -> Path:
    """A Mistral with a sliding window of 128 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    config = models.SHAPE | {"sliding_window": 128}
    return models.save(directory, 0, lambda: MistralForCausalLM(MistralConfig(**config)))


@dataclass(frozen=True)
class Shape:
    """A model, and how vLLM runs it."""

    make: Callable[[Path], Path]
    options: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "plain": Shape(models.llama),
    "fp8": Shape(models.llama, {"kv_cache_dtype": "fp8"}),
    "mla": Shape(latent),
    "window": Shape(window),
    "hybrid": Shape(models.qwen3_next),
}


def row(shape: str, metric: str, unit: str, value: float, **more: Any) -> None:
    """Print one measured value."""
    found = {"bench": "gpu_shapes", "case": {"shape": shape}, "metric": metric, "unit": unit}
    print(json.dumps(found | {"value": value} | more), flush=True)


def measure(name: str) -> None:
    """Run one shape in this process."""
    import torch
    from vllm import LLM, SamplingParams

    has_device = torch.cuda.is_available()
    probed = Probed()
    note_probes(probed)
    chosen: dict[str, Any] = {
        "dtype": "bfloat16" if has_device else "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": PROMPTS,
        "enable_prefix_caching": True,
        "seed": 0,
        "kv_transfer_config": {
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "pipeline": "Cache",
                "cache": {"capacity": "1GiB"},
                "probe_every": 1,
            },
        },
    }
    if has_device:
        chosen |= {"enable_sleep_mode": True, "gpu_memory_utilization": 0.2}
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="kvdepot-") as directory:
        llm = LLM(model=str(shape.make(Path(directory) / name)), **(chosen | shape.options))
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, logprobs=0)
        prompts = [
            {"prompt_token_ids": [16 + (7 * at + 31 * number) % 200 for at in range(PROMPT_TOKENS)]}
            for number in range(PROMPTS)
        ]

        def ask() -> list[Any]:
            outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
            # Stores end in later steps.
            for number in range(3):
                llm.generate([{"prompt_token_ids": [5 + number] * 3}], sampling, use_tqdm=False)
            return outputs

        computed = ask()
        for case in ["loaded", *(["loaded after sleep"] if has_device else [])]:
            if case != "loaded":
                llm.sleep(level=1)
                llm.wake_up()
            llm.reset_prefix_cache()
            compare(name, case, computed, ask())
        probes = probed.results
        row(name, "probes", "blocks", sum(probes.values()), results=probes)
        llm.llm_engine.engine_core.shutdown()


def compare(shape: str, case: str, computed: list[Any], loaded: list[Any]) -> None:
    """Print how far the answers from loaded KV data are from the computed answers."""
    equal = total = 0
    largest = 0.0
    for one, other in zip(computed, loaded, strict=True):
        first, second = one.outputs[0], other.outputs[0]
        total += len(first.token_ids)
        for at, (token, again) in enumerate(zip(first.token_ids, second.token_ids, strict=True)):
            if token != again:
                break
            equal += 1
            pair = (first.logprobs[at][token].logprob, second.logprobs[at][token].logprob)
            largest = max(largest, abs(pair[0] - pair[1]))
    cached = min(output.num_cached_tokens or 0 for output in loaded)
    row(
        shape,
        "equal_tokens",
        "share",
        equal / total,
        answers=case,
        cached_tokens=cached,
        largest_logprob_difference=round(largest, 6),
    )


def main() -> int:
    """Run all shapes, each in its own process; the status is 1 if a shape failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SHAPES, help="run this shape in this process")
    options = parser.parse_args()
    if options.only:
        # What vLLM prints must not get between the rows.
        rows = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        sys.stdout = rows
        measure(options.only)
        return 0
    failed = 0
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    for name in SHAPES:
        command = [sys.executable, "-m", "gpu_day.shapes", "--only", name]
        try:
            run = subprocess.run(
                command, env=environment | os.environ, timeout=SHAPE_SECONDS, check=False
            )
            code = run.returncode
        except subprocess.TimeoutExpired:
            code = 124
        if code:
            row(name, "failed", "exit status", code)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
