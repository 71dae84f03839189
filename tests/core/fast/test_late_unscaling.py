"""Gradients unscaled in the branch that applies them: the same bits, and large ones one at a time."""

import numpy as np
import pytest
import tensorflow as tf

from tf_lossscale import LossScaleOptimizer
from tf_lossscale.core import scaling
from tf_lossscale.core.fast import branching, packing


@pytest.fixture(autouse=True)
def nothing_is_small(request, monkeypatch):
    """Gradients of a few values count as large ones, unless a test is about small ones."""
    if "small" not in request.node.name:
        monkeypatch.setattr(packing, "_SMALL", 1)
        monkeypatch.setattr(packing, "_TOGETHER", 1)
        monkeypatch.setattr(packing, "_HELD", 1)


def graph_of(function):
    return tf.function(function, autograph=False).get_concrete_function().graph


def test_small_gradients_are_taken_in_as_their_stack():
    def look():
        a, b, c = scaling.unscale([tf.ones([2]), tf.ones([2]), tf.ones([2])], tf.constant(2.0))
        other = tf.ones([2])
        assert len(packing.Packed([c, a, b]).tensors) == 1
        assert len(packing.Packed([c, None, a, other, b]).tensors) == 2
        # Part of a stack, or one of it twice, is taken as it is.
        assert len(packing.Packed([a, b]).tensors) == 2
        assert len(packing.Packed([a, b, c, a]).tensors) == 4
        return tf.constant(0)

    graph_of(look)


def test_small_gradients_come_back_in_the_order_they_were_given_in():
    @tf.function
    def turned(*values):
        a, b, c = scaling.unscale(values, tf.constant(2.0))
        packed = packing.Packed([c, None, a, b])
        assert len(packed.tensors) == 1
        return [part for part in packed.unpacked() if part is not None]

    assert [part.numpy().item() for part in turned(*(tf.constant([x]) for x in (2.0, 4.0, 6.0)))] == [3.0, 1.0, 2.0]


def test_two_optimizers_that_share_one_call_of_unscale_each_apply_their_own_small_gradients():
    first, second = (LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=4) for _ in range(2))
    weights = [tf.Variable([0.0]) for _ in range(3)]

    @tf.function
    def step(x):
        first.get_scaled_loss(1.0)
        second.get_scaled_loss(1.0)
        a, b, c = first.get_unscaled_gradients([4 * x, 8 * x, 12 * x])
        first.apply_gradients(zip([b, a], weights))
        second.get_unscaled_gradients([])
        second.apply_gradients([(c, weights[2])])

    step(tf.constant([1.0]))
    assert [weight.numpy().item() for weight in weights] == [-2.0, -1.0, -3.0]


def waiting_unscalings(optimizer, count=3):
    """The unscalings in the branches that wait for something."""
    weights = [tf.Variable(tf.zeros([4])) for _ in range(count)]
    held = [tf.Variable(tf.ones([4])) for _ in range(count)]

    @tf.function
    def step():
        optimizer.get_scaled_loss(1.0)
        gradients = optimizer.get_unscaled_gradients([tf.convert_to_tensor(h) for h in held])
        optimizer.apply_gradients(zip(gradients, weights))

    step()
    assert all(np.all(weight.numpy() != 0) for weight in weights)
    bodies = step.get_concrete_function().graph.as_graph_def().library.function
    found = [n for f in bodies for n in f.node_def if n.op == "RealDiv"]
    return [n for n in found if any(i.startswith("^") for i in n.input)]


def test_a_large_gradient_is_unscaled_only_when_the_one_before_was_used():
    assert len(waiting_unscalings(LossScaleOptimizer(tf.keras.optimizers.SGD(0.5)))) == 2


def test_large_gradients_that_are_clipped_by_their_common_norm_are_unscaled_all_at_once():
    assert waiting_unscalings(LossScaleOptimizer(tf.keras.optimizers.SGD(0.5, global_clipnorm=1.0))) == []


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "overflow"])
def test_where_xla_compiles_for_the_cpu_a_step_is_a_loop_of_one_round_or_none(bad):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(0.5), initial_scale=8)
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    optimizer.build(weights)

    @tf.function(jit_compile=True)
    def step(*gradients):
        optimizer.apply(gradients, weights)

    gradients = [tf.constant([8.0, float("nan") if bad else 8.0]), tf.constant([8.0])]
    before = [variable.numpy().tolist() for variable in (*weights, *optimizer.inner_optimizer.variables)]
    step(*gradients)
    after = [variable.numpy().tolist() for variable in (*weights, *optimizer.inner_optimizer.variables)]
    assert (after == before) is bad
    assert optimizer.loss_scale.numpy().item() == (4.0 if bad else 8.0)
    operations = step.get_concrete_function(*gradients).graph.get_operations()
    rounds = [op for op in operations if op.type in ("While", "StatelessWhile")]
    assert len(rounds) == (2 if branching._only_the_cpu() else 0)


@pytest.mark.parametrize("scaled", [False, True], ids=["apply_gradients", "apply"])
def test_a_compiled_loop_applies_gradients_that_are_no_whole_numbers(scaled):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=8)
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0, 5.0])]
    optimizer.build(weights)

    @tf.function(jit_compile=True)
    def step(*gradients):
        if scaled:
            optimizer.apply([8.0 * gradient for gradient in gradients], weights)
        else:
            optimizer.apply_gradients(zip(gradients, weights))

    step(tf.constant([0.75, -0.75]), tf.constant([1.5, -0.25, 0.25]))
    assert [weight.numpy().tolist() for weight in weights] == [[0.25, 2.75], [1.5, 4.25, 4.75]]


@pytest.mark.parametrize("compiled", [False, True], ids=["function", "compiled"])
def test_a_gradient_that_only_a_scale_below_one_makes_infinite_skips_the_step(compiled):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=0.5, min_scale=0.125)
    weight = tf.Variable([1.0, 2.0])
    optimizer.build([weight])
    step = tf.function(lambda gradient: optimizer.apply([gradient], [weight]), jit_compile=compiled)
    step(tf.constant([3e38, 1.0]))
    assert weight.numpy().tolist() == [1.0, 2.0]
    assert optimizer.loss_scale.numpy() == 0.25


def test_in_a_loop_nothing_of_a_large_gradient_is_computed_ahead():
    if not branching._only_the_cpu():
        pytest.skip("only compiled for the CPU a step is a loop")
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(), initial_scale=8)
    weights = [tf.Variable(tf.zeros([300, 1000]))]
    optimizer.build(weights)
    step = tf.function(lambda g: optimizer.apply_gradients([(g, weights[0])]), jit_compile=True)
    program = step.experimental_get_compiler_ir(tf.ones([300, 1000]))(stage="optimized_hlo")
    assert "f32[300,1000]{1,0} fusion(" in program
    assert "f32[300,1000]{1,0} fusion(" not in program[program.index("\nENTRY") :]
