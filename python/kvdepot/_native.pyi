"""Compiled part of kvdepot.

Time-outs are in seconds; None waits without a limit. Sizes are in bytes: a number, or a text with a
unit such as "64GiB". Calls raise `ClosedError` after `close`, and in a forked child. Calls that
wait release the interpreter lock and react to Ctrl-C within 50 ms.

Examples run after `import kvdepot`. The example of a method continues that of its class.
"""

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
"""Keys in prompt order: 32-byte values, or one contiguous buffer of them."""

_Buffers: TypeAlias = Iterable[Buffer | _DLPack | _CudaArray | tuple[int, int]] | Spans
"""Contiguous memory per key, or one `Spans`.

An object with the buffer protocol or DLPack, an array on a CUDA device, or an (address, length)
pair in bytes, whose memory the caller keeps mapped."""

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
"""(op, local, remote, offset, length).

`local` is an address in registered memory, or an object that begins there; `offset` is the position
in the remote memory, in bytes."""

_Numbers: TypeAlias = int | Buffer | Iterable[int]
"""One number for all requests, or one per request: 64-bit integers in an array, or a sequence."""

class Error(Exception):
    """Base class of all errors that kvdepot raises."""

class ConfigError(Error, ValueError):
    """An option that does not exist, or a value that the option does not accept."""

class InputError(Error, ValueError):
    """A wrong argument. No byte was copied."""

class LockedError(Error):
    """Another process, or another depot of this process, owns the arena.

    `path` is the arena; `pid` and `host` identify the process that owns it.
    """

    pid: int
    host: str
    path: str

class FullError(Error):
    """A strict reservation failed for lack of space."""

class CorruptError(Error):
    """The medium does not contain a sound arena."""

class ClosedError(Error):
    """The depot was closed, or belongs to the process that this one was forked from."""

class TimeoutError(Error, builtins.TimeoutError):
    """A wait timed out. The operation itself continues."""

