"""The compiled step of every family, where there is no such device: the TPU compiler, and JAX as a runtime."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.cases import combinations
from tests.families import ALL_IDS
from tf_function_tests.steps import SharedStep, Step

HERE = pathlib.Path(__file__).parent
# jax and libtpu may be in another environment than TensorFlow.
PYTHON = os.environ.get("TF_LOSSSCALE_TPU_PYTHON", sys.executable)


@functools.cache
def why_not(*modules):
    """Why the modules cannot be used, or None."""
    imports = f"import {', '.join(modules)}"
    found = subprocess.run([PYTHON, "-c", imports], capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    if found.returncode:
        return f"{PYTHON} has no {' and '.join(modules)}: `make release-check ONLY=TPU` installs them"
    return None


CASES = [
    *(pytest.param(family, Step, id=family) for family in ALL_IDS),
    pytest.param("keras3", SharedStep, id="shared"),
]


@pytest.mark.parametrize(("family", "kind"), combinations(CASES, usual=["keras3", "tf1"], others=pytest.mark.slow))
def test_the_steps_that_are_exported_train_and_skip(family, kind):
    step = kind(family)
    for scale, skipped in ((2.0**10, False), (2.0**30, True)):
        _, *before = step.values(scale)
        before, after = dict(zip(step.names, before)), dict(zip(step.names, step(step.values(scale))[0]))
        assert (after["step_counts"] - before["step_counts"]).tolist() == ([1, 1, 1] if skipped else [1, 0, 0])
        assert after["current_loss_scale"] == (2.0**29 if skipped else 2.0**10)
        for name in ("weight_0", "weight_1"):
            assert np.array_equal(before[name], after[name]) == skipped


@pytest.mark.tpu
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_tpu_compiler_takes_the_step(family, kind, tmp_path):
    if why_not("jax", "libtpu"):
        pytest.skip(why_not("jax", "libtpu"))
    program = tmp_path / f"{family}.stablehlo"
    program.write_text(kind(family).stablehlo())
    done = subprocess.run([PYTHON, HERE / "tpu_compile.py", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["topology"].split(":")[0] for line in lines] == ["v4", "v5e", "v5p", "v6e"]
    for line in lines:
        assert line["conditionals"] == 2, line  # the step, and an empty one in the branch that skips it
        assert line["host callbacks"] == 0, line


@pytest.mark.tpu
def test_the_exported_steps_run_on_jax_as_in_tensorflow(tmp_path):
    if why_not("jax"):
        pytest.skip(why_not("jax"))
    subprocess.run([sys.executable, "-m", "tf_function_tests.export_steps", tmp_path], check=True, cwd=HERE.parent)
    done = subprocess.run(
        [PYTHON, HERE / "run_steps_on_jax.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("2 conditionals, 0 host callbacks, largest difference") == 15, done.stdout
