"""The servers of a test run: each is started while tests still ask the one before.

Almost all of a server's start is imports, one process of it after the other. On two cores two
servers start in the time of one, and the next ones start while tests run.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
from engine_harness import ROOT, Engine
from engine_preload import ForkedServer
from vllm_demo.server import Server, ServerError

# Several servers start at once on a machine that may be busy with others.
START_SECONDS = 900.0
AT_ONCE = 2

# Servers that share an arena wait for it instead of giving up, as the next one of a restart would.
WAIT_FOR_ARENA = {"lock_wait": "20m"}


NEIGHBOUR = {
    "kv_connector": "Neighbour",
    "kv_connector_module_path": "engine_neighbour",
    "kv_role": "kv_both",
}


@dataclass(frozen=True, eq=False)
class Plan:
    """One server, or several of the same kind that follow each other."""

    arena: str
    """Name of its arena."""
    settings: Callable[[Path], dict[str, Any]]
    """kvdepot's, for the path of the arena."""
    arguments: tuple[str, ...] = ()
    model: tuple[str, ...] = ("qwen3",)
    """Name of the model, and how it is made."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to that of all; `{arena}` stands for the path of the arena."""
    lives: int = 1
    """How many servers follow each other. They are alike: which one is first does not matter."""
    after: Plan | None = None
    """The plan whose server has the arena before."""
    beside: tuple[dict[str, Any], ...] = ()
    """Other connectors, which come before kvdepot's under vLLM's MultiConnector."""
    forked: bool = True
    """Forked off a process that has imported vLLM; else started as users start it."""


DEFAULT = Plan(
    "default",
    lambda arena: {
        "cache": {"capacity": "64MiB"},
        "dax": {"path": str(arena), "capacity": "512MiB"},
        # Tests look at what is in the arena, and empty it in between.
        "on_reset": "clear",
    },
    ("--no-enable-prefix-caching",),
    forked=False,
)
"""The default pipeline and the default engine of the tests."""


class Fleet:
    """Starts servers by their plans, in the order in which tests ask for them."""

    def __init__(self, plans: Sequence[Plan], directory: Path) -> None:
        """`plans` are those that tests will ask for; all else is in `directory`."""
        self._plans = list(dict.fromkeys(plans))
        self._directory = directory
        self._started: dict[Plan, list[Server]] = {}
        """Those that no test has yet."""
        self._taken: dict[Plan, Server] = {}
        self._count = 0
        make_models([plan.model for plan in self._plans])

    def arena(self, plan: Plan) -> Path:
        """Where the plan's arena is."""
        return self._directory / f"{plan.arena}.kvd"

    def log(self, plan: Plan) -> str:
        """What the servers wrote that no test got."""
        return "".join(
            server.log.read_text(errors="replace") for server in self._started.get(plan, ())
        )

    def start(self, *plans: Plan) -> None:
        """Start servers at once that no module names in `SERVERS`: what they need is there now."""
        for plan in plans:
            if plan not in self._started:
                self._start(plan)

    def take(self, plan: Plan) -> Engine:
        """The plan's server: the one that runs, or the next one once that was killed."""
        taken = self._taken.get(plan)
        if taken is None or taken.process.poll() is not None:
            taken = self._next(plan)
        return Engine(taken)

    def _next(self, plan: Plan) -> Server:
        if not self._started.get(plan):
            self._start(plan)
        servers = self._started[plan]
        for server in servers:
            server.resume()
        self._start_ahead()
        first = first_ready(servers)
        servers.remove(first)
        self._taken[plan] = first
        for server in servers:
            # They wait for the arena. What a test does to it once the first one is dead, the next
            # one must not see half of.
            server.pause()
        self._start_ahead()
        return first

    def _start_ahead(self) -> None:
        for plan in self._plans:
            if plan not in self._started:
                if self._starting() >= AT_ONCE or (plan.after and plan.after not in self._taken):
                    break
                self._start(plan)

    def _starting(self) -> int:
        """How many servers are on their way to their first test."""
        ahead = [servers for plan, servers in self._started.items() if plan not in self._taken]
        return sum(len(servers) for servers in ahead if not any(map(answers, servers)))

    def _start(self, plan: Plan) -> None:
        make_models([plan.model])
        self._started[plan] = [self._server(plan) for _ in range(plan.lives)]

    def _server(self, plan: Plan) -> Server:
        self._count += 1
        transfer = {
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            # A probe would compute a part of what is found, which tests count.
            "kv_connector_extra_config": {"probe_every": 0} | plan.settings(self.arena(plan)),
        }
        if plan.beside:
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [*plan.beside, transfer]},
            }
        kind = ForkedServer if plan.forked else Server
        return kind(
            f"server {self._count} ({plan.arena})",
            model_directory(plan.model[0]),
            log=self._directory / f"{self._count}.log",
            arguments=["--max-model-len", "4096", "--kv-transfer-config", json.dumps(transfer)]
            + list(plan.arguments),
            environment={
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                "PYTHONPATH": str(Path(__file__).parent),  # for the connectors beside kvdepot's
                # Threads that wait for each other at every step would wait for those of the
                # servers that start meanwhile.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "XDG_RUNTIME_DIR": str(self._directory),
                "XDG_CACHE_HOME": str(self._directory / "cache"),
                # What vLLM knows about its models; without it a start takes half as long again.
                "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
                # Each would compile what counts log probabilities, for seconds.
                **({"TORCHDYNAMO_DISABLE": "1"} if plan.forked else {}),
                **{
                    name: value.format(arena=self.arena(plan))
                    for name, value in plan.environment.items()
                },
            },
        )


def answers(server: Server) -> bool:
    """Whether it is up."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.get("/health")[0] == 200
    return False


def first_ready(servers: Sequence[Server]) -> Server:
    """The first to be up; none may end meanwhile."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        for server in servers:
            if server.process.poll() is not None:
                break
            if answers(server):
                return server
        else:
            time.sleep(0.2)
            continue
        break
    raise ServerError("\n".join(f"{server.name}:\n{server.tail()}" for server in servers))


def model_directory(name: str) -> Path:
    return ROOT / "build" / "engine-models" / name


_made: set[tuple[str, ...]] = set()


def make_models(models: Sequence[tuple[str, ...]]) -> None:
    """Random models, made once and kept in `build`."""
    for model in dict.fromkeys(models):
        if model in _made:
            continue
        name, *options = model
        subprocess.run(
            [*forks.command(), "-m", "vllm_demo.model", str(model_directory(name)), *options],
            cwd=ROOT / "examples",
            check=True,
            capture_output=True,
        )
        _made.add(model)
