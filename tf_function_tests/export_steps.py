"""Writes compiled steps of every Keras family as StableHLO, with inputs and the results that TensorFlow computes.

    python -m tf_function_tests.export_steps DIRECTORY [--timed]

`run_steps_on_jax.py DIRECTORY` then runs them on whatever device JAX has. With --timed it also measures how long steps
take with each wrapper.
"""

import argparse
import json
import pathlib

import numpy as np

from tf_function_tests import steps

FAMILIES = ("keras3", "tf_keras", "tf_keras_legacy")
STEPS = {
    **{family: (steps.Step, family) for family in FAMILIES},
    "convnet": (steps.Convnet, "keras3"),
    "transformer": (steps.Transformer, "tf_keras"),
    "update": (steps.Update, "keras3"),
    "run": (steps.Run, "keras3"),
}
# Kind -> scale, the batch's elements that are NaN.
KINDS = {"finite": (2.0**10, ()), "overflow": (2.0**30, ())}
# An element of the batch is in one gradient of `Update`.
KINDS_OF_UPDATE = {"finite": (2.0**10, ()), "first NaN": (2.0**10, (0,)), "last NaN": (2.0**10, (1,))}
# Workload -> the step, and how many of them a program takes.
TIMED = {
    "update of 200 x 1k": (steps.ManyShapes, 100),
    "update of ResNet-50": (steps.ResNetShapes, 100),
    "step of ResNet-50": (steps.ResNet, 10),
}


def write_compared(directory):
    """Writes `NAME.stablehlo`, and `NAME-KIND.npz` for steps that are applied and that are skipped."""
    for name, (kind_of_step, family) in STEPS.items():
        step = kind_of_step(family)
        (directory / f"{name}.stablehlo").write_text(step.stablehlo())
        for kind, (scale, nan_at) in (KINDS_OF_UPDATE if name == "update" else KINDS).items():
            values = step.values(scale, nan_at)
            after, loss = step(values)
            arrays = {f"in_{i}": value for i, value in enumerate(values)}
            arrays |= {f"out_{i}": value for i, value in enumerate(after, 1)}
            np.savez_compressed(directory / f"{name}-{kind}.npz", **arrays, loss=loss, names=["batch", *step.names])


def write_timed(directory):
    """Writes `WORKLOAD, WRAPPER.stablehlo`, and a .json file with the number of steps and the arguments' types."""
    for workload, (kind_of_step, number) in TIMED.items():
        for wrapper in steps.WRAPPERS:
            step, name = steps.repeated(kind_of_step, number)("tf_keras", wrapper), f"{workload}, {wrapper}"
            (directory / f"{name}.stablehlo").write_text(step.stablehlo())
            values = step.values(2.0**10)
            types = [[value.shape, value.dtype.name, None if value.ndim else value.item()] for value in values]
            (directory / f"{name}.json").write_text(json.dumps({"steps": number, "types": types}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--timed", action="store_true")
    chosen = parser.parse_args()
    chosen.directory.mkdir(parents=True, exist_ok=True)
    write_compared(chosen.directory)
    if chosen.timed:
        write_timed(chosen.directory)
