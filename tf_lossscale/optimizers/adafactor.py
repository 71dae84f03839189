"""The part of Adafactor that is common to Keras 3 and tf_keras: arguments, parameter groups and the update."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_lossscale.optimizers import adafactor_rule, arguments, group_configs, hooks, parameter_groups
from tf_lossscale.optimizers.parameter_groups import ParameterGroup
from tf_lossscale.optimizers.rates import FirstRate, Rate

if TYPE_CHECKING:
    from tf_lossscale.types import Variable


def _option(name: str) -> property:
    def read(self: Any) -> Any:
        # Keras's constructor reads and writes options before the parameter groups exist.
        return self._groups[0][name] if self._groups else self._defaults[name]

    def write(self: Any, value: Any) -> None:
        if self._groups:
            if name == "weight_decay" and value is None:
                # In Keras, None means that there is no weight decay.
                value = 0.0
            self._set_for_all(name, value)

    doc = f"The first group's `{name}`. Setting it also changes the groups that have no `{name}` of their own."
    return property(read, write, doc=doc)


class AdafactorBase(hooks.Hooked):
    """The part of Adafactor that is common to both Keras libraries. See `keras3.Adafactor` for the arguments."""

    hyperparameter_names = ("beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize")

    beta2_decay = _option("beta2_decay")
    eps = _option("eps")
    d = _option("d")
    weight_decay = _option("weight_decay")
    foreach = _option("foreach")
    maximize = _option("maximize")

    _groups: list[ParameterGroup]
    _defaults: dict[str, Any]
    #: Maps a variable's key to the variable's parameter group and its position in the group.
    _places: dict[Any, tuple[ParameterGroup, int]]
    _moments: dict[Any, dict[str, Any]]
    #: Whether `build` adds variables to the first group if they are in no group.
    _takes_more: bool
    #: For each group, the positions of its variables in the list that will be passed to `build`. `from_config` sets
    #: this attribute if the config has several groups, and `build` sets it back to None.
    _positions: list[list[int]] | None
    #: The names of the variables to which `_positions` refers. `from_config` sets this attribute, and `build` sets it
    #: back to None.
    _names: list[str] | None
    #: Whether the optimizer has logged how much memory `foreach` needs.
    _said: bool

    # Provided by the class for each Keras library. --------------------------------------------------------------

    name: str
    add_variable: Callable[..., Any]
    apply_gradients: Callable[..., Any]
    _is_built: bool
    _use_weight_decay: Callable[[Any], bool]
    #: A function that returns a key for a variable.
    _var_key: Callable[[Any], Any]
    #: The names of the Keras optimizer arguments that Adafactor accepts as `**kwargs`.
    _keras_arguments: tuple[str, ...]
    #: The Keras library's `optimizers.schedules` module.
    _schedules: Any
    #: Calls the constructor of Keras's optimizer base class with keyword arguments.
    _init_keras: Callable[..., None]
    #: Returns the `tf.Variable` behind a Keras 3 or tf_keras variable.
    _tensor_variable: Callable[[Any], Any]
    #: Creates the variable in which a learning rate is stored, from its initial value and a name.
    _new_rate_variable: Callable[[float, str], Any]
    #: A function that creates a variable of zeros on a parameter's device. It takes the parameter, a name, a shape and
    #: a dtype.
    _new_moment: Callable[[Any, str, Sequence[int], tf.DType], Any]
    #: Returns the variables for which the optimizer was built, in the order in which they were passed to `build`.
    _built_for: Callable[[], list[Any]]
    #: Whether Keras keeps moving averages of the variables.
    use_ema: bool
    #: Adds variables to a built optimizer, without creating their state.
    _join: Callable[[list[Any]], None]
    #: Sets Keras's step count, `iterations`.
    _set_iterations: Callable[[int], None]

    # Construction. ----------------------------------------------------------------------------------------------

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
        options = {
            "lr": kwargs.pop("learning_rate", lr),
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        for name in kwargs:
            if name not in self._keras_arguments:
                raise TypeError(f"Adafactor.__init__() got an unexpected keyword argument '{name}'")
        arguments.check(options)
        groups = [{"params": []}] if params is None else parameter_groups.groups_of(params)
        # Write to __dict__, because both Keras libraries replace assigned lists and dicts with tracked copies.
        self.__dict__.update(
            _groups=[],
            _defaults=options,
            _hooks=hooks.hooks_by_event(),
            _places={},
            _moments={},
            _takes_more=params is None,
            _positions=None,
            _names=None,
            _said=False,
        )
        self._init_keras(weight_decay=weight_decay, **kwargs)
        for group in groups:
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

        The config contains the names of the variables. If the variables passed to `build` have other names, they are
        assigned to the groups by their positions, and a warning is logged.

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
            ValueError: `params` was passed to the constructor, and a variable is in no parameter group.
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
        arguments.check(entries)
        if self._is_built:
            self._join(given["params"])
        number = len(self._groups)
        rate = (Rate if self._groups else FirstRate)(self, entries["lr"], _numbered("learning_rate", number))
        group = ParameterGroup(entries, rate, given)
        self._groups.append(group)
        self._file(group)
        if self._is_built:
            self._make_state(group, number)

    def _file(self, group: ParameterGroup) -> None:
        self._places.update({self._var_key(variable): (group, i) for i, variable in enumerate(group["params"])})

    def _take(self, variables: Iterable[Any]) -> list[Any]:
        """Assign `variables` to groups. Return `variables`, followed by all other variables in the groups."""
        variables = list(variables)
        ordered = group_configs.in_saved_order(self, variables)
        if self._positions is not None:
            for group, positions in zip(self._groups, self._positions):
                group["params"] = [ordered[i] for i in positions]
                self._file(group)
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
        self._groups[0]["params"] = [*self._groups[0]["params"], *others]
        self._file(self._groups[0])
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

    def _build_for_groups(self) -> None:
        if not self._is_built:
            with tf.init_scope():
                self.build(self._parameters())

    def _moments_of(self, variable: Any) -> dict[str, Any]:
        return self._moments[self._var_key(variable)]

    # The options of all groups. ---------------------------------------------------------------------------------

    def _set_for_all(self, name: str, value: Any) -> None:
        arguments.check({name: value})
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

    lr = property(
        lambda self: self.learning_rate,
        lambda self, value: setattr(self, "learning_rate", value),
        doc="The first group's learning rate, under PyTorch's name for it.",
    )

    # Called by Keras. -------------------------------------------------------------------------------------------

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

    # The update. ------------------------------------------------------------------------------------------------

    def _update_on_devices(self, distribution: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        def call(variable: Any, function: Any, arguments: Any) -> None:
            distribution.extended.update(variable, function, args=arguments, group=False)

        self._update_all(grads_and_vars, call)

    def _update_all(self, grads_and_vars: Iterable[tuple[Any, Any]], call: Callable[..., Any]) -> None:
        """Update the variables. `call(variable, function, arguments)` calls a function on the variable's device."""
        groups: dict[int, tuple[ParameterGroup, list[tuple[int, Any, Any]]]] = {}
        for gradient, variable in grads_and_vars:
            if self._var_key(variable) not in self._places:
                raise ValueError(
                    f"{variable.name} is not one of the variables that this {self.name} was built for. Add it with "
                    "add_param_group({'params': [variable]})."
                )
            group, index = self._places[self._var_key(variable)]
            groups.setdefault(id(group), (group, []))[1].append((index, gradient, variable))
        for group, members in groups.values():
            self._update_group(group, members, call)

    def _update_group(
        self, group: ParameterGroup, members: list[tuple[int, Any, Any]], call: Callable[..., Any]
    ) -> None:
        steps = self._advance(group, [index for index, _, _ in members])
        rate = group.rate.now()
        sizes: dict[tf.DType, Any] = {}
        for batch in self._batches(group, members):
            variables = [members[i][2] for i in batch]
            wide = adafactor_rule.compute_dtype(tf.as_dtype(variables[0].dtype))
            if wide not in sizes:
                now = adafactor_rule.step_sizes(tf.cast(steps, wide), tf.cast(rate, wide), group["beta2_decay"])
                sizes[wide] = [tf.unstack(each) for each in now]
            weights, rates = ([each[i] for i in batch] for each in sizes[wide])
            decays = group["weight_decay"] and self._use_weight_decay(variables[0])
            shrink = tf.cast(rate, wide) * group["weight_decay"] if decays else None

            def update(first: Any, others: Any, gradients: Any, *sizes: Any, group: ParameterGroup = group) -> None:
                self._update(group, [first, *others], gradients, *sizes)

            call(variables[0], update, (variables[1:], [members[i][1] for i in batch], weights, rates, shrink))

    def _advance(self, group: ParameterGroup, indices: list[int]) -> tf.Tensor:
        """Increment the step counts of the variables at the given indices in a group. Return the new step counts."""
        steps = self._tensor_variable(group.steps)
        if indices == list(range(len(group["params"]))):
            steps.assign_add(tf.ones(steps.shape), read_value=False)
            return steps.read_value()
        ones = tf.scatter_nd([[index] for index in indices], tf.ones([len(indices)]), steps.shape)
        steps.assign_add(ones, read_value=False)
        return tf.gather(steps.read_value(), indices)

    def _batches(self, group: ParameterGroup, members: list[tuple[int, Any, Any]]) -> list[list[int]]:
        """Split the indices of `members` into batches.

        Without `foreach`, each batch has one variable. With `foreach`, all variables in a batch have the same shape and
        dtype.
        """
        if not group["foreach"]:
            return [[i] for i in range(len(members))]
        batches: dict[Any, list[int]] = {}
        for i, (_, _, variable) in enumerate(members):
            key = (tuple(variable.shape), str(variable.dtype), self._use_weight_decay(variable))
            batches.setdefault(key, []).append(i)
        if not self._said:
            self._said = True
            _say_what_foreach_costs([[members[i][2] for i in batch] for batch in batches.values()])
        return list(batches.values())

    def _update(
        self, group: ParameterGroup, variables: Any, gradients: Any, weights: Any, rates: Any, shrink: Any
    ) -> None:
        """Update one variable, or several variables of the same shape, dtype and group."""
        variables = [self._tensor_variable(variable) for variable in variables]
        # Converting IndexedSlices to a tensor adds up the rows with the same index.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        moments = [[self._tensor_variable(m) for m in self._moments_of(variable).values()] for variable in variables]
        options = {name: group[name] for name in ("eps", "d", "maximize")}
        options.update(shrink=shrink, stacked=len(variables) > 1)
        pack, unpack = (
            (tf.stack, tf.unstack) if options["stacked"] else (operator.itemgetter(0), lambda packed: [packed])
        )
        packed_change, packed_moments = adafactor_rule.update(
            pack([variable.read_value() for variable in variables]),
            pack(gradients),
            [pack(each) for each in zip(*moments)],
            pack(weights),
            pack(rates),
            **options,
        )
        changes, news = unpack(packed_change), zip(*map(unpack, packed_moments))
        for variable, change, kept, new in zip(variables, changes, moments, news):
            variable.assign_sub(change, read_value=False)
            for target, value in zip(kept, new):
                target.assign(value, read_value=False)


def _numbered(name: str, group: int) -> str:
    # All variables of an optimizer must have different names, because h5 files store variables by name.
    return f"{name}_{group}" if group else name


def _say_what_foreach_costs(batches: list[list[Any]]) -> None:
    def most(shapes: list[tuple[int, ...]]) -> float:
        return max(adafactor_rule.update_bytes(s, tf.as_dtype(b[0].dtype)) for s, b in zip(shapes, batches)) / 2**20

    logging.info(
        "Adafactor(foreach=True) updates %d parameters in %d stacked updates. The largest holds %.1f MiB while it "
        "runs; one parameter at a time, the largest would hold %.1f MiB.",
        sum(map(len, batches)),
        len(batches),
        most([(len(batch), *batch[0].shape) for batch in batches]),
        most([tuple(batch[0].shape) for batch in batches]),
    )
