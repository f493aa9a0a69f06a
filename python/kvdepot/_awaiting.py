"""Awaiting tasks: each loop has one descriptor for all of them, while one is awaited."""

import asyncio

from kvdepot._native import Completions, Task


class _Waits:
    """What the tasks of one loop are awaited by."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ended = Completions()
        self._count = 0
        loop.add_reader(self._ended.fileno(), self._tell)

    def _tell(self) -> None:
        for future, outcomes in self._ended.drain():
            # A wait that was cancelled has an end already.
            if not future.done():
                future.set_result(outcomes)

    async def wait(self, task: Task) -> list[bool]:
        future: asyncio.Future[list[bool]] = self._loop.create_future()
        self._count += 1
        try:
            self._ended.add(task, future)
            return await future
        finally:
            self._count -= 1
            if self._count == 0:
                # Nothing is left behind for a loop that ends.
                del _waits[self._loop]
                self._loop.remove_reader(self._ended.fileno())
                self._ended.close()


_waits: dict[asyncio.AbstractEventLoop, _Waits] = {}


async def wait(task: Task) -> list[bool]:
    """Wait in the running loop until `task` has ended; its answer is that of `Task.wait`."""
    if task.done:
        return task.wait()
    loop = asyncio.get_running_loop()
    if loop not in _waits:
        _waits[loop] = _Waits(loop)
    return await _waits[loop].wait(task)
