"""The fingerprint of an engine's weights, which may take longer than the engine's start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from kvdepot.engine.weights import FULL
from kvdepot.vllm import namespace as vllm_namespace

logger = init_logger("vllm.kvdepot.weights")


class Weights:
    """Known at once, but with `full`: all bytes are read beside the start, by a thread."""

    def __init__(self, vllm_config: Any, setting: str) -> None:
        """Raises `kvdepot.ConfigError` for weights that cannot be identified."""
        self.fingerprint: str | None = None
        self.then: Callable[[], None] | None = None
        """Called by `poll` once the fingerprint is known."""
        if setting == FULL:
            # What cannot be identified is refused now. That is cheap.
            vllm_namespace.weights(vllm_config, "sampled")
            logger.info("kvdepot: hashing all weights; nothing is stored or looked up until then")
            threading.Thread(
                target=self._read, args=(vllm_config,), name="kvdepot-weights", daemon=True
            ).start()
        else:
            self.fingerprint = vllm_namespace.weights(vllm_config, setting)

    @property
    def known(self) -> bool:
        """Whether the fingerprint is there."""
        return self.fingerprint is not None

    def poll(self) -> None:
        """Call `then`, once, if the fingerprint is known."""
        if self.then is not None and self.known:
            then, self.then = self.then, None
            then()

    def _read(self, vllm_config: Any) -> None:
        try:
            self.fingerprint = vllm_namespace.weights(vllm_config, FULL)
        except Exception:
            logger.exception("kvdepot: cannot read the weights; nothing is stored or loaded")
        else:
            logger.info("kvdepot: all weights hashed")
