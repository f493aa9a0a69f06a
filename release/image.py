"""`make test-image`: builds the container image from the wheel in dist/, and starts it.

The base image cannot be pulled everywhere: mmdebstrap makes a Debian with Python from Debian's
packages, and buildah builds deploy/container/Containerfile over it. crun then starts the image with
a read-only root file system: as the image's user, and as a random user in group 0. A client outside
of the container stores and loads blocks. Where control groups have both versions, which crun does
not support, runc starts it. Needs root, buildah, mmdebstrap, and crun or runc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/image"
TOOLS = ("buildah", "mmdebstrap")
SOCKET = "/run/kvdepot/kvdepot.sock"
STORAGE = ("--storage-driver", "vfs", "--root", str(WORK / "storage"))
STORAGE += ("--runroot", "/run/kvdepot-image")

CLIENT = """
import sys, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="image", dtype="float16", block_tokens=16)
keys = kvdepot.keys(range(64), block_tokens=16)
assert all(ns.put(keys, [b"x" * 50000] * 4).wait(30))
buffers = [bytearray(50000) for _ in keys]
assert all(ns.get(keys, buffers).wait(30)) and buffers == [b"x" * 50000] * 4
print("4 blocks stored and loaded by a client outside of the container, uid", sys.argv[2])
"""


class CannotRunError(Exception):
    """This machine cannot build or start the image."""


def run(*command: str | Path, **options: Any) -> str:
    """Runs a command, and returns its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, **options)
    return done.stdout.strip()


def buildah(*command: str | Path) -> str:
    """Runs buildah with a storage of its own."""
    return run("buildah", *STORAGE, *command)


def base() -> str:
    """The image that stands for the Containerfile's base: a Debian with Python."""
    name = "localhost/kvdepot-base"
    if name in buildah("images", "--format", "{{.Name}}").split():
        return name
    archive = WORK / "base.tar"
    run("mmdebstrap", "--quiet", "--variant=minbase", "--include=python3-venv", "bookworm", archive)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, archive, "/")
    buildah("commit", "--quiet", "--rm", container, name)
    archive.unlink()
    return name


