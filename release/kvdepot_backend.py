"""Build backend (PEP 517): maturin's, after a check of the platform.

pip uses the backend only if no wheel fits. On a platform without support, each hook that builds a
wheel then ends with one sentence, before maturin and Rust dependencies are downloaded.
"""

import os
import platform
import shutil
import sys
import sysconfig
from typing import Any

MATURIN = "maturin>=1.16,<2"
SUPPORTED = (
    "kvdepot supports Linux with glibc 2.28 or later, on x86-64 and aarch64, "
    "with CPython 3.11 or later that has the GIL"
)
RUST = (
    "a build of kvdepot from its sources needs Rust 1.89 or later, from https://rustup.rs; "
    "the wheels need no compiler"
)
GLIBC_MIN = (2, 28)


def _glibc() -> str | None:
    """Version of glibc, or None with another C library such as musl."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        return None
    return version if name == "glibc" else None


def _reason() -> str | None:
    """The property of this platform that kvdepot does not support, or None."""
    if sys.platform != "linux":
        return {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    if sys.implementation.name != "cpython":
        return sys.implementation.name
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded CPython"
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        return f"Linux on {machine}"
    if sys.maxsize < 2**32:
        return "a 32-bit CPython"
    glibc = _glibc()
    if glibc is None:
        return "Linux with another C library than glibc (musl)"
    found = tuple(int(number) for number in glibc.split(".")[:2])
    return f"Linux with glibc {glibc}" if found < GLIBC_MIN else None


def _check() -> None:
    """Ends the process with one sentence if no wheel can be built here."""
    if reason := _reason():
        sys.exit(f"{SUPPORTED}; this is {reason}")
    if not shutil.which("cargo"):
        sys.exit(RUST)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """The packages that `build_wheel` needs."""
    _check()
    return [MATURIN]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """The packages that `build_editable` needs."""
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """The packages that `build_sdist` needs."""
    return [MATURIN]


def prepare_metadata_for_build_wheel(directory: str, config_settings: Any = None) -> str:
    """Writes the metadata of the wheel."""
    _check()
    return _maturin().prepare_metadata_for_build_wheel(directory, config_settings)


def prepare_metadata_for_build_editable(directory: str, config_settings: Any = None) -> str:
    """Writes the metadata of an editable installation."""
    return prepare_metadata_for_build_wheel(directory, config_settings)


def build_wheel(directory: str, config_settings: Any = None, metadata: str | None = None) -> str:
    """Builds a wheel for this platform."""
    _check()
    return _maturin().build_wheel(directory, config_settings, metadata)


def build_editable(directory: str, config_settings: Any = None, metadata: str | None = None) -> str:
    """Builds an editable installation for this platform."""
    _check()
    return _maturin().build_editable(directory, config_settings, metadata)


def build_sdist(directory: str, config_settings: Any = None) -> str:
    """Builds the source distribution, on any platform with Rust."""
    return _maturin().build_sdist(directory, config_settings)


def _maturin() -> Any:
    # Its warning is about the name of the backend, which is this module.
    os.environ.setdefault("MATURIN_NO_MISSING_BUILD_BACKEND_WARNING", "1")
    import maturin

    return maturin
