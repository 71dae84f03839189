"""Writes compiled steps of every Keras family as StableHLO, with inputs and the results that TensorFlow computes.

    python -m tf_function_tests.export_steps DIRECTORY

`run_steps_on_jax.py DIRECTORY` then runs them on whatever device JAX has.
"""

import json
import pathlib
import sys

import numpy as np

from tf_function_tests.steps import WRAPPERS, Convnet, Run, Step, Transformer, Update
from tools.benchmarks import workloads

STEPS = {
    **{family: (Step, family) for family in ("keras3", "tf_keras", "tf_keras_legacy")},
    "convnet": (Convnet, "keras3"),
    "transformer": (Transformer, "tf_keras"),
    "run": (Run, "keras3"),
}
TIMED = ("200 x 1k", workloads.RESNET)


def main(directory):
    """Writes `NAME.stablehlo`, and `NAME-KIND.npz` for a step that is applied and for one that is skipped.

    For the steps that are only timed, it writes `WORKLOAD, WRAPPER.stablehlo` and the shapes in a .json file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, (kind_of_step, family) in STEPS.items():
        step = kind_of_step(family)
        (directory / f"{name}.stablehlo").write_text(step.stablehlo())
        for kind, scale in (("finite", 2.0**10), ("overflow", 2.0**30)):
            values = step.values(scale)
            after, loss = step(values)
            arrays = {f"in_{i}": value for i, value in enumerate(values)}
            arrays |= {f"out_{i}": value for i, value in enumerate(after, 1)}
            np.savez_compressed(directory / f"{name}-{kind}.npz", **arrays, loss=loss, names=["batch", *step.names])
    for workload in TIMED:
        for wrapper in WRAPPERS:
            step, name = Update(workloads.shapes(workload), wrapper), f"{workload}, {wrapper}"
            (directory / f"{name}.stablehlo").write_text(step.stablehlo())
            (directory / f"{name}.json").write_text(json.dumps(step.types()))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
