# Every command a developer needs; `make` alone lists them.
# Plain make and POSIX sh only: macOS still ships GNU make 3.81.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The installation for `make run`, and the one with development tools; each takes no time if nothing has changed.
STAMP     := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

# A build of torch other than the one that deploy/environment.py picks, for example CUDA 12.6 (docs/DEPLOY.md, "Choosing a build of torch").
TORCH_INDEX_URL ?=
# Further flags for `make lock`, for example LOCK_FLAGS=--upgrade or LOCK_FLAGS='--upgrade-package celery'.
LOCK_FLAGS ?=
# Parallel test processes: more than the cores of a small machine, since they often wait for servers, but no more on a
# large one, since each starts its own servers.
PROCESSES ?= 3
# If the environment disables bytecode caches, each of some hundred test processes would compile all our code again, and
# each that collects tests would rewrite the asserts of 300 files.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
# The 15 slowest tests are listed at the end. A test process that dies ends the run: xdist would start another and then
# wait for ever for the tests of the dead one. `make test-again` runs them.
PARALLEL := --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=15
# Dear tests first, so that no process is still busy with a long file when the others have finished. Those of the core are
# put in order by what docs/core.tsv says of them.
DEAREST_FIRST := tests/acceptance tests/integration tests/integrations tests/contract tests/unit tests/architecture tests/docs
# Further flags of `make test-tail`, for example TAIL_FLAGS=--require-browser, with which tests of the console fail without a Chromium.
TAIL_FLAGS ?=
SOAK_SECONDS ?= 600
# Versions for `make test-torch`; without any, those that tools/torch_versions.py lists.
TORCH_VERSIONS ?=
# Further flags of `docker build` for `make release`, for example IMAGE_FLAGS='--build-arg TORCH_INDEX_URL=https://…'.
IMAGE_FLAGS ?=
# Names and options for `make bench`, for example BENCH_FLAGS='engine --repeat 1'.
BENCH_FLAGS ?=

# Requesting another build of torch makes the installation stale; otherwise the installed build is kept.
ifneq ($(TORCH_INDEX_URL),)
ifneq ($(TORCH_INDEX_URL),$(shell cat $(VENV)/.torch-index 2>/dev/null))
STALE := torch-build-changes
endif
endif

.PHONY: help setup run up test test-tail test-again test-blackbox test-browser test-images test-torch test-all soak mutants check lint bench docs docs-serve wheel release lock clean torch-build-changes

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(DEV_STAMP) ## Create .venv with everything in requirements.lock, including development tools (instant if nothing changed)

run: $(STAMP) ## The main job: encode every docstring of the standard library and search them; nothing is left running
	@$(BIN)/vectormill demo

up: $(STAMP) ## Start every process on this machine in the foreground; Ctrl-C stops them all
	@$(BIN)/vectormill up

test: lint ## For every change: lint and the core, the cheapest tests found that notice what all tests notice (decision 0052)
	$(PYTEST) $(PARALLEL) -m core $(DEAREST_FIRST)

test-tail: setup ## What CI runs after make test: all other tests but the slow ones, those of a running service and of the console too
	$(PYTEST) $(PARALLEL) -m 'not core and not slow' $(TAIL_FLAGS) tests/blackbox tests/browser $(DEAREST_FIRST)

test-again: setup ## Run what failed in the last run, or was not reached since a test process died, again, one by one
	$(PYTEST) -m '' --last-failed --last-failed-no-failures=none tests

test-blackbox: setup ## Test a running service from the outside: commands, HTTP, SQL, kills (BLACKBOX_FLAGS="--vectormill PROGRAM" for another release)
	$(PYTEST) tests/blackbox $(BLACKBOX_FLAGS)

test-browser: setup ## Test the console in a real Chromium, which make test leaves out; without one this fails
	$(PYTEST) --require-browser tests/browser

test-images: setup ## Build both images and run docker-compose.yml: use, kill, upgrade, restore; as root, with an engine of its own
	$(PYTEST) -m '' tests/images

test-all: lint ## Before a release: core, tail and slow tests: a minute of chaos, outages, an old release next to a new one
	$(PYTEST) $(PARALLEL) -m '' tests/blackbox tests/browser $(DEAREST_FIRST)

test-torch: setup ## Run the tests of the engine with other versions of torch, each installed apart (TORCH_VERSIONS="2.11.0 2.15.0", TORCH_INDEX_URL)
	$(BIN)/python -m tools.torch_versions --torch-index='$(TORCH_INDEX_URL)' $(TORCH_VERSIONS)

soak: setup ## Kill and stop processes at random under load for ten minutes (SOAK_SECONDS=3600 for an hour)
	$(PYTEST) -m '' tests/acceptance/test_chaos.py --soak-seconds=$(SOAK_SECONDS)

mutants: setup ## Remove essential lines, one at a time, and show which test fails for each (about twenty minutes)
	$(BIN)/python -m tests.core mutants

check: lint ## Before every commit: format, lint, types, import contracts, fast tests (a minute or two)
	$(PYTEST) -m core tests/unit tests/architecture tests/docs
	@$(BIN)/python -m tests.architecture.tree

lint: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: setup ## Measure speed and memory; the latest results are in benchmarks/README.md
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

docs: setup ## Build the documentation site in build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: setup ## Serve the documentation site at http://127.0.0.1:8001 and rebuild it on changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

wheel: setup ## Build the wheel and the sdist into dist/
	$(BIN)/python -m build --no-isolation --quiet

release: setup ## Build wheel, sdist, chart, images, SBOM, provenance and checksums of VERSION=x.y.z, at its tag, into dist/ (RELEASE_KEY=… signs)
	$(BIN)/python -m deploy.release $(if $(RELEASE_KEY),--key $(RELEASE_KEY)) $(VERSION) -- $(IMAGE_FLAGS)

lock: ## Recompute requirements.lock from pyproject.toml (LOCK_FLAGS=--upgrade takes newer versions)
	@$(PYTHON) deploy/environment.py lock -- $(LOCK_FLAGS)

clean: ## Remove .venv, caches and build leftovers; data directories stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- Creating the environment -------------------------------------------------------------------------------------------

torch-build-changes:

# The editable installation lists the top-level packages, so a new one makes it stale.
INSTALLED_FROM := requirements.lock pyproject.toml deploy/environment.py $(wildcard */__init__.py) $(STALE)
ENVIRONMENT = $(PYTHON) deploy/environment.py --torch-index='$(TORCH_INDEX_URL)'

$(STAMP): $(INSTALLED_FROM)
	@$(ENVIRONMENT) run
	@touch $@

$(DEV_STAMP): $(INSTALLED_FROM)
	@$(ENVIRONMENT) dev
	@touch $(STAMP) $@
