"""kvdepot behind vLLM's CPU tier: vLLM's own tiering manager, real bytes, no device."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

from engine_harness import flip, logged
from engine_manager import key
from engine_tiers import CHUNK, TIER, Tiers, content, names
from kvdepot.vllm.beside import Beside
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

pytestmark = pytest.mark.integration

# The scheduler's thread waits for nobody: a tier that answers late does so in ten seconds or never.
PROMPT_SECONDS = 5.0

RETRY, MISS, HIT = LookupResult.RETRY, LookupResult.MISS, LookupResult.HIT

Start = Callable[..., Tiers]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines; those that are left end with the test."""
    started: list[Tiers] = []

    def one(tier: dict[str, Any], chunks: int = 64, **changes: Any) -> Tiers:
        started.append(Tiers(tier, chunks, **changes))
        return started[-1]

    yield one
    for tiers in started:
        if tiers.region.exists():
            tiers.close()


def posix(folder: Path, capacity: str = "64MiB", **settings: Any) -> dict[str, Any]:
    # A busy machine is no file system that hangs.
    place = {"path": str(folder / "kv"), "capacity": capacity, "lookup_timeout": "60s"}
    return {"pipeline": "Posix", "posix": place} | settings


def behind_cache(folder: Path) -> dict[str, Any]:
    return posix(folder) | {"pipeline": "Cache|Posix", "cache": {"capacity": "16MiB"}}


def nvme(folder: Path) -> dict[str, Any]:
    return {"pipeline": "Nvme", "nvme": {"path": str(folder / "arena"), "capacity": "64MiB"}}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "kv" / "blocks").glob("*/*") if path.is_file())


LASTING = pytest.mark.parametrize("tier", [posix, behind_cache, nvme])


# ---- what comes back ------------------------------------------------------------------------


@LASTING
def test_what_left_vllms_tier_comes_back(tmp_path: Path, start: Start, tier: Any) -> None:
    engine = start(tier(tmp_path))
    # Both KV groups in one job, and the second before the first.
    keys = names("a", 20, group=1) + names("b", 10, group=0)
    engine.store(*keys)
    engine.forget()
    assert engine.load(*keys) == [content(each) for each in keys]
    assert engine.load(*keys, key("unknown")) == [content(each) for each in keys]
    assert engine.slowest < PROMPT_SECONDS
    engine.close()
    assert str(engine.region) not in Path("/proc/self/maps").read_text(), "vLLM could unmap it"


@LASTING
def test_a_restart_finds_what_was_stored(tmp_path: Path, start: Start, tier: Any) -> None:
    keys = names("a", 30)
    engine = start(tier(tmp_path))
    engine.store(*keys)
    engine.close()
    later = start(tier(tmp_path))
    assert later.load(*keys) == [content(each) for each in keys]


def test_two_engines_share_a_directory(tmp_path: Path, start: Start) -> None:
    one, other = start(posix(tmp_path)), start(behind_cache(tmp_path))
    mine, yours = names("mine", 8), names("yours", 8)
    one.store(*mine)
    other.store(*yours)
    assert other.tier.depot.pending_bytes() == 0 or other.tier._depot.drain(30)
    assert one.load(*yours) == [content(each) for each in yours]
    assert other.load(*mine) == [content(each) for each in mine]


def test_a_service_has_the_depot_for_several_engines(tmp_path: Path, start: Start) -> None:
    with serve(tmp_path) as socket:
        one, other = start(over(socket)), start(over(socket))
        keys = names("a", 20)
        one.store(*keys)
        assert other.load(*keys) == [content(each) for each in keys]
        one.close()
        other.close()


