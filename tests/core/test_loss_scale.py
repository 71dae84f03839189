"""The variables of a loss scale: what they are called, who saves them, and when they move."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tf_lossscale.core import replicas, skipping
from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.loss_scale import FixedLossScale, LossScale
from tf_lossscale.wrapper.shared import SharedLossScale


def step(scale, finite):
    return scale.step([tf.constant(1.0 if finite else np.nan)], lambda gradients: None)


def saved_names(trackable, path):
    path = tf.train.Checkpoint(scale=trackable).write(str(path / "checkpoint"))
    return {name.split("/.ATTRIBUTES")[0] for name, _ in tf.train.list_variables(path) if "ATTRIBUTES" in name}


def test_a_checkpoint_holds_what_every_tensorflow_version_wrote_and_no_more(tmp_path):
    assert saved_names(DynamicLossScale(), tmp_path) == {"scale/current_loss_scale", "scale/good_steps"}
    with_hysteresis = saved_names(DynamicLossScale(hysteresis=2), tmp_path)
    assert with_hysteresis == {"scale/current_loss_scale", "scale/good_steps", "scale/bad_steps"}
    assert saved_names(FixedLossScale(8.0), tmp_path) == set()


def test_the_variables_are_scalars_that_are_not_trained():
    scale = DynamicLossScale(8.0, hysteresis=2)
    assert [(v.name, v.dtype, v.shape.rank) for v in scale.variables] == [
        ("current_loss_scale:0", tf.float32, 0),
        ("good_steps:0", tf.int64, 0),
        ("bad_steps:0", tf.int64, 0),
    ]
    assert not any(v.trainable for v in scale.variables)
    assert scale.trainable_variables == ()
    assert all(v.aggregation == tf.VariableAggregation.NONE for v in scale.variables)
    assert DynamicLossScale().bad_steps is None
    assert FixedLossScale(8.0).variables == ()


def test_the_multiplier_is_the_factor_of_growth_and_its_inverse_that_of_an_overflow():
    scale = DynamicLossScale(64.0, 1)
    assert scale.multiplier == 2.0
    scale.multiplier = 4
    assert (scale.multiplier, scale._rules.growth_factor, scale._rules.backoff_factor) == (4.0, 4.0, 0.25)
    step(scale, False)
    assert scale().numpy() == 16.0
    step(scale, True)
    assert scale().numpy() == 64.0
    with pytest.raises(ValueError, match="`multiplier` must be"):
        scale.multiplier = -2
    assert scale.multiplier == 4.0


def test_a_fixed_scale_moves_for_nothing_and_asks_nothing():
    scale = FixedLossScale(8.0)
    assert not scale.may_skip
    assert step(scale, False) is True, "every step is applied"
    assert float(scale()) == 8.0
    asking = FixedLossScale(8.0, skip_nonfinite=True)
    assert asking.may_skip
    assert not asking.check([tf.constant(np.inf)])
    with pytest.raises(NotImplementedError):
        LossScale()()


def test_each_legacy_graph_has_variables_of_its_own_among_the_global_ones():
    scale = DynamicLossScale(8.0)
    for _ in range(2):
        with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
            gradient = tf.compat.v1.placeholder(tf.float32, [])
            with tf.control_dependencies([scale.step([gradient], lambda gradients: None)]):
                after = scale.current_loss_scale.read_value()
            names = {v.op.name for v in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)}
            assert names == {"current_loss_scale", "good_steps"}
            session.run(tf.compat.v1.global_variables_initializer())
            assert [session.run(after, {gradient: g}) for g in (1.0, np.inf, np.nan)] == [8.0, 4.0, 2.0]
    assert float(scale()) == 8.0, "eager mode has its own as well"


def test_the_state_of_a_fixed_scale_that_float32_rounds_can_be_restored():
    FixedLossScale(0.1).set_state(FixedLossScale(0.1).state())
    with pytest.raises(ValueError, match="is fixed at"):
        FixedLossScale(0.1).set_state({"loss_scale": 0.2})


def test_without_a_merge_call_a_step_is_applied_if_the_checks_of_all_replicas_agree(monkeypatch):
    class Own(LossScale):
        def __call__(self):
            return tf.constant(1.0)

        def check(self, gradients):
            return gradients[0] < 2.0

    scale, strategy = Own(), tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    monkeypatch.setattr(replicas, "uses_merge_call", lambda: False)

    def applied(*values):
        per_replica = iter(values)
        gradients = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(next(per_replica)))
        decisions = strategy.run(lambda gradient: skipping._checked(scale, [gradient]), args=(gradients,))
        return [bool(each) for each in strategy.experimental_local_results(decisions)]

    assert applied(1.0, 1.0) == [True, True]
    assert applied(1.0, 3.0) == applied(3.0, 1.0) == [False, False]


def test_a_shared_scale_has_the_defaults_of_a_dynamic_one():
    shared, dynamic = SharedLossScale(), DynamicLossScale()
    assert (shared.state(), shared._rules) == (dynamic.state(), dynamic._rules)
    assert float(shared()) == 2.0**15


@pytest.mark.parametrize(
    ("gradients", "apply", "words"),
    [
        (
            tf.constant([1.0, 2.0]),
            lambda gradients: None,
            "`gradients` must be a list with a gradient for each variable",
        ),
        ({"weight": tf.constant(1.0)}, lambda gradients: None, "`gradients` must be a list"),
        ([tf.constant(1.0)], tf.keras.optimizers.SGD(), "`apply` must be a function that applies a list of gradients"),
    ],
    ids=["a tensor", "a dict", "an optimizer"],
)
def test_a_step_refuses_what_is_no_list_of_gradients_or_no_function(gradients, apply, words):
    scale = DynamicLossScale(8.0)
    before = scale.state()
    with pytest.raises(TypeError, match=words):
        scale.step(gradients, apply)
    assert scale.state() == before


def step_of(scale, weight, **kwargs):
    return lambda gradient: scale.step([gradient], lambda gradients: weight.assign_sub(gradients[0]), **kwargs)


@pytest.mark.parametrize(
    "wrap", [lambda step: step, tf.function, tf.function(jit_compile=True)], ids=["eager", "function", "XLA"]
)
@pytest.mark.parametrize("scale", [DynamicLossScale, lambda: FixedLossScale(8.0)], ids=["dynamic", "fixed"])
def test_a_step_returns_whether_it_was_applied(wrap, scale):
    step = wrap(step_of(scale(), tf.Variable(1.0)))
    assert bool(step(tf.constant(1.0))) is True
    assert bool(step(tf.constant(float("nan")))) is (scale is not DynamicLossScale)


@pytest.mark.parametrize("gradient", [1.0, np.float32(1.0), np.ones([], "float32"), tf.constant(1.0)], ids=type)
def test_a_step_takes_arrays_and_numbers(gradient):
    weight = tf.Variable(1.0)
    assert step_of(DynamicLossScale(), weight)(gradient)
    assert float(weight) == 0.0


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_an_optimizer_that_sums_itself_takes_the_gradients_of_its_replica(bad):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weight, sgd, scale = tf.Variable(2.0), tf.keras.optimizers.SGD(0.25), DynamicLossScale(8.0)
        sgd.build([weight])

    def on_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = tf.where(tf.equal(replica, -1 if bad is None else bad), float("nan"), 1.0)
        return scale.step([gradient], lambda gradients: sgd.apply_gradients(zip(gradients, [weight])), aggregate=False)

    applied = strategy.experimental_local_results(tf.function(lambda: strategy.run(on_replica))())
    assert {bool(each) for each in applied} == {bad is None}
    assert float(weight.numpy()) == (1.5 if bad is None else 2.0)


def test_the_variables_exist_when_the_object_is_made_so_any_function_may_step_first():
    class Own(LossScale):
        def __call__(self):
            return tf.constant(8.0)

        def check(self, gradients):
            return super().check(gradients)

    for scale in (DynamicLossScale(), FixedLossScale(8.0, True), Own()):
        assert not scale._is_missing("step_counts")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scale: pickle.loads(pickle.dumps(scale))])
def test_a_copy_of_a_loss_scale_in_use_has_its_state_and_moves_alone(copied):
    scale = DynamicLossScale(8.0)
    scale.unscale([scale.scale(tf.constant(1.0))])
    scale.step([tf.constant(np.inf)], lambda gradients: None)
    other, before = copied(scale), scale.state()
    assert other.state() == before
    assert before["loss_scale"] == 4.0
    [gradient] = other.unscale([tf.constant(4.0)])
    other.step([gradient * np.inf], lambda gradients: None)
    assert (gradient, other.state()["loss_scale"], scale.state()) == (1.0, 2.0, before)


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(TypeError, match=r"^DynamicLossScale\(\) got .*'growth_interval'.*`dynamic_growth_steps`"):
        DynamicLossScale(8.0, growth_interval=5)


def test_a_gradient_is_divided_by_the_factor_of_its_loss_also_after_many_steps_of_another_scale():
    weight, scale, other = tf.Variable(1.0), DynamicLossScale(8.0, dynamic_growth_steps=1), DynamicLossScale(8.0)

    def gradient(of):
        with tf.GradientTape() as tape:
            loss = of.scale(weight**2)
        return tape.gradient(loss, [weight])

    early = gradient(scale)
    scale.step(scale.unscale(gradient(scale)), lambda gradients: None)
    for _ in range(400):
        other.step(other.unscale(gradient(other)), lambda gradients: None)
    assert float(scale()) == 16.0
    assert scale.unscale(early)[0].numpy() == 2.0