def open(pipeline: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> Depot:
    """Opens a depot.

    Three forms of `pipeline` select the depot: the names of tiers, a configuration file, or the
    socket of a depot that another process of this host serves.

    Args:
        pipeline: Tiers, first to last, such as "Cache|Dax". Or the path of a YAML or JSON file: a
            path object, or a text with a `/` or the ending .yaml, .yml or .json. Or "unix:" and the
            path of a socket, such as "unix:/run/kvdepot.sock".
        settings: Options by their names, with a dictionary per tier (docs/configuration.md). They
            override the options of a file. For a socket, only `lanes` and `timeout` are allowed.

    Returns:
        The depot. Close it, or use it as a context manager.

    Raises:
        ConfigError: An option is unknown, or its value is not allowed.
        LockedError: Another process still owns the arena after `lock_wait`, or another depot of
            this process owns it.
        CorruptError: The medium contains something other than a sound arena.
        Error: A system call failed, or the server at the socket does not respond.

    Example:
        >>> settings = {"cache": {"capacity": "16MiB"}, "socket": "off"}
        >>> with kvdepot.open("Cache", settings) as depot:
        ...     print(depot.description)
        Cache 16 MiB
    """

def check(
    pipeline: str | os.PathLike[str],
    settings: Mapping[str, Any] | None = None,
    *,
    options_only: bool = False,
) -> None:
    """Checks a pipeline and its settings without opening the depot.

    The arguments are those of `open`. Media that other processes have open are not checked, and a
    socket is not contacted.

    Args:
        pipeline: Tiers, a configuration file, or a socket, as in `open`.
        settings: Options by their names, as in `open`.
        options_only: Check only names and values of options, for example for another machine.

    Raises:
        ConfigError: An option is unknown, or its value is not allowed, here or on this machine.
        CorruptError: The medium contains something other than a sound arena.

    Example:
        >>> kvdepot.check("Cache", {"cache": {"capacity": "16MiB"}})
        >>> kvdepot.check("Cache", {"cache": {"capacity": "much"}})
        Traceback (most recent call last):
        kvdepot.ConfigError: ...
    """

def keys(tokens: Iterable[int], block_tokens: int, salt: str | bytes | None = None) -> list[bytes]:
    """Returns the keys of a prompt: one per full block of tokens.

    A key is the SHA-256 of the previous key and the block's tokens, as little-endian 32-bit
    integers. The first block uses the SHA-256 of "kvdepot keys 1" and the salt as its previous key.
    Equal keys therefore mean equal tokens from the first one on.

    Args:
        tokens: Token ids, each from 0 to 2^32 - 1: a sequence, an array or a tensor of shape (n,).
        block_tokens: Tokens per block, at least 1.
        salt: Names everything else that the KV bytes depend on, such as an image, an adapter or a
            tenant. A text is encoded in UTF-8. Default: empty.

    Returns:
        `n // block_tokens` keys of 32 bytes, in prompt order.

    Raises:
        InputError: A token is not an integer from 0 to 2^32 - 1, or `block_tokens` is less than 1.

    Example:
        >>> keys = kvdepot.keys(range(1000), block_tokens=256)
        >>> len(keys), len(keys[0])
        (3, 32)
        >>> kvdepot.keys(range(512), block_tokens=256) == keys[:2]
        True
    """

def attach(
    socket: str | os.PathLike[str],
    lanes: int | None = None,
    write: bool = True,
    with_owner: bool = False,
) -> Mover:
    """Attaches to the depot that listens at a socket, to copy blocks in this process.

    The depot may be open in another process of this host or in this one.

    Args:
        socket: Path of the socket (`Depot.socket`), with or without "unix:" before it.
        lanes: Number of copy threads, 1 to 256. Default: the server's setting, or else one per CPU,
            at most 4.
        write: Allow stores. With False the mover can only load and verify.
        with_owner: Release the media when the server ends. With False, a mover that outlives the
            server prevents the next owner from allocating.

    Returns:
        The mover. Close it, or use it as a context manager.

    Raises:
        InputError: `lanes` is out of range.
        Error: The server at `socket` does not respond, or rejects the connection.

    Example:
        >>> settings = {"cache": {"capacity": "16MiB"}, "socket": "depot.sock"}
        >>> with kvdepot.open("Cache", settings) as depot:
        ...     with kvdepot.attach(depot.socket, lanes=1) as mover:
        ...         print(len(mover.media))
        1
    """

def main(argv: Iterable[str]) -> int:
    """Runs the command `kvdepot`.

    Args:
        argv: The program's name, then its arguments.

    Returns:
        The exit status: 0 on success, 1 if the command found problems, 2 on errors
        (docs/errors.md).

    Example:
        >>> from kvdepot._native import main
        >>> main(["kvdepot", "--no-such-option"])
        2
    """

def _cache_directory() -> str: ...
def _close_all() -> None: ...
def _duration(text: str) -> float | None: ...
def _options_of_file(
    path: str | os.PathLike[str], beside: Mapping[str, Any] | None = None
) -> tuple[str, bool]: ...
def _size(text: str) -> int | None: ...

@type_check_only
class _Opening(TypedDict):
    blocks: int  # served again
    damaged: int  # records that failed verification
    superseded: int  # older records of stored keys
    created: bool  # the arena is new

@type_check_only
class _Device(TypedDict):
    tier: str  # name of the tier
    path: str  # device or file
    state: Literal["serving", "draining", "failed"]
    capacity_bytes: int  # size of the arena
    data_bytes: int  # space for data
    used_bytes: int  # allocated space
    live_bytes: int  # payload of published blocks
    blocks: int  # published blocks
    pinned_blocks: int  # blocks that readers hold
    reserved_blocks: int  # blocks that are being written
    evicted_blocks: int  # since the device was opened
    lost_bytes: int  # space excluded after medium errors
    orphans: list[int]  # PIDs of workers of the previous owner that may still write

@type_check_only
class _Drained(TypedDict):
    moved_blocks: int
    moved_bytes: int
    evicted_blocks: int

@type_check_only
class _Tier(TypedDict):
    capacity_bytes: int  # space for data
    used_bytes: int  # capacity minus free space
    live_bytes: int  # payload of published blocks; Posix and Ds3fs: whole files
    free_bytes: int  # not allocated
    largest_free_bytes: int  # longest free extent
    blocks: int | None  # published blocks; None if unknown: Posix and Ds3fs
    blocks_max: int  # most blocks that the record table can contain
    pinned_blocks: int  # blocks that readers hold
    reserved_blocks: int  # blocks that are being written
    evicted_blocks: int  # since the depot was opened
    evicted_bytes: int  # payload, or whole files
    corrupt_blocks: int  # failed checksum verification; each was a miss
    lost_bytes: int  # space excluded after medium errors
    full: int  # reservations that failed for lack of space
    stored_blocks: int  # published since the depot was opened
    stored_bytes: int  # payload of these blocks
    timeouts: int  # requests that timed out
    circuit_open: int  # times that the circuit breaker opened
    requests: int  # to an object store or other hosts
    retries: int  # repeated requests
    request_errors: dict[str, int]  # failed requests, by cause
    write_back_deferred_blocks: int  # not written back, because of admission or size
    grouped_blocks: int  # blocks that are evicted as a group
    evicted_groups: int  # groups evicted as a whole
    hit_blocks: int  # blocks that the tier served
    hit_bytes: int  # payload of these blocks
    put_move_ns: int  # copy time of puts, summed over batches
    get_move_ns: int  # copy time of gets, summed over batches

@type_check_only
class _Stats(TypedDict):
    tiers: dict[str, _Tier]  # by name, first to last
    devices: list[_Device]  # as `Depot.devices`
    pending_bytes: int  # the same as `write_back_bytes`
    dropped_blocks: int  # the same as `put_dropped_blocks`
    declined_blocks: int  # the same as `put_declined_blocks`
    put_tasks: int  # calls of put
    get_tasks: int  # calls of get
    prefetch_tasks: int  # calls of prefetch
    put_blocks: int  # keys of these calls
    get_blocks: int  # keys of these calls
    prefetch_blocks: int  # keys of these calls
    put_bytes: int  # payload of puts
    get_bytes: int  # payload that gets requested
    missed_blocks: int  # keys of gets and pins that no tier had
    coalesced_blocks: int  # keys of gets that waited for a load by another call
    inflight_load_blocks: int  # lookups, loads and promotions in progress in asynchronous tiers
    promoted_blocks: int  # copied to the first tier after hits in lower tiers
    promoted_bytes: int  # payload of these blocks
    put_acknowledged_blocks: int  # outcomes of puts: success
    put_full_blocks: int  # no space
    put_dropped_blocks: int  # skipped, for example because the write-back queue was full
    put_declined_blocks: int  # rejected by an admission policy; includes reservations
    put_corrupt_blocks: int  # failed verification during write-back
    reserve_present_blocks: int  # reservations of blocks that were stored already
    reserve_pending_blocks: int  # reservations of blocks that another call was writing
    write_back_bytes: int  # bytes in the write-back queue

@final
class Depot:
    """A pipeline of tiers that this process opened, or that another process serves.

    A context manager: leaving the block closes the depot.

    Example:
        >>> settings = {
        ...     "cache": {"capacity": "16MiB"},
        ...     "dax": {"path": "arena.kvd", "capacity": "16MiB"},
        ...     "socket": "depot.sock",
        ... }
        >>> depot = kvdepot.open("Cache|Dax", settings)
        >>> depot.tiers, depot.path.endswith("arena.kvd"), depot.connected, depot.closed
        (['Cache', 'Dax'], True, True, False)
        >>> ns = depot.namespace(model="Qwen/Qwen3-14B", dtype="bfloat16", block_tokens=256)
        >>> keys = kvdepot.keys(range(512), block_tokens=256)
        >>> ns.put(keys, [bytes(4096), bytes(4096)]).wait()
        [True, True]
    """

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
        """Returns the namespace of these fields: the set of blocks that may be exchanged.

        Namespaces that differ in any field share no block. Each field is a text, bytes or an
        integer.

        Args:
            model: Model ID, as the engine names it.
            dtype: Element type of the KV cache, as the engine names it.
            block_tokens: Tokens per block, at least 1.
            weights: Fingerprint of the weights and of their configuration.
            layout: Layout and geometry of the bytes of a block.
            group: Group of layers that the blocks belong to.
            world: Tensor and pipeline parallel sizes, without the rank.
            hash: Hash algorithm and seed of the keys.
            salt: Secret or label that separates tenants.

        Returns:
            The namespace. Equal fields have equal digests in every process.

        Raises:
            InputError: A required field is empty, or a field is not a text, bytes or an integer.
            Error: The description of the namespace cannot be written to a tier.

        Example:
            >>> ns = depot.namespace(model="Qwen/Qwen3-14B", dtype="bfloat16", block_tokens=256)
            >>> other = depot.namespace(model="Qwen/Qwen3-14B", dtype="bfloat16", block_tokens=128)
            >>> ns.digest == other.digest
            False
        """

    def stats(self) -> _Stats:
        """Returns counters since the depot was opened, and the fill of each tier.

        Returns:
            A dictionary. `tiers` maps the name of each tier to its counters, and `devices` is the
            list of `devices()`. docs/metrics.md defines the counters. A client without a server
            gets those of an empty depot.

        Example:
            >>> stats = depot.stats()
            >>> stats["put_tasks"], stats["put_blocks"], stats["put_bytes"]
            (1, 2, 8192)
            >>> stats["tiers"]["Cache"]["blocks"]
            2
        """

    def namespaces(self) -> list[tuple[bytes, str | None, int, int]]:
        """Returns the namespaces of the last tier.

        These are the namespaces that have had blocks in the tier since it was opened, and those
        with a description in its directory. For a directory (`Posix`, `Ds3fs`) the call reads the
        names of all files.

        Returns:
            Per namespace (digest, description, blocks, bytes): 16 bytes, its fields as a text or
            None if they are unknown, and the number and size of its blocks.

        Raises:
            Error: The directory of the last tier cannot be read.

        Example:
            >>> depot.drain()
            True
            >>> [(digest, _, blocks, size)] = depot.namespaces()
            >>> digest == ns.digest, blocks, size
            (True, 2, 8192)
        """

    def removed_blocks(self, limit: int = 65536) -> tuple[list[tuple[bytes, bytes, int]], bool]:
        """Returns the blocks that left all tiers since the previous call.

        Blocks leave by eviction, by removal, and if they are found corrupt. kvdepot records them
        from the first call on. For a directory (`Posix`, `Ds3fs`) it records only blocks that this
        process removed, evicted or found corrupt.

        Args:
            limit: Most blocks that kvdepot keeps between two calls, per tier (per device of a tier
                with several), at least 0.

        Returns:
            The blocks as (digest of the namespace, key, bytes), and True if the list is incomplete.

        Example:
            >>> depot.removed_blocks()
            ([], False)
            >>> ns.remove(keys[:1])
            1
            >>> depot.removed_blocks() == ([(ns.digest, keys[0], 4096)], False)
            True
        """

    def metrics_text(self) -> str:
        """Returns the counters in the Prometheus text format (docs/metrics.md).

        Returns:
            One line per metric, label set and value, with HELP and TYPE lines.

        Example:
            >>> 'kvdepot_blocks_total{op="put"} 2' in depot.metrics_text()
            True
        """

    def pending_bytes(self) -> int:
        """Returns the size of the write-back queue.

        Returns:
            Bytes of accepted puts that still have to be written to a lower tier.

        Example:
            >>> depot.drain(), depot.pending_bytes()
            (True, 0)
        """

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until the write-back queue has been written to the last tier.

        The call covers blocks that were committed before it.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            False if the wait timed out. For a served depot also False without a server, and once
            after blocks of this process were dropped, or lost with a server.

        Example:
            >>> depot.drain(timeout=10)
            True
        """

    def devices(self) -> list[_Device]:
        """Returns the media of the tiers `Dax` and `Nvme`, in the order of the configuration.

        Returns:
            A dictionary per medium: `path`, `state` ("serving", "draining" or "failed"), capacity
            and use in bytes and blocks. Empty without these tiers.

        Example:
            >>> [device] = depot.devices()
            >>> device["path"] == depot.path, device["state"]
            (True, 'serving')
        """

    def add_device(
        self, path: str | os.PathLike[str], capacity: int | str | None = None
    ) -> _Opening:
        """Adds a device or file to the first `Dax` or `Nvme` tier, and serves its blocks.

        A file that is missing is created. Adding a device again changes nothing, except that a
        drained device takes writes again. The configuration file stays unchanged.

        Args:
            path: Device or file of the tier, such as /dev/dax1.0.
            capacity: Size of the whole medium in bytes, or a text such as "64GiB". Default: the
                size of the existing arena or device.

        Returns:
            The recovery of the device, as `recovery` of a depot.

        Raises:
            InputError: The medium has another capacity, or the depot has the device under another
                name.
            LockedError: Another depot owns the device.
            CorruptError: The medium contains something other than a sound arena.

        Example:
            >>> depot.add_device("second.kvd", "16MiB")["created"]
            True
            >>> [device["state"] for device in depot.devices()]
            ['serving', 'serving']
        """

    def drain_device(
        self,
        path: str | os.PathLike[str],
        to: Literal["other_devices", "evict"] = "other_devices",
        timeout: float | None = ...,
    ) -> _Drained:
        """Stops writes to a device and moves its blocks to the other devices.

        Blocks without space there are evicted. Every block can be read until it has moved.

        Args:
            path: The device, as in `devices()`.
            to: "other_devices", or "evict" to evict all blocks of the device instead.
            timeout: Seconds to wait for blocks that are pinned or being written. Default: 10.

        Returns:
            A dictionary: `moved_blocks`, `moved_bytes` and `evicted_blocks`.

        Raises:
            TimeoutError: Blocks were pinned or being written for `timeout` seconds. The device
                takes writes again.
            InputError: `path` is not a device of this depot, or there is no other device.

        Example:
            >>> found = depot.add_device("second.kvd", "16MiB")
            >>> sorted(depot.drain_device("arena.kvd"))
            ['evicted_blocks', 'moved_blocks', 'moved_bytes']
            >>> [device["state"] for device in depot.devices()]
            ['draining', 'serving']
            >>> ns.prefix(keys)
            2
        """

    def remove_device(
        self,
        path: str | os.PathLike[str],
        force: bool = False,
        timeout: float | None = ...,
    ) -> None:
        """Releases a drained or empty device, so that another depot can open it.

        Args:
            path: The device, as in `devices()`.
            force: Evict the blocks of the device first.
            timeout: Seconds to wait, with `force`, for blocks that are pinned or being written.
                Default: 10.

        Raises:
            InputError: The device contains blocks, or is the last one of its tier.
            TimeoutError: With `force`, blocks were pinned or being written for `timeout` seconds.

        Example:
            >>> found = depot.add_device("second.kvd", "16MiB")
            >>> depot.remove_device("second.kvd")
            >>> len(depot.devices())
            1
        """

    def grow_device(self, path: str | os.PathLike[str], capacity: int | str) -> None:
        """Adds space to a device while it serves.

        The record table keeps its size, and so does the maximum number of blocks. Puts wait for the
        call.

        Args:
            path: The device, as in `devices()`.
            capacity: New size of the whole medium in bytes, or a text such as "64GiB".

        Raises:
            InputError: `capacity` is less than the present size, or more than the medium has.

        Example:
            >>> depot.grow_device("arena.kvd", "32MiB")
            >>> depot.devices()[0]["capacity_bytes"] == 32 << 20
            True
        """

    def prefault(self) -> None:
        """Allocates and maps the memory of the tiers, in the background.

        Otherwise the first calls take the page faults. Of a file, only pages that are in memory are
        mapped; the disk is not read.

        Raises:
            Error: The thread cannot be started.

        Example:
            >>> depot.prefault()
        """

    @property
    def closed(self) -> bool:
        """True after `close`: calls raise `ClosedError`.

        A depot whose server ended is not closed; see `connected`.
        """

    def close(self) -> None:
        """Closes the depot and releases its memory and media.

        The call rejects new calls, waits for calls in progress, and writes back the queue, for at
        most `close_timeout` in all. After that time it starts no further copy, and waits only for
        copies that a medium has begun; the log names their calls. A second `close` waits for the
        first. After Ctrl-C the close continues in the background, and the end of the process waits
        for it.

        Example:
            >>> depot.close()
            >>> depot.closed
            True
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    @property
    def connected(self) -> bool:
        """True if the depot can process calls.

        False for a served depot while its server does not respond, until the next server is found.
        """

    @property
    def socket(self) -> str | None:
        """Absolute path of the socket where other processes attach; None with `socket: off`."""

    @property
    def path(self) -> str | None:
        """Absolute path of the tier that survives the process; None if the depot has none."""

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers, first to last."""

    @property
    def description(self) -> str:
        """One line for a log: the tiers with their sizes and paths."""

    @property
    def recovery(self) -> _Opening:
        """Result of opening the arena.

        A dictionary: the number of `blocks` that are served again, of `damaged` and of `superseded`
        records, and `created`, which is True for a new arena.
        """

@final
class Namespace:
    """Blocks that share model, data type, layout and the other fields of `Depot.namespace`.

    Methods take the keys of a prompt in prompt order, first block first: a sequence of 32-byte
    values, or one contiguous buffer of them, such as an array of shape (n, 32). One buffer is
    faster. A block that is not stored is an outcome of its key rather than an error.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "off"})
        >>> ns = depot.namespace(model="Qwen/Qwen3-14B", dtype="bfloat16", block_tokens=256)
        >>> keys = kvdepot.keys(range(1000), block_tokens=256)  # three full blocks
        >>> buffers = [bytearray(b"kv" * 2048) for _ in keys]
        >>> ns.put(keys, buffers).wait()
        [True, True, True]
        >>> len(ns.digest)
        16
    """

    @property
    def digest(self) -> bytes:
        """The 16 bytes that identify the namespace."""

    def prefix(self, keys: _Keys) -> int:
        """Returns the number of leading keys whose blocks are stored.

        The call waits for asynchronous tiers, at most `lookup_timeout`.

        Args:
            keys: Keys in prompt order, 32 bytes each.

        Returns:
            The number of consecutive hits from the first key on.

        Raises:
            InputError: A key does not have 32 bytes.

        Example:
            >>> more = kvdepot.keys(range(1280), block_tokens=256)
            >>> ns.prefix(more)
            3
        """

    def contains(self, keys: _Keys) -> list[bool]:
        """Checks for each key if a tier has its block.

        The call waits for asynchronous tiers, at most `lookup_timeout`.

        Args:
            keys: Keys, 32 bytes each.

        Returns:
            One bool per key.

        Raises:
            InputError: A key does not have 32 bytes.

        Example:
            >>> ns.contains([keys[2], bytes(32)])
            [True, False]
        """

    def where(self, keys: _Keys) -> list[str | None]:
        """Returns the uppermost tier of each block.

        The call waits for asynchronous tiers, at most `lookup_timeout`.

        Args:
            keys: Keys, 32 bytes each.

        Returns:
            The name of a tier per key; None for a miss.

        Raises:
            InputError: A key does not have 32 bytes.

        Example:
            >>> ns.where([keys[0], bytes(32)])
            ['Cache', None]
        """

    def put(self, keys: _Keys, buffers: _Buffers, after: bytes | None = None) -> Task:
        """Stores blocks in the background.

        A key that is stored keeps its bytes, regardless of the buffer. Until `Task.wait_released`
        returns, the buffers must not change. If a source changes during the put, the stored block
        is a mixture.

        Args:
            keys: Keys in prompt order, 32 bytes each.
            buffers: Contiguous memory per key: objects with the buffer protocol or DLPack, arrays
                on a CUDA device, or (address, length) pairs in bytes. Or one `Spans` with a row per
                key.
            after: Key of the block before the first one, if a prompt comes in several calls.
                Without it, the blocks of a call count as a prompt of their own. The new blocks of
                one prompt may evict others only up to a share of the last tier, from 1/256 to 1/8.

        Returns:
            A task with one outcome per key: true when the block is acknowledged.

        Raises:
            InputError: Keys and buffers do not match, or a buffer is unsuitable.

        Example:
            >>> more = kvdepot.keys(range(1280), block_tokens=256)
            >>> task = ns.put(more[3:], [bytes(4096), bytes(4096)], after=more[2])
            >>> task.wait(timeout=30)
            [True, True]
        """

    def get(
        self, keys: _Keys, buffers: _Buffers, staged: bool = False, prefix: bool = False
    ) -> Task:
        """Reads blocks into buffers, in the background.

        Each byte is verified before its key is reported as true. A key is false, and the content of
        its buffer unspecified, if the block is a miss, is corrupt, or has another length than the
        buffer.

        Args:
            keys: Keys in prompt order, 32 bytes each.
            buffers: Writable memory per key, as in `put`, of the length of the block; or one
                `Spans` with a row per key.
            staged: Copy through the staging buffer, for memory that is slow for small or unaligned
                copies. CUDA buffers are always staged.
            prefix: Stop at the first miss or wrong length. Later keys are misses, and their buffers
                stay untouched. If a block is corrupt, later blocks may have been delivered.

        Returns:
            A task with one outcome per key: true when the buffer is filled.

        Raises:
            InputError: Keys and buffers do not match, or a buffer is unsuitable or read-only.
            Error: The staging buffer cannot be allocated.

        Example:
            >>> filled = [bytearray(4096) for _ in keys]
            >>> ns.get(keys, filled, prefix=True).wait(timeout=30)
            [True, True, True]
            >>> filled == buffers
            True
        """

    def lookup(self, keys: _Keys) -> Task:
        """Starts a lookup that does not wait for asynchronous tiers.

        Without asynchronous tiers the task is done immediately; for a client, when the server has
        responded.

        Args:
            keys: Keys, 32 bytes each.

        Returns:
            A task with one outcome per key: true if a tier has the block. A tier that does not
            respond within `lookup_timeout` counts as a miss.

        Raises:
            InputError: A key does not have 32 bytes.

        Example:
            >>> ns.lookup([keys[0], bytes(32)]).wait()
            [True, False]
        """

    def prefetch(self, keys: _Keys) -> Task:
        """Promotes the leading hits into the first tier, in the background.

        Prefetched blocks that no call has read yet together take at most half of the first tier.
        Keys beyond that end as "dropped" and may be prefetched again.

        Args:
            keys: Keys in prompt order, 32 bytes each.

        Returns:
            A task with one outcome per key: true when the block is in the first tier.

        Raises:
            InputError: A key does not have 32 bytes.

        Example:
            >>> ns.prefetch(keys).wait(timeout=30)
            [True, True, True]
        """

    def remove(self, keys: _Keys) -> int:
        """Removes blocks from every tier.

        Args:
            keys: Keys, 32 bytes each.

        Returns:
            The number of keys that were stored in at least one tier. A repeated key counts once.

        Raises:
            InputError: A key does not have 32 bytes.
            Error: The server of the depot does not respond; the blocks may still be stored.

        Example:
            >>> ns.remove([keys[0], bytes(32)])
            1
            >>> ns.prefix(keys)
            0
        """

    def blocks(self) -> list[tuple[bytes, int]]:
        """Returns all blocks of the namespace, in any tier.

        Blocks that are stored or removed during the call may be missing or included.

        Returns:
            (key, bytes) per block, sorted by key.

        Example:
            >>> ns.blocks() == [(key, 4096) for key in sorted(keys)]
            True
        """

    def blocks_page(
        self, cursor: bytes | None = None, limit: int = ...
    ) -> tuple[list[tuple[bytes, int]], bytes | None]:
        """Returns one page of the blocks of the namespace, in no order.

        A block that is in two tiers may be listed twice. A page may be short or empty before the
        last one. Each block that stays stored from the first to the last page is listed.

        Args:
            cursor: The cursor that the previous page returned. Default: the first page.
            limit: Most blocks of a page, at least 1. Default and maximum: 16384.

        Returns:
            The page as (key, bytes) per block, and the cursor of the next page; None after the last
            one.

        Raises:
            InputError: `limit` is less than 1, or `cursor` is not a cursor.

        Example:
            >>> page, cursor = ns.blocks_page(limit=2)
            >>> while cursor is not None:
            ...     more, cursor = ns.blocks_page(cursor, limit=2)
            ...     page += more
            >>> sorted(key for key, _ in page) == sorted(keys)
            True
        """

    def clear(self) -> int:
        """Removes all blocks of the namespace from every tier.

        Returns:
            The number of blocks that were removed.

        Raises:
            Error: The server of the depot does not respond, or rejects the call.

        Example:
            >>> ns.clear()
            3
        """

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
        """Reserves space for blocks that a worker, or another program, will write.

        Args:
            keys: Keys in prompt order, 32 bytes each.
            lengths: Bytes per block: one number, or one per key.
            parts: Parts per block, 1 to 4096, for example one per rank.
            part_lengths: Bytes per part; their sum is the length of each block. Default: equal
                parts.
            strict: Raise `FullError` for lack of space, and reserve nothing.
            prefix: End the list before the first key that is declined or has no space, because
                later blocks of the prompt could not be found.
            after: Key of the block before the first one, as in `put`.

        Returns:
            One reservation per key. None if the block is stored, is being written, is rejected by
            the admission policy, or has no space.

        Raises:
            InputError: Lengths or parts do not match the keys.
            FullError: With `strict`, there is no space for a block.

        Example:
            >>> new = kvdepot.keys(range(512), block_tokens=256, salt="reserved")
            >>> reservations = ns.reserve(new, 4096)
            >>> [one.length for one in reservations]
            [4096, 4096]
            >>> ns.reserve(keys, 4096)  # stored already
            [None, None, None]
        """

    def commit(
        self, reservations: Iterable[Reservation], checksums: Iterable[Iterable[bytes]]
    ) -> list[bool]:
        """Publishes reservations after their bytes were written.

        After a commit that raised, for example on Ctrl-C, commit or abort again.

        Args:
            reservations: Reservations of this depot, without None.
            checksums: A list of 16-byte checksums per reservation, one per part, as in
                `MoveJob.checksums`.

        Returns:
            One bool per reservation. False if it had ended before, or was lost with its server.

        Raises:
            InputError: A reservation is of another depot, or the checksums do not match the parts.

        Example:
            >>> new = kvdepot.keys(range(256), block_tokens=256, salt="new")
            >>> [one] = ns.reserve(new, 4096)
            >>> ns.commit([one], [[bytes(16)]])  # with the checksum from a mover
            [True]
            >>> ns.contains(new)
            [True]
        """

    def abort(self, reservations: Iterable[Reservation]) -> None:
        """Releases reservations without publishing them.

        Before the call, every mover that has one of their placements must have stopped writing.

        Args:
            reservations: Reservations of this depot, without None.

        Raises:
            InputError: A reservation is of another depot.

        Example:
            >>> reservations = ns.reserve(kvdepot.keys(range(256), 256, salt="new"), 4096)
            >>> ns.abort(reservations)
        """

    def pin(self, keys: _Keys, prefix: bool = False) -> list[Pin | None]:
        """Pins blocks in their uppermost tier, so that workers can read them.

        Args:
            keys: Keys in prompt order, 32 bytes each.
            prefix: Pin only the leading hits.

        Returns:
            One pin per key; None for a miss.

        Raises:
            InputError: A key does not have 32 bytes.

        Example:
            >>> pins = ns.pin([*keys, bytes(32)])
            >>> [pin and pin.tier for pin in pins]
            ['Cache', 'Cache', 'Cache', None]
        """

    def unpin(self, pins: Iterable[Pin | None], served: bool = False) -> None:
        """Ends pins.

        Args:
            pins: Pins in prompt order. None and pins that have ended are ignored.
            served: The bytes were used. Then they count as hits, and blocks of lower tiers are
                promoted.

        Raises:
            InputError: A pin is of another depot.

        Example:
            >>> pins = ns.pin(keys)
            >>> ns.unpin(pins, served=True)
            >>> depot.stats()["tiers"]["Cache"]["hit_blocks"]
            3
        """

    def discard(self, pins: Iterable[Pin | None]) -> int:
        """Unpublishes pinned blocks that failed verification in a worker.

        Only the pinned copy becomes invisible. The pins stay, because other workers may still read.

        Args:
            pins: Pins of this depot. None and pins that have ended are ignored.

        Returns:
            The number of blocks that were still published.

        Raises:
            InputError: A pin is of another depot.

        Example:
            >>> pins = ns.pin(keys[:1])
            >>> ns.discard(pins)
            1
            >>> ns.contains(keys[:1])
            [False]
        """

@final
class Task:
    """A call in progress: a put, get, lookup or prefetch.

    Dropping the task does not cancel it. kvdepot keeps the buffers alive while a copy thread uses
    them.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "off"})
        >>> ns = depot.namespace(model="m", dtype="float16", block_tokens=256)
        >>> keys = kvdepot.keys(range(512), block_tokens=256)
        >>> task = ns.put(keys, [bytes(4096), bytes(4096)])
        >>> task.wait(timeout=30), task.done, task.errors, len(task)
        ([True, True], True, [None, None], 2)
    """

    def wait(self, timeout: float | None = None) -> list[bool]:
        """Waits until every key has its outcome.

        An outcome is true when a put's block is acknowledged, a get's buffer is filled, a lookup
        has found the block, or a prefetched block is in the first tier. The call also works after
        `close`.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            One bool per key; `errors` has the reason for each False.

        Raises:
            TimeoutError: The wait timed out. The task continues.

        Example:
            >>> ns.get([*keys, bytes(32)], [bytearray(4096) for _ in range(3)]).wait(timeout=30)
            [True, True, False]
        """

    def __await__(self) -> Generator[Any, None, list[bool]]:
        """Waits in a coroutine of asyncio until every key has its outcome: `outcomes = await task`.

        Cancelling the coroutine does not cancel the task.

        Returns:
            One bool per key, as `wait`.

        Example:
            >>> import asyncio
            >>> async def load():
            ...     task = ns.get(keys, [bytearray(4096) for _ in keys])
            ...     return await asyncio.wait_for(task, timeout=30)
            >>> asyncio.run(load())
            [True, True]
        """

    def wait_released(self, timeout: float | None = None) -> None:
        """Waits until kvdepot has stopped using the buffers, so that the caller may reuse them.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Raises:
            TimeoutError: The wait timed out. The task continues.

        Example:
            >>> buffer = bytearray(4096)
            >>> task = ns.put([bytes(32)], [buffer])
            >>> task.wait_released(timeout=30)
            >>> buffer[:] = bytes(4096)  # the put has its copy
        """

    @property
    def done(self) -> bool:
        """True when every key has its outcome."""

    @property
    def errors(self) -> list[_Reason | None]:
        """The reason for each key, in the order of the keys.

        None means success. The reasons are "pending" (unknown yet), "miss", "corrupt", "length",
        "full", "dropped", "declined" and "closed" (docs/errors.md).
        """

    def __len__(self) -> int: ...

@final
class Completions:
    """The ends of many tasks on one file descriptor, for event loops.

    The descriptor is readable while `drain` has results.

    Example:
        >>> import select
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "off"})
        >>> ns = depot.namespace(model="m", dtype="float16", block_tokens=256)
        >>> keys = kvdepot.keys(range(256), block_tokens=256)
        >>> done = kvdepot.Completions()
        >>> done.add(ns.put(keys, [bytes(4096)]), tag="request 7")
        >>> ready = select.select([done.fileno()], [], [], 30)
        >>> done.drain()
        [('request 7', [True])]
    """

    def fileno(self) -> int:
        """Returns the descriptor to poll. Only `close` may close it.

        Returns:
            A file descriptor; readable while `drain` has results.

        Raises:
            ClosedError: The object was closed.

        Example:
            >>> done.fileno() > 2
            True
        """

    def add(self, task: Task | TransferTask, tag: Any) -> None:
        """Reports the end of a task.

        Args:
            task: A task of a depot or of a transfer engine.
            tag: Any object; `drain` returns it when the task has all its outcomes.

        Raises:
            ClosedError: The object was closed.

        Example:
            >>> task = ns.get(keys, [bytearray(4096)])
            >>> done.add(task, tag=("get", 1))
            >>> task.wait()
            [True]
        """

    def post(self, tag: Any, answer: Any) -> None:
        """Adds a result that needs no task to the next `drain`.

        Args:
            tag: Any object.
            answer: Any object; returned with `tag`.

        Raises:
            ClosedError: The object was closed.

        Example:
            >>> done.post("request 8", [False])
            >>> done.drain()
            [('request 8', [False])]
        """

    def drain(self, clear: bool = True) -> list[tuple[Any, Any]]:
        """Returns the tasks that ended since the previous call, in the order of their ends.

        Args:
            clear: Reset the descriptor. With False it stays readable, for a caller that resets it
                itself before the call.

        Returns:
            (tag, result) per task. The result is that of the task's `wait`.

        Example:
            >>> done.drain()
            []
        """

    def close(self) -> None:
        """Closes the descriptor and drops pending results. The tasks continue.

        Example:
            >>> done.close()
        """

@final
class Pin:
    """A published block that stays in place until it is unpinned or this object is dropped.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "off"})
        >>> ns = depot.namespace(model="m", dtype="float16", block_tokens=256)
        >>> keys = kvdepot.keys(range(256), block_tokens=256)
        >>> ns.put(keys, [bytes(4096)]).wait()
        [True]
        >>> [pin] = ns.pin(keys)
        >>> pin.tier, pin.length, pin.key == keys[0], type(pin.placement)
        ('Cache', 4096, True, <class 'bytes'>)
        >>> ns.unpin([pin])
    """

    @property
    def placement(self) -> bytes:
        """Location of the block, for `Mover.load` and `Mover.verify`.

        Opaque bytes, valid until the pin ends.
        """

    @property
    def tier(self) -> str:
        """Name of the tier that has the block."""

    @property
    def key(self) -> bytes:
        """The 32-byte key of the block."""

    @property
    def length(self) -> int:
        """Size of the block in bytes."""

@final
class Reservation:
    """Space for a block that becomes visible with its commit.

    After `placement` was read, only `commit` or `abort` ends the reservation, because a mover may
    still write. Otherwise it also ends when this object is dropped.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "off"})
        >>> ns = depot.namespace(model="m", dtype="float16", block_tokens=256)
        >>> keys = kvdepot.keys(range(256), block_tokens=256)
        >>> [one] = ns.reserve(keys, 4096, parts=2)
        >>> one.length, one.parts, one.key == keys[0], type(one.placement)
        (4096, 2, True, <class 'bytes'>)
        >>> ns.abort([one])
    """

    @property
    def placement(self) -> bytes:
        """Location of the block, for `Mover.store` and `Mover.digest`.

        Opaque bytes, valid until commit or abort.
        """

    @property
    def key(self) -> bytes:
        """The 32-byte key of the block."""

    @property
    def length(self) -> int:
        """Size of the block in bytes."""

    @property
    def parts(self) -> int:
        """Number of parts: the number of checksums that `commit` requires."""

@final
class Spans:
    """Blocks that are scattered over several memory ranges, for example one page per layer.

    A block is a row of page ids. It consists of its pages in the first range, then its pages in the
    second range, and so on. In a `get` or `load`, the bytes of a negative id are verified and not
    delivered.

    kvdepot keeps tensors and `owner` alive while a copy thread uses their memory. Memory that only
    addresses name must stay mapped for that time.

    Args:
        ranges: Tensors or arrays whose first dimension counts pages, each page contiguous. Or
            tuples (address, stride, length) in bytes: page `id` is the `length` bytes at `address +
            id * stride`.
        rows: Page ids, one row per block: sequences of integers, or an array of shape (blocks, ids)
            of 32- or 64-bit integers.
        owner: Object that owns the memory of the addresses: a tensor or array, or a list, tuple or
            dictionary of tensors. Pages outside of known memory are rejected.
        device: Number of the CUDA device of the addresses. Tensors have their own. Default: host
            memory.
        stream: Handle of a stream of that device, such as
            `torch.cuda.current_stream().cuda_stream`. Copies wait for the work that the stream
            received before the call; the caller continues. Default: copies do not wait for
            computations.

    Raises:
        InputError: A range or row is unsuitable, an id is outside of a range, or ranges are on
            different devices.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "off"})
        >>> ns = depot.namespace(model="m", dtype="float16", block_tokens=256)
        >>> keys = kvdepot.keys(range(512), block_tokens=256)
        >>> layers = [memoryview(bytearray(8 * 1024)).cast("B", (8, 1024)) for _ in range(4)]
        >>> spans = kvdepot.Spans(layers, rows=[[7, 2], [3, 4]])  # 2 blocks, 4 layers, 2 pages each
        >>> len(spans), spans.nbytes
        (2, 16384)
        >>> ns.put(keys, spans).wait()
        [True, True]
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
        """Returns the same ranges with other rows and another stream.

        The ranges are not checked again, so that the call is cheaper than a new object.

        Args:
            rows: Page ids, one row per block, as in `Spans`.
            stream: Handle of a stream of the device. Default: none.

        Returns:
            The new object. It keeps the same tensors and owner.

        Raises:
            InputError: A row is unsuitable, or an id is outside of a range.

        Example:
            >>> ns.get(keys, spans.with_rows([[1, 0], [6, 5]])).wait()
            [True, True]
        """

    def synchronize(self, timeout: float | None = None) -> bool:
        """Waits until kvdepot has no copies in progress between this process and the device.

        Call it before device memory is unmapped: after an abandoned store, the device may still be
        read. First wait for jobs and tasks, because their later copies are unknown here.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            False if the wait timed out. Host memory returns True immediately.

        Example:
            >>> spans.synchronize(timeout=10)
            True
        """

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Total size of all blocks in bytes."""

@final
class Mover:
    """Worker that copies between the memory of this process and the tiers of a depot.

    `attach` creates it. A context manager: leaving the block closes the mover. The process with the
    depot reserves or pins blocks, and commits or unpins them after the copy.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "depot.sock"})
        >>> ns = depot.namespace(model="m", dtype="float16", block_tokens=256)
        >>> keys = kvdepot.keys(range(256), block_tokens=256)
        >>> mover = kvdepot.attach(depot.socket)  # in the worker
        >>> reservations = ns.reserve(keys, 4096)
        >>> placements = [one.placement for one in reservations]
        >>> job = mover.store(placements, [b"kv" * 2048])
        >>> job.wait()
        True
        >>> ns.commit(reservations, [job.checksums])
        [True]
        >>> pins = ns.pin(keys)
        >>> mover.ended
        False
    """

    def store(
        self,
        placements: Iterable[Buffer],
        buffers: _Buffers,
        part: int = 0,
        *,
        background: bool = False,
    ) -> MoveJob:
        """Copies memory into reserved blocks, in the background.

        Args:
            placements: `Reservation.placement` of each block.
            buffers: Memory per block, of the length of the part, or one `Spans` with a row per
                block, as in `Namespace.put`.
            part: Number of the part of each block, from 0.
            background: Return before the buffers are prepared, which a thread of the mover does.
                Errors of buffers, and of a closed mover, are then in `MoveJob.error`, with
                `rejected` True.

        Returns:
            A job with one checksum per block.

        Raises:
            InputError: A placement or buffer is unsuitable.
            ClosedError: The mover was closed.

        Example:
            >>> new = ns.reserve([bytes(32)], 4096)
            >>> job = mover.store([new[0].placement], [bytes(4096)], background=True)
            >>> job.wait(timeout=30), job.rejected
            (True, False)
            >>> ns.commit(new, [job.checksums])
            [True]
        """

    def load(
        self,
        placements: Iterable[Buffer],
        buffers: _Buffers,
        part: int = 0,
        *,
        background: bool = False,
    ) -> MoveJob:
        """Copies pinned blocks into memory and verifies them, in the background.

        Args:
            placements: `Pin.placement` of each block.
            buffers: Writable memory per block, of the length of the part, or one `Spans` with a row
                per block, as in `Namespace.get`.
            part: Number of the part of each block, from 0.
            background: Return before the buffers are prepared, as in `store`.

        Returns:
            A job with one result per block.

        Raises:
            InputError: A placement or buffer is unsuitable.
            ClosedError: The mover was closed.

        Example:
            >>> buffer = bytearray(4096)
            >>> job = mover.load([pins[0].placement], [buffer])
            >>> job.wait(timeout=30), job.results
            (True, [True])
            >>> buffer == b"kv" * 2048
            True
        """

    def digest(self, placements: Iterable[Buffer], part: int = 0) -> MoveJob:
        """Hashes reserved blocks that another program, such as a device, has written.

        Args:
            placements: `Reservation.placement` of each block.
            part: Number of the part of each block, from 0.

        Returns:
            A job with one checksum per block, for `Namespace.commit`.

        Raises:
            InputError: A placement is unsuitable.
            ClosedError: The mover was closed.

        Example:
            >>> new = ns.reserve([bytes(32)], 4096)
            >>> job = mover.digest([new[0].placement])
            >>> job.wait(timeout=30)
            True
            >>> ns.commit(new, [job.checksums])
            [True]
        """

    def verify(self, placements: Iterable[Buffer], part: int = 0) -> MoveJob:
        """Verifies pinned blocks in place, before another program, such as a device, reads them.

        Args:
            placements: `Pin.placement` of each block.
            part: Number of the part of each block, from 0.

        Returns:
            A job with one result per block.

        Raises:
            InputError: A placement is unsuitable.
            ClosedError: The mover was closed.

        Example:
            >>> job = mover.verify([pins[0].placement])
            >>> job.wait(timeout=30), job.results
            (True, [True])
        """

    def locate(
        self, placements: Iterable[Buffer], part: int = 0
    ) -> list[tuple[int, int, int] | None]:
        """Returns the location of a part of each block in `media`.

        Args:
            placements: Placements of pins or reservations.
            part: Number of the part of each block, from 0.

        Returns:
            (index in `media`, offset, length) per block, in bytes. None for a block in several
            pieces, for a placement of another owner, and while processes of an earlier owner may
            still write.

        Raises:
            InputError: A placement is unsuitable, or the mover was attached with `write=False`.

        Example:
            >>> [(medium, offset, length)] = mover.locate([pins[0].placement])
            >>> bytes(mover.media[medium][offset : offset + length]) == b"kv" * 2048
            True
        """

    @property
    def media(self) -> list[memoryview]:
        """The tiers as mapped in this process, first to last.

        One memory view per medium, read-only with `write=False`.
        """

    @property
    def ended(self) -> bool:
        """True if the mover has ended with its server.

        That happens with `with_owner=True` only. The mover copies nothing then; attach again.
        """

    def prefault(self, *, wait: bool = False) -> None:
        """Maps the media in this process, so that the first copies take no page faults.

        The call allocates memory that has not been used yet. Of a file, only pages that are in
        memory are mapped; the disk is not read.

        Args:
            wait: Return when it is complete. With False, a thread does it in the background.

        Raises:
            Error: The media cannot be mapped, or the thread cannot be started.

        Example:
            >>> mover.prefault(wait=True)
        """

    def close(self) -> None:
        """Rejects new jobs and waits for jobs in progress.

        Example:
            >>> mover.close()
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class MoveJob:
    """A batch of copies of a mover.

    Failures of blocks are values of its members rather than exceptions.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "16MiB"}, "socket": "depot.sock"})
        >>> ns = depot.namespace(model="m", dtype="float16", block_tokens=256)
        >>> mover = kvdepot.attach(depot.socket)
        >>> [one] = ns.reserve([bytes(32)], 4096)
        >>> job = mover.store([one.placement], [bytes(4096)])
        >>> job.wait(timeout=30)
        True
        >>> job.done, job.whole, job.results, job.corrupt, job.bytes
        (True, True, [True], [False], 4096)
        >>> job.error is None, job.rejected, len(job.checksums[0]), job.seconds < 30
        (True, False, 16, True)
        >>> ns.commit([one], [job.checksums])
        [True]
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the copy threads have stopped using the memory.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            False if the wait timed out. The job continues.

        Example:
            >>> job.wait(timeout=0)
            True
        """

    @property
    def done(self) -> bool:
        """True when the copy threads have stopped using the memory."""

    @property
    def checksums(self) -> list[builtins.bytes | None]:
        """The 16-byte checksum of each part that was copied; None for those that failed."""

    @property
    def results(self) -> list[bool]:
        """One bool per part: true if it was copied, and verified if it has a checksum."""

    @property
    def whole(self) -> bool:
        """True when the job has ended and all `results` are true."""

    @property
    def corrupt(self) -> list[bool]:
        """One bool per part: true if its checksum did not match.

        If a part is false here and in `results`, it was not copied, and its bytes are unknown.
        """

    @property
    def bytes(self) -> int:
        """Size of the job in bytes, copied or not."""

    @property
    def seconds(self) -> float:
        """Seconds until the last copy ended, or until now for a job in progress.

        The time starts with the call, or with `background` when the thread began the job.
        """

    @property
    def rejected(self) -> bool:
        """True if a job with `background` was rejected.

        Then nothing was copied, and `error` has the reason.
        """

    @property
    def error(self) -> str | None:
        """The first reason of a failure, for a log line; None without one."""

