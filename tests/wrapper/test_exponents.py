"""`diagnose="exponents"`: which gradients are counted, and the precision report of an optimizer."""

import copy
import json

import numpy as np
import pytest
import tensorflow as tf

from tests import loops, strategies
from tests.families import ALL_FAMILIES, FAMILIES, all_families, families
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.diagnosis.precision import INFINITE, ZEROS, column

KERAS_3 = FAMILIES[0]


def counting(inner, every=1, **options):
    return LossScaleOptimizer(inner, initial_scale=8, diagnose="exponents", diagnose_every=every, **options)


def counts_of(optimizer):
    """The counts of each variable by column, of the last counted step."""
    counts = optimizer.precision_report().counts
    return {name: {int(i): int(row[i]) for i in np.flatnonzero(row)} for name, row in zip(counts.names, counts.counts)}


@pytest.mark.table("function-keras3", every=1)
@all_families
@pytest.mark.parametrize("mode", ["eager", "function", "compiled", "jit_compile"])
def test_both_contracts_count_the_same_scaled_gradients(family, mode):
    for contract in ("get_unscaled_gradients", "apply", "minimize"):
        weight = tf.Variable([1.0, 2.0, 4.0], name="weight")
        optimizer = counting(family.sgd(), jit_compile=mode == "jit_compile")

        def step(optimizer=optimizer, weight=weight, contract=contract):
            if contract == "minimize":
                optimizer.minimize(lambda: tf.reduce_sum(weight**2), var_list=[weight])
            elif contract == "apply":
                with tf.GradientTape() as tape:
                    scaled = optimizer.scale_loss(tf.reduce_sum(weight**2))
                optimizer.apply(tape.gradient(scaled, [weight]), [weight])
            else:
                loops.step(optimizer, lambda: tf.reduce_sum(weight**2), [weight])

        traced = {"function": tf.function(step), "compiled": tf.function(step, jit_compile=True)}
        traced.get(mode, step)()
        assert counts_of(optimizer) == {"weight": {column(4): 1, column(5): 1, column(6): 1}}
        report = optimizer.precision_report()
        assert (report.counts.step, report.counts.scale) == (1, 8.0)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_gradients_that_the_caller_changed_or_scale_inside_unscaled_count_times_the_scale(mode):
    weight, other = tf.Variable([1.0, 2.0], name="weight"), tf.Variable(1.0, name="other")
    optimizer = counting(KERAS_3.sgd())

    def step():
        gradients = loops.unscaled_gradients(optimizer, lambda: tf.reduce_sum(weight**2) + other, [weight, other])
        gradients[0] = tf.clip_by_value(gradients[0], -1.0, 1.0)
        optimizer.apply_gradients(zip(gradients, [weight, other]))

    (step if mode == "eager" else tf.function(step))()
    assert counts_of(optimizer) == {"weight": {column(3): 2}, "other": {column(3): 1}}
    weight.assign([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = optimizer.scale_inside(lambda: tf.reduce_sum(weight**2))()
    optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
    assert counts_of(optimizer)["weight"] == {column(4): 1, column(5): 1}


@pytest.mark.parametrize("mode", ["eager", "function", "compiled"])
@pytest.mark.parametrize("contract", ["get_unscaled_gradients", "apply"])
def test_two_updates_of_one_scaled_loss_are_counted_with_the_scale_of_that_loss(contract, mode):
    first, second = tf.Variable(1.0, name="first"), tf.Variable(1.0, name="second")
    optimizer = counting(FAMILIES[2].sgd(), dynamic_growth_steps=1)

    def step():
        with tf.GradientTape() as tape:
            scale = optimizer.scale_loss if contract == "apply" else optimizer.get_scaled_loss
            scaled = scale(first + second)
        gradients = tape.gradient(scaled, [first, second])
        if contract == "apply":
            for gradient, variable in zip(gradients, (first, second)):
                optimizer.apply([gradient], [variable])
        else:
            for gradient, variable in zip(optimizer.get_unscaled_gradients(gradients), (first, second)):
                optimizer.apply_gradients([(gradient, variable)])

    traced = {"function": tf.function(step), "compiled": tf.function(step, jit_compile=True)}
    traced.get(mode, step)()
    assert float(optimizer.loss_scale) == 32.0
    assert counts_of(optimizer) == {"second": {column(3): 1}}
    assert optimizer.precision_report().counts.scale == 8.0


def test_sparse_missing_and_wide_gradients_are_counted():
    table, unused = tf.Variable(tf.zeros([3, 2]), name="table"), tf.Variable(1.0, name="unused")
    wide = tf.Variable([1.0], dtype=tf.float64, name="wide")
    optimizer = counting(KERAS_3.sgd())
    optimizer.scale_loss(0.0)
    slices = tf.IndexedSlices(tf.constant([[1.0, 0.0], [2.0, -2.0]]), tf.constant([1, 1]), tf.constant([3, 2]))
    optimizer.apply([slices, None, tf.constant([2.0**-40 * (1 - 2.0**-50)], tf.float64)], [table, unused, wide])
    assert counts_of(optimizer) == {
        "table": {ZEROS: 1, column(0): 1, column(1): 2},
        "unused": {},
        "wide": {column(-41): 1},
    }


def test_each_micro_step_of_an_accumulation_is_a_step_and_the_factor_of_keras_3_belongs_to_the_scale():
    weight = tf.Variable(1.0, name="weight")
    optimizer = counting(KERAS_3.adam(gradient_accumulation_steps=3), every=2, loss_scale_factor=4.0)
    steps = []
    for _ in range(5):
        optimizer.minimize(lambda: weight, [weight])
        steps.append(optimizer.precision_report().step)
    assert steps == [1, 1, 3, 3, 5]
    assert optimizer.precision_report().counts.scale == 32.0
    assert counts_of(optimizer) == {"weight": {column(5): 1}}


def test_in_a_session_the_report_is_read_where_the_session_is_the_default():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=[1.0, 1.0], use_resource=True)
        optimizer = counting(ALL_FAMILIES[3].sgd(), every=3)
        factor = tf.compat.v1.placeholder(tf.float32, [])
        step = optimizer.minimize(tf.reduce_sum(weight * factor), var_list=[weight])
        session.run(tf.compat.v1.global_variables_initializer())
        graph.finalize()
        with pytest.raises(ValueError, match="Take a step first"):
            optimizer.precision_report()
        found = []
        for value in (1.0, np.nan, np.inf, np.inf, 1.0, 2.0):
            if value == 2.0:
                optimizer.count_exponents()
            session.run(step, {factor: value})
            report = optimizer.precision_report()
            found.append((report.step, report.counts.scale, *counts_of(optimizer)["weight"]))
    assert found == [(1, 8.0, column(3))] * 3 + [(4, 2.0, INFINITE)] * 2 + [(6, 1.0, column(1))]
    with graph.as_default(), pytest.raises(RuntimeError, match=r"Call it inside `with session\.as_default\(\):`"):
        optimizer.precision_report()


def test_the_report_before_a_step_in_a_graph_and_without_counts_says_what_to_do():
    optimizer = LossScaleOptimizer(KERAS_3.sgd(), dynamic=False, initial_scale=8, diagnose="exponents")
    with pytest.raises(ValueError, match=r"precision_report\(\) needs a step whose gradients were counted.*Take a st"):
        optimizer.precision_report()
    with pytest.raises(RuntimeError, match=r"precision_report\(\).*Call it outside of tf\.function"):
        tf.function(optimizer.precision_report)()
    for diagnose in (False, True):
        other = LossScaleOptimizer(KERAS_3.sgd(), diagnose=diagnose)
        for method in (other.precision_report, other.count_exponents):
            with pytest.raises(ValueError, match=r'Create it with LossScaleOptimizer\(..., diagnose="exponents"\)'):
                method()
    weight = tf.Variable(1.0, name="weight")
    optimizer.minimize(lambda: weight * np.inf, [weight])
    assert counts_of(optimizer) == {"weight": {INFINITE: 1}}, "counted with a scale that skips no step"
    assert optimizer.gradient_norm is None
    with pytest.raises(ValueError, match=r"Create it with LossScaleOptimizer\(..., diagnose=True\)"):
        optimizer.overflow_report()


@families
def test_a_config_creates_one_without_counts_and_copies_keep_them(family):
    optimizer, weight = counting(family.sgd(), every=7), tf.Variable(1.0, name="weight")
    config = json.loads(json.dumps(optimizer.get_config()["diagnose"]))
    again = LossScaleOptimizer.from_config({**optimizer.get_config(), "diagnose": config})
    assert again.get_config()["diagnose_every"] == 7
    with pytest.raises(ValueError, match="Take a step first"):
        again.precision_report()
    assert "diagnose_every" not in LossScaleOptimizer(family.sgd(), diagnose="exponents").get_config()

    loops.step(optimizer, lambda: weight, [weight])
    copied = copy.deepcopy(optimizer)
    assert counts_of(copied) == counts_of(optimizer) == {"weight": {column(3): 1}}
    copied.count_exponents()
    loops.step(copied, lambda: 2.0 * weight, [weight])
    assert counts_of(copied) == {"weight": {column(4): 1}}
    assert counts_of(optimizer) == {"weight": {column(3): 1}}, "a copy counts in variables of its own"


@pytest.mark.table("exponents-keras3", "True-tf_keras_legacy", "exponents-tf_keras", every=1)
@families
@pytest.mark.parametrize("diagnose", [True, "exponents"])
def test_a_step_that_counts_is_exported_and_trains_in_a_saved_model(family, diagnose, tmp_path):
    class Trained(tf.Module):
        def __init__(self):
            self.weight, self.optimizer = tf.Variable(1.0), LossScaleOptimizer(family.sgd(), diagnose=diagnose)

        @tf.function(input_signature=[])
        def step(self):
            loops.step(self.optimizer, lambda: self.weight, [self.weight])
            return self.weight.read_value()

    trained = Trained()
    trained.step()
    tf.saved_model.save(trained, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert [float(trained.weight), float(loaded.step()), float(loaded.step())] == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("family", ALL_FAMILIES[2:4], ids=["tf_keras_legacy", "tf1"])
@pytest.mark.parametrize("scale", [{}, {"dynamic": False}], ids=["dynamic", "fixed"])
def test_in_a_session_the_operations_of_two_replicas_run_both_counts_before_the_scale_moves(family, scale):
    strategy, value = strategies.get("mirrored_2"), 1.0 if scale else np.inf
    with tf.Graph().as_default(), tf.compat.v1.Session() as session, session.as_default():
        with strategy.scope():
            optimizer = counting(family.sgd(), **scale)
            weight = tf.compat.v1.get_variable("weight", initializer=[1.0], use_resource=True)

        def step():
            optimizer.get_scaled_loss(0.0)
            [gradient] = optimizer.get_unscaled_gradients([tf.constant([value])])
            return optimizer.apply_gradients([(gradient, weight)])

        operations = strategy.experimental_local_results(strategy.run(step))
        session.run(tf.compat.v1.global_variables_initializer())
        for taken, scale_of_loss in ((1, 8.0), (2, 8.0 if scale else 4.0)):
            session.run(operations)
            counts = optimizer.precision_report().counts
            assert (counts.step, counts.counts.sum()) == (taken, 2), "one value on each replica"
            assert counts.scale == scale_of_loss
