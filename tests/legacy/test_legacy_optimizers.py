"""The old wrappers, and the main one around optimizers of TensorFlow 1 and Sonnet."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer, amp, legacy
from tf_lossscale.legacy import contrib

train = tf.compat.v1.train


class Halving(legacy.LossScale):
    """A user's own: halves on every update, applies gradients whose sum is below 10."""

    def __init__(self, start=64.0):
        super().__init__()
        self._start = start
        self._scale = self._add_weight("scale", start)

    def __call__(self):
        return self._scale

    def update(self, grads):
        total = tf.add_n([tf.reduce_sum(g) for g in grads])
        return self._scale.assign(self._scale / 2), total < 10

    def get_config(self):
        return {"start": self._start}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    "make",
    [tf.keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD, train.GradientDescentOptimizer],
)
def test_a_users_own_loss_scale_decides_and_moves_wherever_one_is_taken(make, compiled):
    weight = tf.Variable(1.0)
    optimizer = legacy.from_loss_scale(make(0.5), Halving())

    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    function = tf.function(step) if compiled else step
    for gradient, after in ((1.0, 0.5), (20.0, 0.5), (1.0, 0.0)):
        function(tf.constant(gradient))
        assert weight.numpy() == after
    assert float(optimizer.loss_scale) == 8.0


def test_a_users_own_loss_scale_runs_in_a_legacy_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight, gradient = tf.Variable(1.0), tf.compat.v1.placeholder(tf.float32, [])
        optimizer = legacy.MixedPrecisionLossScaleOptimizer(train.GradientDescentOptimizer(0.5), Halving())
        operation = optimizer.apply_gradients([(gradient, weight)])
        session.run(tf.compat.v1.global_variables_initializer())
        for value, after in ((1.0, 0.5), (20.0, 0.5)):
            session.run(operation, {gradient: value})
            assert session.run(weight) == after
        assert session.run(optimizer.loss_scale) == 16.0


def test_an_abstract_loss_scale_cannot_be_made():
    class Partial(legacy.LossScale):
        def __call__(self):
            return 1.0

    with pytest.raises(TypeError, match="abstract"):
        Partial()


def test_a_users_own_manager_works_without_deriving_from_ours():
    class Manager:
        def __init__(self):
            self.scale = tf.Variable(8.0)

        def get_loss_scale(self):
            return self.scale

        def update_loss_scale(self, finite_grads):
            return self.scale.assign(tf.where(finite_grads, self.scale + 1, 1.0))

    weight = tf.Variable(1.0)
    optimizer = contrib.LossScaleOptimizer(train.GradientDescentOptimizer(0.5), Manager())
    optimizer.minimize(lambda: 1.0 * weight, var_list=[weight])
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.5, 9.0)
    optimizer.apply_gradients([(tf.constant(np.nan), weight)])
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.5, 1.0)
    with pytest.raises(TypeError, match="get_loss_scale"):
        contrib.LossScaleOptimizer(train.GradientDescentOptimizer(0.5), "dynamic")


def test_an_amp_manager_is_taken_by_the_main_wrapper_around_tensorflow_1_optimizers():
    manager = amp.DynamicLossScaleManager(64, 2, 2)
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(train.MomentumOptimizer(0.5, 0.0), loss_scale=manager)
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant(0.5), weight)])
    assert (weight.numpy(), float(optimizer.loss_scale)) == (0.5, 128.0)


def test_the_main_wrapper_runs_in_a_legacy_graph_and_a_skipped_step_does_not_count():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight, factor = tf.Variable([1.0, 2.0]), tf.compat.v1.placeholder(tf.float32, [])
        step = train.get_or_create_global_step()
        optimizer = LossScaleOptimizer(train.AdamOptimizer(0.1), initial_scale=8.0, dynamic_growth_steps=2)
        operation = optimizer.minimize(tf.reduce_sum(weight) * factor, global_step=step)
        assert {"current_loss_scale:0", "good_steps:0"} <= {v.name for v in tf.compat.v1.global_variables()}
        session.run(tf.compat.v1.global_variables_initializer())
        history = []
        for value in (1.0, np.nan, 1.0, 1.0):
            session.run(operation, {factor: value})
            history.append((session.run(step), session.run(optimizer.loss_scale)))
        assert history == [(1, 8.0), (1, 4.0), (2, 4.0), (3, 8.0)]
        assert optimizer.get_slot_names() == ["m", "v"]


