"""What the engine tests share: one server with kvdepot attached, and how it is judged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from vllm_demo import measure
from vllm_demo.measure import Answer
from vllm_demo.server import Server

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 128


class Engine:
    """One server with kvdepot attached, and what tests ask of it."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self, prompt: list[int], output_tokens: int = 8) -> Answer:
        return measure.ask(self.server, prompt, output_tokens=output_tokens)

    def metric(self, name: str, **labels: str) -> float:
        return measure.metric(self.server, name, **labels)

    def settle(self) -> None:
        measure.wait_until_written(self.server)

    def failed_loads(self) -> int:
        return int(self.metric("kvdepot_failed_blocks_total", op="load"))

    def external_hits(self) -> int:
        return int(self.metric("vllm:external_prefix_cache_hits_total"))

    def reset(self, *, external: bool) -> None:
        """Empty vLLM's own cache, and kvdepot's too with `external`."""
        flag = str(external).lower()
        self.server.post(f"/reset_prefix_cache?reset_external={flag}", {}).read()

    def log(self) -> str:
        return self.server.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL for all its processes at once."""
        self.server.stop(hard=True)


@contextlib.contextmanager
def logged(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """The texts that a logger of vLLM's gets meanwhile: they are not handed on to pytest's."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Kept(level), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Random prompts, the same for a seed."""
    return measure.prompts(count, tokens, seed)


def assert_same(ours: Answer, reference: Answer) -> None:
    """The same greedy tokens, and logprobs as close as vLLM's own cache keeps them."""
    assert ours.tokens == reference.tokens
    assert measure.largest_difference(ours, reference) <= 1e-3


def flip(arena: Path, offset: int) -> None:
    """Damage one byte."""
    with arena.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
