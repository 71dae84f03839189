"""Records PyTorch's `torch.optim.Adafactor`."""

import re

import torch

from . import torch_calls
from .values import array, outcome, plain

torch.set_num_threads(1)


def steps(case, cases, shapes, dtype=torch.float32, count=None):
    """Train parameters with one optimizer. Return the parameters after each step and the state after some steps.

    Args:
        case: a dictionary: the optimizer's arguments `kwargs`, and the names `initial` and `gradients`.
        cases: the recording, which contains the parameters and gradients of these names.
        shapes: names of the shapes of the parameters to train.
        dtype: the dtype of parameters and gradients.
        count: the number of steps. None means all.
    """
    kwargs = dict(case["kwargs"])
    if "eps" in kwargs:
        kwargs["eps"] = tuple(kwargs["eps"])
    initial = cases["initial_params"][case["initial"]]
    parameters = {shape: torch.nn.Parameter(tensor(initial[shape], dtype)) for shape in shapes}
    optimizer = torch.optim.Adafactor(parameters.values(), foreach=False, **kwargs)
    after, states = {shape: [] for shape in shapes}, {}
    sequence = cases["gradient_sequences"][case["gradients"]][:count]
    for number, gradients in enumerate(sequence, 1):
        for shape, parameter in parameters.items():
            parameter.grad = None if gradients[shape] is None else tensor(gradients[shape], dtype)
        optimizer.step()
        for shape, parameter in parameters.items():
            after[shape].append(plain(parameter.detach()))
        if number in (1, 2, 10):
            states["after_%d" % number] = state_of(optimizer, parameters)
    return {"params": after, "state": dict(states, final=state_of(optimizer, parameters))}


def tensor(value, dtype):
    """Return a recorded array, rounded to float32 and then converted to `dtype`."""
    return torch.tensor(array(value)).to(dtype)


def state_of(optimizer, parameters):
    """Return the state of each parameter. The state is empty before the parameter's first gradient."""
    return {
        shape: {name: plain(value) for name, value in optimizer.state.get(parameter, {}).items()}
        for shape, parameter in parameters.items()
    }


def of_two_dtypes(name, cases):
    """Train a group of a float16 vector and a float32 matrix. Return the parameters after each step.

    The gradients of the sequence A are multiplied by 2**-11, which is about float16's epsilon. The default of `eps` is
    the epsilon of a dtype, which affects only gradients of about this size.

    Args:
        name: the name of the case, which contains the order of the parameters and the value of `foreach`.
        cases: the recording, with the values of the parameters and the gradients.
    """
    initial, sequence = cases["initial_params"]["a"], cases["gradient_sequences"]["A"][:25]
    parameters = {
        shape: torch.nn.Parameter(tensor(initial[shape], getattr(torch, dtype)))
        for dtype, shape in re.findall(r"(float\d+) (vector|matrix)", name)
    }
    optimizer = torch.optim.Adafactor(parameters.values(), lr=0.05, foreach="foreach True" in name)
    after = {shape: [] for shape in parameters}
    for gradients in sequence:
        for shape, parameter in parameters.items():
            parameter.grad = 2.0**-11 * tensor(gradients[shape], parameter.dtype)
        optimizer.step()
        for shape, parameter in parameters.items():
            after[shape].append(plain(parameter.detach()))
    return after


def record(name, cases, chosen):
    """Return the recording with the inputs of `cases`; `chosen(part, case)` says which cases are run."""
    del name
    inputs = ("kwargs", "gradients", "initial")
    shapes = list(cases["shapes"])
    in_dtype = {"kwargs": {"lr": 0.05}, "gradients": "A", "initial": "a"}
    return {
        "shapes": cases["shapes"],
        "initial_params": cases["initial_params"],
        "gradient_sequences": cases["gradient_sequences"],
        "trajectories": {
            key: dict({name: case[name] for name in inputs}, foreach_false=steps(case, cases, shapes))
            for key, case in cases["trajectories"].items()
            if chosen("trajectories", key)
        },
        "dtypes": {
            name: outcome(of_two_dtypes, name, cases)
            if "group" in name
            else outcome(steps, in_dtype, cases, ("vector", "matrix", "tensor3"), getattr(torch, name), 25)
            for name in cases["dtypes"]
            if chosen("dtypes", name)
        },
        "api_probes": {
            probe: outcome(torch_calls.call_of(probe, case))
            for probe, case in cases["api_probes"].items()
            if chosen("api_probes", probe)
        },
    }
