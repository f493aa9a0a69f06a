"""The choreography: which server answers which prompts when.

Two servers are up, and the one that is not asked is stopped: one with vLLM's own prefix cache,
whose first answers to prompts are full compute, and one with kvdepot, which is restarted between
storing and hitting. What is compared alternates, because machines drift.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_demo import measure
from vllm_demo.model import KV_BYTES_PER_TOKEN
from vllm_demo.server import Server, ServerError

from . import raw
from .client import SEED, Client, Request, continued, prompts
from .table import DEPOT, FULL, OWN, Case, Cell, Results

BLOCK_TOKENS = 128
HIT = 80
# Prompts that are answered at a time, by turns, where each is asked once only.
TURN = 4
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    work: Path
    """Model, logs, prompts."""
    folder: Path
    """Where the depot is: on the disk that is measured."""
    pipeline: str
    sizes: dict[int, int]
    """Tokens of a prompt -> prompts."""
    concurrency: tuple[int, ...]
    rounds: int
    """How often every prompt is asked again, where all of it hits."""

    def computed(self, tokens: int, concurrency: int) -> int:
        """Prompts of the full compute: all of the guide's one at a time, else as many as go."""
        count = self.sizes[tokens]
        return count if concurrency == 1 else max(min(count, TURN), concurrency)

    def restored(self, tokens: int) -> int:
        """Bytes of the blocks that are a hit: the last token is computed in any case."""
        return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN

    def held(self) -> int:
        """Bytes of all that vLLM's own cache is asked to compute: nothing leaves it."""
        tokens = sum(n * count for n, count in self.sizes.items())
        fresh = tokens * len(self.concurrency) * (100 - HIT) // 100
        once = sum(n * self.computed(n, c) for n in self.sizes for c in self.concurrency if c > 1)
        return (tokens + fresh + once) * KV_BYTES_PER_TOKEN

    def in_flight(self) -> int:
        """Bytes of the longest prompts that are under way at a time."""
        return max(self.concurrency) * (max(self.sizes) + 64) * KV_BYTES_PER_TOKEN


class Loads:
    """The bytes that a server has restored, by tier."""

    def __init__(self) -> None:
        self._moved: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    @staticmethod
    def _now(server: Server) -> dict[str, float]:
        # The depot's figures are published twice a second.
        time.sleep(1.1)
        return {
            tier: measure.metric(server, "kvdepot_moved_bytes_total", op="load", tier=tier)
            for tier in ("Cache", "Dax", "Nvme", "Posix", "Ds3fs")
        }

    def begin(self, server: Server) -> None:
        """What it restores from now on counts."""
        self._begun = self._now(server)

    def end(self, server: Server) -> None:
        """What it has restored since counts."""
        for tier, moved in self._now(server).items():
            self._moved[tier] = self._moved.get(tier, 0.0) + moved - self._begun[tier]

    def share(self, pipeline: str) -> float:
        """Of the last tier."""
        total = sum(self._moved.values())
        return self._moved.get(pipeline.rpartition("|")[2], 0.0) / total if total else 0.0


def _hit_tokens(name: str, server: Server) -> float:
    counter = "prefix_cache_hits_total" if name == OWN else "external_prefix_cache_hits_total"
    return measure.metric(server, f"vllm:{counter}")


def _written(server: Server) -> None:
    """Until all of it is in the last tier."""
    for _ in range(30):
        with contextlib.suppress(ServerError):
            measure.wait_until_written(server, seconds=10)
            return
        # An engine that has nothing to do publishes nothing, where a tier stands still for long.
        measure.ask(server, [7] * 8, output_tokens=1)
    measure.wait_until_written(server)