@type_check_only
class _TransferStats(TypedDict):
    requests: int  # submitted
    bytes: int  # of these requests
    frames: int  # sent to peers
    posts: int  # calls to RDMA devices
    work_requests: int  # in these calls
    peers: int  # that the engine knows
    connections: int  # from peers
    refused_greetings: int  # failed handshakes
    refused_grants: int  # rejected slices, names and calls
    malformed_frames: int  # connections that ended because of one

@final
class TransferEngine:
    """Moves bytes between the memory of this process and of other processes and hosts.

    A context manager: leaving the block closes the engine. In `kvdepot.transfer` its name is
    `Engine`; docs/transfer.md has the guarantees.

    Args:
        listen: Address and port for peers. Default: "127.0.0.1:0", a free port of the loopback
            interface. None: peers cannot connect.
        token: Shared secret of all engines, a text or bytes. Default: none.
        tls_certificate: PEM file with the certificate of this engine and the intermediate ones. Set
            all three files or none.
        tls_key: PEM file with its key.
        tls_ca: PEM file with the authorities that sign the certificates of peers.
        tls_name: DNS name or address that certificates of targets must have. Default: the address
            used to connect.
        allow_unauthenticated: Listen beyond loopback without a token and TLS.
        streams: Connections per peer, and threads for copies on one host, 1 to 64.
        slice_size: Most bytes of a slice, 4KiB to 32MiB.
        tail_merge: A shorter rest joins the slice before it, in bytes, 0 to `slice_size`.
        watermark: Slices that are ready before the first is sent, at least 1.
        window: Slices per connection without a response, 1 to 1024.
        local: Use shared memory for peers on this host.
        rdma: Names of the RDMA devices. Default: all that are found; with TLS none.
        checksum: Protect each slice with an XXH3-128.
        retries: Tries after a transfer error.
        timeout: Most time to connect, to open a name and for calls, 1ms to 1h: seconds, or a text.
        connections_max: Most connections from peers, 1 to 1048576.

    Raises:
        ConfigError: An option is unknown, or its value is not allowed.
        Error: The engine cannot listen at `listen`.

    Example:
        >>> from kvdepot.transfer import Engine
        >>> target, engine = Engine(), Engine(listen=None)
        >>> published = target.publish("pages", [bytearray(b"kv" * 2048)], "both")
        >>> pages = bytearray(4096)
        >>> registered = engine.register([pages])
        >>> remote = engine.open(target.address, "pages")
        >>> task = engine.submit([("read", pages, remote, 0, 4096)], timeout=30)
        >>> task.wait(), pages == b"kv" * 2048
        (True, True)
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
        """Address and port where peers connect; None without a listener."""

    def register(self, buffers: _Buffers) -> Registered:
        """Registers memory of this process, so that batches may use it.

        Args:
            buffers: Contiguous memory, as in `Namespace.put`. A range cannot be registered twice at
                the same time.

        Returns:
            The registration. It keeps the objects alive, and ends when it is closed or dropped.

        Raises:
            InputError: A buffer is unsuitable, or is registered already. Then no buffer is
                registered.

        Example:
            >>> more = bytearray(4096)
            >>> with engine.register([more]):
            ...     task = engine.run([("read", more, remote, 0, 4096)])
            >>> more == pages
            True
        """

    def publish(
        self,
        name: str | bytes,
        buffers: _Buffers,
        rights: _Rights | None = None,
        lasts: float | None = None,
    ) -> Published:
        """Lets peers use memory of this process under a name.

        Args:
            name: Name of 1 to 1024 bytes, as a text or bytes.
            buffers: Contiguous memory, as in `Namespace.put`. Peers see one range, in the order of
                the buffers.
            rights: Access of peers: "read", "write" or "both". Default: "read".
            lasts: Seconds until the grant expires. Default: until it is closed.

        Returns:
            The grant. It keeps the objects alive, and ends when it is closed or dropped.

        Raises:
            InputError: The name is in use, or a buffer or argument is unsuitable.

        Example:
            >>> with target.publish("more pages", [bytes(4096), bytes(4096)], "read", lasts=60):
            ...     print(engine.open(target.address, "more pages").nbytes)
            8192
        """

    def grant(
        self, buffers: _Buffers, rights: _Rights | None = None, lasts: float | None = None
    ) -> Published:
        """Lets peers use memory of this process under a random name.

        The name is the right: a process that receives it can use the memory.

        Args:
            buffers: Contiguous memory, as in `publish`.
            rights: Access of peers: "read", "write" or "both". Default: "read".
            lasts: Seconds until the grant expires. Default: until it is closed.

        Returns:
            The grant; its `name` is for a peer's `open`.

        Raises:
            InputError: A buffer or argument is unsuitable.

        Example:
            >>> secret = target.grant([bytes(4096)], lasts=60)
            >>> engine.open(target.address, secret.name).rights
            'read'
        """

    def open(self, address: str, name: str | bytes) -> TransferRemote:
        """Opens memory that another engine has published.

        Args:
            address: Address and port of that engine, such as "10.0.0.2:7000".
            name: The published name.

        Returns:
            The remote memory, for requests of this engine.

        Raises:
            Error: The engine does not respond or rejects this one, or the name is not published
                there.
            InputError: An argument is unsuitable.

        Example:
            >>> remote = engine.open(target.address, "pages")
            >>> remote.nbytes, remote.rights
            (4096, 'both')
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
        """Starts a batch of reads and writes in the background.

        Requests of a batch run in any order. A request that fails does not affect the others. For
        thousands of requests pass columns, each an array or one value for all: `submit(op="read",
        local=…, remote=…, offset=…, length=…)`.

        Args:
            requests: Tuples (op, local, remote, offset, length), instead of columns. In a tuple,
                `local` may also be an object that begins in registered memory.
            timeout: Seconds after which unfinished requests fail.
            priority: "urgent", "normal" or "background". Default: "normal".
            callback: Called with the task at its end, in a thread of the engine.
            op: "read" copies from the remote, "write" copies to it.
            local: Address in registered memory.
            remote: Memory that `open` returned.
            offset: Position in the remote memory, in bytes.
            length: Bytes to copy.

        Returns:
            The task, with one status per request.

        Raises:
            InputError: A request is malformed. Then no request is started.
            ClosedError: The engine was closed.

        Example:
            >>> requests = [("write", pages, remote, 0, 8), ("write", pages, remote, 9999, 8)]
            >>> task = engine.submit(requests, timeout=30)
            >>> task.wait(), task.errors
            (False, {1: 'range'})
            >>> import ctypes
            >>> at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            >>> local, offset = [at, at + 8], [8, 0]
            >>> engine.submit(op="read", local=local, remote=remote, offset=offset, length=8).wait()
            True
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
        """Moves a batch and waits for its end.

        The arguments are those of `submit`. Ctrl-C cancels the batch.

        Args:
            requests: Tuples (op, local, remote, offset, length), instead of columns. In a tuple,
                `local` may also be an object that begins in registered memory.
            timeout: Seconds after which unfinished requests fail.
            priority: "urgent", "normal" or "background". Default: "normal".
            op: "read" copies from the remote, "write" copies to it.
            local: Address in registered memory.
            remote: Memory that `open` returned.
            offset: Position in the remote memory, in bytes.
            length: Bytes to copy.

        Returns:
            The task, which has ended.

        Raises:
            InputError: A request is malformed. Then no request is started.
            ClosedError: The engine was closed.

        Example:
            >>> engine.run([("write", pages, remote, 0, 4096)], timeout=30).errors
            {}
        """

    def cancel(self, task: TransferTask) -> None:
        """Ends a task early and waits until its memory is no longer used.

        Requests that are done stay done.

        Args:
            task: A task of this engine.

        Raises:
            InputError: The task is of another engine.

        Example:
            >>> task = engine.submit([("read", pages, remote, 0, 4096)])
            >>> engine.cancel(task)
            >>> task.done
            True
        """

    def stats(self) -> _TransferStats:
        """Returns counters since the engine was created.

        Returns:
            A dictionary of counts, such as `requests`, `bytes`, `connections` from peers, and
            `refused_greetings` (failed handshakes).

        Example:
            >>> engine.stats()["bytes"]
            4096
        """

    @property
    def closed(self) -> bool:
        """True after `close`: calls raise `ClosedError`."""

    def close(self) -> None:
        """Ends all tasks and waits for their callbacks.

        Tasks of other engines with this one end too. A second `close` waits for the first.

        Example:
            >>> engine.close()
            >>> engine.closed
            True
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Registered:
    """Memory of this process that batches may use, until it is closed or this object is dropped.

    A batch in progress keeps the memory until the batch ends. A context manager: leaving the block
    closes it.

    Example:
        >>> from kvdepot.transfer import Engine
        >>> engine = Engine(listen=None)
        >>> registered = engine.register([bytearray(4096)])
    """

    def close(self) -> None:
        """Ends the registration for later batches.

        Example:
            >>> registered.close()
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Published:
    """Memory of this process that peers may use under a name.

    The grant ends when it is closed or expires, or when this object is dropped. A context manager:
    leaving the block closes it.

    Example:
        >>> from kvdepot.transfer import Engine
        >>> engine = Engine()
        >>> published = engine.publish("pages", [bytearray(4096)], "both")
        >>> published.name
        b'pages'
    """

    @property
    def name(self) -> bytes:
        """The name under which peers open the memory."""

    def close(self) -> None:
        """Withdraws the memory and waits until peers have stopped using it.

        Example:
            >>> published.close()
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class TransferRemote:
    """Memory of a peer, as `TransferEngine.open` returned it.

    The peer is notified when this object is closed, or when it and the batches that use it are
    dropped. A context manager: leaving the block closes it.

    Example:
        >>> from kvdepot.transfer import Engine
        >>> target, engine = Engine(), Engine(listen=None)
        >>> published = target.publish("pages", [bytearray(4096)], lasts=3600)
        >>> remote = engine.open(target.address, "pages")
        >>> remote.nbytes, remote.rights, remote.lasts <= 3600, remote.address == target.address
        (4096, 'read', True, True)
    """

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""

    @property
    def rights(self) -> Literal["read", "write", "both", "none"]:
        """Allowed access: "read", "write" or "both"."""

    @property
    def lasts(self) -> float | None:
        """Remaining seconds of the grant when it was opened; None if it does not expire."""

    @property
    def address(self) -> str:
        """Address and port of the peer."""

    def close(self) -> None:
        """Closes the memory for later batches. Batches in progress continue.

        Example:
            >>> remote.close()
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class TransferTask:
    """A batch of requests in progress.

    Dropping the task does not cancel it. Registered memory stays alive while the engine uses it.

    Example:
        >>> from kvdepot.transfer import Engine
        >>> target, engine = Engine(), Engine(listen=None)
        >>> published = target.publish("pages", [bytearray(4096)], "both")
        >>> pages = bytearray(4096)
        >>> registered = engine.register([pages])
        >>> remote = engine.open(target.address, "pages")
        >>> requests = [("read", pages, remote, 0, 4096), ("read", pages, remote, 4096, 1)]
        >>> task = engine.submit(requests)
        >>> task.wait(timeout=30), task.done, task.errors, list(task.statuses), len(task)
        (False, True, {1: 'range'}, [1, 3], 2)
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the engine has stopped using the memory of the batch.

        The call also works after `close`.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            True if all requests are done; `errors` has the others.

        Raises:
            TimeoutError: The wait timed out. The task continues until its own time-out.

        Example:
            >>> engine.submit([("write", pages, remote, 0, 4096)]).wait(timeout=30)
            True
        """

    def __await__(self) -> Generator[Any, None, bool]:
        """Waits in a coroutine of asyncio until the batch has ended: `done = await task`.

        Cancelling the coroutine does not cancel the task.

        Returns:
            True if all requests are done, as `wait`.

        Example:
            >>> import asyncio
            >>> async def read():
            ...     return await engine.submit([("read", pages, remote, 0, 4096)])
            >>> asyncio.run(read())
            True
        """

    @property
    def done(self) -> bool:
        """True when the engine has stopped using the memory of the batch."""

    def poll(self) -> bool | None:
        """Returns the result of `wait` without waiting.

        Returns:
            True if all requests are done, False if one failed, None while the batch is in progress.

        Example:
            >>> task.poll()
            False
        """

    def status(self, index: int) -> Literal["pending", "done"] | _Fault:
        """Returns the status of one request, also while others are in progress.

        Args:
            index: Position of the request in the batch, from 0.

        Returns:
            "pending", "done", or the reason of the failure (docs/transfer.md).

        Raises:
            InputError: The batch has no such request.

        Example:
            >>> task.status(0), task.status(1)
            ('done', 'range')
        """

    @property
    def statuses(self) -> bytes:
        """One byte per request: 0 pending, 1 done; others as in `kvdepot.transfer.STATUSES`."""

    @property
    def errors(self) -> dict[int, _Fault]:
        """The reason of each failed request, by its position in the batch."""

    def add_done_callback(self, callback: Callable[[TransferTask], object]) -> None:
        """Calls a function with the task when the batch has ended.

        The call comes from a thread of the engine; if the batch has ended already, directly from
        this method. An exception goes to `sys.unraisablehook`.

        Args:
            callback: Function of one argument, the task.

        Raises:
            InputError: `callback` cannot be called.

        Example:
            >>> ended = []
            >>> task.add_done_callback(ended.append)
            >>> ended == [task]
            True
        """

    def __len__(self) -> int: ...

@final
class LlamaLayout:
    """Positions of the rows of each token in a sequence state of llama.cpp.

    Example:
        `state` contains the bytes that `llama_state_seq_get_data` wrote for 4 tokens.

        >>> from kvdepot._native import LlamaLayout
        >>> layout = LlamaLayout.read(state)
        >>> layout.tokens, layout.token_bytes, layout.rest_bytes
        (4, 16, 0)
        >>> layout.state_bytes == len(state), len(layout.tables)
        (True, 2)
    """

    @staticmethod
    def read(state: Buffer) -> LlamaLayout:
        """Reads the layout of a whole state.

        Args:
            state: Contiguous bytes, as `llama_state_seq_get_data` wrote them.

        Returns:
            The layout.

        Raises:
            InputError: The state is incomplete, or cannot be split by tokens: positions other than
                0, 1, 2 and so on, several streams, or M-RoPE.

        Example:
            >>> LlamaLayout.read(state).shape == layout.shape
            True
        """

    def resized(self, tokens: int, rest_bytes: int = 0) -> LlamaLayout:
        """Returns the layout of a state of the same context with another number of tokens.

        Args:
            tokens: Number of tokens, at least 1.
            rest_bytes: Size of the part at the end that does not grow with the tokens, in bytes.

        Returns:
            The new layout.

        Raises:
            InputError: `tokens` is 0, or exceeds the number of positions of a state.

        Example:
            >>> longer = layout.resized(8)
            >>> longer.tokens, longer.state_bytes > layout.state_bytes
            (8, True)
        """

    def gather(self, state: Buffer, first: int, end: int, piece: Buffer) -> None:
        """Copies the rows of a run of tokens from a state to a piece, without the interpreter lock.

        Args:
            state: Contiguous memory of `state_bytes` bytes.
            first: First token of the run.
            end: One past the last token of the run.
            piece: Writable contiguous memory of `(end - first) * token_bytes` bytes.

        Raises:
            InputError: Memory has another length or is read-only, or the state has no such tokens.

        Example:
            >>> piece = bytearray(2 * layout.token_bytes)
            >>> layout.gather(state, 1, 3, piece)
        """

    def scatter(self, piece: Buffer, first: int, end: int, state: Buffer) -> None:
        """Copies the rows of a run of tokens from a piece to a state, without the interpreter lock.

        Args:
            piece: Contiguous memory of `(end - first) * token_bytes` bytes.
            first: First token of the run.
            end: One past the last token of the run.
            state: Writable contiguous memory of `state_bytes` bytes.

        Raises:
            InputError: Memory has another length or is read-only, or the state has no such tokens.

        Example:
            >>> rows = bytearray(4 * layout.token_bytes)
            >>> layout.gather(state, 0, 4, rows)
            >>> copy = bytearray(layout.state_bytes)
            >>> layout.write_head(copy)
            >>> layout.scatter(rows, 0, 4, copy)
            >>> copy == state
            True
        """

    def write_head(self, state: Buffer) -> None:
        """Writes the parts of a state that are neither rows nor the part at its end.

        Args:
            state: Writable contiguous memory of `state_bytes` bytes.

        Raises:
            InputError: The memory has another length or is read-only.

        Example:
            >>> copy = bytearray(layout.state_bytes)
            >>> layout.write_head(copy)
            >>> copy[:4] == state[:4]
            True
        """

    @property
    def tokens(self) -> int:
        """Number of tokens of the state."""

    @property
    def token_bytes(self) -> int:
        """Size of the rows of one token in bytes."""

    @property
    def state_bytes(self) -> int:
        """Size of the state in bytes."""

    @property
    def rest_bytes(self) -> int:
        """Size of the part at the end of the state, in bytes.

        This part does not grow with the tokens: for example, a window or a recurrent state.
        """

    @property
    def tables(self) -> list[tuple[int, int, int]]:
        """The tables of rows in the order of the state, as (start, unit, units).

        `start` is the offset of the table, and `unit` the adjacent bytes of one token. A token has
        `units` of them, each after those of all tokens: 1, except for transposed values.
        """

    @property
    def shape(self) -> str:
        """Text that all states of one context share: element types, rows and their order."""

@final
class SessionFound:
    """A session that is a prefix of a prompt, as `Sessions.lookup` returns it.

    Example:
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "64MiB"}, "socket": "off"})
        >>> import kvdepot.sessions
        >>> store = kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=256)
        >>> tokens = list(range(600))
        >>> saved = store.save(tokens, lambda runs: [bytes((end - at) * 16) for at, end in runs])
        >>> [found] = store.lookup([*tokens, 7])
        >>> found.id == saved["id"], len(found.tokens), found.context_tokens, found.text_bytes
        (True, 600, 0, 0)
        >>> found.pieces, found.objects
        ([(0, 256, 4096), (256, 512, 4096), (512, 600, 1408)], [])
    """

    @property
    def id(self) -> str:
        """The session ID, in hexadecimal digits."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of the session. Trust them, and tokenize only the text after `text_bytes`."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the rendered text of the tokens; 0 if the text was not saved."""

    @property
    def context_tokens(self) -> int:
        """Context size of the engine that saved the session, in tokens."""

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """The pieces in order, as (first token, one past the last token, bytes)."""

    @property
    def objects(self) -> list[tuple[str, int]]:
        """The objects as (name, bytes)."""

@type_check_only
class _Saved(TypedDict):
    id: str  # session ID
    cached_tokens: int  # leading tokens that were stored already
    cache_write_tokens: int  # tokens whose rows were written
    bytes_written: int  # by this save

@type_check_only
class _Restored(TypedDict):
    cached_tokens: int  # leading tokens whose rows were read
    cache_write_tokens: int  # 0
    whole: bool  # all parts were read and verified

@type_check_only
class _FileSession(TypedDict):
    id: str  # session ID
    tokens: int  # number of tokens
    text_bytes: int  # size of the rendered text
    bytes: int  # size of rows and objects
    created: int  # seconds since 1970
    reason: str  # one of kvdepot.sessions.REASONS
    note: str
    bad: bool  # damaged or incomplete when it was last used

@type_check_only
class _Session(_FileSession):
    hits: int  # restores, approximately
    used: int  # last restore, in seconds since 1970, approximately

@final
class SessionFile:
    """A session file that is open (docs/sessions.md, one file per session).

    Opening reads and verifies the description of the session. The data is verified when it is read.

    Args:
        path: Path of the file.
        direct: Bypass the page cache if the file system supports it.

    Raises:
        Error: The file cannot be read, or is not a sound session file.

    Example:
        >>> import kvdepot.sessions
        >>> files = kvdepot.sessions.open_files(
        ...     "conversations", model="m", dtype="f16", piece_tokens=256, capacity="64MiB"
        ... )
        >>> tokens = list(range(300))
        >>> saved = files.save(tokens, [bytes(4096), bytes(704)], objects={"logits": bytes(100)})
        >>> file = kvdepot.sessions.open_file(f"conversations/{saved['id']}.kvs")
        >>> file.id == saved["id"], file.tokens == tokens, file.model, file.note, file.text
        (True, True, 'm', '', b'')
        >>> file.pieces, file.objects, file.bytes > 4900
        ([(0, 256, 4096), (256, 300, 704)], [('logits', 100)], True)
    """

    def __new__(cls, path: str | os.PathLike[str], *, direct: bool = True) -> Self: ...
    @property
    def id(self) -> str:
        """The session ID, in hexadecimal digits; the same for every copy of the file."""

    @property
    def path(self) -> str:
        """Path of the file."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of the session."""

    @property
    def text(self) -> builtins.bytes:
        """The rendered text of the tokens; empty if it was not saved."""

    @property
    def model(self) -> str:
        """The model, as given when the session was saved."""

    @property
    def note(self) -> str:
        """The note, as given when the session was saved."""

    @property
    def context_tokens(self) -> int:
        """Context size of the engine that saved the session, in tokens."""

    @property
    def created(self) -> int:
        """Time of the save, in seconds since 1970."""

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """The pieces in order, as (first token, one past the last token, bytes).

        Empty if the state is not split by tokens.
        """

    @property
    def objects(self) -> list[tuple[str, int]]:
        """The objects as (name, bytes)."""

    @property
    def bytes(self) -> int:
        """Size of the file in bytes."""

    def restore(self, rows: Any = None, objects: Any = None) -> _Restored:
        """Reads the session into buffers and verifies it.

        Use only the rows of the first `cached_tokens` tokens, and objects only if the result is
        `whole`.

        Args:
            rows: Writable memory per piece, in the order and of the lengths of `pieces`; or one
                `Spans`.
            objects: Writable memory per object, in the order and of the lengths of `objects`.

        Returns:
            A dictionary: `cached_tokens`, the leading tokens whose rows were read, and `whole`,
            true if all parts were read and verified. `cache_write_tokens` is 0.

        Raises:
            InputError: The buffers do not match the session. No byte was read.

        Example:
            >>> rows = [bytearray(size) for _, _, size in file.pieces]
            >>> objects = [bytearray(size) for _, size in file.objects]
            >>> file.restore(rows, objects)
            {'cached_tokens': 300, 'cache_write_tokens': 0, 'whole': True}
        """

    def read(self, member: int, take: Callable[[builtins.bytes], Any]) -> None:
        """Reads one part in order, for a state that is larger than memory.

        Args:
            member: Number of the part from 0, pieces before objects.
            take: Called with each verified chunk as bytes, at most 4 MiB.

        Raises:
            InputError: The session has no such part.
            Error: A chunk failed verification. The chunks before it are valid.

        Example:
            >>> chunks = []
            >>> file.read(2, chunks.append)  # the object after two pieces
            >>> b"".join(chunks) == bytes(100)
            True
        """

    def verify(self) -> list[str]:
        """Reads the whole session and verifies it.

        Returns:
            A description of each part that failed; empty for a sound session.

        Raises:
            Error: The file cannot be read.

        Example:
            >>> file.verify()
            []
        """

    def copy_to(self, path: str | os.PathLike[str]) -> int:
        """Copies the session to another file and verifies it. The copy has the same session ID.

        Args:
            path: Path of the new file.

        Returns:
            Size of the copy in bytes.

        Raises:
            Error: A part failed verification, or the file cannot be written. Then there is no copy.

        Example:
            >>> file.copy_to("kept.copy") == file.bytes
            True
        """

