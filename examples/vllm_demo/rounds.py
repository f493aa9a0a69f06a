"""The choreography: which server answers which prompt when.

Two servers at most are up at a time, and the one that is not asked is stopped
(SIGSTOP): an idle vLLM worker polls with a tenth of a core, which on a small
machine would disturb the other's measurement. Measurements that are compared
alternate, because machines drift.

No two prompts begin alike, so a server with vLLM's own prefix cache computes each
in full the first time, and serves it from that cache afterwards: one server
measures both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import measure
from .measure import Answer
from .model import KV_BYTES_PER_TOKEN
from .server import Server

BLOCK_TOKENS = 128
# Room for vLLM's own cache besides the prompts themselves: warm-up prompts,
# generated tokens and the block that vLLM never hands out.
SPARE_GIB = 1
# Prompt tokens up to which the announced times hold.
USUAL_TOKENS = 16_000


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    work: Path
    """Directory of model, arena and logs."""
    python: str
    """Interpreter with vLLM and kvdepot."""
    sizes: dict[int, int]
    """Prompt length in tokens -> number of prompts."""
    arguments: list[str] = field(default_factory=list)
    """More arguments for every server."""
    settings: dict | None = None
    """kv_connector_extra_config; None: tiers under `work` sized for the prompts."""
    pipeline: str = "Cache|Dax"
    """Those tiers, near to far."""

    def prompts(self) -> dict[int, list[list[int]]]:
        """The prompts of each length."""
        return {n: measure.prompts(count, n, seed=n) for n, count in self.sizes.items()}

    def kv_bytes(self) -> int:
        """KV of all prompts together."""
        return sum(n * count for n, count in self.sizes.items()) * KV_BYTES_PER_TOKEN


@dataclass
class Round:
    """The answers to the prompts of one length, in the order of the prompts."""

    baseline: list[Answer] = field(default_factory=list)
    miss: list[Answer] = field(default_factory=list)
    own: list[Answer] = field(default_factory=list)
    hit: list[Answer] = field(default_factory=list)
    restart: list[Answer] = field(default_factory=list)
    miss_path_ms: list[float] = field(default_factory=list)
    miss_cpu_ms: list[float] = field(default_factory=list)
    own_at_restart: list[Answer] = field(default_factory=list)
    external_hits: dict[str, int] = field(default_factory=dict)
    """vLLM's counter of tokens served by the connector, by round."""


