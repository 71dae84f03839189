"""PyTorch's `step` and `zero_grad`, as recorded."""

import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.recorded import LIBRARIES, PROBES, ones, set_gradient


def test_step_returns_what_the_closure_does_and_without_one_nothing(make):
    variable = ones()
    optimizer = make([variable])
    assert float(optimizer.step(lambda: tf.reduce_sum(variable))) == PROBES["step(closure) returns loss"]["ok"]
    assert optimizer.step() is None
    assert optimizer.step(closure=lambda: 5) == 5


def test_three_steps_with_a_closure_go_as_recorded(make):
    variable = ones()
    optimizer = make([variable], lr=0.1)
    for loss, values in PROBES["closure with backward, 3 steps"]["ok"]:
        np.testing.assert_allclose(float(optimizer.step(lambda: tf.reduce_sum(variable**2))), loss, rtol=2e-6)
        np.testing.assert_allclose(variable, values, rtol=2e-6)


def test_zero_grad_forgets_gradients_or_makes_them_zeros(make):
    variable = ones()
    optimizer = make([variable])
    set_gradient(variable)
    optimizer.zero_grad(set_to_none=False)
    assert variable.grad.numpy().tolist() == PROBES["zero_grad(set_to_none=False)"]["ok"]
    optimizer.zero_grad()
    assert variable.grad is None
    optimizer.step()
    np.testing.assert_array_equal(variable, tf.ones([2, 3]))


def test_a_variable_as_learning_rate_is_read_on_every_step(make):
    rate, variable = tf.Variable(0.1), ones()
    optimizer = make([variable], lr=rate)
    for i, expected in enumerate(PROBES["tensor lr is read every step"]["ok"]):
        if i == 2:
            rate.assign(0.001)
        set_gradient(variable)
        optimizer.step()
        np.testing.assert_allclose(variable, expected, rtol=2e-6)


def test_a_learning_rate_that_is_set_in_the_group_before_every_step_goes_as_recorded(make):
    variable = ones()
    optimizer = make([variable], lr=0.5)
    group = optimizer.param_groups[0]
    group["initial_lr"] = group["lr"]
    for i, (rate, expected, extra) in enumerate(PROBES["LambdaLR"]["ok"]):
        group["lr"] = group["initial_lr"] * 0.5**i
        assert group["lr"] == rate == optimizer.lr == float(optimizer.learning_rate)
        set_gradient(variable)
        optimizer.step()
        np.testing.assert_allclose(variable, expected, rtol=2e-6)
        assert {"initial_lr": group["initial_lr"]} == extra


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [[2], [2, 2]])
def test_a_second_moment_stays_when_the_weight_of_the_new_gradient_underflows(make, shape, dtype):
    variable = tf.Variable(tf.ones(shape, dtype))
    optimizer = make([variable], beta2_decay=-2000.0)
    for gradient in (1.0, 3.0):
        variable.grad = tf.fill(shape, tf.constant(gradient, dtype))
        optimizer.step()
    for name, value in optimizer.state_dict()["state"][0].items():
        np.testing.assert_array_equal(value, 2.0 if name == "step" else np.ones(value.shape))


def test_a_function_that_returns_a_python_number_is_as_exact_as_the_number():
    values = []
    for rate in (0.1, lambda: 0.1):
        variable = tf.Variable([1.0, 2.0], dtype=tf.float64)
        optimizer = LIBRARIES["keras3"]([variable], lr=rate)
        set_gradient(variable)
        optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
        values.append(variable.numpy())
    np.testing.assert_array_equal(*values)


def test_a_sparse_gradient_is_densified_once_its_repeated_rows_summed(make):
    assert PROBES["sparse gradient"]["error"]["type"] == "RuntimeError"
    rows, whole = ones(), ones()
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0, 3.0], [0.5, 0.5, 0.5]]), tf.constant([1, 1]), tf.constant([2, 3]))
    for variable, gradient in ((rows, slices), (whole, tf.constant([[0.0] * 3, [1.5, 2.5, 3.5]]))):
        optimizer = make([variable], lr=0.1)
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(rows, whole)
    assert not np.allclose(rows, tf.ones([2, 3]))
