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
from tests.families import FAMILIES, IDS, families
from tf_lossscale import LossScaleOptimizer

compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


class TheirStrategy(tf.distribute.Strategy):
    """A strategy that is none of TensorFlow's classes."""

    def __init__(self):
        self._collective_key_base = 0  # which a MirroredStrategy counts from
        reduction = tf.distribute.ReductionToOneDevice()
        super().__init__(MirroredExtended(self, ["cpu:0", "cpu:1"], cross_device_ops=reduction))


@families
@compiled
def test_a_strategy_of_others_is_taken_as_it_is(family, compiled):
    strategy = TheirStrategy()
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)

    def replica(gradients):
        mine = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
        loops.step(optimizer, lambda: weight * mine, [weight])

    def step(gradients):
        strategy.run(replica, args=(gradients,))

    step = tf.function(step) if compiled else step
    for gradients, expected in (([1.0, 2.0], -0.5), ([1.0, np.nan], -0.5), ([0.0, -1.0], 0.0)):
        step(tf.constant(gradients))
        assert [float(copy) for copy in strategy.experimental_local_results(weight)] == [expected] * 2
    assert float(optimizer.loss_scale) == 4.0


class OtherProcess:
    """The other one of two processes: what it has for a gradient, which is averaged with ours."""

    def __init__(self):
        self.gradient = tf.Variable(0.0)

    def averaged(self, gradients):
        return [None if g is None else (g + self.gradient) / 2.0 for g in gradients]


def distributed_optimizer(optimizer, other):
    """Returns an optimizer of a class made from that of `optimizer`, which averages where its library sums."""

    class Averaging:
        _HAS_AGGREGATE_GRAD = True

        def _aggregate_gradients(self, grads_and_vars):
            return self._averaged(grads_and_vars)

        def aggregate_gradients(self, grads_and_vars):
            return self._averaged(grads_and_vars)

        def _averaged(self, grads_and_vars):
            gradients, variables = zip(*grads_and_vars)
            self.__dict__["aggregations"] = self.__dict__.get("aggregations", 0) + 1
            return list(zip(other.averaged(gradients), variables))

    members = {name: value for name, value in vars(Averaging).items() if name not in ("__dict__", "__weakref__")}
    cls = type(optimizer.__class__)(optimizer.__class__.__name__, (optimizer.__class__,), members)
    return cls.from_config(optimizer.get_config())


class DistributedTape(tf.GradientTape):
    """A tape that averages the gradients that it returns."""

    def __init__(self, other):
        super().__init__()
        self._other = other

    def gradient(self, *args, **kwargs):
        return self._other.averaged(super().gradient(*args, **kwargs))


# (our gradient, the other's, what the weight is then, the scale)
STEPS = [(1.0, 3.0, 0.0, 8.0), (np.inf, 1.0, 0.0, 4.0), (1.0, np.nan, 0.0, 2.0), (0.0, -2.0, 0.5, 2.0)]


def take_steps(optimizer, other, compiled, new_tape=tf.GradientTape, in_loss_units=False):
    """Takes STEPS; a process averages scaled gradients (a tape's) or unscaled ones (an optimizer's)."""
    weight = tf.Variable(1.0)

    def step(gradient):
        with new_tape() as tape:
            scaled = optimizer.get_scaled_loss(weight * gradient)
        unscaled = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(unscaled, [weight]))

    step = tf.function(step) if compiled else step
    for mine, theirs, expected, scale in STEPS:
        other.gradient.assign(theirs * float(optimizer.loss_scale) if in_loss_units else theirs)
        step(tf.constant(mine))
        assert (weight.numpy(), float(optimizer.loss_scale)) == (expected, scale)
    return weight


@compiled
@pytest.mark.parametrize("family", FAMILIES[1:], ids=IDS[1:])
def test_our_wrapper_around_a_distributed_optimizer_decides_by_the_average(family, compiled):
    other = OtherProcess()
    inner = distributed_optimizer(family.sgd(), other)
    take_steps(LossScaleOptimizer(inner, initial_scale=8.0), other, compiled)
    if not compiled:
        assert inner.aggregations == len(STEPS)


