"""Reserve, move, commit or abort; pin, move, unpin."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import kvdepot
import pytest

Keys = Callable[[int], list[bytes]]


@pytest.fixture
def mover(depot: kvdepot.Depot) -> Iterator[kvdepot.Mover]:
    assert depot.socket is not None
    with kvdepot.attach(depot.socket, lanes=1) as mover:
        yield mover


def stored(
    ns: kvdepot.Namespace, mover: kvdepot.Mover, names: list[bytes], data: bytes = b"data"
) -> None:
    """Blocks written as a worker would."""
    reserved = [one for one in ns.reserve(names, len(data)) if one is not None]
    job = mover.store([one.placement for one in reserved], [data] * len(reserved))
    assert job.wait(30)
    assert ns.commit(reserved, [[sum_] for sum_ in job.checksums if sum_]) == [True] * len(names)


def test_a_block_is_visible_from_its_commit_on(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, mover: kvdepot.Mover, keys: Keys
) -> None:
    names = keys(2)
    first, second = ns.reserve(names, [4, 5])
    assert first is not None
    assert second is not None
    assert (first.key, first.length, first.parts) == (names[0], 4, 1)
    assert second.length == 5
    assert ns.prefix(names) == 0
    assert depot.stats()["tiers"]["Cache"]["reserved_blocks"] == 2
    job = mover.store([first.placement, second.placement], [b"four", b"fives"])
    assert job.wait(30)
    assert ns.prefix(names) == 0
    sums = [[one] for one in job.checksums if one is not None]
    assert ns.commit([first, second], sums) == [True, True]
    assert ns.prefix(names) == 2
    out = [bytearray(4), bytearray(5)]
    assert all(ns.get(names, out).wait(30))
    assert out == [b"four", b"fives"]


def test_what_needs_no_writing_is_not_reserved(
    ns: kvdepot.Namespace, mover: kvdepot.Mover, keys: Keys
) -> None:
    names = keys(3)
    stored(ns, mover, names[:1])
    held = ns.reserve(names[1:2], 4)
    assert [one is None for one in ns.reserve(names, 4)] == [True, True, False]
    ns.abort([one for one in held if one])
    assert ns.reserve(names[1:2], 4) != [None]


def test_a_reservation_ends_once(ns: kvdepot.Namespace, mover: kvdepot.Mover, keys: Keys) -> None:
    one, other = ns.reserve(keys(2), 4)
    assert one is not None
    assert other is not None
    job = mover.store([one.placement], [b"data"])
    job.wait(30)
    (checksum,) = job.checksums
    assert checksum is not None
    assert ns.commit([one, one], [[checksum], [checksum]]) == [True, False]
    assert ns.commit([one], [[checksum]]) == [False]
    ns.abort([one])
    assert ns.prefix([one.key]) == 1
    ns.abort([other, other])
    assert ns.commit([other], [[checksum]]) == [False]
    assert ns.prefix([other.key]) == 0


def test_a_dropped_reservation_keeps_its_room(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(1)
    (held,) = ns.reserve(names, 4)
    assert held is not None
    assert held.placement
    del held
    gc.collect()
    # A worker may still write there.
    assert ns.reserve(names, 4) == [None]
    assert depot.stats()["tiers"]["Cache"]["reserved_blocks"] == 1


def test_a_reservation_that_no_worker_can_know_is_given_back_when_dropped(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(3)
    ns.reserve(names, 4)
    gc.collect()
    assert depot.stats()["tiers"]["Cache"]["reserved_blocks"] == 0
    assert None not in ns.reserve(names, 4)


def test_parts_of_several_ranks(ns: kvdepot.Namespace, mover: kvdepot.Mover, keys: Keys) -> None:
    names = keys(2)
    reserved = ns.reserve(names, 30, parts=2, part_lengths=[10, 20])
    placements = [one.placement for one in reserved if one]
    sums: list[list[bytes]] = [[], []]
    for part, length in enumerate((10, 20)):
        job = mover.store(placements, [bytes([part + 1]) * length] * 2, part=part)
        assert job.wait(30)
        for index, checksum in enumerate(job.checksums):
            assert checksum is not None
            sums[index].append(checksum)
    with pytest.raises(kvdepot.InputError, match=r"checksums\[1\].*one checksum per part, 2"):
        ns.commit([one for one in reserved if one], [sums[0], sums[1][:1]])
    assert ns.commit([one for one in reserved if one], sums) == [True, True]
    pin = ns.pin(names[:1])[0]
    assert pin is not None
    assert pin.length == 30
    for part, length in enumerate((10, 20)):
        out = bytearray(length)
        job = mover.load([pin.placement], [out], part=part)
        assert job.wait(30)
        assert job.results == [True]
        assert out == bytes([part + 1]) * length
    for verb in (mover.digest, mover.verify):
        with pytest.raises(kvdepot.InputError, match="part: 2"):
            verb([pin.placement], part=2)
    with pytest.raises(kvdepot.InputError, match="10 bytes"):
        mover.load([pin.placement], [bytearray(11)], part=0)


def test_equal_parts_need_no_lengths(ns: kvdepot.Namespace, keys: Keys) -> None:
    (one,) = ns.reserve(keys(1), 30, parts=3)
    assert one is not None
    assert one.parts == 3


def test_strict_reservations_are_all_or_nothing(depots: Any, keys: Keys) -> None:
    depot = depots.open("Cache", cache="64KiB")
    ns = depot.namespace("m", "f", 1)
    with pytest.raises(kvdepot.FullError, match="Cache"):
        ns.reserve(keys(20), 4096, strict=True)
    with pytest.raises(kvdepot.FullError, match=r"131072 bytes: the block is larger .* 65536"):
        ns.reserve(keys(1), 1 << 17, strict=True)
    assert depot.stats()["tiers"]["Cache"]["reserved_blocks"] == 0
    held = ns.reserve(keys(20), 4096)
    assert sum(one is not None for one in held) == 16
    ns.abort([one for one in held if one])
    assert all(ns.reserve(keys(16), 4096, strict=True))


def test_pins_hold_blocks(depots: Any, keys: Keys) -> None:
    depot = depots.open("Cache", cache="64KiB")
    ns = depot.namespace("m", "f", 1)
    names = keys(3)
    ns.put(names, [b"x" * 4096] * 3).wait(30)
    pins = ns.pin(names[:1])
    for _ in range(4):
        ns.put(keys(10), [bytes(4096)] * 10).wait(30)
    assert ns.contains(names) == [True, False, False]
    assert depot.stats()["tiers"]["Cache"]["pinned_blocks"] == 1
    ns.unpin(pins)
    ns.unpin(pins)
    assert depot.stats()["tiers"]["Cache"]["pinned_blocks"] == 0


def test_pins_tell_what_they_hold(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(2)
    ns.put(names[:1], [bytes(1000)]).wait(30)
    pin, none = ns.pin(names)
    assert none is None
    assert pin is not None
    assert (pin.key, pin.tier, pin.length) == (names[0], "Cache", 1000)
    assert isinstance(pin.placement, bytes)
    assert names[0].hex() in repr(pin)
    ns.unpin([pin, none])
    assert "ended" in repr(pin)


def test_a_dropped_pin_is_ended(depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(1)
    ns.put(names, [b"x"]).wait(30)
    assert depot.drain(10)
    pinned = lambda: depot.stats()["tiers"]["Cache"]["pinned_blocks"]  # noqa: E731
    pins = [ns.pin(names), ns.pin(names)]
    assert pinned() == 1
    del pins[0]
    assert pinned() == 1
    del pins
    assert pinned() == 0


def test_prefix_pins_end_at_the_first_gap(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(5)
    ns.put(names, [b"x"] * 5).wait(30)
    ns.remove([names[2]])
    assert depot.drain(10)
    pins = ns.pin(names, prefix=True)
    assert [pin is not None for pin in pins] == [True, True, False, False, False]
    assert depot.stats()["tiers"]["Cache"]["pinned_blocks"] == 2
    assert [pin is not None for pin in ns.pin(names)] == [True, True, False, True, True]


def test_served_pins_count_as_hits_and_promote(depots: Any, keys: Keys) -> None:
    names = keys(1)
    depots.open().namespace("m", "f", 1).put(names, [b"x" * 100]).wait(30)
    depots.close()
    depot = depots.open()
    ns = depot.namespace("m", "f", 1)
    pins = ns.pin(names)
    assert [pin.tier for pin in pins if pin] == ["Dax"]
    ns.unpin(pins, served=True)
    assert depot.stats()["tiers"]["Dax"]["hit_blocks"] == 1
    for _ in range(1000):
        if ns.where(names) == ["Cache"]:
            break
        time.sleep(0.01)
    assert ns.where(names) == ["Cache"]


def test_discard_drops_the_pinned_copy_alone(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(1)
    ns.put(names, [b"x"]).wait(30)
    assert depot.drain(10)
    pins = ns.pin(names)
    assert ns.discard(pins) == 1
    assert ns.discard(pins) == 0
    assert ns.where(names) == ["Dax"]
    assert depot.stats()["tiers"]["Cache"]["corrupt_blocks"] == 1
    far = ns.pin(names)
    assert ns.discard([*far, *pins, None]) == 1
    assert ns.where(names) == [None]
    ns.unpin([*far, *pins])
    assert ns.put(names, [b"y"]).wait(30) == [True]
    assert ns.discard([*far, *pins]) == 0
    assert ns.prefix(names) == 1


def test_strangers_are_refused(depots: Any, keys: Keys, tmp_path: Any) -> None:
    one = depots.open("Cache").namespace("m", "f", 1)
    settings = {"cache": {"capacity": "1MiB"}, "socket": "off"}
    with kvdepot.open("Cache", settings) as other_depot:
        other = other_depot.namespace("m", "f", 1)
        names = keys(2)
        one.put(names[:1], [b"x"]).wait(30)
        pins = one.pin(names[:1])
        held = [item for item in one.reserve(names[1:], 1) if item]
        for call in (other.unpin, other.discard):
            with pytest.raises(kvdepot.InputError, match=r"pins\[0\].*another depot"):
                call(pins)
        with pytest.raises(kvdepot.InputError, match=r"reservations\[0\].*another depot"):
            other.abort(held)
        with pytest.raises(kvdepot.InputError, match=r"reservations\[0\].*another depot"):
            other.commit(held, [[bytes(16)]])
    for wrong in ([None], ["x"], [pins[0]]):
        with pytest.raises(kvdepot.InputError, match=r"reservations\[0\]"):
            one.abort(wrong)
    with pytest.raises(kvdepot.InputError, match=r"pins\[0\]"):
        one.unpin(held)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("checksums", "match"),
    [
        ([], "0 lists for 1 reservations"),
        ([[bytes(16)]] * 2, "2 lists for 1 reservations"),
        ([[bytes(15)]], r"checksums\[0\]\[0\].* a checksum \(16 bytes\)"),
        ([[1]], r"checksums\[0\]\[0\]: 1 is not allowed; allowed: a checksum"),
        ([1], r"checksums\[0\]: 1 is not allowed; allowed: a list"),
        (1, r"checksums: 1 is not allowed; allowed: one list per reservation"),
        ([[None]], r"checksums\[0\]\[0\]"),
        ([["x" * 16]], r"checksums\[0\]\[0\]"),
        ([[bytes(16)] * 2], r"checksums\[0\]: 2 checksums"),
        ([[]], r"checksums\[0\]: 0 checksums"),
    ],
)
def test_wrong_checksums(ns: kvdepot.Namespace, keys: Keys, checksums: Any, match: str) -> None:
    (one,) = ns.reserve(keys(1), 4)
    assert one is not None
    with pytest.raises(kvdepot.InputError, match=match):
        ns.commit([one], checksums)
    # The reservation was not ended by the refusal.
    ns.abort([one])
    assert ns.reserve([one.key], 4) != [None]


def test_a_wrong_checksum_is_a_miss(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(1)
    (one,) = ns.reserve(names, 4)
    assert one is not None
    assert ns.commit([one], [[b"wrong checksum!!"]]) == [True]
    task = ns.get(names, [bytearray(4)])
    assert task.wait(30) == [False]
    assert task.errors in (["corrupt"], ["miss"])
    assert ns.prefix(names) == 0
