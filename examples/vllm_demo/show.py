"""Progress and streamed answers in a terminal; plain lines where there is none."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .measure import Answer

INDENT = "      "
WIDTH_MAX = 96


class Show:
    """The demo's output, with the seconds since its start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._console = Console()

    def say(self, line: str = "") -> None:
        """Print one line."""
        print(f"[{time.monotonic() - self._start:6.1f} s] {line}" if line else "", flush=True)

    @contextlib.contextmanager
    def waiting(self, what: str, usual_s: float | str) -> Iterator[None]:
        """Show a bar while the block runs, or print one line where there is no terminal."""
        usual = usual_s if isinstance(usual_s, str) else f"{usual_s:.2g}"
        text = f"{what} (usually {usual} s)"
        if not self._console.is_terminal:
            self.say(text)
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
        with Progress(
            *columns, TimeElapsedColumn(), console=self._console, transient=True
        ) as progress:
            progress.add_task(text, total=None)
            yield

    def answer(
        self, label: str, usual_s: float, request: Callable[[Callable[[str], None]], Answer]
    ) -> Answer:
        """Run `request`, print the time to its first token, then its text as it arrives."""
        started = time.perf_counter()
        width = min(shutil.get_terminal_size().columns, WIDTH_MAX)
        column = 0
        partial = ""

        def write(piece: str) -> None:
            nonlocal partial
            if column == 0:
                begin()
            *words, partial = (partial + piece.replace("\n", " ")).split(" ")
            for word in words:
                put(word)

        def begin() -> None:
            nonlocal column
            bar.close()
            seconds = time.perf_counter() - started
            print(f"    {label}: first token after {seconds:.2f} s\n{INDENT}", end="")
            column = len(INDENT)

        def put(word: str) -> None:
            nonlocal column
            if column > len(INDENT) and column + len(word) > width:
                print(f"\n{INDENT}", end="")
                column = len(INDENT)
            print(word, end=" ", flush=True)
            column += len(word) + 1

        with contextlib.ExitStack() as bar:
            bar.enter_context(self.waiting(f"    {label}: waiting for the first token", usual_s))
            answer = request(write)
        put(partial)
        print(flush=True)
        return answer
