"""`make dist`: the files of a release in dist/, checked and tried.

    python release/dist.py                 build all files, check them, and try the wheel
    python release/dist.py check           check the files in dist/
    python release/dist.py try             install the wheel of this machine, use and uninstall it
    python release/dist.py version         print the version of the workspace

The wheels are for glibc 2.28, linked by zig. The wheel for x86-64 is built from the unpacked source
distribution, which is thereby complete. SHA256SUMS and the lists of Rust dependencies (SBOM) are
in build/release, because a package registry accepts only wheels and source distributions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, NOTES, WORK = ROOT / "dist", ROOT / "build/release", ROOT / "build/dist"
BIN = Path(sys.executable).parent

GLIBC = (2, 28)
TAG = "manylinux_{}_{}".format(*GLIBC)
# Name of the machine -> number of the machine in the header of an ELF file.
MACHINES = {"x86_64": 62, "aarch64": 183}
WHEEL_MAX = SDIST_MAX = 10_000_000


class FailedError(Exception):
    """A file of the release is wrong."""


def need(condition: object, message: str) -> None:
    """Raises `FailedError` with `message` unless `condition` is true."""
    if not condition:
        raise FailedError(message)


def run(*command: str | Path, **options: object) -> None:
    """Runs a command, with the tools of this environment first."""
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, env=environment(), **options)


def environment() -> dict[str, str]:
    """The environment of build commands: maturin finds zig by `python3 -m ziglang`."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    target = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "dist"
    own = {"PATH": path, "CARGO_TARGET_DIR": str(target)}
    # The build backend checks the platform and calls maturin.
    return os.environ | own | {"MATURIN_NO_MISSING_BUILD_BACKEND_WARNING": "1"}


# ---- build ------------------------------------------------------------------------------------


def version() -> str:
    """The version of the workspace."""
    found = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    need(found, "Cargo.toml has no version")
    return found[1]  # type: ignore[index]


def has_target(machine: str) -> bool:
    """Whether Rust's standard library for the machine is installed; rustup adds it."""
    target = f"{machine}-unknown-linux-gnu"
    if shutil.which("rustup"):
        added = subprocess.run(["rustup", "target", "add", target], capture_output=True, cwd=ROOT)
        if added.returncode == 0:
            return True
    query = ["rustc", "--print", "target-libdir", "--target", target]
    library = subprocess.run(query, capture_output=True, text=True, check=False, cwd=ROOT)
    return library.returncode == 0 and any(Path(library.stdout.strip()).glob("libstd-*"))


def build(machines: list[str]) -> None:
    """Builds the source distribution, and one wheel per machine."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    run(BIN / "maturin", "sdist", "--out", DIST, cwd=ROOT)
    with tarfile.open(sdist()) as archive:
        archive.extractall(WORK, filter="data")
    unpacked = WORK / f"kvdepot-{version()}"
    for machine in machines:
        # From the unpacked sources once: what they lack would be noticed.
        folder = unpacked if machine == machines[0] else ROOT
        target = f"{machine}-unknown-linux-gnu"
        run(
            BIN / "maturin", "build", "--release", "--zig", "--target", target,
            "--compatibility", TAG, "--auditwheel", "check", "--out", DIST, cwd=folder,
        )  # fmt: skip


def sdist() -> Path:
    """The source distribution."""
    found = sorted(DIST.glob("kvdepot-*.tar.gz"))
    need(len(found) == 1, f"dist has {len(found)} source distributions; allowed: 1")
    return found[0]


def wheels() -> list[Path]:
    """The wheels."""
    found = sorted(DIST.glob("kvdepot-*.whl"))
    need(found, "dist has no wheel; run `make dist`")
    return found


# ---- check ------------------------------------------------------------------------------------


def machine_of(wheel: Path) -> str:
    """The machine that a wheel's name says."""
    name = re.fullmatch(rf"kvdepot-[^-]+-cp311-abi3-{TAG}_(\w+)\.whl", wheel.name)
    need(name, f"{wheel.name}: not a name of the form kvdepot-VERSION-cp311-abi3-{TAG}_MACHINE.whl")
    need(name[1] in MACHINES, f"{wheel.name}: unknown machine")  # type: ignore[index]
    return name[1]  # type: ignore[index]


