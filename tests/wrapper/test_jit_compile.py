"""`LossScaleOptimizer(..., jit_compile=True)`: the same results, and the ways back where XLA cannot compile."""

import copy
import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import loops, numerics
from tests.families import FAMILIES, all_families, families, tf_keras
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.optimizers import Adafactor

KERAS_3 = FAMILIES[0]
SHAPES = [(3,), (3,), (2, 2), (), (9000,)]


def weights(dtype="float32"):
    return [tf.Variable(np.ones(shape, dtype)) for shape in SHAPES]


def trained(inner, mode="function", dtype="float32", contract="get_unscaled_gradients", **options):
    """An optimizer, and its variables after five steps, of which the third overflows."""
    optimizer, variables = LossScaleOptimizer(inner, initial_scale=8, **options), weights(dtype)

    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.cast(factor, dtype) * tf.add_n([tf.reduce_sum(v * v) for v in variables])
            scaled = optimizer.scale_loss(loss) if contract == "apply" else optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, variables)
        if contract == "apply":
            optimizer.apply(gradients, variables)
        else:
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), variables))

    taken = {"eager": step, "function": tf.function(step)}[mode]
    for factor in (0.5, 1.0, float("inf"), 1.0, 0.25):
        taken(tf.constant(factor))
    return optimizer, variables


def assert_same(compiled, plain, tolerance=1e-6):
    (mine, variables), (theirs, others) = compiled, plain
    assert mine.state() == theirs.state()
    for one, other in zip([*variables, *mine.weights], [*others, *theirs.weights], strict=True):
        numerics.assert_close(one.numpy().astype("float64"), other.numpy().astype("float64"), tolerance, 1.0)


INNERS = {
    "clipnorm": lambda keras: keras.optimizers.Adam(0.1, clipnorm=0.5),
    "global_clipnorm": lambda keras: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "ema": lambda keras: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "weight_decay": lambda keras: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "schedule": lambda keras: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "accumulation": lambda keras: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "adafactor": lambda keras: Adafactor(lr=0.1),
}


@pytest.mark.table("keras3-adafactor", every=5)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("keras", [KERAS_3.keras, tf_keras], ids=["keras3", "tf_keras"])
def test_clipping_averages_decay_schedules_and_accumulation_give_the_same_weights(inner, keras):
    if keras is tf_keras and inner in ("accumulation", "adafactor"):
        pytest.skip("of Keras 3")
    make = functools.partial(INNERS[inner], keras)
    assert_same(trained(make(), jit_compile=True), trained(make()))


@pytest.mark.table("get_unscaled_gradients-float32", every=5)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("contract", ["get_unscaled_gradients", "apply"])
def test_gradients_of_every_dtype_give_the_same_weights_by_both_contracts(dtype, contract):
    if dtype == "float16" and not numerics.XLA_HAS_FLOAT16:
        pytest.skip("for this instruction set XLA compiles no float16")
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-6}.get(dtype, 1e-6)
    compiled, plain = (
        trained(KERAS_3.optimizers.SGD(0.125, momentum=0.5), "function", dtype, contract, jit_compile=option)
        for option in (True, False)
    )
    assert_same(compiled, plain, tolerance)
    assert compiled[0].loss_scale.numpy().item() == 4.0


def test_only_the_step_is_compiled():
    optimizer, variable = LossScaleOptimizer(KERAS_3.sgd(), jit_compile=True), tf.Variable([1.0])

    @tf.function
    def step(text, values):  # of any length; XLA has no strings
        factor = tf.strings.to_number(text)
        optimizer.minimize(lambda: factor * tf.reduce_sum(values) * variable, [variable])

    step(tf.constant("2"), tf.constant([0.25, 0.25]))
    step(tf.constant("2"), tf.constant([0.25, 0.25, 0.5]))
    assert variable.numpy().tolist() == [-0.5]
    operations = step.get_concrete_function("2", tf.zeros([3])).graph.get_operations()
    [call] = [each for each in operations if "_XlaMustCompile" in each.node_def.attr]
    assert call.type == "StatefulPartitionedCall" and call.get_attr("_XlaMustCompile")
    # The caller works on no value of a gradient but for the multiplication of the loss and the division.
    assert not [each for each in operations if each.type in ("AssignVariableOp", "If", "IsFinite")]


@all_families
def test_a_fixed_scale_is_compiled_as_well_and_skips_nothing(family):
    optimizer = LossScaleOptimizer(family.sgd(), dynamic=False, initial_scale=8, jit_compile=True)
    variable = tf.Variable([1.0, 2.0])
    step = tf.function(lambda factor: loops.step(optimizer, lambda: factor * tf.reduce_sum(variable), [variable]))
    for _ in range(2):
        step(tf.constant(1.0))
    assert variable.numpy().tolist() == [0.0, 1.0]
    graph = step.get_concrete_function(tf.constant(1.0)).graph.as_graph_def()
    assert any(function.attr["_XlaMustCompile"].b for function in graph.library.function)
    step(tf.constant(float("inf")))
    assert not np.isfinite(variable.numpy()).any()


