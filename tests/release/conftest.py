"""What the tests of a release share. `make test-release` runs them; `make test` does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def helm() -> str:
    """Helm's path, on the PATH or where `make test-release` builds it."""
    found = shutil.which("helm") or shutil.which("helm", path=str(ROOT / "build/tools"))
    if found is None:
        pytest.skip("there is no helm: no Go to build it with, or no registry for its modules")
    return found


@pytest.fixture(scope="session")
def systemd_analyze() -> str:
    """The checker of units."""
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("there is no systemd-analyze (Debian: systemd)")
    return found
