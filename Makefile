# All targets use the virtual environment .venv. Make creates it, and updates it if setup.cfg or pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The number of processes that run tests. `auto` is computed from the number of cores and the size of the memory by
# `pytest_xdist_auto_num_workers` in conftest.py.
PROCESSES ?= auto
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider -n $(PROCESSES) --dist worksteal
SUITE := tests tf_function_tests
ON_DEMAND := exhaustive or tpu or gpu
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Each test process uses one thread per operation, because other processes use the other cores.
unit test-all quick: export TF_NUM_INTRAOP_THREADS ?= 1

.PHONY: help demo test test-all test-exhaustive quick lint doctest unit nox sessions release-check docs dist

## Print this list.
help:
	@awk '/^## /{text = text substr($$0, 3)} /^[a-z-]+:/{if (text) printf "make %-16s%s\n", substr($$1, 1, length($$1) - 1), text; text = ""}' Makefile

## Install the package and run the demo.
demo: $(VENV)/.demo
	$(BIN)/python -m tools.quietly examples/float16_demo.py --out runs

## Run lint, type check, doctests, and a test of every public behavior. This takes about six minutes on two cores.
test: $(VENV)/.test
	$(MAKE) -j2 lint doctest
	$(MAKE) unit

## Run the slow tests, which `make test` leaves out. CI runs both.
test-all: $(VENV)/.test
	$(PYTEST) -m "slow and not ($(ON_DEMAND))" $(SUITE)

## Repeat tests with all their parameters and with new random examples. CI does not run this target.
test-exhaustive: $(VENV)/.test
	$(PYTEST) -m "exhaustive" $(SUITE)
	$(PYTEST) -m "not slow and not ($(ON_DEMAND))" --hypothesis-profile new $$(grep -rl hypothesis --include='test_*.py' tests)

## Run lint, the type check, the core tests, and the contract tests of the optimizers of FAMILY=keras3.
quick: lint
	$(PYTEST) -m "not ($(ON_DEMAND))" -k "core or ($(FAMILY) and not mirrored_4 and not loop)" \
		tests/core tests/test_families.py tf_function_tests/test_promises.py
FAMILY := keras3

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/zizmor --quiet --offline .github

doctest: $(VENV)/.test
	$(BIN)/python -m pytest -q -p no:cacheprovider --doctest-modules tf_lossscale

unit: $(VENV)/.test
	$(PYTEST) --durations=20 -o console_output_style=classic -m "not slow and not ($(ON_DEMAND))" $(SUITE)

## Test old and new versions of TensorFlow and Python. SESSION="tests(2.16-3.11-all)" runs one session.
nox: $(VENV)/.nox
	$(BIN)/nox $(if $(SESSION),--session "$(SESSION)")

sessions: $(VENV)/.nox
	@$(BIN)/nox --list --json

## Run all checks before a release, which take hours. ONLY=fuzz runs the checks whose names match.
release-check: $(VENV)/.nox
	$(BIN)/python tools/release_check.py $(if $(ONLY),--only "$(ONLY)")

## Build the documentation site in site/. Warnings are errors.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

## Build the wheel and the sdist into dist/. With TAG=v1.0.0, fail unless the tag matches the version.
dist: $(VENV)/.build
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	test -z "$$TAG" || test -f "dist/tf_lossscale-$${TAG#v}.tar.gz"

$(VENV)/.tpu: $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[tpu-check]'
	touch $@

$(VENV)/.docs: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[docs]'
	touch $@

# The tools nox and build run without this package, so it is not installed.
$(VENV)/.nox: TOOLS := nox
$(VENV)/.build: TOOLS := build twine check-wheel-contents
$(VENV)/.nox $(VENV)/.build: $(VENV)/.%:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TOOLS)
	touch $@

$(VENV)/.demo: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[demo]'
	touch $@

$(VENV)/.test: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[demo,test]'
	touch $@
