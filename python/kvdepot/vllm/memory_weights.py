"""The weights that an engine's workers hold, which may not be those of its files.

Whatever may have changed them (`kvdepot.vllm.worker_calls`, a reset of vLLM's cache) has all their
bytes summed before the next block is looked up or stored. Other weights mean other namespaces;
weights that come back get their namespaces back. vLLM's own cache keeps the KV of the weights
before until it is reset: up to then nothing is looked up or stored.

Between such changes, samples of every tensor are compared, to find changes made in other ways.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from vllm.logger import init_logger

from kvdepot.engine import tensors as engine_tensors
from kvdepot.vllm import worker_calls
from kvdepot.vllm.compat import Executor
from kvdepot.vllm.faults import SafeNamespace

logger = init_logger("vllm.kvdepot.weights")

# Between two comparisons of samples, whichever comes first.
SAMPLE_STEPS = 256
SAMPLE_SECONDS = 10.0

# In a worker: what was sampled when its weights were last summed.
_SAMPLE = "_kvdepot_sample_of_weights"

# Stored blocks, by namespace.
Stored = list[tuple[SafeNamespace, list[bytes]]]


class MemoryWeights:
    """What the workers hold, and whether it is what vLLM's caches were computed with."""

    def __init__(
        self, vllm_config: Any, changed: Callable[[], None], *, own_cache: bool = True
    ) -> None:
        """`changed` is called when `name` or `withheld` have changed. Without an `own_cache` vLLM
        keeps no KV after a request."""
        self.name: str | None = ""
        """Identifies weights that differ from those that were loaded at the start, for which it is
        empty; None while they are not known."""
        self._changed = changed
        self._own_cache = own_cache
        self._executor: Executor | None = None
        self._loaded: str | None = None
        self._summed: str | None = None
        self._suspect: str | None = None
        # Whether that is a call, before which the weights were sampled.
        self._told = False
        # Whether weights that cannot be read may have changed too: not if only a cache was emptied.
        self._doubted = False
        # Whether the sums cover all weights: vLLM packs some into memory that cannot be read.
        self._complete = not vllm_config.parallel_config.enable_eplb
        self._asleep = False
        # Under which name vLLM's caches were filled; the empty set since they were emptied.
        self._held: set[str | None] = set()
        self._unreadable = _unreadable(vllm_config)
        self._exempt_experts = bool(vllm_config.parallel_config.enable_eplb)
        self._steps = 0
        self._sampled = time.monotonic()
        self._sample: Future[list[bool]] | None = None
        # Since the last sample that was the same, and since the one that is being taken.
        self._stored: Stored = []
        self._stored_since: Stored = []
        worker_calls.listen(vllm_config, self)

    @property
    def withheld(self) -> bool:
        """Whether nothing may be looked up or stored: the weights are not known, or vLLM's caches
        hold KV of other ones."""
        return self.name is None or not self._held <= {self.name}

    @property
    def watched(self) -> bool:
        """Whether the calls of workers' methods are seen: by the first request some were made."""
        return self._executor is not None

    # ---- what the connector reports --------------------------------------------------------------

    def refresh(self) -> None:
        """Sum the weights if they may have changed; to be called before any look-up or store."""
        executor = self._executor
        if self._suspect is None or executor is None or self._is_asleep(executor):
            return
        suspect, told, doubted = self._suspect, self._told, self._doubted
        before = self.name, self.withheld
        found = self._sum(executor)
        # Not before: without an answer of all ranks the weights stay suspect.
        self._suspect, self._told, self._doubted = None, False, False
        same = found is not None and found == self._summed
        if same and not (doubted and not self._complete):
            return
        if not same and not told:
            self._withdraw()
        self._summed = found
        if found is None:
            self.name = None
        elif self._complete:
            self.name = "" if found == self._loaded else found
        else:
            # What cannot be seen may have changed: no other weights have this name.
            self.name = secrets.token_hex(32)
        if not self._own_cache:
            self._held.clear()
        if (self.name, self.withheld) != before:
            self._say(suspect, before[0])
            self._changed()

    def suspect(self, why: str, *, doubted: bool = True) -> None:
        """The weights may have changed; `doubted` are those too that cannot be read."""
        self._suspect = why
        self._doubted |= doubted
        # A sample that was begun before says nothing.
        self._sample = None

    def emptied(self) -> None:
        """vLLM's caches hold nothing any more."""
        self.suspect("a reset of the prefix cache", doubted=False)
        was_withheld = self.withheld
        self._held.clear()
        if was_withheld != self.withheld:
            self._changed()

    def fill(self) -> None:
        """vLLM's caches get KV under the present name, computed or loaded."""
        if self._own_cache:
            self._held.add(self.name)

    def step(self, tokens: int) -> None:
        """vLLM computes so many tokens in this step."""
        if not tokens:
            return
        self.fill()
        self._steps += 1
        if self._sample is not None and self._sample.done():
            self._compare(self._sample)
        now = time.monotonic()
        if self._steps >= SAMPLE_STEPS or now >= self._sampled + SAMPLE_SECONDS:
            self._steps, self._sampled = 0, now
            self._begin_sample()

    def stored(self, namespace: SafeNamespace, keys: Sequence[bytes]) -> None:
        """These blocks were stored by this engine."""
        self._stored_since.append((namespace, list(keys)))

    # ---- what calls of workers' methods report ---------------------------------------------------

    def before_call(self, executor: Executor, method: Any, arguments: Sequence[Any]) -> None:
        """The first sum is of the weights that were loaded: it is made before any other call.
        Before calls that may change weights, those that have changed unseen are noticed."""
        if self._executor is None:
            self._executor = executor
            self._loaded = self._sum(executor) if self._unreadable is None else "not summed"
            self._summed = self._loaded
            if self._loaded is None:
                self.name = None
                self._changed()
        elif (
            worker_calls.counts(method)
            and not self._told
            and not self._is_asleep(executor)
            and not self._same(self._ask_sample(executor))
        ):
            self._alarm()

    def after_call(self, method: str) -> None:
        """A method that may change weights."""
        if method in ("sleep", "wake_up"):
            self._asleep = method == "sleep"
        self._told = True
        self.suspect(f"a call of {method!r}")

    # ---- sums and samples ------------------------------------------------------------------------

    def _sum(self, executor: Executor) -> str | None:
        """The sum over all ranks; None if there is none. TimeoutError if a rank does not
        respond."""
        if self._unreadable is not None:
            return None
        sum_rank = _sum_without_experts if self._exempt_experts else _sum
        start = time.perf_counter()
        try:
            sums = worker_calls.call(executor, sum_rank)
        except TimeoutError:
            raise
        except Exception:
            logger.exception(
                "kvdepot: cannot hash the weights in memory; kvdepot stores and loads nothing"
            )
            return None
        logger.debug("kvdepot: weights summed in %.3f s", time.perf_counter() - start)
        if None in sums:
            return None
        self._complete &= all(complete for _, complete in sums)
        return hashlib.sha256(repr([found for found, _ in sums]).encode()).hexdigest()

    def _begin_sample(self) -> None:
        if self._sample is None and self._suspect is None and self._executor is not None:
            self._stored += self._stored_since
            self._stored_since = []
            self._sample = self._ask_sample(self._executor)
            if self._sample is None:
                # Without samples nothing is withdrawn, and nothing has to be remembered.
                self._stored = []

    def _ask_sample(self, executor: Executor) -> Future[list[bool]] | None:
        sample: Future[list[bool]] | None = None
        try:
            sample = worker_calls.call(executor, _is_as_sampled, non_block=True)
        except Exception:
            logger.exception("kvdepot: cannot check the weights in memory for changes")
        return sample

    def _same(self, sample: Future[list[bool]] | None) -> bool:
        """Whether the weights are as they were; also if they could not be sampled."""
        try:
            return sample is None or all(sample.result())
        except TimeoutError:
            raise
        except Exception:
            logger.exception("kvdepot: cannot check the weights in memory for changes")
            return True

    def _compare(self, sample: Future[list[bool]]) -> None:
        self._sample = None
        if self._same(sample):
            self._stored = []
            return
        self._alarm()
        self.refresh()

    def _alarm(self) -> None:
        """The weights have changed without a call that may change them."""
        self._withdraw()
        # Whatever they are now, vLLM's caches may have KV of both.
        self._held |= {self.name, None}
        self.suspect("a change that was not watched")
        self._changed()

    def _withdraw(self) -> None:
        """Remove what was stored since the weights were known to be the same."""
        withdrawn = 0
        for namespace, keys in self._stored + self._stored_since:
            namespace.remove(keys)
            withdrawn += len(keys)
        self._stored, self._stored_since = [], []
        logger.error(
            "kvdepot: the weights in memory changed within the last %.0f s, without a vLLM call "
            "that kvdepot observes; kvdepot removed the %d blocks stored since, but requests may "
            "have been served KV of other weights; reset vLLM's prefix cache, and change weights "
            "through vLLM's calls, such as collective_rpc",
            2 * SAMPLE_SECONDS, withdrawn,
        )  # fmt: skip

    def _is_asleep(self, executor: Executor) -> bool:
        """Whether the weights' memory is unmapped."""
        return self._asleep or "weights" in executor.sleeping_tags

    def _say(self, why: str, before: str | None) -> None:
        if self.name is None:
            logger.error(
                "kvdepot: after %s, the weights in memory cannot be identified%s; nothing is "
                "stored or loaded until kvdepot has identified the weights",
                why, f" ({self._unreadable})" if self._unreadable else "",
            )  # fmt: skip
        elif self.name != before:
            logger.warning(
                "kvdepot: after %s, the weights in memory are %s%s", why,
                "those that were loaded at the start" if not self.name else
                f"others than those that were loaded at the start (sum {self.name[:16]})",
                "; nothing is stored or loaded until vLLM's prefix cache is reset"
                if self.withheld else "",
            )  # fmt: skip


