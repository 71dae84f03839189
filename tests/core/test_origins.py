"""What a tensor in a graph is multiplied by: the powers of a loss scale among its factors."""

import math

import pytest
import tensorflow as tf

from tf_lossscale import DynamicLossScale, FixedLossScale
from tf_lossscale.core import graphs, origins


def power_of(compute, scale=None):
    """The power of the scale in a result of `compute`, a function of a scaled and of an unscaled tensor."""
    scale, powers = scale or FixedLossScale(8.0), []

    @tf.function
    def function(x):
        result = compute(scale.scale(x), x)
        found = origins.origin(result)
        powers.append(None if found is None else sum(found.values()))
        return result

    function.get_concrete_function(tf.TensorSpec([2, 2]))
    return powers[0]


def called(s, x):
    return tf.function(lambda g: g * 2.0)(s)


def unscaled_in_a_function(s, x):
    return tf.function(lambda g, scale: g / scale)(s, tf.reduce_mean(s / x))


def of_two_identities(s, x):
    return tf.custom_gradient(lambda a, b: ([a, b], lambda u, v: [u, v]))(s, 3.0 * s)[1]


def clipped_in_proportion(s, x):
    return tf.clip_by_global_norm([s], tf.reduce_mean(s / x))[0][0]


def in_a_branch(s, x):
    return tf.cond(x[0, 0] > 0, lambda: s * 2.0, lambda: tf.zeros_like(s))


def in_a_switch(s, x):
    return tf.switch_case(tf.cast(x[0, 0], tf.int32), [lambda: s, lambda: s * 3.0])


def in_a_loop(s, x):
    total = tf.zeros_like(s)
    for _ in tf.range(3):
        total += s
    return total


def in_a_loop_with_a_list(s, x):
    parts = tf.TensorArray(tf.float32, 3)
    for i in tf.range(3):
        parts = parts.write(i, s)
    return tf.reduce_sum(parts.stack(), 0)


def of_a_function(s, x):
    with tf.GradientTape() as tape:
        tape.watch(s)
        result = tf.function(lambda s: tf.nn.relu(s) * x)(s)
    return tape.gradient(result, s, output_gradients=s)


def of_a_custom_gradient_of_complex_numbers(s, x):
    return tf.math.real(tf.complex(2.0 * s, 3.0 * s) * tf.complex(x, x))


def of_an_operation_that_adds_or_multiplies(s, x):
    zero, peephole = tf.zeros_like(x), tf.zeros([2])
    cell = {"cs_prev": zero, "h_prev": zero, "w": tf.ones([4, 8]), "b": tf.zeros([8])}
    cell |= {f"wc{gate}": peephole for gate in "ifo"}
    outputs = tf.raw_ops.LSTMBlockCell(x=x, **cell)
    return tf.raw_ops.LSTMBlockCellGrad(
        **{"x": x, **cell, **{name: getattr(outputs, name) for name in ("i", "cs", "f", "o", "ci", "co")}},
        cs_grad=s,
        h_grad=2.0 * s,
        use_peephole=False,
    ).dicfo


def of_a_python_function(s, x):
    return tf.ensure_shape(tf.py_function(lambda g: g * 2.0, [s], tf.float32), [2, 2])


def of_convolutions(s, x):
    image = tf.reshape(x, [1, 2, 2, 1])
    with tf.GradientTape() as tape:
        tape.watch(image)
        hidden = tf.nn.relu(tf.nn.conv2d(image, tf.ones([1, 1, 1, 3]), 1, "SAME"))
        loss = tf.reduce_mean(tf.nn.max_pool2d(hidden, 2, 1, "SAME")) * tf.reduce_mean(s / x)
    return tape.gradient(loss, image)


