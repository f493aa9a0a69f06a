"""The compiled half of kvdepot."""

import builtins
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, final, type_check_only

from typing_extensions import Buffer

__all__ = [
    "ClosedError",
    "Completions",
    "ConfigError",
    "CorruptError",
    "Depot",
    "Error",
    "FullError",
    "InputError",
    "LlamaLayout",
    "LockedError",
    "MoveJob",
    "Mover",
    "Namespace",
    "Pin",
    "Published",
    "Registered",
    "Reservation",
    "SessionCatalogue",
    "SessionFile",
    "SessionFiles",
    "SessionFound",
    "SessionPolicy",
    "SessionSaver",
    "SessionSnapshot",
    "SessionStream",
    "Sessions",
    "Spans",
    "Task",
    "TimeoutError",
    "TransferEngine",
    "TransferRemote",
    "TransferTask",
    "__version__",
    "_cache_directory",
    "_close_all",
    "_duration",
    "_options_of_file",
    "_size",
    "attach",
    "check",
    "keys",
    "main",
    "open",
]

__version__: str

@type_check_only
class _DLPack(Protocol):
    def __dlpack__(self) -> Any: ...

@type_check_only
class _Tensor(Protocol):
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def untyped_storage(self) -> Any: ...

@type_check_only
class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

_Keys: TypeAlias = Buffer | Iterable[Buffer]
"""32-byte values, or one contiguous buffer of them."""

_Buffers: TypeAlias = Iterable[Buffer | _DLPack | _CudaArray | tuple[int, int]] | Spans
"""Contiguous memory for each key: an object with the buffer protocol or DLPack, an array on a CUDA
device as the destination of a get, or an (address, length) pair that the caller keeps alive."""

_Reason: TypeAlias = Literal[
    "pending", "miss", "corrupt", "length", "full", "dropped", "declined", "closed"
]

_Fault: TypeAlias = Literal[
    "local",
    "range",
    "rights",
    "unknown",
    "checksum",
    "failed",
    "lost",
    "timed_out",
    "cancelled",
    "closed",
]

_Op: TypeAlias = Literal["read", "write"]

_Rights: TypeAlias = Literal["read", "write", "both"]

_Priority: TypeAlias = Literal["urgent", "normal", "background"]

_Request: TypeAlias = tuple[_Op, int | Buffer, "TransferRemote", int, int]
"""(op, local, remote, offset, length): an address in registered memory or an object that begins
there, and where in the remote."""

_Numbers: TypeAlias = int | Buffer | Iterable[int]
"""One number for all requests, or one a request: 64-bit integers in an array, or a sequence."""

class Error(Exception):
    """What every error of kvdepot is."""

class ConfigError(Error, ValueError):
    """An option does not exist or cannot have that value."""

class InputError(Error, ValueError):
    """An argument is wrong; no byte has moved."""

class LockedError(Error):
    """Another process owns the arena: `pid` on `host` holds `path`."""

    pid: int
    host: str
    path: str

class FullError(Error):
    """No room for a reservation, and nothing left to evict."""

class CorruptError(Error):
    """The medium holds something that is not a sound arena."""

class ClosedError(Error):
    """The depot was closed, or belongs to the process this one was forked from."""

class TimeoutError(Error, builtins.TimeoutError):
    """The time given to wait is over; what was waited for goes on."""

