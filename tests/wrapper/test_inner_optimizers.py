"""What tf_keras's own wrapper leaves to the optimizer inside it, ours leaves to it as well."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests import strategies
from tests.families import families, keras_2_families
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.legacy.policy import policies_of

legacy = tf_keras.optimizers.legacy
wrappers = pytest.mark.parametrize(
    "wrap", [tf_keras.mixed_precision.LossScaleOptimizer, LossScaleOptimizer], ids=["tf_keras", "ours"]
)


class Legacy(legacy.SGD):
    """Changes gradients wherever a legacy optimizer lets its subclasses do so."""

    def _transform_loss(self, loss):
        return loss * 2.0

    def _get_gradients(self, tape, loss, var_list, grad_loss=None):
        return [(g * 3.0, v) for g, v in super()._get_gradients(tape, loss, var_list, grad_loss)]

    def get_gradients(self, loss, params):
        return [g * 5.0 for g in super().get_gradients(loss, params)]

    def _transform_unaggregated_gradients(self, grads_and_vars):
        return [(g * 7.0, v) for g, v in grads_and_vars]


class New(tf_keras.optimizers.SGD):
    """The same for tf_keras's new optimizers."""

    def compute_gradients(self, loss, var_list, tape=None):
        return [(g * 3.0, v) for g, v in super().compute_gradients(loss, var_list, tape)]


@wrappers
@pytest.mark.parametrize(("inner", "moved"), [(Legacy, 42.0), (New, 3.0)], ids=["legacy", "new"])
def test_minimize_computes_gradients_as_the_inner_optimizer_does(wrap, inner, moved):
    weight, optimizer = tf.Variable(0.0), wrap(inner(1.0))
    optimizer.minimize(lambda: weight * 1.0, [weight])
    assert weight.numpy() == -moved
    with tf.GradientTape() as tape:
        loss = weight * 1.0
    optimizer.minimize(loss, [weight], tape=tape)
    assert weight.numpy() == -2 * moved


@wrappers
@pytest.mark.parametrize(
    ("inner", "method"),
    [(legacy.SGD, "_compute_gradients"), (tf_keras.optimizers.SGD, "compute_gradients")],
    ids=["legacy", "new"],
)
def test_a_class_derived_from_the_wrappers_changes_the_gradients_of_minimize(wrap, inner, method):
    base = type(wrap(inner(1.0)))

    def doubled(self, loss, var_list, *args, tape=None):
        return [(2.0 * g, v) for g, v in getattr(base, method)(self, loss, var_list, *args, tape=tape)]

    def of_legacy(self, loss, var_list, grad_loss=None, tape=None):
        return doubled(self, loss, var_list, grad_loss, tape=tape)

    def of_new(self, loss, var_list, tape=None):
        return doubled(self, loss, var_list, tape=tape)

    derived = type(base.__name__, (base,), {method: of_legacy if inner is legacy.SGD else of_new})
    weight = tf.Variable(0.0)
    derived(inner(1.0)).minimize(lambda: weight * 1.0, [weight])
    assert weight.numpy() == -2.0


@wrappers
def test_get_gradients_are_the_inner_optimizers_and_a_missing_one_is_an_error(wrap):
    weight, other = tf.Variable(3.0), tf.Variable(1.0)
    optimizer = wrap(Legacy(1.0))

    @tf.function
    def gradients(variables):
        return optimizer.get_gradients(weight**2, variables)

    (gradient,) = gradients([weight])
    assert gradient.numpy() == 30.0
    with pytest.raises(ValueError, match="`None` for gradient"):
        gradients([weight, other])


@wrappers
def test_gradients_that_are_summed_already_are_not_changed_before_they_are_summed(wrap):
    weight = tf.Variable(0.0)
    wrap(Legacy(1.0)).apply_gradients([(tf.constant(1.0), weight)], experimental_aggregate_gradients=False)
    assert weight.numpy() == -1.0


@wrappers
def test_a_legacy_optimizer_makes_slots_for_the_variables_that_have_a_gradient(wrap):
    first, second, third = variables = [tf.Variable([1.0]) for _ in range(3)]
    one = tf.constant([1.0])
    optimizer = wrap(legacy.Adam(0.1))
    optimizer.apply_gradients(zip([one, None, one], variables))
    assert len(optimizer.get_weights()) == 1 + 2 * 2
    optimizer.apply_gradients(zip([None, one, one], variables))
    assert len(optimizer.get_weights()) == 1 + 3 * 2
    for variable in (first, second, third):
        assert optimizer.get_slot(variable, "m").shape == [1]


@families
def test_building_again_leaves_scale_and_counter(family):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=8.0, dynamic_growth_steps=2)
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
    slots = len(optimizer.weights)
    optimizer.build([weight])
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (16.0, 1)
    assert len(optimizer.weights) == slots


class Velocity(tf.keras.optimizers.Optimizer):
    """Makes its slots whenever it is built, without asking whether it has them."""

    def build(self, variables):
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(v, "velocity") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        velocity = self.velocities[self._get_variable_index(variable)]
        velocity.assign_add(gradient)
        variable.assign_sub(tf.cast(learning_rate, variable.dtype) * velocity)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_an_optimizer_is_built_once_even_if_steps_train_other_variables(in_function):
    both = [tf.Variable(0.0), tf.Variable(0.0)]
    optimizer = LossScaleOptimizer(Velocity(1.0), dynamic=False, initial_scale=1.0)
    optimizer.build(both)
    for variables in (both, both[:1], both):

        def step(variables=variables):
            optimizer.apply_gradients([(tf.constant(1.0), variable) for variable in variables])

        tf.function(step)() if in_function else step()
    assert [variable.numpy().item() for variable in both] == [-6.0, -3.0]


