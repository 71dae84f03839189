"""Hooks: their order, arguments and return values are the recorded ones."""

import inspect
import itertools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import strategies
from tests.optimizers.recorded import PROBES, ones, set_gradient, step_of_ones
from tf_lossscale.optimizers import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def test_hooks_are_called_in_the_recorded_order_with_the_recorded_arguments(make):
    variable = ones()
    optimizer = make([variable])
    calls = []

    def step_hook(name):
        return lambda opt, args, kwargs: calls.append([name, len(args), sorted(kwargs)])

    def dict_hook(name):
        return lambda opt, *state: calls.append([name, *(sorted(each) for each in state)])

    def closure():
        calls.append(["closure"])
        return tf.reduce_sum(variable)

    handles = [
        register_optimizer_step_pre_hook(step_hook("global_step_pre")),
        register_optimizer_step_post_hook(step_hook("global_step_post")),
        optimizer.register_step_pre_hook(step_hook("step_pre_1")),
        optimizer.register_step_pre_hook(step_hook("step_pre_2")),
        optimizer.register_step_post_hook(step_hook("step_post_1")),
        optimizer.register_step_post_hook(step_hook("step_post_2")),
    ]
    for method, name in (("state_dict", "state_dict"), ("load_state_dict", "load")):
        for when in ("pre", "post"):
            register = getattr(optimizer, f"register_{method}_{when}_hook")
            handles.append(register(dict_hook(f"{name}_{when}_1")))
            handles.append(register(dict_hook(f"{name}_{when}_2_prepended"), prepend=True))

    step_of_ones(optimizer)
    calls.append(["--- step(closure) ---"])
    optimizer.step(closure)
    calls.append(["--- step(closure=closure) ---"])
    optimizer.step(closure=closure)
    calls.append(["--- state_dict ---"])
    state_dict = optimizer.state_dict()
    calls.append(["--- load_state_dict ---"])
    optimizer.load_state_dict(state_dict)
    assert calls == PROBES["hook order"]["ok"]
    assert str(inspect.signature(optimizer.step)).startswith("(closure: ")
    assert inspect.signature(optimizer.step).parameters["closure"].default is None

    for handle in [*handles, *handles]:
        handle.remove()
    calls.clear()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == []


def test_a_step_pre_hook_may_change_the_arguments(make):
    optimizer = make([ones()])
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 42.0), {}))
    assert optimizer.step() == PROBES["step_pre_hook returns new (args, kwargs)"]["ok"]


@pytest.mark.parametrize("returned", ["(1,)", "'ab'", "(1, 2)"])
def test_a_step_pre_hook_that_returns_something_else_is_refused_as_recorded(make, returned):
    variable = ones()
    optimizer = make([variable])
    set_gradient(variable)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: eval(returned))
    with pytest.raises(Exception) as caught:
        optimizer.step()
    assert type(caught.value).__name__ == PROBES[f"step_pre_hook returns {returned}"]["error"]["type"]
    np.testing.assert_array_equal(variable, tf.ones([2, 3]))


def test_what_a_state_dict_hook_returns_takes_the_dicts_place(make):
    optimizer = make([ones()])
    replaced = PROBES["state_dict_post_hook return value replaces the dict"]["ok"]
    with optimizer.register_state_dict_post_hook(lambda opt, state_dict: replaced):
        assert optimizer.state_dict() is replaced
    rate = PROBES["load_state_dict_pre_hook return value is used"]["ok"]
    mine = optimizer.state_dict()
    mine["param_groups"][0]["lr"] = rate
    with optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: mine):
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.lr == rate


def test_a_load_hook_that_writes_in_the_dict_is_heard_but_the_callers_dict_stays(make):
    recorded = PROBES["load_state_dict_pre_hook mutating its argument"]["ok"]
    assert recorded == {"group_lr": 3.0, "callers_dict_lr": 3.0}
    optimizer = make([ones()])
    callers = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: state_dict["param_groups"][0].update(lr=3.0))
    optimizer.load_state_dict(callers)
    assert optimizer.param_groups[0]["lr"] == recorded["group_lr"]
    assert callers["param_groups"][0]["lr"] == 0.01


# One gradient of a loss that may overflow, applied in each way that LossScaleOptimizer knows.
def minimize(optimizer, weight, factor):
    optimizer.minimize(lambda: weight[0] * factor, [weight])


def apply_gradients(optimizer, weight, factor):
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(weight[0] * factor)
    optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(tape.gradient(loss, [weight])), [weight]))


def apply(optimizer, weight, factor):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(weight[0] * factor)
    optimizer.apply(tape.gradient(loss, [weight]), [weight])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("way", [minimize, apply_gradients, apply], ids=lambda way: way.__name__)
