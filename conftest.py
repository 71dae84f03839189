"""Creates four virtual CPUs, or connects to the cluster in TF_CONFIG, before TensorFlow initializes its devices."""

import gc
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import pytest
import tensorflow as tf

from tests import numerics, strategies

if strategies.ROLE:
    strategies.get(strategies.here()[0])
else:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )

# Hypothesis generates the same examples in every run, so that only a change of the code can make a test fail.
# `make test-exhaustive` generates new examples.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


# Where a test has each family in both modes, `make test` leaves out one of the two.
OTHER_MODE = {
    "keras3": "eager",
    "tf_keras": "function",
    "tf_keras_legacy": "eager",
    "tf1": "function",
    "sonnet": "eager",
}


def _is_other_mode(name, names):
    """Return whether a case has its family in the mode that `make test` leaves out, and there is one in the other."""
    words = name.split("-")
    (mode, other), family = sorted(["eager", "function"], key=lambda each: each not in words), {*words} & {*OTHER_MODE}
    twin = "-".join(other if word == mode else word for word in words)
    return twin != name and twin in names and mode in [OTHER_MODE[each] for each in family]


def pytest_collection_modifyitems(config, items):
    """Mark the cases of each table by their tier, and put slow tests first, so that no process waits for the others."""
    whole = not any("::" in argument for argument in config.args) and not strategies.ROLE
    for test, cases in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(cases)
        table = cases[0].get_closest_marker("table")
        names = {case.callspec.id for case in cases if hasattr(case, "callspec")}
        if table and whole and not names >= set(table.args):
            raise pytest.UsageError(f"{test}: the marker `table` names {sorted(set(table.args) - names)}")
        for number, case in enumerate(cases if names else ()):
            if table and case.callspec.id in table.args:
                case.add_marker("first")
            elif table and number % table.kwargs["every"]:
                case.add_marker("exhaustive")
            elif table or _is_other_mode(case.callspec.id, names):
                case.add_marker(pytest.mark.wide("repeats other cases"))
    for item in items:
        wide = item.get_closest_marker("wide")
        if wide and not (wide.args and " " in wide.args[0]):
            raise pytest.UsageError(f"{item.nodeid}: write a reason: pytest.mark.wide('repeats ...')")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


# Only pytest-xdist defines this hook, and the sessions of nox do not install pytest-xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return the number of processes for `-n auto`: one per core and per 1.5 GB of memory, but at most eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(8, cores, int(memory / 1.5e9)))


def pytest_collection_finish():
    """Exclude imported modules from garbage collection and run it less often. It took 8 % of the processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test if XLA cannot compile its float16 operations."""
    try:
        return (yield)
    except tf.errors.InternalError as error:
        if not numerics.XLA_HAS_FLOAT16 and "Failed to materialize symbols" in str(error):
            pytest.skip("XLA cannot compile float16 operations for this instruction set")
        raise
