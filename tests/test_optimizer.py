"""LossScaleOptimizer around every family: steps, attributes, copies, bad input."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests.families import FAMILIES, IDS
from tf_lossscale import LossScaleOptimizer

families = pytest.mark.parametrize("family", FAMILIES, ids=IDS)
compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])

# Optimizer classes that need other arguments, or that are none.
ARGUMENTS = {"MultiOptimizer": None, "LossScaleOptimizer": None, "Optimizer": None, "OptimizerMap": None}


def classes():
    for family in FAMILIES:
        for name in sorted(dir(family.optimizers)):
            value = getattr(family.optimizers, name)
            if isinstance(value, type) and name not in ARGUMENTS and hasattr(value, "apply_gradients"):
                yield pytest.param(family, name, id=f"{family.name}-{name}")


def test_no_public_optimizer_class_is_missing_from_the_table():
    tested = {(p.values[0].name, p.values[1]) for p in classes()}
    assert len(tested) > 25
    for name in ("Adam", "SGD", "RMSprop", "Ftrl", "Nadam", "Adamax", "Adagrad", "Adadelta"):
        assert {family for family, tested_name in tested if tested_name == name} == set(IDS)


def train(optimizer, step, steps=4, seed=0):
    rng = np.random.default_rng(seed)
    make = tf.keras.Variable if isinstance(optimizer, tf.keras.optimizers.Optimizer) else tf.Variable
    weight = make(rng.normal(size=(4, 3)).astype("float32"))
    bias = make(rng.normal(size=3).astype("float32"))
    for _ in range(steps):
        x = tf.constant(rng.normal(size=(5, 4)).astype("float32"))
        step(optimizer, x, weight, bias)
    return np.asarray(weight), np.asarray(bias)


def loss_of(x, weight, bias):
    return tf.reduce_mean((tf.tanh(x @ weight + bias) - 0.5) ** 2)


def tensors(*variables):
    return [v.value if isinstance(v, tf.keras.Variable) else v for v in variables]


def bare_step(optimizer, x, weight, bias):
    with tf.GradientTape() as tape:
        loss = loss_of(x, weight, bias)
    optimizer.apply_gradients(zip(tape.gradient(loss, tensors(weight, bias)), [weight, bias]))


def wrapped_step(optimizer, x, weight, bias):
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_of(x, weight, bias))
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, tensors(weight, bias)))
    optimizer.apply_gradients(zip(gradients, [weight, bias]))


@pytest.mark.parametrize(("family", "name"), classes())
def test_every_optimizer_takes_the_same_steps_with_a_power_of_two_scale_as_without(family, name):
    make = getattr(family.optimizers, name)
    without = train(make(), bare_step)
    with_scale = train(LossScaleOptimizer(make(), initial_scale=1024.0), wrapped_step)
    for a, b in zip(without, with_scale):
        np.testing.assert_array_equal(a, b)


@families
def test_it_is_an_optimizer_of_both_kinds_and_has_the_class_name_that_code_looks_for(family):
    optimizer = LossScaleOptimizer(family.adam())
    assert isinstance(optimizer, tf_lossscale.LossScaleOptimizer)
    assert isinstance(optimizer, family.optimizers.Optimizer)
    assert type(optimizer).__name__ == "LossScaleOptimizer"
    assert "LossScaleOptimizer loss_scale=32768" in repr(optimizer)
    assert "Adam" in repr(optimizer)


@families
def test_the_scale_can_be_read_before_the_first_step(family):
    optimizer = LossScaleOptimizer(family.adam())
    assert float(optimizer.loss_scale) == 32768.0
    assert optimizer.loss_scale.dtype == tf.float32
    assert (optimizer.dynamic, optimizer.initial_scale, optimizer.dynamic_growth_steps) == (True, 32768.0, 2000)
    assert int(optimizer.dynamic_counter) == 0
    fixed = LossScaleOptimizer(family.adam(), dynamic=False, initial_scale=8)
    assert (fixed.dynamic, fixed.dynamic_counter, fixed.dynamic_growth_steps) == (False, None, None)
    assert float(fixed.loss_scale) == 8.0


@families
@compiled
def test_the_outcome_of_the_last_step_can_be_read(family, compiled):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.sgd())

    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])
        return tf.identity(optimizer.last_step_skipped)

    function = tf.function(step) if compiled else step
    assert [bool(function(tf.constant(g))) for g in (1.0, np.inf, 1.0)] == [False, True, False]
    assert int(optimizer.skipped_steps) == 1


@families
def test_variables_are_a_list_that_can_be_called(family):
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(family.adam())
    optimizer.build([weight])
    assert list(optimizer.variables()) == list(optimizer.variables)
    of_the_scale = [v.name.split(":")[0] for v in optimizer.variables[len(optimizer.weights) :]]
    if family.name == "tf_keras_legacy":
        assert of_the_scale == [], "as the originals had it"
    else:
        assert of_the_scale == ["current_loss_scale", "good_steps"]


@families
def test_weights_go_round_and_training_continues_the_same(family):
    first = LossScaleOptimizer(family.adam())
    weight, twin = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    first.apply_gradients([(tf.constant([0.5, -1.0]), weight)])
    second = LossScaleOptimizer(family.adam())
    second.build([twin])
    second.set_weights(first.get_weights())
    twin.assign(weight)
    for optimizer, variable in ((first, weight), (second, twin)):
        optimizer.apply_gradients([(tf.constant([0.25, 1.0]), variable)])
    np.testing.assert_array_equal(weight, twin)
    with pytest.raises(ValueError, match="weight"):
        second.set_weights([np.zeros(3)])


@families
def test_iterations_and_learning_rate_are_the_inner_optimizers(family):
    optimizer = LossScaleOptimizer(family.adam())
    optimizer.iterations = 5
    assert int(optimizer.inner_optimizer.iterations) == 5
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    optimizer.lr = 0.5
    assert float(optimizer.learning_rate) == float(optimizer.lr) == 0.5


@families
def test_a_missing_attribute_names_the_inner_optimizer(family):
    optimizer = LossScaleOptimizer(family.adam())
    with pytest.raises(AttributeError, match=r"no attribute 'epsilon'; .* inner Adam use inner_optimizer\.epsilon"):
        _ = optimizer.epsilon
    optimizer.epsilon = 0.125
    assert optimizer.inner_optimizer.epsilon == 1e-7
    optimizer.anything = 3
    assert optimizer.anything == 3
    assert not hasattr(optimizer.inner_optimizer, "anything")


@families
def test_a_beta_set_on_the_wrapper_changes_the_next_step(family):
    results = []
    for set_it in (False, True):
        weight = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(family.adam())
        for gradient in (1.0, -0.5):
            optimizer.apply_gradients([(tf.constant([gradient]), weight)])
            if set_it:
                optimizer.beta_1 = 0.0
        results.append(float(weight[0]))
    assert results[0] != results[1]


@families
def test_a_custom_optimizer_names_its_own_hyperparameters(family):
    class Mine(family.optimizers.SGD):
        hyperparameter_names = ("temperature",)

        def __init__(self):
            super().__init__(0.1)
            if family.name == "tf_keras_legacy":
                self._set_hyper("temperature", 1.0)
            else:
                self.temperature = 1.0

    optimizer = LossScaleOptimizer(Mine())
    optimizer.temperature = 3.0
    assert float(optimizer.inner_optimizer.temperature) == 3.0
    assert "temperature" in dir(optimizer)


def test_setting_what_a_traced_function_no_longer_sees_warns(monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam())
    optimizer.beta_1 = 0.8
    assert not seen
    tf.function(lambda: optimizer.minimize(lambda: weight**2, [weight]))()
    optimizer.learning_rate = 0.5
    assert not seen, "a variable reaches the traced function"
    optimizer.beta_1 = 0.7
    assert "keeps the old value" in seen[-1]


def test_decayed_lr_answers_under_a_schedule():
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(schedule))
    assert float(optimizer._decayed_lr("float32")) == 0.5
    assert optimizer._get_hyper("learning_rate") is schedule
    optimizer._set_hyper("momentum", 0.75)
    assert float(optimizer.momentum) == 0.75
    optimizer._create_all_weights([tf.Variable([1.0])])


def test_legacy_slots_are_the_inner_optimizers():
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.Adam())
    optimizer.apply_gradients([(tf.constant([0.5, 0.5]), weight)])
    assert optimizer.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(weight, "m") is optimizer.inner_optimizer.get_slot(weight, "m")
    np.testing.assert_array_equal(optimizer.add_slot(weight, "new", "ones"), [1.0, 1.0])
    with pytest.raises(KeyError):
        optimizer.get_slot(weight, "bogus")


@families
def test_copies_are_independent(family):
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    assert copy.copy(optimizer).inner_optimizer is optimizer.inner_optimizer
    deep = copy.deepcopy(optimizer)
    deep.apply_gradients([(tf.constant([np.inf]), weight)])
    assert float(deep.loss_scale) == 4.0
    assert float(optimizer.loss_scale) == 8.0


@families
def test_it_pickles_where_the_inner_optimizer_does(family):
    try:
        pickle.loads(pickle.dumps(family.sgd()))
    except Exception:
        pytest.skip(f"{family.name}'s own optimizers do not pickle")
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0, hysteresis=2)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.get_config() == optimizer.get_config()


@families
def test_serialize_and_deserialize_go_round(family):
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=8.0, growth_factor=4.0, max_scale=64.0)
    config = family.keras.optimizers.serialize(optimizer)
    again = family.keras.optimizers.deserialize(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert again.get_config()["growth_factor"] == 4.0


@families
def test_a_class_derived_from_it_overrides_what_it_likes(family):
    class Mine(LossScaleOptimizer):
        def get_unscaled_gradients(self, grads):
            self.seen = True
            return super().get_unscaled_gradients(grads)

    weight = tf.Variable(1.0)
    optimizer = Mine(family.sgd(), initial_scale=8.0)
    optimizer.minimize(lambda: 1.0 * weight, [weight])
    assert optimizer.seen
    assert weight.numpy() == 0.5
    assert isinstance(optimizer, Mine)
    assert isinstance(Mine.from_config(optimizer.get_config()), Mine)

    cls = type(type(optimizer).__name__, (type(optimizer),), {"extra": 1})
    dynamic = cls.from_config(optimizer.get_config())
    assert dynamic.extra == 1
    assert isinstance(dynamic, Mine)


@families
def test_sparse_and_missing_gradients(family):
    table, unused = tf.Variable([[1.0, 1.0], [2.0, 2.0]]), tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_sum(tf.gather(table, [1])))
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [table, unused]))
    assert isinstance(gradients[0], tf.IndexedSlices)
    assert gradients[1] is None
    optimizer.apply_gradients(zip(gradients, [table, unused]))
    np.testing.assert_array_equal(table, [[1.0, 1.0], [1.5, 1.5]])

    # Keras 3's own wrapper scatters rows first, the last one wins, and does not see the NaN.
    rows = tf.IndexedSlices(tf.constant([[np.nan, 0.0], [1.0, 1.0]]), tf.constant([0, 0]), tf.constant([2, 2]))
    before = table.numpy()
    optimizer.apply_gradients([(rows, table)])
    np.testing.assert_array_equal(table, before)
    assert float(optimizer.loss_scale) == 4.0


@families
@pytest.mark.parametrize("method", ["apply_gradients", "apply"])
def test_all_gradients_missing_is_an_error_and_changes_nothing(family, method):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.sgd())
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        if method == "apply":
            optimizer.apply([None], [weight])
        else:
            optimizer.apply_gradients([(None, weight)])
    assert int(optimizer.dynamic_counter) == 0
    assert int(optimizer.iterations) == 0


@families
def test_bad_calls_change_nothing(family):
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(family.adam())
    optimizer.build([weight])
    before = [np.array(v) for v in [*optimizer.variables, weight]]
    with pytest.raises(ValueError, match="one gradient for each variable"):
        optimizer.apply([tf.constant([1.0, 1.0])] * 2, [weight])
    with pytest.raises(TypeError, match="floating"):
        optimizer.apply_gradients([(tf.constant([1, 2]), weight)])
    with pytest.raises((ValueError, TypeError)):
        optimizer.apply_gradients(None)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        optimizer.apply_gradients([(tf.constant([1.0, 2.0, 3.0]), weight)])
    if family.name != "tf_keras":  # its optimizers take any keyword
        with pytest.raises(TypeError, match="bogus"):
            optimizer.apply_gradients([(tf.constant([1.0, 2.0]), weight)], bogus=1)
    with pytest.raises(ValueError, match="tape"):
        optimizer.minimize(tf.constant(1.0), [weight])
    with pytest.raises(ValueError, match="build"):
        LossScaleOptimizer(family.adam()).apply([tf.constant([1.0])])
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    with strategy.scope(), pytest.raises(ValueError, match=r"apply_gradients\(\) must be called in a replica context"):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), weight)])
    for a, b in zip(before, [*optimizer.variables, weight]):
        np.testing.assert_array_equal(a, b)


BAD = [
    ({"growth_factor": 1.0}, "growth_factor"),
    ({"growth_factor": 0.5}, "growth_factor"),
    ({"backoff_factor": 1.0}, "backoff_factor"),
    ({"backoff_factor": 0.0}, "backoff_factor"),
    ({"backoff_factor": float("nan")}, "backoff_factor"),
    ({"hysteresis": 0}, "hysteresis"),
    ({"hysteresis": 1.5}, "hysteresis"),
    ({"min_scale": 0.0}, "min_scale"),
    ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale"),
    ({"initial_scale": 8.0, "max_scale": 4.0}, "initial_scale"),
    ({"max_scale": float("inf")}, "max_scale"),
    ({"initial_scale": True}, "initial_scale"),
    ({"dynamic": False}, "initial_scale"),
    ({"dynamic": False, "initial_scale": 8, "dynamic_growth_steps": 5}, "dynamic_growth_steps"),
    ({"loss_scale": 8}, "loss_scale"),
    ({"unknown": 8}, "unknown"),
]


@families
@pytest.mark.parametrize(("arguments", "name"), BAD, ids=[str(arguments) for arguments, _ in BAD])
def test_bad_arguments_are_refused_and_leave_the_inner_optimizer_free(family, arguments, name):
    inner = family.adam()
    with pytest.raises((TypeError, ValueError), match=name):
        LossScaleOptimizer(inner, **arguments)
    LossScaleOptimizer(inner)


@families
def test_an_inner_optimizer_is_complete_after_a_skipped_first_step_and_not_entered(family):
    entered = []

    class Slow(family.optimizers.SGD):
        def apply_gradients(self, *args, **kwargs):
            entered.append(1)
            return super().apply_gradients(*args, **kwargs)

        def apply(self, *args, **kwargs):
            entered.append(1)
            return super().apply(*args, **kwargs)

    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(Slow(0.5, momentum=0.5))
    for _ in range(7):
        optimizer.apply_gradients([(tf.constant(np.inf), weight)])
    assert not entered
    assert len(optimizer.weights) >= 2, "the momentum is there"
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert entered
    assert weight.numpy() == 0.5


@families
def test_other_keywords_reach_the_inner_optimizer(family):
    class Keywords(family.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, decay_var_list=None, **kwargs):
            self.__dict__["seen"] = decay_var_list
            return super().apply_gradients(grads_and_vars, **kwargs)

        def apply(self, grads, trainable_variables=None, decay_var_list=None):
            self.__dict__["seen"] = decay_var_list
            return super().apply(grads, trainable_variables)

    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(Keywords(0.5))
    optimizer.apply_gradients([(tf.constant(1.0), weight)], decay_var_list=["kernel"])
    assert optimizer.inner_optimizer.__dict__["seen"] == ["kernel"]


@families
def test_the_second_positional_argument_of_apply_gradients_may_be_anything(family):
    weight = tf.Variable(1.0)
    LossScaleOptimizer(family.sgd()).apply_gradients([(tf.constant(1.0), weight)], 1.0)
    assert weight.numpy() == 0.5


def test_with_the_legacy_environment_variable_tf_keras_is_tf_keras():
    code = """