def test_each_graph_has_one_set_of_loss_scale_variables():
    optimizer = None
    for _ in range(2):
        with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
            scale = legacy.DynamicLossScale(64.0) if optimizer is None else scale  # noqa: F821
            optimizer = legacy.MixedPrecisionLossScaleOptimizer(train.GradientDescentOptimizer(0.1), scale)
            weight = tf.Variable(1.0)
            operation = optimizer.minimize(weight * np.inf, var_list=[weight])
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(operation)
            assert session.run(scale()) == 32.0
            assert [v.name for v in graph.get_collection("variables")].count("current_loss_scale:0") == 1


@pytest.mark.parametrize("loss_scale", ["dynamic", 64, legacy.FixedLossScale(8)], ids=str)
@pytest.mark.parametrize(
    "make",
    [tf.keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD, train.GradientDescentOptimizer],
)
def test_graph_rewrite_wraps_any_optimizer_and_switches_tensorflow(make, loss_scale):
    with contextlib.ExitStack() as stack:
        stack.callback(legacy.disable_mixed_precision_graph_rewrite)
        optimizer = legacy.enable_mixed_precision_graph_rewrite(make(0.5), loss_scale)
        assert tf.config.optimizer.get_experimental_options()["auto_mixed_precision"]
        assert isinstance(optimizer, LossScaleOptimizer)
        weight = tf.Variable(1.0)
        optimizer.minimize(lambda: 1.0 * weight, var_list=[weight])
        assert weight.numpy() == 0.5
        with pytest.raises((TypeError, ValueError), match=r"another|opt|wrap"):
            legacy.enable_mixed_precision_graph_rewrite(optimizer)
    assert not tf.config.optimizer.get_experimental_options()["auto_mixed_precision"]


@pytest.mark.parametrize("bad", ["x", None, 0.5, {}], ids=str)
def test_bad_loss_scales_are_refused_before_anything_is_switched(bad):
    with pytest.raises((TypeError, ValueError), match=r"loss_scale|loss scale"):
        legacy.enable_mixed_precision_graph_rewrite(train.GradientDescentOptimizer(0.5), bad)
    assert not tf.config.optimizer.get_experimental_options().get("auto_mixed_precision")
    with pytest.raises(ValueError, match='"opt" must be an instance'):
        legacy.MixedPrecisionLossScaleOptimizer(tf.keras.optimizers.SGD(), 8)


@pytest.mark.table("SGD-function", "Adam-eager", "RMSProp-eager", "Momentum-eager", every=1)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", ["SGD", "Momentum", "RMSProp", "Adam"])
def test_sonnet_optimizers_take_the_same_steps_wrapped_and_skip(name, compiled):
    sonnet = pytest.importorskip("sonnet")
    arguments = {"Momentum": (0.5, 0.9)}.get(name, (0.5,))
    gradients = ([1.0, -1.0], [0.5, 2.0])
    bare, weight = getattr(sonnet.optimizers, name)(*arguments), tf.Variable([1.0, 1.0])
    for gradient in gradients:
        bare.apply([tf.constant(gradient)], [weight])
    for method in ("apply", "apply_gradients"):
        wrapped = LossScaleOptimizer(getattr(sonnet.optimizers, name)(*arguments), initial_scale=8.0)
        twin = tf.Variable([1.0, 1.0])

        def step(gradient, wrapped=wrapped, twin=twin, method=method):
            with tf.GradientTape() as tape:
                loss = wrapped.get_scaled_loss(tf.reduce_sum(twin * gradient))
            scaled = tape.gradient(loss, [twin])
            if method == "apply":
                wrapped.apply(scaled, [twin])
            else:
                wrapped.apply_gradients(zip(wrapped.get_unscaled_gradients(scaled), [twin]))

        function = tf.function(step) if compiled else step
        for gradient in gradients:
            function(tf.constant(gradient))
        np.testing.assert_array_equal(weight, twin)
        function(tf.constant([np.inf, 1.0]))
        np.testing.assert_array_equal(weight, twin)
        assert float(wrapped.loss_scale) == 4.0
        assert isinstance(wrapped, sonnet.Optimizer)