@compiled
@pytest.mark.parametrize("family", FAMILIES[1:], ids=IDS[1:])
def test_a_distributed_optimizer_around_our_wrapper_decides_by_the_average(family, compiled):
    other = OtherProcess()
    optimizer = distributed_optimizer(LossScaleOptimizer(family.sgd(), initial_scale=8.0), other)
    assert isinstance(optimizer, LossScaleOptimizer)
    take_steps(optimizer, other, compiled)


def horovods_optimizer(optimizer, other):
    """Returns an optimizer of a class as Horovod 0.28 makes it: it takes keywords, and averages what it computes."""

    def init(self, **kwargs):
        super(type(self), self).__init__(**kwargs)

    def compute(self, *args, **kwargs):
        pairs = getattr(super(type(self), self), method)(*args, **kwargs)
        gradients, variables = zip(*pairs)
        return list(zip(other.averaged(gradients), variables))

    method = "_compute_gradients" if hasattr(optimizer, "_compute_gradients") else "compute_gradients"
    cls = type(optimizer.__class__.__name__, (optimizer.__class__,), {"__init__": init, method: compute})
    return cls.from_config(optimizer.get_config())


@compiled
@pytest.mark.parametrize("family", FAMILIES[1:], ids=IDS[1:])
def test_minimize_with_horovods_optimizer_inside_decides_by_the_average(family, compiled):
    other, weight = OtherProcess(), tf.Variable(1.0)
    optimizer = LossScaleOptimizer(horovods_optimizer(family.sgd(), other), initial_scale=8.0)
    step = lambda gradient: optimizer.minimize(lambda: weight * gradient, [weight])  # noqa: E731
    step = tf.function(step, autograph=False) if compiled else step
    for mine, theirs, expected, scale in STEPS:
        other.gradient.assign(theirs * float(optimizer.loss_scale))
        step(tf.constant(mine))
        assert (weight.numpy(), float(optimizer.loss_scale)) == (expected, scale)


@pytest.mark.parametrize("family", FAMILIES[1:], ids=IDS[1:])
def test_horovods_optimizer_around_a_wrapper_is_a_type_error_as_with_the_original(family):
    for wrap in (family.keras.mixed_precision.LossScaleOptimizer, LossScaleOptimizer):
        with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
            horovods_optimizer(wrap(family.sgd()), OtherProcess())


@compiled
@families
def test_a_distributed_tape_is_averaged_before_the_check(family, compiled):
    other = OtherProcess()
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    take_steps(optimizer, other, compiled, lambda: DistributedTape(other), in_loss_units=True)


@pytest.mark.parametrize("family", FAMILIES[1:], ids=IDS[1:])
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


@families
def test_an_inner_optimizer_may_take_fewer_arguments_than_its_library(family):
    class Narrow(family.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, name=None):
            return super().apply_gradients(grads_and_vars)

    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(Narrow(0.5), initial_scale=8.0)
    optimizer.minimize(lambda: weight * 1.0, [weight])
    optimizer.apply_gradients([(tf.constant(np.nan), weight)], experimental_aggregate_gradients=False)
    optimizer.apply_gradients([(tf.constant(1.0), weight)], skip_gradients_aggregation=True)
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.0, 4.0)


@families
def test_an_inner_optimizer_of_fewer_arguments_sums_once_over_replicas(family):
    class Narrow(family.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, name=None):
            return super().apply_gradients(grads_and_vars)

    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = LossScaleOptimizer(Narrow(0.5), initial_scale=8.0)

    @tf.function
    def step(gradients):
        def replica():
            mine = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
            optimizer.minimize(lambda: weight * mine, [weight])

        strategy.run(replica)

    for gradients, expected in (([1.0, 2.0], -0.5), ([np.nan, 2.0], -0.5), ([0.0, 1.0], -1.0)):
        step(tf.constant(gradients))
        assert [float(copy) for copy in strategy.experimental_local_results(weight)] == [expected] * 2


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


def parts_of_tf_keras():
    legacy = tf_keras.optimizers.legacy
    return Parts([legacy.SGD(0.5), legacy.Adam(0.25)])


