"""`state_dict` and `load_state_dict`, as PyTorch's were recorded."""

import copy

import numpy as np
import pytest
import tensorflow as tf

from tests import numerics
from tests.optimizers.recorded import LIBRARIES, PROBES, array, ones, plain, set_gradient, step_of_ones


def continuation():
    return PROBES["state_dict structure and continuation"]["ok"]


def started(make):
    """An optimizer after four of the recorded steps, and its variables."""
    recorded = continuation()
    variables = [tf.Variable(array(value, "float32")) for value in recorded["initial"]]
    optimizer = make(variables, lr=0.1, weight_decay=0.01)
    assert optimizer.state_dict() == recorded["before_any_step"] | {
        "param_groups": [recorded["before_any_step"]["param_groups"][0] | {"eps": (None, 0.001)}]
    }
    for grads in recorded["grads"][:4]:
        for variable, gradient in zip(variables, grads):
            variable.grad = tf.constant(array(gradient, "float32"))
        optimizer.step()
    return optimizer, variables


def go_on(optimizer, variables):
    recorded = continuation()
    before = [variable.numpy() for variable in variables]
    for grads, expected in zip(recorded["grads"][4:], recorded["params_steps_5_to_8"]):
        for variable, gradient in zip(variables, grads):
            variable.grad = tf.constant(array(gradient, "float32"))
        optimizer.step()
        for variable, value, start in zip(variables, expected, before):
            numerics.assert_close(variable, array(value), 2e-6, start)


def test_the_state_dict_has_the_recorded_structure_and_values(make):
    recorded = continuation()
    state_dict = started(make)[0].state_dict()
    assert list(state_dict) == recorded["key_order_top"]
    assert list(state_dict["param_groups"][0]) == recorded["key_order_group"]
    assert plain(state_dict["param_groups"][0]) == recorded["after_4"]["param_groups"][0]
    assert {str(n): list(entry) for n, entry in state_dict["state"].items()} == recorded["key_order_state"]
    for number, entry in recorded["after_4"]["state"].items():
        for name, tensor in entry.items():
            value = state_dict["state"][int(number)][name]
            assert f"torch.{value.dtype}" == tensor["dtype"]
            assert list(value.shape) == tensor["shape"]
            np.testing.assert_allclose(value, array(tensor["value"]), rtol=2e-6)


def test_the_state_dict_is_a_copy_where_pytorchs_tensors_are_the_live_ones(make):
    assert continuation()["state_tensors_are_the_live_ones"]
    optimizer, variables = started(make)
    state_dict = optimizer.state_dict()
    before = copy.deepcopy(state_dict)
    go_on(optimizer, variables)
    np.testing.assert_equal(state_dict, before)


class TorchTensor:
    """What of a tensor of PyTorch is looked at."""

    def __init__(self, value):
        self._value = np.asarray(value)
        self.dtype = f"torch.{self._value.dtype}"

    def detach(self):
        return self

    def cpu(self):
        return self

    def float(self):
        return TorchTensor(self._value.astype("float32"))

    def __array__(self, dtype=None, copy=None):
        return self._value.astype(dtype or self._value.dtype)


@pytest.mark.parametrize("kind", [np.asarray, TorchTensor, np.ndarray.tolist], ids=["numpy", "torch", "lists"])
def test_a_run_of_pytorch_goes_on_from_its_state_dict(make, kind):
    recorded = continuation()
    _, variables = started(make)
    state = {
        int(number): {name: kind(array(tensor["value"], "float32")) for name, tensor in entry.items()}
        for number, entry in recorded["after_4"]["state"].items()
    }
    optimizer = make(variables)
    optimizer.load_state_dict({**recorded["after_4"], "state": state})
    assert plain({k: v for k, v in optimizer.param_groups[0].items() if k != "params"}) == recorded["loaded_group"]
    assert int(optimizer.iterations) == 4
    go_on(optimizer, variables)


def saved(make):
    """A state dict after one step on a matrix."""
    variable = ones()
    optimizer = make([variable])
    step_of_ones(optimizer)
    return optimizer.state_dict()


def changed(state_dict, **entries):
    return {**state_dict, "state": {0: {**state_dict["state"][0], **entries}}}


def without(state_dict, option):
    return {**state_dict, "param_groups": [{k: v for k, v in state_dict["param_groups"][0].items() if k != option}]}


LOADED = {
    "step as python float": lambda s: changed(s, step=3.0),
    "step as int tensor": lambda s: changed(s, step=np.array(3)),
    "group without foreach": lambda s: without(s, "foreach"),
    "empty state": lambda s: {**s, "state": {}},
}


@pytest.mark.parametrize("case", LOADED)
def test_unusual_state_dicts_are_loaded_as_recorded(make, case):
    recorded = PROBES[f"load_state_dict {case}"]["ok"]
    variable = ones()
    optimizer = make([variable])
    optimizer.load_state_dict(LOADED[case](saved(make)))
    step_of_ones(optimizer)
    np.testing.assert_allclose(variable, recorded["q"], rtol=2e-6)
    state = optimizer.state_dict()["state"][0]
    assert list(state) == list(recorded["state"])
    for name, value in recorded["state"].items():
        np.testing.assert_allclose(state[name], value, rtol=2e-6)
    assert list(optimizer.param_groups[0]) == recorded["group_keys"]


