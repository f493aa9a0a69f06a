"""Awaiting of tasks: each event loop has one descriptor for all tasks that it awaits."""

import asyncio
import weakref
from typing import Any, overload

from kvdepot._native import Completions, Task, TransferTask


class _Waits:
    """Awaited tasks of one event loop."""

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

    async def wait(self, task: Task | TransferTask) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._count += 1
        try:
            self._ended.add(task, future)
            return await future
        finally:
            self._count -= 1
            if self._count == 0:
                # Nothing is left behind for a loop that ends.
                _waits.pop(id(self._loop), None)
                if not self._loop.is_closed():
                    self._loop.remove_reader(self._ended.fileno())
                self._ended.close()


# By the loop, which each has. Those who wait have them: a loop that is closed with waits under way
# is garbage together with these.
_waits: weakref.WeakValueDictionary[int, _Waits] = weakref.WeakValueDictionary()


@overload
async def wait(task: Task) -> list[bool]: ...
@overload
async def wait(task: TransferTask) -> bool: ...
async def wait(task: Task | TransferTask) -> list[bool] | bool:
    """Waits in the running event loop until a task has ended.

    Args:
        task: Task of a depot or of a transfer engine.

    Returns:
        The result of the task's `wait`.
    """
    if task.done:
        return task.wait()
    loop = asyncio.get_running_loop()
    waits = _waits.get(id(loop))
    if waits is None:
        waits = _waits[id(loop)] = _Waits(loop)
    answer: list[bool] | bool = await waits.wait(task)
    return answer
