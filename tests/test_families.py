"""Every optimizer class of every family, wrapped; and what is refused."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import loops
from tests.families import ALL_FAMILIES, FAMILIES, all_families, families, tf_keras, with_keras_3
from tests.processes import printed
from tf_lossscale import LossScaleOptimizer

# Public classes of the libraries that are no optimizer with a step of its own, with the reason.
NOT_IN_THE_TABLE = {
    "Optimizer": "the abstract base class",
    "LossScaleOptimizer": "a wrapper: refused, see test_bad_input",
    "MultiOptimizer": "needs other optimizers, see test_options",
    "SyncReplicasOptimizer": "needs TensorFlow 1's parameter servers and queues",
}


def public_classes(family):
    """Names of the optimizer classes that the family's library shows its users."""
    values = {name: getattr(family.optimizers, name) for name in dir(family.optimizers) if not name.startswith("_")}
    return {name for name, value in values.items() if inspect.isclass(value) and family.base in names_of_bases(value)}


def names_of_bases(cls):
    return {base.__name__ for base in cls.__mro__}


ROWS = [pytest.param(f, name, id=f"{f.name}-{name}") for f in ALL_FAMILIES for name in sorted(f.classes)]


@all_families
def test_no_public_optimizer_class_is_missing_from_the_table(family):
    public = public_classes(family)
    missing = public - set(family.classes) - set(NOT_IN_THE_TABLE)
    assert not missing, f"add to tests/families.py: {sorted(missing)}"
    assert public & set(family.classes)


def make(family, name):
    if not hasattr(family.optimizers, name):
        pytest.skip(f"this version of {family.name} has no {name}")
    arguments = dict(family.arguments.get(name, {}))
    if name == "AdagradDAOptimizer":
        arguments["global_step"] = tf.Variable(0, dtype=tf.int64)
    return getattr(family.optimizers, name)(**arguments)


def loss_of(x, weight, bias):
    return tf.reduce_mean((tf.tanh(x @ weight + bias) - 0.5) ** 2)


def train(family, optimizer, step, steps=5):
    if type(optimizer).__name__ == "Muon" and tf.keras.__version__.startswith("3.12."):
        pytest.skip("Keras 3.12, the last for Python 3.10: its Muon itself takes keras.Variables only")
    rng = np.random.default_rng(0)
    variable = tf.keras.Variable if family.name == "keras3" else tf.Variable
    variables = [variable(rng.normal(size=size).astype("float32")) for size in ((4, 3), (3,))]
    tensors = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    # In 25 steps Muon and Adafactor would be far from where they began; five show a difference in any of them.
    for _ in range(steps):
        step(family, optimizer, tf.constant(rng.normal(size=(5, 4)).astype("float32")), variables, tensors)
    return [tensor.numpy() for tensor in tensors]


def bare_step(family, optimizer, x, variables, tensors):
    with tf.GradientTape() as tape:
        loss = loss_of(x, *tensors)
    family.apply(optimizer, tape.gradient(loss, tensors), variables)


def wrapped_step(family, optimizer, x, variables, tensors):
    del family
    gradients = loops.unscaled_gradients(optimizer, lambda: loss_of(x, *tensors), tensors)
    optimizer.apply_gradients(zip(gradients, variables))


@pytest.mark.parametrize(("family", "name"), ROWS)
def test_every_optimizer_takes_the_same_steps_bit_for_bit_as_without_a_scale_and_skipped_first_steps(family, name):
    def overflow_first(family, optimizer, x, variables, tensors):
        if not seen:
            for _ in range(3):
                optimizer.scale_loss(0.0)
                optimizer.apply([t * np.inf for t in tensors], variables)
            seen.append(float(optimizer.loss_scale))
        wrapped_step(family, optimizer, x, variables, tensors)

    seen = []
    without = train(family, make(family, name), bare_step)
    with_scale = train(family, LossScaleOptimizer(make(family, name), initial_scale=1024.0), overflow_first)
    assert seen == [128.0]
    start = train(family, make(family, name), bare_step, steps=0)
    for before, a, b in zip(start, without, with_scale):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(before, a)


@families
def test_it_is_an_optimizer_of_both_kinds_and_has_the_class_name_that_code_looks_for(family):
    optimizer = LossScaleOptimizer(family.adam())
    assert isinstance(optimizer, tf_lossscale.LossScaleOptimizer)
    assert isinstance(optimizer, family.optimizers.Optimizer)
    native = tf.keras.optimizers if family.name == "keras3" else tf_keras.mixed_precision
    assert isinstance(optimizer, native.LossScaleOptimizer)
    assert type(optimizer).__name__ == "LossScaleOptimizer"


