"""Distribution that is not TensorFlow's own: a strategy of others, an optimizer and a tape as Horovod makes them.

Horovod has no strategy. Each process trains by itself, and its gradients are averaged with those of the others by the
optimizer, whose class is made from that of the user's optimizer, or by the tape.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

from tests import loops, strategies
from tests.families import FAMILIES, families, keras_2_families
from tf_lossscale import LossScaleOptimizer

compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


class TheirStrategy(tf.distribute.Strategy):
    """A strategy that is none of TensorFlow's classes."""

    def __init__(self):
        self._collective_key_base = 0  # which a MirroredStrategy counts from
        reduction = tf.distribute.ReductionToOneDevice()
        super().__init__(MirroredExtended(self, ["cpu:0", "cpu:1"], cross_device_ops=reduction))


def take_and_check(strategy, step, weight, expected):
    """Has replica i take a step with the i-th gradient of each row; then every copy of the weight is as expected."""
    for gradients, value in expected:
        step(tf.constant(gradients))
        assert strategies.copies(weight, strategy) == [value] * 2


@families
@compiled
def test_a_strategy_of_others_is_taken_as_it_is(family, compiled):
    strategy = TheirStrategy()
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)

    def step(gradients):
        strategy.run(lambda: loops.step(optimizer, lambda: weight * strategies.mine(gradients), [weight]))

    step = tf.function(step) if compiled else step
    take_and_check(strategy, step, weight, [([1.0, 2.0], -0.5), ([1.0, np.nan], -0.5), ([0.0, -1.0], 0.0)])
    assert float(optimizer.loss_scale) == 4.0


class OtherProcess:
    """The other one of two processes: what it has for a gradient, which is averaged with ours."""

    def __init__(self):
        self.gradient, self.averages = tf.Variable(0.0), 0

    def averaged(self, gradients):
        self.averages += 1
        return [None if g is None else (g + self.gradient) / 2.0 for g in gradients]

    def averaged_pairs(self, grads_and_vars):
        gradients, variables = zip(*grads_and_vars)
        return list(zip(self.averaged(gradients), variables))


def distributed_optimizer(optimizer, other):
    """Returns an optimizer of a class made from that of `optimizer`, which averages where its library sums."""

    def averaged(self, grads_and_vars):
        return other.averaged_pairs(grads_and_vars)

    cls = type(optimizer)
    members = {"_HAS_AGGREGATE_GRAD": True, "_aggregate_gradients": averaged, "aggregate_gradients": averaged}
    return type(cls)(cls.__name__, (cls,), members).from_config(optimizer.get_config())


class DistributedTape(tf.GradientTape):
    """A tape that averages the gradients that it returns."""

    def __init__(self, other):
        super().__init__()
        self._other = other

    def gradient(self, *args, **kwargs):
        return self._other.averaged(super().gradient(*args, **kwargs))


def horovods_optimizer(optimizer, other):
    """Returns an optimizer of a class as Horovod 0.28 makes it: it takes keywords, and averages what it computes."""

    def init(self, **kwargs):
        super(type(self), self).__init__(**kwargs)

    def compute(self, *args, **kwargs):
        return other.averaged_pairs(getattr(super(type(self), self), method)(*args, **kwargs))

    method = "_compute_gradients" if hasattr(optimizer, "_compute_gradients") else "compute_gradients"
    cls = type(type(optimizer).__name__, (type(optimizer),), {"__init__": init, method: compute})
    return cls.from_config(optimizer.get_config())


# (our gradient, the other's, what the weight is then, the scale)
STEPS = [(1.0, 3.0, 0.0, 8.0), (np.inf, 1.0, 0.0, 4.0), (1.0, np.nan, 0.0, 2.0), (0.0, -2.0, 0.5, 2.0)]
WAYS = {
    "our wrapper around a distributed optimizer": lambda sgd, other: wrapped(distributed_optimizer(sgd, other)),
    "a distributed optimizer around our wrapper": lambda sgd, other: distributed_optimizer(wrapped(sgd), other),
    "a distributed tape": lambda sgd, other: wrapped(sgd),
    "minimize with Horovod's optimizer inside": lambda sgd, other: wrapped(horovods_optimizer(sgd, other)),
}


def wrapped(optimizer):
    return LossScaleOptimizer(optimizer, initial_scale=8.0)


@compiled
@pytest.mark.parametrize(
    ("family", "way"),
    # Keras 3's optimizers average nothing.
    [(family, way) for family in FAMILIES for way in WAYS if family is not FAMILIES[0] or "tape" in way],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_average_over_the_processes_is_checked_and_applied(family, way, compiled):
    other, weight = OtherProcess(), tf.Variable(1.0)
    optimizer = WAYS[way](family.sgd(), other)
    assert isinstance(optimizer, LossScaleOptimizer)

    def step(gradient):
        if "minimize" in way:
            optimizer.minimize(lambda: weight * gradient, [weight])
            return
        with DistributedTape(other) if "tape" in way else tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(weight * gradient)
        unscaled = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(unscaled, [weight]))

    step = tf.function(step, autograph=False) if compiled else step
    for mine, theirs, expected, scale in STEPS:
        # A tape averages scaled gradients, and so does what computes them; an optimizer averages unscaled ones.
        in_loss_units = "tape" in way or "minimize" in way
        other.gradient.assign(theirs * float(optimizer.loss_scale) if in_loss_units else theirs)
        step(tf.constant(mine))
        assert (weight.numpy(), float(optimizer.loss_scale)) == (expected, scale)
    assert compiled or other.averages == len(STEPS)