def notice_resets(kv_cache_manager: Any, emptied: Callable[[], None]) -> None:
    """Call `emptied` whenever vLLM's own cache has been emptied: a reset reaches connectors only if
    it says so."""
    reset = kv_cache_manager.reset_prefix_cache

    @functools.wraps(reset)
    def noticed() -> Any:
        done = reset()
        if done:
            emptied()
        return done

    kv_cache_manager.reset_prefix_cache = noticed


def _unreadable(vllm_config: Any) -> str | None:
    """Why the weights' bytes cannot be summed where they are; None if they can."""
    offload = getattr(vllm_config, "offload_config", None)
    prefetch = getattr(offload, "prefetch", None)
    if prefetch is not None and prefetch.offload_group_size > 0:
        return "with --offload-group-size, weights share memory and cannot be hashed"
    return None


# ---- in a worker -------------------------------------------------------------------------------


def _models(worker: Any) -> Iterator[tuple[str, Any]]:
    """The models of a worker: its own, and a draft model."""
    yield "model", worker.get_model()
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    if draft is not None:
        yield "draft", draft


def _tensors(worker: Any, *, experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for label, model in _models(worker):
        for name, tensor in engine_tensors.named_tensors(model):
            if experts or ".experts." not in name:
                yield f"{label}.{name}", tensor


def _sum(worker: Any, *, experts: bool = True) -> tuple[str, bool] | None:
    """The sum of this rank's weights, which are sampled too, and whether it covers all of them."""
    real = getattr(worker, "worker", worker)
    tensors = list(_tensors(real, experts=experts))
    found = engine_tensors.sum_of(tensors)
    sample = None if found is None else engine_tensors.sample_of(tensor for _, tensor in tensors)
    setattr(real, _SAMPLE, (sample, experts))
    # On a CPU vLLM packs linear layers' weights into a library's memory, and leaves empty ones.
    complete = experts and all(tensor.numel() for _, tensor in tensors)
    return None if found is None else (found, complete)


def _sum_without_experts(worker: Any) -> tuple[str, bool] | None:
    """Load balancing moves experts between and within ranks without changing them."""
    return _sum(worker, experts=False)


def _is_as_sampled(worker: Any) -> bool:
    """Whether samples of this rank's weights are as at its last sum."""
    real = getattr(worker, "worker", worker)
    sample, experts = getattr(real, _SAMPLE, (None, True))
    if sample is None:
        return True
    tensors = _tensors(real, experts=experts)
    return bool(engine_tensors.sample_of(tensor for _, tensor in tensors) == sample)
