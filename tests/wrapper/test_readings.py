"""The state as plain numbers, and the report of which gradients overflowed."""

import re

import numpy as np
import pytest
import sonnet
import tensorflow as tf

from tests import strategies
from tests.cases import combinations
from tests.families import ALL_FAMILIES, FAMILIES, families
from tf_lossscale import LossScaleOptimizer, legacy

INF, NAN = np.inf, np.nan


def stepper(optimizer, variables, call="eager"):
    """A function that takes a step with these gradients, by either contract's shortest way."""

    def step(*gradients):
        optimizer.apply_gradients(zip(gradients, variables))

    function = tf.function(step, jit_compile=call == "compiled") if call != "eager" else step
    return lambda *gradients: function(*[tf.constant(g, tf.float32) for g in gradients])


CALLS = [*((family, call) for family in ALL_FAMILIES for call in ("eager", "function")), (FAMILIES[0], "compiled")]
calls = pytest.mark.parametrize(("family", "call"), CALLS, ids=[f"{family.name}-{call}" for family, call in CALLS])
some_calls = pytest.mark.parametrize(
    ("family", "call"), combinations(CALLS, usual=["keras3-function", "tf_keras-eager", "tf1-eager"])
)


@calls
def test_the_state_is_plain_numbers_that_follow_each_step(family, call):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8, dynamic_growth_steps=3, hysteresis=2)
    step = stepper(optimizer, [tf.Variable(0.0)], call)
    for gradient in (1.0, 1.0, INF, NAN, INF):
        step(gradient)
    state = optimizer.state()
    assert state == {
        "loss_scale": 4.0,
        "dynamic_counter": 0,
        "bad_steps": 1,
        "skipped_steps": 3,
        "skipped_in_a_row": 3,
        "total_steps": 5,
    }
    assert [type(value) for value in state.values()] == [float] + [int] * 5
    step(1.0)
    after = optimizer.state()
    assert (after["dynamic_counter"], after["skipped_in_a_row"], after["total_steps"]) == (1, 0, 6)


def test_a_state_of_a_fixed_scale_is_the_scale_and_fits_only_the_same():
    fixed = LossScaleOptimizer(tf.keras.optimizers.SGD(), dynamic=False, initial_scale=8)
    assert fixed.state() == {"loss_scale": 8.0}
    assert (fixed.last_step_skipped, fixed.skipped_steps, fixed.dynamic_counter) == (False, 0, None)
    fixed.set_state({"loss_scale": 8.0})
    with pytest.raises(ValueError, match=r"fixed at 8, but `state` has the loss scale 16\.0"):
        fixed.set_state({"loss_scale": 16.0})


def test_the_largest_counts_are_set_as_they_are_and_those_that_an_older_state_lacks_are_zero():
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    state = {**optimizer.state(), "total_steps": 2**63 - 1, "skipped_steps": 2**62 + 1}
    optimizer.set_state({**state, "skipped_in_a_row": 1})
    assert optimizer.state() == {**state, "skipped_in_a_row": 1}
    assert bool(optimizer.last_step_skipped)
    optimizer.set_state({"loss_scale": 4.0, "dynamic_counter": 7})
    state = optimizer.state()
    assert (state["loss_scale"], state["dynamic_counter"]) == (4.0, 7)
    assert state["skipped_steps"] == state["total_steps"] == 0


GOOD = {"loss_scale": 4.0, "dynamic_counter": 1}


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (1024.0, TypeError, "`state` must be a dict that state"),
        ({"loss_scale": 4.0}, ValueError, "must have the keys"),
        ({**GOOD, "scale": 2}, ValueError, "must have the keys"),
        ({**GOOD, "loss_scale": 0.0}, ValueError, "`loss_scale` must be a finite float32 number"),
        ({**GOOD, "loss_scale": 10**400}, ValueError, "`loss_scale` must be a finite float32 number"),
        ({**GOOD, "loss_scale": "4"}, TypeError, "`loss_scale` must be a number"),
        ({**GOOD, "dynamic_counter": -1}, ValueError, "`dynamic_counter` must be a whole number that is at"),
        ({**GOOD, "dynamic_counter": 10**400}, ValueError, "`dynamic_counter` must be below"),
        ({**GOOD, "dynamic_counter": np.True_}, TypeError, "`dynamic_counter` must be a number"),
        ({**GOOD, "total_steps": 0.5}, ValueError, "`total_steps` must be a whole"),
        ({**GOOD, "total_steps": 2**63}, ValueError, r"`total_steps` must be below 2\*\*63"),
    ],
)
def test_a_bad_state_is_refused_and_sets_nothing(state, error, text):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    before = optimizer.state()
    with pytest.raises(error, match=text):
        optimizer.set_state(state)
    assert optimizer.state() == before


