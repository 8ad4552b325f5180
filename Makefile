# headrace: `make demo` and `make test` work from a bare checkout with Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := infra/requirements/all.lock
CUDA   := infra/requirements/cuda.lock
AGENTS := infra/requirements/agents.lock
MODEL  := infra/requirements/model.lock
BENCH  := infra/requirements/bench.lock
LINUX  := --python-platform x86_64-manylinux_2_28
EXTRAS := --extra streams --extra actors --extra trainer --extra dev
# What a container runs: the roles, the console, and what plugins may ask for; no tests, and no embedded broker.
IMAGE  := $(foreach extra,streams actors gateway trainer console environments mcp tasks,--extra $(extra))

# Every role is a process that imports torch: without bytecode files each would compile it anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

# Tests of a file share what it made. Some wait for processes of their own: a third worker fills the two cores.
FAST   := -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install agents bench bench-deps demo recipes test test-all test-fast missing-tools test-gpu check lint types docs lock extras-check clean

help:            ## what there is to type
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

# The stamp holds the hash of what was installed: a second call compares it and does nothing. Bytecode is made here, once and by
# all cores: else the first start of each role would compile torch and vLLM, several of them the same modules at once.
install:         ## create .venv and install the hash-locked packages
	@sum=$$(cat $(LOCK) pyproject.toml | sha256sum | cut -d' ' -f1); \
	if [ "$$(cat $(VENV)/.installed 2>/dev/null)" != "$$sum" ]; then \
	  $(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python: got {v[0]}.{v[1]}, expected 3.11 or newer; point PYTHON=… at one")' \
	  && { [ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); } \
	  && { [ -x $(BIN)/uv ] || $(BIN)/python -m pip install --quiet --require-hashes --requirement infra/requirements/uv.lock; } \
	  && $(BIN)/uv pip sync --python $(BIN)/python --require-hashes --compile-bytecode $(LOCK) \
	  && $(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable . \
	  && echo "$$sum" > $(VENV)/.installed; \
	fi

# Packages of other projects want other versions of what we use: they live beside our environment and meet us over HTTP.
agents: install  ## create .venv/agents with the agent frameworks that the tests train
	@sum=$$(sha256sum $(AGENTS) | cut -d' ' -f1); \
	if [ "$$(cat $(VENV)/agents/.installed 2>/dev/null)" != "$$sum" ]; then \
	  { [ -x $(VENV)/agents/bin/python ] || $(PYTHON) -m venv --without-pip $(VENV)/agents; } \
	  && $(BIN)/uv pip sync --python $(VENV)/agents/bin/python --require-hashes $(AGENTS) \
	  && echo "$$sum" > $(VENV)/agents/.installed; \
	fi

bench-deps: install ## create .venv/bench with the peers that benchmarks measure beside headrace
	@sum=$$(sha256sum $(BENCH) | cut -d' ' -f1); \
	if [ "$$(cat $(VENV)/bench/.installed 2>/dev/null)" != "$$sum" ]; then \
	  { [ -x $(VENV)/bench/bin/python ] || $(PYTHON) -m venv --without-pip $(VENV)/bench; } \
	  && $(BIN)/uv pip sync --python $(VENV)/bench/bin/python --require-hashes $(BENCH) \
	  && echo "$$sum" > $(VENV)/bench/.installed; \
	fi
	@command -v redis-server >/dev/null || echo "make: no redis-server on PATH: the transport benchmark leaves Redis out; to have it: apt-get install redis-server"

bench: install   ## run a benchmark and print its figures (make bench NAME=codec ARGS=--save; without NAME: the list)
	@$(BIN)/python -m tests.bench $(NAME) $(ARGS)

demo: install    ## teach a chat model instructions through Kafka, Faust and vLLM (10 to 30 minutes; ARGS="--task add" for a toy)
	@$(BIN)/headrace demo $(ARGS)

recipes: agents  ## run every recipe of infra/docs/recipes and compare with its curve (two hours; ARGS="--only lora")
	@$(BIN)/python -m tests.bench.recipes $(ARGS)

# Unit tests first, then those with a broker, vLLM, a browser or ranks: these go file by file, so that the tests of a file share
# what they started, and two files at once fill the two cores.
test: missing-tools check agents ## what every change passes: linters, types, unit tests, contracts, one run of each promise (15 minutes)
	@$(BIN)/python -m pytest -q $(FAST) -m "not slow and not full and not gpu" $(ARGS)
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not full" --durations=20 $(ARGS)

test-all: missing-tools check agents ## the same with kills, a thousand seeds, containers and other projects' clients (an hour)
	@$(BIN)/python -m pytest -q $(FAST) -m "not slow and not full and not gpu" $(ARGS)
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "slow or full" --timeout=3600 --durations=20 $(ARGS)

test-fast: missing-tools install ## the unit tests alone (five minutes)
	@$(BIN)/python -m pytest -q $(FAST) -m "not slow and not full and not gpu" $(ARGS)

missing-tools:
	@[ "$$(uname -sm)" != "Linux x86_64" ] || command -v bwrap >/dev/null || echo "make: no bwrap on PATH: some 250 tests of what confines untrusted code will be left out; to have them: apt-get install bubblewrap"
	@[ -e /usr/bin/chromium ] || echo "make: no /usr/bin/chromium: the tests of the console in a browser will be left out; to have them: apt-get install chromium"

# Where there is a card, the packages that drive it are installed in the place of those for a CPU; `make install` brings these back.
test-gpu: LOCK := $(if $(wildcard /dev/nvidiactl),$(CUDA),$(LOCK))
test-gpu: install ## what only a GPU can show (minutes); elsewhere it says why it is skipped
	@$(BIN)/python -m pytest -q -m gpu tests/gpu/test_on_a_gpu.py $(ARGS)

check: install lint types ## ruff and mypy

lint: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

docs: install    ## write the reference pages of infra/docs from the code
	@$(BIN)/python -m infra.cli.docs && $(BIN)/python -m tests.bench.report

lock:            ## compile the locks anew from pyproject.toml and infra/requirements
	@$(BIN)/uv pip compile pyproject.toml infra/requirements/all.in $(EXTRAS) --python-version 3.11 --generate-hashes --no-header --quiet \
	  --overrides infra/requirements/overrides.txt --output-file $(LOCK)
	@$(BIN)/uv pip compile pyproject.toml infra/requirements/cuda.in $(EXTRAS) --extra cuda --python-version 3.11 --generate-hashes --no-header --quiet \
	  $(LINUX) --overrides infra/requirements/cuda-overrides.txt --output-file $(CUDA)
	@$(BIN)/uv pip compile pyproject.toml infra/requirements/all.in $(IMAGE) --python-version 3.11 --generate-hashes --no-header --quiet \
	  --overrides infra/requirements/overrides.txt --constraint $(LOCK) --no-annotate --output-file infra/requirements/image.lock
	@$(BIN)/uv pip compile pyproject.toml infra/requirements/cuda.in $(IMAGE) --extra cuda --python-version 3.11 --generate-hashes --no-header --quiet \
	  $(LINUX) --overrides infra/requirements/cuda-overrides.txt --constraint $(CUDA) --no-annotate --output-file infra/requirements/image-cuda.lock
	@$(BIN)/uv pip compile infra/requirements/model.in --no-deps --python-version 3.11 --generate-hashes --no-header --quiet --output-file $(MODEL)
	@$(BIN)/uv pip compile infra/requirements/agents.in --python-version 3.11 --generate-hashes --no-header --quiet --output-file $(AGENTS)
	@$(BIN)/uv pip compile infra/requirements/bench.in --python-version 3.11 --generate-hashes --no-header --quiet \
	  --overrides infra/requirements/bench-overrides.txt --output-file $(BENCH)
	@echo uv | $(BIN)/uv pip compile - --constraint $(LOCK) --generate-hashes --no-header --no-annotate --quiet --output-file infra/requirements/uv.lock

extras-check: install ## each extra of the wheel resolves alone, and every package of the CUDA lock is there by its hash
	@$(BIN)/uv pip sync --dry-run --quiet --require-hashes --python-version 3.11 $(LINUX) --target $(VENV)/cuda-lock $(CUDA)
	@for extra in streams actors trainer console environments mcp tasks cuda local dev; do \
	  $(BIN)/uv pip compile pyproject.toml --extra $$extra --python-version 3.11 --quiet --no-header > $(VENV)/extra-$$extra.txt \
	    && echo "extra $$extra: $$(grep -c == $(VENV)/extra-$$extra.txt) packages" || exit 1; done
	@! grep -qE '^(torch|vllm)==' $(VENV)/extra-streams.txt || { echo "the streams extra pulls torch or vLLM"; exit 1; }

clean:           ## remove the environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
