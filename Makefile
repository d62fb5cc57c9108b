# Every command a developer needs; `make` alone lists them.
# Plain make and POSIX sh only: macOS still ships GNU make 3.81.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What `make run` needs, and that with the development tools: each is instant when nothing changed.
STAMP     := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

# Another build of torch than deploy/environment.py picks, for example CUDA 12.6 (README, "Choosing a build of torch").
TORCH_INDEX_URL ?=
# Further flags for `make lock`, for example LOCK_FLAGS=--upgrade or LOCK_FLAGS='--upgrade-package celery'.
LOCK_FLAGS ?=
# Test processes side by side: more than there are cores on a small machine, as they wait for servers a good part of the
# time, and no more on a large one, as each brings servers of its own.
PROCESSES ?= 3
# Where the environment says that Python shall keep no bytecode, each of some hundred processes of the tests would compile all
# of our code anew, and each of those that collect rewrite the asserts of 300 files.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
# At the end the 15 dearest are told.
# A test process that dies ends the run: xdist would start another and then wait for ever for what the dead one had in hand.
PARALLEL := --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=15
# So that no long file is left for the end while the other processes have nothing to do.
DEAREST_FIRST := tests/acceptance tests/integration tests/browser tests/contract tests/unit tests/architecture
SOAK_SECONDS ?= 600
# Names and options for `make bench`, for example BENCH_FLAGS='engine --repeat 1'.
BENCH_FLAGS ?=

# Asking for another torch makes the installation stale; not asking keeps whichever build is there.
ifneq ($(TORCH_INDEX_URL),)
ifneq ($(TORCH_INDEX_URL),$(shell cat $(VENV)/.torch-index 2>/dev/null))
STALE := torch-build-changes
endif
endif

.PHONY: help setup run up test test-tail test-again test-blackbox test-browser test-all soak mutants check lint bench docs docs-serve wheel lock clean torch-build-changes

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(DEV_STAMP) ## Create .venv with all that requirements.lock names, development tools too (instant when nothing changed)

run: $(STAMP) ## The main job: encode every docstring of the standard library, search them, leave nothing running
	@$(BIN)/vectormill demo

up: $(STAMP) ## Start every process on this machine in the foreground; Ctrl-C stops them all
	@$(BIN)/vectormill up

test: lint ## For every change: lint and the core of the tests, which has what finds faults (10 to 17 minutes on two cores)
	$(PYTEST) $(PARALLEL) $(DEAREST_FIRST)

test-tail: setup ## What continuous integration runs behind make test: dear tests that seldom find a fault (decision 0052)
	$(PYTEST) $(PARALLEL) -m 'tail and not slow' $(DEAREST_FIRST)

test-again: setup ## What failed in the last run of tests, once more and one by one; fails where that run was broken off
	$(PYTEST) -m '' --last-failed --last-failed-no-failures=none tests

test-blackbox: setup ## A running service seen from outside alone: commands, HTTP, SQL, kills (BLACKBOX_FLAGS="--vectormill PROGRAM" for another release)
	$(PYTEST) tests/blackbox $(BLACKBOX_FLAGS)

test-browser: setup ## The console in a real Chromium; make test skips these where none is, and this fails
	$(PYTEST) --require-browser tests/browser

test-all: lint ## Before a release: core, tail and slow tests: a minute of chaos, outages, an old release beside a new one
	$(PYTEST) $(PARALLEL) -m '' $(DEAREST_FIRST)
	$(PYTEST) tests/blackbox

soak: setup ## Ten minutes of random kills and stops under load (SOAK_SECONDS=3600 for an hour)
	$(PYTEST) -m '' tests/acceptance/test_chaos.py --soak-seconds=$(SOAK_SECONDS)

mutants: setup ## Remove what must not be removed, one line at a time, and show which test fails for each (some ten minutes)
	$(BIN)/python -m tests.mutants --jobs 2

check: lint ## Before every commit: format, lint, types, import contracts, fast tests (a minute or two)
	$(PYTEST) tests/unit tests/architecture
	@$(BIN)/python -m tests.architecture.tree

lint: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: setup ## Measure speed and memory; the last table is in benchmarks/README.md
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

docs: setup ## Build the documentation site into build/site; what would be a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: setup ## Show the documentation site at http://127.0.0.1:8001 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

wheel: setup ## Build the wheel and the sdist into dist/
	$(BIN)/python -m build --no-isolation --quiet

lock: ## Recompute requirements.lock from pyproject.toml (LOCK_FLAGS=--upgrade takes newer versions)
	@$(PYTHON) deploy/environment.py lock -- $(LOCK_FLAGS)

clean: ## Remove .venv, caches and build leftovers; data directories stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- How the environment is made ----------------------------------------------------------------------------------------

torch-build-changes:

# The editable installation lists the packages of the top level, so a new one makes it stale.
INSTALLED_FROM := requirements.lock pyproject.toml deploy/environment.py $(wildcard */__init__.py) $(STALE)
ENVIRONMENT = $(PYTHON) deploy/environment.py --torch-index='$(TORCH_INDEX_URL)'

$(STAMP): $(INSTALLED_FROM)
	@$(ENVIRONMENT) run
	@touch $@

$(DEV_STAMP): $(INSTALLED_FROM)
	@$(ENVIRONMENT) dev
	@touch $(STAMP) $@
