"""Packs what `make gpu-day` needs on a machine without a network: `make gpu-pack`.

The parts are files part-*.tar.xz in --out, each to be carried separately. The first parts hold
kvdepot's wheel and the packages for its tests. The others hold vLLM and those packages that
machines with PyTorch and transformers lack, for the CPython version --python on x86-64. Of vLLM,
the parts lack FlashAttention 2, so the device has to be of compute capability 9.0 (Hopper). The
tree itself (the tests and benchmarks) is not packed: carry it as a git clone or an archive.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from program import say

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# glibc of the other machine, such as Ubuntu 22.04's: pip compares tags, and not versions.
GLIBC = range(5, 36)
# Nothing that the slots import needs these files of vLLM, which are most of its size.
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/vllm-rs",
    "vllm/_flashkda*",
    "vllm/_qutlass*",
    "vllm/_deepselect*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
)


@dataclass
class Part:
    """Files of one archive, and their compressed size as the wheels have them."""

    files: list[tuple[Path, zipfile.ZipInfo]] = field(default_factory=list)
    size: int = 0


def wheels(requirements: list[str], python: str, folder: Path) -> list[Path]:
    """Download these distributions, without their dependencies, for CPython on x86-64."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={python}", f"--dest={folder}"]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)]
    command += [f"--platform=manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
    subprocess.run([*command, *requirements], check=True)
    return sorted(set(folder.glob("*.whl")) - before)


def parts_of(sources: Iterable[Path], most: int) -> list[Part]:
    """Divide the files of the wheels into parts of at most `most` bytes; large files first."""
    files = []
    for source in sources:
        with zipfile.ZipFile(source) as wheel:
            for info in wheel.infolist():
                if info.is_dir() or any(fnmatch.fnmatch(info.filename, one) for one in LEFT_OUT):
                    continue
                files.append((source, info))
    parts: list[Part] = []
    for source, info in sorted(files, key=lambda file: -file[1].compress_size):
        size = info.compress_size + 200
        if size > most:
            raise SystemExit(f"{info.filename} takes {size / MIB:.0f} MiB: more than one part")
        room = next((part for part in parts if part.size + size <= most), None)
        if room is None:
            room = Part()
            parts.append(room)
        room.files.append((source, info))
        room.size += size
    return parts


def write(part: Part, path: Path) -> None:
    """Write one archive. Scripts and data stay where the wheel has them: imports need none."""
    unfinished = path.with_suffix(".unfinished")
    wheels_open: dict[Path, zipfile.ZipFile] = {}
    with tarfile.open(unfinished, "w:xz", preset=3) as archive:
        for source, info in sorted(part.files, key=lambda file: file[1].filename):
            wheel = wheels_open.setdefault(source, zipfile.ZipFile(source))
            member = tarfile.TarInfo(info.filename)
            member.size = info.file_size
            member.mode = (info.external_attr >> 16) & 0o777 or 0o644
            archive.addfile(member, io.BytesIO(wheel.read(info)))
    for wheel in wheels_open.values():
        wheel.close()
    unfinished.rename(path)


def main() -> int:
    """Download, pack, and print the parts."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_day.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pack-mib", type=int, default=40, help="size limit of kvdepot's parts (default: 40)"
    )
    parser.add_argument(
        "--vllm-mib", type=int, default=60, help="size limit of vLLM's parts (default: 60)"
    )
    parser.add_argument(
        "--no-vllm", action="store_true", help="pack kvdepot only: the machine has vLLM"
    )
    parser.add_argument(
        "--python", default="3.12", help="CPython version of the other machine (default: 3.12)"
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / "build/wheels",
        help="folder with kvdepot's wheel (default: build/wheels)",
    )
    parser.add_argument(
        "--requirements",
        type=Path,
        default=ROOT / "requirements/gpu.txt",
        help="pinned packages to carry with vLLM (default: requirements/gpu.txt)",
    )
    parser.add_argument(
        "--tests",
        type=Path,
        default=ROOT / "requirements/gpu-tests.txt",
        help="pinned packages for the tests (default: requirements/gpu-tests.txt)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build/gpu-pack",
        help="folder for the parts; earlier parts in it are removed (default: build/gpu-pack)",
    )
    options = parser.parse_args()
    if min(options.pack_mib, options.vllm_mib) < 1:
        parser.error("--pack-mib and --vllm-mib are at least 1")
    own = sorted(options.wheels.glob("kvdepot-*.whl"))
    if any(not wheel.name.endswith("x86_64.whl") for wheel in own):
        parser.error(f"--wheels: {own[0].name} is not for x86-64")
    if len(own) != 1:
        parser.error(f"--wheels: {len(own)} wheels of kvdepot are in {options.wheels}; allowed: 1")
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("part*"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="kvdepot-") as folder:
        say(f"downloading packages for CPython {options.python}")
        tests = wheels(["-r", str(options.tests)], options.python, Path(folder))
        parts = parts_of([*own, *tests], options.pack_mib * MIB)
        if not options.no_vllm:
            vllm = wheels(["-r", str(options.requirements)], options.python, Path(folder))
            parts += parts_of(vllm, options.vllm_mib * MIB)
        for number, part in enumerate(parts, 1):
            path = options.out / f"part-{number:02}.tar.xz"
            write(part, path)
            say(f"{path}: {path.stat().st_size / MIB:.1f} MiB, {len(part.files)} files")
    print(f"{len(parts)} parts in {options.out}; on the other machine: make gpu-day")
    return 0


if __name__ == "__main__":
    sys.exit(main())
