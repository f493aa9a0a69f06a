"""Only a process's main interpreter may import the package."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.unit

Child = Callable[..., subprocess.Popen[Any]]

PROGRAM = """
    import sys, textwrap, threading

    try:
        import _xxsubinterpreters as interpreters
    except ImportError:
        try:
            import _interpreters as interpreters
        except ImportError:
            print("none")
            sys.exit()

    def sub():
        # As embedding programs make them: with the process's one lock.
        try:
            interpreter = interpreters.create("legacy")
        except (TypeError, ValueError):
            interpreter = interpreters.create(isolated=False)
        run = getattr(interpreters, "run_string", None) or interpreters.exec
        program = textwrap.dedent('''
            try:
                import kvdepot
            except ImportError as error:
                answer = str(error)
            else:
                answer = "imported"
            import os
            os.write(1, (answer + chr(10)).encode())
        ''')
        run(interpreter, program)
        interpreters.destroy(interpreter)

    if sys.argv[1] == "before":
        sub()
    import kvdepot
    with kvdepot.open("Cache", {"cache": {"capacity": "1MiB"}, "socket": "off"}) as depot:
        ns = depot.namespace("m", "f", 1)
        if sys.argv[1] == "after":
            sub()
        assert ns.put([bytes(32)], [b"bytes"]).wait(30) == [True]
        out = bytearray(5)
        assert ns.get([bytes(32)], [out]).wait(30) == [True]
    print(out.decode())
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_subinterpreter_is_refused_and_does_no_harm(child: Child, when: str) -> None:
    process = child(PROGRAM, when)
    out, error = process.communicate(timeout=60)
    if out == "none\n":
        pytest.skip("this Python makes no subinterpreters")
    refused = "kvdepot works in a process's main interpreter only, not in a subinterpreter\n"
    assert (process.returncode, out) == (0, refused + "bytes\n"), error