@keras_2_families
def test_horovods_optimizer_around_a_wrapper_is_a_type_error_as_with_the_original(family):
    for wrap in (family.keras.mixed_precision.LossScaleOptimizer, LossScaleOptimizer):
        with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
            horovods_optimizer(wrap(family.sgd()), OtherProcess())


@keras_2_families
def test_fit_takes_a_distributed_optimizer(family):
    other = OtherProcess()
    layers = family.keras.layers
    model = family.keras.Sequential([layers.Input((2,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = LossScaleOptimizer(distributed_optimizer(family.sgd(), other), initial_scale=8.0)
    model.compile(optimizer, "mse", jit_compile=False)
    other.gradient.assign(np.nan)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert not model.get_weights()[0].any()
    other.gradient.assign(0.0)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    # The gradient of (0 - 1)**2 is -2; averaged with the other's 0, and times 0.5.
    np.testing.assert_array_equal(model.get_weights()[0], [[0.5], [0.5]])
    assert float(optimizer.loss_scale) == 4.0


# Optimizers of others. ------------------------------------------------------------------------------------------------


def narrow(family):
    """An optimizer that takes fewer arguments than those of its library."""

    class Narrow(family.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, name=None):
            return super().apply_gradients(grads_and_vars)

    return wrapped(Narrow(0.5))


@families
def test_an_inner_optimizer_may_take_fewer_arguments_than_its_library(family):
    weight, optimizer = tf.Variable(1.0), narrow(family)
    optimizer.minimize(lambda: weight * 1.0, [weight])
    optimizer.apply_gradients([(tf.constant(np.nan), weight)], experimental_aggregate_gradients=False)
    optimizer.apply_gradients([(tf.constant(1.0), weight)], skip_gradients_aggregation=True)
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.0, 4.0)


@families
def test_an_inner_optimizer_of_fewer_arguments_sums_once_over_replicas(family):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight, optimizer = tf.Variable(1.0), narrow(family)

    @tf.function
    def step(gradients):
        strategy.run(lambda: optimizer.minimize(lambda: weight * strategies.mine(gradients), [weight]))

    take_and_check(strategy, step, weight, [([1.0, 2.0], -0.5), ([np.nan, 2.0], -0.5), ([0.0, 1.0], -1.0)])


class Parts(tf_keras.optimizers.legacy.Optimizer):
    """One optimizer for each part of the variables, as TensorFlow Addons' MultiOptimizer."""

    def __init__(self, optimizers):
        super().__init__("Parts")
        self._parts = optimizers

    def _create_slots(self, var_list):
        for part, variable in zip(self._parts, var_list):
            part._create_slots([variable])

    def apply_gradients(self, grads_and_vars, name=None, **kwargs):
        pairs = list(grads_and_vars)
        for part, pair in zip(self._parts, pairs):
            part.apply_gradients([pair], **kwargs)
        return self.iterations.assign_add(1)


def multi_optimizer(first, second):
    """Keras 3's optimizer of two parts. The second one trains variables named "second"."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(first, {"second": second}))


def test_parts_of_a_multi_optimizer_that_were_created_before_the_strategy_train_under_it():
    parts, strategy = [keras.optimizers.SGD(rate) for rate in (0.5, 0.25)], strategies.get("mirrored_2")
    with strategy.scope():
        variables = [keras.Variable([1.0], name=name) for name in ("first", "second")]
        optimizer = wrapped(multi_optimizer(*parts))
    step = tf.function(lambda: strategy.run(lambda: optimizer.minimize(lambda: tf.add_n(variables), variables)))
    for _ in range(2):
        step()
    assert [strategies.copies(part._iterations, strategy) for part in parts] == [[2, 2], [2, 2]]
    assert [float(variable[0]) for variable in variables] == [-1.0, 0.0]


@pytest.mark.parametrize("library", [tf_keras, keras], ids=lambda library: library.__name__)
def test_optimizers_of_parts_are_skipped_together_on_all_replicas(library):
    strategy, parts = strategies.get("mirrored_2"), lambda sgd: [sgd(0.5), sgd(0.25)]
    with strategy.scope():
        make_variable = keras.Variable if library is keras else tf.Variable
        variables = [make_variable([1.0], name=name) for name in ("first", "second")]
        sgd = keras.optimizers.SGD if library is keras else tf_keras.optimizers.legacy.SGD
        optimizer = wrapped(multi_optimizer(*parts(sgd)) if library is keras else Parts(parts(sgd)))

    @tf.function
    def step(gradients):
        def replica():
            mine = strategies.mine(gradients)
            optimizer.apply_gradients(zip([mine[:1], mine[1:]], variables))

        strategy.run(replica)

    for gradients, expected in (([1.0, np.nan], [1.0, 1.0]), ([0.0, 1.0], [0.5, 0.5])):
        step(tf.constant([[1.0, 1.0], gradients]))
        for variable, value in zip(variables, expected):
            assert strategies.copies(variable, strategy) == [[value]] * 2
    assert float(optimizer.loss_scale) == 4.0


# One script for all devices. ------------------------------------------------------------------------------------------