def test_an_eager_step_is_not_compiled_and_a_warning_says_once_what_to_write(caplog):
    optimizer, variable = LossScaleOptimizer(KERAS_3.sgd(), jit_compile=True), tf.Variable(1.0)
    for _ in range(2):
        loops.step(optimizer, lambda: variable, [variable])
    assert variable.numpy() == 0.0
    [message] = [r.getMessage() for r in caplog.records if "jit_compile" in r.getMessage()]
    assert "@tf.function(jit_compile=True)\n" in message


@all_families
def test_sparse_gradients_are_applied_by_the_plain_step_and_a_warning_says_so_once(family, caplog):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8, jit_compile=True)
    table, dense = tf.Variable([[1.0], [2.0]]), tf.Variable(1.0)

    @tf.function
    def step(factor):
        loops.step(optimizer, lambda: factor * dense + tf.reduce_sum(tf.gather(table, [0])), [table, dense])

    for factor in (1.0, 1.0, float("inf")):
        step(tf.constant(factor))
    assert table.numpy().tolist() == [[0.0], [2.0]]
    assert optimizer.loss_scale.numpy().item() == 4.0
    [message] = [r.getMessage() for r in caplog.records if "jit_compile" in r.getMessage()]
    assert "sparse" in message


def test_inside_a_function_that_xla_compiles_nothing_is_warned_of(caplog):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), jit_compile=True)
    table = tf.Variable(tf.ones([4, 2]))

    @tf.function(jit_compile=True)
    def step():
        optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, [1, 1])), [table])

    with caplog.at_level("WARNING", logger="absl"):
        step()
    assert "takes steps that are not compiled" not in caplog.text
    np.testing.assert_array_equal(table[:2], [[1, 1], [0, 0]])


def test_a_legacy_graph_is_refused_before_anything_is_changed():
    with tf.Graph().as_default():
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        with pytest.raises(ValueError, match="`jit_compile` cannot be True in a TF1 graph"):
            LossScaleOptimizer(inner, jit_compile=True)
        LossScaleOptimizer(inner)


def test_an_operation_that_xla_lacks_is_named_with_the_option_and_nothing_is_changed():
    class Printing(KERAS_3.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            tf.numpy_function(lambda: None, [], [])
            super().update_step(gradient, variable, learning_rate)

    optimizer, variable = LossScaleOptimizer(Printing(0.5), initial_scale=8, jit_compile=True), tf.Variable(1.0)
    step = functools.partial(loops.step, optimizer, lambda: 2.0 * variable, [variable])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)PyFunc.*LossScaleOptimizer_with_jit_compile"):
        tf.function(step)()
    assert variable.numpy() == 1.0
    assert optimizer.iterations.numpy() == 0
    assert optimizer.state()["total_steps"] == 0


def test_step_hooks_are_called_by_steps_that_are_not_compiled(caplog):
    inner, variable, calls = Adafactor(lr=0.5), tf.Variable(1.0), []
    optimizer = LossScaleOptimizer(inner, jit_compile=True)
    inner.register_step_post_hook(lambda *given: calls.append(given[0] is inner))
    tf.function(lambda: loops.step(optimizer, lambda: 2.0 * variable, [variable]))()
    assert calls == [True]
    assert any("step hooks are Python functions" in record.getMessage() for record in caplog.records)


@families
def test_a_learning_rate_that_is_a_function_is_called_as_often_as_without(family):
    def left(jit_compile):
        rates = iter([0.5, 0.25, 0.125, 0.0625])
        optimizer = LossScaleOptimizer(family.optimizers.SGD(lambda: next(rates)), jit_compile=jit_compile)
        variable = tf.Variable(1.0)
        for _ in range(2):
            loops.step(optimizer, lambda: variable, [variable])
        return [variable.numpy().item(), *rates]

    assert left(True) == left(False)


def test_the_overflow_report_the_norm_and_a_copy_are_the_same_and_a_stall_is_reported_when_the_scale_is_read():
    (compiled, _), (plain, _) = (
        trained(KERAS_3.adam(), diagnose=True, on_stall="raise", stall_steps=5, jit_compile=option)
        for option in (True, False)
    )
    assert compiled.overflow_report() == plain.overflow_report()
    numerics.assert_close(compiled.gradient_norm.numpy(), plain.gradient_norm.numpy(), 1e-5)
    assert copy.deepcopy(compiled).state() == compiled.state()
    variable = tf.Variable(1.0)
    compiled = LossScaleOptimizer(KERAS_3.sgd(), on_stall="raise", stall_steps=5, jit_compile=True)
    step = tf.function(lambda: loops.step(compiled, lambda: variable * float("nan"), [variable]))
    for _ in range(6):
        step()
    with pytest.raises(FloatingPointError, match="6 steps"):
        _ = compiled.loss_scale
