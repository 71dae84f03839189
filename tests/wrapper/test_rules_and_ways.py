"""Every loss scale, also a user's, does the same in every way of stepping, saving and watching."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests import strategies
from tests.cases import combinations, slow_one_in
from tests.rules import OF_USERS, RULES, Described
from tf_lossscale import LossScaleOptimizer

INF = float("inf")
FACTORS = (1.0, INF, 2.0, INF, 1.0)
# Rules that skip no step.
NEVER_SKIP = ("fixed", "tf23_fixed", "schedule", "mindspore_applying")
# Rules whose config does not contain the class or its variables. A saved file loses the rule, and a warning says so.
WITHOUT_CONFIG = ("contrib", "schedule", "small_norms", "quarters", "counting", "shared", "mindspore_own")
CLASSES = {"Described": Described}
# Rules of the package that move and do not move, and a user's with and without a config.
USUAL = ("dynamic", "fixed_skip", "quarters", "described")
each_rule = pytest.mark.parametrize("rule", combinations(RULES, usual=USUAL, others=slow_one_in(6)))


def made(rule, **kwargs):
    return LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=RULES[rule](), **kwargs)


def take(optimizer, weight, factor):
    """Take a step in which the gradient of the weight is `factor`."""
    if isinstance(optimizer.scaler, tf_lossscale.SharedLossScale):
        pairs = optimizer.compute_gradients(lambda: weight * factor, [weight])
        return optimizer.scaler.apply_gradients([(optimizer, pairs)])
    return optimizer.minimize(lambda: weight * factor, [weight])


def first(value):
    return np.array(tf.distribute.get_strategy().experimental_local_results(value)[0]).item()


def seen(optimizer, weight):
    return first(weight), first(optimizer.loss_scale), int(first(optimizer.skipped_steps))


def steps_of(rule, way, **kwargs):
    """The weight, the scale and the number of skipped steps after each step."""
    optimizer, weight = made(rule, **kwargs), tf.Variable(1.0)
    step = way(lambda factor: take(optimizer, weight, factor))
    found = []
    for factor in FACTORS:
        step(tf.constant(factor))
        found.append(seen(optimizer, weight))
    return found


def used(rule, **kwargs):
    optimizer, weight = made(rule, **kwargs), tf.Variable(1.0)
    for factor in FACTORS[:2]:
        take(optimizer, weight, factor)
    return optimizer


def values(optimizer):
    return [np.array(variable).tolist() for variable in optimizer.scaler.variables]


# The ways to take a step. ---------------------------------------------------------------------------------------


@each_rule
def test_in_eager_mode_overflows_are_skipped_and_move_the_scale(rule):
    weights, scales, skipped = zip(*steps_of(rule, lambda step: step))
    if rule in NEVER_SKIP:
        assert skipped == (0,) * 5 and not np.isfinite(weights[-1])
        return
    assert weights == (0.5, 0.5, -0.5, -0.5, -1.0)
    assert skipped == (0, 1, 1, 2, 2)
    falls = {
        "quarters": (64, 16, 16, 4, 4),
        "described": (64, 16, 16, 4, 4),
        "fixed_skip": (64,) * 5,
        "mindspore_fixed": (64,) * 5,
        "dynamic_hysteresis": (64,) * 5,
    }
    assert scales == falls.get(rule, (64, 32, 32, 16, 16))


@each_rule
@pytest.mark.parametrize("compiled", [False, True], ids=["function", "XLA"])
def test_a_function_takes_the_same_steps(rule, compiled):
    if rule == "mindspore_own" and compiled:
        pytest.skip("XLA cannot compile a rule in Python")
    traced = steps_of(rule, lambda step: tf.function(step, jit_compile=compiled))
    np.testing.assert_array_equal(traced, steps_of(rule, lambda step: step))


@each_rule
def test_a_tf1_graph_takes_the_same_steps(rule):
    eager, found = steps_of(rule, lambda step: step), []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        optimizer = LossScaleOptimizer(inner, loss_scale=RULES[rule]())
        weight = tf.compat.v1.get_variable("weight", initializer=1.0, use_resource=True)
        factor = tf.compat.v1.placeholder(tf.float32, [])
        train = take(optimizer, weight, factor)
        session.run(tf.compat.v1.global_variables_initializer())
        for value in FACTORS:
            session.run(train, {factor: value})
            found.append(session.run([weight, optimizer.loss_scale, tf.cast(optimizer.skipped_steps, tf.int32)]))
    np.testing.assert_array_equal(found, eager)


@each_rule
def test_an_overflow_on_the_second_replica_alone_skips_the_step_on_both(rule):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        optimizer, weight = made(rule), tf.Variable(1.0)

    @tf.function
    def step(factor):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            take(optimizer, weight, tf.where(replica == 1, factor, 0.0))

        strategy.run(on_replica)

    found = []
    with strategy.scope():
        for factor in FACTORS:
            step(tf.constant(factor))
            assert len({np.array(copy).item() for copy in strategy.experimental_local_results(weight)}) == 1 or (
                rule in NEVER_SKIP
            )
            found.append(seen(optimizer, weight))
    np.testing.assert_array_equal(found, steps_of(rule, lambda step: step))


# The ways to save. ------------------------------------------------------------------------------------------------


@each_rule
def test_a_checkpoint_restores_every_variable_of_the_rule(rule, tmp_path):
    optimizer, other = used(rule), made(rule)
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "checkpoint"))
    other.build([tf.Variable(1.0)])
    tf.train.Checkpoint(optimizer=other).read(path).assert_existing_objects_matched()
    assert values(other) == values(optimizer)
    listed = [getattr(variable, "value", variable) for variable in optimizer.variables]
    assert all(any(variable is own for variable in listed) for own in optimizer.scaler.variables)


def has_the_class(again, optimizer):
    """Return whether the loss scale has the same class, or the class of a manager's rule, as in a config."""
    name = type(optimizer.scaler).__name__
    return type(again.scaler).__name__ in (name, name.removesuffix("Manager"))