def test_a_small_tier_of_vllms_is_filled_and_emptied_again_and_again(
    tmp_path: Path, start: Start, seed: int
) -> None:
    engine = start(behind_cache(tmp_path), chunks=8)
    chance = random.Random(seed)
    prompts = [names(f"prompt {n}", chance.randrange(1, 8)) for n in range(20)]
    for asked in chance.choices(prompts, k=200):
        loaded = engine.load(*asked)
        assert loaded == [content(each) for each in asked[: len(loaded)]]
        engine.store(*asked)
    # Of all there is no more than some in vLLM's tier.
    assert sum(len(engine.load(*asked)) for asked in prompts) == sum(map(len, prompts))


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "others"},
        {"salt": "s"},
        {"name": "m2"},
        {"dtype": "fp8"},
        {"tensor_parallel": 2},
    ],
    ids=str,
)
def test_what_another_engine_has_stored_is_not_found(
    tmp_path: Path, start: Start, changes: dict[str, Any]
) -> None:
    keys = names("a", 4)
    start(posix(tmp_path)).store(*keys)
    of_the_tier = {name: changes[name] for name in ("weights", "salt") if name in changes}
    of_the_engine = {name: changes[name] for name in changes if name not in of_the_tier}
    assert start(posix(tmp_path, **of_the_tier), **of_the_engine).load(*keys) == []
    assert len(start(posix(tmp_path)).load(*keys)) == 4


def test_the_files_of_an_adapter_are_part_of_the_name(tmp_path: Path, start: Start) -> None:
    keys = names("a", 4)
    engine = start(posix(tmp_path))
    for fingerprint in ("first", "second"):
        beside = Beside(adapter=fingerprint.encode())
        engine.tier.set_beside(f"request-{engine._count + 1}", beside)
        engine.store(*keys, fill=fingerprint[:1].encode() * CHUNK)
        engine.forget()
    assert engine.load(*keys) == []
    engine.tier.set_beside(f"request-{engine._count + 1}", Beside(adapter=b"first"))
    assert engine.load(*keys) == [b"f" * CHUNK] * 4


# ---- what fails -----------------------------------------------------------------------------


def test_a_rotten_file_is_a_failed_load_and_not_wrong_bytes(tmp_path: Path, start: Start) -> None:
    engine = start(posix(tmp_path))
    keys = names("a", 6)
    engine.store(*keys)
    rotten = files(tmp_path)[:3]
    for path in rotten:
        flip(path, path.stat().st_size - 100)
    engine.forget()
    with logged("vllm.kvdepot.tier") as lines:
        loaded = engine.load(*keys)
    assert len(loaded) < 6
    assert loaded == [content(each) for each in keys[: len(loaded)]]
    assert "of 6 chunks to load, 3 failed (corrupt 3)" in "".join(lines)
    assert counted(engine, "kvdepot_failed_blocks") == 3
    # The others are in vLLM's tier now, and no row is left behind: what failed is stored again.
    assert engine.manager.primary_tier._num_evictable_cache_chunks == 3
    assert engine.manager.primary_tier._num_write_pending_chunks == 0
    assert not any(path.exists() for path in rotten)
    engine.store(*keys)
    engine.forget()
    assert engine.load(*keys) == [content(each) for each in keys]


def test_a_removed_file_is_a_failed_load_for_the_request_that_was_told_of_it(
    tmp_path: Path, start: Start
) -> None:
    engine = start(posix(tmp_path))
    keys = names("a", 3)
    engine.store(*keys)
    engine.forget()
    request = engine.begin(*keys)
    while engine.look(request, keys)[0] is RETRY:
        time.sleep(0.001)
    for path in files(tmp_path):
        path.unlink()
    engine.settle()
    # What was read by then is there, and the rest is missed without another try.
    end = time.monotonic() + 60
    while engine.look(request, keys)[-1] not in (HIT, MISS):
        assert time.monotonic() < end
    engine.manager.on_request_finished(request)


def test_a_request_that_ends_in_the_step_that_finds_its_chunks_costs_nothing(
    tmp_path: Path, start: Start
) -> None:
    """vLLM's P2P tier gives up one of a peer's before the loads of the step are handed out."""
    engine = start(posix(tmp_path))
    keys = names("a", 3)
    engine.store(*keys)
    engine.forget()
    request = engine.begin(*keys)
    end = time.monotonic() + 60
    while engine.manager.lookup(keys[0], request) is RETRY:
        assert time.monotonic() < end
        time.sleep(0.001)
        engine.step()
    engine.manager.on_request_finished(request)
    engine.step()
    engine.settle()
    assert engine.manager.primary_tier._num_write_pending_chunks == 0
    assert engine.load(*keys) == [content(each) for each in keys]


