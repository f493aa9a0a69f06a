"""Unpacks vLLM on a machine without a network, and reports which modules can be imported.

`python bench/vllm_device/install.py PARTS TARGET`: PARTS is a folder with `part*.tar.xz`, and
TARGET is the folder for PYTHONPATH. The program needs only Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

MODULES = (
    "torch",
    "triton",
    "transformers",
    "vllm",
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "kvdepot",
    "kvdepot.vllm",
)
DISTRIBUTIONS = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "numpy",
    "vllm",
    "pydantic",
    "msgspec",
    "kvdepot",
)
CHECK = """
import importlib, sys, time
for name in sys.argv[1:]:
    begun = time.perf_counter()
    try:
        importlib.import_module(name)
        outcome = f"ok ({time.perf_counter() - begun:.1f} s)"
    except BaseException as error:
        outcome = f"ERROR {type(error).__name__}: {error}".replace(chr(10), " ")[:300]
    print(f"{name:<68} {outcome}", flush=True)
from vllm.platforms import current_platform
print(f"platform: {current_platform.device_name}")
if current_platform.is_cuda():
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    print(f"device: {current_platform.get_device_name()}; Triton: {HAS_TRITON}; "
          f"FlashAttention {get_flash_attn_version(head_size=128)}")
"""
# The part of vLLM that is carried has no FlashInfer, and the machine no network.
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def unpack(parts: Path, target: Path) -> None:
    """All parts, into one folder."""
    archives = sorted(parts.glob("part*.tar.xz"))
    if not archives:
        raise SystemExit(f"{parts}: there is no part*.tar.xz")
    target.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        begun = time.perf_counter()
        with tarfile.open(archive) as files:
            files.extractall(target, filter="data")
        taken = time.perf_counter() - begun
        print(f"{archive}: {archive.stat().st_size} bytes, unpacked in {taken:.1f} s", flush=True)


def main() -> int:
    """Unpack, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", type=Path, help="folder with the files part*.tar.xz")
    parser.add_argument(
        "target", type=Path, help="folder to unpack into; add this folder to PYTHONPATH"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the imports of an earlier installation in TARGET",
    )
    options = parser.parse_args()
    if not options.check:
        unpack(options.parts, options.target)
    paths = [str(options.target.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    # As the other process will see them, and not as this one does.
    sys.path[:0] = paths
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not there"
        print(f"{name:<68} {version}")
    code = subprocess.run(
        [sys.executable, "-c", CHECK, *MODULES], env=environment, check=False
    ).returncode
    print("for PYTHONPATH:", options.target.resolve())
    return code


if __name__ == "__main__":
    sys.exit(main())