@final
class SessionFiles:
    """A directory of session files of one model, which processes may share.

    The directory is created if it is missing. Sessions that differ in any field, from `model` to
    `salt`, are in the directory and are never found.

    Args:
        path: Path of the directory.
        model: Model ID.
        dtype: Element type of the rows.
        piece_tokens: Tokens per piece, 1 to 1048576.
        capacity: Most bytes of all files in the directory together.
        weights: Fingerprint of the weights.
        layout: Anything else that a state depends on, such as element types, tokenizer and
            positions.
        world: Tensor and pipeline parallel sizes.
        hash: Hash algorithm of keys.
        salt: Secret or label that separates tenants.
        evicts: Delete the least recently used files when `capacity` is reached. With False, a save
            fails then.
        direct: Bypass the page cache if the file system supports it.
        durability: "process", or "power" to sync each file and then the directory before a save
            ends.

    Raises:
        InputError: A field or a size is not allowed.
        Error: The directory cannot be created or read.

    Example:
        >>> import kvdepot.sessions
        >>> files = kvdepot.sessions.open_files(
        ...     "conversations", model="m", dtype="f16", piece_tokens=256, capacity="64MiB"
        ... )
        >>> tokens = list(range(300))
        >>> saved = files.save(tokens, [bytes(4096), bytes(704)], text=b"the prompt")
        >>> saved["cache_write_tokens"]
        300
    """

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
    ) -> Self: ...
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
        """Saves a state as one file, which replaces a session of the same tokens.

        Args:
            tokens: Token ids of the state, from 0 to 2^32 - 1.
            rows: Memory per run of `piece_tokens` tokens, the last one shorter, or one `Spans`.
                Default: a state that is not split by tokens.
            objects: Parts that do not grow with the tokens, by name: memory, or an iterator of
                bytes of unknown total length.
            text: Rendered text of the tokens, for `lookup_text`.
            reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
            context_tokens: Context size of the engine, in tokens.
            note: Any text.
            created: Time of the save in seconds since 1970. Default: now.
            predicted: Total bytes of rows and objects; the save fails for another total.

        Returns:
            A dictionary: `id`, `cached_tokens` (0), `cache_write_tokens` and `bytes_written`.

        Raises:
            InputError: An argument is unsuitable, or there is no space.
            Error: The file cannot be written. Then there is no file.

        Example:
            >>> chunks = iter([bytes(1000), bytes(500)])
            >>> saved = files.save([1, 2, 3], objects={"state": chunks}, note="not split by tokens")
            >>> files.lookup([1, 2, 3, 4])[0].objects
            [('state', 1500)]
        """

    def lookup(self, tokens: Iterable[int], most: int = 4) -> list[SessionFile]:
        """Returns the sessions that are a prefix of a prompt.

        Args:
            tokens: Tokens of the prompt.
            most: Most sessions to return.

        Returns:
            Open session files, longest first.

        Raises:
            Error: The directory cannot be read.

        Example:
            >>> [len(file.tokens) for file in files.lookup([*tokens, 7])]
            [300]
        """

    def lookup_text(self, text: bytes, most: int = 4) -> list[SessionFile]:
        """Returns the sessions whose rendered text is a prefix of a text.

        Args:
            text: Rendered text of the prompt.
            most: Most sessions to return.

        Returns:
            Open session files, longest first.

        Raises:
            Error: The directory cannot be read.

        Example:
            >>> [file.text for file in files.lookup_text(b"the prompt, and more")]
            [b'the prompt']
        """

    def restore(self, file: SessionFile, rows: Any = None, objects: Any = None) -> _Restored:
        """Reads a session into buffers, as `SessionFile.restore`.

        A session that fails verification is excluded from later lookups. Otherwise it counts as
        used now.

        Args:
            file: A session file that a lookup returned.
            rows: Writable memory per piece, or one `Spans`.
            objects: Writable memory per object.

        Returns:
            A dictionary, as `SessionFile.restore`.

        Raises:
            InputError: The buffers do not match the session. No byte was read.

        Example:
            >>> [file] = files.lookup(tokens)
            >>> files.restore(file, [bytearray(size) for _, _, size in file.pieces])["whole"]
            True
        """

    def list(self) -> builtins.list[_FileSession]:
        """Returns all sessions, newest first.

        Returns:
            A dictionary per session: `id`, `tokens` (a number), `text_bytes`, `bytes` of rows and
            objects, `created`, `reason`, `note`, and `bad`, true if it failed verification.

        Example:
            >>> [(row["tokens"], row["bytes"]) for row in files.list()]
            [(300, 4800)]
        """

    def refresh(self) -> None:
        """Looks for sessions that other processes saved or removed.

        Raises:
            Error: The directory cannot be read.

        Example:
            >>> files.refresh()
        """

    def remove(self, session: str) -> None:
        """Removes a session. A process that has its file open can still read it.

        Args:
            session: Session ID, or a unique prefix of it.

        Raises:
            Error: There is no such session, or its file cannot be removed.

        Example:
            >>> files.remove(saved["id"])
            >>> files.list()
            []
        """

    def verify(self, session: str) -> builtins.list[str]:
        """Reads a whole session and verifies it.

        Args:
            session: Session ID, or a unique prefix of it.

        Returns:
            A description of each part that failed; empty for a sound session.

        Raises:
            Error: There is no such session, or its file cannot be read.

        Example:
            >>> files.verify(saved["id"])
            []
        """

    def export(self, session: str, path: str | os.PathLike[str]) -> int:
        """Copies a session to a file and verifies it.

        Args:
            session: Session ID, or a unique prefix of it.
            path: Path of the new file.

        Returns:
            Size of the copy in bytes.

        Raises:
            Error: There is no such session, a part failed verification, or the file cannot be
                written.

        Example:
            >>> files.export(saved["id"], "kept.copy") == files.lookup(tokens)[0].bytes
            True
        """

    def import_file(self, path: str | os.PathLike[str]) -> str:
        """Copies a session file into the directory and verifies it.

        Args:
            path: Path of the session file.

        Returns:
            The session ID.

        Raises:
            InputError: The session is of another model, or there is no space.
            Error: The file cannot be read, or failed verification.

        Example:
            >>> size = files.export(saved["id"], "kept.copy")
            >>> files.remove(saved["id"])
            >>> files.import_file("kept.copy") == saved["id"]
            True
        """

