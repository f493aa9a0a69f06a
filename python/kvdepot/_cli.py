"""The `kvdepot` command of the installed package."""

import os
import signal
import sys
from pathlib import Path

from kvdepot import _native


def _program() -> str:
    """The path of the command, for programs that it starts itself; its name if there is no such
    file.
    """
    scripts = [Path(sys.argv[0]), Path(sys.executable).with_name("kvdepot")]
    # Unlike Path.is_file, no error if this user may not look into the folder.
    found = [one for one in scripts if one.name == "kvdepot" and os.path.isfile(one)]
    return str(found[0].absolute()) if found else "kvdepot"


def main() -> int:
    """Runs the command `kvdepot` with the arguments of this process.

    Returns:
        The exit status (docs/errors.md).
    """
    # The command is one native call, in which Python's handlers would not run. If SIGINT was
    # ignored when the process started, Python has set no handler, and it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main([_program(), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
