"""Kills a worker in a cluster that trains under MultiWorkerMirroredStrategy or ParameterServerStrategy."""

import functools
import json
import pathlib
import re
import signal
import tempfile

import numpy as np

from fuzz import cluster_job
from tf_function_tests import cluster


def _result(code, output):
    assert code == 0, output[-3000:]
    return json.loads(re.search("^RESULT (.*)$", output, re.MULTILINE).group(1))


def _fit(directory, *dies):
    command = ["-m", "fuzz.cluster_job", "fit", f"{directory}/backup", *map(str, dies)]
    return cluster.run_workers(command, pathlib.Path(directory, "output"))


@functools.cache
def _undisturbed():
    with tempfile.TemporaryDirectory() as directory:
        return _result(*_fit(directory)[0])


def worker_of_fit_killed(random, directory):
    """Kill one of two workers during `fit`, and restart both workers.

    Training resumes with BackupAndRestore, and must produce the same result as an uninterrupted run.
    """
    batch = random.randint(1, cluster_job.EPOCHS * cluster_job.BATCHES)
    dies = (batch, random.randrange(2), random.uniform(0, 0.1))
    outcomes = _fit(directory, *dies)
    assert outcomes[dies[1]][0] == -signal.SIGKILL, outcomes[dies[1]][1][-3000:]
    found = [_result(*outcome) for outcome in _fit(directory)]
    assert found == [_undisturbed()] * 2, f"killed at {dies}: {found}, not {_undisturbed()}"
    numbers = [np.ravel(value) for value in found[0]["weights"] + found[0]["optimizer"]]
    assert np.isfinite(np.concatenate(numbers)).all(), found[0]


def worker_of_parameter_server_killed(random, directory):
    """Kill a worker while it runs a scheduled step. This step may run twice. Every other step must run exactly once."""
    command = ["-m", "fuzz.cluster_job", "parameter_server", str(random.randrange(10**6))]
    found = _result(*cluster.run_coordinator(command, pathlib.Path(directory, "output")))
    again = found["iterations"] - found["steps"]
    assert again in (0, 1), found
    assert found["weight"] in [[-0.5 * (found["finite"] + extra)] * 2 for extra in {0, again}], found
    assert 1.0 <= found["scale"] <= 2.0**40 and np.log2(found["scale"]) % 1 == 0, found


FAULTS = [worker_of_fit_killed, worker_of_parameter_server_killed]
