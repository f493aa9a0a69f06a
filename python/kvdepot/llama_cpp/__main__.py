"""`python -m kvdepot.llama_cpp`: a server that remembers."""

from __future__ import annotations

import sys


def main() -> int:
    """The server's exit status; 1 with a message where its packages are missing."""
    try:
        from kvdepot.llama_cpp import server
    except ImportError as error:
        wanted = "pip install 'llama-cpp-python[server]==0.3.36'"
        print(f"kvdepot.llama_cpp needs llama-cpp-python ({error}): {wanted}", file=sys.stderr)
        return 1
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
