"""Checks that an engine never loads KV data that another configuration computed.

For each change of the configuration, the first engine stores the KV data of a prompt, and a second
engine with the changed configuration gets the same prompt. A row contains the number of tokens that
the second engine loaded, and whether the answer equals the answer of the same engine without a
connector. Loaded tokens with another answer are `stale`.

Each change has a control: if the change is removed from kvdepot's names, the loaded tokens must be
stale. Otherwise the row has no result. Where stale KV data could not fit, an engine like the first
one must load the tokens instead. After a harmless change, the second engine must load the tokens.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import program

from identity.cases import CHANGES, FEATURES, HARMLESS, Case
from identity.engines import Engine, Engines

Connect = Callable[[Case], tuple[dict[str, Any], Callable[[], None]]]
"""For a case: `--kv-transfer-config` of another connector, and what waits for its stores."""


@dataclass(frozen=True)
class Row:
    """What came of a case."""

    change: str
    connector: str
    stale: int
    """Tokens that were served, of prompts whose answers differ then."""
    needless_miss: int
    """Prompts that were not served anything, where nothing had changed."""
    served: int
    """Tokens that were served in all."""
    control: int | None
    """`stale` without the change in kvdepot's names; None where there is no control."""
    stored: int | None
    """Where no control is possible: the tokens that an engine like the first one is served."""

    @property
    def says_nothing(self) -> bool:
        """Whether the row proves nothing: the control was not stale, or nothing was stored."""
        return 0 in (self.control, self.stored)


