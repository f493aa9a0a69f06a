"""`python -m kvdepot`: the `kvdepot` command."""

import sys

from kvdepot._cli import main

sys.exit(main())
