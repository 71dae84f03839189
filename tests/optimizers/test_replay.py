"""Adafactor takes the steps that PyTorch's was recorded to take."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests import numerics
from tests.cases import combinations, named
from tests.optimizers import recorded

# Relative to the largest number of a tensor, then or before. An error of a step stays in the parameter and the steps do
# not amplify it: 25 steps add up to a few units in the last place.
FLOAT32, FLOAT64 = 2e-6, 1e-12
# Both round to float16 after a step that is computed wider: at most one spacing apart, after 25 steps too.
FLOAT16 = 2.0**-10
FLOAT16_STATE = 2.0**-9

STACKING = named({"one_by_one": False, "foreach": True})


def compiled_step(optimizer):
    """Takes a step in one compiled function per optimizer and choice of variables."""
    updated = [v for v in optimizer.param_groups[0]["params"] if v.grad is not None]
    key = tuple(id(variable) for variable in updated)
    functions = optimizer.__dict__.setdefault("_functions_of_the_test", {})
    if key not in functions:
        functions[key] = tf.function(lambda grads: optimizer.apply_gradients(zip(grads, updated)), jit_compile=True)
    optimizer.build(optimizer.param_groups[0]["params"])
    functions[key]([variable.grad for variable in updated])


def assert_follows(run, initial, expected_values, expected_states, tolerance, state_tolerance):
    values, states = run
    for shape, expected in expected_values.items():
        path = [recorded.initial(initial, shape), *map(recorded.array, expected)]
        differences = [numerics.difference(value, *path[i::-1]) for i, value in enumerate(values[shape], 1)]
        wrong = [step for step, difference in enumerate(differences, 1) if not difference <= tolerance]
        assert not wrong, f"{shape}: first different at step {wrong[0]}, by {differences[wrong[0] - 1]}"
        assert len(expected) == len(values[shape]) >= 25
    for when, expected in expected_states.items():
        assert list(states[when]) == list(expected), when
        for shape, entry in expected.items():
            assert list(states[when][shape]) == list(entry), (when, shape)
            for name, value in entry.items():
                assert numerics.difference(states[when][shape][name], recorded.array(value)) <= state_tolerance, name


@pytest.mark.parametrize(
    ("make", "name", "foreach"),
    combinations(named(recorded.LIBRARIES), recorded.RECORDED["trajectories"], STACKING, usual=7),
)
def test_every_recorded_trajectory_is_followed_in_float32(make, foreach, name):
    trajectory = recorded.RECORDED["trajectories"][name]
    run = recorded.run(make, trajectory, foreach=foreach)
    expected = trajectory["foreach_false"]
    assert_follows(run, trajectory["initial"], expected["params"], expected["state"], FLOAT32, FLOAT32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ulps", [-2, 2])
@pytest.mark.parametrize("name", recorded.RECORDED["trajectories"])
def test_a_recorded_trajectory_is_followed_where_reciprocal_square_roots_are_rounded_otherwise(name, ulps, monkeypatch):
    rsqrt = tf.math.rsqrt
    monkeypatch.setattr(tf.math, "rsqrt", lambda x: rsqrt(x) * (1 + ulps * 2.0**-23))
    trajectory = recorded.RECORDED["trajectories"][name]
    run = recorded.run(recorded.LIBRARIES["keras3"], trajectory)
    expected = trajectory["foreach_false"]
    assert_follows(run, trajectory["initial"], expected["params"], expected["state"], FLOAT32, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wd", "some_none", "nonfinite", "huge_grads"])
def test_recorded_trajectories_are_followed_compiled(make, name):
    trajectory = recorded.RECORDED["trajectories"][name]
    shapes = ("vector", "matrix", "tensor3")
    run = recorded.run(make, trajectory, compiled_step, shapes)
    expected = {shape: trajectory["foreach_false"]["params"][shape] for shape in shapes}
    state = {
        when: {s: e for s, e in each.items() if s in shapes}
        for when, each in trajectory["foreach_false"]["state"].items()
    }
    assert_follows(run, trajectory["initial"], expected, state, FLOAT32, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", STACKING)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "state_tolerance"),
    [("float64", FLOAT64, FLOAT64), ("float16", FLOAT16, FLOAT16_STATE)],
    ids=["float64", "float16"],
)
def test_recorded_trajectories_are_followed_in_other_dtypes(make, foreach, dtype, tolerance, state_tolerance):
    expected = recorded.RECORDED["dtypes"][dtype]["ok"]
    trajectory = {"kwargs": {"lr": 0.05}, "initial": "a", "gradients": "A"}
    run = recorded.run(
        make,
        trajectory,
        shapes=tuple(expected["params"]),
        dtype=dtype,
        steps=25,
        foreach=foreach,
    )
    assert_follows(run, trajectory["initial"], expected["params"], expected["state"], tolerance, state_tolerance)


@pytest.mark.parametrize("name", [name for name in recorded.RECORDED["dtypes"] if "group" in name])
def test_a_recorded_group_of_two_dtypes_is_followed_with_the_eps1_that_pytorch_used_for_all(make, name):
    # The name lists the group's parameters in order, for example "float32 matrix then float16 vector".
    dtype_of = {shape: dtype for dtype, shape in re.findall(r"(float\d+) (vector|matrix)", name)}
    foreach = "foreach True" in name
    # PyTorch used the spacing of the parameter that it updated first. With foreach that was the float16 parameter.
    eps1 = np.finfo("float16" if foreach else next(iter(dtype_of.values()))).eps.item()
    variables = {shape: tf.Variable(tf.cast(recorded.initial("a", shape), dtype_of[shape])) for shape in dtype_of}
    paths = {shape: [variable.numpy()] for shape, variable in variables.items()}
    optimizer = make(variables.values(), lr=0.05, eps=(eps1, 1e-3), foreach=foreach)
    for step in range(25):
        for shape, variable in variables.items():
            variable.grad = recorded.gradients("A", shape, variable.dtype)[step] * tf.cast(2.0**-11, variable.dtype)
        optimizer.step()
        for shape, variable in variables.items():
            paths[shape].append(variable.numpy())
    for shape, expected in recorded.RECORDED["dtypes"][name]["ok"].items():
        expected = list(map(recorded.array, expected))
        assert len(expected) == 25
        if dtype_of[shape] == "float16" and eps1 < 2.0**-12:
            # The square of float32's spacing is 0 in float16: PyTorch's parameter becomes NaN. See docs/adafactor.md.
            assert np.isnan(expected[-1]).any()
            assert np.isfinite(paths[shape]).all()
            continue
        tolerance = FLOAT32 if dtype_of[shape] == "float32" else FLOAT16
        for step, value in enumerate(expected):
            difference = numerics.difference(paths[shape][step + 1], value, paths[shape][0], *expected[:step])
            assert difference <= tolerance, (shape, step)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2.0**-9), ("bfloat16", 2.0**-6)])
def test_half_types_stay_within_two_spacings_of_the_float32_trajectory_for_ten_steps(make, dtype, bound):
    trajectory = {"kwargs": {"lr": 0.05, "eps": [1e-3, 1e-3]}, "initial": "a", "gradients": "A"}
    half, states = recorded.run(make, trajectory, dtype=dtype, steps=10)
    wide, _ = recorded.run(make, trajectory, steps=10)
    for shape in wide:
        for a, b in zip(half[shape], wide[shape]):
            assert numerics.difference(a, b) <= bound, shape
    assert states["final"]["matrix"]["row_var"].dtype == tf.as_dtype(dtype).as_numpy_dtype


def test_parameters_of_different_dtypes_in_a_group_go_as_each_would_alone(make):
    # PyTorch takes the eps1 of the first dtype of a group for all: the order of the parameters changes the result.
    small = [1e-4 * np.float32(g) for g in recorded.gradients("A", "vector")]

    def run(dtypes, **kwargs):
        variables = [tf.Variable(tf.cast(recorded.initial("a", "vector"), dtype)) for dtype in dtypes]
        optimizer = make(variables, **kwargs)
        for gradient in small:
            for variable in variables:
                variable.grad = tf.cast(gradient, variable.dtype)
            optimizer.step()
        return {dtype: variable.numpy() for dtype, variable in zip(dtypes, variables)}

    alone = {dtype: run([dtype])[dtype] for dtype in ("float16", "float32")}
    for dtype, spacing in (("float16", 2.0**-10), ("float32", 2.0**-23)):
        np.testing.assert_array_equal(alone[dtype], run([dtype], eps=(spacing, 1e-3))[dtype])
    assert not np.array_equal(alone["float16"], run(["float16"], eps=(2.0**-23, 1e-3))["float16"])
    for order in (["float16", "float32"], ["float32", "float16"]):
        for foreach in (False, True):
            together = run(order, foreach=foreach)
            for dtype, values in alone.items():
                assert np.isfinite(values).all()
                np.testing.assert_array_equal(together[dtype], values)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_a_parameter_without_elements_is_left_in_peace(make, shape):
    # PyTorch divides by its size.
    for probe in ("empty tensor (0,)", "empty matrix (0, 3)"):
        assert recorded.PROBES[probe]["error"]["type"] == "ZeroDivisionError"
    variables = [tf.Variable(tf.zeros(shape)), tf.Variable([4.0])]
    optimizer = make(variables, lr=0.25)
    optimizer.apply_gradients([(tf.zeros(shape), variables[0]), (tf.constant([1.0]), variables[1])])
    assert variables[0].shape == shape
    assert variables[1].numpy() == pytest.approx([3.0])


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_a_float16_gradient_whose_square_is_none_makes_a_step_where_pytorch_makes_nan(make, shape):
    variable = tf.Variable(tf.ones(shape, tf.float16))
    optimizer = make([variable], lr=0.1)
    seen = [1.0]
    for gradient in (300.0, 1000.0, 1.0):
        optimizer.apply_gradients([(tf.fill(shape, tf.constant(gradient, tf.float16)), variable)])
        assert np.isfinite(variable.numpy()).all()
        seen.append(float(variable.numpy().max()))
    np.testing.assert_allclose(seen[1], 0.9, rtol=1e-3)
    assert seen == sorted(seen, reverse=True)
    assert all(np.isfinite(each).all() for each in optimizer.state_dict()["state"][0].values())