def assert_is_a_copy(again, optimizer):
    assert has_the_class(again, optimizer)
    before = optimizer.state()
    assert (again.state(), values(again)) == (before, values(optimizer))
    again.scaler.step_counts.assign([7, 7, 7])
    assert optimizer.state() == before


@each_rule
def test_a_deep_copy_has_the_rule_and_its_state(rule):
    optimizer = used(rule)
    assert_is_a_copy(copy.deepcopy(optimizer), optimizer)


@each_rule
def test_a_pickle_has_the_rule_and_its_state_or_a_warning_names_it(rule, caplog):
    optimizer = used(rule)
    pickled = pickle.dumps(optimizer)
    assert (type(optimizer.scaler).__name__ in caplog.text) == (rule in WITHOUT_CONFIG)
    if rule not in WITHOUT_CONFIG:
        # A pickle of a Keras optimizer contains its config, in which TensorFlow 2.3's classes are today's.
        with tf.keras.utils.custom_object_scope(CLASSES):
            assert_is_a_copy(pickle.loads(pickled), optimizer)


def model_of(rule, keras):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=RULES[rule]())
    model.compile(optimizer, keras.losses.MeanSquaredError())
    return model


def fitted(rule, keras):
    if rule == "shared":
        pytest.skip("`fit` steps with one optimizer")
    model = model_of(rule, keras)
    x = np.array([[0.5], [INF], [0.5]], "float32")
    monitor = tf_lossscale.LossScaleMonitor()
    history = model.fit(x, np.ones((3, 1), "float32"), batch_size=1, shuffle=False, callbacks=[monitor]).history
    assert history["loss_scale"] == [float(model.optimizer.loss_scale)]
    assert history["skipped_steps"] == [0 if rule in NEVER_SKIP else 1]
    return model


