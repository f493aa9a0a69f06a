#!/usr/bin/env bash
# Runs the wheel for aarch64 in dist/ under qemu-user, on a Debian whose packages are only unpacked:
# import, the command, puts and gets. qemu-user has neither io_uring nor a weak memory order, so only
# the thread pool reads and writes files here. Part of `make dist`. Needs qemu-user and mmdebstrap.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
	if [ "${KVDEPOT_NO_SKIPS:-0}" = 1 ]; then
		echo "FAILED: aarch64 under qemu-user: $1" >&2
		exit 1
	fi
	echo "skipped: aarch64 under qemu-user: $1"
	exit 0
}
[ "$(uname -m)" != aarch64 ] || skip "this machine is aarch64 itself"
wheel=$(find dist -name 'kvdepot-*_aarch64.whl' 2>/dev/null)
[ -n "$wheel" ] || skip "dist has no wheel for aarch64"
command -v qemu-aarch64 >/dev/null || skip "qemu-user is not installed (apt install qemu-user)"
command -v mmdebstrap >/dev/null || skip "mmdebstrap is not installed (apt install mmdebstrap)"

root=build/aarch64/root site=build/aarch64/site
if [ ! -x "$root/usr/bin/python3" ]; then
	rm -rf "$root"
	mkdir -p build/aarch64
	mmdebstrap --quiet --variant=extract --architectures=arm64 \
		--include=python3-minimal,libpython3-stdlib,libgcc-s1 bookworm "$root"
fi
rm -rf "$site"
python3 -m zipfile -e "$wheel" "$site"

folder=$(mktemp -d /tmp/kvdepot-aarch64.XXXXXX)
trap 'rm -rf "$folder"' EXIT
program='
import os, platform, kvdepot
assert platform.machine() == "aarch64", platform.machine()
for tier in ("Dax", "Nvme", "Posix"):
    section = {"path": os.path.join(os.environ["FOLDER"], tier), "capacity": "32MiB"}
    settings = {"cache": {"capacity": "8MiB"}, tier.lower(): section, "socket": "off"}
    keys = kvdepot.keys(range(128), block_tokens=16)
    blocks = [bytes([number]) * 300_000 for number in range(len(keys))]
    for start in ("first", "second"):
        with kvdepot.open("Cache|" + tier, settings) as depot:
            ns = depot.namespace(model="aarch64", dtype="float16", block_tokens=16)
            if start == "first":
                assert all(ns.put(keys, blocks).wait(120)), tier
            buffers = [bytearray(300_000) for _ in keys]
            assert all(ns.get(keys, buffers).wait(120)), tier
            assert buffers == blocks, tier
    print("aarch64:", len(keys), "blocks stored and loaded, and loaded again after a restart:", tier)
'
FOLDER=$folder PYTHONPATH=$site XDG_RUNTIME_DIR=$folder XDG_CACHE_HOME=$folder \
	timeout 600 qemu-aarch64 -L "$root" "$root/usr/bin/python3" -c "$program"
PYTHONPATH=$site timeout 120 qemu-aarch64 -L "$root" "$root/usr/bin/python3" -m kvdepot --version
