#!/bin/sh
# Looks at this machine before anything is downloaded or built: `requirements/check.sh demo` or `test`.
# Ends with 1 and one sentence that says what to install or free. PYTHON names the interpreter.
# KVDEPOT_CHECK=0 skips it.
set -u
[ "${KVDEPOT_CHECK:-1}" != 0 ] || exit 0
goal=$1
python=${PYTHON:-python3}

fail() {
	echo "make $goal cannot run here: $1 (KVDEPOT_CHECK=0 goes on nevertheless)" >&2
	exit 1
}

# What the goal takes with its caches empty, in GiB: measured 7.9 and 12.6 for the demo, 12.6 of disk
# for the tests, and what they keep for a while in temporary directories.
case $goal in
demo) disk=9 memory=13 ;;
test) disk=16 memory=13 ;;
*) fail "unknown goal '$goal'; allowed: demo, test" ;;
esac

[ "$(uname -s)" = Linux ] || fail "kvdepot runs on Linux; this is $(uname -s)"
case $(uname -m) in
x86_64)
	# vLLM's kernels for the CPU need it.
	grep -qw avx2 /proc/cpuinfo || fail "vLLM for the CPU needs a processor with AVX2"
	;;
aarch64) ;;
*) fail "vLLM for the CPU has wheels for x86_64 and aarch64; this is $(uname -m)" ;;
esac

command -v cc >/dev/null 2>&1 || fail "there is no C compiler; on Debian: apt install gcc libc6-dev"
probe=$(mktemp -d "${TMPDIR:-/tmp}/kvdepot-check.XXXXXX") || fail "cannot write to ${TMPDIR:-/tmp}"
trap 'rm -rf "$probe"' EXIT
printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' >"$probe/a.c"
cc -o "$probe/a" "$probe/a.c" 2>/dev/null ||
	fail "the C compiler cannot build a program; on Debian: apt install libc6-dev"

wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
command -v cargo >/dev/null 2>&1 ||
	fail "there is no Rust toolchain; install Rust $wanted or later with rustup"
found=$(cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p')
[ "$(printf '%s\n' "$wanted" "${found:-0}" | sort -V | head -n 1)" = "$wanted" ] ||
	fail "Rust ${found:-(unknown)} is too old: install $wanted or later with rustup"

"$python" -c '' 2>/dev/null || fail "there is no '$python'; on Debian: apt install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
	fail "$("$python" --version) is too old: install CPython 3.11 or later, and name it by PYTHON=<path>"
"$python" -c 'import sys; sys.exit(sys.version_info >= (3, 15))' ||
	fail "vLLM has no wheel for $("$python" --version): name CPython 3.11 to 3.14 by PYTHON=<path>"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
	fail "$python has no venv module; on Debian: apt install python3-venv"

# What is installed and built already counts.
have=$(du -skc .venv "${CARGO_TARGET_DIR:-target}" build 2>/dev/null | tail -n 1 | cut -f 1)
free=$(df -Pk . | tail -n 1 | awk '{ print $4 }')
[ $((free + ${have:-0})) -ge $((disk * 1024 * 1024)) ] ||
	fail "$disk GiB of disk are needed, $(((free + ${have:-0}) / 1024 / 1024)) GiB are free in $(pwd)"
available=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
# A container may have less.
for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
	limit=$(cat "$file" 2>/dev/null) || continue
	[ "$limit" = max ] || [ $((limit / 1024)) -ge "$available" ] || available=$((limit / 1024))
done
[ "$available" -ge $((memory * 1024 * 1024)) ] ||
	fail "$memory GiB of memory are needed, $((available / 1024 / 1024)) GiB are available"

if [ "$goal" = test ]; then
	shm=$(df -Pk /dev/shm 2>/dev/null | tail -n 1 | awk '{ print $4 }')
	[ "${shm:-0}" -ge $((4 * 1024 * 1024)) ] ||
		fail "4 GiB are needed in /dev/shm, $((${shm:-0} / 1024 / 1024)) GiB are free"
fi