@final
class Sessions:
    """Saved states of conversations in a depot, for one model (docs/sessions.md).

    Sessions that differ in any field are never found. In `kvdepot.sessions` this class is also
    `open`.

    Args:
        depot: An open depot.
        model: Model ID.
        dtype: Element type of the rows.
        piece_tokens: Tokens per piece, the unit that sessions share, 1 to 1048576.
        weights: Fingerprint of the weights.
        layout: Anything else that a state depends on, such as element types, tokenizer and
            positions.
        world: Tensor and pipeline parallel sizes.
        hash: Hash algorithm of keys.
        salt: Secret or label that separates tenants.

    Raises:
        InputError: A field is not allowed.

    Example:
        >>> import kvdepot.sessions
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "64MiB"}, "socket": "off"})
        >>> store = kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=256)
        >>> tokens = list(range(600))
        >>> def rows(runs):
        ...     return [bytes((end - first) * 16) for first, end in runs]  # 16 bytes per token
        >>> saved = store.save(tokens, rows, text=b"the prompt")
        >>> saved["cached_tokens"], saved["cache_write_tokens"]
        (0, 600)
    """

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
        """Saves a state. Only rows that are not stored yet are requested and written.

        Args:
            tokens: Token ids of the state, from 0 to 2^32 - 1.
            rows: Called once with the runs of missing tokens, each (first, one past the last).
                Returns memory per run, with the rows of its tokens, or one `Spans`. The memory is
                read until the save returns.
            text: Rendered text of the tokens, for `lookup_text`.
            reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
            context_tokens: Context size of the engine, in tokens.
            objects: Parts that do not grow with the tokens, by name, such as logits or a recurrent
                state: memory of 1 byte to 1 GiB.
            note: Any text.
            created: Time of the save in seconds since 1970. Default: now.
            exact: Request all rows, and keep rows that differ from stored ones in addition to them.

        Returns:
            A dictionary: `id`, `cached_tokens` that were stored already, `cache_write_tokens`, and
            `bytes_written`.

        Raises:
            InputError: An argument, or the memory that `rows` returned, is unsuitable.
            Error: A part was not stored, for example for lack of space. Then there is no session.

        Example:
            >>> longer = list(range(700))
            >>> saved = store.save(longer, rows, reason="continued", objects={"logits": bytes(100)})
            >>> saved["cached_tokens"], saved["cache_write_tokens"]  # two full pieces were stored
            (512, 188)
        """

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
        """Saves a state whose rows arrive in chunks of any size, for example from a serializer.

        At most two pieces are in memory.

        Args:
            tokens: Token ids of the state, from 0 to 2^32 - 1.
            size: Bytes per token, or a function (first, one past the last) that returns the bytes
                of a run.
            chunks: Called once with the runs of missing tokens. Returns buffers with their rows,
                concatenated and split anywhere.
            text: Rendered text of the tokens, for `lookup_text`.
            reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
            context_tokens: Context size of the engine, in tokens.
            objects: Parts that do not grow with the tokens, by name.
            note: Any text.
            created: Time of the save in seconds since 1970. Default: now.

        Returns:
            A dictionary, as `save`.

        Raises:
            InputError: An argument is unsuitable.
            Error: The chunks have more or fewer bytes than `size`, or a part was not stored. Then
                there is no session.

        Example:
            >>> def chunks(runs):
            ...     for first, end in runs:
            ...         for _ in range(first, end):
            ...             yield bytes(16)
            >>> store.save_chunks(list(range(1000, 1300)), 16, chunks)["cache_write_tokens"]
            300
        """

    def stream(self, tokens: Iterable[int] | None = None) -> SessionStream:
        """Starts a session whose length is unknown.

        Args:
            tokens: Tokens that are known at the beginning. Full pieces of them that are stored
                already become part of the session.

        Returns:
            The stream. End it with `commit`; otherwise its parts are removed.

        Raises:
            Error: The depot cannot be read.

        Example:
            >>> with store.stream() as stream:
            ...     stream.append([1, 2, 3], [bytes(48)])
            ...     saved = stream.commit()
            >>> saved["cache_write_tokens"]
            3
        """

    def sweep(self) -> int:
        """Removes all pieces and objects that no session names, such as those of killed saves.

        Do not save at the same time: such a save fails if a part of it is removed.

        Returns:
            The number of blocks that were removed.

        Raises:
            Error: A manifest or the depot cannot be read.

        Example:
            >>> store.sweep()
            0
        """

    def lookup(self, tokens: Iterable[int], most: int = 4) -> list[SessionFound]:
        """Returns the complete sessions that are a prefix of a prompt.

        Args:
            tokens: Tokens of the prompt.
            most: Most sessions to return.

        Returns:
            Sessions, longest first.

        Raises:
            Error: The depot cannot be read.

        Example:
            >>> [len(found.tokens) for found in store.lookup([*tokens, 7])]
            [600]
        """

    def lookup_text(self, text: bytes, most: int = 4) -> list[SessionFound]:
        """Returns the complete sessions whose rendered text is a prefix of a text.

        Args:
            text: Rendered text of the prompt.
            most: Most sessions to return.

        Returns:
            Sessions, longest first. Tokenize only the text after `text_bytes` of the chosen one.

        Raises:
            Error: The depot cannot be read.

        Example:
            >>> [found.text_bytes for found in store.lookup_text(b"the prompt, and more")]
            [10]
        """

    def prefix(self, tokens: Iterable[int]) -> int:
        """Returns the number of leading tokens whose rows are stored, in pieces of any session.

        Args:
            tokens: Tokens of the prompt.

        Returns:
            A number of tokens at the end of a piece.

        Raises:
            Error: The depot cannot be read.

        Example:
            >>> store.prefix(range(550))
            512
        """

    def restore(self, found: SessionFound, rows: Any, objects: Any | None = None) -> _Restored:
        """Reads a session into buffers and verifies it.

        A session that is incomplete or corrupt is excluded from later lookups until it is saved
        again or `refresh` finds it. Then try the next session that `lookup` returned.

        Args:
            found: A session that `lookup` returned.
            rows: Writable memory per piece, in the order and of the lengths of `found.pieces`; or
                one `Spans`.
            objects: Writable memory per object, in the order and of the lengths of `found.objects`.

        Returns:
            A dictionary: `cached_tokens`, the leading tokens whose rows were read, and `whole`,
            true if all parts were read and verified. `cache_write_tokens` is 0.

        Raises:
            InputError: The buffers do not match the session. No byte was read.
            Error: The depot cannot be read.

        Example:
            >>> [found] = store.lookup(tokens)
            >>> store.restore(found, [bytearray(size) for _, _, size in found.pieces])
            {'cached_tokens': 600, 'cache_write_tokens': 0, 'whole': True}
        """

    def list(self) -> builtins.list[_Session]:
        """Returns all sessions, newest first.

        Returns:
            A dictionary per session: `id`, `tokens` (a number), `text_bytes`, `bytes` of its parts,
            `created`, `reason`, `note`, and `bad`, true if it was incomplete or corrupt. `hits` and
            `used` are the approximate number of restores and the time of the last one.

        Raises:
            Error: The depot cannot be read.

        Example:
            >>> [(row["tokens"], row["reason"], row["hits"]) for row in store.list()]
            [(600, 'asked', 0)]
        """

    def refresh(self) -> None:
        """Looks for sessions that other processes saved or removed.

        Raises:
            Error: The depot cannot be read.

        Example:
            >>> store.refresh()
        """

    def remove(self, session: str) -> None:
        """Removes a session, and the parts that no other session names.

        Args:
            session: Session ID, or a unique prefix of it.

        Raises:
            Error: There is no such session, or the depot cannot be read.

        Example:
            >>> store.remove(saved["id"])
            >>> store.list()
            []
        """

    def trim(self, most: int | str, keep: builtins.list[str] | None = None) -> builtins.list[str]:
        """Removes sessions until the rest fits a size, each shared part counted once.

        Sessions that a longer one of the same conversation supersedes are removed first, then those
        that save the least compute per byte.

        Args:
            most: Most bytes of all sessions together, or a text such as "64GiB".
            keep: IDs of sessions that stay.

        Returns:
            IDs of the removed sessions, in the order of their removal.

        Raises:
            Error: There is no session in `keep`, or the depot cannot be read.

        Example:
            >>> store.trim("1GiB"), store.trim(1) == [saved["id"]]
            ([], True)
        """

    def verify(self, session: str) -> builtins.list[str]:
        """Reads a whole session and verifies it.

        Args:
            session: Session ID, or a unique prefix of it.

        Returns:
            A description of each part that is missing or corrupt; empty for a sound session.

        Raises:
            Error: There is no such session, or the depot cannot be read.

        Example:
            >>> store.verify(saved["id"])
            []
        """

    def export(self, session: str, path: str | os.PathLike[str], *, ds4: bool = False) -> int:
        """Writes a session to one file.

        Args:
            session: Session ID, or a unique prefix of it.
            path: Path of the new file.
            ds4: Write the file of ds4 that was imported, byte for byte.

        Returns:
            Size of the file in bytes.

        Raises:
            Error: There is no such session, a part is missing or corrupt, or the file cannot be
                written.

        Example:
            >>> store.export(saved["id"], "conversation.kvs") > 9600
            True
        """

    def import_file(self, path: str | os.PathLike[str], *, ds4: bool = False) -> str:
        """Saves a session from a file that `export` wrote.

        The file is verified completely before a byte is stored. Files of ds4 have no checksums, so
        that only their structure is checked.

        Args:
            path: Path of the file.
            ds4: Read a file of ds4.

        Returns:
            The session ID.

        Raises:
            Error: The file is not sound, is of another model, or a part was not stored.

        Example:
            >>> size = store.export(saved["id"], "conversation.kvs")
            >>> store.remove(saved["id"])
            >>> store.import_file("conversation.kvs") == saved["id"]
            True
        """

    def text(self, session: str) -> bytes:
        """Returns the rendered text of a session.

        Args:
            session: Session ID, or a unique prefix of it.

        Returns:
            The text; empty if it was not saved.

        Raises:
            Error: There is no such session, or the depot cannot be read.

        Example:
            >>> store.text(saved["id"])
            b'the prompt'
        """

