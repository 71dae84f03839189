"""Records MindSpore's loss scale managers, update cells and `amp.DynamicLossScaler`, on a CPU in PyNative mode."""

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn, ops

from .values import array, outcome, plain

mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")


def moved(step, names):
    """Return a function that calls `step` for each element of a sequence and lists the results."""

    def run(overflows):
        columns = {name: [] for name in names}
        for overflow in overflows:
            for name, value in zip(names, step(overflow)):
                columns[name].append(plain(value))
        return columns

    return run


def manager(case, cases):
    """Record `DynamicLossScaleManager.update_loss_scale`, which computes with Python numbers."""

    def run():
        scale = amp.DynamicLossScaleManager(**case["kwargs"])

        def step(overflow):
            scale.update_loss_scale(bool(overflow))
            now = scale.get_loss_scale()
            return now, type(now).__name__, scale.cur_iter, scale.last_overflow_iter, scale.bad_step

        names = ("loss_scale", "loss_scale_python_type", "cur_iter", "last_overflow_iter", "bad_step")
        initial = scale.get_loss_scale()
        return dict(moved(step, names)(cases["overflow_sequences"][case["sequence"]]), initial=initial)

    return dict(case, result=outcome(run))


def update_cell(case, cases):
    """Record a manager's update cell. It is called with the scale as a Parameter and the overflow flag as a Tensor."""

    def run():
        cell = amp.DynamicLossScaleManager(**case["kwargs"]).get_update_cell()
        scale = mindspore.Parameter(mindspore.Tensor(float(cell.get_loss_scale()), mindspore.float32))

        def step(overflow):
            returned = cell(scale, mindspore.Tensor(bool(overflow)))
            iterations = [int(each.asnumpy()) for each in (cell.cur_iter, cell.last_overflow_iter)]
            return [float(scale.asnumpy())] + iterations + [int(returned.asnumpy())]

        columns = moved(step, ("loss_scale", "cur_iter", "last_overflow_iter", "returned"))
        found = columns(cases["overflow_sequences"][case["sequence"]])
        return dict(found, cell=type(cell).__name__, get_loss_scale=cell.get_loss_scale())

    return dict(case, result=outcome(run))


def scaler(case, cases):
    """Record `amp.DynamicLossScaler.adjust`. Its argument is a Tensor: whether the gradients are finite."""

    def run():
        scale = amp.DynamicLossScaler(**case["kwargs"])

        def step(overflow):
            scale.adjust(mindspore.Tensor(not overflow))
            return float(scale.scale_value.asnumpy()), int(scale.counter.asnumpy())

        return moved(step, ("loss_scale", "counter"))(cases["overflow_sequences"][case["sequence"]])

    return dict(case, result=outcome(run))


MAKERS = {
    "DynamicLossScaleManager": amp.DynamicLossScaleManager,
    "FixedLossScaleManager": amp.FixedLossScaleManager,
    "StaticLossScaler": amp.StaticLossScaler,
    "amp.DynamicLossScaler": amp.DynamicLossScaler,
}


def is_expression(probe):
    """Return whether a name is an expression that calls a constructor in `MAKERS` with numbers."""
    return probe.split("(")[0] in MAKERS and probe.endswith(")") and "Tensor" not in probe


def constructed(probe):
    """Record the numbers in a new object. If the constructor fails, record the error."""
    name, arguments = probe.split("(", 1)

    def run():
        made = eval("make(" + arguments, {"make": MAKERS[name], "inf": float("inf"), "nan": float("nan")})
        return {key: plain(getattr(made, key)) for key in ATTRIBUTES if hasattr(made, key)}

    return outcome(run)


ATTRIBUTES = (
    "loss_scale",
    "scale_factor",
    "scale_window",
    "increase_ratio",
    "decrease_ratio",
    "cur_iter",
    "last_overflow_iter",
    "bad_step",
    "bad_step_max",
    "scale_value",
    "counter",
)


def scaled(probe, case):
    """Record `scale` and `unscale` of a StaticLossScaler for each dtype."""
    scale = amp.StaticLossScaler(eval(probe.split("(")[1].split(")")[0]))

    def run():
        found = {}
        for dtype, recorded in case["ok"].items():
            numbers = np.array([float(x) for x in recorded["input"]])
            values = mindspore.Tensor(numbers, getattr(mindspore, dtype.lower()))
            entry = {"input": recorded["input"]}
            for method in ("scale", "unscale"):
                result = getattr(scale, method)((values,))
                entry[method] = plain(result[0].astype(mindspore.float64).asnumpy())
                entry[method + "_dtype"] = str(result[0].dtype)
            found[dtype] = entry
        return found

    return outcome(run)


#: The case of `api_probes` that trains with a scaler.
TRAINING = "training loop with amp.DynamicLossScaler(64, 2, 3) and SGD(0.1)"


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
        numbers = {name: value.asnumpy() if hasattr(value, "asnumpy") else value for name, value in state.items()}
        found.append(dict(plain(numbers), x=row["x"]))
    return found


def record(name, cases, chosen):
    """Return the recording with the inputs of `cases`; `chosen(part, case)` says which cases are run."""
    del name

    def each(part, function):
        return {key: function(case, cases) for key, case in cases[part].items() if chosen(part, key)}

    probes = {key: case for key, case in cases["api_probes"].items() if chosen("api_probes", key)}
    return {
        "overflow_sequences": cases["overflow_sequences"],
        "dynamic_manager": each("dynamic_manager", manager),
        "dynamic_update_cell": each("dynamic_update_cell", update_cell),
        "amp_DynamicLossScaler": each("amp_DynamicLossScaler", scaler),
        "api_probes": dict(
            {key: constructed(key) for key in probes if is_expression(key)},
            **{key: scaled(key, case) for key, case in probes.items() if key.endswith(".scale/unscale")},
            **{key: outcome(training_loop, case) for key, case in probes.items() if key == TRAINING},
        ),
    }
