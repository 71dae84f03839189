"""The face of tf.keras.mixed_precision.experimental, around every family that had it."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests import loops
from tests.families import families
from tf_lossscale import legacy
from tf_lossscale.legacy import experimental


def step(optimizer, variable, gradient):
    loops.step(optimizer, lambda: variable * gradient, [variable])


# The constructor. -----------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize(
    ("loss_scale", "start", "after_overflow"),
    [
        ("dynamic", 2.0**15, 2.0**14),
        (1024, 1024, 1024),
        (1, 1, 1),
        (128.0, 128, 128),
        (lambda: legacy.FixedLossScale(64), 64, 64),
        (lambda: legacy.DynamicLossScale(initial_loss_scale=8, increment_period=1000), 8, 4),
        (lambda: legacy.DynamicLossScale(27, 1000, multiplier=3.0), 27, 9),
        (lambda: Revised(64), 64, 16),
        ({"class_name": "FixedLossScale", "config": {"loss_scale_value": 4.0}}, 4, 4),
    ],
)
def test_every_kind_of_loss_scale_is_taken(family, loss_scale, start, after_overflow):
    if callable(loss_scale):
        loss_scale = loss_scale()
    optimizer = experimental.LossScaleOptimizer(family.sgd(), loss_scale)
    assert float(optimizer.loss_scale()) == start
    step(optimizer, family.variable(1.0), np.float32("nan"))
    assert float(optimizer.loss_scale()) == after_overflow


@families
def test_a_dynamic_loss_scale_that_is_passed_is_used_where_it_stands(family):
    shared = legacy.DynamicLossScale(64)
    shared.update([tf.constant(np.inf)])
    first, second = (experimental.LossScaleOptimizer(family.sgd(), shared) for _ in range(2))
    assert first.loss_scale is second.loss_scale is shared
    step(first, tf.Variable(1.0), np.float32("inf"))
    assert float(second.loss_scale()) == float(shared()) == 16


@pytest.mark.slow
@families
def test_what_was_taken_is_taken_and_what_was_refused_leaves_the_optimizer_free(family):
    inner = family.sgd()
    make = experimental.LossScaleOptimizer
    for arguments, error in [
        ((inner,), TypeError),
        ((inner, None), ValueError),
        ((inner, "static"), ValueError),
        ((inner, 0), ValueError),
        ((inner, -1), ValueError),
        ((inner, "dynamic", 3), TypeError),
        ((3, "dynamic"), TypeError),
        ((), TypeError),
    ]:
        with pytest.raises(error):
            make(*arguments)
    with pytest.raises(TypeError):
        make(inner, "dynamic", dynamic=True)
    wrapper = make(inner, "dynamic")
    assert wrapper.inner_optimizer is inner
    for name in ("optimizer", "opt", "inner_optimizer"):
        other = family.sgd()
        assert make(**{name: other}, loss_scale="dynamic").inner_optimizer is other
    with pytest.raises(ValueError, match="already wrapped"):
        make(inner, "dynamic")


# The scale: an object, and a tensor. ----------------------------------------------------------------------------------


def scale(value=1024.0):
    return legacy.DynamicLossScale(value)


def test_a_loss_scale_can_be_called_in_a_function_and_bound_before_the_step():
    optimizer = experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(), "dynamic")
    bound = optimizer.loss_scale

    @tf.function
    def run(gradient):
        step(optimizer, variable, gradient)
        return optimizer.loss_scale(), optimizer.loss_scale * 2, bound

    variable = tf.Variable(1.0)
    now, doubled, late = run(tf.constant(float("inf")))
    assert (float(now), float(doubled), float(late)) == (2.0**14, 2.0**15, 2.0**14)
    assert "{}".format(bound) == "16384.0"  # noqa: UP032


def test_a_loss_scale_is_used_as_the_tensor_that_it_became_in_2_4(tmp_path):
    value = scale()
    assert isinstance(value, legacy.LossScale) and not isinstance(value, tf.Tensor)
    loss = tf.constant(2.0)
    assert float(loss * value) == float(value * loss) == float(value * 2) == 2048
    assert float(value / 2) == 512
    assert float(2048 / value) == 2
    assert float(value - 24) == 1000
    assert float(1 + value) == 1025
    assert float(-value) == -1024
    assert value.numpy() == 1024
    assert value.dtype == tf.float32
    assert value.shape == ()
    assert float(tf.cast(value, tf.float16)) == float(tf.convert_to_tensor(value)) == int(value) == 1024
    assert tf.math.log(value).dtype == tf.float32
    assert bool(value > 1000) and bool(value <= 1024) and bool(value == 1024)
    compared = tf.function(lambda: (value != 1024.0, value != 512.0, value == 1024.0, tf.constant(512.0) != value))
    assert [bool(each) for each in compared()] == [False, True, True, True]
    assert value != "dynamic" and value != scale() and value == value
    assert f"{value:.2f} %d" % value == "1024.00 1024"
    assert np.asarray(value) == 1024
    assert (np.ones(2, "float32") * value).shape == (2,)
    assert len({value, scale()}) == 2
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1):
        assert tf.summary.scalar("loss_scale", value)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = value.nonsense


def test_a_loss_scale_is_fetched_in_a_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        value = scale()
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(value) == session.run(value()) == 1024
        assert session.run({"twice": 2.0 * value}) == {"twice": 2048}
        assert value.eval(session=session) == 1024


# The state object of one's own. ---------------------------------------------------------------------------------------


class Revised(legacy.DynamicLossScale):
    """Falls by four, with an update of its own."""

    def update(self, grads):
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in tf.nest.flatten(grads)])
        lowered = tf.where(finite, self._current_loss_scale, self._current_loss_scale / 4)
        return self._current_loss_scale.assign(lowered), finite


class NotOurs:
    """A state class of another library: it has the two methods, and nothing of ours."""

    def __init__(self):
        self.scale = tf.Variable(64.0, trainable=False)

    def __call__(self):
        return tf.convert_to_tensor(self.scale)

    def update(self, grads):
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in tf.nest.flatten(grads)])
        self.scale.assign(tf.where(finite, self.scale, self.scale / 4))
        return tf.no_op(), finite


@pytest.mark.slow
@families
@pytest.mark.parametrize("kind", [lambda: Revised(64), NotOurs])
@pytest.mark.parametrize("in_function", [False, True])
def test_replacing_the_state_object_is_honoured(family, kind, in_function):
    optimizer = experimental.LossScaleOptimizer(family.sgd(), "dynamic")
    optimizer._loss_scale = kind()
    assert float(optimizer.loss_scale()) == 64
    variable = tf.Variable(1.0)

    def run(gradient):
        step(optimizer, variable, gradient)

    run = tf.function(run) if in_function else run
    run(tf.constant(float("nan")))
    assert (float(variable), float(optimizer.loss_scale())) == (1.0, 16.0)
    run(tf.constant(1.0))
    assert (float(variable), float(optimizer.loss_scale())) == (0.5, 16.0)


# Subclasses, and classes made at run time. ----------------------------------------------------------------------------


class Named(experimental.LossScaleOptimizer):
    def __init__(self, optimizer, loss_scale, steps=1):
        super().__init__(optimizer=optimizer, loss_scale=loss_scale)
        self.steps = steps

    def apply_gradients(self, grads_and_vars, name=None, experimental_aggregate_gradients=True):
        self._raise_if_strategy_unsupported()
        assert self._optimizer is self.inner_optimizer
        for _ in range(self.steps):
            result = super().apply_gradients(
                grads_and_vars, name, experimental_aggregate_gradients=experimental_aggregate_gradients
            )
        return result


@families
def test_a_subclass_passes_its_arguments_on(family):
    optimizer = Named(family.sgd(), loss_scale=8, steps=3)
    assert isinstance(optimizer, Named)
    assert isinstance(optimizer, experimental.LossScaleOptimizer)
    assert isinstance(optimizer, tf_lossscale.LossScaleOptimizer)
    assert not isinstance(experimental.LossScaleOptimizer(family.sgd(), 8), Named)
    variable = tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(1.0), variable)])
    assert float(variable) == 1.0 - 3 * 0.5


# Configs and files. ---------------------------------------------------------------------------------------------------


@families
def test_configs_with_a_loss_scale_of_ones_own_need_custom_objects(family):
    optimizer = experimental.LossScaleOptimizer(family.sgd(), Revised(64))
    config = optimizer.get_config()
    assert config["loss_scale"]["class_name"] == "Revised"
    with pytest.raises(ValueError, match="Revised"):
        type(optimizer).from_config(config)
    again = type(optimizer).from_config(config, custom_objects={"Revised": Revised})
    assert type(again.loss_scale) is Revised
    with pytest.raises(TypeError, match="bogus"):
        type(optimizer).from_config({**config, "loss_scale": "dynamic", "bogus": 1})


@families
def test_configs_of_newer_versions_are_read(family):
    wrapper = type(experimental.LossScaleOptimizer(family.sgd(), 8))
    for arguments in ({"initial_scale": 8, "dynamic_growth_steps": 3}, {"dynamic": False, "initial_scale": 8}):
        made = wrapper.from_config(tf_lossscale.LossScaleOptimizer(family.sgd(), **arguments).get_config())
        assert isinstance(made.loss_scale, legacy.LossScale)
        assert (made.loss_scale() == 8, float(made.learning_rate)) == (True, 0.5)
        assert made.dynamic_growth_steps == arguments.get("dynamic_growth_steps")


# Policies. ------------------------------------------------------------------------------------------------------------


def test_a_policy_carries_the_loss_scale_it_is_given(policies):
    policy = policies.Policy
    auto = policy("mixed_float16")
    assert (auto.name, auto.compute_dtype, auto.variable_dtype) == ("mixed_float16", "float16", "float32")
    assert isinstance(auto.loss_scale, legacy.DynamicLossScale)
    assert auto.loss_scale is auto.loss_scale
    assert auto.should_cast_variables
    assert policy("mixed_bfloat16").loss_scale is policy("float32").loss_scale is None
    assert policy("mixed_float16", loss_scale=None).loss_scale is None
    assert policy("mixed_float16", 1024).loss_scale() == 1024
    assert policy("mixed_float16", loss_scale="dynamic").loss_scale.increment_period == 2000
    given = legacy.DynamicLossScale(8, 5)
    assert policy("mixed_float16", loss_scale=given).loss_scale is given
    assert policy("mixed_float16", loss_scale=policy("mixed_float16", 8).loss_scale).loss_scale() == 8
    with pytest.raises(ValueError, match="static"):
        policy("mixed_float16", loss_scale="static")
    with pytest.raises(ValueError, match="mixed"):
        policy("mixed_float17")


def test_a_policy_warns_of_a_loss_scale_that_its_dtype_does_not_need(policies, caplog):
    policy = policies.Policy
    for arguments in [("float32",), ("float16", 2), ("mixed_float16", 2), ("mixed_float16",), ("mixed_bfloat16", None)]:
        policy(*arguments)
        assert not [record for record in caplog.records if record.name == "absl"]  # tf_keras warns of the processor
    for name in ("float32", "mixed_bfloat16"):
        policy(name, loss_scale=2)
        assert f"Policy('{name}', loss_scale=2)" in caplog.messages[-1]


def test_a_policy_survives_its_config_and_is_printed_with_its_loss_scale(policies):
    policy = policies.Policy
    assert policy("mixed_float16").get_config() == {"name": "mixed_float16"}
    for name in ("float16", "float32", "mixed_float16", "mixed_bfloat16"):
        assert str(policy.from_config(policy(name).get_config())) == str(policy(name))
        for loss_scale in (None, 8, "dynamic"):
            made = policy(name, loss_scale)
            again = policy.from_config(made.get_config())
            assert (again.get_config(), str(again)) == (made.get_config(), str(made))
    assert repr(policy("float16", loss_scale=2)) == '<Policy "float16", loss_scale=FixedLossScale(2.0)>'


def test_the_global_policy_is_set_for_layers_and_keeps_its_loss_scale(keras, policies):
    layers = keras.layers
    given = policies.Policy("mixed_float16", loss_scale=256)
    policies.set_policy(given)
    layer = layers.Dense(1)
    assert layer.compute_dtype == "float16"
    assert policies.global_policy() is given
    assert policies.get_layer_policy(layer) is given
    assert policies.get_layer_policy(layers.Dense(1, dtype="float32")).loss_scale is None
    for default in (None, "infer", policies.Policy("float32")):
        policies.set_policy("mixed_float16")
        policies.set_policy(default)
        assert layers.Dense(1).compute_dtype == policies.global_policy().name == "float32"
    with pytest.raises(ValueError, match="layer"):
        policies.get_layer_policy(3)
    policies.set_policy(given)
    keras.mixed_precision.set_global_policy("mixed_float16")
    assert isinstance(policies.global_policy().loss_scale, legacy.DynamicLossScale)


def test_a_layer_with_a_policy_of_its_own_is_saved_and_loaded(keras, policies, tmp_path):
    policy = policies.Policy("mixed_float16", loss_scale=8)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype=policy)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[-1].compute_dtype == "float16"
    if keras is tf_keras:  # Keras 3 makes layers from the names of their policies
        assert policies.get_layer_policy(loaded.layers[-1]).loss_scale() == 8


@pytest.mark.parametrize("library", ["keras"], indirect=True)
def test_the_module_s_policies_are_those_of_tf_keras(library):
    experimental.set_policy(experimental.Policy("mixed_float16", loss_scale=2))
    assert tf.keras.layers.Dense(1).compute_dtype == "float16"
    assert experimental.global_policy().loss_scale() == 2
    assert experimental.get_layer_policy(tf.keras.layers.Dense(1)).loss_scale() == 2