@final
class SessionStream:
    """A session that is written while its length is unknown.

    A context manager: leaving the block without `commit` removes the parts.

    Example:
        >>> import kvdepot.sessions
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "64MiB"}, "socket": "off"})
        >>> store = kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=256)
        >>> stream = store.stream()
        >>> stream.append(range(300), [bytes(300 * 16)])
        >>> stream.cached_tokens, len(stream.tokens), stream.room
        (0, 300, 212)
    """

    @property
    def cached_tokens(self) -> int:
        """Number of leading tokens whose rows are stored. Append rows from this token on."""

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""

    @property
    def room(self) -> int:
        """Tokens until the end of the present piece."""

    @property
    def bytes_written(self) -> int:
        """Bytes that are stored, or being stored."""

    def append(self, tokens: Iterable[int], rows: Any) -> None:
        """Adds tokens and their rows.

        A chunk inside a piece may have any layout. A chunk that exceeds `room` is split, and needs
        equal bytes per token. The memory may be reused when the call returns.

        Args:
            tokens: The next tokens.
            rows: Memory with their rows, in one or several buffers.

        Raises:
            InputError: An argument is unsuitable. The stream can continue.
            Error: A part was not stored. The stream has ended, and its parts are removed.

        Example:
            >>> stream.append(range(300, 310), [bytes(10 * 16)])
            >>> stream.room
            202
        """

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
        """Stores the rest and makes the stream a session.

        Args:
            text: Rendered text of the tokens, for `lookup_text`.
            reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
            context_tokens: Context size of the engine, in tokens.
            objects: Parts that do not grow with the tokens, by name.
            note: Any text.
            created: Time of the save in seconds since 1970. Default: now.

        Returns:
            A dictionary, as `Sessions.save`.

        Raises:
            InputError: An argument is unsuitable. The stream can continue.
            Error: A part was not stored. The stream has ended, and its parts are removed.

        Example:
            >>> stream.commit(reason="continued")["cache_write_tokens"]
            300
        """

    def abort(self) -> None:
        """Ends the stream without a session, and removes its parts that no session names.

        Raises:
            Error: The depot cannot be read. Parts that remain are ordinary blocks.

        Example:
            >>> stream.abort()
            >>> store.list()
            []
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, _kind: object, _error: object, _trace: object) -> None: ...

@type_check_only
class _Step(TypedDict):
    copied: int  # bytes
    left: int  # bytes that remain
    full: bool  # the slice ended because memory was short

@type_check_only
class _Progress(TypedDict):
    bytes: int  # rows that were missing at the beginning
    copied: int  # of these bytes
    written: int  # of these bytes
    over: bool  # the save has ended

@final
class SessionSaver:
    """Saves sessions on its own thread while the engine continues.

    A context manager: leaving the block finishes the saves whose rows are copied. If an exception
    ends the block, all saves are cancelled. In `kvdepot.sessions` its name is `Saver`.

    Args:
        sessions: The sessions of a depot.
        memory: Most bytes that all snapshots together have in memory, or a text such as "256MiB".
            At least a piece, and the objects of a save.
        pace: Bytes per second to write, or a text. Default: no limit.

    Raises:
        InputError: A size is too small.

    Example:
        >>> import kvdepot.sessions
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "64MiB"}, "socket": "off"})
        >>> store = kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=256)
        >>> def rows(runs):
        ...     return [bytes((end - first) * 16) for first, end in runs]  # 16 bytes per token
        >>> saver = kvdepot.sessions.Saver(store, memory="16MiB", pace="200MiB")
        >>> snapshot = saver.begin(range(600), rows)
        >>> while snapshot.left:
        ...     step = snapshot.step(seconds=0.001)  # between two steps of the engine
        >>> snapshot.wait(timeout=30)["cache_write_tokens"]
        600
    """

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
        """Starts a save.

        The memory that `rows` returned must not change until `left` of the snapshot is 0. Objects
        are copied immediately.

        Args:
            tokens: Token ids of the state, from 0 to 2^32 - 1.
            rows: Called once with the runs of missing tokens, as in `Sessions.save`.
            whole: Reserve memory for the whole snapshot at once. With False it is reserved piece by
                piece, as others are written.
            within: Seconds to wait for the memory that is reserved now.
            policy: The policy that granted the save; it is notified of the end.
            save: The `save` number of the policy's answer.
            text: Rendered text of the tokens, for `lookup_text`.
            reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
            context_tokens: Context size of the engine, in tokens.
            objects: Parts that do not grow with the tokens, by name.
            note: Any text.
            created: Time of the save in seconds since 1970. Default: now.

        Returns:
            The snapshot. Call `step` or `finish` to copy its rows.

        Raises:
            InputError: An argument is unsuitable.
            Error: There is not enough memory within `within` seconds.

        Example:
            >>> snapshot = saver.begin(range(700), rows, whole=True, within=1.0)
            >>> snapshot.finish()
            >>> snapshot.wait(timeout=30)["cached_tokens"]
            512
        """

    def flush(self, timeout: float | None = None) -> None:
        """Waits, without pace, for the end of all saves whose rows are copied.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Raises:
            TimeoutError: The wait timed out. The saves continue.

        Example:
            >>> saver.flush(timeout=30)
        """

    def close(self, timeout: float | None = None) -> None:
        """Finishes, without pace, the saves whose rows are copied, and cancels the others.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Raises:
            TimeoutError: The wait timed out. The saves continue, and the call may be repeated.

        Example:
            >>> saver.close(timeout=30)
        """

    def cancel(self) -> None:
        """Cancels all saves that have not ended, and removes their parts.

        Example:
            >>> snapshot = saver.begin(range(1000, 2000), rows)
            >>> saver.cancel()
            >>> len(store.list())
            1
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, _error: object, _trace: object) -> None: ...

