# All targets use the virtual environment .venv. Make creates it, and updates it if setup.cfg or pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The number of processes that run tests. `auto` is computed from the number of cores and the size of the memory by
# `pytest_xdist_auto_num_workers` in conftest.py.
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
	$(BIN)/python examples/float16_demo.py --out runs

## Run everything that must pass: lint, type check, doctests, and all tests except the slow ones.
test: $(VENV)/.test
	$(MAKE) -j2 lint doctest
	$(MAKE) unit

## Run the slow tests, which start processes, train or measure. CI runs them after `make test`.
test-slow: $(VENV)/.test
	$(PYTEST) -m "slow and not exhaustive" tests tf_function_tests

## Repeat quick tests with more parameters and with new random examples. CI does not run this target.
test-exhaustive: $(VENV)/.test
	$(PYTEST) -m "exhaustive" tests tf_function_tests
	$(PYTEST) -m "hypothesis and not slow" --hypothesis-profile new tests

## Run a quick check while editing: lint, type check, the core tests, and the contract tests of one optimizer family.
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

## Run the examples in docstrings.
doctest: $(VENV)/.test
	$(BIN)/python -m pytest -q -p no:cacheprovider --doctest-modules tf_lossscale

unit: $(VENV)/.test
	$(PYTEST) -m "not slow and not exhaustive and not tpu and not gpu" tests tf_function_tests

## Compile an optimizer step with the TPU compiler, which the extra tpu-check installs. No TPU is needed.
test-tpu: $(VENV)/.tpu
	$(BIN)/python -m pytest -q -p no:cacheprovider -m tpu tf_function_tests

## Run the GPU tests. They are skipped if TensorFlow finds no GPU.
test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -q -p no:cacheprovider -rs -m gpu tf_function_tests

## Run the numeric tests with three configurations of XLA's instruction set, oneDNN's kernels and threads per operation.
## These settings change how results are rounded. `make processor-AVX2-1-8` runs one configuration.
NUMERIC := tests/core tests/conformance tests/optimizers tests/amp tests/test_numerics.py tests/wrapper/test_jit_compile.py \
	tf_function_tests/test_jit_compile.py tf_function_tests/test_promises.py
test-processors: processor-SSE4_2-0-1 processor-AVX2-1-8 processor-AVX512-0-8

processor-%: $(VENV)/.test
	XLA_FLAGS=--xla_cpu_max_isa=$(word 1,$(subst -, ,$*)) TF_ENABLE_ONEDNN_OPTS=$(word 2,$(subst -, ,$*)) \
		TF_NUM_INTRAOP_THREADS=$(word 3,$(subst -, ,$*)) \
		$(PYTEST) -m "not slow and not tpu and not gpu" $(NUMERIC)

## Compare random programs with a NumPy model, and inject faults. MINUTES=10 sets the duration. SEED=... repeats a run.
fuzz: $(VENV)/.test
	$(BIN)/python -m fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(FUZZ)

## Compare random programs with the loss scale optimizers of tf_keras, Keras 3, TensorFlow 2.4 and TensorFlow 2.8.
## MINUTES=10 sets the duration.
differential: $(VENV)/.test
	$(BIN)/python -m fuzz.differential $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(DIFFERENTIAL)

## Record the results of ORIGINAL=tf24 again, in a separate environment, and compare them with tests/conformance/data.
## RECORD=--write stores the new results. ORIGINAL is tf115, tf23, tf24, tf28, tf_keras, keras3, mindspore or torch.
record: $(VENV)/.test
	$(BIN)/python -m tests.conformance.record $(ORIGINAL) $(RECORD)

## Create mutants of FILE=tf_lossscale/core/rules.py, and print those that no test detects. FILE may name several files.
## MUTANTS="--sample 50" tests 50 mutants. MUTANTS="--only 3,14 --tests tests" runs all tests on mutants 3 and 14.
mutants: $(VENV)/.mutants
	$(BIN)/python -m mutants $(FILE) --jobs $(JOBS) $(MUTANTS)
FILE = $(error FILE is missing. Write `make mutants FILE=tf_lossscale/core/rules.py`)
JOBS := 2

## Run all sessions of nox. SESSION="tests(2.16-3.11-all)" runs one. `make sessions` prints the list of sessions as JSON.
nox: $(VENV)/.nox
	$(BIN)/nox $(if $(SESSION),--session "$(SESSION)")

sessions: $(VENV)/.nox
	@$(BIN)/nox --list --json

## Run all checks before a release, which take hours. ONLY=fuzz runs the checks whose names match.
## A table of the outcomes is written to release-check/STEPS.md, and the output of each check to the same folder.
release-check: $(VENV)/.nox
	$(BIN)/python .ci/release_check.py $(if $(ONLY),--only "$(ONLY)")

## Run the benchmarks and write the tables of docs/performance.md, and compare Adafactor with other optimizers.
bench: $(VENV)/.test
	$(BIN)/python -m benchmarks $(BENCH)
	$(BIN)/python benchmarks/adafactor.py

## Build the documentation site in site/. Warnings are errors.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

## Draw the plots of docs/concepts.md and the README.
docs-plots: $(VENV)/.demo
	$(BIN)/python docs/plots.py

## Write the tables of docs/migration_table.md and docs/distributed.md from the tests.
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

# The tools nox and build run without this package, so it is not installed.
$(VENV)/.nox $(VENV)/.build: $(VENV)/.%:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $*
	touch $@

clean:
	rm -rf $(VENV)

$(VENV)/.demo: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[demo]'
	touch $@

$(VENV)/.test: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[demo,test]'
	touch $@
