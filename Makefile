# Everything runs in .venv. Make creates it if it is missing, and installs again when setup.cfg or pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The number of processes that run tests. `auto` is the number of cores, but at most eight, and no more than
# the memory allows (`pytest_xdist_auto_num_workers` in conftest.py).
PROCESSES ?= auto
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider -n $(PROCESSES) --dist worksteal
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Each test process uses one thread per operation, because other processes use the other cores.
# `make test-processors` sets more threads.
unit: export TF_NUM_INTRAOP_THREADS ?= 1

.PHONY: demo test quick lint doctest unit test-slow test-exhaustive test-tpu test-gpu test-processors fuzz differential record mutants nox sessions \
	release-check bench docs docs-tables docs-plots dist clean

## Install the package and run the demo.
demo: $(VENV)/.demo
	$(BIN)/tf-lossscale train --out runs

## Run everything that must pass: lint, type check, doctests, and all tests except the slow ones.
test: $(VENV)/.test
	$(MAKE) -j2 lint doctest
	$(MAKE) unit

## Run the tests that start processes, or that train or measure for seconds. CI runs them after `make test`.
test-slow: $(VENV)/.test
	$(PYTEST) -m "slow and not exhaustive" tests tf_function_tests

## Repeat quicker tests with more parameters and with new examples. Run it before a release; CI does not.
test-exhaustive: $(VENV)/.test
	$(PYTEST) -m "exhaustive" tests tf_function_tests
	$(PYTEST) -m "hypothesis and not slow" --hypothesis-profile new tests

## Run a quick check while editing: lint, type check, the core tests, and the behaviours and promises of one family.
quick: lint
	$(PYTEST) -m "not slow and not exhaustive and not tpu and not gpu" -k "core or ($(FAMILY) and not mirrored_4 and not loop)" \
		tests/core tests/test_families.py tf_function_tests/test_promises.py
FAMILY := keras3

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/zizmor --quiet --offline .github

## Run the parts of `test`.
doctest: $(VENV)/.test
	$(BIN)/python -m pytest -q -p no:cacheprovider --doctest-modules tf_lossscale

unit: $(VENV)/.test
	$(PYTEST) -m "not slow and not exhaustive and not tpu and not gpu" tests tf_function_tests

## Compile the step with the TPU compiler. Needs the extra tpu-check, and no TPU.
test-tpu: $(VENV)/.tpu
	$(BIN)/python -m pytest -q -p no:cacheprovider -m tpu tf_function_tests

## Run the promises and fit on the GPUs of this machine. If TensorFlow finds none, the tests are skipped with the reason.
test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -q -p no:cacheprovider -rs -m gpu tf_function_tests

## Run the numeric suites with the rounding of other processors: XLA's instruction set, oneDNN's kernels, threads per operation.
## The three configurations cover each value at least once. `make processor-AVX2-1-8` runs one of them.
NUMERIC := tests/core tests/conformance tests/optimizers tests/amp tests/test_numerics.py tests/wrapper/test_jit_compile.py \
	tf_function_tests/test_jit_compile.py tf_function_tests/test_promises.py
test-processors: processor-SSE4_2-0-1 processor-AVX2-1-8 processor-AVX512-0-8

processor-%: $(VENV)/.test
	XLA_FLAGS=--xla_cpu_max_isa=$(word 1,$(subst -, ,$*)) TF_ENABLE_ONEDNN_OPTS=$(word 2,$(subst -, ,$*)) \
		TF_NUM_INTRAOP_THREADS=$(word 3,$(subst -, ,$*)) \
		$(PYTEST) -m "not slow and not tpu and not gpu" $(NUMERIC)

## Compare random programs with a NumPy model, and inject faults, for MINUTES=10. SEED=... repeats a run.
fuzz: $(VENV)/.test
	$(BIN)/python -m fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(FUZZ)

## Compare random programs with the originals themselves, for MINUTES=10: tf_keras's and Keras 3's wrappers, TensorFlow 2.4 and 2.8.
differential: $(VENV)/.test
	$(BIN)/python -m fuzz.differential $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(DIFFERENTIAL)

## Record ORIGINAL=tf24 again, in its own environment, and compare with tests/conformance/data.
## RECORD=--write stores the result.
## Originals: tf115, tf23, tf24, tf28, tf_keras, keras3, mindspore, torch.
record: $(VENV)/.test
	$(BIN)/python -m tests.conformance.record $(ORIGINAL) $(RECORD)

## Mutate FILE=tf_lossscale/core/rules.py, run on each mutant the tests that execute the change, and print the survivors.
## FILE takes several files. MUTANTS="--sample 50" tests some mutants; MUTANTS="--only 3,14 --tests tests" runs all tests on two.
mutants: $(VENV)/.mutants
	$(BIN)/python -m mutants $(FILE) --jobs $(JOBS) $(MUTANTS)
FILE = $(error FILE is missing. Write `make mutants FILE=tf_lossscale/core/rules.py`)
JOBS := 2

## Run nox: every session, or SESSION="tests(2.16-3.11-all)". `make sessions` prints the list of sessions as JSON.
nox: $(VENV)/.nox
	$(BIN)/nox $(if $(SESSION),--session "$(SESSION)")

sessions: $(VENV)/.nox
	@$(BIN)/nox --list --json

## Run all checks before a release, for hours. Print a table of those that passed, failed or were not possible.
## ONLY=fuzz runs the steps whose names match. STEPS.md in release-check/ is the table; beside it is the output of each step.
release-check: $(VENV)/.nox
	$(BIN)/python .ci/release_check.py $(if $(ONLY),--only "$(ONLY)")

## Measure a step against the bare optimizer and the libraries' own wrappers (docs/performance.*), and Adafactor against others.
## `make bench BENCH=--missing` continues a run that was stopped; BENCH="--missing 2026-01-31T15:00" repeats older cells.
bench: $(VENV)/.test
	$(BIN)/python -m benchmarks $(BENCH) --only "^[^,]+, (?!mirrored)"
	$(BIN)/python -m benchmarks $(BENCH) --only "^[^,]+, mirrored"
	$(BIN)/python benchmarks/adafactor.py

## Build the documentation site into site/; a warning is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

## Draw the plots of docs/concepts.md and the README.
docs-plots: $(VENV)/.demo
	$(BIN)/python docs/plots.py

## Write the tables of docs/migration.md and docs/distributed.md from the tests.
docs-tables: $(VENV)/.test
	$(BIN)/python -m tests.migrate.codemod.docs_table
	$(BIN)/python -m tf_function_tests.docs_table

## Build the wheel and the sdist into dist/. With TAG=v0.1.0, fail unless the tag matches the version.
dist: $(VENV)/.build
	rm -rf dist
	$(BIN)/python -m build
	test -z "$$TAG" || test -f "dist/tf_lossscale-$${TAG#v}.tar.gz"

$(VENV)/.tpu: $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[tpu-check]'
	touch $@

$(VENV)/.docs: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[docs]'
	touch $@

$(VENV)/.mutants: $(VENV)/.test
	$(BIN)/python -m pip install -q cosmic-ray coverage
	touch $@

# nox and build do not need the package installed.
$(VENV)/.nox $(VENV)/.build: $(VENV)/.%:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $*
	touch $@

clean:
	rm -rf $(VENV)

$(VENV)/.demo: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[train]'
	touch $@

$(VENV)/.test: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[train,test]'
	touch $@
