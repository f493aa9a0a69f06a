"""Servers that are forked from one process, which has imported vLLM once for all of them.

A server has at least three processes, and imports take most of the time in which each starts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import forks
from vllm_demo.server import Server


class ForkedServer(Server):
    """A server that is forked. If no process has imported vLLM, the first server starts one."""

    def launch(self, command: list[str], sink: BinaryIO, env: dict[str, str]) -> Any:
        if not (forks.is_there(forks.VLLM) or forks.start(forks.VLLM)):
            return super().launch(command, sink, env)
        # The arguments after the interpreter, `-m` and the module.
        program = [str(Path(__file__).with_name("engine_forks.py")), *command[3:]]
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), sink.fileno(), sink.fileno())
            return forks.Process(
                forks.VLLM, program, environment=env, streams=streams, new_session=True
            )
