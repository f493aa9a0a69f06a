"""The slots of `make gpu-day`, most important first: commands that print rows as JSON Lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

PYTHON = sys.executable
# The rehearsal's model: an engine of this shape starts in seconds on two cores.
SMALL = {
    "layers": 2,
    "hidden": 128,
    "heads": 4,
    "kv-heads": 2,
    "head-dim": 32,
    "intermediate": 256,
    "vocabulary": 320,
    "batched-tokens": 2048,
    "host-gib": 0.25,
}


@dataclass(frozen=True)
class Slot:
    """One part of the measurements, which runs whole or not at all."""

    name: str
    about: str
    seconds: float
    """Expected duration until the slot was measured on a device of the same name."""
    command: list[str]
    rehearsal: list[str]
    """The command on the mock driver and on vLLM for the CPU, with small models."""
    modules: tuple[str, ...] = field(default=("kvdepot",))
    """Python modules that the command needs."""


def cuda(*arguments: str) -> list[str]:
    """`kvdepot bench cuda`."""
    return [PYTHON, "-m", "kvdepot", "bench", "cuda", "--json", *arguments]


def tests(*arguments: str) -> list[str]:
    """The tests, as rows."""
    return [PYTHON, "-m", "gpu_day.tests", *arguments]


def vllm(
    *ways: str, tokens: tuple[int, ...] = (10_000,), at_a_time: tuple[int, ...] = (1,), more: str
) -> list[str]:
    """`vllm_device` with these sources of the prompts' KV data."""
    command = [PYTHON, "-m", "vllm_device", "--json", *more.split()]
    for name, values in (("way", ways), ("tokens", tokens), ("concurrency", at_a_time)):
        for value in values:
            command += [f"--{name}", str(value)]
    return command


def small(*ways: str, at_a_time: tuple[int, ...] = (1,), more: str) -> list[str]:
    """The same with the rehearsal's model. vLLM's own offloading needs a GPU."""
    shape = " ".join(f"--{name} {value}" for name, value in SMALL.items())
    more = f"{more} {shape} --rounds 1"
    return vllm(*ways, tokens=(300,), at_a_time=at_a_time, more=more)


ENGINE = ("kvdepot", "vllm", "torch")
BLOCKS = tuple(f"--block={size}" for size in ("64KiB", "256KiB", "1MiB", "4MiB"))
FEW_DECODED = "--decode --decode-tokens 300"
PROMPTS_ONLY = '--extra {"offload_prompt_only":true}'

SLOTS = [
    Slot(
        "copies",
        "copies between Cache and the device, from 64 KiB to 4 MiB",
        60,
        cuda(*BLOCKS),
        cuda("--quick", "--block=64KiB", "--block=1MiB", "--size=64MiB"),
    ),
    Slot(
        "tests",
        "the tests of a device",
        60,
        tests("-m", "gpu", "tests/python", "tests/engine/test_worker.py"),
        tests("tests/python/test_cuda.py", "-k", "sizes or slices"),
        ("kvdepot", "torch", "pytest"),
    ),
    Slot(
        "ttft",
        "time to the first token: own cache, vLLM's offloading, Cache; 1 and 4 at a time",
        100,
        vllm("own", "offload", "Cache", at_a_time=(1, 4), more="--no-decode"),
        small("own", "Cache", at_a_time=(1, 4), more="--no-decode"),
        ENGINE,
    ),
    Slot(
        "decode",
        "a stream alone, beside loads, beside stores: vLLM's offloading and Cache",
        150,
        vllm("computed", "offload", "Cache", tokens=(64,), more="--decode --rounds 1"),
        small("computed", "Cache", more=FEW_DECODED),
        ENGINE,
    ),
    Slot(
        "decode-prompts",
        "the same, if kvdepot stores prompts only, as vLLM's offloading does by default",
        120,
        vllm("offload", "Cache", tokens=(64,), more=f"--decode --rounds 1 {PROMPTS_ONLY}"),
        small("Cache", more=f"{FEW_DECODED} {PROMPTS_ONLY}"),
        ENGINE,
    ),
    Slot(
        "eight",
        "time to the first token: computed, own cache, offloading and Cache; 8 at a time",
        120,
        vllm("computed", "own", "offload", "Cache", at_a_time=(8,), more="--no-decode"),
        small("computed", "own", "Cache", at_a_time=(8,), more="--no-decode"),
        ENGINE,
    ),
    Slot(
        "files",
        "time to the first token from Cache|Nvme and Cache|Posix, and after a restart",
        150,
        vllm("Cache|Nvme", "Cache|Posix", "restart", more="--no-decode --rounds 2"),
        small("Cache|Nvme", "Cache|Posix", "restart", more="--no-decode"),
        ENGINE,
    ),
    Slot(
        "lengths",
        "time to the first token of 4,000 and 32,000 tokens",
        180,
        vllm("own", "offload", "Cache", tokens=(4000, 32_000), more="--no-decode --rounds 2"),
        small("own", "Cache", more="--no-decode"),
        ENGINE,
    ),
    Slot(
        "blocks-16",
        "vLLM blocks of 16 tokens: own cache, offloading and Cache",
        100,
        vllm("own", "offload", "Cache", more="--no-decode --block-size 16"),
        small("own", "Cache", more="--no-decode --block-size 16"),
        ENGINE,
    ),
    Slot(
        "blocks-128",
        "vLLM blocks of 128 tokens: own cache, offloading and Cache",
        100,
        vllm("own", "offload", "Cache", more="--no-decode --block-size 128"),
        small("own", "Cache", more="--no-decode --block-size 128"),
        ENGINE,
    ),
    Slot(
        "long-documents",
        "questions about long documents, restored in one batch and chunk by chunk",
        240,
        [PYTHON, "-m", "long_doc_qa", "--json", "--documents", "30", "--tokens", "10000"]
        + ["--gpu-memory", "0.4"],
        [PYTHON, "-m", "long_doc_qa", "--json"]
        + ["--documents", "2", "--tokens", "512", "--in-flight", "2", "--passes", "1"],
        ENGINE,
    ),
    Slot(
        "shapes",
        "fp8 KV, MLA, a sliding window, a hybrid: same tokens from Cache, after /sleep, probed",
        180,
        [PYTHON, "-m", "gpu_day.shapes"],
        [PYTHON, "-m", "gpu_day.shapes"],
        ENGINE,
    ),
]
