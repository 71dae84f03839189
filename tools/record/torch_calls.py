"""Functions that make the recorded calls to PyTorch's Adafactor."""

import re
import warnings

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .values import array, plain


def ones(*shape):
    """Return a parameter of ones, a 2x3 matrix by default."""
    return torch.nn.Parameter(torch.ones(*shape or (2, 3)))


def make(*parameters, **kwargs):
    """Return an optimizer for parameters whose gradients are ones."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.Adafactor(list(parameters), **kwargs)


def options(optimizer):
    return {name: plain(value) for name, value in optimizer.param_groups[0].items() if name != "params"}


# Construction. -------------------------------------------------------------------------------------------------------


def with_a_parameter_twice():
    parameter = ones()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make(parameter, parameter)
    return "ok (warns)" if found else "ok"


def of_groups(*groups):
    return torch.optim.Adafactor(list(groups)).param_groups


CONSTRUCTION = {
    "defaults": lambda: options(make(ones())),
    "Adafactor([p], eps 3-tuple)": lambda: options(make(ones(), eps=(None, 1e-3, 5))),
    "positional arguments": lambda: options(torch.optim.Adafactor([ones()], 0.1, -0.5, (0.001, 0.01), 2.0, 0.1)),
    "positional foreach refused": lambda: options(
        torch.optim.Adafactor([ones()], 0.1, -0.5, (0.001, 0.01), 2.0, 0.1, True)
    ),
    "Adafactor([])": lambda: options(torch.optim.Adafactor([])),
    "Adafactor(tensor)": lambda: options(torch.optim.Adafactor(torch.ones(3))),
    "Adafactor(non-leaf)": lambda: options(torch.optim.Adafactor([2 * ones()])),
    "Adafactor duplicate parameter": with_a_parameter_twice,
    "Adafactor group without params": lambda: len(of_groups({"lr": 0.1})),
    "Adafactor named parameters": lambda: [sorted(group) for group in of_groups(("weight", ones()), ("bias", ones(1)))],
    "bad group option is not validated": lambda: of_groups({"params": [ones()], "lr": -5})[0]["lr"],
    "unknown group option kept": lambda: sorted(of_groups({"params": [ones()], "bogus": 1})[0]),
}

# Steps. --------------------------------------------------------------------------------------------------------------


def step_of(shape):
    return plain(make(ones(*shape)).step())


def sparse_step():
    parameter = ones()
    optimizer = make(parameter)
    parameter.grad = torch.ones(2, 3).to_sparse()
    optimizer.step()


def with_closure():
    parameter, found = ones(), []
    optimizer = torch.optim.Adafactor([parameter], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        found.append([float(optimizer.step(closure)), plain(parameter.detach())])
    return found


def zeroed_gradient():
    parameter = ones()
    make(parameter).zero_grad(set_to_none=False)
    return plain(parameter.grad)


def with_a_rate_in_a_tensor():
    rate, parameter, found = torch.tensor(0.1), ones(), []
    optimizer = make(parameter, lr=rate)
    for i in range(4):
        if i == 2:
            rate.fill_(0.001)
        optimizer.step()
        found.append(plain(parameter.detach()))
    return found


def with_a_scheduler():
    parameter, found = ones(), []
    optimizer = make(parameter, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for _ in range(5):
        group = optimizer.param_groups[0]
        rate = group["lr"]
        optimizer.step()
        found.append([rate, plain(parameter.detach()), {"initial_lr": group["initial_lr"]}])
        scheduler.step()
    return found


STEPS = {
    "sparse gradient": sparse_step,
    "empty tensor (0,)": lambda: step_of((0,)),
    "empty matrix (0, 3)": lambda: step_of((0, 3)),
    "step(closure) returns loss": lambda: with_loss(ones()),
    "closure with backward, 3 steps": with_closure,
    "zero_grad(set_to_none=False)": zeroed_gradient,
    "tensor lr is read every step": with_a_rate_in_a_tensor,
    "LambdaLR": with_a_scheduler,
}


def with_loss(parameter):
    return float(torch.optim.Adafactor([parameter]).step(lambda: parameter.sum()))


# state_dict. ---------------------------------------------------------------------------------------------------------


def described(state_dict):
    """Return a state dict with the dtype and shape of each tensor."""
    return {
        "state": {
            str(number): {
                name: {"dtype": str(value.dtype), "shape": list(value.shape), "value": plain(value)}
                for name, value in entry.items()
            }
            for number, entry in state_dict["state"].items()
        },
        "param_groups": plain(state_dict["param_groups"]),
    }


def continuation(recorded):
    """Take four steps and save. Load the state into a new optimizer, which takes four more steps."""
    inputs = recorded["ok"]

    def parameters(values):
        return [torch.nn.Parameter(torch.tensor(array(value), dtype=torch.float32)) for value in values]

    def take(optimizer, trained, gradients):
        for parameter, gradient in zip(trained, gradients):
            parameter.grad = torch.tensor(array(gradient), dtype=torch.float32)
        optimizer.step()

    trained = parameters(inputs["initial"])
    optimizer = torch.optim.Adafactor(trained, lr=0.1, weight_decay=0.01)
    before = described(optimizer.state_dict())
    for gradients in inputs["grads"][:4]:
        take(optimizer, trained, gradients)
    saved = optimizer.state_dict()
    after_4 = described(saved)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in trained]
    loaded, further = torch.optim.Adafactor(copies), []
    loaded.load_state_dict(saved)
    loaded_group = options(loaded)
    for gradients in inputs["grads"][4:]:
        take(loaded, copies, gradients)
        further.append([plain(parameter.detach()) for parameter in copies])
    live = all(
        value is optimizer.state[parameter][name]
        for number, parameter in enumerate(trained)
        for name, value in saved["state"][number].items()
    )
    return {
        "initial": inputs["initial"],
        "grads": inputs["grads"],
        "before_any_step": before,
        "after_4": after_4,
        "key_order_state": {number: list(entry) for number, entry in after_4["state"].items()},
        "key_order_group": list(saved["param_groups"][0]),
        "key_order_top": list(saved),
        "loaded_group": loaded_group,
        "params_steps_5_to_8": further,
        "state_tensors_are_the_live_ones": live,
    }


def loaded(change):
    """Take a step, and change the state dict. Load it into an optimizer of a new matrix, and take another step."""
    optimizer, parameter = make(ones()), ones()
    optimizer.step()
    other = make(parameter)
    other.load_state_dict(change(optimizer.state_dict()))
    other.step()
    return {
        "q": plain(parameter.detach()),
        "state": {name: plain(value) for name, value in other.state[parameter].items()},
        "group_keys": list(other.param_groups[0]),
    }


def changed(state_dict, **entries):
    return {**state_dict, "state": {0: {**state_dict["state"][0], **entries}}}


def without(state_dict, name):
    state = {key: value for key, value in state_dict["state"][0].items() if key != name}
    groups = [{key: value for key, value in group.items() if key != name} for group in state_dict["param_groups"]]
    return {"state": {0: state}, "param_groups": groups}


def with_groups(state_dict, groups):
    return {**state_dict, "param_groups": groups(state_dict["param_groups"][0])}


LOADED = {
    "step as python float": lambda state: changed(state, step=3.0),
    "step as int tensor": lambda state: changed(state, step=torch.tensor(3)),
    "missing col_var": lambda state: without(state, "col_var"),
    "group without foreach": lambda state: without(state, "foreach"),
    "wrong number of groups": lambda state: with_groups(state, lambda group: [group, group]),
    "wrong number of params": lambda state: with_groups(state, lambda group: [{**group, "params": [0, 1]}]),
    "None": lambda state: None,
    "empty state": lambda state: {**state, "state": {}},
}

# Hooks. --------------------------------------------------------------------------------------------------------------


def hook_order():
    parameter, calls = ones(), []
    optimizer = make(parameter)

    def step_hook(name):
        return lambda opt, args, kwargs: calls.append([name, len(args), sorted(kwargs)])

    def dict_hook(name):
        return lambda opt, *state: calls.append([name, *(sorted(each) for each in state)])

    def closure():
        calls.append(["closure"])
        return parameter.sum()

    of_all = [
        register_optimizer_step_pre_hook(step_hook("global_step_pre")),
        register_optimizer_step_post_hook(step_hook("global_step_post")),
    ]
    for when in ("pre", "post"):
        for number in (1, 2):
            getattr(optimizer, "register_step_%s_hook" % when)(step_hook("step_%s_%d" % (when, number)))
        for method, name in (("state_dict", "state_dict"), ("load_state_dict", "load")):
            register = getattr(optimizer, "register_%s_%s_hook" % (method, when))
            register(dict_hook("%s_%s_1" % (name, when)))
            register(dict_hook("%s_%s_2_prepended" % (name, when)), prepend=True)
    optimizer.step()
    calls.append(["--- step(closure) ---"])
    optimizer.step(closure)
    calls.append(["--- step(closure=closure) ---"])
    optimizer.step(closure=closure)
    calls.append(["--- state_dict ---"])
    state_dict = optimizer.state_dict()
    calls.append(["--- load_state_dict ---"])
    optimizer.load_state_dict(state_dict)
    for handle in of_all:
        handle.remove()
    return calls


def with_step_hook(hook):
    optimizer = make(ones())
    optimizer.register_step_pre_hook(hook)
    return optimizer.step()


def replaced_state_dict():
    optimizer = make(ones())
    optimizer.register_state_dict_post_hook(lambda opt, state_dict: {"replaced": True})
    return optimizer.state_dict()


def replaced_when_loaded():
    optimizer = make(ones())
    mine = optimizer.state_dict()
    mine["param_groups"][0]["lr"] = 7.0
    optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: mine)
    optimizer.load_state_dict(make(ones()).state_dict())
    return optimizer.param_groups[0]["lr"]


def changed_when_loaded():
    optimizer = make(ones())
    given = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: state_dict["param_groups"][0].update(lr=3.0))
    optimizer.load_state_dict(given)
    return {"group_lr": optimizer.param_groups[0]["lr"], "callers_dict_lr": given["param_groups"][0]["lr"]}


def stopped_step():
    """Take a step whose hook raises an error. Return whether the error was raised, and whether the step was taken."""
    parameter, found = ones(), []
    optimizer = make(parameter)

    def refuse(opt, args, kwargs):
        raise OSError("no step today")

    optimizer.register_step_pre_hook(refuse)
    optimizer.register_step_post_hook(lambda opt, args, kwargs: found.append("post hook"))
    try:
        optimizer.step()
    except OSError:
        found.append("raised")
    return found if torch.equal(parameter, torch.ones(2, 3)) else found + ["updated"]


HOOKS = {
    "hook order": hook_order,
    "step_pre_hook returns new (args, kwargs)": lambda: with_step_hook(lambda opt, args, kw: ((opt, lambda: 42.0), {})),
    "step_pre_hook returns (1,)": lambda: with_step_hook(lambda opt, args, kwargs: (1,)),
    "step_pre_hook returns 'ab'": lambda: with_step_hook(lambda opt, args, kwargs: "ab"),
    "step_pre_hook returns (1, 2)": lambda: with_step_hook(lambda opt, args, kwargs: (1, 2)),
    "state_dict_post_hook return value replaces the dict": replaced_state_dict,
    "load_state_dict_pre_hook return value is used": replaced_when_loaded,
    "load_state_dict_pre_hook mutating its argument": changed_when_loaded,
    "exception in a pre hook stops the step": stopped_step,
}


def call_of(probe, recorded):
    """Return the function that makes a recorded call.

    Args:
        probe: the name of the probe.
        recorded: the recorded case, for its inputs.
    """
    if re.match(r"Adafactor\(\[p\], \w+=.*\)$", probe):
        scope = {"torch": torch, "tensor": torch.tensor, "nan": float("nan"), "p": ones()}
        return lambda: options(eval("torch.optim." + probe, scope))
    if probe == "state_dict structure and continuation":
        return lambda: continuation(recorded)
    if probe.startswith("load_state_dict "):
        return lambda: loaded(LOADED[probe[len("load_state_dict ") :]])
    return {**CONSTRUCTION, **STEPS, **HOOKS}[probe]
