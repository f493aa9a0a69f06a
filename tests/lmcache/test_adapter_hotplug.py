"""Devices that come and go under LMCache's storage manager, by its HTTP interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from lmcache.v1.multiprocess.http_apis.reconfigure_api import router

from . import mp
from .mp import Heard
from .test_mp_manager import Manager


class Server:
    """The part of LMCache's HTTP server that changes devices, over a storage manager."""

    def __init__(self, folder: Path, **params: Any) -> None:
        self.folder = folder
        self.first = str(folder / "arena")
        spec = mp.spec("adapter", folder, hotplug_enabled=params.pop("hotplug", True), **params)
        self.manager = Manager(16 << 20, spec)
        [(_, adapter)] = self.manager.lmcache.l2_adapters()
        self.adapter = adapter
        # Used beside the manager's loops, which own its descriptors: lookups alone.
        self.heard = Heard()
        adapter.register_listener(self.heard)
        app = FastAPI()
        app.include_router(router)
        app.state.engine = SimpleNamespace(storage_manager=self.manager.lmcache)
        self.http = TestClient(app)

    def post(self, operation: str, device: str, expect: int = 200, **payload: Any) -> Any:
        answer = self.http.post(
            f"/reconfigure/plugin/l2/{operation}", json={"device_path": device, **payload}
        )
        assert answer.status_code == expect, answer.text
        return answer.json()

    def devices(self) -> dict[str, Any]:
        answer = self.http.get("/reconfigure/plugin/l2/status").json()
        [adapter] = answer["adapters"]
        return {device["device_path"]: device for device in adapter["status"]["devices"]}

    def fill(self, numbers: range) -> list[Any]:
        names = mp.keys(numbers)
        used = self.manager.usage().total_bytes_used
        self.manager.write(names)
        self.manager.clear(used + len(names) * mp.CHUNK_BYTES)
        return names

    def add(self, name: str, size: int | str = 16 << 20) -> str:
        path = str(self.folder / name)
        self.post("add", path, size=size)
        return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.manager.close()


def test_a_device_is_added_and_the_one_before_leaves_with_no_chunk_lost(server: Server):
    names = server.fill(range(30))
    before = server.manager.usage().total_capacity_bytes
    second = server.add("second", "16MiB")
    assert server.manager.usage().total_capacity_bytes > before
    moved = server.post("remove", server.first, mode="migrate")
    assert moved["moved_keys"] >= 30
    assert list(server.devices()) == [second]
    assert server.heard.deleted == []
    assert all(server.manager.read(names))
    again = server.fill(range(100, 110))
    assert all(server.manager.read(again))


def test_a_drained_device_serves_nothing_new_until_it_is_added_again(server: Server):
    names = server.fill(range(10))
    second = server.add("second")
    assert server.post("remove", server.first, mode="drain")["state"] == "draining"
    assert server.devices()[server.first]["state"] == "draining"
    server.fill(range(100, 110))
    assert server.devices()[server.first]["blocks"] == 0
    assert all(server.manager.read(names))
    server.post("add", server.first)
    assert {device["state"] for device in server.devices().values()} == {"serving"}
    assert set(server.devices()) == {server.first, second}


def test_evicting_a_device_tells_what_went(server: Server):
    second = server.add("second")
    names = server.fill(range(40))
    done = server.post("remove", second, mode="evict")
    assert list(server.devices()) == [server.first]
    gone = set(server.heard.deleted)
    assert gone <= set(names)
    left = [name for name in names if name not in gone]
    assert all(server.manager.read(left))
    server.manager.lmcache.clear(force=True)
    assert not any(server.manager.read(list(gone)))
    assert done["deleted_keys"] >= len(gone)


def test_a_locked_chunk_keeps_its_device_as_it_was(server: Server):
    names = server.fill(range(5))
    server.add("second")
    number = server.adapter.submit_lookup_and_lock_task(names, {})
    for mode in ("migrate", "evict"):
        for force in (False, True):
            blocked = server.post("remove", server.first, expect=409, mode=mode, force=force)
            assert blocked["status"] == "blocked"
            assert blocked["locked_key_count"] >= 1
    assert server.devices()[server.first]["state"] == "serving"
    del number
    server.adapter.submit_unlock(names)
    server.post("remove", server.first, mode="migrate")
    assert all(server.manager.read(names))


def test_adding_again_changes_nothing_and_another_size_is_refused(server: Server):
    second = server.add("second")
    size = server.devices()[second]["capacity_bytes"]
    server.post("add", second, size=size)
    assert len(server.devices()) == 2
    server.post("add", second, size=size * 2, expect=409)
    link = server.folder / "another-name"
    link.symlink_to(second)
    assert server.adapter.owns_device(str(link))
    answer = server.post("add", str(link), expect=400)
    assert second not in str(answer)


def test_a_device_grows_and_never_shrinks(server: Server):
    size = server.devices()[server.first]["capacity_bytes"]
    names = server.fill(range(5))
    grown = server.post("resize", server.first, size=size + (8 << 20))
    assert grown["new_size_bytes"] == size + (8 << 20)
    server.post("resize", server.first, size=size, expect=409)
    server.post("resize", server.first, size="1MiB", expect=409)
    assert all(server.manager.read(names))


def test_nonsense_is_refused_and_names_no_other_path(server: Server):
    wrong = [
        ("remove", "/nowhere", 404, {}),
        ("resize", "/nowhere", 404, {"size": 1 << 20}),
        ("remove", server.first, 400, {"mode": "burn"}),
        ("remove", server.first, 400, {"force": "yes"}),
        ("remove", server.first, 507, {"mode": "migrate"}),
        ("add", "  ", 400, {}),
        ("add", "/nowhere/at/all", 400, {}),
        ("add", str(server.folder / "x"), 400, {"size": -1}),
        ("add", str(server.folder / "x"), 400, {"size": "a lot"}),
        ("explode", server.first, 400, {}),
    ]
    server.fill(range(1))
    for operation, device, status, payload in wrong:
        answer = server.post(operation, device, expect=status, **payload)
        assert device == server.first or server.first not in str(answer)
    assert list(server.devices()) == [server.first]


def test_without_leave_nothing_changes(tmp_path: Path):
    server = Server(tmp_path, hotplug=False)
    server.post("add", str(tmp_path / "second"), size=16 << 20, expect=403)
    assert list(server.devices()) == [server.first]
    server.manager.close()


def test_chunks_are_served_while_devices_come_and_go(server: Server):
    names = server.fill(range(50))
    ended = threading.Event()
    misses: list[int] = []

    def read() -> None:
        while not ended.is_set():
            server.manager.lmcache.clear(force=False)
            misses.append(server.manager.read(names).count(False))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        at = server.first
        for number in range(4):
            other = server.add(f"device{number}")
            while True:
                # A prefetch that is under way has its chunks locked.
                answer = server.http.post("/reconfigure/plugin/l2/remove", json={"device_path": at})
                if answer.status_code == 200:
                    break
                assert answer.status_code == 409, answer.text
            at = other
    finally:
        ended.set()
        reader.join()
    assert misses
    assert not any(misses)
    assert not server.heard.deleted
