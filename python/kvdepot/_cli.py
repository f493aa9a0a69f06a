"""The `kvdepot` command of the installed package."""

import signal
import sys

from kvdepot import _native


def main() -> int:
    """Run the command line and return its exit status."""
    # The command is one native call, in which Python's handlers would not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main(["kvdepot", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