@final
class SessionSnapshot:
    """Rows of one save, which the engine copies in slices between its steps.

    Dropping the snapshot before all rows are copied cancels its save.

    Example:
        >>> import kvdepot.sessions
        >>> depot = kvdepot.open("Cache", {"cache": {"capacity": "64MiB"}, "socket": "off"})
        >>> store = kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=256)
        >>> saver = kvdepot.sessions.Saver(store, memory="16MiB")
        >>> rows = lambda runs: [bytes((end - at) * 16) for at, end in runs]
        >>> snapshot = saver.begin(range(600), rows)
        >>> snapshot.left
        9600
    """

    @property
    def left(self) -> int:
        """Bytes that remain to be copied. At 0 the engine may reuse its memory."""

    def step(self, *, bytes: int | None = None, seconds: float | None = None) -> _Step:
        """Copies a slice without waiting.

        Args:
            bytes: Bytes to copy. Exactly one of `bytes` and `seconds` is required.
            seconds: Time to copy for.

        Returns:
            A dictionary: `copied` and `left` in bytes, and `full`, true if the slice ended because
            memory was short.

        Raises:
            InputError: Both or neither of the arguments were given.
            Error: The save has failed.

        Example:
            >>> snapshot.step(bytes=4096)
            {'copied': 4096, 'left': 5504, 'full': False}
        """

    def finish(self, timeout: float | None = None) -> None:
        """Copies all remaining rows, and waits for memory if it is short.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Raises:
            TimeoutError: The wait timed out. The save continues.
            Error: The save has failed.

        Example:
            >>> snapshot.finish(timeout=30)
            >>> snapshot.left
            0
        """

    def progress(self) -> _Progress:
        """Returns the progress of the save.

        Returns:
            A dictionary: `bytes` that were missing, `copied` and `written` of them, and `over`,
            true if the save has ended.

        Example:
            >>> progress = snapshot.progress()
            >>> progress["bytes"], progress["copied"], progress["over"]
            (9600, 0, False)
        """

    def wait(self, timeout: float | None = None) -> _Saved:
        """Waits for the end of the save.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            A dictionary, as `Sessions.save`.

        Raises:
            TimeoutError: The wait timed out. The save continues.
            Error: The save has failed, or was cancelled.

        Example:
            >>> snapshot.finish()
            >>> snapshot.wait(timeout=30)["cache_write_tokens"]
            600
        """

