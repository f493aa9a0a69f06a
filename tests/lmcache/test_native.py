"""The native plug-in by itself: the protocol of LMCache's wrapper."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvdepot
import pytest
from kvdepot.lmcache import KvdepotNative
from kvdepot.lmcache import keys as lmcache_keys

from . import pipelines

SIZE = 64 << 10
ARENA_BYTES = 32 << 20


class Client:
    """Submits and drains as `NativeConnectorL2Adapter` does."""

    def __init__(self, folder: Path, pipeline: str, **params: Any) -> None:
        self.native = KvdepotNative(
            **pipelines.settings(pipeline, folder, ARENA_BYTES),
            socket=str(folder / "socket"),
            lock_wait=0,
            **params,
        )

    def wait(self, number: int) -> tuple[bool, str, list[bool]]:
        poll = select.poll()
        poll.register(self.native.event_fd(), select.POLLIN)
        assert poll.poll(60_000)
        # Nothing, while another part of the batch is under way.
        while not (completions := self.native.drain_completions()):
            assert poll.poll(60_000)
        [(answered, ok, error, bools)] = completions
        assert answered == number
        assert bools is not None
        return ok, error, bools

    def set(self, keys: list[str], views: list[Any]) -> tuple[bool, str, list[bool]]:
        return self.wait(self.native.submit_batch_set(keys, views))

    def get(self, keys: list[str], views: list[Any]) -> tuple[bool, str, list[bool]]:
        return self.wait(self.native.submit_batch_get(keys, views))

    def exists(self, keys: list[str]) -> list[bool]:
        return self.wait(self.native.submit_batch_exists(keys))[2]


@pytest.fixture
def client(tmp_path: Path, pipeline: str) -> Iterator[Client]:
    client = Client(tmp_path, pipeline)
    yield client
    client.native.close()


def view(data: bytes) -> memoryview:
    """Memory as LMCache shows it: of ctypes, one-dimensional, of the format `<B`."""
    shown = memoryview((ctypes.c_ubyte * len(data)).from_buffer(bytearray(data)))
    assert shown.format == "<B"
    return shown


def name(number: int) -> str:
    return f"org/model@01000100@0@{number:064x}"


def test_a_miss_is_an_answer_and_not_an_error(client: Client):
    source = os.urandom(SIZE)
    assert client.set([name(1)], [view(source)]) == (True, "", [True])
    targets = [view(bytes(SIZE)) for _ in range(2)]
    assert client.get([name(2), name(1)], targets) == (True, "", [False, True])
    assert bytes(targets[1]) == source
    assert client.exists([name(2), name(1)]) == [False, True]


def test_what_is_not_stored_says_why(client: Client):
    ok, error, stored = client.set(
        [name(1), name(2)], [view(bytes(2 * ARENA_BYTES)), view(bytes(SIZE))]
    )
    assert (ok, stored) == (False, [False, True])
    assert error == "1 of 2 not stored: full"


def test_a_key_that_was_absent_is_deleted_too(client: Client):
    client.set([name(1)], [view(bytes(SIZE))])
    deleted = client.wait(client.native.submit_batch_delete([name(1), name(2)]))
    assert deleted == (True, "", [True, True])
    assert client.exists([name(1)]) == [False]


def test_empty_batches_are_answered(client: Client):
    for submit in (client.native.submit_batch_set, client.native.submit_batch_get):
        assert client.wait(submit([], []))[2] == []
    assert client.exists([]) == []


def test_keys_of_any_text_are_kept_apart(client: Client):
    usual = name(10)
    odd = [
        "",
        "k" * 100_000,
        "\udcff",
        "a@b",
        "org/model@01000100@0@" + "ab" * 33,
        usual.upper(),
        usual[:-1] + "A",
        usual.replace("@0@", "@00@"),
        usual.replace("@01000100", "@1000100"),
        usual + "@",
        usual + "@salt",
        usual + "@salt@more",
        " " + usual,
        usual[:-1],
        usual[:-2],
        "@01000100@0@" + "00" * 32,
        usual.replace("@01000100", "@-0000001"),
        usual.replace("@01000100", "@0x000001"),
    ]
    contents = [os.urandom(512) for _ in range(len(odd) + 1)]
    keys = [usual, *odd]
    assert client.set(keys, [view(data) for data in contents])[0]
    targets = [view(bytes(512)) for _ in keys]
    assert all(client.get(keys, targets)[2])
    assert [bytes(target) for target in targets] == contents


def test_a_key_is_read_back_from_its_parts():
    names = [
        lmcache_keys.Name("org/model", 0x01000100, 0, "", 32),
        lmcache_keys.Name("m", 0, 255, "salt", 4),
        lmcache_keys.Name("m", 1 << 40, 1, "é", 1),
    ]
    for one in names:
        chunk_hash = os.urandom(one.hash_bytes)
        assert lmcache_keys.parse(lmcache_keys.text_of(one, chunk_hash)) == (one, chunk_hash)
        assert lmcache_keys.Name.decode(one.encode()) == one


def test_submits_of_several_threads_are_all_answered_once(client: Client):
    numbers: list[int] = []

    def submit(begin: int) -> None:
        for number in range(begin, begin + 50):
            views = [view(number.to_bytes(4, "big") * 256)]
            numbers.append(client.native.submit_batch_set([name(number)], views))
            numbers.append(client.native.submit_batch_exists([name(number)]))

    threads = [threading.Thread(target=submit, args=(begin,)) for begin in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    answered: list[int] = []
    poll = select.poll()
    poll.register(client.native.event_fd(), select.POLLIN)
    while len(answered) < 300:
        assert poll.poll(60_000)
        answered += [number for number, *_ in client.native.drain_completions()]
    for thread in threads:
        thread.join()
    assert sorted(answered) == sorted(numbers)


def test_wrong_arguments_are_refused_and_close_ends_it(client: Client):
    with pytest.raises(kvdepot.InputError, match="buffers"):
        client.native.submit_batch_set([name(1), name(2)], [view(bytes(SIZE))])
    with pytest.raises(kvdepot.InputError):
        client.native.submit_batch_get([name(1)], [b"not writable"])
    client.native.close()
    client.native.close()
    with pytest.raises(kvdepot.ClosedError):
        client.native.submit_batch_exists([name(1)])


@pytest.mark.parametrize("setting", ["salt", "weights"])
def test_a_text_of_the_operators_keeps_deployments_apart(
    tmp_path: Path, client: Client, pipeline: str, setting: str
):
    client.set([name(1)], [view(b"a" * SIZE)])
    client.native.close()
    other = Client(tmp_path, pipeline, **{setting: "fp8"})
    assert other.exists([name(1), "of another form"]) == [False, False]
    other.set([name(1), "of another form"], [view(b"b" * SIZE)] * 2)
    other.native.close()
    again = Client(tmp_path, pipeline)
    assert again.exists([name(1), "of another form"]) == [True, False]
    again.native.close()


@pytest.mark.parametrize("weights", [None, "w"])
def test_what_nobody_has_named_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: str | None
):
    client = Client(tmp_path, "Dax", **({} if weights is None else {"weights": weights}))
    client.native.close()
    assert ("differ only in the weights, RoPE" in caplog.text) == (weights is None)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(client: Client):
    child = os.fork()
    if child == 0:
        try:
            client.native.submit_batch_exists([name(1)])
        except kvdepot.ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