def parts_of_keras_3():
    optimizers = keras.optimizers
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.5), {"second": optimizers.Adam(0.25)}))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_parts_of_a_multi_optimizer_that_were_created_before_the_strategy_train_under_it():
    optimizers, strategy = keras.optimizers, strategies.get("mirrored_2")
    parts = optimizers.SGD(0.5), optimizers.SGD(0.25)
    with strategy.scope():
        variables = [keras.Variable([1.0], name="first"), keras.Variable([1.0], name="second")]
        multi = optimizers.MultiOptimizer(optimizers.OptimizerMap(parts[0], {"second": parts[1]}))
        optimizer = LossScaleOptimizer(multi, initial_scale=8.0)

    def replica():
        optimizer.minimize(lambda: tf.reduce_sum(variables[0] + variables[1]), variables)

    for _ in range(2):
        tf.function(lambda: strategy.run(replica))()
    for copies in map(strategy.experimental_local_results, (part._iterations.value for part in parts)):
        assert [int(copy) for copy in copies] == [2, 2]
    assert [float(variable[0]) for variable in variables] == [-1.0, 0.0]


@pytest.mark.parametrize("make", [parts_of_tf_keras, parts_of_keras_3])
def test_optimizers_of_parts_are_skipped_together_on_all_replicas(make):
    if make is parts_of_keras_3 and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        new = keras.Variable if make is parts_of_keras_3 else tf.Variable
        variables = [new([1.0], name="first"), new([1.0], name="second")]
        optimizer = LossScaleOptimizer(make(), initial_scale=8.0)

    def values():
        held = [getattr(v, "value", v) if make is parts_of_keras_3 else v for v in variables]
        return [[float(copy[0]) for copy in strategy.experimental_local_results(v)] for v in held]

    @tf.function
    def step(gradients):
        def replica():
            mine = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
            optimizer.get_scaled_loss(0.0)
            unscaled = optimizer.get_unscaled_gradients([8.0 * mine[:1], 8.0 * mine[1:]])
            optimizer.apply_gradients(zip(unscaled, variables))

        strategy.run(replica)

    step(tf.constant([[1.0, 1.0], [1.0, np.nan]]))
    assert values() == [[1.0, 1.0], [1.0, 1.0]]
    optimizer._loss_scale.current_loss_scale.assign(8.0)
    step(tf.constant([[1.0, 1.0], [0.0, 1.0]]))
    first, second = values()
    assert first == [0.5, 0.5]
    # The parts of Keras 3's MultiOptimizer count a skipped step, as it does itself: for Adam this is the second step.
    rate = 0.25 * (1 - 0.999**2) ** 0.5 / (1 - 0.9**2) * 0.1 / 0.001**0.5 if make is parts_of_keras_3 else 0.25
    np.testing.assert_allclose(second, [1 - rate, 1 - rate], rtol=1e-5)


# One script for all devices. ------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("name", ["none", "mirrored_2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fixed_scale_of_one_is_the_bare_optimizer_to_the_bit(family, name, dtype):
    strategy = strategies.get(name) or tf.distribute.get_strategy()
    gradients = np.random.default_rng(0).normal(size=(6, 2, 5))
    results = []
    for wrapped in (False, True):
        with strategy.scope():
            weight = tf.Variable(tf.ones([5], dtype))
            inner = family.sgd(momentum=0.9)
            if hasattr(inner, "build"):
                inner.build([weight])
            optimizer = LossScaleOptimizer(inner, dynamic=False, initial_scale=1) if wrapped else inner

        def replica(rows, optimizer=optimizer, weight=weight, wrapped=wrapped):
            mine = tf.gather(rows, tf.distribute.get_replica_context().replica_id_in_sync_group)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * tf.cast(mine, dtype))
                loss = optimizer.get_scaled_loss(loss) if wrapped else loss
            found = tape.gradient(loss, [weight])
            found = optimizer.get_unscaled_gradients(found) if wrapped else found
            optimizer.apply_gradients(zip(found, [weight]))

        step = tf.function(lambda rows, replica=replica: strategy.run(replica, args=(rows,)))
        for rows in gradients:
            step(tf.constant(rows, tf.float32))
        results.append(tf.cast(weight, tf.float32).numpy())
    np.testing.assert_array_equal(*results)
    assert np.isfinite(results[0]).all()
    assert (results[0] != 1.0).all()
