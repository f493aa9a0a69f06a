"""The real language model that tests and samples use where it is installed."""

from __future__ import annotations

from vllm_demo.smollm import FILE, PACKAGE, gguf_file

__all__ = ["FILE", "REASON", "smollm"]

REASON = f"the package {PACKAGE}, which has the model {FILE}, is not installed"
smollm = gguf_file