@pytest.mark.parametrize("name", ["loss_scale", "dynamic_counter", "skipped_steps"])
def test_a_reading_that_is_assigned_is_refused_with_the_call_that_sets_it(name):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
    state = optimizer.state()
    with pytest.raises(AttributeError, match=f"`{name}` cannot be set as an attribute") as caught:
        setattr(optimizer, name, 2.0)
    assert optimizer.state() == state
    exec(re.search(r"optimizer\.set_state\(.*\)", str(caught.value)).group().replace("2.0", "2"))
    assert optimizer.state() == {**state, name: 2}


def test_a_count_that_the_variables_of_contrib_cannot_hold_sets_nothing():
    manager = legacy.ExponentialUpdateLossScaleManager(8.0, 100)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=manager)
    before = optimizer.state()
    with pytest.raises(ValueError, match="`dynamic_counter` must be at most 2147483647, but got: 2147483648"):
        optimizer.set_state({"loss_scale": 64.0, "dynamic_counter": 2**31})
    assert optimizer.state() == before


def test_the_state_is_not_read_while_a_graph_is_built():
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), diagnose=True)
    for read in (optimizer.state, optimizer.overflow_report, lambda: optimizer.set_state({})):
        with pytest.raises(RuntimeError, match=r"Call it outside of tf\.function"):
            tf.function(read)()


@some_calls
def test_the_report_names_the_variables_that_overflowed_how_often_when_and_how(family, call):
    variables = [tf.Variable([1.0, 1.0], name="kernel"), tf.Variable(1.0, name="bias"), tf.Variable(1.0, name="gamma")]
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8, diagnose=True)
    step = stepper(optimizer, variables, call)
    assert repr(optimizer.overflow_report()) == "No gradient was infinite or NaN."
    for of_kernel, of_bias in (([1, 1], 1), ([1, INF], 1), ([1, -INF], NAN), ([1, 1], 1), ([INF, NAN], 1), ([1, 1], 1)):
        step(of_kernel, of_bias, 1.0)
    report = optimizer.overflow_report()
    rows = [(row.variable, row.steps, row.last_step, row.kind) for row in report]
    assert rows == [("kernel", 3, 5, "inf, NaN"), ("bias", 1, 3, "NaN")]
    assert [(row.infinite_steps, row.nan_steps) for row in report] == [(2, 1), (0, 1)]
    assert repr(report).splitlines()[1] == "kernel        3          5  inf, NaN"


@some_calls
def test_a_variable_that_two_steps_train_with_other_variables_is_reported_with_the_overflows_of_both(family, call):
    shared, generator, critic = (tf.Variable(1.0, name=name) for name in ("shared", "head", "head"))
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=64, diagnose=True)
    optimizer.build([shared, generator, critic])
    first, second = (stepper(optimizer, variables, call) for variables in ([shared, generator], [shared, critic]))
    for step, *gradients in ((first, INF, 1), (first, NAN, 1), (second, INF, INF), (first, INF, 1), (second, 1, INF)):
        step(*gradients)
    report = optimizer.overflow_report()
    rows = [(row.variable, row.steps, row.last_step, row.infinite_steps, row.nan_steps) for row in report]
    assert rows == [("shared", 4, 4, 3, 1), ("head_1", 2, 5, 2, 0)], "head_1 is the critic's"


@families
def test_nothing_is_noted_when_it_is_off_and_the_report_says_how_to_turn_it_on(family):
    optimizer = LossScaleOptimizer(family.sgd(), diagnose=True)
    assert LossScaleOptimizer.from_config(optimizer.get_config()).overflow_report() == ()
    with pytest.raises(ValueError, match=r"Create it with LossScaleOptimizer\(..., diagnose=True\)"):
        LossScaleOptimizer(family.sgd()).overflow_report()


