"""Records PyTorch's `torch.optim.Adafactor`."""

import re

import torch

from .values import array, outcome, plain

torch.set_num_threads(1)


def steps(case, cases, shapes, dtype=torch.float32, count=None):
    """Return the parameters after each step, and the state after some; one optimizer holds all parameters.

    Args:
        case: `kwargs` of the optimizer, the name of the `initial` parameters, and that of the `gradients`.
        cases: the recording, with the values of these parameters and gradients.
        shapes: names of the shapes of the parameters to train.
        dtype: the dtype of parameters and gradients.
        count: the number of steps; None for all.
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
    """Return a recorded array, which was rounded to float32 first."""
    return torch.tensor(array(value)).to(dtype)


def state_of(optimizer, parameters):
    """Return the state of each parameter; it is empty before the parameter's first gradient."""
    return {
        shape: {name: plain(value) for name, value in optimizer.state.get(parameter, {}).items()}
        for shape, parameter in parameters.items()
    }


def constructed(arguments):
    """Return the options of `Adafactor([p], ARGUMENTS)`, where p is a matrix of ones."""
    scope = {"torch": torch, "tensor": torch.tensor, "nan": float("nan"), "p": torch.nn.Parameter(torch.ones(2, 3))}
    made = eval("torch.optim.Adafactor([p], " + arguments, scope)
    return {name: plain(value) for name, value in made.param_groups[0].items() if name != "params"}


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
            dtype: outcome(steps, in_dtype, cases, ("vector", "matrix", "tensor3"), getattr(torch, dtype), 25)
            for dtype in ("float64", "float16")
            if chosen("dtypes", dtype)
        },
        "api_probes": {
            probe: outcome(constructed, probe[len("Adafactor([p], ") :])
            for probe in cases["api_probes"]
            if re.match(r"Adafactor\(\[p\], \w+=.*\)$", probe) and chosen("api_probes", probe)
        },
    }
