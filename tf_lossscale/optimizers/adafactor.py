"""The part of Adafactor that is common to Keras 3 and tf_keras: parameter groups, variables and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_lossscale.optimizers import adafactor_rule, group_configs, groups, hooks
from tf_lossscale.optimizers.groups import FirstRate, ParameterGroup, Rate

if TYPE_CHECKING:
    from tf_lossscale.types import Variable


def _option(name: str) -> property:
    def read(self: Any) -> Any:
        # Keras's constructor reads and writes options before the parameter groups exist.
        return self._groups[0][name] if self._groups else self._defaults[name]

    def write(self: Any, value: Any) -> None:
        if self._groups:
            # In Keras, None means that there is no weight decay.
            self._set_for_all(name, 0.0 if name == "weight_decay" and value is None else value)

    doc = f"The first group's `{name}`. Setting it also changes the groups that have no `{name}` of their own."
    return property(read, write, doc=doc)


class AdafactorBase(hooks.Hooked):
    """The part of Adafactor that is common to both Keras libraries. See `keras3.Adafactor` for the arguments.

    The class for each library derives from this class and from the library's `Optimizer` class. It defines:

    - `_keras_arguments`: the names of the Keras arguments that the constructor accepts as `**kwargs`;
    - `_schedules`: the library's `optimizers.schedules` module;
    - `_init_keras(**arguments)`: calls the constructor of the library's class;
    - `_is_built`, and `_built_for()`: the variables passed to `build`, in this order;
    - `_tensor_variable(variable)`: the `tf.Variable` behind a library's variable;
    - `_new_rate_variable(value, name)` and `_new_moment(parameter, name, shape, dtype)`: create variables;
    - `_join(variables)`: adds variables to a built optimizer, without their state;
    - `_set_iterations(steps)`: sets the step count, `iterations`.
    """

    if TYPE_CHECKING:
        # The class for each Keras library also derives from the library's Optimizer class, which has no annotations.
        def __getattr__(self, name: str) -> Any: ...

    hyperparameter_names: tuple[str, ...] = ("beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize")

    beta2_decay: Any = _option("beta2_decay")
    eps: Any = _option("eps")
    d: Any = _option("d")
    weight_decay: Any = _option("weight_decay")
    foreach: Any = _option("foreach")
    maximize: Any = _option("maximize")

    # Set through `__dict__`.
    _positions: Any
    _said: Any

    def __init__(
        self,
        params: Iterable[Variable] | Iterable[dict[str, Any]] | None = None,
        lr: Any = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **kwargs: Any,
    ):
        rate = kwargs.pop("learning_rate", lr)
        options = dict(zip(groups.OPTIONS, (rate, beta2_decay, eps, d, weight_decay, foreach, maximize)))
        for name in kwargs:
            if name not in self._keras_arguments:
                raise TypeError(f"Adafactor.__init__() got an unexpected keyword argument '{name}'")
        groups.check(options)
        given = [{"params": []}] if params is None else groups.groups_of(params)
        # Write to __dict__, because both Keras libraries replace assigned lists and dicts with tracked copies.
        self.__dict__.update(
            _groups=[],
            _defaults=options,
            _hooks=hooks.hooks_by_event(),
            # Maps a variable's key to its parameter group and its position in the group.
            _places={},
            # Maps a variable's key to its second moments, by name.
            _moments={},
            # Whether `build` adds variables to the first group if they are in no group.
            _takes_more=params is None,
            # From the config of a built optimizer, until `build`: the names of its variables, and for each of several
            # groups the positions of its variables among them.
            _names=None,
            _positions=None,
            # Whether the optimizer has logged how much memory `foreach` needs.
            _said=False,
        )
        self._init_keras(weight_decay=weight_decay, **kwargs)
        for group in given:
            self._add_group(group)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor and the parameter groups, as plain Python values.

        Raises:
            ValueError: the optimizer has several parameter groups and is not built.
        """
        return {**super().get_config(), **group_configs.config_of(self)}  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Create an optimizer from a config. The parameter groups get their variables when the optimizer is built.

        The config contains the names of the variables. If it has several groups, and the variables passed to `build`
        have other names, `build` raises a ValueError.

        Args:
            config: a dict.
            custom_objects: a dict that maps the names of user-defined learning rate schedules to classes or functions.
        """
        return group_configs.optimizer_of(cls, config, custom_objects)

    def build(self, variables: Iterable[Any]) -> None:
        """Create the state for `variables` and for all variables in the parameter groups.

        Args:
            variables: an iterable of `tf.Variable` or `keras.Variable` objects.

        Raises:
            ValueError: `params` was passed to the constructor, and a variable is in no parameter group; or the groups
                come from a config whose variables have other names.
        """
        if self._is_built:
            return
        super().build(self._take(variables))  # type: ignore[misc]
        for number, group in enumerate(self._groups):
            self._make_state(group, number)

    def _add_group(self, given: dict[str, Any]) -> None:
        for variable in given["params"]:
            if self._var_key(variable) in self._places:
                raise ValueError(
                    f"{variable.name} is in more than one parameter group. Pass each variable in one group only."
                )
        with_names = [group for group in self._groups if group["params"]]
        if with_names and given["params"] and ("param_names" in given) != ("param_names" in with_names[0]):
            raise ValueError(
                "Either all parameter groups or none must have names for their parameters. Pass (name, variable) pairs "
                "in every group, or only variables in every group."
            )
        entries = {**given, **{name: value for name, value in self._defaults.items() if name not in given}}
        groups.check(entries)
        if self._is_built:
            self._join(given["params"])
        number = len(self._groups)
        rate = (Rate if self._groups else FirstRate)(self, entries["lr"], _numbered("learning_rate", number))
        self._groups.append(ParameterGroup(entries, rate, given))
        self._assign(self._groups[-1], given["params"])
        if self._is_built:
            self._make_state(self._groups[-1], number)

    def _assign(self, group: ParameterGroup, variables: list[Any]) -> None:
        group["params"] = variables
        self._places.update({self._var_key(variable): (group, i) for i, variable in enumerate(variables)})

    def _take(self, variables: Iterable[Any]) -> list[Any]:
        """Assign `variables` to groups. Return `variables`, followed by all other variables in the groups."""
        variables = list(variables)
        ordered = group_configs.in_saved_order(self, variables)
        for group, positions in zip(self._groups, self._positions or ()):
            self._assign(group, [ordered[i] for i in positions])
        self._positions = self._names = None
        if self.use_ema or getattr(self, "gradient_accumulation_steps", None):
            # Keras saves the averages and the accumulated gradients in the order in which it built them.
            variables = ordered
        others = [variable for variable in ordered if self._var_key(variable) not in self._places]
        if others and not self._takes_more:
            raise ValueError(
                f"{others[0].name} is in no parameter group of this optimizer. Add it with "
                "add_param_group({'params': [variable]}), or create the optimizer with params=None, which accepts all "
                "variables."
            )
        self._assign(self._groups[0], [*self._groups[0]["params"], *others])
        keys = {self._var_key(variable) for variable in variables}
        return [*variables, *(variable for variable in self._parameters() if self._var_key(variable) not in keys)]

    def _make_state(self, group: ParameterGroup, number: int) -> None:
        if group["params"]:
            name = _numbered("steps", number)
            group.steps = self.add_variable((len(group["params"]),), dtype="float32", name=name)
        for variable in group["params"]:
            dtype = tf.as_dtype(getattr(variable, "true_dtype", variable.dtype))
            self._moments[self._var_key(variable)] = {
                name: self._new_moment(variable, name, shape, dtype)
                for name, shape in adafactor_rule.moment_shapes(variable.shape).items()
            }

    def _parameters(self) -> list[Any]:
        return [variable for group in self._groups for variable in group["params"]]

    # The options of all groups. ---------------------------------------------------------------------------------

    def _set_for_all(self, name: str, value: Any) -> None:
        groups.check({name: value})
        for i, group in enumerate(self._groups):
            if i == 0 or name not in group.own:
                group[name] = value
        self._defaults[name] = value

    @property
    def learning_rate(self) -> Any:
        """The first group's learning rate. Setting it also changes groups that have no learning rate of their own."""
        return super().learning_rate  # type: ignore[misc]

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._set_for_all("lr", value)

    lr: Any = property(
        lambda self: self.learning_rate,
        lambda self, value: setattr(self, "learning_rate", value),
        doc="The first group's learning rate, under PyTorch's name for it.",
    )

    # The update. ------------------------------------------------------------------------------------------------

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any = None) -> None:
        """Update one variable.

        Args:
            gradient: a tensor or IndexedSlices.
            variable: a variable that the optimizer was built for.
            learning_rate: ignored, because the variable's parameter group has a learning rate.
        """
        del learning_rate
        self._update_all([(gradient, variable)], lambda _, function, arguments: function(variable, *arguments))

    def _apply_weight_decay(self, variables: Any) -> None:
        # Do nothing, because Adafactor's own update includes the weight decay.
        pass

    def _update_on_devices(self, distribution: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        def call(variable: Any, function: Any, arguments: Any) -> None:
            distribution.extended.update(variable, function, args=arguments, group=False)

        self._update_all(grads_and_vars, call)

    def _update_all(self, grads_and_vars: Iterable[tuple[Any, Any]], call: Callable[..., Any]) -> None:
        """Update the variables. `call(variable, function, arguments)` calls a function on the variable's device."""
        members: dict[int, dict[int, tuple[Any, Any]]] = {}
        for gradient, variable in grads_and_vars:
            if self._var_key(variable) not in self._places:
                raise ValueError(
                    f"{variable.name} is not one of the variables that this {self.name} was built for. Add it with "
                    "add_param_group({'params': [variable]})."
                )
            group, index = self._places[self._var_key(variable)]
            members.setdefault(id(group), {})[index] = gradient, variable
        for group in self._groups:
            if id(group) in members:
                self._update_group(group, members[id(group)], call)

    def _update_group(
        self, group: ParameterGroup, members: dict[int, tuple[Any, Any]], call: Callable[..., Any]
    ) -> None:
        """Update the variables of one group. `members` maps indices in the group to (gradient, variable) pairs."""
        group.traced |= not tf.executing_eagerly()
        steps, rate = self._advance(group, list(members)), group.rate.now()
        sizes: dict[tf.DType, Any] = {}
        pairs = list(members.values())
        for stack in self._stacks(group, [variable for _, variable in pairs]):
            gradients, (first, *others) = zip(*(pairs[i] for i in stack))
            wide = adafactor_rule.compute_dtype(tf.as_dtype(first.dtype))
            if wide not in sizes:
                both = adafactor_rule.step_sizes(tf.cast(steps, wide), tf.cast(rate, wide), group["beta2_decay"])
                sizes[wide] = [tf.unstack(each) for each in both]
            weights, rates = (_stacked([each[i] for i in stack]) for each in sizes[wide])
            decays = group["weight_decay"] and self._use_weight_decay(first)
            shrink = tf.cast(rate, wide) * group["weight_decay"] if decays else None

            def update(first: Any, others: Any, *arguments: Any, group: ParameterGroup = group) -> None:
                self._update_stack(group, [first, *others], *arguments)

            call(first, update, (others, list(gradients), weights, rates, shrink))

    def _advance(self, group: ParameterGroup, indices: list[int]) -> tf.Tensor:
        """Increment the step counts of the variables at the given indices in a group. Return the new step counts."""
        steps = self._tensor_variable(group.steps)
        ones = tf.scatter_nd([[index] for index in indices], tf.ones([len(indices)]), steps.shape)
        steps.assign_add(ones, read_value=False)
        return tf.gather(steps.read_value(), indices)

    def _stacks(self, group: ParameterGroup, variables: list[Any]) -> list[list[int]]:
        """Split the indices of the variables into stacks: of one variable each, or with `foreach` of one shape each."""
        if not group["foreach"]:
            return [[i] for i in range(len(variables))]
        stacks: dict[Any, list[int]] = {}
        for i, variable in enumerate(variables):
            key = (tuple(variable.shape), str(variable.dtype), self._use_weight_decay(variable))
            stacks.setdefault(key, []).append(i)
        if not self._said:
            self._said = True
            _say_what_foreach_costs([(len(stack), variables[stack[0]]) for stack in stacks.values()])
        return list(stacks.values())

    def _update_stack(
        self, group: ParameterGroup, variables: Any, gradients: Any, weights: Any, rates: Any, shrink: Any
    ) -> None:
        """Update variables of the same shape, dtype and group."""
        parameters = [self._tensor_variable(variable) for variable in variables]
        kept = [[self._tensor_variable(m) for m in self._moments[self._var_key(v)].values()] for v in variables]
        changes, moments = adafactor_rule.update(
            _stacked([parameter.read_value() for parameter in parameters]),
            # Converting IndexedSlices to a tensor adds up the rows with the same index.
            _stacked([tf.convert_to_tensor(gradient) for gradient in gradients]),
            [_stacked(each) for each in zip(*kept)],
            weights,
            rates,
            shrink=shrink,
            **{name: group[name] for name in ("eps", "d", "maximize")},
        )
        for parameter, change in zip(parameters, _unstacked(changes)):
            parameter.assign_sub(change, read_value=False)
        for targets, values in zip(zip(*kept), moments):
            for target, value in zip(targets, _unstacked(values)):
                target.assign(value, read_value=False)


# In eager mode, these two functions are much faster for one tensor than `tf.stack` and `tf.unstack`.


def _stacked(tensors: Sequence[Any]) -> tf.Tensor:
    return tf.stack(tensors) if len(tensors) > 1 else tf.expand_dims(tensors[0], 0)


def _unstacked(stack: tf.Tensor) -> list[tf.Tensor]:
    return tf.unstack(stack) if stack.shape[0] > 1 else [tf.squeeze(stack, 0)]


def _numbered(name: str, group: int) -> str:
    # All variables of an optimizer must have different names, because h5 files store variables by name.
    return f"{name}_{group}" if group else name


def _say_what_foreach_costs(stacks: list[tuple[int, Any]]) -> None:
    """Log the memory of the largest update. Each stack is a number of variables, and one of them."""

    def most(size: Callable[[int], int]) -> float:
        return max(adafactor_rule.update_bytes((size(n), *v.shape), tf.as_dtype(v.dtype)) for n, v in stacks) / 2**20

    logging.info(
        "Adafactor(foreach=True) updates %d parameters in %d stacked updates. The largest holds %.1f MiB while it "
        "runs; one parameter at a time, the largest would hold %.1f MiB.",
        sum(number for number, _ in stacks),
        len(stacks),
        most(lambda number: number),
        most(lambda number: 1),
    )
