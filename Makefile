# The commands of this repository; CONTRIBUTING.md tells what each is for. `make dev` comes first.

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PREBUILT := $(VENV)/.prebuilt
SGLANG := sglang==0.5.23
# Releases that are looked at, not installed: the tested ones, and two that are refused.
RELEASES := 0.5.20 0.5.21 0.5.22 0.5.23

PORT ?= 30000
MODEL ?= tests/assets/tinylm
ARGS ?=
CASE ?= all
BENCH_ARGS ?= --quick
TESTS ?=
# Set: `make dist` starts a server on Python 3.12, too.
SERVED ?=
# A name is a folder of tests/, or whatever else pytest takes.
SELECTED = $(foreach each,$(TESTS),$(if $(wildcard tests/$(each)),tests/$(each),$(each)))
# Test files that run at a time, in order, the long ones first: a server's start waits as much as it computes.
WORKERS ?= 3

# pytest writes what it makes of a test's assertions beside the test, and each worker needs all of it: where
# Python is told to write nothing, that takes 6 s of a core more in each, every time.
unexport PYTHONDONTWRITEBYTECODE

# How late threads are under `make late`: a seed, and the longest delay in milliseconds.
LATE ?= 1:2000

# The release of SGLang that tests run with instead of the installed one, from its wheel: RELEASE=0.5.22.
RELEASE ?=
# What every process of a run finds it by; its extensions are compiled apart.
WITH_RELEASE = $(if $(RELEASE),folder="$$($(PY) -m testkit.releases.wheels $(RELEASE))" \
  && PYTHONPATH="$$folder$${PYTHONPATH:+:$$PYTHONPATH}" \
  TORCH_EXTENSIONS_DIR="$(abspath $(VENV))/torch-extensions-$(RELEASE)")

# Long forms of tests: 1 for all cases and more rounds, 10 for ten times as many.
LONG ?= $(HIER_KV_LONG)
# How long `make soak` goes on with mixed traffic behind the tests.
MINUTES ?= 60

.PHONY: help dev demo check contract dist test soak late pythons bench docs gpu-kit serve clean

help:
	@echo "make dev     install everything into $(VENV)"
	@echo "make demo    multi-turn chats and documents on a real server, with and without the plugin"
	@echo "make check   ruff and mypy"
	@echo "make contract  which releases of SGLang keep to what the plugin takes for granted"
	@echo "make dist    wheel and source archive, checked and installed on their own"
	@echo "make test    all tests; TESTS=unit for some, LONG=1 for all their cases, WORKERS=1 for one at a time"
	@echo "make soak    long forms of all tests, and an hour of mixed traffic; TESTS=, MINUTES=60"
	@echo "make late    tests while the plugin's threads are late at random; TESTS=e2e/reuse LATE=1:2000"
	@echo "make pythons unit and tier tests, and some with servers, under the other Pythons that are supported and here"
	@echo "make bench   benchmarks; CASE=serve BENCH_ARGS='--json build/serve.json' for one"
	@echo "make docs    the documents as a site, in build/site"
	@echo "make gpu-kit a tar for a machine with a CUDA device and no network: kernels, copies, servers"
	@echo "make serve   SGLang in the foreground on the CPU; PORT=, MODEL=, ARGS='--enable-hier-kv ...'"

dev: $(STAMP) $(PREBUILT)

# Without bytecode, which for all of it takes most of the time: what is imported gets its own then, what
# servers import in `runtime_cpu.prebuild`.
INSTALL := $(PY) -m pip install --quiet --no-input --no-compile
# SGLang comes without its dependencies, which are for GPUs; the extra `cpu` has what it needs here. By a
# new pip: the one that comes with Python 3.11 takes two minutes of a core to look through what the
# registry offers.
$(STAMP): pyproject.toml runtime_cpu/constraints.txt runtime_cpu/system-packages.sh
	bash runtime_cpu/system-packages.sh "$(PYTHON)"
	test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	$(INSTALL) -c runtime_cpu/constraints.txt --upgrade pip
	$(INSTALL) -c runtime_cpu/constraints.txt -e '.[cpu,dev,gateway]'
	$(INSTALL) --no-deps $(SGLANG)
	touch $@

# Loops that every server would compile at its start; nothing that only reads the tree needs them.
# Those of other dtypes are for tests, which would compile them in several processes at a time.
$(PREBUILT): $(STAMP)
	$(PY) -m runtime_cpu.prebuild
	$(VENV)/bin/hier-kv prebuild
	$(VENV)/bin/hier-kv prebuild --dtype fp16 fp32 --codec none
	touch $@

demo: $(STAMP) $(PREBUILT)
	$(PY) -m bench.demo

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

contract: $(STAMP)
	for release in $(RELEASES); do ls build/sglang/sglang-$$release-*.whl >/dev/null 2>&1 \
	  || $(PY) -m pip download --quiet --no-input --no-deps -d build/sglang sglang==$$release; done
	$(PY) -m testkit.contract_matrix build/sglang/*.whl

# The wheel and the source archive, each tried in an environment without anything else. Nothing of
# $(VENV) is needed, so it may be made beside it.
dist:
	"$(PYTHON)" -m testkit.release $(if $(SERVED),--served)

test: $(STAMP) $(PREBUILT)
	$(WITH_RELEASE) HIER_KV_LONG=$(LONG) \
	  $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=30 $(SELECTED)
	@echo "make test: all tests passed"

# What a default run samples, whole, and then what grows only with time.
soak: $(STAMP) $(PREBUILT)
	@test "$(LONG)" != 0 || { echo "make soak: expected LONG of 1 or more, as it runs the long forms, got 0; leave it out, or run make test"; exit 2; }
	$(MAKE) test LONG=$(or $(LONG),1)
	$(PY) -m bench.soak --minutes $(MINUTES) --json build/soak.json

late: $(STAMP) $(PREBUILT)
	HIER_KV_TEST_LATE_THREADS=$(LATE) HIER_KV_TEST_LATE_SCHEDULER=$(LATE) \
	  $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SELECTED)

pythons: $(STAMP)
	$(PY) -m testkit.pythons

bench: $(STAMP) $(PREBUILT)
	$(PY) -m bench $(CASE) $(BENCH_ARGS)

# The theme's notice of its successor is none of ours, and would be a warning.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

gpu-kit: $(STAMP)
	$(PY) -m bench.gpu.kit

# `exec`: no shell stays between make and the server.
serve: $(STAMP) $(PREBUILT)
	@exec $(PY) runtime_cpu/launch.py --model-path $(MODEL) --port $(PORT) $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