@pytest.mark.parametrize(
    ("compute", "power"),
    [
        (lambda s, x: x * 2.0, None),
        (lambda s, x: s, 1),
        (lambda s, x: -tf.cast(s, tf.float16)[0] * tf.cast(x, tf.float16), 1),
        (lambda s, x: s / tf.reduce_mean(s), 0),
        (lambda s, x: s * s, 2),
        (lambda s, x: s * tf.linalg.global_norm([s, 2.0 * s]), 2),
        (lambda s, x: tf.sign(s), 0),
        (lambda s, x: tf.matmul(s, x) + 1.0, 1),
        (lambda s, x: tf.concat([s, tf.zeros_like(s)], 0), 1),
        (lambda s, x: tf.where(tf.math.is_finite(s), s, 0.0), 1),
        (lambda s, x: tf.gather(s, [0]), 1),
        (lambda s, x: tf.clip_by_global_norm([s], 1.0)[0][0], math.nan),
        (lambda s, x: tf.tanh(s), math.nan),
        (lambda s, x: s + s / tf.reduce_mean(s), math.nan),
        (lambda s, x: x / tf.reduce_mean(s), -1),
        (lambda s, x: s * (1.0 / tf.reduce_mean(s)), 0),
        (lambda s, x: s / tf.reduce_mean(s) / tf.reduce_mean(s), math.nan),
        *(
            (each, 1)
            for each in (called, of_two_identities, in_a_branch, in_a_switch, in_a_loop, in_a_loop_with_a_list)
        ),
        *((each, power) for each, power in ((unscaled_in_a_function, 0), (of_a_function, 1), (of_convolutions, 1))),
        (of_a_custom_gradient_of_complex_numbers, 1),
        (of_an_operation_that_adds_or_multiplies, None),
        (of_a_python_function, None),
        (lambda s, x: tf.linalg.set_diag(s, tf.linalg.diag_part(s)), 1),
        (lambda s, x: tf.linalg.solve(s, s), 0),
        (lambda s, x: tf.linalg.inv(s) @ s, 0),
        (lambda s, x: tf.minimum(s, 0.0), 1),
        (lambda s, x: tf.minimum(s, 1.0), math.nan),
    ],
)
def test_powers_of_a_loss_scale(compute, power):
    found = power_of(compute)
    assert found == power or (isinstance(power, float) and math.isnan(found) and math.isnan(power))


def test_a_scale_that_the_user_reads_is_a_factor():
    scale = DynamicLossScale(8.0)
    assert power_of(lambda s, x: x * scale(), scale) == 1
    assert power_of(lambda s, x: s / scale(), scale) == 0


def test_factors_before_and_after_a_step_are_different_units():
    scale, units = DynamicLossScale(8.0), []

    @tf.function
    def function(x):
        before = [scale.scale(x), scale.scale(2.0 * x)]
        scale.step([x], lambda gradients: None)
        for sum_of in ([before[0], before[1]], [before[0], scale.scale(x)]):
            units.append(origins.units_of(origins.origin(tf.add_n(sum_of)), scale))

    function(tf.constant(1.0))
    assert [len(each) for each in units] == [1, 2]


def called_in_a_loop(step, x):
    for _ in tf.range(tf.cast(x, tf.int32)):
        step()


@pytest.mark.parametrize(
    "call",
    [
        lambda step, x: step(),
        lambda step, x: tf.function(step)(),
        lambda step, x: tf.cond(x > 0.0, step, lambda: False),
        called_in_a_loop,
    ],
    ids=["called", "called in a function", "in a branch", "in a loop"],
)
def test_a_function_that_was_traced_before_ends_a_unit_when_it_is_called(call):
    scale = DynamicLossScale(8.0, dynamic_growth_steps=1)
    step = tf.function(lambda: scale.step([tf.constant(1.0)], lambda gradients: None))
    step()

    @tf.function
    def function(x, adds=False):
        before = scale.scale(x)
        call(step, x)
        after = scale.scale(x)
        return scale.unscale([before + after]) if adds else [*scale.unscale([before]), *scale.unscale([after])]

    assert [each.numpy() for each in function(tf.constant(3.0))] == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="of several losses"):
        function(tf.constant(3.0), adds=True)


def test_a_gradient_of_losses_before_and_after_a_step_is_refused():
    scale = DynamicLossScale(8.0)

    @tf.function
    def function(x):
        before = scale.scale(x)
        scale.step([x], lambda gradients: None)
        return scale.unscale([before + scale.scale(x)])

    with pytest.raises(RuntimeError, match="of several losses, and a step between these losses"):
        function(tf.constant(1.0))


def test_gradients_that_are_computed_several_losses_ahead_are_divided_by_the_factors_of_their_losses():
    scale, weight, ahead = DynamicLossScale(8.0, dynamic_growth_steps=1), tf.Variable(1.0), []
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = scale.scale(3.0 * weight)
        ahead.append(tape.gradient(loss, weight))
        scale.step([tf.constant(1.0)], lambda gradients: None)
    assert [scale.unscale([gradient])[0].numpy().item() for gradient in ahead] == [3.0] * 4


def test_an_eager_gradient_of_a_function_is_divided_by_the_scale_before_later_steps():
    scale, weight = DynamicLossScale(8.0, dynamic_growth_steps=1), tf.Variable(1.0)

    @tf.function
    def scaled_gradient():
        with tf.GradientTape() as tape:
            loss = scale.scale(3.0 * weight)
        return tape.gradient(loss, weight)

    for _ in range(2):
        gradient = scaled_gradient()
        scale.step([tf.constant(1.0)], lambda gradients: None)
        assert scale.unscale([gradient])[0].numpy() == 3.0


def test_tensors_that_are_created_later_have_larger_numbers():
    births = [graphs.birth(tf.constant(float(i)) * 2.0) for i in range(100)]
    assert births == sorted(set(births))
    assert tf.function(lambda: graphs.birth(tf.constant(1.0)) is None)()
