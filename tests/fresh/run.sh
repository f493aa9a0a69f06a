#!/usr/bin/env bash
# What `make demo` and `make test` say on a fresh Debian 12 with one thing missing at a time, and when
# a download fails. Needs root, mmdebstrap (apt install mmdebstrap) and Debian's packages.
# Part of `make test-all`; `tests/fresh/run.sh WORD` runs the cases whose name has that word.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() {
	if [ "${KVDEPOT_NO_SKIPS:-0}" = 1 ]; then
		echo "FAILED: $1" >&2
		exit 1
	fi
	echo "skipped: $1"
	exit 0
}
[ "$(id -u)" = 0 ] || skip "a fresh root needs root"
command -v mmdebstrap >/dev/null || skip "mmdebstrap is not installed (apt install mmdebstrap)"

work=$(mktemp -d /var/tmp/kvdepot-fresh.XXXXXX)
trap 'rm -rf "$work"' EXIT
packages=make,gcc,libc6-dev,python3,python3-venv,ca-certificates
base=$work/base
echo "making a fresh Debian 12 with $packages"
mmdebstrap --quiet --variant=minbase --include="$packages" bookworm "$base"
mkdir -p "$base/kvdepot"
git ls-files -z | xargs -0 cp --parents -t "$base/kvdepot"
# Debian's own toolchain is too old; a program that names this machine's stands for it.
printf '#!/bin/sh\necho "%s"\n' "$(cargo --version)" >"$base/usr/local/bin/cargo"
chmod +x "$base/usr/local/bin/cargo"

# case_of NAME PRINTED CHANGE [GOAL]: after the shell program CHANGE in that root, `make GOAL` has to
# print PRINTED. What a case changes is in a layer over the root, and gone with it; it has no network.
passed=0
case_of() {
	local name=$1 wanted=$2 change=$3 goal=${4:-check-demo} layer=$work/layer
	case $name in *"$only"*) ;; *) return 0 ;; esac
	rm -rf "$layer"
	mkdir -p "$layer/upper" "$layer/work" "$layer/root"
	local out
	out=$(unshare --mount --net --pid --fork sh -euc "
		mount -t overlay overlay -o lowerdir='$base',upperdir='$layer/upper',workdir='$layer/work' '$layer/root'
		cd '$layer/root'
		mount -t proc proc proc
		mount -t tmpfs tmpfs dev/shm
		chroot . sh -euc '$change' >&2
		chroot . make -C /kvdepot $goal 2>&1
		echo exit 0" 2>"$layer/errors") || true
	if ! grep -qF "$wanted" <<<"$out"; then
		printf 'FAILED: %s: did not print: %s\n%s\n' "$name" "$wanted" "$out" >&2
		cat "$layer/errors" >&2
		exit 1
	fi
	echo "  $name: $(grep -F "$wanted" <<<"$out" | head -n 1)"
	passed=$((passed + 1))
}
only=${1:-}

purge='dpkg --purge --force-depends'
case_of complete "exit 0" true
case_of no-compiler "there is no C compiler" 'rm -f /usr/bin/cc /etc/alternatives/cc'
case_of no-headers "cannot build a program" "$purge libc6-dev 2>/dev/null"
case_of no-python "there is no 'python3'" 'rm -f /usr/bin/python3'
case_of no-venv "has no venv module" "$purge python3.11-venv python3-venv 2>/dev/null"
case_of no-rust "there is no Rust toolchain" 'rm /usr/local/bin/cargo'
case_of old-rust "is too old: install" 'sed -i "s/cargo [0-9.]*/cargo 1.63.0/" /usr/local/bin/cargo'
case_of old-processor "needs a processor with AVX2" \
	'sed "s/avx2//" /proc/cpuinfo >/cpuinfo; mount --bind /cpuinfo /proc/cpuinfo'
case_of small-disk "GiB of disk are needed" \
	'cp -a /kvdepot /copy; mount -t tmpfs -o size=1g tmpfs /kvdepot; cp -a /copy/. /kvdepot'
case_of small-memory "GiB of memory are needed" \
	'sed "s/^MemAvailable:.*/MemAvailable: 1048576 kB/" /proc/meminfo >/meminfo
	mount --bind /meminfo /proc/meminfo'
case_of full-shm "GiB are needed in /dev/shm" \
	'mount -t tmpfs -o size=16m tmpfs /dev/shm' check-test
case_of full-disk "the same make command goes on from there" \
	'cp -a /kvdepot /copy; mount -t tmpfs -o size=64m tmpfs /kvdepot; cp -a /copy/. /kvdepot
	dd if=/dev/zero of=/kvdepot/filler bs=64k 2>/dev/null || true' "demo KVDEPOT_CHECK=0"
# There is no network in this root: the first download fails.
case_of no-network "the same make command goes on from there" true demo
[ "$passed" -gt 0 ] || { echo "no case is named $only" >&2; exit 2; }
echo "$passed passed, 0 failed"
