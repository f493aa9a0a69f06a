"""vLLM in this process, stepped by hand: what it is asked, and when the answers came.

The engine's core is in this process too (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that nothing but
vLLM's own steps is between a request and its first token, and the scheduler's connector can be
asked what is still under way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_device.plan import Plan

SETTLE_SECONDS = 180.0
ASK_SECONDS = 180.0
PAUSE_SECONDS = 0.001
PREFAULT_SECONDS = 60.0
# The threads in which kvdepot gives pages to its tiers.
PREFAULTS = "kvdepot-present"
SHORT_TOKEN = 20


class EngineError(Exception):
    """The engine did not do what the measurement needs."""


def thread_names() -> set[str]:
    """Names of the threads of this process."""
    names = set()
    for file in Path("/proc/self/task").glob("*/comm"):
        # A thread may end at any time.
        with contextlib.suppress(OSError):
            names.add(file.read_text().strip())
    return names


@dataclass(frozen=True)
class Answer:
    """One prompt's."""

    ttft_ms: float
    cached_tokens: int


@dataclass(frozen=True)
class Window:
    """What happened while a stream decoded for a while."""

    rate: float
    """Its tokens per second."""
    tokens: int
    answers: list[Answer]
    """Of the prompts beside it."""


class Engine:
    """One `LLM`, with greedy sampling and no tokenizer."""

    def __init__(self, plan: Plan) -> None:
        more: dict[str, Any] = {"kv_transfer_config": plan.transfer} if plan.transfer else {}
        if plan.block_size:
            more["block_size"] = plan.block_size
        self.llm: Any = LLM(
            model=plan.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            seed=0,
            enable_prefix_caching=True,
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=plan.batched_tokens,
            max_num_seqs=16,
            kv_cache_memory_bytes=plan.gpu_bytes,
            **more,
        )
        self._engine: Any = self.llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._asked = 0
        self._stream: str | None = None

    # ---- what is behind it -------------------------------------------------------------------

    @property
    def block_tokens(self) -> int:
        """Tokens of one of vLLM's blocks."""
        return int(self._core.vllm_config.cache_config.block_size)

    @property
    def gpu_tokens(self) -> int:
        """Tokens that the device's KV cache holds."""
        return len(self._pool.blocks) * self.block_tokens

    @property
    def _pool(self) -> Any:
        return self._core.scheduler.kv_cache_manager.block_pool

    @property
    def _depot(self) -> Any:
        connector = self._core.scheduler.connector
        return getattr(getattr(connector, "manager", None), "depot", None)

    def hits(self) -> dict[str, int]:
        """Blocks that each of kvdepot's tiers has served; of other connectors nothing is said."""
        if self._depot is None:
            return {}
        tiers = self._depot.stats()["tiers"]
        return {name: int(tier["hit_blocks"]) for name, tier in tiers.items()}

    def wait_for_pages(self) -> None:
        """Wait until kvdepot's tiers have all their pages, so that nothing competes with decoding.

        vLLM's own offloading has all pages when the engine has started.
        """
        deadline = time.monotonic() + PREFAULT_SECONDS
        while time.monotonic() < deadline:
            if PREFAULTS not in thread_names():
                return
            time.sleep(0.1)
        raise EngineError(f"the tiers' pages were not there after {PREFAULT_SECONDS:.0f} s")

    # ---- TTFT --------------------------------------------------------------------------------

    def ask(self, prompts: list[list[int]]) -> list[Answer]:
        """Ask all of them at once for one token; their answers, in this order."""
        begun = time.perf_counter()
        names = [self._add(prompt) for prompt in prompts]
        answers: dict[str, Answer] = {}
        while len(answers) < len(names):
            for output in self._engine.step():
                if output.finished:
                    answers[output.request_id] = self._answer(output, begun)
            if time.perf_counter() - begun > ASK_SECONDS:
                raise EngineError(f"{len(answers)} of {len(names)} prompts were answered in time")
        return [answers[name] for name in names]

    def settle(self) -> None:
        """Step until nothing is under way: stores have ended, and the last tier has them."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            if self._core.scheduler.has_requests() or self._core.batch_queue:
                self._engine.step()
                time.sleep(PAUSE_SECONDS)
            elif self._depot is not None and self._depot.pending_bytes():
                time.sleep(PAUSE_SECONDS)
            else:
                return
        raise EngineError(f"stores were still under way after {SETTLE_SECONDS:.0f} s")

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; the connector's stays as it is.

        After a reset, kvdepot sums all weights before the next lookup. Requests seldom follow a
        reset, so a short one takes that time.
        """
        self.settle()
        if not self.llm.reset_prefix_cache():
            raise EngineError("vLLM's own prefix cache could not be reset")
        self.ask([[SHORT_TOKEN] * 3])

    # ---- decoding ----------------------------------------------------------------------------

    def start_stream(self, prompt: list[int], tokens: int) -> None:
        """A request that decodes from now on, as long as the engine is stepped."""
        self._stream = self._add(prompt, tokens)

    def stop_stream(self) -> None:
        """End it, and what is under way beside it."""
        if self._stream is not None:
            self._engine.abort_request([self._stream])
            self._stream = None
        self.settle()

    def decode(
        self,
        tokens: int,
        seconds: float,
        feed: Callable[[], list[int]] | None = None,
        least: int = 0,
    ) -> Window:
        """Step until the stream has so many tokens more, and `least` prompts were answered.

        There is always one prompt of `feed` beside it. No longer than `seconds`; where prompts are
        answered, a quarter of them is enough whatever the stream has.
        """
        begun = asked = time.perf_counter()
        beside: str | None = None
        answers: list[Answer] = []
        decoded = 0
        while True:
            if feed is not None and beside is None:
                prompt = feed()
                asked = time.perf_counter()
                beside = self._add(prompt)
            for output in self._engine.step():
                if output.request_id == self._stream:
                    decoded += len(output.outputs[0].token_ids)
                    if output.finished:
                        self._stream = None
                elif output.request_id == beside and output.finished:
                    answers.append(self._answer(output, asked))
                    beside = None
            taken = time.perf_counter() - begun
            late = bool(answers) and taken > seconds / 4
            enough = len(answers) >= least and (decoded >= tokens or late)
            if enough or taken > seconds or self._stream is None:
                break
        if beside is not None:
            self._engine.abort_request([beside])
        return Window(decoded / taken, decoded, answers)

    def forget_idle(self) -> None:
        """Drop from vLLM's own prefix cache what no request holds, while others run."""
        idle = {
            block.block_id
            for block in self._pool.blocks
            if block.ref_cnt == 0 and block.block_hash is not None
        }
        self._pool.evict_blocks(idle)

    # ---- helpers -----------------------------------------------------------------------------

    def _add(self, prompt: list[int], tokens: int = 1) -> str:
        self._asked += 1
        name = f"bench-{self._asked}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    @staticmethod
    def _answer(output: Any, begun: float) -> Answer:
        elapsed = time.perf_counter() - begun
        return Answer(elapsed * 1e3, int(output.num_cached_tokens or 0))

    def close(self) -> None:
        """As a server that is asked to stop: the depot drains and closes."""
        self._engine.engine_core.shutdown()