def test_a_full_directory_evicts_and_a_chunk_too_large_for_it_costs_nothing_else(
    tmp_path: Path, start: Start
) -> None:
    engine = start(posix(tmp_path, "2MiB"), chunks=128)
    keys = names("a", 100)
    for some in chunked(keys, 10):
        engine.store(*some)
        assert len(files(tmp_path)) * CHUNK <= 2 << 20
    engine.forget()
    found = [each for each in keys if engine.load(each) == [content(each)]]
    assert 0 < len(found) < 40
    # Every row was given back.
    assert engine.manager.primary_tier._num_evictable_cache_chunks == len(found)


def test_a_file_system_without_room_costs_hits_and_no_row(tmp_path: Path, start: Start) -> None:
    engine = start(posix(tmp_path))
    keys = names("a", 8)
    engine.store(*keys[:4])
    with files_end_at(CHUNK // 2):
        engine.store(*keys[4:])
    assert counted(engine, TieringOffloadingMetrics.CASCADE_JOB_FAILURES) == 1
    assert engine.manager.primary_tier._num_evictable_cache_chunks == 8
    engine.forget()
    assert engine.load(*keys) == [content(each) for each in keys[:4]]


def test_a_tier_that_is_late_holds_up_a_request_and_never_the_engine(
    tmp_path: Path, start: Start
) -> None:
    with serve(tmp_path) as socket:
        engine = start(over(socket, lookup_wait="300ms"))
        keys = names("a", 5)
        engine.store(*keys)
        engine.forget()
        pid = socket.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            stopped(pid)
            engine.slowest = 0.0
            request = engine.begin(*keys)
            started = time.monotonic()
            assert engine.look(request, keys) == [RETRY] * 5
            while engine.look(request, keys)[0] is RETRY:
                time.sleep(0.001)
            assert time.monotonic() - started > 0.25
            assert engine.look(request, keys) == [MISS]
            storing = engine.begin(*names("b", 5))
            engine.offer(storing, *names("b", 5))
            for _ in range(20):
                engine.step()
                engine.timed(engine.manager.get_stats)
            assert engine.manager.has_pending_work()
            assert engine.slowest < PROMPT_SECONDS
        finally:
            os.kill(pid, signal.SIGCONT)
        engine.manager.on_request_finished(request)
        engine.settle()
        end = time.monotonic() + 60
        while engine.load(*keys) != [content(each) for each in keys]:
            assert time.monotonic() < end
        engine.close()


def test_a_load_that_hangs_keeps_its_rows_and_the_engine_goes_on(
    tmp_path: Path, start: Start
) -> None:
    """Nothing can take a row back from the kernel; so it is nobody's until the read has ended."""
    engine = start(behind_cache(tmp_path))
    held = HeldNamespace(engine.tier._namespaces[0])
    engine.tier._namespaces[0] = held  # type: ignore[assignment]
    keys, others = names("a", 3), names("b", 3, group=1)
    engine.store(*keys)
    engine.store(*others)
    engine.forget()
    held.holds = True
    request = engine.begin(*keys)
    for _ in range(20):
        engine.look(request, keys)
    assert engine.load(*others) == [content(each) for each in others]
    assert engine.manager.primary_tier._num_write_pending_chunks == 3
    assert engine.slowest < PROMPT_SECONDS
    with pytest.raises(kvdepot.Error, match="has not finished a copy from or to vLLM's CPU tier"):
        engine.close()
    assert engine.manager.primary_tier.get_kv_memoryview()[0, 0] is not None, "still mapped"
    held.holds = False
    engine.close()


@LASTING
def test_a_close_with_tasks_under_way_waits_for_the_rows(
    tmp_path: Path, start: Start, tier: Any
) -> None:
    engine = start(tier(tmp_path))
    keys = names("a", 30)
    engine.store(*keys[:10])
    engine.forget()
    engine.look(engine.begin(*keys[:10]), keys[:10])
    for some in chunked(keys[10:], 4):
        assert engine.offer(engine.begin(*some), *some) == len(some)
    engine.close()
    assert not engine.region.exists()
    # A second time nothing is left to do.
    engine.tier.shutdown()
    later = start(tier(tmp_path))
    for each in keys:
        assert later.load(each) in ([], [content(each)])
    assert len(later.load(*keys[:10])) == 10


def test_a_request_that_is_preempted_finds_what_it_has_stored_itself(
    tmp_path: Path, start: Start
) -> None:
    engine = start(posix(tmp_path))
    keys = names("a", 3)
    request = engine.begin(*keys)
    while (found := engine.look(request, keys))[0] is RETRY:
        time.sleep(0.001)
    assert found == [MISS]
    engine.offer(request, *keys)
    engine.settle()
    engine.forget()
    while RETRY in (found := engine.look(request, keys)):
        time.sleep(0.001)
    assert len(found) == 3
    assert MISS not in found


# ---- resets ---------------------------------------------------------------------------------


def test_a_reset_waits_for_what_still_fills_rows(tmp_path: Path, start: Start) -> None:
    engine = start(posix(tmp_path))
    held = HeldNamespace(engine.tier._namespaces[0])
    engine.tier._namespaces[0] = held  # type: ignore[assignment]
    keys = names("a", 3)
    engine.store(*keys)
    engine.forget()
    held.holds = True
    request = engine.begin(*keys)
    while not engine.tier._jobs:
        engine.look(request, keys)
    reset = threading.Thread(target=engine.manager.reset_cache)
    reset.start()
    reset.join(0.2)
    assert reset.is_alive()
    held.holds = False
    reset.join(10)
    assert not reset.is_alive()
    assert engine.manager._jobs == {}
    engine.manager.on_request_finished(request)


def test_after_a_reset_nothing_from_before_it_is_served(tmp_path: Path, start: Start) -> None:
    before, after = names("before", 3), names("after", 3)
    engine = start(posix(tmp_path))
    engine.store(*before)
    running = engine.begin(*before)
    engine.forget()
    while engine.look(running, before)[0] is not HIT:
        time.sleep(0.001)
    engine.reset()
    while (found := engine.look(running, before))[0] is RETRY:
        time.sleep(0.001)
    assert found == [MISS]
    assert engine.load(*before) == []
    # It goes on with what it had, and vLLM offers that again.
    engine.offer(running, *before)
    engine.settle()
    engine.manager.on_request_finished(running)
    engine.store(*after)
    engine.forget()
    assert engine.load(*before) == []
    assert len(engine.load(*after)) == 3
    assert len(files(tmp_path)) == 6
    # Nobody will ask for the epoch that ends.
    engine.reset()
    assert len(files(tmp_path)) == 3
    engine.close()
    assert len(start(posix(tmp_path)).load(*before)) == 3


@pytest.mark.parametrize(("on_reset", "left"), [("verify", 3), ("clear", 0)])
def test_a_reset_keeps_or_removes_what_it_is_told_to(
    tmp_path: Path, start: Start, on_reset: str, left: int
) -> None:
    engine = start(posix(tmp_path, on_reset=on_reset))
    # A connector tells of other weights.
    engine.tier.verifies = True
    keys = names("a", 3)
    engine.store(*keys)
    engine.offer(engine.begin(*keys), *keys)
    engine.reset()
    assert len(engine.load(*keys)) == left
    assert len(files(tmp_path)) == left


# ---- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pipeline": None}, "pipeline: required in secondary_tiers"),
        ({"pipeline": "Tape"}, r"pipeline: .*Tape"),
        ({"posix": {"path": "/x", "capacty": 1}}, "posix.capacty: .*capacity"),
        ({"posix": {"path": "/x", "capacity": "much"}}, r"posix.capacity: .*much"),
        ({"weights": None}, r"weights: required in secondary_tiers, .*KvdepotTieringConnector"),
        ({"weights": " "}, r"weights: ' ' is not allowed; it must be a text that is not empty"),
        ({"on_reset": "no"}, r"on_reset: 'no' is not allowed; .*'verify' .*, 'epoch' or 'clear'"),
        ({"locality": "HERE"}, r"locality: 'HERE' is not allowed; .*'LOCAL', 'REMOTE'"),
        ({"lookup_wait": "soon"}, r"lookup_wait: 'soon' is not allowed"),
        ({"lookup_wiat": "1s"}, r"lookup_wiat: .*'lookup_wait'"),
        ({"enable_kv_events": True}, "enable_kv_events: True is not allowed"),
        ({"config_file": "/none"}, "config_file: cannot read '/none'"),
    ],
    ids=str,
)
def test_a_wrong_setting_ends_the_start_and_is_named(
    tmp_path: Path, start: Start, changes: dict[str, Any], error: str
) -> None:
    merged = TIER | posix(tmp_path) | changes
    wanted = {name: value for name, value in merged.items() if value is not None}
    from kvdepot.vllm import settings as vllm_settings

    for name in ("type", "module_path"):
        wanted.pop(name)
    with pytest.raises(kvdepot.ConfigError, match=error):
        vllm_settings.read_tier(wanted)


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path, start: Start) -> None:
    own = f"vllm_offload_test-{os.getpid()}-"

    def regions() -> set[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        found = {line.split()[5] for line in maps if own in line}
        return found | {str(path) for path in Path("/dev/shm").glob(f"{own}*")}

    gc.collect()
    before = regions()
    holder = start(nvme(tmp_path))
    with pytest.raises(kvdepot.LockedError, match=str(os.getpid())):
        start(nvme(tmp_path) | {"lock_wait": "100ms"})
    holder.close()
    with pytest.raises(kvdepot.Error, match="model") as failed:
        start(nvme(tmp_path), name="")
    assert not regions() - before
    start(nvme(tmp_path) | {"lock_wait": "100ms"})
    assert failed.tb is not None, "which has the tier"


def test_the_settings_may_be_in_a_file(tmp_path: Path, start: Start) -> None:
    file = tmp_path / "depot.yaml"
    place = tmp_path / "kv"
    file.write_text(f"pipeline: Posix\nposix:\n  path: {place}\n  capacity: 64MiB\n")
    keys = names("a", 3)
    engine = start({"config_file": str(file), "locality": "REMOTE"})
    engine.store(*keys)
    assert len(files(tmp_path)) == 3
    assert str(engine.tier.locality) == "Locality.REMOTE"


def test_hashes_that_are_too_short_are_never_stored(tmp_path: Path, start: Start) -> None:
    """Another algorithm's; vLLM's own connector does not say which."""
    engine = start(posix(tmp_path))
    short = [each[16:] for each in names("a", 3)]
    engine.store(*short)
    engine.forget()
    assert engine.load(*short) == []
    assert files(tmp_path) == []


# ---- helpers --------------------------------------------------------------------------------


class HeldTask:
    """A task that is not seen to end while it is held."""

    def __init__(self, task: kvdepot.Task, namespace: HeldNamespace) -> None:
        self._task = task
        self._namespace = namespace

    @property
    def done(self) -> bool:
        return not self._namespace.holds and self._task.done

    def wait(self, timeout: float | None = None) -> list[bool]:
        end = time.monotonic() + (60 if timeout is None else timeout)
        while self._namespace.holds:
            if time.monotonic() > end:
                raise kvdepot.TimeoutError(f"{timeout} s")
            time.sleep(0.001)
        return self._task.wait(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class HeldNamespace:
    """A namespace whose gets do not end while they are held."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self.holds = False

    def get(self, *arguments: Any) -> HeldTask:
        return HeldTask(self._namespace.get(*arguments), self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)


class serve:  # noqa: N801 - used as a function
    """A service in another process, for as long as the block lasts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s"
        options = ["-o", f"posix.path={folder / 'kv'}", "-o", "posix.capacity=64MiB"]
        command = [sys.executable, "-m", "kvdepot._cli", "serve", "Posix", *options]
        self.process = subprocess.Popen(
            [*command, "--socket", str(self.path)], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> serve:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("serving ")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def over(service: serve, **settings: Any) -> dict[str, Any]:
    return {"pipeline": f"unix:{service.path}", **settings}


def stopped(pid: int) -> None:
    """Each of its threads stops when it notices."""
    tasks = Path(f"/proc/{pid}/task")
    while any(
        (task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()
    ):
        time.sleep(0.001)


def chunked(keys: list[Any], count: int) -> list[list[Any]]:
    return [keys[at : at + count] for at in range(0, len(keys), count)]


def counted(engine: Tiers, name: str) -> int:
    """A counter since it was asked for last."""
    stats = engine.manager.get_stats()
    return sum(stats.data["data"][name].values()) if stats else 0


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process can be written behind that: as a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