def kvdepot(arena: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """kvdepot's `--kv-transfer-config`, over an arena of a test's own; `settings` may have the role
    too."""
    own = {name: value for name, value in settings.items() if name != "kv_role"}
    return {
        "kv_connector": "KvdepotConnector",
        "kv_connector_module_path": "kvdepot.vllm",
        "kv_role": settings.get("kv_role", "kv_both"),
        "kv_connector_extra_config": {
            "pipeline": "Dax",
            "dax": {"path": str(arena), "capacity": "1GiB"},
            # What is served is counted, and the control is to be served what is stale.
            "probe_every": 0,
            **own,
        },
    }


def run(
    engines: Engines,
    case: Case,
    given: dict[str, Any] | None = None,
    *,
    with_control: bool = True,
    settle: Callable[[], None] = lambda: None,
) -> Row:
    """One case; `given` is another connector's configuration, with {directory} in it, and `settle`
    waits for what it stores."""
    found = served(engines, case, given=given, settle=settle, only_stale=True)
    control = stored = None
    if with_control and case.holes and given is None:
        control = _stale(served(engines, case, case.holes, only_stale=True))
    if with_control and case.unservable and given is None:
        again = replace(case, make=lambda at: (case.make(at)[0],) * 2)
        stored = sum(tokens for tokens, _ in served(engines, again, only_stale=True))
    return Row(
        change=case.name,
        connector=given["kv_connector"] if given else "KvdepotConnector",
        stale=_stale(found),
        needless_miss=sum(tokens == 0 for tokens, _ in found) if case.harmless else 0,
        served=sum(tokens for tokens, _ in found),
        control=control,
        stored=stored,
    )


def _stale(found: Sequence[tuple[int, bool]]) -> int:
    return sum(tokens for tokens, differs in found if differs)


def served(
    engines: Engines,
    case: Case,
    holes: Sequence[Any] = (),
    given: dict[str, Any] | None = None,
    settle: Callable[[], None] = lambda: None,
    *,
    only_stale: bool = False,
) -> list[tuple[int, bool]]:
    """For each prompt the tokens that the second engine was served, and whether it answers
    otherwise than one without a connector. With `only_stale` the answers are compared only
    if tokens were served."""
    with tempfile.TemporaryDirectory(prefix="identity") as at:
        here = Path(at)
        first, second = case.make(here)

        def connected(engine: Engine, settings: dict[str, Any]) -> Engine:
            connector = kvdepot(here / "arena", settings)
            if given is not None:
                connector = json.loads(json.dumps(given).replace("{directory}", at))
            return replace(engine, connector=connector, holes=list(holes))

        engines.ask(connected(first, case.settings), case.prompts(here))
        settle()
        case.meanwhile(here)
        asked = (case.asked or case.prompts)(here)
        expected = [] if only_stale else engines.ask(_plain(second), asked)
        settings = case.settings if case.asked_settings is None else case.asked_settings
        answers = engines.ask(connected(second, settings), asked)
        if only_stale:
            is_served = any(answer.cached for answer in answers)
            expected = engines.ask(_plain(second), asked) if is_served else answers
    pairs = zip(answers, expected, strict=True)
    # Others need not tell these apart: what they serve may be right.
    is_stale = case.no_token and given is None
    return [(answer.cached, is_stale or answer.differs(plain)) for answer, plain in pairs]


def _plain(engine: Engine) -> Engine:
    return replace(engine, connector=None, holes=())


@contextlib.contextmanager
def lmcache() -> Iterator[Connect]:
    """LMCache's server, which begins again where a case has chunks of another size."""
    sys.path.append(str(Path(__file__).parents[1] / "lmcache"))
    running = 0

    def connect(case: Case) -> tuple[dict[str, Any], Callable[[], None]]:
        nonlocal running
        if case.chunk_tokens != running:
            server.stop()
            server.start(None, "--chunk-size", str(case.chunk_tokens))
            running = case.chunk_tokens
        return json.loads(server.transfer()), server.settle

    with tempfile.TemporaryDirectory(prefix="lmcache") as at:
        server = importlib.import_module("server").LMCacheServer(Path(at), 1.0)
        try:
            yield connect
        finally:
            server.stop()


def main() -> int:
    """The table; 1 where kvdepot served stale KV or missed after a harmless change."""
    options = program.parser("identity", __doc__)
    options.add_argument(
        "--case",
        action="append",
        help="part of the names of the cases to run; repeatable (default: all)",
    )
    options.add_argument(
        "--connector",
        type=json.loads,
        help="--kv-transfer-config of another connector, as JSON, to run instead of kvdepot's; "
        "{directory} is replaced by a directory of the case",
    )
    options.add_argument(
        "--lmcache", action="store_true", help="also run LMCache's connector and server"
    )
    given = options.parse_args()
    failed = False
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(Engines())
        others: list[Connect] = []
        if given.connector:
            others.append(lambda _: (given.connector, lambda: None))
        if given.lmcache:
            others.append(stack.enter_context(lmcache()))
        for case in (*CHANGES, *FEATURES, *HARMLESS):
            if given.case and not any(part in case.name for part in given.case):
                continue
            if missing := case.needs():
                program.say(f"{case.name}: not run, needs {missing}")
                continue
            program.say(case.name)
            if not given.connector:
                row = run(engines, case)
                failed |= bool(row.needless_miss or row.says_nothing)
                failed |= bool(row.stale) and "sampled" not in case.name
                _print(row, case, as_json=given.json)
            for connect in others:
                _run_other(engines, case, connect, as_json=given.json)
    return int(failed)


def _run_other(engines: Engines, case: Case, connect: Connect, *, as_json: bool) -> None:
    """A case with another connector, which may refuse what kvdepot serves."""
    if case.asked_settings is not None:
        program.say(f"{case.name}: not run, is a setting of kvdepot")
        return
    connector, settle = connect(case)
    try:
        row = run(engines, case, connector, settle=settle)
    except RuntimeError as error:
        program.say(f"{case.name}: {connector['kv_connector']} fails: {str(error)[:300]}")
    else:
        _print(row, case, as_json=as_json)


def _print(row: Row, case: Case, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"bench": "identity", **asdict(row)}), flush=True)
        return
    control = "-" if row.control is None else str(row.control)
    if row.stored is not None:
        control = f"none, {row.stored} stored: {case.unservable}"
    print(
        f"{row.change:48} {row.connector:18} {row.stale:6} stale  {row.served:5} served  "
        f"{row.needless_miss:2} missed  control {control}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