def build(dist: Path) -> str:
    """Builds the image, and returns its name."""
    file, name = ROOT / "deploy/container/Containerfile", "localhost/kvdepot"
    try:
        buildah(
            "bud", "--quiet", "--isolation", "chroot", "--build-arg", f"BASE={base()}",
            "--file", file, "--tag", name, dist,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        # Only a test that cannot pass here is skipped: a wrong Containerfile fails.
        if not (dist.is_dir() and os.access("/proc/self/ns/mnt", os.R_OK)):
            raise CannotRunError(f"buildah cannot build here: {error}") from error
        raise
    return name


def bundle(root: str, image: dict[str, Any], uid: int, shared: Path) -> None:
    """Writes the configuration of a container: as strict as the page allows."""
    config = image["config"]
    tmpfs = ["nosuid", "noexec", "nodev", "mode=1777", "size=64m"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": tmpfs},
        {"destination": "/sys/fs/cgroup", "type": "none", "source": "/sys/fs/cgroup",
         "options": ["rbind", "ro"]},
    ]  # fmt: skip
    for name in ("run", "lib"):
        folder = shared / name
        folder.mkdir(mode=0o770, parents=True)
        os.chown(folder, 0, 0)
        folder.chmod(0o770)
        place = "/run/kvdepot" if name == "run" else "/var/lib/kvdepot"
        mounts.append({"destination": place, "type": "none", "source": str(folder),
                       "options": ["bind", "rw", "nosuid", "nodev"]})  # fmt: skip
    arguments = ["Cache|Dax", "-o", "cache.capacity=32MiB", "-o", "dax.capacity=64MiB"]
    arguments += ["-o", "dax.path=/var/lib/kvdepot/arena.kvd", "--socket", SOCKET]
    process = {
        "user": {"uid": uid, "gid": 0},
        "args": [*config["Entrypoint"], *arguments],
        "env": config["Env"],
        "cwd": "/",
        "noNewPrivileges": True,
    }
    spaces = ["pid", "mount", "ipc", "uts", "network"]
    spec = {
        "ociVersion": "1.0.0",
        "root": {"path": root, "readonly": True},
        "process": process,
        "hostname": "kvdepot",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": one} for one in spaces]},
    }
    (WORK / "bundle").mkdir(exist_ok=True)
    (WORK / "bundle/config.json").write_text(json.dumps(spec))


def runtime() -> tuple[str, ...]:
    """The command of the runtime that works with this machine's control groups."""
    # Both versions are mounted: crun refuses to start anything.
    is_hybrid = Path("/sys/fs/cgroup/unified").exists()
    if not is_hybrid and shutil.which("crun"):
        return ("crun", "--cgroup-manager=disabled", "--root", str(WORK / "crun"))
    if shutil.which("runc"):
        return ("runc", "--root", str(WORK / "runc"))
    wanted = "runc, because of both versions of control groups" if is_hybrid else "crun"
    raise CannotRunError(f"starting the image needs {wanted} (apt install)")


def interpreter() -> str:
    """A Python that users other than root can run."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            run(python, "-c", "import sys; assert sys.version_info >= (3, 11)", user=65532, cwd="/")
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    raise CannotRunError("no CPython 3.11 or later is readable for users other than root")


def start(image: str, uid: int, site: Path) -> None:
    """Starts the image as `uid`, uses the server, and stops it."""
    container = buildah("from", "--pull-never", image)
    root, shared = buildah("mount", container), Path(f"/run/kvdepot-image-{uid}")
    shutil.rmtree(shared, ignore_errors=True)
    with_runtime = runtime()
    name = f"kvdepot-{uid}"
    try:
        bundle(root, json.loads(buildah("inspect", "--type", "image", image))["OCIv1"], uid, shared)
        begun = [*with_runtime, "run", "--bundle", str(WORK / "bundle"), name]
        server = subprocess.Popen(begun, stdout=subprocess.PIPE, text=True)
        assert server.stdout
        line = server.stdout.readline()
        if not line.startswith("serving "):
            server.wait(30)
            raise CannotRunError(
                f"{with_runtime[0]} cannot start a container here (status {server.returncode})"
            )
        inside = [*with_runtime, "exec", name]
        stat = run(*inside, "kvdepot", "stat", f"unix:{SOCKET}")
        assert "Cache" in stat, stat
        write = "open('/opt/kvdepot/x', 'w')"
        denied = subprocess.run(
            [*inside, "python3", "-c", write], capture_output=True, text=True, check=False
        )
        assert "Errno 30" in denied.stderr or "Errno 13" in denied.stderr, denied.stderr
        identity = {"user": uid, "group": 0, "extra_groups": []}
        environment = os.environ | {"PYTHONPATH": str(site), "HOME": "/"}
        address = f"unix:{shared}/run/kvdepot.sock"
        print(run(
            interpreter(), "-c", CLIENT, address, str(uid), env=environment, cwd="/", **identity
        ))  # fmt: skip
        begun_at = time.monotonic()
        run(*with_runtime, "kill", name, "TERM")
        assert server.wait(90) == 0, f"status {server.returncode} after SIGTERM"
        print(f"uid {uid}: stopped by SIGTERM in {time.monotonic() - begun_at:.2f} s")
    finally:
        subprocess.run([*with_runtime, "delete", "--force", name], capture_output=True, check=False)
        shutil.rmtree(shared, ignore_errors=True)
        buildah("rm", container)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    options = parser.parse_args()
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    try:
        if os.geteuid() != 0:
            raise CannotRunError("needs root")
        if missing:
            raise CannotRunError(f"{', '.join(missing)} are not installed (apt install)")
        wheels = sorted(options.dist.glob("kvdepot-*_x86_64.whl"))
        if not wheels:
            print(f"{options.dist} has no wheel; run `make dist` first", file=sys.stderr)
            return 1
        site = Path("/run/kvdepot-image-site")
        shutil.rmtree(site, ignore_errors=True)
        WORK.mkdir(parents=True, exist_ok=True)
        # Where users other than root find it.
        run(sys.executable, "-m", "zipfile", "-e", wheels[0], site)
        image = build(options.dist.resolve())
        size = json.loads(buildah("images", "--json", image))[0].get("size", "unknown")
        print(f"image of {size}, over the stand-in for its base")
        for uid in (65532, 1_000_680_000):
            start(image, uid, site)
        shutil.rmtree(site)
    except CannotRunError as reason:
        print(f"skipped: the image: {reason}", file=sys.stderr)
        return 1 if os.environ.get("KVDEPOT_NO_SKIPS") == "1" else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