def test_the_state_dict_of_a_new_optimizer_takes_a_trained_one_and_its_schedule_back_to_the_start(make):
    variable = ones()
    optimizer = make([variable], lr=make._schedules.PiecewiseConstantDecay([1], [0.1, 0.001]))
    start = optimizer.state_dict()

    def trained():
        variable.assign(ones())
        for _ in range(2):
            step_of_ones(optimizer)
        return variable.numpy(), int(optimizer.iterations)

    first = trained()
    optimizer.load_state_dict(start)
    np.testing.assert_equal(trained(), first)


def test_a_load_forgets_the_gradients_of_an_unfinished_accumulation():
    variable, make = ones(), LIBRARIES["keras3"]
    optimizer = make([variable], gradient_accumulation_steps=2)
    optimizer.apply_gradients([(-100.0 * ones(), variable)])
    optimizer.load_state_dict(saved(make))
    for _ in range(2):
        optimizer.apply_gradients([(ones(), variable)])
    assert variable.numpy().max() < 1


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("kind", ["schedule", "function"])
def test_a_schedule_or_function_stays_the_learning_rate_after_a_load(make, kind, group):
    if (make, kind) == (LIBRARIES["tf_keras"], "function"):
        pytest.skip("tf_keras accepts no function as a learning rate")

    def new():
        rate = make._schedules.ExponentialDecay(0.1, 1, 0.5) if kind == "schedule" else lambda: 0.25
        groups = [{"params": [ones()]}, {"params": [ones()]}]
        groups[group]["lr"] = rate
        optimizer = make(groups)
        return optimizer, rate

    def step(optimizer):
        for each in optimizer.param_groups:
            set_gradient(each["params"][0])
        optimizer.step()
        return [each["params"][0].numpy() for each in optimizer.param_groups]

    (optimizer, _), (other, rate) = new(), new()
    step(optimizer)
    for mine, theirs in zip(other.param_groups, optimizer.param_groups):
        mine["params"][0].assign(theirs["params"][0])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[group]["lr"] is rate
    for _ in range(3):
        np.testing.assert_array_equal(step(other), step(optimizer))


def test_a_variable_stays_the_learning_rate_after_a_load_and_is_assigned_the_saved_number(make):
    rate, variable = tf.Variable([0.5]), ones()
    optimizer = make([variable], lr=rate)
    optimizer.load_state_dict(saved(make))
    np.testing.assert_array_equal(rate, np.float32([0.01]))
    rate.assign([0.0])
    step_of_ones(optimizer)
    np.testing.assert_array_equal(variable, tf.ones([2, 3]))


def test_a_schedule_in_a_loaded_state_dict_becomes_the_learning_rate(make):
    schedule = make._schedules.ExponentialDecay(0.1, 1, 0.5)
    state_dict = saved(make)
    state_dict["param_groups"][0]["lr"] = schedule
    optimizer = make([ones()])
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] is schedule


REFUSED = {
    "missing col_var": lambda s: changed(s, col_var=None),
    "wrong number of groups": lambda s: {**s, "param_groups": s["param_groups"] * 2},
    "wrong number of params": lambda s: {**s, "param_groups": [{**s["param_groups"][0], "params": [0, 1]}]},
    "None": lambda s: None,
}


@pytest.mark.parametrize("case", REFUSED)
def test_state_dicts_that_do_not_fit_are_refused_as_recorded_and_change_nothing(make, case):
    variable = ones()
    optimizer = make([variable], lr=0.3)
    step_of_ones(optimizer)
    before = optimizer.state_dict()
    with pytest.raises(Exception, match=r"state.dict|state of parameter") as caught:
        optimizer.load_state_dict(REFUSED[case](saved(make)))
    assert type(caught.value).__name__ == PROBES[f"load_state_dict {case}"]["error"]["type"]
    np.testing.assert_equal(optimizer.state_dict(), before)


def test_state_of_another_shape_or_with_a_bad_option_is_refused_where_pytorch_takes_it(make):
    optimizer = make([ones()])
    for state_dict in (
        changed(saved(make), row_var=np.ones([3, 1])),
        saved(make) | {"param_groups": [{"lr": -1, "params": [0]}]},
    ):
        with pytest.raises(ValueError, match=r"shape|`lr`"):
            optimizer.load_state_dict(state_dict)
    assert optimizer.state_dict()["state"] == {}


def test_a_loaded_group_without_maximize_keeps_it_where_pytorch_raises_a_step_later(make):
    variable = ones()
    optimizer = make([variable], maximize=True)
    optimizer.load_state_dict(without(saved(make), "maximize"))
    step_of_ones(optimizer)
    assert (variable.numpy() > 1).all()
