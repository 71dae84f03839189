"""Processes that train together: the promises over workers and parameter servers; workers that die, and go on."""

import json
import re
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.families import FAMILIES
from tf_function_tests import cluster
from tf_function_tests.cell import Cell

pytestmark = pytest.mark.slow
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
of_one_family_and_all = pytest.mark.parametrize(
    ("cases", "least"), [(" and keras3", 10), pytest.param("", 40, marks=pytest.mark.exhaustive)], ids=["keras3", "all"]
)


@of_one_family_and_all
def test_the_promises_hold_over_processes(tmp_path, cases, least):
    suites = [f"tf_function_tests/test_{suite}.py" for suite in ("promises", "fit")]
    command = [*PYTEST, "-k", f"workers{cases}", *suites]
    passed = []
    for code, output in cluster.run_workers(command, tmp_path):
        assert code == 0, output[-5000:]
        passed.append(int(re.search(r"(\d+) passed", output).group(1)))
    assert passed[0] == passed[1] > least


@of_one_family_and_all
def test_the_promises_hold_over_parameter_servers(tmp_path, cases, least):
    suites = ["tf_function_tests/test_promises.py", "tf_function_tests/parameter_server_suite.py"]
    command = [*PYTEST, "-k", f"parameter_server{cases}", *suites]
    code, output = cluster.run_coordinator(command, tmp_path)
    assert code == 0, output[-5000:]
    assert int(re.search(r"(\d+) passed", output).group(1)) >= least


def results(outputs):
    """What the job printed, the same in every worker."""
    found = []
    for code, output in outputs:
        assert code == 0, output[-5000:]
        found.append(json.loads(re.search("^RESULT (.*)$", output, re.MULTILINE).group(1)))
    assert found[0] == found[1]
    return found[0]


def test_a_job_whose_worker_is_killed_goes_on_from_its_checkpoints_as_if_nothing_had_happened(tmp_path):
    def job(name, *arguments):
        return cluster.run_workers(["-m", "tf_function_tests.job", str(tmp_path / name), *arguments], tmp_path / "out")

    whole = results(job("whole"))
    died = job("cut", "dies")
    assert died[1][0] == -signal.SIGKILL, died[1][1][-5000:]
    resumed = results(job("cut"))

    for family in FAMILIES:
        undisturbed, loop = (run["loop"][family.name] for run in (whole, resumed))
        assert (undisturbed.pop("resumed_at"), loop.pop("resumed_at")) == (0, 6)
        assert [scale for scale, _ in undisturbed["seen"]] == [64, 128, 64, 64, 128, 64, 64, 128, 64, 64, 128, 128]
        assert loop["seen"] == undisturbed["seen"][6:]
        assert {**loop, "seen": None} == {**undisturbed, "seen": None}, family.name
    assert len(whole["fit"]) == 2
    for name, undisturbed in whole["fit"].items():
        assert (undisturbed.pop("resumed_at"), resumed["fit"][name].pop("resumed_at")) == (0, 2)
        assert resumed["fit"][name] == undisturbed, name
        assert undisturbed["scale"] == [4.0, 2], "each of four epochs has a batch that overflows"

    # What two processes wrote is read by one, with any number of replicas.
    for family in FAMILIES:
        for strategy in ("none", "mirrored_4"):
            cell = Cell(family, strategy, "function")
            checkpoint = tf.train.Checkpoint(optimizer=cell.optimizer, weight=cell.weight)
            checkpoint.restore(tf.train.latest_checkpoint(tmp_path / "whole" / family.name)).expect_partial()
            cell.step(*[np.nan] * cell.replicas)
            assert cell.scale() == (64.0, 0.0, 13.0)
            for copy in cell.copies(cell.weight):
                assert copy.tolist() == whole["loop"][family.name]["weight"]
