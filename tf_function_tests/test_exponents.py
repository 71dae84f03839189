"""The counts of gradients by exponent, across replicas and in every way to call a step."""

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.families import ALL_FAMILIES, FAMILIES
from tf_function_tests.cell import Cell
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.diagnosis.precision import INFINITE, NAN, column

CELLS = [
    *((family, name, call) for family in ALL_FAMILIES for name, call in (("none", "eager"), ("none", "compiled"))),
    *((family, "mirrored_2", call) for family in ALL_FAMILIES if family.distributes for call in ("eager", "function")),
    *((FAMILIES[0], name, "function") for name in ("none", "one_device", "mirrored_2_apart", "mirrored_4", "tpu")),
    *((FAMILIES[0], name, "while_loop") for name in ("none", "mirrored_2")),
]
if strategies.ROLE is not None:
    CELLS = [(family, name, "function") for family in FAMILIES for name in strategies.here()]


def counts_of(cell):
    """(step, scale, the counts of the weight by column, those of the bias), of the last counted step."""
    counts = cell.optimizer.precision_report().counts
    assert counts.names == ("weight", "bias")
    rows = [{int(i): int(row[i]) for i in np.flatnonzero(row)} for row in counts.counts]
    return counts.step, counts.scale, *rows


def expected(gradient, scale, replicas):
    """The counts where replica i has the gradient / 2**i for both values of the weight, and 0.25 for the bias."""
    exponents = [int(np.log2(gradient * scale)) - i for i in range(replicas)]
    return {column(exponent): 2 for exponent in exponents}, {column(int(np.log2(0.25 * scale))): replicas}


@pytest.mark.table(
    "keras3-mirrored_2-function",
    "tf1-none-eager",
    "tf_keras-none-eager",
    "keras3-tpu-function",
    "keras3-one_device-function",
    every=7,
)
@pytest.mark.parametrize(("family", "name", "call"), CELLS, ids=[f"{f.name}-{name}-{call}" for f, name, call in CELLS])
def test_the_scaled_gradients_of_all_replicas_are_counted_in_applied_and_in_skipped_steps(family, name, call):
    cell = Cell(family, name, call, diagnose="exponents", diagnose_every=3)
    n = cell.replicas

    def step(gradient):
        cell.step(*[gradient / 2**i for i in range(n)])
        return counts_of(cell)

    first = (1, 16.0, *expected(1.0, 16.0, n))
    assert step(1.0) == first
    assert step(2.0) == first
    assert step(np.nan) == first, "the step is skipped, and halves the scale"
    bias = expected(1.0, 8.0, n)[1]
    assert step(np.inf) == (4, 8.0, {INFINITE: 2 * n}, bias)
    cell.optimizer.count_exponents()
    if n == 1:
        assert step(np.nan)[2] == {NAN: 2}
        assert step(4.0)[0] == 5
    else:
        cell.step(*[np.nan, *[4.0] * (n - 1)])
        counted = counts_of(cell)[2]
        assert (counted[NAN], counted[column(4)]) == (2, 2 * (n - 1)), "the replica with the NaN shows"


def test_gradients_that_the_caller_has_summed_count_on_each_replica():
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight = tf.Variable([1.0, 1.0], name="weight")
        optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8, diagnose="exponents")

    @tf.function
    def step():
        def replica():
            [gradient] = optimizer.get_unscaled_gradients([tf.constant([8.0, 16.0])])
            summed = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
            optimizer.apply_gradients([(summed, weight)], experimental_aggregate_gradients=False)

        strategy.run(replica)

    step()
    row = optimizer.precision_report().counts.counts[0]
    assert (row[column(4)], row[column(5)], row.sum()) == (2, 2, 4)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_central_storage_is_refused_because_its_replicas_share_the_variables(where):
    with pytest.raises(ValueError, match=r"cannot be counted by exponent under CentralStorageStrategy.*Leave out"):
        Cell(FAMILIES[0], "central_storage", "eager", where=where, diagnose="exponents").step(1.0, 1.0)


def test_the_function_is_traced_once_and_a_step_that_is_not_counted_computes_no_exponent():
    cell, traces = Cell(FAMILIES[0], "none", "eager", diagnose="exponents", diagnose_every=2), []

    @tf.function
    def step(gradients):
        traces.append(1)
        cell._one(gradients)

    for _ in range(5):
        step(tf.constant([1.0]))
    assert len(traces) == 2, "the first trace creates the variables of the optimizer"
    assert counts_of(cell)[0] == 5
    outside = {operation.type for operation in step.get_concrete_function(tf.constant([1.0])).graph.get_operations()}
    assert "DenseBincount" not in outside, "it is in the branch of a counted step"
