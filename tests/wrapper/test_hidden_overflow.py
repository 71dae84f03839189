"""An overflow that the user's code hides between `get_unscaled_gradients` and `apply_gradients` skips the step."""

import gc
import weakref

import numpy as np
import pytest
import sonnet
import tensorflow as tf

from tests import strategies
from tests.cases import combinations, named, slow_one_in
from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer, SharedLossScale
from tf_lossscale.wrapper import hidden_overflow

INF = float("inf")
SGD = tf.keras.optimizers.SGD


def masked(gradient):
    return tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient))


def masked_rows(gradient):
    values = tf.IndexedSlices(masked(gradient.values), gradient.indices, gradient.dense_shape)
    return values if tf.executing_eagerly() else tf.convert_to_tensor(values)


CHANGES = named(
    {
        "masked": masked,
        "sign": tf.sign,
        "clipped by value": lambda g: tf.clip_by_value(g, -1.0, 1.0),
        "in a branch": lambda g: tf.cond(tf.norm(g) > 1.0, lambda: masked(g), lambda: g),
        "in a loop": lambda g: tf.while_loop(lambda i, _: i < 1, lambda i, h: (i + 1, masked(h)), (0, g))[1],
        "in a function": lambda g: tf.function(masked)(g),
    }
)
WAYS = {
    "eager": lambda step: step,
    "function": tf.function,
    "compiled": lambda step: tf.function(step, jit_compile=True),
    "mirrored": lambda step: tf.function(
        lambda factor: strategies.get("mirrored_2").run(step, args=(factor,)), autograph=False
    ),
}


def trained(optimizer, variables, change, apply=None):
    """A step of a loop whose loss is the sum of the variables times a factor."""

    def step(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.add_n([tf.reduce_sum(v * factor) for v in variables]))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
        (apply or optimizer.apply_gradients)(list(zip(map(change, gradients), variables)))

    return step


@pytest.mark.parametrize(
    ("family", "way", "change"),
    combinations(
        ALL_FAMILIES,
        WAYS,
        CHANGES,
        usual=["keras3-function-masked", "tf_keras-eager-sign", "tf1-function-in a branch", "keras3-mirrored-masked"],
        others=slow_one_in(8),
    ),
)
def test_a_hidden_overflow_skips_the_step_and_lowers_the_scale(family, way, change):
    if way == "mirrored" and not family.distributes:
        pytest.skip("Sonnet leaves it to the caller to sum gradients over replicas")
    strategy = strategies.get("mirrored_2") if way == "mirrored" else tf.distribute.get_strategy()
    with strategy.scope():
        variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=1024)
    step = WAYS[way](trained(optimizer, variables, change))
    step(tf.constant([INF, 1.0]))
    assert [v.numpy().tolist() for v in variables] == [[1.0, 2.0], 3.0]
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (512.0, 1)
    step(tf.constant([1.0, 1.0]))
    assert variables[0].numpy().tolist() == [
        1.0 - 0.5 * strategy.num_replicas_in_sync,
        2 - 0.5 * strategy.num_replicas_in_sync,
    ]
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (512.0, 1)


@pytest.mark.parametrize("way", ["eager", "function", "compiled"])
def test_the_apply_method_of_sonnet_checks_unscaled_gradients_as_well(way):
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    optimizer = LossScaleOptimizer(sonnet.optimizers.SGD(0.5), initial_scale=1024)
    step = WAYS[way](trained(optimizer, variables, masked, apply=lambda pairs: optimizer.apply(*zip(*pairs))))
    step(tf.constant([INF, 1.0]))
    assert [v.numpy().tolist() for v in variables] == [[1.0, 2.0], 3.0]
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (512.0, 1)


@pytest.mark.parametrize("way", ["eager", "function"])
def test_the_rows_of_an_embedding_are_checked(way):
    table = tf.Variable(tf.ones([4, 2]))
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)

    @WAYS[way]
    def step(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(tf.gather(table, [1, 3]) * factor))
        [gradient] = optimizer.get_unscaled_gradients(tape.gradient(loss, [table]))
        optimizer.apply_gradients([(masked_rows(gradient), table)])

    step(tf.constant([INF, 1.0]))
    np.testing.assert_array_equal(table, np.ones([4, 2]))
    assert int(optimizer.skipped_steps) == 1


def test_a_branch_that_applies_checks_the_gradients_outside_of_it():
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)
    optimizer.build([weight])

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(weight * factor))
        [gradient] = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        if factor[1] > 0.0:
            optimizer.apply_gradients([(masked(gradient), weight)])

    step(tf.constant([INF, 1.0]))
    assert (weight.numpy().tolist(), float(optimizer.loss_scale)) == ([1.0, 1.0], 512.0)


@pytest.mark.parametrize("apply_changes", [masked, lambda gradient: gradient], ids=["masked", "as they are"])
def test_the_results_of_a_called_function_are_checked_once(apply_changes, monkeypatch):
    checks, all_finite = [], hidden_overflow.all_finite
    monkeypatch.setattr(hidden_overflow, "all_finite", lambda *args: checks.append(1) or all_finite(*args))
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)

    @tf.function
    def gradients(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(weight * factor))
        return optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))

    @tf.function
    def step(factor):
        [gradient] = gradients(factor)
        optimizer.apply_gradients([(apply_changes(gradient), weight)])

    step(tf.constant([INF, 1.0]))
    assert (weight.numpy().tolist(), float(optimizer.loss_scale)) == ([1.0, 1.0], 512.0)
    assert len(checks) == (apply_changes is masked)