def check_library(name: str, library: bytes, machine: str) -> None:
    """Checks the extension module: its machine, and the glibc that it needs."""
    need(library[:4] == b"\x7fELF", f"{name}: the extension module is not an ELF file")
    (number,) = struct.unpack_from("<H", library, 18)
    need(number == MACHINES[machine], f"{name}: the extension module is for another machine")
    used = {tuple(map(int, one)) for one in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    newer = sorted(one for one in used if one > GLIBC)
    need(not newer, f"{name}: needs glibc {newer[-1] if newer else ''}; allowed: up to {GLIBC}")


def check_wheel(wheel: Path) -> dict[str, bytes]:
    """Checks a wheel, and returns its lists of Rust dependencies by file name."""
    machine, name = machine_of(wheel), wheel.name
    need(wheel.stat().st_size <= WHEEL_MAX, f"{name}: over {WHEEL_MAX:,} bytes")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        info = f"kvdepot-{version()}.dist-info"
        for file in ("kvdepot/_native.abi3.so", "kvdepot/py.typed", f"{info}/licenses/LICENSE"):
            need(file in files, f"{name}: lacks {file}")
        strange = [one for one in files if not one.startswith(("kvdepot/", f"{info}/"))]
        need(not strange, f"{name}: has {strange}")
        check_library(name, archive.read("kvdepot/_native.abi3.so"), machine)
        entries = archive.read(f"{info}/entry_points.txt").decode()
        need("kvdepot=kvdepot._cli:main" in entries.replace(" ", ""), f"{name}: lacks the command")
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        needed = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
        need(not needed, f"{name}: depends on {needed}")
        need(metadata["Requires-Python"] == ">=3.11", f"{name}: another Requires-Python")
        boms = [one for one in files if one.startswith(f"{info}/sboms/")]
        need(boms, f"{name}: lacks a list of Rust dependencies (SBOM)")
        found = {Path(one).name: archive.read(one) for one in boms}
    for bom, text in found.items():
        need(json.loads(text).get("components"), f"{name}: {bom} lists no component")
    return {f"{wheel.stem}.{bom}": text for bom, text in found.items()}


def check_sdist(archive: Path) -> None:
    """Checks the source distribution."""
    need(archive.stat().st_size <= SDIST_MAX, f"{archive.name}: over {SDIST_MAX:,} bytes")
    top = f"kvdepot-{version()}"
    with tarfile.open(archive) as opened:
        files = set(opened.getnames())
    for file in (
        "PKG-INFO", "pyproject.toml", "Cargo.toml", "Cargo.lock", "LICENSE", "python/README.md",
        "crates/python/src/lib.rs", "python/kvdepot/__init__.py", "release/kvdepot_backend.py",
    ):  # fmt: skip
        need(f"{top}/{file}" in files, f"{archive.name}: lacks {file}")


def check() -> None:
    """Checks all files in dist/, and writes SHA256SUMS and the SBOMs into build/release."""
    shutil.rmtree(NOTES, ignore_errors=True)
    NOTES.mkdir(parents=True)
    files = [sdist(), *wheels()]
    check_sdist(files[0])
    for wheel in files[1:]:
        for name, text in check_wheel(wheel).items():
            (NOTES / name).write_bytes(text)
        # Also for another machine: it reads the symbols.
        run(BIN / "auditwheel", "show", wheel)
    run(BIN / "twine", "check", "--strict", *files)
    listed = [*files, *sorted(NOTES.iterdir())]
    sums = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in listed]
    (NOTES / "SHA256SUMS").write_text("".join(sums))
    for one in listed:
        print(f"{one.stat().st_size:>12,}  {one.relative_to(ROOT)}")


# ---- try --------------------------------------------------------------------------------------


def try_wheel() -> None:
    """Installs the wheel of this machine into a fresh environment, uses it, and uninstalls it."""
    mine = [one for one in wheels() if machine_of(one) == platform.machine()]
    need(mine, f"dist has no wheel for {platform.machine()}")
    fresh = ROOT / "build/fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    venv.create(fresh, with_pip=True)
    python = fresh / "bin/python"
    before = set(fresh.rglob("*"))
    begun = time.monotonic()
    run(python, "-m", "pip", "install", "--quiet", "--no-index", mine[0])
    print(f"installed in {time.monotonic() - begun:.2f} s", flush=True)
    size = sum(one.stat().st_size for one in set(fresh.rglob("*")) - before if one.is_file())
    print(f"{size:,} bytes installed", flush=True)
    run(python, ROOT / "release/first_hit.py", cwd=fresh)
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "kvdepot")
    left = [one for one in fresh.rglob("*kvdepot*") if one.name != "__pycache__"]
    need(not left, f"uninstalling left {left}")
    shutil.rmtree(fresh)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "step", nargs="?", choices=["all", "check", "try", "version"], default="all"
    )
    parser.add_argument("--machine", action="append", choices=MACHINES, help="[default: all]")
    options = parser.parse_args()
    machines = options.machine or list(MACHINES)
    try:
        if options.step == "version":
            print(version())
            return 0
        if options.step == "all":
            lacking = [one for one in machines if not has_target(one)]
            need(
                not lacking,
                f"Rust's standard library is missing for {', '.join(lacking)}: "
                "rustup target add MACHINE-unknown-linux-gnu",
            )
            build(machines)
        if options.step != "try":
            check()
        if options.step != "check":
            try_wheel()
    except (FailedError, subprocess.CalledProcessError) as error:
        print(f"make dist failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