import tensorflow as tf, tf_lossscale
optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(0.1))
assert isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
weight = tf.Variable(1.0)
optimizer.minimize(lambda: weight ** 2, [weight])
print("ok", float(weight))
"""
    environment = {"TF_USE_LEGACY_KERAS": "1", "PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("ok 0.9"), done.stderr[-2000:]


def test_variational_sgd_of_tensorflow_probability_is_wrapped():
    tfp = pytest.importorskip("tensorflow_probability")
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(tfp.optimizer.VariationalSGD(batch_size=1, total_num_examples=1))
    before = weight.numpy()
    optimizer.minimize(lambda: tf.reduce_sum(weight**2), [weight])
    assert not np.array_equal(before, weight.numpy())
    before = weight.numpy()
    optimizer.apply_gradients([(tf.constant([np.inf, 1.0]), weight)])
    np.testing.assert_array_equal(before, weight.numpy())


def test_langevin_dynamics_of_tensorflow_probability_are_wrapped():
    tfp = pytest.importorskip("tensorflow_probability")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:  # it refuses eager mode
        weight = tf.Variable([1.0, 2.0])
        factor = tf.compat.v1.placeholder(tf.float32, [])
        inner = tfp.optimizer.StochasticGradientLangevinDynamics(learning_rate=0.01)
        optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
        step = optimizer.minimize(lambda: factor * tf.reduce_sum(weight**2), [weight])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step, {factor: 1.0})
        before = session.run(weight)
        assert not np.array_equal(before, [1.0, 2.0])
        session.run(step, {factor: np.inf})
        np.testing.assert_array_equal(before, session.run(weight))
        assert session.run(optimizer.loss_scale) == 4.0
