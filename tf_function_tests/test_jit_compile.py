"""A step that XLA compiles alone decides as the plain step does, for every family x strategy x way of calling it."""

import numpy as np
import pytest

from tests import numerics
from tests.families import ALL_FAMILIES
from tf_function_tests.cell import Cell, why_not

STRATEGIES = ["none", "one_device", "mirrored_1", "mirrored_2", "mirrored_4", "tpu"]


def cells():
    found = []
    for family in ALL_FAMILIES:
        for name in STRATEGIES:
            for call in ("eager", "function"):
                for where in ("inside", "outside"):
                    if not why_not(family, name, call):
                        found.append(pytest.param(family, name, call, where, id=f"{family.name}-{name}-{call}-{where}"))
    return found


@pytest.mark.table(
    "keras3-none-function-inside", "tf1-mirrored_1-eager-inside", "tf_keras-mirrored_4-eager-inside", every=8
)
@pytest.mark.parametrize(("family", "name", "call", "where"), cells())
def test_random_overflows_on_any_replica_lead_to_the_same_state(family, name, call, where):
    plain, compiled = (Cell(family, name, call, where, jit_compile=option) for option in (False, True))
    rng = np.random.default_rng(0)
    for _ in range(8):
        gradients = np.where(rng.random(plain.replicas) < 0.4 / plain.replicas, np.inf, rng.normal(size=plain.replicas))
        for cell in (plain, compiled):
            cell.step(*gradients)
        assert compiled.scale() == plain.scale()
        for mine, theirs in zip(compiled.state(), plain.state()):
            for copy in mine:  # of a variable that was created outside the scope, the plain step has one copy
                numerics.assert_close(copy, theirs[0], 1e-6, 1.0)
    assert plain.optimizer.state()["skipped_steps"] > 0
    assert compiled.optimizer.state() == plain.optimizer.state()
