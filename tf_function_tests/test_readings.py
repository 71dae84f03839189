"""The state and the report of overflows, across replicas."""

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations
from tests.families import ALL_FAMILIES, FAMILIES
from tf_function_tests.cell import Cell
from tf_lossscale import LossScaleOptimizer

CELLS = [
    *((family, "mirrored_2") for family in ALL_FAMILIES if family.name != "sonnet"),
    *((FAMILIES[0], name) for name in ("one_device", "mirrored_2_apart", "central_storage", "tpu")),
]
cells = pytest.mark.parametrize(
    ("family", "name"), combinations(CELLS, usual=["keras3-mirrored_2", "keras3-tpu", "keras3-one_device"])
)


@cells
def test_an_overflow_on_any_replica_is_counted_once_and_under_its_variable(family, name):
    cell = Cell(family, name, "function", diagnose=True)
    good = [0.5] * cell.replicas
    cell.step(*good)
    for bad in range(cell.replicas):
        cell.step(*[np.nan if i == bad else 0.5 for i in range(cell.replicas)])
    cell.step(*[np.inf] * cell.replicas)
    cell.step(*good)
    report = cell.optimizer.overflow_report()
    n = cell.replicas
    assert [(r.steps, r.last_step, r.infinite_steps, r.nan_steps) for r in report] == [(n + 1, n + 2, 1, n)]
    state = cell.optimizer.state()
    assert (state["total_steps"], state["skipped_steps"]) == (n + 3, n + 1)
    assert len({tuple(copy.tolist()) for copy in cell.copies(cell.optimizer.scaler.step_counts)}) == 1


@pytest.mark.slow
def test_an_overflow_in_gradients_that_are_not_summed_is_named_wherever_it_is():
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weights = [tf.Variable(1.0, name=name) for name in ("first", "second", "third")]
        optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), diagnose=True)

    @tf.function
    def step(gradients):
        def replica():
            pairs = zip([*tf.unstack(strategies.mine(gradients)), None], weights)
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

        strategy.run(replica)

    step(tf.constant([[1.0, 1.0], [1.0, np.nan]]))
    step(tf.constant([[1.0, 1.0], [np.inf, 1.0]]))
    step(tf.constant([[1.0, 1.0], [1.0, 1.0]]))
    rows = [(row.variable, row.steps, row.last_step, row.kind) for row in optimizer.overflow_report()]
    assert rows == [("first", 1, 2, "inf"), ("second", 1, 1, "NaN")]


def test_a_state_is_set_on_all_replicas():
    cell = Cell(FAMILIES[0], "mirrored_2", "function")
    cell.step(0.5, 0.5)
    cell.optimizer.set_state({"loss_scale": 4.0, "dynamic_counter": 2})
    assert cell.copies(cell.optimizer._loss_scale.current_loss_scale) == [4.0, 4.0]
    cell.step(0.5, 0.5)
    assert cell.scale()[:2] == (8.0, 0.0)


@pytest.mark.slow
def test_a_stall_is_warned_of_once_in_eager_mode_across_replicas(caplog):
    cell = Cell(FAMILIES[0], "mirrored_2", "eager", initial_scale=1.0)
    for _ in range(101):
        cell.step(0.5, np.inf)
    assert caplog.text.count("The last 100 steps were all skipped") == 1


@cells
def test_a_stall_is_printed_once_by_a_tf_function_for_all_replicas(family, name, capfd):
    if name.endswith("_apart"):
        pytest.skip("replicas that cannot meet are compiled by XLA, and print nothing")
    cell = Cell(family, name, "function", initial_scale=1.0)
    for _ in range(2):
        cell.step(*[0.5] * cell.replicas)
        for _ in range(103):
            cell.step(*[0.5] * (cell.replicas - 1), np.inf)
        float(cell.optimizer.loss_scale)
    assert capfd.readouterr().err.count("The last 100 steps were all skipped") == 2
