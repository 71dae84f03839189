"""Arguments, parameters and groups: taken or refused as PyTorch was recorded to."""

import copy

import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.recorded import PROBES, ones, plain, set_gradient, step_of_ones

NAMES = ["lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"]


NAN = float("nan")
# Probe -> the constructor's arguments; (args, kwargs) after the parameters.
CONSTRUCTIONS = {
    "Adafactor([p], lr=-1)": ((), {"lr": -1}),
    "Adafactor([p], lr=nan)": ((), {"lr": NAN}),
    'Adafactor([p], lr="x")': ((), {"lr": "x"}),
    "Adafactor([p], lr=None)": ((), {"lr": None}),
    "Adafactor([p], lr=tensor(0.1))": ((), {"lr": tf.constant(0.1)}),
    "Adafactor([p], beta2_decay=0)": ((), {"beta2_decay": 0}),
    "Adafactor([p], beta2_decay=nan)": ((), {"beta2_decay": NAN}),
    "Adafactor([p], eps=(-1,1e-3))": ((), {"eps": (-1, 1e-3)}),
    "Adafactor([p], eps=(None,-1))": ((), {"eps": (None, -1)}),
    "Adafactor([p], eps=1e-3)": ((), {"eps": 1e-3}),
    "Adafactor([p], eps=(1e-3,))": ((), {"eps": (1e-3,)}),
    "Adafactor([p], eps=[None,1e-3])": ((), {"eps": [None, 1e-3]}),
    "Adafactor([p], eps 3-tuple)": ((), {"eps": (None, 1e-3, 5)}),
    "Adafactor([p], d=nan)": ((), {"d": NAN}),
    "Adafactor([p], d=1)": ((), {"d": 1}),
    "Adafactor([p], weight_decay=-0.1)": ((), {"weight_decay": -0.1}),
    "Adafactor([p], weight_decay=nan)": ((), {"weight_decay": NAN}),
    "Adafactor([p], capturable=True)": ((), {"capturable": True}),
    "Adafactor([p], differentiable=True)": ((), {"differentiable": True}),
    "positional arguments": ((0.1, -0.5, (0.001, 0.01), 2.0, 0.1), {}),
    "positional foreach refused": ((0.1, -0.5, (0.001, 0.01), 2.0, 0.1, True), {}),
    "defaults": ((), {}),
}
# What the message says in any wording: the argument, and the value or the rule.
IN_THE_MESSAGE = {
    "lr": ("`lr`", "number"),
    "beta2_decay": ("`beta2_decay`", "<= 0"),
    "eps": ("eps",),
    "d": ("`d`", ">= 1"),
    "weight_decay": ("`weight_decay`", ">= 0"),
    "capturable": ("capturable",),
    "differentiable": ("differentiable",),
}


@pytest.mark.parametrize("probe", CONSTRUCTIONS)
def test_arguments_are_taken_or_refused_as_recorded(make, probe):
    args, kwargs = CONSTRUCTIONS[probe]
    recorded = PROBES[probe]
    if "error" in recorded:
        with pytest.raises(Exception) as caught:
            make([ones()], *args, **kwargs)
        assert type(caught.value).__name__ == recorded["error"]["type"]
        for text in next((IN_THE_MESSAGE[name] for name in kwargs), ("positional",)):
            assert text in str(caught.value)
    else:
        defaults = make([ones()], *args, **kwargs).defaults
        assert list(defaults) == NAMES
        assert plain({**defaults, "lr": np.array(defaults["lr"])}) == recorded["ok"]


def test_a_learning_rate_in_a_tensor_with_one_element_is_that_number(make):
    variable = ones()
    optimizer = make([variable], lr=tf.constant([0.1]))
    step_of_ones(optimizer)
    assert PROBES["Adafactor([p], lr=tensor([0.1]))"]["ok"]["lr"] == [np.float32(0.1)]
    np.testing.assert_allclose(variable, np.full([2, 3], 0.9), rtol=1e-6)


@pytest.mark.parametrize("probe", ['Adafactor([p], foreach="x")', 'Adafactor([p], maximize="x")'])
def test_a_string_for_a_choice_is_refused_where_pytorch_takes_it_for_true(make, probe):
    option = probe.removeprefix("Adafactor([p], ").partition("=")[0]
    assert PROBES[probe]["ok"][option] == "x"
    with pytest.raises(TypeError, match=f"`{option}` must be one of .*True.* but got: 'x'"):
        make([ones()], **{option: "x"})


SAYS_WHAT_TO_DO = "must|Pass|updates variables"


# An error is the one of a recorded probe, or ours where PyTorch's was not recorded.
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], "Adafactor([])", "empty list"),
        (tf.Variable(1.0), "Adafactor(tensor)", "iterable of variables.*Pass \\[variable\\]"),
        ([tf.constant(1.0)], "Adafactor(non-leaf)", "not a variable"),
        ([{"lr": 0.1}], "Adafactor group without params", "must have an entry 'params'"),
        (0.01, "TypeError", SAYS_WHAT_TO_DO),
        ([1.0], "TypeError", SAYS_WHAT_TO_DO),
        ([{"params": {1.0}}], "TypeError", SAYS_WHAT_TO_DO),
        ([{"params": [tf.Variable(1)]}], "ValueError", SAYS_WHAT_TO_DO),
        ([("a", tf.Variable(1.0)), tf.Variable(1.0)], "ValueError", SAYS_WHAT_TO_DO),
    ],
)
def test_parameters_that_are_none_are_refused_as_recorded_with_what_to_do(make, params, error, message):
    with pytest.raises(Exception, match=message) as caught:
        make(params)
    assert type(caught.value).__name__ == (PROBES[error]["error"]["type"] if error in PROBES else error)


