"""Keras 3: `tf.keras.optimizers` since TensorFlow 2.16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.layers.keras3 import with_layer_names
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import family, hyperparameters, optimizer
from tf_lossscale.wrapper import options as options_lib
from tf_lossscale.wrapper.grads_and_vars import assign_all, tensors_of
from tf_lossscale.wrapper.parts import of_inner

keras: Any = keras_versions.keras_3()


class Family(family.Family):
    """The family of Keras 3's optimizers."""

    optimizers = keras.optimizers
    optimizers_name = "tf.keras.optimizers"
    options = tuple(options_lib.DEFAULTS)
    delegated = (*(name for name in options if name != "name"), "_iterations", "_learning_rate")
    with_layer_names = staticmethod(with_layer_names)

    def __init__(self, inner: Any):
        super().__init__(inner)
        #: The name scope of the optimizer's variables.
        self.scope = "loss_scale_optimizer"
        #: Values for the variables of an optimizer that is not built yet, to be assigned in `build`.
        self.loaded_weights: list[Any] | None = None

    @property
    def loss_scale_factor(self) -> Any:
        return self.inner.loss_scale_factor

    def checked_options(self, given: dict[str, Any]) -> dict[str, Any]:
        self.scope = options_lib.take_name(given) or self.scope
        wanted = super().checked_options(given)
        _require_valid(wanted)
        return wanted

    def set_options(self, wanted: dict[str, Any]) -> None:
        if replicas.several_processes():
            # Keras's fit fails before it calls any optimizer, with an error that does not name the cause.
            logging.warning(
                "model.fit of Keras 3 fails under %s, with any optimizer. Write a custom training loop, or use a model "
                "and an optimizer of tf_keras (pip install tf-keras).",
                type(tf.distribute.get_strategy()).__name__,
            )
        if self.inner.loss_scale_factor is not None and "loss_scale_factor" not in wanted:
            logging.warning(
                "loss_scale_factor=%s of the inner optimizer is ignored: the loss is scaled by LossScaleOptimizer.",
                self.inner.loss_scale_factor,
            )
            self.inner.loss_scale_factor = None
        super().set_options(wanted)

    def build(self, variables: list[Any]) -> None:
        def build() -> None:
            with tf.init_scope(), keras.name_scope(self.scope):
                _move_under_strategy(self.inner, variables)
                before = len(self.inner.variables)  # Loading has set these: the step count and the learning rate.
                self.inner.build(variables)
                loaded, self.loaded_weights = self.loaded_weights, None
                if loaded is not None and _fit(loaded, self.inner.variables):
                    assign_all(self.inner.variables[before:], loaded[before:])
                elif loaded is not None:
                    _warn_of_other_variables(self.inner, len(loaded), True)
                    self.set_iterations(0)  # Loading has set the step count, but the slots start at zero.

        if not self.inner.built and variables:
            replicas.once(build)

    @property
    def is_built(self) -> bool:
        return self.inner.built

    def known_variables(self) -> list[Any] | None:
        return self.inner._trainable_variables if self.inner.built else None

    def reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        if not tf.distribute.has_strategy():
            return gradients
        return _unless_assigned(super().reduce, gradients, variables)

    def unscale(self, gradients: list[Any], factor: tf.Tensor, variables: list[Any] | None = None) -> list[Any]:
        if variables is None:
            return super().unscale(gradients, factor)
        unscale = super().unscale
        return _unless_assigned(lambda given, _: unscale(given, factor), gradients, variables)

    def apply(self, gradients: list[Any], variables: list[Any], **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            for each in _with_parts(self.inner):
                # The gradients are summed and unscaled already. `list` returns the (gradient, variable) pairs as they
                # are.
                stack.enter_context(replicas.overriding(each, _all_reduce_sum_gradients=list, loss_scale_factor=None))
            self.inner.apply(gradients, variables, **kwargs)

    def count_skipped_step(self) -> Any:
        # With gradient accumulation `_iterations` counts the micro-steps in the accumulators: a skipped step adds none.
        counting = [each for each in _with_parts(self.inner) if not each.gradient_accumulation_steps]
        return [each._iterations.assign_add(1) for each in counting]

    def start_averages(self) -> Any:
        # Keras starts an average in the step with iteration 0. If that step is skipped, the average would stay zero:
        # later steps would average with zeros, and `finalize_variable_values` would set the weights to zero.
        return [
            average.assign(tf.where(tf.equal(each.iterations, 0), tf.convert_to_tensor(variable), average.value))
            for each in _with_parts(self.inner)
            if each.use_ema and each.built  # A part of a MultiOptimizer without variables is not built.
            for variable, average in zip(each._trainable_variables, each._model_variables_moving_average)
            if average is not None
        ]

    def replica_variables(self) -> Iterable[tuple[Any, str]]:
        return ((variable, "_value") for variable in self.inner.variables)

    def result(self) -> Any:
        return self.inner.iterations

    def hyperparameter_names(self) -> tuple[str, ...]:
        return hyperparameters.names(self.inner)

    def config(self) -> Any:
        return keras.saving.serialize_keras_object(self.inner)

    @classmethod
    def from_config(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        # Keras 3's `optimizers.deserialize` does not find its own Lamb, and its `saving` module reads no old config.
        if "module" in config:
            return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        return keras.optimizers.deserialize(config, custom_objects=custom_objects)

    def copied(self, memo: dict[int, Any]) -> Any:
        # The copy that Keras makes of a built optimizer has no state.
        inner = self.inner
        new = type(inner).from_config(inner.get_config())
        # A Keras config does not contain the variables that are excluded from weight decay.
        if hasattr(inner, "_exclude_from_weight_decay"):
            new._exclude_from_weight_decay = set(inner._exclude_from_weight_decay)
            new._exclude_from_weight_decay_pattern = inner._exclude_from_weight_decay_pattern
        if inner.built:
            new.build(inner._trainable_variables)
        for old, copy in zip(inner.variables, new.variables):
            copy.assign(old)
        return new

    def slot(self, variable: Any, name: str, attribute: str) -> Any:
        del name
        slots = getattr(self.inner, attribute, None)
        return slots[self.inner._get_variable_index(variable)] if slots else None

    def set_iterations(self, value: int) -> None:
        # With gradient accumulation `_iterations` counts micro-steps, and `iterations` counts steps.
        self.inner._iterations.assign(value * (self.inner.gradient_accumulation_steps or 1))


@keras.saving.register_keras_serializable("tf_lossscale")
class LossScaleOptimizer(
    optimizer.LossScaleOptimizer,
    tf.__internal__.tracking.DelegatingTrackableMixin,
    keras.optimizers.LossScaleOptimizer,
):
    """The wrapper around a Keras 3 optimizer.

    Its base class is Keras's own LossScaleOptimizer, because `compile` would wrap any other class again. No code of
    that class runs, and the wrapper has no variables except the loss scale's.
    """

    _family_class = Family
    _family: Family

    def _init_base(self) -> None:
        self.__dict__.update(name=self._family.scope, _lock=False)
        for variable in self._loss_scale.variables:
            # Keras uses the paths of variables as names in h5 files.
            variable.path = f"{self.name}/{variable.name.split(':')[0]}"

    @property
    def built(self) -> bool:
        """Whether the inner optimizer has its variables."""
        return self._optimizer.built

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of steps."""
        return self._optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self._family.set_iterations(int(tf.convert_to_tensor(value)))

    @property
    def dynamic_scale(self) -> Any:
        """The variable of the loss scale, by its name in Keras 3."""
        return self._loss_scale.current_loss_scale

    @property
    def step_counter(self) -> Any:
        """The counter of finite steps, by its name in Keras 3."""
        return self._loss_scale.good_steps

    finalize_variable_values = optimizer.finalize_variable_values
    exclude_from_weight_decay = of_inner(keras.optimizers.Optimizer.exclude_from_weight_decay)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Raise ValueError: Keras has no such method on TensorFlow."""
        raise ValueError(
            "Keras does not support `stateless_apply` with the TensorFlow backend. Call `apply(scaled_gradients, "
            "variables)`, which updates the variables in place."
        )

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, **super().get_config()}

    def set_weights(self, weights: list[Any]) -> None:
        if self.built or len(weights) <= len(self.variables):
            super().set_weights(weights)
            return
        # When Keras loads the optimizer of an .h5 model, the optimizer does not know the model's variables yet. The
        # step count, the learning rate and the loss scale are set at once, and the slots when the optimizer is built.
        values = [keras.ops.convert_to_numpy(weight) for weight in weights]
        of_scale = list(self._loss_scale.variables)
        loaded = self._family.loaded_weights = values[: len(values) - len(of_scale)]
        super().set_weights([*loaded[: len(self.weights)], *values[len(loaded) :]])

    # `.keras` files have the order of Keras's own LossScaleOptimizer, so that each class reads the other's files. In
    # Keras's files the first value is a step count that is always 0; in ours it is the count towards the hysteresis.

    def save_own_variables(self, store: Any) -> None:
        scale = self._loss_scale()
        good, bad = (self._loss_scale.good_steps, self._loss_scale.bad_steps) if self.dynamic else (0, 0)
        for i, value in enumerate([0 if bad is None else bad, 0.0, good, scale, *self.weights]):
            store[str(i)] = keras.ops.convert_to_numpy(value)

    def load_own_variables(self, store: Any) -> None:
        values = [store[str(i)] for i in range(len(store.keys()))]
        inner: list[Any] = self.weights
        of_scale: list[tuple[Any, Any]] = []
        if len(values) == len(inner) + 4 or (_are_of_a_wrapper(values) and not _fit(values, inner)):
            if self.dynamic:
                of_scale.append((self._loss_scale.good_steps, int(values[2][()])))
                of_scale.append((self._loss_scale.current_loss_scale, float(values[3][()])))
                if self._loss_scale.bad_steps is not None:
                    of_scale.append((self._loss_scale.bad_steps, int(values[0][()])))
            values = values[4:]
        if len(values) > len(inner) and not self.built:
            logging.warning(
                "The saved slots are not loaded, because %s is not built. Build the optimizer before loading.",
                type(self._optimizer).__name__,
            )
            values = values[: len(inner)]
        # For example, a layer was frozen after the training. Keras warns about the mismatch as well.
        if len(values) != len(inner):
            _warn_of_other_variables(self._optimizer, len(values), bool(of_scale))
            inner = values = []
        for variable, value in [*zip(inner, values), *of_scale]:
            variable.assign(value)
        self._loss_scale.bring_into_range()

    def _checkpoint_adapter(self, path: str) -> None:
        # TensorFlow calls this before it restores any part: the names in the file tell which class wrote it.
        names = [name for name, _ in tf.train.list_variables(path)]
        self.__dict__["_keras_wrote"] = any("/dynamic_scale/.ATTRIBUTES" in name for name in names)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        if vars(self).get("_keras_wrote"):
            return _part_of_keras_wrapper(self, name)
        if name == "inner_optimizer" and "_keras_wrote" not in vars(self):
            raise ValueError(
                "keras.optimizers.LossScaleOptimizer wrote this checkpoint, which can be restored with TensorFlow 2.17 "
                f"or newer, but not with {tf.__version__}. Use a newer TensorFlow, or save the model as .keras. "
                "Nothing was restored."
            )
        return self._optimizer._lookup_dependency(name, *args)


# Values in a checkpoint of Keras's LossScaleOptimizer that the wrapper does not need, and their dtypes. A fixed scale
# needs neither Keras's scale nor its counter.
_UNUSED = {
    "_iterations": tf.int64,
    "_learning_rate": tf.float32,
    "dynamic_scale": tf.float32,
    "step_counter": tf.int64,
}


def _part_of_keras_wrapper(wrapper: LossScaleOptimizer, name: str) -> Any:
    """Return the counterpart of an object in a checkpoint of Keras's LossScaleOptimizer."""
    parts = {"inner_optimizer": wrapper._optimizer}
    if wrapper.dynamic:
        parts["dynamic_scale"] = wrapper._loss_scale._lookup_dependency("current_loss_scale")
        parts["step_counter"] = wrapper._loss_scale.good_steps
    if name not in parts:
        dtype = _UNUSED.get(name)
        with tf.init_scope():
            parts[name] = (
                tf.__internal__.tracking.AutoTrackable()
                if dtype is None
                else tf.Variable(tf.zeros([], dtype), trainable=False)
            )
        # The wrapper keeps the object alive, because the checkpoint has only a weak reference.
        wrapper.__dict__.setdefault("_meaningless", {})[name] = parts[name]
    return parts[name]


def _fit(values: list[Any], variables: list[Any]) -> bool:
    return [tuple(value.shape) for value in values] == [tuple(variable.shape) for variable in variables]


def _warn_of_other_variables(inner: Any, saved: int, with_scale: bool) -> None:
    logging.warning(
        "The saved optimizer has %d variables, but this %s has %d: other variables were trained then. They are not "
        "loaded%s.",
        *(saved, type(inner).__name__, len(inner.variables)),
        ", but the loss scale is" if with_scale else "",
    )


def _are_of_a_wrapper(values: list[Any]) -> bool:
    """Return whether the saved values begin with those of a wrapper, which has a learning rate of zero."""
    return len(values) >= 4 and all(value.shape == () for value in values[:4]) and values[1][()] == 0


def _unless_assigned(
    change: Callable[..., list[Any]], gradients: list[Any], variables: list[Any], *args: Any
) -> list[Any]:
    """Change gradients, except those that Keras assigns to their variables as new values (for float8)."""
    assigned = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
    changed = change([None if new else g for g, new in zip(gradients, assigned)], variables, *args)
    return [g if new else other for g, other, new in zip(gradients, changed, assigned)]


def _require_valid(options: dict[str, Any]) -> None:
    """Raise for options out of range, by creating a Keras optimizer with them."""
    if options:
        keras.optimizers.SGD(**options)


def _move_under_strategy(inner: Any, variables: list[Any]) -> None:
    """Move an unbuilt optimizer that was created outside the strategy's scope into the scope.

    Keras records the strategy, and creates the step count and the learning rate, in the constructor. A step outside of
    `strategy.run` needs the strategy that the trained variables were created under.
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy():
        strategy = replicas.strategy_of(tensors_of(variables)[0]) or strategy
    for each in _with_parts(inner):
        if each._distribution_strategy is strategy:
            continue
        each._distribution_strategy = strategy
        for name in ("_iterations", "_learning_rate"):
            variable = vars(each).get(name)
            if isinstance(variable, keras.Variable):
                # Keep the Keras variable, to which other objects may refer, and put a new TensorFlow variable into it.
                variable._initialize(keras.ops.convert_to_numpy(variable))


def _with_parts(inner: Any) -> list[Any]:
    """Return an optimizer and its parts: a MultiOptimizer consists of several optimizers."""
    return [inner, *getattr(inner, "optimizers", [])]