def test_step_hooks_are_called_once_for_each_step_that_a_wrapper_applies(make, way, compiled):
    inner, weight, calls = make(), tf.Variable([1.0]), []
    before = inner.register_step_pre_hook(lambda *called: calls.append(("pre", called, weight.numpy().item())))
    inner.register_step_post_hook(lambda *called: calls.append(("post", called, weight.numpy().item())))
    with register_optimizer_step_pre_hook(lambda *_: calls.append("first")):
        optimizer = tf_lossscale.LossScaleOptimizer(inner)
        step = tf.function(way) if compiled else way
        step(optimizer, weight, tf.constant(1.0))
        after = weight.numpy().item()
        assert after < 1
        assert calls == ["first", ("pre", (inner, (inner,), {}), 1.0), ("post", (inner, (inner,), {}), after)]
        calls.clear()
        step(optimizer, weight, tf.constant(np.inf))
        assert (calls, weight.numpy().item()) == ([], after)
    before.remove()
    step(optimizer, weight, tf.constant(1.0))
    assert [call[0] for call in calls] == ["post"]


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [True, False])
def test_fit_calls_the_step_hooks_with_a_wrapper_and_without(make, keras, wrapped):
    inner, calls = make(), []
    inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(tf_lossscale.LossScaleOptimizer(inner) if wrapped else inner, "mse")
    x = np.ones((12, 2), "float32")
    if wrapped:
        x[:4] = np.inf
    model.fit(x, np.ones((12, 1)), batch_size=4, shuffle=False, verbose=0)
    assert calls == ["pre", "post"] * (2 if wrapped else 3)


@pytest.mark.slow
def test_a_traced_step_calls_its_hooks_in_every_call(make):
    weight, calls = ones(), []
    optimizer = make([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda *called: calls.append((called, weight.numpy()[0, 0])))
    optimizer.register_step_post_hook(lambda *called: calls.append((called, weight.numpy()[0, 0])))

    @tf.function
    def step():
        optimizer.step(lambda: tf.reduce_sum(weight))

    values = [1.0]
    for _ in range(3):
        step()
        values.append(weight.numpy()[0, 0])
    arguments = (optimizer, (optimizer,), {})
    assert calls == [(arguments, value) for pair in itertools.pairwise(values) for value in pair]
    assert len(set(values)) == 4


@pytest.mark.slow
def test_a_step_that_cannot_call_a_hook_or_take_its_result_says_so(make, caplog):
    weight = ones()
    optimizer = make([weight])
    optimizer.build([weight])

    def step():
        weight.grad = tf.ones([2, 3])
        optimizer.step()

    optimizer.apply_gradients([(tf.ones([2, 3]), weight)])
    optimizer.register_step_post_hook(print).remove()
    tf.function(step)()
    assert "traced" not in caplog.text
    with optimizer.register_step_post_hook(print):
        assert "does not call it" in caplog.text
        with pytest.raises(RuntimeError, match="XLA"):
            tf.function(step, jit_compile=True)()
    before = weight.numpy()
    with (
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs)),
        pytest.raises(tf.errors.UnknownError, match=r"only outside tf\.function"),
    ):
        tf.function(step)()
    with (
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs)),
        pytest.raises(RuntimeError, match="must return None"),
    ):
        optimizer.apply_gradients([(tf.ones([2, 3]), weight)])
    with (
        optimizer.register_step_pre_hook(lambda *_: setattr(weight, "grad", 2.0 * weight.grad)),
        pytest.raises(tf.errors.OpError, match="out of scope"),
    ):
        tf.function(step)()
    np.testing.assert_array_equal(weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_the_replicas_call_the_step_hooks_once_together(make, compiled):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        inner, weight, calls = make(), tf.Variable([1.0]), []
        inner.register_step_pre_hook(lambda *_: calls.append("pre"))
        inner.register_step_post_hook(lambda *_: calls.append("post"))
        optimizer = tf_lossscale.LossScaleOptimizer(inner)

    def step(factor):
        strategy.run(apply_gradients, args=(optimizer, weight, factor))

    take = tf.function(step) if compiled else step
    for factor, expected in ((1.0, ["pre", "post"]), (np.inf, [])):
        take(tf.constant(factor))
        assert calls == expected
        calls.clear()


def test_an_exception_in_a_pre_hook_stops_the_step(make):
    assert PROBES["exception in a pre hook stops the step"]["ok"] == ["raised"]

    def refuse(*_):
        raise OSError("no step today")

    weight = tf.Variable([1.0])
    optimizer = make([weight])
    optimizer.register_step_pre_hook(refuse)
    with pytest.raises(OSError, match="no step today"):
        step_of_ones(optimizer)
    with pytest.raises(tf.errors.UnknownError, match="no step today"):
        tf.function(minimize)(tf_lossscale.LossScaleOptimizer(optimizer), weight, tf.constant(1.0))
    assert weight.numpy().item() == 1.0


def test_no_recorded_probe_is_missing_in_these_tests():
    source = "".join(path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    missing = []
    for probe in PROBES:
        case = probe.removeprefix("load_state_dict ").removeprefix("step_pre_hook returns ")
        if f'"{probe}"' not in source and f"'{probe}'" not in source and f'"{case}"' not in source:
            missing.append(probe)
    assert missing == []