def test_sparse_missing_and_half_gradients_are_diagnosed():
    table, unused, half = tf.Variable(tf.zeros([3, 2])), tf.Variable(1.0, name="unused"), tf.Variable([1.0, 1.0])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), diagnose=True)

    def apply(rows, values):
        slices = tf.IndexedSlices(tf.constant(rows), tf.constant([1, 1]), tf.constant([3, 2]))
        gradients = [slices, None, tf.constant(values, tf.float16)]
        optimizer.apply_gradients(zip(gradients, [table, unused, half]))

    huge = [[3e38, 0.0], [3e38, 0.0]]
    apply(huge, [300.0, 400.0])  # each row is finite, the sum of the two is not
    apply([[0.0, 0.0], [0.0, 0.0]], [300.0, 400.0])  # the squares overflow float16
    apply([[0.0, 0.0], [NAN, 0.0]], [INF, 0.0])
    rows = [(row.variable, row.steps, row.last_step, row.kind) for row in optimizer.overflow_report()]
    assert rows == [("Variable", 2, 3, "inf, NaN"), ("Variable_1", 1, 3, "inf")]


def test_a_model_is_reported_by_the_paths_of_its_variables():
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((2,)), layers.Dense(1, name="head")])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), diagnose=True)
    model.compile(optimizer, "mse")
    model.fit(np.full((2, 2), np.inf), np.zeros((2, 1)), verbose=0)
    names = [row.variable.removeprefix(f"{model.name}/") for row in optimizer.overflow_report()]
    assert names == ["head/kernel", "head/bias"]


def test_in_a_session_the_report_is_kept_though_only_global_variables_are_initialized():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=1.0, use_resource=True)
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        optimizer = LossScaleOptimizer(inner, diagnose=True)
        gradient = tf.compat.v1.placeholder(tf.float32, [])
        step = optimizer.apply_gradients([(gradient, weight)])
        session.run(tf.compat.v1.global_variables_initializer())
        for value in (1.0, INF, NAN, 1.0, INF):
            session.run(step, {gradient: value})
        tables = [v for v in graph.get_collection("local_variables") if v.op.name == "table_0"]
        np.testing.assert_array_equal(session.run(tables[0]), [[3, 5, 2, 1]])


def test_checkpoints_are_those_of_an_optimizer_that_records_nothing(tmp_path):
    plain, recording = (LossScaleOptimizer(tf.keras.optimizers.SGD(), diagnose=each) for each in (False, True))
    paths = []
    for optimizer, name in ((recording, "recording"), (plain, "plain")):
        stepper(optimizer, [tf.Variable(1.0)])(INF)
        paths.append(tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / name)))
    assert tf.train.list_variables(paths[0]) == tf.train.list_variables(paths[1])
    tf.train.Checkpoint(optimizer=recording).read(paths[1]).assert_consumed()
    assert recording.overflow_report()[0].steps == 1, "counted since this object was made"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_legacy_step_without_gradients_records_nothing(compiled):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(FAMILIES[2].sgd(), diagnose=True)

    def step():
        optimizer.apply_gradients([])

    (tf.function(step) if compiled else step)()
    assert not optimizer.overflow_report()
    optimizer.minimize(lambda: weight**2, [weight])
    assert weight.numpy() == 0.0


@pytest.mark.parametrize(
    ("family", "where"),
    combinations(
        ALL_FAMILIES,
        ["eager", "function"],
        usual=["keras3-function", "tf_keras-eager", "tf_keras_legacy-function", "tf1-eager", "sonnet-function"],
    ),
)
def test_an_if_on_the_last_step_tells_skipped_from_applied_steps_on_and_across_replicas(family, where):
    strategy = strategies.get("mirrored_2")
    if family.name == "sonnet":  # refuses other strategies
        one_device = tf.distribute.ReductionToOneDevice()
        strategy = sonnet.distribute.Replicator(["cpu:0", "cpu:1"], cross_device_ops=one_device)
    with strategy.scope():
        variable = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(family.adam(), initial_scale=8)

    def on_replica(gradient):
        optimizer.apply_gradients([(tf.identity(gradient), variable)])
        return tf.constant("skipped") if optimizer.last_step_skipped else tf.constant("applied")

    def step(gradient):
        inside = strategy.run(on_replica, args=(gradient,))
        return inside, tf.constant("skipped") if optimizer.last_step_skipped else tf.constant("applied")

    step, said = tf.function(step) if where == "function" else step, []
    for gradient in (1.0, np.inf, 1.0, np.nan):
        inside, outside = step(tf.constant([gradient]))
        said.append({each.numpy() for each in (*strategy.experimental_local_results(inside), outside)})
    assert said == [{b"applied"}, {b"skipped"}, {b"applied"}, {b"skipped"}]
    assert int(optimizer.skipped_steps) == 2


def test_a_truth_value_that_a_graph_cannot_have_is_an_error():
    with strategies.get("mirrored_2").scope():
        optimizer = LossScaleOptimizer(FAMILIES[1].sgd())
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(lambda: 1 if optimizer.last_step_skipped else 2, autograph=False)()