@each_rule
@pytest.mark.parametrize(
    ("keras", "ending"),
    [
        (tf.keras, ".keras"),
        (tf_keras, ""),
        pytest.param(tf.keras, ".h5", marks=pytest.mark.slow),
        pytest.param(tf_keras, ".keras", marks=pytest.mark.slow),
        pytest.param(tf_keras, ".h5", marks=pytest.mark.slow),
    ],
)
def test_a_saved_model_has_the_rule_or_a_warning_names_it(rule, keras, ending, tmp_path, caplog):
    model = fitted(rule, keras)
    path = str(tmp_path / f"model{ending}")
    model.save(path, **({} if ending else {"save_format": "tf"}))
    warned = type(model.optimizer.scaler).__name__ in caplog.text
    again = keras.models.load_model(path, custom_objects=CLASSES).optimizer
    assert warned == (rule in WITHOUT_CONFIG)
    if rule in WITHOUT_CONFIG:
        return
    assert has_the_class(again, model.optimizer)
    assert again.state() == model.optimizer.state()
    assert values(again) == values(model.optimizer)


@each_rule
@pytest.mark.parametrize("keras", [tf.keras, tf_keras])
def test_saved_weights_bring_every_variable_of_the_rule(rule, keras, tmp_path):
    model = fitted(rule, keras)
    other = model_of(rule, keras)
    other.optimizer.build(other.trainable_variables)
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    other.load_weights(path)
    assert values(other.optimizer) == values(model.optimizer)


@each_rule
def test_a_config_creates_the_same_rule_or_a_warning_names_it(rule, caplog):
    optimizer = made(rule)
    config = optimizer.get_config()
    assert (type(optimizer.scaler).__name__ in caplog.text) == (rule in WITHOUT_CONFIG)
    again = LossScaleOptimizer.from_config(config, CLASSES)
    assert float(again.loss_scale) == 64.0
    if rule not in WITHOUT_CONFIG:
        assert again.get_config() == config


@each_rule
def test_the_state_can_be_set_or_the_error_names_the_rule(rule):
    optimizer, other = used(rule), made(rule)
    state = optimizer.state()
    if float(other.loss_scale) != state["loss_scale"] and not other.dynamic:
        before = other.state()
        with pytest.raises(ValueError, match=type(other.scaler).__name__):
            other.set_state(state)
        assert other.state() == before
        return
    other.set_state(state)
    assert other.state() == state


# The ways to watch. -----------------------------------------------------------------------------------------------


@each_rule
def test_the_diagnosis_sees_the_overflows_and_a_stall_is_reported(rule, warnings):
    if rule in ("fixed", "tf23_fixed", "mindspore_applying"):
        with pytest.raises(ValueError, match="never skips a step"):
            made(rule, diagnose=True)
        return
    optimizer, weight = made(rule, diagnose=True), tf.Variable(1.0)
    for _ in range(100):
        take(optimizer, weight, INF)
    assert [(row.steps, row.last_step) for row in optimizer.overflow_report()] == [(100, 100)]
    assert ["The last 100 steps were all skipped" in said for said in warnings] == [True] * (rule not in NEVER_SKIP)


@each_rule
def test_repr_dynamic_and_the_counter_agree(rule):
    optimizer = used(rule)
    assert f"loss_scale={float(optimizer.loss_scale):g}" in repr(optimizer)
    is_dynamic = isinstance(optimizer.scaler, tf_lossscale.DynamicLossScale)
    assert optimizer.dynamic == is_dynamic
    assert (optimizer.dynamic_counter is not None) == is_dynamic
    if not is_dynamic and rule in OF_USERS:
        assert type(optimizer.scaler).__name__ in repr(optimizer)


@each_rule
def test_rules_change_or_the_error_names_them_and_nothing_changes(rule):
    optimizer = made(rule)
    if optimizer.dynamic and rule not in ("tf23_dynamic", "contrib"):
        optimizer.scaler.change_rules(max_scale=32.0)
        assert float(optimizer.loss_scale) == 32.0
        return
    with pytest.raises((ValueError, AttributeError), match=r"max_scale|change_rules"):
        optimizer.scaler.change_rules(max_scale=32.0)
    assert float(optimizer.loss_scale) == 64.0


def test_every_loss_scale_of_the_package_is_in_the_table():
    def subclasses(cls):
        return {cls}.union(*map(subclasses, cls.__subclasses__()))

    public = {cls for cls in subclasses(tf_lossscale.LossScale) if cls.__module__.startswith("tf_lossscale.")}
    public -= {cls for cls in public if cls.__name__.startswith("_")}
    tested = {base for rule in RULES.values() for base in type(rule()).__mro__}
    assert public <= tested, public - tested