def test_a_session_skips_the_step():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight, factor = (
            tf.compat.v1.get_variable("w", initializer=[1.0, 1.0]),
            tf.compat.v1.placeholder(tf.float32, [2]),
        )
        optimizer = LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), initial_scale=1024)
        gradients = tf.gradients(optimizer.get_scaled_loss(tf.reduce_sum(weight * factor)), [weight])
        [gradient] = optimizer.get_unscaled_gradients(gradients)
        train = optimizer.apply_gradients([(masked(gradient), weight)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train, {factor: [INF, 1.0]})
        assert session.run([weight, optimizer.loss_scale])[1] == 512.0
        session.run(train, {factor: [1.0, 1.0]})
        assert session.run(weight).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("way", ["eager", "function"])
def test_optimizers_with_one_loss_scale_skip_together(way):
    shared = SharedLossScale(1024.0)
    weights = [tf.Variable([1.0, 1.0]) for _ in range(2)]
    optimizers = [LossScaleOptimizer(SGD(0.5), loss_scale=shared) for _ in weights]
    for optimizer, weight in zip(optimizers, weights):
        optimizer.build([weight])

    @WAYS[way]
    def step(*factors):
        pairs = []
        for optimizer, weight, factor in zip(optimizers, weights, factors):
            trained(optimizer, [weight], masked, apply=pairs.append)(factor)
        shared.apply_gradients(list(zip(optimizers, pairs)))

    step(tf.constant([INF, 1.0]), tf.constant([1.0, 1.0]))
    assert ([w.numpy().tolist() for w in weights], float(shared())) == ([[1.0, 1.0]] * 2, 512.0)


@pytest.mark.parametrize("way", ["eager", "function"])
def test_a_fixed_scale_that_never_skips_applies_the_gradients_as_they_are(way):
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), dynamic=False, initial_scale=1024)
    WAYS[way](trained(optimizer, [weight], masked))(tf.constant([INF, 1.0]))
    assert weight.numpy().tolist() == [1.0, 0.5]


@pytest.mark.parametrize("way", ["eager", "function"])
def test_what_is_masked_before_it_is_unscaled_is_no_overflow(way):
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)

    @WAYS[way]
    def step(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(weight * factor))
        gradients = optimizer.get_unscaled_gradients([masked(tape.gradient(loss, weight))])
        optimizer.apply_gradients([(tf.sign(gradients[0]), weight)])

    step(tf.constant([INF, 1.0]))
    assert weight.numpy().tolist() == [1.0, 0.5]


VISIBLE = named(
    {
        "unchanged": lambda gradient: gradient,
        "clipped by norm": lambda gradient: tf.clip_by_global_norm([gradient], 10.0)[0][0],
        "averaged": lambda gradient: tf.add_n([gradient, gradient]) / 2.0,
        "decayed": lambda gradient: gradient - 0.0 * tf.ones_like(gradient),
    }
)


@pytest.mark.parametrize("change", VISIBLE)
def test_a_loop_that_hides_nothing_pays_for_no_second_check(change, monkeypatch):
    monkeypatch.setattr(hidden_overflow, "all_finite", None)  # a call would raise an error
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)
    step = tf.function(trained(optimizer, [weight], change))
    step(tf.constant([1.0, 1.0]))
    assert weight.numpy().tolist() == [0.5, 0.5]
    step(tf.constant([INF, 1.0]))
    assert (weight.numpy().tolist(), int(optimizer.skipped_steps)) == ([0.5, 0.5], 1)


@pytest.mark.parametrize("change", [lambda g: 1.0 / g, lambda g: tf.maximum(g, 0.0), lambda g: g[::-1] * 0.5])
def test_a_loop_that_may_hide_something_pays_for_it(change, monkeypatch):
    monkeypatch.setattr(hidden_overflow, "all_finite", None)
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        tf.function(trained(optimizer, [weight], change))(tf.constant([1.0, 1.0]))


def test_an_eager_loop_that_passes_the_gradients_on_pays_for_no_second_check(monkeypatch):
    monkeypatch.setattr(hidden_overflow, "all_finite", None)
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)
    trained(optimizer, [weight], lambda gradient: gradient)(tf.constant([1.0, 1.0]))
    assert weight.numpy().tolist() == [0.5, 0.5]


def test_in_eager_mode_gradients_of_other_variables_are_not_taken_for_the_last_ones():
    first, second = tf.Variable([1.0, 1.0]), tf.Variable(1.0)
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)
    optimizer.build([first, second])
    fine = optimizer.get_unscaled_gradients([tf.constant([1024.0, 1024.0])])
    optimizer.get_unscaled_gradients([tf.constant(INF)])
    optimizer.apply_gradients([(tf.sign(fine[0]), first)])
    assert (first.numpy().tolist(), int(optimizer.skipped_steps)) == ([0.5, 0.5], 0)


def test_in_eager_mode_an_update_ends_the_memory_of_unscaled_gradients():
    weight = tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024)
    [gradient] = optimizer.get_unscaled_gradients([tf.constant([1024.0, 1024.0])])
    held = weakref.ref(gradient)
    optimizer.apply_gradients([(gradient * 1.0, weight)])
    del gradient
    gc.collect()
    assert held() is None
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), weight)])
    assert weight.numpy().tolist() == [0.0, 0.0]
