"""Writes compiled steps of every Keras family as StableHLO, with inputs and the results that TensorFlow computes.

    python -m tf_function_tests.export_steps DIRECTORY

`run_steps_on_jax.py DIRECTORY` then runs them on whatever device JAX has.
"""

import json
import pathlib
import sys

import numpy as np

from tf_function_tests.steps import Step

FAMILIES = ("keras3", "tf_keras", "tf_keras_legacy")
# Large enough that a step is more than the start of its kernels; its inputs are made by seed, not stored.
LARGE = {"layers": 8, "width": 1024}


def main(directory):
    """Writes `NAME.stablehlo`, `NAME.npz` and `steps.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    listed = []
    for family in FAMILIES:
        step = Step(family)
        (directory / f"{family}.stablehlo").write_text(step.stablehlo())
        for kind, scale in (("finite", 2.0**10), ("overflow", 2.0**30)):
            parameters = step.values(scale)
            after, loss = step(parameters)
            arrays = {f"in_{i}": value for i, value in enumerate(parameters)}
            arrays.update({f"out_{i}": value for i, value in enumerate(after)}, loss=loss)
            np.savez_compressed(directory / f"{family}-{kind}.npz", **arrays)
            listed.append({"name": f"{family}-{kind}", "program": family, "parameters": step.parameters})
        for kind in ("wrapped", "bare"):
            name = f"{family}-large-{kind}"
            large = Step(family, wrapped=kind == "wrapped", growth_steps=2000, **LARGE)
            (directory / f"{name}.stablehlo").write_text(large.stablehlo())
            listed.append({"name": name, "program": name, "parameters": large.parameters, "timed": True})
    (directory / "steps.json").write_text(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
