"""LoRA adapters by their files: vLLM's block hashes cover names and paths alone."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any, TypeAlias

import kvdepot
from kvdepot.engine import weights
from kvdepot.vllm import compat


class AdapterFingerprints:
    """Fingerprints of the LoRA adapters that the engine computes with.

    The engine loads an adapter's files when it first sees its id, or for
    `load_inplace`, and goes on with what it loaded when they change. It may
    also drop it and load it again, unseen from here: once the files have
    changed, the files that a block was computed with are unknown. vLLM's own
    block hashes cover the adapter's path alone: until its cache is reset, it
    offers blocks of the previous files for storing.
    """

    def __init__(self, mode: str = weights.SAMPLED) -> None:
        self._mode = mode
        self._known: dict[int, tuple[_State | None, str]] = {}
        # By path, since the last reset; None for files that have changed since.
        self._served: dict[str, _State | None] = {}

    def of(self, adapter: Any) -> str:
        """Fingerprint for one request with `adapter`, one of vLLM's LoRARequests.

        A random one, so that its blocks are never found again, for files that
        are not on this host or have changed since they were loaded.
        """
        state = None if compat.is_elsewhere(adapter) else _state(adapter.lora_path)
        known = self._known.get(adapter.lora_int_id)
        if known is None or (adapter.load_inplace and known[0] != state):
            fingerprint = ""
            if state is not None:
                with contextlib.suppress(OSError, kvdepot.Error):
                    fingerprint = weights.of_directory(Path(state[0]), self._mode)
            known = self._known[adapter.lora_int_id] = (state, fingerprint)
        elif known[0] != state:
            known = self._known[adapter.lora_int_id] = (None, "")
        fingerprint = known[1]
        if self._served.setdefault(adapter.lora_path, known[0]) != known[0]:
            # vLLM's own cache may have blocks of the files before, under the same hashes.
            self._served[adapter.lora_path] = None
        if self._served[adapter.lora_path] is None:
            fingerprint = ""
        return fingerprint or secrets.token_hex(32)

    def reset(self) -> None:
        """vLLM's own cache is empty."""
        self._served.clear()


_State: TypeAlias = tuple[str, tuple[tuple[str, int, int], ...]]
"""A directory, and name, size and time of its files."""


def _state(path: str) -> _State | None:
    try:
        directory = _adapter_directory(path)
        files = sorted(entry for entry in directory.iterdir() if entry.is_file())
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return None
    return str(directory), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _adapter_directory(path: str) -> Path:
    """Where vLLM takes an adapter's files from: a path, or a model id of the Hugging Face hub."""
    directory = Path(os.path.expanduser(path) if path.startswith("~") else path).absolute()
    if path.startswith(("/", "~")) or directory.exists():
        return directory
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("1", "true"):
        from huggingface_hub import try_to_load_from_cache

        # No id at all is a ValueError; vLLM says so to the request.
        with contextlib.suppress(ValueError):
            found = try_to_load_from_cache(path, "adapter_config.json")
            if isinstance(found, str):
                return Path(found).parent
    return directory
