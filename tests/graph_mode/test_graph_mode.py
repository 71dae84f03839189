"""Old programs in graph mode do with our wrappers what they do with the originals', number by number."""

import json

import pytest
import tensorflow as tf

import tf_lossscale
from tests.cases import combinations
from tests.families import FAMILIES
from tests.graph_mode import one_device, programs
from tests.processes import printed


def wrong(found):
    """Return the rows in which ours does not do what the original does, or fails without saying what to do."""

    def fits(original, ours):
        if not isinstance(original, str):
            return ours == original
        return isinstance(ours, str) and "optimizers.legacy" in ours

    return {
        row: {"original": original, "ours": ours} for row, (original, ours) in found.items() if not fits(original, ours)
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", programs.MODES)
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_programs_train_as_with_the_original_or_say_what_to_do(mode, share):
    output = printed("-m", "tests.graph_mode.programs", mode, str(share), TF_USE_LEGACY_KERAS="1")
    found = json.loads(output.splitlines()[-1])
    assert wrong(found) == {}
    failed = {row.split()[0] for row, (original, _) in found.items() if isinstance(original, str)}
    assert failed == {"new"}


@pytest.mark.parametrize(
    ("family", "program"),
    combinations(
        ["legacy", "tf1"], [programs.minimize_in_a_session, programs.two_replicas], usual=["tf1-minimize_in_a_session"]
    ),
)
def test_in_a_graph_too(family, program):
    optimizer = "SGD" if family == "legacy" else "Momentum"
    original = programs.outcome(family, optimizer, program)
    assert not isinstance(original, str)
    assert programs.outcome(family, optimizer, program, "LossScaleOptimizer") == original


@pytest.mark.parametrize("family", FAMILIES[:2], ids=lambda family: family.name)
def test_an_optimizer_that_cannot_train_in_a_graph_says_what_to_use(family):
    with tf.Graph().as_default():
        optimizer = tf_lossscale.LossScaleOptimizer(family.sgd())
        weight = tf.Variable(1.0)
        with pytest.raises(RuntimeError, match=r"SGD cannot train in graph mode.*tf_keras\.optimizers\.legacy"):
            optimizer.apply_gradients([(tf.constant(1.0), weight)])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[:2], ids=lambda family: family.name)
def test_a_function_in_a_graph_trains_with_each_optimizer(family):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = tf_lossscale.LossScaleOptimizer(family.sgd(), initial_scale=8.0)
        weight = tf.Variable(1.0)
        optimizer.build([weight])

        @tf.function
        def step(gradient):
            return optimizer.apply_gradients([(gradient, weight)])

        gradient = tf.compat.v1.placeholder(tf.float32, [])
        done = step(gradient)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        for value in (1.0, float("nan")):
            session.run(done, {gradient: value})
        assert session.run([weight, optimizer._loss_scale()]) == [0.5, 4.0]


@pytest.fixture(scope="module")
def with_one_device():
    return json.loads(printed("-m", "tests.graph_mode.one_device").splitlines()[-1])


@pytest.mark.slow
def test_a_step_in_a_conditional_is_taken_if_its_condition_holds(with_one_device):
    for name in one_device.OPTIMIZERS:
        # The third call's condition is false, and the fourth step is skipped.
        assert with_one_device[f"conditional {name}"] == [1.0, 0.5, 0.5, 0.5, 0.0], name
    for name in ("tf_keras_legacy", "tf1"):
        assert with_one_device[f"accumulated {name}"] == [1.0, 0.5, 0.5, 0.0], name


@pytest.mark.slow
def test_a_step_that_ends_after_another_steps_overflow_keeps_the_lower_scale(with_one_device):
    for name in ("two steps", "two steps, control flow v1"):
        assert with_one_device[name] == [2.0**14, 2.0**13, 2.0**12], name