class Evaluation:
    """Runs it, and keeps the answers."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.say = say
        self.results: Results = {
            Case(tokens, hit, concurrency): {FULL: Cell(), OWN: Cell(), DEPOT: Cell()}
            for tokens in plan.sizes
            for hit in (100, HIT)
            for concurrency in plan.concurrency
        }
        self.raw = 0.0

    def run(self) -> None:
        """All of it, in order."""
        self.say("starting two servers: vLLM with its own prefix cache, and vLLM with kvdepot")
        self._own = self._launch("vLLM, own prefix cache", ["--enable-prefix-caching"], True)
        self._depot = self._launch_depot("vLLM with kvdepot", stores=True)
        self._client = Client(self.plan.work / "model", self.plan.work)
        for server in (self._own, self._depot):
            self._ready(server)
        for tokens in self.plan.sizes:
            self._compute(tokens)
        for tokens in self.plan.sizes:
            self._store(tokens)
        self._restart()
        self.raw = raw.rate(self._last_tier())
        self.say(f"the disk reads what was stored at {self.raw / 1e9:.2f} GB/s, 8 at a time")
        for tokens in self.plan.sizes:
            for concurrency in self.plan.concurrency:
                self._hits(tokens, concurrency)
        for tokens in self.plan.sizes:
            for concurrency in self.plan.concurrency:
                self._partly(tokens, concurrency)
        self._depot.stop()
        self._own.stop()

    def _restart(self) -> None:
        """Nothing is in its memory."""
        self.say("restarting the server with kvdepot: its Cache is empty")
        self._depot.stop()
        self._depot = self._launch_depot("vLLM with kvdepot, restarted")
        self._ready(self._depot)

    def _compute(self, tokens: int) -> None:
        """Full compute. What is asked again comes last, so that it stays in vLLM's cache."""
        count = self.plan.sizes[tokens]
        for concurrency in sorted(self.plan.concurrency, reverse=True):
            asked = self.plan.computed(tokens, concurrency)
            fewer = "" if asked == count else f" (not {count}: it is slow)"
            self.say(f"full compute: {asked} of {tokens} tokens{fewer}, {concurrency} at a time")
            seed = SEED if concurrency == 1 else SEED + concurrency
            with self._own.running():
                found = self._client.ask(self._own, prompts(tokens, asked, seed), concurrency)
            self._note(FULL, tokens, (100, HIT), concurrency, found)
        if 1 not in self.plan.concurrency:
            with self._own.running():
                self._client.ask(self._own, prompts(tokens, count, SEED), 1)

    def _store(self, tokens: int) -> None:
        count = self.plan.sizes[tokens]
        self.say(f"storing {count} of {tokens} tokens with kvdepot")
        with self._depot.running():
            self._client.ask(self._depot, prompts(tokens, count, SEED), 1)
            _written(self._depot)

    def _hits(self, tokens: int, concurrency: int) -> None:
        """The guide's second run: every block is a hit."""
        count, case = self.plan.sizes[tokens], Case(tokens, 100, concurrency)
        loads = Loads()
        for _ in range(self.plan.rounds):
            for name, server in ((OWN, self._own), (DEPOT, self._depot)):
                with server.running():
                    before = self._before(name, server, loads)
                    found = self._client.ask(server, prompts(tokens, count, SEED), concurrency)
                    self._check(name, server, before, count * self.plan.restored(tokens), loads)
                cell = self.results[case][name]
                cell.first = cell.first or len(found)
                cell.requests += found
        self._say(case, loads)

    def _partly(self, tokens: int, concurrency: int) -> None:
        """Prompts that end otherwise than what was stored; each is asked once."""
        shared = tokens * HIT // 100 // BLOCK_TOKENS * BLOCK_TOKENS
        count, case = self.plan.sizes[tokens], Case(tokens, HIT, concurrency)
        asked = continued(prompts(tokens, count, SEED), shared, SEED + concurrency)
        loads, turn = Loads(), max(TURN, concurrency)
        for at in range(0, count, turn):
            some = asked[at : at + turn]
            self._restart()
            both = [(OWN, self._own), (DEPOT, self._depot)]
            for name, server in both if at // turn % 2 == 0 else reversed(both):
                with server.running():
                    before = self._before(name, server, loads)
                    found = self._client.ask(server, some, concurrency)
                    wanted = len(some) * shared * KV_BYTES_PER_TOKEN
                    self._check(name, server, before, wanted, loads)
                    if name == DEPOT:
                        _written(server)
                self.results[case][name].requests += found
        self._say(case, loads)

    def _before(self, name: str, server: Server, loads: Loads) -> float:
        if name == DEPOT:
            loads.begin(server)
        return _hit_tokens(name, server)

    def _check(self, name: str, server: Server, before: float, wanted: int, loads: Loads) -> None:
        """Refuse figures of hits that were none."""
        if name == DEPOT:
            loads.end(server)
        hit = (_hit_tokens(name, server) - before) * KV_BYTES_PER_TOKEN
        if hit < 0.99 * wanted:
            share = hit / wanted
            raise ServerError(f"{server.name}: {share:.0%} of what should be a hit was one")

    def _note(
        self, name: str, tokens: int, hits: tuple[int, ...], concurrency: int, found: list[Request]
    ) -> None:
        for hit in hits:
            self.results[Case(tokens, hit, concurrency)][name].requests += found

    def _say(self, case: Case, loads: Loads) -> None:
        cells = self.results[case]
        cells[DEPOT].from_disk = loads.share(self.plan.pipeline)
        means = {name: cell.of("ttft", "median") for name, cell in cells.items()}
        self.say(
            f"{case.tokens} tokens, {case.hit} % hit, {case.concurrency} at a time: TTFT "
            f"{means[FULL]:.0f} ms, own {means[OWN]:.0f} ms, kvdepot {means[DEPOT]:.0f} ms "
            f"({cells[DEPOT].from_disk:.0%} from disk)"
        )

    def _last_tier(self) -> Path:
        return self.plan.folder / self.plan.pipeline.rpartition("|")[2]

    def _launch(self, name: str, arguments: list[str], keeps: bool) -> Server:
        held = self.plan.in_flight() + (self.plan.held() if keeps else 0)
        return Server(
            name,
            self.plan.work / "model",
            log=self.plan.work / f"{name.replace(' ', '-').replace(',', '')}.log",
            arguments=["--max-model-len", str(max(self.plan.sizes) + 64), *arguments],
            kv_space_gib=-(-held // GIB) + 1,
            say=self.say,
        )

    def _launch_depot(self, name: str, stores: bool = False) -> Server:
        settings: dict[str, object] = {"pipeline": self.plan.pipeline}
        for tier in self.plan.pipeline.split("|"):
            if tier == "Cache":
                # Room for what is stored at a time; then for little of what was asked before.
                share = self.plan.in_flight() * (200 if stores else 100 - HIT) // 100
                settings["cache"] = {"capacity": share // 4096 * 4096 + (32 << 20)}
                if stores:
                    # What a queue drops would be missing after the restart.
                    settings["overload"] = "wait"
            else:
                capacity = int(self.plan.held() * 1.25) + GIB
                settings[tier.lower()] = {
                    "path": str(self.plan.folder / tier),
                    "capacity": capacity // 4096 * 4096,
                }
        transfer = {
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        arguments = ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)]
        return self._launch(name, arguments, False)

    def _ready(self, server: Server) -> None:
        server.wait_ready()
        # The first requests after a start cost seconds that no later one pays.
        for prompt in measure.prompts(2, 3 * BLOCK_TOKENS + 40, seed=1):
            measure.ask(server, prompt)
            measure.ask(server, prompt)
        server.pause()
