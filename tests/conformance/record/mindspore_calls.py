"""Functions that make the recorded calls to MindSpore."""

import re

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn, ops

from .values import array, plain

FLOAT16, FLOAT64 = mindspore.float16, mindspore.float64


def number(value):
    """Return a number, Tensor or Parameter as JSON."""
    return plain(value.asnumpy()) if hasattr(value, "asnumpy") else plain(value)


# Managers. -----------------------------------------------------------------------------------------------------------


def argument_kinds():
    """Call `update_loss_scale` on a scale of 64 with arguments of several types, and return the scales."""
    found = []
    for argument in (1, 0, "x", "", None, [0], True, Tensor(True), Tensor(False)):
        manager = amp.DynamicLossScaleManager(64, 2, 1)
        manager.update_loss_scale(argument)
        found.append([repr(argument), [manager.get_loss_scale(), manager.bad_step]])
    return found


def overflows_until_an_error():
    manager, count = amp.DynamicLossScaleManager(), 0
    try:
        while count < 2000:
            count += 1
            manager.update_loss_scale(True)
    except RuntimeError as error:
        return {
            "raised_at_update_number": count,
            "args": list(error.args),
            "loss_scale": manager.get_loss_scale(),
            "cur_iter_not_incremented": manager.cur_iter,
        }


def grown(scale, count):
    manager = amp.DynamicLossScaleManager(scale, 2, 1)
    for _ in range(count):
        manager.update_loss_scale(False)
    return plain(manager.get_loss_scale())


def cell_after_an_overflow():
    manager = amp.DynamicLossScaleManager(64, 2, 3)
    manager.update_loss_scale(True)
    return manager.get_update_cell().get_loss_scale()


def same_cell_twice():
    manager = amp.DynamicLossScaleManager(64, 2, 3)
    return manager.get_update_cell() is manager.get_update_cell()


MANAGERS = {
    "DynamicLossScaleManager.update_loss_scale argument kinds": argument_kinds,
    "continuous overflow limit (bad_step_max = 1000)": overflows_until_an_error,
    "python manager grows past float32 range": lambda: grown(2**24, 130),
    "python manager grows past float64 range (float start)": lambda: grown(2.0**24, 1100),
    "get_update_cell uses the CURRENT scale of the manager": cell_after_an_overflow,
    "get_update_cell returns a new cell every time": same_cell_twice,
    'FixedLossScaleUpdateCell("x")': lambda: nn.FixedLossScaleUpdateCell("x").get_loss_scale(),
}
CELL_ATTRIBUTES = (
    "scale_factor",
    "scale_window",
    "loss_scale_value",
    "minimum_loss_scale",
    "cur_iter",
    "last_overflow_iter",
)


def update_cell(*arguments):
    cell = nn.DynamicLossScaleUpdateCell(*arguments)
    return {
        "get_loss_scale": plain(cell.get_loss_scale()),
        "attrs": {name: number(getattr(cell, name)) for name in CELL_ATTRIBUTES},
    }


# Scalers. ------------------------------------------------------------------------------------------------------------


def numbers(values):
    return [numbers(each) for each in values] if isinstance(values, (list, tuple)) else number(values)


def scaled_list():
    result = amp.StaticLossScaler(8).scale([Tensor(1.0)])
    return [type(result).__name__, numbers(result)]


def adjusted(finite):
    amp.DynamicLossScaler(64, 2, 3).adjust(finite)


def all_finite(inputs):
    result = amp.all_finite(inputs)
    return {"value": number(result), "dtype": str(result.dtype), "shape": list(result.shape)}


def one(value, dtype=mindspore.float32):
    return Tensor([value], dtype)


SCALERS = {
    "StaticLossScaler(Tensor(8.))": lambda: number(amp.StaticLossScaler(Tensor(8.0)).scale_value),
    "scale(list)": scaled_list,
    "scale(python float)": lambda: number(amp.StaticLossScaler(8).scale(1.0)),
    "scale(nested tuple)": lambda: numbers(amp.StaticLossScaler(8).scale((one(1.0), (one(2.0), one(3.0))))),
    "unscale(None)": lambda: numbers(amp.StaticLossScaler(8).unscale(None)),
    "adjust(True python bool)": lambda: adjusted(True),
    "adjust(numpy bool)": lambda: adjusted(np.bool_(True)),
    "adjust(Tensor int 1)": lambda: adjusted(Tensor(1)),
    "all_finite(finite)": lambda: all_finite((one(1.0), one(2.0))),
    "all_finite(-inf)": lambda: all_finite((one(1.0), one(-np.inf))),
    "all_finite(nan)": lambda: all_finite((one(np.nan), one(1.0))),
    "all_finite(empty tuple)": lambda: all_finite(()),
    "all_finite(single tensor)": lambda: all_finite(one(1.0)),
    "all_finite(float64)": lambda: all_finite((one(1e300, FLOAT64),)),
    "all_finite(mixed dtypes)": lambda: all_finite((one(1.0), one(np.inf, FLOAT16))),
    "all_finite(bool)": lambda: all_finite((one(True, mindspore.bool_),)),
    "all_finite(None inside)": lambda: all_finite((one(1.0), None)),
    "all_finite(python floats)": lambda: all_finite((1.0, 2.0)),
    "all_finite(max float)": lambda: all_finite((one(float(np.finfo("float32").max)),)),
    "all_finite(zero size)": lambda: all_finite((Tensor(np.zeros(0, np.float32)),)),
    "all_finite(scalar)": lambda: all_finite((Tensor(np.float32(np.inf)),)),
}

# Training. -----------------------------------------------------------------------------------------------------------


def step_of_a_cell():
    model = nn.Dense(2, 1)
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepWithLossScaleCell(
        nn.WithLossCell(model, nn.MSELoss()), optimizer, nn.FixedLossScaleUpdateCell(8.0)
    )
    return numbers(step(Tensor(np.ones((2, 2), np.float32)), Tensor(np.ones((2, 1), np.float32))))


def training_loop(recorded):
    """Train w of [1, -2] with the loss sum(w * x) for the recorded inputs x."""
    w = mindspore.Parameter(Tensor([1.0, -2.0], mindspore.float32), name="w")
    optimizer, scaler, found = nn.SGD([w], 0.1), amp.DynamicLossScaler(64, 2, 3), []

    def loss(x):
        return scaler.scale(ops.reduce_sum(w * x))

    gradient_of = mindspore.value_and_grad(loss, None, [w])
    for row in recorded["ok"]:
        _, gradients = gradient_of(Tensor(array(row["x"], "float32")))
        gradients = scaler.unscale(gradients)
        finite = amp.all_finite(gradients)
        scaler.adjust(finite)
        if finite:
            optimizer(gradients)
        state = {"finite": finite, "w": w, "scale": scaler.scale_value, "counter": scaler.counter}
        found.append({"x": row["x"], **{name: number(value) for name, value in state.items()}})
    return found


def call_of(probe, recorded):
    """Return the function that makes a recorded call. If no program makes this call, return None.

    Args:
        probe: the name of the probe.
        recorded: the recorded case, for its inputs.
    """
    cell = re.match(r"DynamicLossScaleUpdateCell\((.*)\)$", probe)
    if cell:
        return lambda: update_cell(*eval("[{}]".format(cell.group(1)), {"inf": float("inf")}))
    if probe.startswith("training loop with "):
        return lambda: training_loop(recorded)
    if probe.startswith("TrainOneStepWithLossScaleCell, "):
        return step_of_a_cell
    return {**MANAGERS, **SCALERS}.get(probe)
