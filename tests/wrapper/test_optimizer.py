"""What a wrapper does in a step and shows of itself, for every family."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.families import ALL_FAMILIES, ALL_IDS, FAMILIES, all_families, families, tf_keras, with_keras_3
from tf_lossscale import LossScaleOptimizer

compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


@families
def test_variables_are_a_list_that_can_be_called(family):
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(family.adam())
    optimizer.build([weight])
    assert isinstance(optimizer.variables, list)
    assert list(optimizer.variables()) == list(optimizer.variables)
    inner = optimizer.inner_optimizer.variables
    inner = inner() if callable(inner) else inner
    assert [id(v) for v in optimizer.variables[: len(inner)]] == [id(v) for v in inner]
    assert [id(v) for v in optimizer.weights] == [id(v) for v in inner]
    if family.name == "keras3":  # tf_keras's own wrappers list the inner optimizer's alone
        assert [v.path.rpartition("/")[2] for v in optimizer.variables[-2:]] == ["current_loss_scale", "good_steps"]


@with_keras_3
def test_around_keras_3_every_entry_of_the_variables_is_a_keras_variable():
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(), hysteresis=2)
    optimizer.build([tf.keras.Variable([1.0])])
    assert all(isinstance(variable, tf.keras.Variable) for variable in optimizer.variables)
    scale = optimizer.variables[-3]
    scale.assign(8.0)
    assert (float(optimizer.loss_scale), scale.numpy(), scale.ndim, scale.regularizer) == (8.0, 8.0, 0, None)
    assert not scale.overwrite_with_gradient and scale.value is optimizer.scaler.current_loss_scale
    assert all(one is other for one, other in zip(optimizer.variables, optimizer.variables))


@compiled
def test_a_plain_variable_and_a_keras_variable_are_trained_alike(compiled):
    found, keras = [], FAMILIES[0].keras
    for make in (tf.Variable, keras.Variable):
        variables = [make([1.0, 2.0]), make(3.0)]
        optimizer = LossScaleOptimizer(FAMILIES[0].adam())
        optimizer.build(variables)

        def step(gradient, optimizer=optimizer):
            optimizer.scale_loss(0.0)
            optimizer.apply([gradient * tf.ones(2), gradient])  # of the variables that it was built for

        function = tf.function(lambda gradient, step=step: step(gradient)) if compiled else step
        for gradient in (2.0**15, 2.0**14):
            function(tf.constant(gradient))
        found.append([(v.value if make is keras.Variable else v).numpy() for v in variables])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, [1.0, 2.0]) and not np.array_equal(a, 3.0)


@families
@compiled
def test_a_subclass_that_overrides_apply_gradients_is_called_and_other_keywords_reach_it(family, compiled):
    class Halves(family.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, decay_var_list=None, **kwargs):
            seen.append(decay_var_list)
            return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars], **kwargs)

    seen, weight = [], tf.Variable(1.0)
    optimizer = LossScaleOptimizer(Halves(0.5), initial_scale=8.0)

    def step():
        gradients = optimizer.get_unscaled_gradients([8.0 * optimizer.get_scaled_loss(0.125)])
        optimizer.apply_gradients(zip(gradients, [weight]), decay_var_list=["kernel"])
        optimizer.minimize(lambda: 1.0 * weight, [weight], decay_var_list=["bias"])

    (tf.function(step) if compiled else step)()
    assert seen[-2:] == [["kernel"], ["bias"]]
    assert weight.numpy() == 0.5


@families
@pytest.mark.parametrize("pairs", [list, tuple, iter, dict], ids=lambda pairs: pairs.__name__)
def test_gradients_and_variables_come_in_any_iterable_and_a_second_argument_may_be_anything(family, pairs):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.sgd())
    if pairs is dict:
        optimizer.apply_gradients({"any": (np.float32(1.0), weight)}.values(), 1.0)
    else:
        optimizer.apply_gradients(pairs([(1.0, weight)]), 1.0)
    assert weight.numpy() == 0.5


@families
@pytest.mark.parametrize("method", ["apply_gradients", "apply"])
def test_a_step_outside_of_run_is_refused_if_it_would_make_the_copies_different(family, method):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight = family.variable(2.0)
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    before = optimizer.state()
    pair = [tf.constant(24.0)], [weight]
    optimizer.scale_loss(0.0)
    step = (lambda: optimizer.apply(*pair)) if method == "apply" else lambda: optimizer.apply_gradients(zip(*pair))
    for outside in (step, tf.function(step)):
        with pytest.raises(ValueError, match=r"created under MirroredStrategy and has 2 copies.*strategy\.run"):
            outside()
    assert optimizer.state() == before
    strategy.run(step)
    copies = strategy.experimental_local_results(getattr(weight, "_value", weight))
    assert [copy.numpy() for copy in copies] == [-1.0, -1.0]


@families
def test_a_step_outside_of_run_needs_no_strategy_if_there_is_one_replica(family):
    with strategies.get("mirrored_1").scope():
        weight = tf.Variable(2.0)
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    for gradient in (3.0, np.inf):
        optimizer.get_scaled_loss(tf.constant(0.0))
        gradients = optimizer.get_unscaled_gradients([tf.constant(8.0 * gradient)])
        optimizer.apply_gradients(zip(gradients, [weight]))
    assert weight.numpy() == 0.5
    assert float(optimizer.loss_scale) == 4.0


@families
def test_an_inner_optimizer_that_tracks_a_base_optimizer_is_checkpointed(family, tmp_path):
    class Averaging(family.optimizers.SGD):
        def __init__(self):
            super().__init__(0.5)
            self.base_optimizer = tf.Module(name="base")
            self.base_optimizer.state = tf.Variable(3.0)
            if family.name == "tf_keras_legacy":  # the others track every attribute
                self._track_trackable(self.base_optimizer, "base_optimizer")

    optimizer = LossScaleOptimizer(Averaging(), initial_scale=8.0)
    weight = tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(np.inf), weight)])
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    again = LossScaleOptimizer(Averaging(), initial_scale=8.0)
    again.inner_optimizer.base_optimizer.state.assign(0.0)
    tf.train.Checkpoint(optimizer=again).restore(path)
    assert float(again.loss_scale) == 4.0
    assert float(again.inner_optimizer.base_optimizer.state) == 3.0


@families
def test_minimize_returns_and_takes_what_the_documentation_says(family):
    weight = tf.Variable(2.0)
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    compute = tf.function(lambda: optimizer.compute_gradients(1.0 * weight, [weight]))
    with pytest.raises(ValueError, match="`tape` is required when `loss` is a tensor"):
        compute()
    with pytest.raises(ValueError, match="`tape` is required when `loss` is a tensor"):
        optimizer.minimize(tf.constant(1.0), [weight])
    optimizer.minimize(loss=lambda: 1.0 * weight, var_list=[weight], grad_loss=None, name="step", tape=None)
    optimizer.minimize(lambda: 1.0 * weight, weight, tape=tf.GradientTape())
    assert weight.numpy() == 1.0
    ((gradient, variable),) = optimizer.compute_gradients(lambda: 3.0 * weight, [weight])
    assert gradient.numpy() == 3.0 and variable is weight
    for variables in (iter([weight]), lambda: weight, lambda: (weight,)):
        before = weight.numpy()
        with tf.GradientTape() as tape:
            loss = 1.0 * weight
        optimizer.minimize(loss, variables, tape=tape)
        assert weight.numpy() == before - 0.5


def test_the_second_argument_of_minimize_around_tensorflow_1_may_be_the_variables_or_a_counter():
    weight, counter = tf.Variable(4.0), tf.Variable(0, dtype=tf.int64)
    optimizer = LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), initial_scale=8.0)
    for number, variables in enumerate((weight, [weight], iter([weight]), lambda: weight), 1):
        optimizer.minimize(lambda: 1.0 * weight, variables)
        assert weight.numpy() == 4.0 - number * 0.5
    optimizer.minimize(lambda: 1.0 * weight, counter, [weight])
    with tf.GradientTape() as tape:
        loss = 1.0 * weight
    optimizer.minimize(loss, weight, tape=tape)
    assert (weight.numpy(), counter.numpy()) == (1.0, 1)


@pytest.mark.parametrize("family", ALL_FAMILIES[2:4], ids=ALL_IDS[2:4])
@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
def test_in_a_session_the_result_of_either_method_is_the_step_to_run(family, method):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.Variable(2.0)
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
        gradients = tf.gradients(optimizer.scale_loss(1.0 * weight), [weight])
        given = (gradients, [weight]) if method == "apply" else ([(gradients[0], weight)],)
        step = getattr(optimizer, method)(*given)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step)
        assert session.run(weight) == 1.5


class Local(tf_keras.optimizers.SGD):
    """Sums nothing over the replicas, as in local SGD."""

    def aggregate_gradients(self, grads_and_vars):
        return list(grads_and_vars)


def local_of_keras_3():
    class LocalOfKeras3(FAMILIES[0].optimizers.SGD):
        def _all_reduce_sum_gradients(self, grads_and_vars):
            return list(grads_and_vars)

    return LocalOfKeras3(1.0)


LOCAL = {
    "keras3": local_of_keras_3,
    "tf_keras": lambda: Local(1.0),
    "tf_keras_legacy": lambda: tf_keras.optimizers.legacy.SGD(1.0, gradient_aggregator=list),
}


@pytest.mark.parametrize("make", LOCAL.values(), ids=LOCAL)
def test_replicas_that_sum_no_gradients_skip_a_step_together(make):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(make(), initial_scale=8.0)

    @tf.function
    def step(bad):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.where(tf.equal(replica, 1), bad, 0.25)
            optimizer.apply_gradients([(tf.reshape(gradient, [1]), weight)])

        strategy.run(on_replica)

    step(tf.constant(np.inf))
    assert [copy.numpy().tolist() for copy in strategy.experimental_local_results(weight)] == [[1.0], [1.0]]
    assert (optimizer.state()["skipped_steps"], optimizer.state()["loss_scale"]) == (1, 4.0)
    step(tf.constant(0.5))
    assert [copy.numpy().tolist() for copy in strategy.experimental_local_results(weight)] == [[0.75], [0.5]]


@families
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_half_precision_variable_is_named(family, dtype, warnings):
    optimizer = LossScaleOptimizer(family.sgd())
    weight = tf.Variable(tf.ones([2], dtype), name="embedding")
    for _ in range(2):
        optimizer.minimize(lambda: tf.reduce_sum(tf.cast(weight, tf.float32)), [weight])
    assert len(warnings) == 1  # eager mode creates the optimizer's variables once
    assert f"embedding is {dtype}" in warnings[0] and f"mixed_{dtype}" in warnings[0]


def with_injected_arguments(cls, **given):
    """Replace the constructor of a class, as libraries do that fill in configured arguments."""
    constructor = cls.__init__

    @functools.wraps(constructor)
    def init(self, *args, **kwargs):
        constructor(self, *args, **{**given, **kwargs})

    cls.__init__ = init
    return cls


@all_families
def test_a_subclass_gets_injected_arguments_in_its_constructor_only(family):
    class Scaled(LossScaleOptimizer):
        pass

    inner, weight = family.sgd(), tf.Variable(1.0)
    optimizer = with_injected_arguments(Scaled, inner_optimizer=inner, initial_scale=8.0)()
    assert isinstance(optimizer, Scaled)
    assert isinstance(optimizer, type(LossScaleOptimizer(family.sgd())))
    assert (optimizer.inner_optimizer, optimizer.initial_scale) == (inner, 8.0)
    assert "loss_scale=8" in repr(optimizer)
    optimizer.minimize(lambda: weight**2, [weight])
    assert weight.numpy() == 0.0


def test_without_an_inner_optimizer_python_names_the_missing_argument():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inner_optimizer'"):
        LossScaleOptimizer()


@pytest.mark.parametrize(("options", "expected"), [({}, (3, 1)), ({"dynamic": False, "initial_scale": 8.0}, (0, 0))])
def test_steps_are_counted_if_they_can_be_skipped(options, expected):
    optimizer, weight = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), **options), tf.Variable(1.0)
    for factor in (1.0, np.inf, 1.0):
        optimizer.minimize(lambda factor=factor: weight * factor, [weight])
    assert (optimizer.total_steps, optimizer.skipped_steps) == expected