class Demo:
    """Runs the rounds and keeps the answers."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """`say` prints one line of progress."""
        self.plan = plan
        self.say = say
        self.rounds = {n: Round() for n in plan.sizes}
        self._prompts = plan.prompts()
        self._depot = plan.work / "random-depot"

    def run(self) -> dict[int, Round]:
        """All rounds, in order."""
        shutil.rmtree(self._depot, ignore_errors=True)
        self._depot.mkdir(parents=True)
        self.say("starting two servers: vLLM with its own prefix cache, and vLLM with kvdepot")
        self.say("  (a minute and a half on two cores)")
        own = self._launch("vLLM, own prefix cache", ["--enable-prefix-caching"], cache=True)
        depot = self._launch_depot("vLLM with kvdepot")
        self._ready(own)
        self._ready(depot)
        self._announce(
            "computing each prompt twice, without kvdepot and with it", "usually one to two minutes"
        )
        self.misses(own, depot)
        self._announce("every prompt again, from either cache", "usually a few seconds")
        self.hits(own, depot, "hit")
        with depot.running():
            seconds = measure.wait_until_written(depot)
        self.say(f"everything is written ({seconds:.1f} s)")
        self.say("restarting the server with kvdepot (a minute)")
        depot.stop()
        depot = self._launch_depot("vLLM with kvdepot, restarted")
        self._ready(depot)
        self._announce("every prompt again, after the restart", "usually a few seconds")
        self.hits(own, depot, "restart")
        depot.stop()
        own.stop()
        return self.rounds

    def _announce(self, what: str, time: str) -> None:
        of = ", ".join(f"{count} prompts of {n:,} tokens" for n, count in self.plan.sizes.items())
        # Times are those of the default prompts on two cores.
        usual = sum(n * count for n, count in self.plan.sizes.items()) <= USUAL_TOKENS
        self.say(f"{what}: {of}" + (f" ({time})" if usual else ""))

    def misses(self, own: Server, depot: Server) -> None:
        """Every prompt for the first time: without kvdepot, then with it, in turns."""
        for n, prompt, i, count in self._each():
            kept = self.rounds[n]
            with own.running():
                kept.baseline.append(measure.ask(own, prompt))
            with depot.running():
                before = measure.costs(depot)
                kept.miss.append(measure.ask(depot, prompt))
                measure.wait_until_written(depot)
                path, cpu = (b - a for a, b in zip(before, measure.costs(depot), strict=True))
            kept.miss_path_ms.append(path * 1e3)
            kept.miss_cpu_ms.append(cpu * 1e3)
            self.say(
                f"  first time, {n} tokens, prompt {i}/{count}: "
                f"without {kept.baseline[-1].ttft_ms:.0f} ms, with {kept.miss[-1].ttft_ms:.0f} ms"
            )

    def hits(self, own: Server, depot: Server, name: str) -> None:
        """Every prompt again, from vLLM's own cache and from kvdepot in turns."""
        for n in self._prompts:
            before = _external_hits(depot)
            for m, prompt, i, count in self._each():
                if m != n:
                    continue
                kept = self.rounds[n]
                with own.running():
                    theirs = measure.ask(own, prompt)
                with depot.running():
                    ours = measure.ask(depot, prompt)
                (kept.own if name == "hit" else kept.own_at_restart).append(theirs)
                getattr(kept, name).append(ours)
                self.say(
                    f"  {name}, {n} tokens, prompt {i}/{count}: vLLM's own cache "
                    f"{theirs.ttft_ms:.0f} ms, kvdepot {ours.ttft_ms:.0f} ms, "
                    f"{ours.cached_tokens} tokens cached"
                )
            self.rounds[n].external_hits[name] = _external_hits(depot) - before

    def _each(self):
        for n, prompts in self._prompts.items():
            for i, prompt in enumerate(prompts, 1):
                yield n, prompt, i, len(prompts)

    def _launch(self, name: str, arguments: list[str], *, cache: bool = False) -> Server:
        longest = max(self.plan.sizes)
        held = self.plan.kv_bytes() if cache else longest * KV_BYTES_PER_TOKEN
        return Server(
            name,
            self.plan.work / "random-model",
            log=self.plan.work / f"{name.replace(' ', '-').replace(',', '')}.log",
            arguments=["--max-model-len", str(longest + 64), *arguments, *self.plan.arguments],
            kv_space_gib=-(-held // 2**30) + SPARE_GIB,
            python=self.plan.python,
            say=self.say,
        )

    def _launch_depot(self, name: str) -> Server:
        settings = self.plan.settings
        if settings is None:
            capacity = int(self.plan.kv_bytes() * 1.25) + 2**28
            settings = {"pipeline": self.plan.pipeline}
            for tier in self.plan.pipeline.split("|"):
                section = {"capacity": capacity}
                if tier != "Cache":
                    section["path"] = str(self._depot / tier)
                settings[tier.lower()] = section
        transfer = {
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            # A probe would compute the last block of the first hit.
            "kv_connector_extra_config": {"probe_every": 0} | settings,
        }
        return self._launch(
            name, ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)]
        )

    def _ready(self, server: Server) -> None:
        server.wait_ready()
        self.say("  warming up")
        measure.warm(server, BLOCK_TOKENS)
        server.pause()


def _external_hits(server: Server) -> int:
    with server.running():
        return int(measure.metric(server, "vllm:external_prefix_cache_hits_total"))