def open(pipeline: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> Depot:
    """Open a depot: a pipeline such as "Cache|Dax" with its settings, or a configuration file (a
    path, or a text with a separator or ending in .yaml, .yml or .json), whose options `settings`
    overrides. Or the depot that another process of this host serves: "unix:/run/kvdepot.sock",
    where `lanes` and `timeout` are the only settings.

    Raises ConfigError for wrong options, LockedError when another process owns the arena,
    CorruptError when the medium holds something else, and Error when nobody serves there.
    """

def check(
    pipeline: str | os.PathLike[str],
    settings: Mapping[str, Any] | None = None,
    *,
    options_only: bool = False,
) -> None:
    """Check a pipeline and its settings without opening anything: what `open` begins with. What
    another process owns is not looked into, and nobody is asked at a socket. With `options_only`
    nothing is looked at but the settings themselves, which may be another machine's.

    Raises ConfigError and CorruptError as `open` does for what the settings say and what is there.
    """

def keys(tokens: Iterable[int], block_tokens: int, salt: str | bytes | None = None) -> list[bytes]:
    """The keys of a prompt, one for each full block of `block_tokens` of its tokens. Each is the
    SHA-256 of the key before and the block's tokens as little-endian 32-bit numbers; before the
    first comes the SHA-256 of "kvdepot keys 1" and `salt`, a text or bytes.

    Raises InputError for what is no token: a number from 0 below 2^32.
    """

def attach(
    socket: str | os.PathLike[str],
    lanes: int | None = None,
    write: bool = True,
    with_owner: bool = False,
) -> Mover:
    """Attach to the depot that listens at `socket`, in another process of this host or in this
    one: a path, with `unix:` before it or without. `lanes` is the number of threads that move
    bytes. Without `write` it can only load. With `with_owner` it ends with its owner: a mover that
    outlives it keeps the next owner from allocating.

    Raises Error when nobody answers there.
    """

def main(argv: Iterable[str]) -> int:
    """Run the `kvdepot` command with these arguments, the program's name first, and answer its
    exit status."""

def _cache_directory() -> str: ...
def _close_all() -> None: ...
def _duration(text: str) -> float | None: ...
def _options_of_file(
    path: str | os.PathLike[str], beside: Mapping[str, Any] | None = None
) -> tuple[str, bool]: ...
def _size(text: str) -> int | None: ...

@type_check_only
class _Opening(TypedDict):
    blocks: int
    damaged: int
    outranked: int
    created: bool

@type_check_only
class _Device(TypedDict):
    tier: str
    path: str
    state: Literal["serving", "draining", "failed"]
    capacity_bytes: int
    data_bytes: int
    used_bytes: int
    live_bytes: int
    blocks: int
    pinned_blocks: int
    reserved_blocks: int
    evicted_blocks: int
    lost_bytes: int
    orphans: list[int]

@type_check_only
class _Drained(TypedDict):
    moved_blocks: int
    moved_bytes: int
    evicted_blocks: int

@type_check_only
class _Tier(TypedDict):
    capacity_bytes: int
    used_bytes: int
    live_bytes: int
    free_bytes: int
    largest_free_bytes: int
    blocks: int | None  # None where it is not known: of Posix and Ds3fs
    blocks_max: int
    pinned_blocks: int
    reserved_blocks: int
    evicted_blocks: int
    evicted_bytes: int
    corrupt_blocks: int
    lost_bytes: int
    full: int
    stored_blocks: int
    stored_bytes: int
    unanswered: int
    left_alone: int
    requests: int
    retries: int
    faults: dict[str, int]
    declined: int
    grouped_blocks: int
    evicted_groups: int
    hit_blocks: int
    hit_bytes: int
    put_move_ns: int
    get_move_ns: int

@type_check_only
class _Stats(TypedDict):
    tiers: dict[str, _Tier]
    devices: list[_Device]
    pending_bytes: int
    dropped_blocks: int
    declined_blocks: int
    put_tasks: int
    get_tasks: int
    prefetch_tasks: int
    put_blocks: int
    get_blocks: int
    prefetch_blocks: int
    put_bytes: int
    get_bytes: int
    missed_blocks: int
    joined_blocks: int
    loading_blocks: int
    promoted_blocks: int
    promoted_bytes: int
    put_acknowledged_blocks: int
    put_full_blocks: int
    put_dropped_blocks: int
    put_declined_blocks: int
    put_corrupt_blocks: int
    reserve_present_blocks: int
    reserve_pending_blocks: int
    write_back_bytes: int

@final
class Depot:
    """A pipeline of tiers, opened by this process. A context manager: leaving it closes it."""

    def namespace(
        self,
        model: str,
        dtype: str,
        block_tokens: int,
        weights: str | bytes | int | None = None,
        layout: str | bytes | int | None = None,
        group: str | bytes | int | None = None,
        world: str | bytes | int | None = None,
        hash: str | bytes | int | None = None,
        salt: str | bytes | int | None = None,
    ) -> Namespace:
        """A namespace: everything that must match for bytes to be reusable."""

    def stats(self) -> _Stats:
        """Counters and fill. `tiers` has a dictionary a tier; `pending_bytes` wait for the far
        tier."""

    def namespaces(self) -> list[tuple[bytes, str | None, int, int]]:
        """The namespaces with blocks in the last tier or a place in its directory: digest, the
        directory's description or None, blocks, bytes."""

    def gone(self, limit: int = 65536) -> tuple[list[tuple[bytes, bytes, int]], bool]:
        """The blocks that left every tier since the last call, by eviction, removal or rot, as
        (digest of the namespace, key, bytes), and whether more left than were noted. They are
        noted from the first call on, at most the last `limit` of each tier."""

    def metrics_text(self) -> str:
        """The counters in the Prometheus text format."""

    def pending_bytes(self) -> int:
        """Bytes put that the far tier has not got yet."""

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until the far tier has everything that was committed before; false when `timeout`
        seconds passed first. Of a depot that another process serves false also when nobody does,
        and once after blocks of this process were dropped or lost with an owner."""

    def devices(self) -> list[_Device]:
        """The media of the `Dax` tier: path, state ("serving", "draining", "failed"), capacity,
        use."""

    def add_device(
        self, path: str | os.PathLike[str], capacity: int | str | None = None
    ) -> _Opening:
        """Add a device or file to the `Dax` tier, making a file that is missing, and serve at once
        what it holds. Adding one again changes nothing, but for one that was drained: it takes
        writes again."""

    def drain_device(
        self,
        path: str | os.PathLike[str],
        to: Literal["others", "nowhere"] = "others",
        timeout: float | None = ...,
    ) -> _Drained:
        """Take no more writes to a device and move its blocks to the others, where they have room,
        or evict them (`to="nowhere"`). Raises TimeoutError, and lets the device take writes again,
        when blocks are pinned or being written for `timeout` seconds."""

    def remove_device(
        self,
        path: str | os.PathLike[str],
        force: bool = False,
        timeout: float | None = ...,
    ) -> None:
        """Let a drained or empty device go: another depot can open it then. With `force` whatever
        it holds is evicted first."""

    def grow_device(self, path: str | os.PathLike[str], capacity: int | str) -> None:
        """Give a device more room while it serves. Its record table stays as it is."""

    def populate(self) -> None:
        """Make the tiers present in this process, in the background: memory is allocated now and
        not by the first calls. Of a file only what is in memory already is mapped, and nothing is
        read from its disk."""

    @property
    def closed(self) -> bool:
        """Whether it was closed here, and calls are refused. An owner elsewhere that is gone does
        not close it: see `connected`."""

    def close(self) -> None:
        """Refuse new calls, wait for those under way, drain what waits for the far tier as long
        as `close_timeout` allows, and let the next owner in. Closing again waits for the first.
        On Ctrl-C it goes on in the background, and the end of the process waits for it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    @property
    def connected(self) -> bool:
        """Whether calls have somebody who answers: false when the process that serves the depot is
        gone, or does not answer, and until the next one is found."""

    @property
    def socket(self) -> str | None:
        """Where other processes attach; None with `socket: off`."""

    @property
    def path(self) -> str | None:
        """Where the lasting tier is; None when there is none."""

    @property
    def tiers(self) -> list[str]:
        """The tiers' names, near to far."""

    @property
    def description(self) -> str:
        """One line for a log: the tiers, their sizes and places."""

    @property
    def opening(self) -> _Opening:
        """What opening found: `blocks` served again, `damaged` and `outranked` records, and
        whether the arena was `created`."""

@final
class Namespace:
    """One namespace of a depot."""

    @property
    def digest(self) -> bytes:
        """The 16 bytes that identify the namespace."""

    def prefix(self, keys: _Keys) -> int:
        """How many of the first keys are stored without a gap."""

    def contains(self, keys: _Keys) -> list[bool]:
        """Whether each key's block is stored in some tier."""

    def where(self, keys: _Keys) -> list[str | None]:
        """The nearest tier that has each key's block; None for a miss."""

    def put(self, keys: _Keys, buffers: _Buffers, after: bytes | None = None) -> Task:
        """Store blocks, given in prefix order. `buffers` has contiguous memory for each key, or
        is one Spans. Answers at once; see Task for the two milestones.

        `after` is the key of the block before the first one, where a prompt comes in several
        calls: without it a call's blocks count as a prompt of their own, and a prompt larger than
        an eighth of a tier pushes out what others use."""

    def get(
        self, keys: _Keys, buffers: _Buffers, staged: bool = False, prefix: bool = False
    ) -> Task:
        """Fill buffers with blocks, given in prefix order. A buffer of another length than its
        block, or whose key is a miss, ends as false with unspecified content.

        With `prefix` only the consecutive hits from the first key are moved: the others end as
        misses, and their buffers are not touched. With `staged` the bytes go through the staging
        slab, for memory that is slow to copy into by small pieces or at odd addresses."""

    def lookup(self, keys: _Keys) -> Task:
        """Ask whether each key's block is stored, without waiting for tiers that answer late: the
        task is true for a key that is. Done at once where no tier does."""

    def prefetch(self, keys: _Keys) -> Task:
        """Bring the consecutive hits from the first key into the near tier, in the background.
        Answers at once; the task is true for a key once its block is there."""

    def remove(self, keys: _Keys) -> int:
        """Remove blocks from every tier; how many were in one."""

    def blocks(self) -> list[tuple[bytes, int]]:
        """Its blocks in any tier as (key, bytes), in the order of the keys."""

    def blocks_page(
        self, cursor: bytes | None = None, limit: int = ...
    ) -> tuple[list[tuple[bytes, int]], bytes | None]:
        """Some of its blocks as (key, bytes), at most `limit`, in no order, and where the next page
        begins: bytes for `cursor`, None behind the last one. A block in two tiers comes twice; a
        page may be short, or empty, before the last. Every block that is there all the while
        comes."""

    def clear(self) -> int:
        """Remove every block of the namespace; how many there were."""

    def reserve(
        self,
        keys: _Keys,
        lengths: int | Iterable[int],
        parts: int = 1,
        part_lengths: Iterable[int] | None = None,
        strict: bool = False,
        prefix: bool = False,
        after: bytes | None = None,
    ) -> list[Reservation | None]:
        """Reserve room for blocks, given in prefix order. `lengths` is one number or one a key.
        With `parts` above 1 each block has that many, of `part_lengths` bytes, or of equal ones.
        None for a key that is stored, is being written, is declined (`admission`), or finds no
        room; with `strict` no room raises FullError and reserves nothing; with `prefix` the answer
        ends before the first key that is declined or finds no room. `after` as for put."""

    def commit(
        self, reservations: Iterable[Reservation], checksums: Iterable[Iterable[bytes]]
    ) -> list[bool]:
        """Publish reservations whose bytes are in place. `checksums` has for each a list of 16
        bytes a part. False for one that was ended before or is lost."""

    def abort(self, reservations: Iterable[Reservation]) -> None:
        """Give reservations back. Every mover that had one of their placements must have
        stopped."""

    def pin(self, keys: _Keys, prefix: bool = False) -> list[Pin | None]:
        """Pin blocks, given in prefix order, where they are nearest; None for a miss. With
        `prefix` nothing behind the first miss is pinned."""

    def unpin(self, pins: Iterable[Pin | None], served: bool = False) -> None:
        """End pins, given in prefix order; None and ended ones are passed over. `served` says
        that their bytes were used: it counts as hits, and far blocks are promoted."""

    def discard(self, pins: Iterable[Pin | None]) -> int:
        """Unpublish pinned blocks that did not verify, where they are pinned. The pins remain.
        Answers how many were still published."""

@final
class Task:
    """A put or get under way. Dropping it does not cancel it, and the buffers stay alive until
    they are no longer touched."""

    def wait(self, timeout: float | None = None) -> list[bool]:
        """Wait until every key has its outcome and answer one bool a key: a put's block is
        acknowledged, a get's buffer is filled. Works after `close`.

        Raises TimeoutError after `timeout` seconds; the task goes on.
        """

    def __await__(self) -> Generator[Any, None, list[bool]]:
        """`await task` in a coroutine of asyncio: as `wait`. What cancels the coroutine does not
        cancel the task."""

    def wait_released(self, timeout: float | None = None) -> None:
        """Wait until the buffers are no longer touched: an engine may use them again.

        Raises TimeoutError after `timeout` seconds; the task goes on.
        """

    @property
    def done(self) -> bool:
        """Whether every key has its outcome."""

    @property
    def errors(self) -> list[_Reason | None]:
        """Why each key is false; None for success, and "pending" before the outcome is known."""

    def __len__(self) -> int: ...

@final
class Completions:
    """Tasks under way and what came of them, in the order in which they ended. `fileno` can be
    polled: it is readable while something waits for `drain`."""

    def fileno(self) -> int:
        """The descriptor to poll. It is this object's to close."""

    def add(self, task: Task | TransferTask, tag: Any) -> None:
        """Answer `tag` from `drain` once the task has all its outcomes."""

    def post(self, tag: Any, answer: Any) -> None:
        """Answer `tag` with `answer` from the next `drain`, for what needs no task."""

    def drain(self, clear: bool = True) -> list[tuple[Any, Any]]:
        """What ended since the last call: its tag, and what the task's `wait` answers. With
        `clear` false the descriptor stays readable, for a caller that resets it before it
        asks."""

    def close(self) -> None:
        """Close the descriptor and forget what has not been drained; the tasks go on."""

@final
class Pin:
    """A published block that stays where it is until it is unpinned, or this object is
    dropped."""

    @property
    def placement(self) -> bytes:
        """Where the bytes are, for a mover: opaque, and valid while the pin is."""

    @property
    def tier(self) -> str:
        """The name of the tier that has the block."""

    @property
    def key(self) -> bytes:
        """The block's key."""

    @property
    def length(self) -> int:
        """Bytes of the block."""

@final
class Reservation:
    """Room for a block that nobody sees before it is committed. Once its placement was asked for,
    only commit and abort end a reservation: dropping this object does not give the room back,
    because a mover may still write there."""

    @property
    def placement(self) -> bytes:
        """Where the bytes go, for a mover: opaque, and valid until commit or abort."""

    @property
    def key(self) -> bytes:
        """The block's key."""

    @property
    def length(self) -> int:
        """Bytes of the block."""

    @property
    def parts(self) -> int:
        """Parts that the commit needs checksums of."""

@final
class Spans:
    """Blocks scattered over several memory ranges, one block for each row of `rows`.

    A row holds ids; of each of `ranges` a block takes the page of every id of its row, range after
    range. A range is a tensor or an array whose first dimension counts pages, or (address, stride,
    length) in bytes, whose page is `length` bytes at `address + id * stride`.

    Tensors are kept alive until the task that uses their memory no longer touches it. So is
    `owner`, with the storage of each tensor that it is or, as a list, tuple or dictionary, has;
    what addresses name must stay valid as long, and must not leave that memory where it is known.
    In a load or a get a negative id stands for bytes that are verified but not delivered.

    `device` says that addresses are of the CUDA device with that number; tensors say it themselves.
    With `stream`, the handle of one of the device's streams, such as
    `torch.cuda.current_stream().cuda_stream`, what is moved waits for all that the stream has been
    given by the call that moves it, and the caller for nothing.
    """

    def __new__(
        cls,
        ranges: Iterable[tuple[int, int, int] | Buffer | _Tensor],
        rows: Buffer | Iterable[Iterable[int]],
        owner: object = None,
        device: int | None = None,
        stream: int | None = None,
    ) -> Self: ...
    def with_rows(self, rows: Buffer | Iterable[Iterable[int]], stream: int | None = None) -> Spans:
        """The same ranges, which are not looked at again, with other rows and another stream."""

    def rest(self, timeout: float | None = None) -> bool:
        """Wait until no copy of kvdepot's between this process and their device is under way. After
        a store that was given up, whose blocks are not stored, the device may still be read. Jobs
        and tasks are waited for first: what they will ask for is not known here. False when
        `timeout` seconds passed first; true at once for host memory."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""

@final
class Mover:
    """Moves bytes between this process's memory and an owner's tiers. A context manager: leaving
    it closes it."""

    def store(
        self,
        placements: Iterable[Buffer],
        buffers: _Buffers,
        part: int = 0,
        *,
        aside: bool = False,
    ) -> MoveJob:
        """Copy memory into reserved blocks, part `part` of each. `buffers` is as in put. With
        `aside` a thread of the mover's begins it, and the call returns at once: what it would raise
        of buffers that do not fit, or of a closed mover, is in `error` then, with `refused`."""

    def load(
        self,
        placements: Iterable[Buffer],
        buffers: _Buffers,
        part: int = 0,
        *,
        aside: bool = False,
    ) -> MoveJob:
        """Copy part `part` of pinned blocks into memory, verified. `buffers` is as in get, `aside`
        as in store."""

    def digest(self, placements: Iterable[Buffer], part: int = 0) -> MoveJob:
        """Hash reserved blocks where they are, after a device has written them."""

    def verify(self, placements: Iterable[Buffer], part: int = 0) -> MoveJob:
        """Verify pinned blocks where they are, before a device reads them."""

    def locate(
        self, placements: Iterable[Buffer], part: int = 0
    ) -> list[tuple[int, int, int] | None]:
        """Where part `part` of each block lies: (index in `media`, offset, length). None for a
        placement of another owner, and for a block in several pieces; and while processes of an
        earlier owner may still write there. InputError without `write`."""

    @property
    def media(self) -> list[memoryview]:
        """The owner's tiers as mapped here, near to far: writable memory views, or read-only
        ones without `write`."""

    @property
    def ended(self) -> bool:
        """Whether it has ended with its owner, as `with_owner` asks for: nothing is moved any
        more."""

    def populate(self, *, wait: bool = False) -> None:
        """Make the owner's media present in this process, so that the first moves do not stop for
        page faults; without `wait`, in the background. Memory that nobody has touched yet is
        allocated by this; of a file only what is in memory already is mapped, and nothing is read
        from its disk."""

    def close(self) -> None:
        """Refuse new work and wait for what is under way."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class MoveJob:
    """A batch under way. None of its members raises for what became of a block."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the memory is no longer touched; false when `timeout` seconds passed
        first."""

    @property
    def done(self) -> bool:
        """Whether the memory is no longer touched."""

    @property
    def checksums(self) -> list[builtins.bytes | None]:
        """The 16-byte checksum of each part that was moved; None for those that failed."""

    @property
    def results(self) -> list[bool]:
        """Whether each part was moved, and verified where it had a checksum."""

    @property
    def whole(self) -> bool:
        """Whether all of it has ended, and every part was moved, and verified where it had a
        checksum: mostly nobody need look at each."""

    @property
    def corrupt(self) -> list[bool]:
        """Whether each part has another checksum than it should. One that is false here and in
        `results` was not moved: nothing is known about its bytes."""

    @property
    def bytes(self) -> int:
        """Bytes of the job, moved or not."""

    @property
    def seconds(self) -> float:
        """Seconds from the call, or with `aside` from when it was begun, to the end of the last
        lane; so far, while it is under way."""

    @property
    def refused(self) -> bool:
        """Whether a job with `aside` was refused: nothing was moved, and `error` says why."""

    @property
    def error(self) -> str | None:
        """Why something failed, for a log line; None when nothing did."""

@type_check_only
class _TransferStats(TypedDict):
    requests: int
    bytes: int
    frames: int
    posts: int
    work_requests: int
    peers: int
    connections: int
    refused_greetings: int
    refused_grants: int
    malformed_frames: int

@final
class TransferEngine:
    """One process's part in moving bytes between processes and hosts. A context manager: leaving
    it closes it.

    `listen` is where peers connect to, "127.0.0.1:0" unless given; None: nobody can. The options
    are those of docs/transfer.md.

    Raises ConfigError for wrong options, and Error where it cannot listen.
    """

    def __new__(
        cls,
        listen: str | None = ...,
        *,
        token: str | bytes | None = None,
        tls_certificate: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_name: str | None = None,
        allow_unauthenticated: bool = False,
        streams: int = 2,
        slice_size: int | str = "512KiB",
        tail_merge: int | str = "64KiB",
        watermark: int = 4,
        window: int = 8,
        local: bool = True,
        rdma: Iterable[str] | None = None,
        checksum: bool = False,
        retries: int = 4,
        timeout: float | str = "5s",
        connections_max: int = 1024,
    ) -> Self: ...
    @property
    def address(self) -> str | None:
        """Where peers connect to; None where nobody can."""

    def register(self, buffers: _Buffers) -> Registered:
        """Let batches use memory of this process. `buffers` is as in put; each range is
        registered once at a time. The objects are kept as long as it is."""

    def publish(
        self,
        name: str | bytes,
        buffers: _Buffers,
        rights: _Rights | None = None,
        lasts: float | None = None,
    ) -> Published:
        """Let peers use memory of this process under a name, one buffer after the other as one
        range, for `lasts` seconds or until it is closed. `rights` is what they may do: "read",
        unless given, "write" or "both"."""

    def grant(
        self, buffers: _Buffers, rights: _Rights | None = None, lasts: float | None = None
    ) -> Published:
        """As `publish`, under a name that nobody can guess: who is told it has the right."""

    def open(self, address: str, name: str | bytes) -> TransferRemote:
        """Open what the engine at `address` has published under a name.

        Raises Error where nobody answers there, or nothing is published under it.
        """

    def submit(
        self,
        requests: Iterable[_Request] | None = None,
        *,
        timeout: float = 30.0,
        priority: _Priority | None = None,
        callback: Callable[[TransferTask], object] | None = None,
        op: _Op | Iterable[_Op] = ...,
        local: _Numbers = ...,
        remote: TransferRemote | Iterable[TransferRemote] = ...,
        offset: _Numbers = ...,
        length: _Numbers = ...,
    ) -> TransferTask:
        """Move bytes; answers at once. `requests` is a sequence of (op, local, remote, offset,
        length): "read" or "write", an address in registered memory or an object that begins
        there, a Remote, where in it, bytes. Or each of them is a column: one value for all
        requests, or an array with one for each, `submit(op="read", local=…, remote=…, offset=…,
        length=…)`.

        What is not done after `timeout` seconds has failed. `priority` is "urgent", "normal",
        unless given, or "background". `callback(task)` is called when it is over, in a thread of
        the engine's.
        """

    def run(
        self,
        requests: Iterable[_Request] | None = None,
        *,
        timeout: float = 30.0,
        priority: _Priority | None = None,
        op: _Op | Iterable[_Op] = ...,
        local: _Numbers = ...,
        remote: TransferRemote | Iterable[TransferRemote] = ...,
        offset: _Numbers = ...,
        length: _Numbers = ...,
    ) -> TransferTask:
        """Move bytes, and wait until it is over; the arguments are those of `submit`. On Ctrl-C
        it is cancelled."""

    def cancel(self, task: TransferTask) -> None:
        """End a task before it is over, and wait for that: nothing touches its memory then. What
        was done stays done."""

    def stats(self) -> _TransferStats:
        """What it has done so far."""

    @property
    def closed(self) -> bool:
        """Whether it was closed, and calls are refused."""

    def close(self) -> None:
        """End all that is under way, of this engine and of others with it, and wait until
        callbacks have been told. Closing again waits for the first."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Registered:
    """Memory that batches may use, until it is closed or this object is dropped; a batch that uses
    it then keeps it until it is over. A context manager: leaving it closes it."""

    def close(self) -> None:
        """Let no more batches use it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Published:
    """Memory that peers may use under a name, until it is closed or this object is dropped, or its
    time is over. A context manager: leaving it closes it."""

    @property
    def name(self) -> bytes:
        """What peers open it by."""

    def close(self) -> None:
        """Withdraw it: when this returns no peer touches the memory any more."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class TransferRemote:
    """Memory of a peer, as it was opened. The peer is told when it is closed, or when this object
    and the batches that use it are gone."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""

    @property
    def rights(self) -> Literal["read", "write", "both", "none"]:
        """What it allows: "read", "write" or "both"."""

    @property
    def lasts(self) -> float | None:
        """How many seconds it lasted when it was opened; None: until it is withdrawn."""

    @property
    def address(self) -> str:
        """The address of its peer."""

    def close(self) -> None:
        """Let it go. Batches that use it go on."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class TransferTask:
    """A batch under way. Dropping it does not cancel it, and registered memory stays alive until
    it is no longer touched."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing of it moves any more, and answer whether all requests are done;
        `errors` says which are not. Works after `close`.

        Raises TimeoutError after `timeout` seconds; the task goes on until it is over by its own
        time.
        """

    def __await__(self) -> Generator[Any, None, bool]:
        """`await task` in a coroutine of asyncio: as `wait`. What cancels the coroutine does not
        cancel the task."""

    @property
    def done(self) -> bool:
        """Whether nothing of it moves any more."""

    def poll(self) -> bool | None:
        """What `wait` would answer; None while something moves."""

    def status(self, index: int) -> Literal["pending", "done"] | _Fault:
        """What request `index` has come to: "pending", "done", or why it failed. Also while others
        are under way."""

    @property
    def statuses(self) -> bytes:
        """A byte a request: 0 pending, 1 done, others as `STATUSES` of kvdepot.transfer names
        them."""

    @property
    def errors(self) -> dict[int, _Fault]:
        """Why requests failed, by their positions."""

    def add_done_callback(self, callback: Callable[[TransferTask], object]) -> None:
        """Call `callback(task)` when it is over, in a thread of the engine's for that; at once,
        and here, where it is. What it raises goes to `sys.unraisablehook`."""

    def __len__(self) -> int: ...

@final
class LlamaLayout:
    """Where the rows of each token lie in a sequence state of llama.cpp, of so many tokens."""

    @staticmethod
    def read(state: Buffer) -> LlamaLayout:
        """That of a whole state, as llama_state_seq_get_data has written it.

        Raises InputError for what is torn, and for what cannot be cut: positions other than 0, 1, 2
        and so on, several streams, M-RoPE.
        """

    def resized(self, tokens: int, rest_bytes: int = 0) -> LlamaLayout:
        """That of a state of another number of tokens of the same context, with a rest of so many
        bytes."""

    def gather(self, state: Buffer, first: int, end: int, piece: Buffer) -> None:
        """Take the rows of tokens from `first` to behind the last, `end`, out of a state into
        `piece`, `token_bytes` for each. Other threads run meanwhile."""

    def scatter(self, piece: Buffer, first: int, end: int, state: Buffer) -> None:
        """Put the rows of tokens from `first` to behind the last, `end`, into a state."""

    def write_head(self, state: Buffer) -> None:
        """Write all of a state that is neither rows nor rest."""

    @property
    def tokens(self) -> int:
        """Its tokens."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's rows."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""

    @property
    def rest_bytes(self) -> int:
        """Bytes at the state's end that do not grow by appending: a window, a recurrent state."""

    @property
    def tables(self) -> list[tuple[int, int, int]]:
        """Each table of rows in the state's order: where it begins, bytes that lie together of a
        token, and how many of these, each behind those of all tokens: 1 but for transposed
        values."""

    @property
    def shape(self) -> str:
        """What states of one context have in common: element types, rows, their order."""

@final
class SessionFound:
    """A session that a prompt begins with."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def tokens(self) -> list[int]:
        """Its tokens: what is rendered behind them is to be tokenized alone."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the rendered text that the tokens stand for; 0 where that is not known."""

    @property
    def context_tokens(self) -> int:
        """Tokens that its engine had room for."""

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """Its pieces: first token, the one behind the last, bytes."""

    @property
    def objects(self) -> list[tuple[str, int]]:
        """Its objects: name and bytes."""

@type_check_only
class _Saved(TypedDict):
    id: str
    cached_tokens: int
    cache_write_tokens: int
    bytes_written: int

@type_check_only
class _Restored(TypedDict):
    cached_tokens: int
    cache_write_tokens: int
    whole: bool

@type_check_only
class _FileSession(TypedDict):
    id: str
    tokens: int
    text_bytes: int
    bytes: int
    created: int
    reason: str
    note: str
    bad: bool

@type_check_only
class _Session(_FileSession):
    hits: int
    used: int

@final
class SessionFile:
    """A session's file that is open."""

    def __new__(cls, path: str | os.PathLike[str], *, direct: bool = True) -> Self:
        """Open one: what it says of itself is read, and verified. Its bytes are when they come
        back."""

    @property
    def id(self) -> str:
        """Its name: the same of every copy."""

    @property
    def path(self) -> str:
        """Its path."""

    @property
    def tokens(self) -> list[int]:
        """Its tokens."""

    @property
    def text(self) -> builtins.bytes:
        """The rendered text that the tokens stand for; empty where that is not known."""

    @property
    def model(self) -> str:
        """The model whose state it is."""

    @property
    def note(self) -> str:
        """What was noted."""

    @property
    def context_tokens(self) -> int:
        """Tokens that its engine had room for."""

    @property
    def created(self) -> int:
        """When it was saved, in Unix seconds."""

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """Its pieces: first token, the one behind the last, bytes. None of a state that is not
        cut."""

    @property
    def objects(self) -> list[tuple[str, int]]:
        """Its objects: name and bytes."""

    @property
    def bytes(self) -> int:
        """Bytes of the file."""

    def restore(self, rows: Any = None, objects: Any = None) -> _Restored:
        """Bring it back into a buffer for each piece, or one Spans, and one for each object, in
        their order. Only rows of `cached_tokens` tokens have come, and objects only if all is
        `whole`."""

    def read(self, member: int, take: Callable[[builtins.bytes], Any]) -> None:
        """Hand a member (its number: pieces before objects) to `take`, bytes by bytes, each
        verified before: a state that is longer than memory comes back so."""

    def verify(self) -> list[str]:
        """Read all of it; what does not verify."""

    def copy_to(self, path: str | os.PathLike[str]) -> int:
        """Copy it, verified on the way; bytes of the copy, which is the same session."""

@final
class SessionFiles:
    """A directory of sessions of one model, each a file of its own, that processes share."""

    def __new__(
        cls,
        path: str | os.PathLike[str],
        *,
        model: str | bytes | int,
        dtype: str | bytes | int,
        piece_tokens: int,
        capacity: int | str,
        weights: str | bytes | int | None = None,
        layout: str | bytes | int | None = None,
        world: str | bytes | int | None = None,
        hash: str | bytes | int | None = None,
        salt: str | bytes | int | None = None,
        evicts: bool = True,
        direct: bool = True,
        durability: str = "process",
    ) -> Self:
        """A directory, which is made where there is none; what differs in a field is in it, and
        never found. `capacity` is what all its files have together, at most: with `evicts` those
        that were not used for the longest time go for new ones. Files are written past the page
        cache where `direct` and the file system say so; `durability` is "process" or "power"."""

    def save(
        self,
        tokens: Iterable[int],
        rows: Any = None,
        *,
        objects: dict[str, Any] | None = None,
        text: bytes | None = None,
        reason: str = "asked",
        context_tokens: int = 0,
        note: str = "",
        created: int | None = None,
        predicted: int | None = None,
    ) -> _Saved:
        """Save a state as one file, in place of those of the same tokens. `rows` are a buffer for
        each run of `piece_tokens` tokens, or one Spans; none for a state that is not cut.
        `objects` are by name a buffer, or an iterator of bytes whose length nobody knows. With
        `predicted` there are that many bytes of rows and objects, or the save fails. Raises Error
        where something goes wrong: then nothing is left of it."""

    def lookup(self, tokens: Iterable[int], most: int = 4) -> list[SessionFile]:
        """Sessions whose tokens these begin with, the longest first, open; `most` of them."""

    def lookup_text(self, text: bytes, most: int = 4) -> list[SessionFile]:
        """The same by rendered text."""

    def restore(self, file: SessionFile, rows: Any = None, objects: Any = None) -> _Restored:
        """As SessionFile.restore. A session that does not verify is not found any more, and one
        that does was used now."""

    def list(self) -> builtins.list[_FileSession]:
        """All sessions, the newest first, as dictionaries."""

    def refresh(self) -> None:
        """Look which sessions there are: others may have saved or removed some."""

    def remove(self, session: str) -> None:
        """Remove a session; whoever has it open reads it still."""

    def verify(self, session: str) -> builtins.list[str]:
        """Read all of a session; what does not verify."""

    def export(self, session: str, path: str | os.PathLike[str]) -> int:
        """Copy a session to a file, verified on the way; its bytes."""

    def import_file(self, path: str | os.PathLike[str]) -> str:
        """Copy a session's file here, verified on the way; the session's name."""

@final
class Sessions:
    """The sessions of a depot for one model: what differs in a field is never found.
    `piece_tokens` tokens' rows are one piece; `layout` names whatever else a state depends on,
    such as element types, tokenizer and positions."""

    def __new__(
        cls,
        depot: Depot,
        *,
        model: str | bytes | int,
        dtype: str | bytes | int,
        piece_tokens: int,
        weights: str | bytes | int | None = None,
        layout: str | bytes | int | None = None,
        world: str | bytes | int | None = None,
        hash: str | bytes | int | None = None,
        salt: str | bytes | int | None = None,
    ) -> Self: ...
    def save(
        self,
        tokens: Iterable[int],
        rows: Callable[[list[tuple[int, int]]], Any],
        *,
        text: bytes | None = None,
        reason: str = "asked",
        context_tokens: int = 0,
        objects: dict[str, Any] | None = None,
        note: str = "",
        created: int | None = None,
        exact: bool = False,
    ) -> _Saved:
        """Save a state. `rows` is called once, with the runs of tokens whose rows are not there yet
        as (first, behind the last), and answers with a buffer for each, or one Spans; they are read
        until this returns. `objects` are parts that do not grow with the tokens, by name. With
        `exact` all rows are asked for, and those that differ from what is there are kept beside it.

        Raises Error where something found no room: then there is no such session."""

    def save_chunks(
        self,
        tokens: Iterable[int],
        size: int | Callable[[int, int], int],
        chunks: Callable[[list[tuple[int, int]]], Iterable[Any]],
        *,
        text: bytes | None = None,
        reason: str = "asked",
        context_tokens: int = 0,
        objects: dict[str, Any] | None = None,
        note: str = "",
        created: int | None = None,
    ) -> _Saved:
        """Save a state whose rows are written chunk by chunk: `chunks` is called once, with the
        runs of tokens whose rows are not there yet, and answers with buffers, one after another,
        which may be cut anywhere. `size` is the bytes of each token, or tells those of a run
        (first, behind the last). Two pieces are kept in memory at most. The other arguments are
        those of `save`.

        Raises Error where the chunks have more bytes than that, or fewer: then nothing was
        saved."""

    def stream(self, tokens: Iterable[int] | None = None) -> SessionStream:
        """Begin a session whose length nobody knows yet, of which these tokens are known."""

    def sweep(self) -> int:
        """Remove all pieces and objects that no session names: what saves have left that were
        killed or have failed. Nobody may save meanwhile. How many have gone."""

    def lookup(self, tokens: Iterable[int], most: int = 4) -> list[SessionFound]:
        """Sessions whose tokens these begin with, the longest first, of which all is there; `most`
        of them."""

    def lookup_text(self, text: bytes, most: int = 4) -> list[SessionFound]:
        """The same by rendered text."""

    def prefix(self, tokens: Iterable[int]) -> int:
        """How many of these tokens have their rows here, from the first on, whatever session they
        are of."""

    def restore(self, found: SessionFound, rows: Any, objects: Any | None = None) -> _Restored:
        """Bring a session back into a buffer for each of its pieces, or one Spans, and one for each
        of its objects, in their order. A session of which not all has come is not found any more;
        the next that `lookup` has found may be."""

    def list(self) -> builtins.list[_Session]:
        """All sessions, the newest first."""

    def refresh(self) -> None:
        """Look which sessions there are: others may have saved or removed some."""

    def remove(self, session: str) -> None:
        """Remove a session, and what no other one here is made of."""

    def trim(self, most: int | str, keep: builtins.list[str] | None = None) -> builtins.list[str]:
        """Remove sessions until all have `most` bytes, each block counted once: those first that
        save the least compute a byte. Those of `keep` stay. The names of those that went."""

    def verify(self, session: str) -> builtins.list[str]:
        """Read all of a session; what is not there or does not verify."""

    def export(self, session: str, path: str | os.PathLike[str], *, ds4: bool = False) -> int:
        """Write a session to one file, or with `ds4` as the file of ds4 that it was; its bytes."""

    def import_file(self, path: str | os.PathLike[str], *, ds4: bool = False) -> str:
        """Save what `export` has written, or with `ds4` a file of ds4's; the session's name."""

    def text(self, session: str) -> bytes:
        """A session's rendered text."""

@final
class SessionStream:
    """A session that is written while nobody knows yet how long it gets. As a context manager it
    ends with `commit`, or leaves nothing."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the beginning whose rows are there: rows are wanted from this one on."""

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""

    @property
    def room(self) -> int:
        """Tokens up to the end of the piece that is being filled."""

    @property
    def bytes_written(self) -> int:
        """Bytes that were stored so far, or are on their way."""

    def append(self, tokens: Iterable[int], rows: Any) -> None:
        """Add tokens and their rows, in their order, in as many buffers as there are. A chunk that
        goes beyond `room` needs as many bytes for each token; one that does not may be laid out in
        any way that is read again. The memory is the caller's again when this returns.

        Raises InputError, and the stream goes on; after any other error nothing can be added."""

    def commit(
        self,
        *,
        text: bytes | None = None,
        reason: str = "asked",
        context_tokens: int = 0,
        objects: dict[str, Any] | None = None,
        note: str = "",
        created: int | None = None,
    ) -> _Saved:
        """Make it a session; the arguments are those of `Sessions.save`.

        Raises InputError, and the stream goes on; after any other error there is no such session,
        and nothing is left of it."""

    def abort(self) -> None:
        """End it without a session, and remove what it has stored and no session names."""

    def __enter__(self) -> Self: ...
    def __exit__(self, _kind: object, _error: object, _trace: object) -> None: ...

@type_check_only
class _Step(TypedDict):
    copied: int
    left: int
    full: bool

@type_check_only
class _Progress(TypedDict):
    bytes: int
    copied: int
    written: int
    over: bool

@final
class SessionSaver:
    """Saves sessions on a thread of its own while the engine goes on. `memory` bounds the bytes
    that all snapshots have, `pace` the bytes a second that are written. As a context manager it
    finishes what was copied, or cancels all where an exception has ended the block."""

    def __new__(
        cls, sessions: Sessions, *, memory: int | str, pace: int | str | None = None
    ) -> Self: ...
    @property
    def memory_used(self) -> int:
        """Bytes that snapshots have in memory now."""

    def begin(
        self,
        tokens: Iterable[int],
        rows: Callable[[list[tuple[int, int]]], Any],
        *,
        whole: bool = False,
        within: float = 0.0,
        policy: SessionPolicy | None = None,
        save: int | None = None,
        text: bytes | None = None,
        reason: str = "asked",
        context_tokens: int = 0,
        objects: dict[str, Any] | None = None,
        note: str = "",
        created: int | None = None,
    ) -> SessionSnapshot:
        """Begin a save. `rows` is called once, as `Sessions.save` does; what it answers with stays
        as it is until nothing is `left`; `objects` are copied now. The snapshot takes room piece by
        piece, as others are written, or with `whole` all of it at once; for what it takes now it
        waits for `within` seconds. `policy` is told the end of `save`, which it has granted. The
        other arguments are those of `Sessions.save`.

        Raises Error where there is no room in time."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait, without a pace, until all saves have ended whose snapshot is taken.

        Raises TimeoutError after `timeout` seconds; they go on."""

    def close(self, timeout: float | None = None) -> None:
        """End: saves whose snapshot is taken are finished, without a pace, and others are
        cancelled.

        Raises TimeoutError after `timeout` seconds; it goes on, and may be called again."""

    def cancel(self) -> None:
        """End now: what has not ended is cancelled, and nothing is left of it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, _error: object, _trace: object) -> None: ...

@final
class SessionSnapshot:
    """A snapshot that is being taken: its rows are copied in slices, between the engine's steps.
    Dropped before all was, its save is cancelled."""

    @property
    def left(self) -> int:
        """Bytes that are left to be copied. At 0 the engine's memory is its own again."""

    def step(self, *, bytes: int | None = None, seconds: float | None = None) -> _Step:
        """Copy a slice, of so many bytes or for so many seconds, and never wait: a dictionary with
        `copied`, `left`, and `full` where it has ended for lack of room.

        Raises Error where the save has failed meanwhile."""

    def finish(self, timeout: float | None = None) -> None:
        """Copy all that is left, and wait for room where there is none.

        Raises TimeoutError after `timeout` seconds; it goes on then."""

    def progress(self) -> _Progress:
        """How far the save has come: `bytes` that were not there, `copied`, `written`, `over`."""

    def wait(self, timeout: float | None = None) -> _Saved:
        """Wait for the end of the save; what `Sessions.save` answers.

        Raises Error where it has failed, TimeoutError after `timeout` seconds; it goes on then."""

@type_check_only
class _Entry(TypedDict):
    id: int
    parent: int | None
    reason: str
    tokens: int
    bytes: int
    hits: int
    used: float
    pins: int

@final
class SessionCatalogue:
    """The checkpoints on disk, by numbers of the caller's, and which of them go where it is short:
    what saves the least compute a byte, with decay; superseded continued ones first, pinned ones
    never. It removes nothing by itself."""

    def __new__(cls) -> Self: ...
    def insert(
        self,
        id: int,
        *,
        tokens: int,
        bytes: int,
        reason: str = "continued",
        parent: int | None = None,
        hits: int = 0,
        used: float | None = None,
    ) -> None:
        """A checkpoint is on disk; one of the same number is replaced. `parent` is the longest one
        there whose tokens this one begins with, `bytes` are those that its removal gives back, and
        `used` is when it was last saved or restored, in seconds since 1970."""

    def remove(self, id: int) -> bool:
        """A checkpoint was removed from disk: whether it was there."""

    def hit(self, id: int, *, at: float | None = None) -> bool:
        """A conversation was restored from it, and it stays: whether it is there."""

    def pin(self, id: int) -> bool:
        """It stays until it is unpinned as often: whether it is there."""

    def unpin(self, id: int) -> bool:
        """Take one pin back: whether there was one."""

    def set_other(self, id: int, bytes: int) -> None:
        """Something else takes so many bytes on disk, by a number of the caller's: a save under
        way, an orphan. With 0 bytes it is gone."""

    @property
    def bytes(self) -> int:
        """Bytes of everything on disk."""

    def entries(self) -> list[_Entry]:
        """All checkpoints, by their numbers."""

    def make_room(
        self, incoming: int, disk_space: int | str, *, at: float | None = None
    ) -> list[int] | None:
        """What to remove so that everything on disk and `incoming` bytes fit into `disk_space`, the
        first to go first; None where that cannot be: then nothing should go, nor come."""

@final
class SessionPolicy:
    """Says when a checkpoint is due: the engine tells what happens, in tokens. With ds4's names
    and defaults. Sizes may be texts such as "64GiB"; budgets are of bytes written, none unless
    given. `prefixes` is for engines that save and restore the first tokens of a state, `whole` for
    those that write all of it each time."""

    def __new__(
        cls,
        *,
        disk_space: int | str | None = None,
        min_tokens: int | None = None,
        cold_max_tokens: int | None = None,
        continued_interval_tokens: int | None = None,
        boundary_trim_tokens: int | None = None,
        boundary_align_tokens: int | None = None,
        write_budget_hour: int | str | None = None,
        write_budget_day: int | str | None = None,
        token_bytes: int | None = None,
        fixed_bytes: int | str | None = None,
        prefixes: bool = False,
        whole: bool = False,
    ) -> Self: ...
    def start(
        self,
        tokens: int,
        *,
        restored: int | None = None,
        live: int | None = None,
        anchor: int | None = None,
        slot: int = 0,
    ) -> None:
        """A prompt of so many tokens starts, of which so many were `restored`, or stay as they are
        (`live`). `anchor` are those before the last user's word that comes before the first
        answer."""

    def next_stop(self, *, slot: int = 0) -> int | None:
        """The count of tokens at which prefill should next stop and tell; None for none."""

    def prefill(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """Prefill has come so far. What is due: None, or a dictionary with `save`, `tokens`,
        `base`, `reason` and `bytes`, or with `declined`."""

    def decode(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """The same of decoding."""

    def switch(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """Another conversation is about to take the place of these tokens."""

    def shutdown(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """The engine ends with these tokens."""

    def saved(self, save: int, bytes: int, *, at: float | None = None) -> None:
        """A save that was due has written so many bytes."""

    def failed(self, save: int, bytes: int = 0, *, at: float | None = None) -> None:
        """It has failed, and written so many bytes before."""

    def lost(self, tokens: int, *, slot: int = 0) -> None:
        """What was saved of a slot behind so many tokens is gone."""

    def recall(self, bytes: int, *, at: float) -> None:
        """Count bytes that were written before this policy was made: a program that has started
        again tells what its catalogue, or its store, shows of the last day."""

    def bytes_left(self, *, at: float | None = None) -> int | None:
        """Bytes that may be written now, by both budgets and beside the saves under way; None
        without a budget."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, by the names that they were given by: sizes in bytes, None for no
        budget."""

    @property
    def write_amplification(self) -> float | None:
        """Bytes that were written, over those of new tokens; None before there are any."""
