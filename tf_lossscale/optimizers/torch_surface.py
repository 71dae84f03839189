"""PyTorch's optimizer interface, implemented for TensorFlow variables: groups, `step`, `state_dict` and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.optimizers import groups, hooks, state_dicts
from tf_lossscale.optimizers.adafactor import AdafactorBase
from tf_lossscale.optimizers.groups import ParameterGroup


class TorchSurface(AdafactorBase):
    """The methods of PyTorch's optimizers. As in PyTorch, a variable's `grad` attribute contains its gradient."""

    # Groups. ----------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """The parameter groups, whose options can be read and set by name.

        "params" contains the variables. If they were passed as (name, variable) pairs, "param_names" contains their
        names.
        """
        return self._groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options. A parameter group uses them for all options that were not passed for the group."""
        return dict(self._defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of variables with options, for example the variables of layers that are unfrozen during training.

        The new variables start without state; the state of the other variables does not change. A `tf.function` that
        has already been traced does not update the new variables. Create a new `tf.function`.

        >>> from tf_lossscale.optimizers import Adafactor
        >>> optimizer = Adafactor([tf.Variable(1.0)])
        >>> optimizer.add_param_group({"params": [tf.Variable(2.0)], "lr": 0.5})
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.01, 0.5]

        Args:
            param_group: a dict with "params" and any of the options; `defaults` fills in the others. "params" contains
                variables or (name, variable) pairs. The group stores the names in "param_names".

        Raises:
            TypeError: `param_group` is not a dict, or contains something other than variables.
            ValueError: a variable is already in a group, or only some of the groups have names for their parameters.
            KeyError: `param_group` has no "params".
        """
        self._add_group(groups.one_group(param_group))

    # The step. --------------------------------------------------------------------------------------------------

    @hooks.around_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with their gradients, and call the step hooks.

        The closure is called first. Then each variable's gradient is read from its `grad` attribute. If `grad` is
        missing or None for every variable, the gradients of the closure's loss are computed instead. A variable whose
        gradient is None does not change, and neither does its state. A gradient of zeros does update the state: the
        second moments decay, and with a `weight_decay` the variable decays as well.

        >>> from tf_lossscale.optimizers import Adafactor
        >>> weight = tf.Variable([4.0])
        >>> optimizer = Adafactor([weight], lr=0.25)
        >>> optimizer.step(lambda: weight[0] ** 2).numpy().item(), round(weight.numpy().item(), 4)
        (16.0, 3.0)
        >>> weight.grad = tf.constant([0.0])
        >>> optimizer.step()
        >>> round(weight.numpy().item(), 4)
        3.0

        Args:
            closure: a function without arguments that returns the loss. It may be None if the `grad` attributes are
                set.

        Returns:
            The result of the closure. Without a closure, the result is None.

        Raises:
            RuntimeError: a hook returned something other than None or (new args, new kwargs).
        """
        loss, tape = None, tf.GradientTape()
        if closure is not None:
            with tape:
                loss = closure()
        parameters = self._parameters()
        gradients = [getattr(variable, "grad", None) for variable in parameters]
        if tf.is_tensor(loss) and all(gradient is None for gradient in gradients):
            gradients = tape.gradient(loss, parameters)
        pairs = [(g, v) for g, v in zip(gradients, parameters) if g is not None]
        if pairs:
            self._build_for_groups()
            self.apply_gradients(pairs)
        return loss

    def _build_for_groups(self) -> None:
        if not self._is_built:
            with tf.init_scope():
                self.build(self._parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the variables' gradients.

        Args:
            set_to_none: if True, `grad` becomes None, so `step` ignores it. If False, `grad` becomes a tensor of zeros,
                which `step` uses to update the variable and its state.
        """
        for variable in self._parameters():
            before = getattr(variable, "grad", None)
            if before is not None:
                variable.grad = None if set_to_none else tf.zeros_like(before)

    # The state. -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups in PyTorch's layout, with NumPy arrays instead of tensors.

        >>> from tf_lossscale.optimizers import Adafactor
        >>> weight = tf.Variable(tf.ones([2, 3]))
        >>> optimizer = Adafactor([weight])
        >>> _ = optimizer.step(lambda: tf.reduce_sum(weight))
        >>> {name: value.shape for name, value in optimizer.state_dict()["state"][0].items()}
        {'step': (), 'row_var': (2, 1), 'col_var': (1, 3)}

        Returns:
            A dict. All parameters are numbered, across all groups. "state" maps the number of each parameter that has
            been updated to the parameter's state. "param_groups" contains the groups, each with its parameters' numbers
            in "params". Hooks can replace the dict.
        """
        for hook in self._hooks["state_dict_pre"]:
            hook(self)
        state: dict[int, dict[str, np.ndarray]] = {}
        packed = []
        first = 0
        for group in self._groups:
            for number, (variable, step) in enumerate(zip(group["params"], self._steps_of(group)), first):
                if step > 0:
                    moments = self._moments[self._var_key(variable)]
                    state[number] = {"step": step, **{name: self._numpy(each) for name, each in moments.items()}}
            packed.append(_packed(group, first))
            first += len(group["params"])
        result: Any = {"state": state, "param_groups": packed}
        for hook in self._hooks["state_dict_post"]:
            returned = hook(self, result)
            result = result if returned is None else returned
        return result

    def _steps_of(self, group: ParameterGroup) -> list[np.ndarray]:
        return [] if group.steps is None else [np.array(step) for step in self._numpy(group.steps)]

    def _numpy(self, variable: Any) -> np.ndarray:
        return np.array(self._tensor_variable(variable).numpy())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that was saved by this class or by PyTorch's Adafactor. Its values may be NumPy arrays or
        PyTorch tensors.

        A training run that began in PyTorch can be continued this way. The optimizer's `iterations`, which learning
        rate schedules read, is set to the largest "step" in the state dict. If a group's `lr` is a schedule or a
        function, it does not change. If `lr` is a variable, the saved learning rate is assigned to it.

        Args:
            state_dict: a dict as returned by `state_dict`. Neither this method nor a hook changes it.

        Raises:
            AttributeError: `state_dict` is not a dict.
            ValueError: its groups, or the shapes of its state, do not match this optimizer.
            AssertionError: the state of a parameter lacks a second moment.
            KeyError: `state_dict` lacks "state", "param_groups" or a parameter's "step".
        """
        if not isinstance(state_dict, Mapping):
            raise AttributeError(f"`state_dict` must be a dict that state_dict() returned, but got: {state_dict!r}.")
        pre_hooks = list(self._hooks["load_state_dict_pre"])
        loaded: Any = copy.deepcopy(dict(state_dict)) if pre_hooks else state_dict
        for hook in pre_hooks:
            returned = hook(self, loaded)
            loaded = loaded if returned is None else returned
        states = state_dicts.checked(loaded, [group["params"] for group in self._groups])
        # All checks are above this line, so an unsuitable state dict changes nothing.
        steps = [state["step"] for of_group in states for state in of_group if state]
        if steps:
            self._build_for_groups()
        # In the state dict of an optimizer that took no step, all steps are missing.
        self._set_iterations(int(max(steps, default=0)))
        for group, saved, of_group in zip(self._groups, loaded["param_groups"], states):
            if group.steps is not None:
                self._load_moments(group, of_group)
            group.load(saved)
        for hook in self._hooks["load_state_dict_post"]:
            hook(self)

    def _load_moments(self, group: ParameterGroup, states: list[dict[str, Any]]) -> None:
        self._tensor_variable(group.steps).assign(np.array([state.get("step", 0.0) for state in states], "float32"))
        for variable, state in zip(group["params"], states):
            for name, each in self._moments[self._var_key(variable)].items():
                target = self._tensor_variable(each)
                target.assign(tf.cast(state[name], target.dtype) if state else tf.zeros_like(target))


def _packed(group: ParameterGroup, first: int) -> dict[str, Any]:
    options = {
        name: group.rate.number() if name == "lr" else copy.deepcopy(value)
        for name, value in group.items()
        if name != "params"
    }
    return {**options, "params": list(range(first, first + len(group["params"])))}