def test_a_parameter_that_is_given_twice_is_updated_once_with_a_warning(make):
    assert PROBES["Adafactor duplicate parameter"]["ok"] == "ok (warns)"
    variable = ones()
    with pytest.warns(UserWarning, match="twice"):
        optimizer = make([variable, variable], lr=0.1)
    step_of_ones(optimizer)
    np.testing.assert_allclose(variable, np.full([2, 3], 0.9), rtol=1e-6)


def test_named_parameters_keep_their_names_in_the_group(make):
    group = make([("weight", ones()), ("bias", tf.Variable([0.0]))]).param_groups[0]
    assert sorted(group) == PROBES["Adafactor named parameters"]["ok"][0]
    assert group["param_names"] == ["weight", "bias"]
    assert [variable.shape.rank for variable in group["params"]] == [2, 1]


def test_a_bad_option_of_a_group_is_refused_where_pytorch_looks_at_none(make):
    assert PROBES["bad group option is not validated"]["ok"] == -5
    with pytest.raises(ValueError, match=r"`lr`.*>= 0, but got: -5"):
        make([{"params": [ones()], "lr": -5}])
    with pytest.raises(ValueError, match="`d`"):
        make([{"params": [ones()], "d": 2.0}], d=0.5)
    optimizer = make([ones()])
    with pytest.raises(ValueError, match="`d`"):
        optimizer.param_groups[0]["d"] = 0.5
    assert optimizer.param_groups[0]["d"] == 1.0


def test_an_unknown_option_of_a_group_is_kept(make):
    optimizer = make([{"params": [ones()], "bogus": 1}])
    assert sorted(optimizer.param_groups[0]) == PROBES["unknown group option kept"]["ok"]
    assert optimizer.state_dict()["param_groups"][0]["bogus"] == 1


def test_each_group_follows_its_own_options(make):
    def train(*groups, **kwargs):
        optimizer = make(list(groups), **kwargs)
        for _ in range(3):
            for variable in (v for group in optimizer.param_groups for v in group["params"]):
                set_gradient(variable)
            optimizer.step()
        return [v.numpy() for group in optimizer.param_groups for v in group["params"]]

    special = {"lr": 0.2, "beta2_decay": -0.5, "eps": (0.1, 0.01), "d": 2.0, "weight_decay": 0.3, "maximize": True}
    first, second, third = train(
        {"params": [ones()]}, {"params": ones(), **special}, {"params": [ones()], "foreach": True}, lr=0.1
    )
    (alone,) = train({"params": [ones()]}, **special)
    (plain_one,) = train({"params": [ones()]}, lr=0.1)
    np.testing.assert_array_equal(second, alone)
    np.testing.assert_array_equal(first, plain_one)
    np.testing.assert_allclose(third, plain_one, rtol=1e-6)
    assert not np.allclose(first, second)


@pytest.mark.parametrize("when", ["before a step", "after a step"])
def test_a_group_that_is_added_takes_part_from_then_on(make, when):
    old, new = ones(), ones()
    optimizer = make([old], lr=0.1)
    if when == "after a step":
        set_gradient(old)
        optimizer.step()
    optimizer.add_param_group({"params": [new], "lr": 0.25})
    set_gradient(old)
    set_gradient(new)
    optimizer.step()
    np.testing.assert_allclose(new, np.full([2, 3], 0.75), rtol=1e-6)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.25]
    assert optimizer.param_groups[1]["d"] == 1.0
    steps = [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
    assert steps == ([1.0, 1.0] if when == "before a step" else [2.0, 1.0])


def test_a_group_that_does_not_fit_changes_nothing(make):
    variable = ones()
    optimizer = make([variable], lr=0.1)
    for group, error in (
        ({"params": [variable]}, ValueError),
        ({"params": [("name", ones())]}, ValueError),
        ({"lr": 0.1}, KeyError),
        ({"params": [ones()], "d": 0.0}, ValueError),
        ([ones()], TypeError),
    ):
        with pytest.raises(error):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    step_of_ones(optimizer)
    np.testing.assert_allclose(variable, np.full([2, 3], 0.9), rtol=1e-6)


@pytest.mark.parametrize("copied", [lambda group: group.copy(), copy.copy, lambda group: {**group}])
def test_a_copy_of_a_group_keeps_the_values_that_the_group_had(make, copied):
    group = make([ones()], lr=0.5).param_groups[0]
    before = copied(group)
    group["lr"] = group["d"] = 2.0
    assert (before["lr"], before["d"]) == (0.5, 1.0)
    before["lr"] = before["d"] = 4.0
    assert (group["lr"], group["d"]) == (2.0, 2.0)


def test_a_union_with_a_group_bypasses_no_check(make):
    group = make([ones()], lr=0.5).param_groups[0]
    with pytest.raises(TypeError, match="unsupported operand"):
        group |= {"lr": 0.25, "d": -3.0}
    assert (group["lr"], group["d"]) == (0.5, 1.0)
