#!/usr/bin/env bash
# Builds the package of another commit, and installs it into build/other: `release/other.sh COMMIT`.
# Part of `make test-versions`. BIN names the folder of this environment's programs.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse --verify "$1^{commit}")
bin=$(realpath "${BIN:-.venv/bin}")
folder=build/other
if [ "$(cat "$folder/commit" 2>/dev/null)" != "$commit" ]; then
	rm -rf "$folder"
	mkdir -p "$folder/source"
	git archive "$commit" | tar -x -C "$folder/source"
	# Its dependencies are built already.
	target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
	(cd "$folder/source" && CARGO_TARGET_DIR=$target "$bin/maturin" build --release --quiet \
		--interpreter "$bin/python" --out ../wheels)
	"$bin/python" -m venv "$folder/venv"
	"$folder/venv/bin/python" -m pip install --quiet --no-index "$folder"/wheels/kvdepot-*.whl
	rm -rf "$folder/source"
	echo "$commit" >"$folder/commit"
fi