@pytest.mark.parametrize(("family", "name"), [row for row in ROWS if row.values[0] in FAMILIES])
def test_every_optimizer_goes_round_through_the_serialize_of_its_library(family, name):
    optimizer = LossScaleOptimizer(make(family, name), initial_scale=8.0)
    library = family.keras.optimizers
    again = library.deserialize(library.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert again.get_config() == optimizer.get_config()


class Lookahead(tf_keras.optimizers.legacy.Optimizer):
    """An optimizer around an optimizer, whose slow weights begin as the weights are when the slots are made."""

    def __init__(self, fast):
        super().__init__("Lookahead")
        self._fast = fast

    def _create_slots(self, var_list):
        self._fast._create_slots(var_list)
        for variable in var_list:
            self.add_slot(variable, "slow", initializer=variable)

    def _create_hypers(self):
        self._fast._create_hypers()

    def _prepare(self, var_list):
        return self._fast._prepare(var_list)

    def _resource_apply_dense(self, grad, var, apply_state=None):
        slow = self.get_slot(var, "slow")
        with tf.control_dependencies([self._fast._resource_apply_dense(grad, var, apply_state)]):
            synced = slow + 0.5 * (var.read_value() - slow)
            with tf.control_dependencies([slow.assign(synced)]):
                return var.assign(synced)

    @property
    def learning_rate(self):
        return self._fast.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self._fast.learning_rate = value


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_slow_weights_of_a_lookahead_are_the_weights_after_seven_skipped_first_steps(compiled):
    weight = tf.Variable([8.0, -8.0])
    optimizer = LossScaleOptimizer(Lookahead(tf_keras.optimizers.legacy.SGD(0.5)))

    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    function = tf.function(step) if compiled else step
    for _ in range(7):
        function(tf.constant([np.inf, 1.0]))
    np.testing.assert_array_equal(optimizer.get_slot(weight, "slow"), [8.0, -8.0])
    function(tf.constant([2.0, 2.0]))
    np.testing.assert_array_equal(weight, [7.5, -8.5])
    assert int(optimizer.iterations) == 8


def test_a_learning_rate_is_set_through_nested_optimizers():
    optimizer = LossScaleOptimizer(Lookahead(tf_keras.optimizers.legacy.SGD(0.5)))
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    reduce = tf_keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e9, factor=0.5)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=3, verbose=0, callbacks=[reduce])
    assert float(optimizer.lr) == float(optimizer.inner_optimizer._fast.learning_rate) == 0.125


@families
@pytest.mark.parametrize("contract", ["apply_gradients", "apply"])
def test_an_inner_optimizer_is_complete_after_a_skipped_first_step_and_not_entered(family, contract):
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
        if contract == "apply":
            optimizer.scale_loss(0.0)
            optimizer.apply([tf.constant(np.inf)], [weight])
        else:
            optimizer.apply_gradients([(tf.constant(np.inf), weight)])
    assert not entered
    assert len(optimizer.weights) >= 2, "the momentum is there"
    loops.step(optimizer, lambda: weight * 1.0, [weight])
    assert entered
    assert weight.numpy() == 0.5


# Programs in processes of their own. ----------------------------------------------------------------------------------


WEIGHT_AFTER_A_STEP = """
def weight_after_a_step(optimizer):
    weight = tf.Variable(1.0)
    optimizer.minimize(lambda: 1.0 * weight, [weight])
    return weight.numpy()
"""


@pytest.mark.slow
def test_with_the_legacy_environment_variable_the_optimizers_of_tf_keras_are_wrapped():
    code = f"""
import tensorflow as tf, tf_lossscale
{WEIGHT_AFTER_A_STEP}
for optimizers in (tf.keras.optimizers, tf.keras.optimizers.legacy):
    optimizer = tf_lossscale.LossScaleOptimizer(optimizers.SGD(0.5))
    print(weight_after_a_step(optimizer), isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer))
"""
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if tf_keras.__name__ == "tf_keras" else {}
    assert printed("-c", code, **legacy).split() == ["0.5", "True"] * 2


@pytest.mark.slow
def test_keras_3_optimizers_need_none_of_the_optional_libraries():
    code = f"""
import sys
for name in ("tf_keras", "sonnet", "tensorflow_probability", "matplotlib", "sklearn", "tqdm"):
    sys.modules[name] = None
import tensorflow as tf, tf_lossscale
{WEIGHT_AFTER_A_STEP}
print(weight_after_a_step(tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.5))))
tf_lossscale.install()
tf_lossscale.amp.DynamicLossScaleManager()
print(tf.keras.mixed_precision.LossScaleOptimizer.__module__.split(".")[0])
"""
    assert printed("-c", code).split() == ["0.5", "tf_lossscale"]


@with_keras_3
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tf.keras.optimizers", "tf_keras.mixed_precision"])
def test_our_class_may_take_the_place_of_a_librarys_own_before_the_first_wrapper_is_made(name):
    code = f"""
import tensorflow as tf, tf_keras, tf_lossscale
{WEIGHT_AFTER_A_STEP}
{name}.LossScaleOptimizer = tf_lossscale.LossScaleOptimizer
for library in (tf.keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy):
    print(weight_after_a_step({name}.LossScaleOptimizer(library.SGD(0.5))))
"""
    assert printed("-c", code).split() == ["0.5"] * 3


@pytest.mark.parametrize("dynamic", [True, False])
@all_families
def test_in_a_function_apply_gradients_returns_a_tensor_to_wait_for_and_to_return(family, dynamic):
    optimizer = LossScaleOptimizer(family.sgd(), dynamic=dynamic, initial_scale=8.0)
    weight = tf.Variable(1.0)

    @tf.function
    def step():
        done = optimizer.apply_gradients([(tf.constant(1.0), weight)])
        with tf.control_dependencies([done]):
            return done, tf.identity(weight)

    done, after = step()
    assert tf.is_tensor(done)
    assert after.numpy() == 0.5