@type_check_only
class _Entry(TypedDict):
    id: int
    parent: int | None
    reason: str
    tokens: int
    bytes: int  # that a deletion frees
    hits: int  # restores
    used: float  # last save or restore, in seconds since 1970
    pins: int

@final
class SessionCatalogue:
    """Checkpoints on disk, in the order in which they should be deleted when space is short.

    The order is the least compute saved per byte first, with a half-life of six hours for hits.
    Superseded continued checkpoints come before the others, and pinned ones are never selected. The
    catalogue deletes nothing itself. In `kvdepot.sessions` its name is `Catalogue`.

    Example:
        >>> import kvdepot.sessions
        >>> catalogue = kvdepot.sessions.Catalogue()
        >>> catalogue.insert(1, tokens=10_000, bytes=100 << 20)
        >>> catalogue.insert(2, tokens=20_000, bytes=100 << 20, parent=1)
        >>> catalogue.bytes >> 20
        200
    """

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
        """Adds a checkpoint, or replaces the one with the same ID.

        Args:
            id: Number of the checkpoint, chosen by the caller.
            tokens: Number of tokens.
            bytes: Bytes that its deletion frees, without parts that other checkpoints share.
            reason: "cold", "continued", "evict" or "shutdown".
            parent: ID of the longest checkpoint in the catalogue that is a prefix of this one.
            hits: Number of restores.
            used: Time of the last save or restore, in seconds since 1970. Default: now.

        Raises:
            InputError: `reason` is unknown.

        Example:
            >>> catalogue.insert(3, tokens=512, bytes=30 << 20, reason="cold", hits=4)
            >>> [entry["id"] for entry in catalogue.entries()]
            [1, 2, 3]
        """

    def remove(self, id: int) -> bool:
        """Removes a checkpoint that was deleted from disk.

        Args:
            id: Number of the checkpoint.

        Returns:
            True if the catalogue had it.

        Example:
            >>> catalogue.remove(1), catalogue.remove(1)
            (True, False)
        """

    def hit(self, id: int, *, at: float | None = None) -> bool:
        """Records that a conversation was restored from a checkpoint, which stays on disk.

        Args:
            id: Number of the checkpoint.
            at: Time in seconds since 1970. Default: now.

        Returns:
            True if the catalogue has it.

        Example:
            >>> catalogue.hit(2)
            True
        """

    def pin(self, id: int) -> bool:
        """Protects a checkpoint until `unpin` was called the same number of times.

        Args:
            id: Number of the checkpoint.

        Returns:
            True if the catalogue has it.

        Example:
            >>> catalogue.pin(1)
            True
        """

    def unpin(self, id: int) -> bool:
        """Ends one pin of a checkpoint.

        Args:
            id: Number of the checkpoint.

        Returns:
            True if it had a pin.

        Example:
            >>> catalogue.pin(1), catalogue.unpin(1), catalogue.unpin(1)
            (True, True, False)
        """

    def set_other(self, id: int, bytes: int) -> None:
        """Records other bytes on disk, such as those of a save in progress or an orphaned file.

        Args:
            id: Number of the entry, chosen by the caller.
            bytes: Bytes on disk; 0 removes the entry.

        Example:
            >>> catalogue.set_other(1, 50 << 20)
            >>> catalogue.bytes >> 20
            250
        """

    @property
    def bytes(self) -> int:
        """Bytes of all checkpoints and of all other entries."""

    def entries(self) -> list[_Entry]:
        """Returns all checkpoints, sorted by ID.

        Returns:
            A dictionary per checkpoint: the arguments of `insert`, and `pins`.

        Example:
            >>> [(entry["id"], entry["tokens"], entry["pins"]) for entry in catalogue.entries()]
            [(1, 10000, 0), (2, 20000, 0)]
        """

    def make_room(
        self, incoming: int, disk_space: int | str, *, at: float | None = None
    ) -> list[int] | None:
        """Selects checkpoints to delete so that new data fits on the disk.

        Args:
            incoming: Bytes of the new data.
            disk_space: Most bytes on disk, or a text such as "64GiB".
            at: Time in seconds since 1970. Default: now.

        Returns:
            IDs in the order of deletion. None if the data cannot fit: then delete nothing, and do
            not save.

        Raises:
            InputError: `disk_space` is not a size.

        Example:
            >>> catalogue.make_room(100 << 20, "256MiB")
            [1]
        """

@final
class SessionPolicy:
    """Decides when an engine saves a checkpoint, with the names and defaults of ds4.

    The engine reports its progress in tokens; the policy returns a save that is due. In
    `kvdepot.sessions` it is `Policy` or `policy`. docs/design/sessions.md lists the reasons for a
    save.

    Args:
        disk_space: Most bytes on disk, or a text such as "64GiB". Larger checkpoints are declined.
            Default: 4 GiB.
        min_tokens: Shortest checkpoint, in tokens. Default: 512.
        cold_max_tokens: Longest cold checkpoint, in tokens; 0: none are saved. Default: 30,000.
        continued_interval_tokens: Tokens between continued checkpoints, rounded up to the
            alignment; 0: none are saved. Default: 10,000.
        boundary_trim_tokens: Tokens at the end of the prompt that a cold checkpoint omits. Default:
            32.
        boundary_align_tokens: Alignment of cold checkpoints and of the interval, in tokens; 0:
            none. Default: 2,048.
        write_budget_hour: Most bytes written in any hour. Default: no limit.
        write_budget_day: Most bytes written in any day. Default: no limit.
        token_bytes: Estimated bytes per token. Default: 13,800.
        fixed_bytes: Estimated bytes of a checkpoint regardless of its length. Default: 23 MiB.
        prefixes: The engine can save and restore the first tokens of a state.
        whole: Each save writes the whole state instead of new parts only.

    Raises:
        ConfigError: A setting is not allowed.
        InputError: A size is not allowed.

    Example:
        >>> import kvdepot.sessions
        >>> policy = kvdepot.sessions.policy(write_budget_hour="2GiB")
        >>> policy.start(20_000)
        >>> policy.next_stop()
        10240
        >>> due = policy.prefill(18_432)
        >>> due["reason"], due["tokens"], due["base"]
        ('cold', 18432, 0)
    """

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
        """Reports that a prompt starts in a slot.

        Args:
            tokens: Tokens of the prompt, including reused ones.
            restored: Tokens that were loaded from disk. At most one of `restored` and `live` is
                allowed.
            live: Tokens of the slot that stay in memory.
            anchor: Tokens before the last user message that precedes the first answer, if the
                engine knows them.
            slot: Number of the slot, chosen by the caller.

        Raises:
            InputError: Both `restored` and `live` were given.

        Example:
            >>> policy.start(30_000, live=18_432)
        """

    def next_stop(self, *, slot: int = 0) -> int | None:
        """Returns the position at which prefill should stop and report next.

        Args:
            slot: Number of the slot.

        Returns:
            A number of tokens; None if no stop is needed.

        Example:
            >>> policy.start(20_000, slot=1)
            >>> policy.next_stop(slot=1)
            10240
        """

    def prefill(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """Reports the progress of prefill.

        Args:
            tokens: Tokens of the slot in memory now.
            slot: Number of the slot.
            at: Time in seconds since 1970. Default: now.

        Returns:
            None if no save is due. A dictionary with `save`, `tokens`, `base`, `reason` and `bytes`
            for a save: write `tokens` tokens, of which the first `base` are on disk, in at most
            `bytes` bytes. A dictionary with `declined`, the reason, for one that is not granted.

        Example:
            >>> policy.start(20_000, slot=1)
            >>> policy.prefill(4_096, slot=1) is None
            True
        """

    def decode(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """Reports the progress of decoding.

        Args:
            tokens: Tokens of the slot in memory now. Fewer than before mean that the conversation
                was cut back.
            slot: Number of the slot.
            at: Time in seconds since 1970. Default: now.

        Returns:
            The answer, as `prefill`.

        Example:
            >>> policy.saved(due["save"], due["bytes"])
            >>> policy.decode(30_720)["reason"]
            'continued'
        """

    def switch(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """Reports that another conversation is about to replace the tokens of a slot.

        Args:
            tokens: Tokens of the slot in memory now.
            slot: Number of the slot.
            at: Time in seconds since 1970. Default: now.

        Returns:
            The answer, as `prefill`.

        Example:
            >>> policy.saved(due["save"], due["bytes"])
            >>> policy.switch(20_000)["reason"]
            'evict'
        """

    def shutdown(
        self, tokens: int, *, slot: int = 0, at: float | None = None
    ) -> dict[str, Any] | None:
        """Reports that the engine stops.

        Args:
            tokens: Tokens of the slot in memory now.
            slot: Number of the slot.
            at: Time in seconds since 1970. Default: now.

        Returns:
            The answer, as `prefill`.

        Example:
            >>> policy.saved(due["save"], due["bytes"])
            >>> policy.shutdown(20_000)["reason"]
            'shutdown'
        """

    def saved(self, save: int, bytes: int, *, at: float | None = None) -> None:
        """Reports that a granted save has succeeded.

        Args:
            save: The `save` number of the answer.
            bytes: Bytes that were written.
            at: Time in seconds since 1970. Default: now.

        Raises:
            Error: The save was not granted, or has ended already.

        Example:
            >>> policy.saved(due["save"], 250_000_000)
            >>> policy.bytes_left() == (2 << 30) - 250_000_000
            True
        """

    def failed(self, save: int, bytes: int = 0, *, at: float | None = None) -> None:
        """Reports that a granted save has failed.

        Args:
            save: The `save` number of the answer.
            bytes: Bytes that were written before the failure.
            at: Time in seconds since 1970. Default: now.

        Raises:
            Error: The save was not granted, or has ended already.

        Example:
            >>> policy.failed(due["save"])
        """

    def lost(self, tokens: int, *, slot: int = 0) -> None:
        """Reports that checkpoints of a slot's conversation were deleted or failed verification.

        Args:
            tokens: Leading tokens that are still on disk.
            slot: Number of the slot.

        Example:
            >>> policy.lost(0)
        """

    def recall(self, bytes: int, *, at: float) -> None:
        """Adds bytes to the write budgets that were written before this policy was created.

        After a restart, report the writes of the last day, for example from a catalogue.

        Args:
            bytes: Bytes that were written.
            at: Time of the write, in seconds since 1970.

        Example:
            >>> import time
            >>> before = policy.bytes_left()
            >>> policy.recall(1 << 20, at=time.time())
            >>> before - policy.bytes_left()
            1048576
        """

    def bytes_left(self, *, at: float | None = None) -> int | None:
        """Returns the bytes that may be written now.

        Both budgets count, without the bytes of saves in progress.

        Args:
            at: Time in seconds since 1970. Default: now.

        Returns:
            Bytes; None without a budget.

        Example:
            >>> policy.bytes_left() == (2 << 30) - due["bytes"]
            True
        """

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by their names: sizes in bytes, and None for a budget without a limit."""

    @property
    def write_amplification(self) -> float | None:
        """Ratio of all bytes written to those of new tokens; None before there are any."""
