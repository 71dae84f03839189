"""Writes compiled steps of every Keras family as StableHLO, with inputs and the results that TensorFlow computes.

    python -m tf_function_tests.export_steps DIRECTORY

`run_steps_on_jax.py DIRECTORY` then runs them on whatever device JAX has.
"""

import pathlib
import sys

import numpy as np

from tf_function_tests.steps import Step


def main(directory):
    """Writes `FAMILY.stablehlo`, and `FAMILY-KIND.npz` for a step that is applied and for one that is skipped."""
    directory.mkdir(parents=True, exist_ok=True)
    for family in ("keras3", "tf_keras", "tf_keras_legacy"):
        step = Step(family)
        (directory / f"{family}.stablehlo").write_text(step.stablehlo())
        for kind, scale in (("finite", 2.0**10), ("overflow", 2.0**30)):
            values = step.values(scale)
            after, loss = step(values)
            arrays = {f"in_{i}": value for i, value in enumerate(values)}
            arrays |= {f"out_{i}": value for i, value in enumerate(after, 1)}
            np.savez_compressed(directory / f"{family}-{kind}.npz", **arrays, loss=loss, names=["batch", *step.names])


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
