"""vLLM 0.32, which `internals` describes."""

from __future__ import annotations

from kvdepot.vllm.compat import internals


class Adapter(internals.Adapter):
    """0.32."""
