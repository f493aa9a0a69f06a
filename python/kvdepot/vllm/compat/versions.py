"""Which versions of vLLM kvdepot works with, and which adapter knows the one that is here."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import transformers
import vllm

import kvdepot
from kvdepot.vllm.settings import UNTESTED

Minor = tuple[int, int]
"""Of version 0.32.1: (0, 32)."""

# The setting that lets other versions through.
(ALLOWED,) = UNTESTED.names


class Tested(NamedTuple):
    """What was run with a version (docs/engines/vllm.md)."""

    adapter: str
    """The module beside this one."""
    worker: bool
    """Whether engines ran with it. The extra `vllm` of pyproject.toml installs such versions."""


TESTED: dict[Minor, Tested] = {
    # True once `make test-vllm VLLM=0.31.0` has passed.
    (0, 31): Tested("v0_31", worker=False),
    (0, 32): Tested("v0_32", worker=True),
    # It has no build for the CPU.
    (0, 33): Tested("v0_33", worker=False),
}


def said(minor: Minor) -> str:
    """As people write it."""
    return ".".join(map(str, minor))


RANGE = f"{said(min(TESTED))} to {said(max(TESTED))}"


# Part of a version that is not a release: built between two releases, or before one.
UNRELEASED = re.compile(r"(dev|a|b|rc)\d")


def is_unreleased(version: str) -> bool:
    """Whether a version is not a release. What is behind a plus (`+cu129`) names a build of it."""
    return UNRELEASED.search(version.partition("+")[0]) is not None


def _numbers() -> Minor | None:
    """As the version has them; None for one that has none, as a build from plain sources."""
    major, minor, *_ = vllm.__version_tuple__
    found = (major, minor)
    return found if all(isinstance(one, int) for one in found) and found > (0, 0) else None


def here() -> Minor | None:
    """The release that is installed; None for a build from sources.

    A build that came after 0.32.0 may have names of 0.33 already, whatever it is called.
    """
    return None if is_unreleased(str(vllm.__version__)) else _numbers()


def adapter() -> str:
    """The module that fits best: where the version is not in the range, the nearest one's."""
    minor = _numbers()
    if minor is None or minor > max(TESTED):
        return TESTED[max(TESTED)].adapter
    return TESTED[max((one for one in TESTED if one <= minor), default=min(TESTED))].adapter


def refusal() -> kvdepot.ConfigError:
    """What is said of a version outside of the range."""
    return kvdepot.ConfigError(
        f"vllm: version {vllm.__version__} is not supported by kvdepot; install a version from "
        f"{RANGE}, or set {ALLOWED}: true in kvdepot's settings to try this version"
    )


def lack(error: ImportError) -> kvdepot.ConfigError:
    """The same of one that has not all names that kvdepot imports: no setting helps."""
    return kvdepot.ConfigError(
        f"vllm: version {vllm.__version__} cannot be used with kvdepot ({error}); install a "
        f"version from {RANGE}"
    )


def check(*, untested_allowed: bool) -> None:
    """Raise `refusal` for a version outside of the range."""
    if here() not in TESTED and not untested_allowed:
        raise refusal()


def of_blocks(*, shared: bool) -> dict[str, str]:
    """What the namespace of blocks has of versions; nothing where versions share blocks.

    A minor version of vLLM may compute or lay out other keys and values by the same options. So may
    one of transformers, whose classes fill in what a model's configuration leaves out, and which
    reads images. A build from sources may be anything: its whole version counts.
    """
    if shared:
        return {}
    minor = here()
    # Not by its metadata, which sources on PYTHONPATH do not have.
    whole = str(transformers.__version__)
    minor_of_transformers = ".".join(whole.split(".")[:2])
    return {
        "vllm": said(minor) if minor else str(vllm.__version__),
        "transformers": whole if is_unreleased(whole) else minor_of_transformers,
    }


def say(logger: Any) -> None:
    """Log what was not run with this version."""
    tested = TESTED.get(here() or (0, 0))
    if tested is None:
        logger.warning(
            "kvdepot: vLLM %s was never tested with kvdepot (supported: %s), but %s is true",
            vllm.__version__, RANGE, ALLOWED,
        )  # fmt: skip
    elif not tested.worker:
        logger.warning(
            "kvdepot: worker never run with vLLM %s; only parts of kvdepot were tested with this "
            "version",
            vllm.__version__,
        )