@families
def test_iterations_are_set_to_a_number_at_any_time(family):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.sgd())
    optimizer.iterations = 5
    for expected in (6, 10):
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
        assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == expected
        optimizer.iterations = 9


@pytest.mark.parametrize("name", ["lr", "learning_rate", "momentum", "decay"])
@pytest.mark.parametrize("value", ["0.1", None, [0.1]])
def test_a_legacy_hyperparameter_that_is_no_number_is_refused_at_once(name, value):
    optimizer = LossScaleOptimizer(legacy.SGD(0.5, momentum=0.25))
    with pytest.raises(ValueError, match=f"`{name}` must be a number"):
        setattr(optimizer, name, value)
    assert (float(optimizer.lr), float(optimizer.momentum), float(optimizer.decay)) == (0.5, 0.25, 0.0)


@wrappers
def test_a_legacy_learning_rate_that_was_set_to_a_whole_number_is_a_float_still(wrap):
    optimizer = wrap(legacy.SGD(0.5))
    optimizer.learning_rate = 2
    optimizer.lr = tf.constant(0.25)
    assert float(optimizer.lr) == float(optimizer.inner_optimizer.learning_rate) == 0.25


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@families
def test_gradients_of_python_numbers_are_of_the_variables_dtype(family, dtype):
    for gradient in (1, 1.0, np.array(1, dtype)):
        weight = tf.Variable(1.0, dtype=dtype)
        LossScaleOptimizer(family.sgd()).apply_gradients([(gradient, weight)])
        assert weight.numpy() == 0.5


@wrappers
def test_a_nan_that_an_aggregator_of_the_inner_optimizer_makes_skips_the_step(wrap):
    def aggregator(grads_and_vars):
        return [(gradient * float("nan"), variable) for gradient, variable in grads_and_vars]

    weight = tf.Variable([1.0, 2.0])
    optimizer = wrap(legacy.SGD(1.0, gradient_aggregator=aggregator), initial_scale=2.0)
    optimizer.minimize(lambda: weight * 2.0, [weight])
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    assert float(optimizer.loss_scale) == 1


@pytest.mark.parametrize("strategy", ["mirrored_1", "mirrored_2"])
@pytest.mark.parametrize("in_function", [False, True])
@families
def test_the_inner_optimizer_is_given_plain_tensors_on_every_replica(family, strategy, in_function):
    class Mine(family.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            given.extend(grads_and_vars := list(grads_and_vars))
            return super().apply_gradients(grads_and_vars, *args, **kwargs)

    given, strategy = [], strategies.get(strategy)
    if not in_function and strategy.num_replicas_in_sync > 1 and family.name == "keras3":
        pytest.skip("Keras 3's optimizers train several replicas in a tf.function only")
    with strategy.scope():
        weight = tf.Variable([5.0])
        optimizer = LossScaleOptimizer(Mine(1.0), dynamic=False, initial_scale=1)
    step = lambda: strategy.run(lambda: optimizer.minimize(lambda: weight * 2.0, [weight]))  # noqa: E731
    (tf.function(step) if in_function else step)()
    assert all(isinstance(gradient, tf.Tensor) for gradient, _ in given)
    assert given or family.name == "keras3", "Keras 3's apply is called, which takes no pairs"
    np.testing.assert_array_equal(weight, [5.0 - 2.0 * strategy.num_replicas_in_sync])


@pytest.fixture
def mixed_float16():
    policies_of("tf_keras").set_policy("mixed_float16")
    yield
    policies_of("tf_keras").set_policy("float32")


def built():
    layer = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 1))
    assert "AutoCast" in type(layer.kernel).__name__
    return layer


@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@keras_2_families
def test_an_autocast_variable_is_trained_as_a_plain_one(family, kind, in_function):
    layer, plain = built(), tf.Variable([[1.0]])
    optimizer = LossScaleOptimizer(getattr(family.optimizers, kind)(1.0))

    def step():
        optimizer.minimize(lambda: tf.reduce_sum(layer.kernel + plain), [layer.kernel, plain])

    step = tf.function(step) if in_function else step
    step()
    assert plain.numpy().item() == pytest.approx(0.0, abs=1e-5)  # Adam's epsilon
    np.testing.assert_array_equal(layer.get_weights()[0], plain)


@pytest.mark.usefixtures("mixed_float16")
@keras_2_families
def test_a_learning_rate_below_float16_moves_the_float32_variable(family):
    layer = built()
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-14))
    optimizer.minimize(lambda: tf.cast(layer(tf.ones([1, 1])), tf.float32), layer.trainable_variables)
    assert layer.get_weights()[0] == 1 - 2**-14


@pytest.mark.usefixtures("mixed_float16")
def test_slots_of_autocast_variables_are_saved_and_restored(tmp_path):
    def trained(steps):
        model = tf_keras.Sequential([built()])
        optimizer = LossScaleOptimizer(
            tf_keras.optimizers.legacy.SGD(1.0, momentum=1.0), dynamic=False, initial_scale=8
        )
        model.compile(optimizer, lambda _, output: tf.reduce_mean(output))
        model.fit(np.ones((steps, 1)), np.ones((steps, 1)), batch_size=1, verbose=0)
        slot = optimizer.get_slot(model.layers[0].kernel, "momentum")
        return model, slot

    model, slot = trained(2)
    assert slot.numpy().item() == -2
    model.save_weights(str(tmp_path / "weights"))
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    assert slot.numpy().item() == -3
    for loaded, loaded_slot in ((model, slot), trained(1)):
        loaded.load_weights(str(tmp_path / "weights"))
        assert loaded_slot.numpy().item() == -2
        assert loaded.get_weights()[0] == -2
