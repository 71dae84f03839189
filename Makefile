# Everything runs in .venv, which is made when it is missing and installed into again when setup.cfg changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider -n 2 --dist worksteal
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: demo test quick lint doctest unit test-slow test-tpu test-gpu test-processors fuzz bench docs docs-tables docs-plots clean

## Install the package and run the main job.
demo: $(VENV)/.demo
	$(BIN)/tf-lossscale train --out runs

## What has to pass: lint, types, the examples in docstrings, and all tests but the slow ones.
test: lint doctest unit

## The tests that start processes of their own, or train or measure for seconds; CI runs them after `make test`.
test-slow: $(VENV)/.test
	$(PYTEST) -m slow tests tf_function_tests

## For the loop of edit and test: lint, types, the core, and one family's row of the behaviours and of the promises.
quick: lint
	$(PYTEST) -m "not slow and not tpu and not gpu" -k "core or ($(FAMILY) and not mirrored_4 and not loop)" \
		tests/core tests/test_families.py tf_function_tests/test_promises.py
FAMILY := keras3

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## Parts of `test`.
doctest: $(VENV)/.test
	$(BIN)/python -m pytest -q -p no:cacheprovider --doctest-modules tf_lossscale

unit: $(VENV)/.test
	$(PYTEST) -m "not slow and not tpu and not gpu" tests tf_function_tests

## The compiled step, taken by the TPU compiler; needs no TPU but the extra tpu-check.
test-tpu: $(VENV)/.tpu
	$(BIN)/python -m pytest -q -p no:cacheprovider -m tpu tf_function_tests

## The promises and fit on the GPUs of this machine; skipped with the reason where TensorFlow finds none.
test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -q -p no:cacheprovider -rs -m gpu tf_function_tests

## The suites of numbers as other processors round: the instruction set of XLA, oneDNN's kernels, threads within an operation.
## Three processors take each value once; one of them alone: `make processor-AVX2-1-8`.
NUMERIC := tests/core tests/conformance tests/optimizers tests/amp tests/test_numerics.py tf_function_tests/test_promises.py
test-processors: processor-SSE4_2-0-1 processor-AVX2-1-8 processor-AVX512-0-8

processor-%: $(VENV)/.test
	XLA_FLAGS=--xla_cpu_max_isa=$(word 1,$(subst -, ,$*)) TF_ENABLE_ONEDNN_OPTS=$(word 2,$(subst -, ,$*)) \
		TF_NUM_INTRAOP_THREADS=$(word 3,$(subst -, ,$*)) \
		$(PYTEST) -m "not slow and not tpu and not gpu" $(NUMERIC)

## Random programs against a NumPy model, and faults, for MINUTES=10; SEED=... repeats a run.
fuzz: $(VENV)/.test
	$(BIN)/python -m fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(FUZZ)

## What a step costs, next to the bare optimizer and to the libraries' own (docs/performance.*); Adafactor's next to the others'.
## A run that was stopped goes on with `make bench BENCH=--missing`, or with a time: BENCH="--missing 2026-01-31T15:00".
bench: $(VENV)/.test
	$(BIN)/python -m benchmarks $(BENCH) --only "^[^,]+, (?!mirrored)"
	$(BIN)/python -m benchmarks $(BENCH) --only "^[^,]+, mirrored"
	$(BIN)/python benchmarks/adafactor.py

## Build the documentation site into site/; a warning is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

## Draw the plots of docs/concepts.md anew.
docs-plots: $(VENV)/.demo
	$(BIN)/python docs/plots.py

## Write the tables of docs/migration.md and docs/distributed.md anew, from what is tested.
docs-tables: $(VENV)/.test
	$(BIN)/python -m tests.migrate.codemod.docs_table
	$(BIN)/python -m tf_function_tests.docs_table

$(VENV)/.tpu: $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[tpu-check]'
	touch $@

$(VENV)/.docs: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[docs]'
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
