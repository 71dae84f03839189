"""Keras 3: `tf.keras.optimizers` since TensorFlow 2.16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.adapters.keras3_layers import with_layer_names
from tf_lossscale.core import replicas, scaling
from tf_lossscale.libraries import keras_versions
from tf_lossscale.wrapper import hyperparameters, optimizer
from tf_lossscale.wrapper import options as options_lib

keras: Any = keras_versions.keras_3()


@keras.saving.register_keras_serializable("tf_lossscale")
class LossScaleOptimizer(
    optimizer.LossScaleOptimizer,
    tf.__internal__.tracking.DelegatingTrackableMixin,
    keras.optimizers.LossScaleOptimizer,
):
    """The wrapper around a Keras 3 optimizer.

    Its base class is Keras's own LossScaleOptimizer, because `compile` would wrap any other class again. No code of
    that class runs, and the wrapper's only variables are those of the loss scale.
    """

    _is_adapter = True
    _inner_options = tuple(options_lib.DEFAULTS)
    _delegated = (
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "use_ema",
        "ema_momentum",
        "ema_overwrite_frequency",
        "weight_decay",
        "gradient_accumulation_steps",
        "loss_scale_factor",
        "_iterations",
        "_learning_rate",
    )

    def _checked_options(self, inner: Any, options: dict[str, Any]) -> dict[str, Any]:
        name = options_lib.take_name(options)
        wanted = super()._checked_options(inner, options)
        _require_valid(wanted)
        wanted["name"] = name
        return wanted

    def _adopt(self, options: dict[str, Any]) -> None:
        name = options.pop("name")
        inner = self._optimizer
        if replicas.several_processes():
            # Keras's fit fails before it calls any optimizer, with an error that does not name the cause.
            logging.warning(
                "model.fit of Keras 3 fails under %s, with any optimizer. Write a custom training loop, or use a model "
                "and an optimizer of tf_keras (pip install tf-keras).",
                type(tf.distribute.get_strategy()).__name__,
            )
        if inner.loss_scale_factor is not None and "loss_scale_factor" not in options:
            logging.warning(
                "loss_scale_factor=%s of the inner optimizer is ignored: the loss is scaled by LossScaleOptimizer.",
                inner.loss_scale_factor,
            )
            inner.loss_scale_factor = None
        super()._adopt(options)
        self.__dict__.update(name=name or "loss_scale_optimizer", _lock=False)
        for variable in self._loss_scale.variables:
            variable.path = f"{self.name}/{variable.name.split(':')[0]}"  # Keras writes h5 files by path

    def _factor(self) -> tf.Tensor:
        factor = self._optimizer.loss_scale_factor
        return self._loss_scale() if factor is None else self._loss_scale() * factor

    def _build_inner(self, variables: list[Any]) -> None:
        def build() -> None:
            with tf.init_scope(), keras.name_scope(self.name):
                _move_under_strategy(self._optimizer)
                self._optimizer.build(variables)
                if "_loaded_weights" in vars(self):
                    loaded = self.__dict__.pop("_loaded_weights")
                    if _fit(loaded, self.weights):
                        super(LossScaleOptimizer, self).set_weights(loaded)
                    else:
                        _warn_of_other_variables(self._optimizer, len(loaded), True)
                        self._set_iterations(self._optimizer, 0)  # loaded already, but the slots begin anew

        if not self._optimizer.built and variables:
            replicas.once(build)

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        kept = [_overwrites(v) for v in variables]
        reduced = replicas.sum_over_replicas([None if keep else g for g, keep in zip(gradients, kept)])
        return [g if keep else r for g, r, keep in zip(gradients, reduced, kept)]

    def _unscale(self, gradients: list[Any], variables: list[Any], factor: tf.Tensor) -> list[Any]:
        unscaled = scaling.unscale([None if _overwrites(v) else g for g, v in zip(gradients, variables)], factor)
        return [g if _overwrites(v) else u for g, u, v in zip(gradients, unscaled, variables)]

    def _apply_reduced(self, grads_and_vars: list[tuple[Any, Any]], **kwargs: Any) -> None:
        with _gradients_taken_as_they_are(self._optimizer):
            self._optimizer.apply([g for g, _ in grads_and_vars], [v for _, v in grads_and_vars], **kwargs)

    def _advance_iterations(self) -> Any:
        # With gradient accumulation the count tells which micro-steps are in the accumulators.
        counting = [each for each in _with_parts(self._optimizer) if not each.gradient_accumulation_steps]
        return [each._iterations.assign_add(1) for each in counting]

    def _start_averages(self) -> Any:
        # Keras starts an average in the step with iteration 0. If that is skipped, the average would stay zero, and
        # `finalize_variable_values` would set the weights to zero; later steps would average with these zeros.
        return [
            average.assign(tf.where(tf.equal(each.iterations, 0), tf.convert_to_tensor(variable), average.value))
            for each in _with_parts(self._optimizer)
            if each.use_ema and each.built  # one without variables is not built
            for variable, average in zip(each._trainable_variables, each._model_variables_moving_average)
            if average is not None
        ]

    def _own_copies(self) -> Iterable[tuple[Any, str]]:
        return ((variable, "_value") for variable in self._optimizer.variables)

    def _eager_result(self) -> Any:
        return self._optimizer.iterations

    def _hyperparameter_names(self) -> tuple[str, ...]:
        return hyperparameters.names(self._optimizer)

    def _known_variables(self) -> list[Any] | None:
        return self._optimizer._trainable_variables if self._optimizer.built else None

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
        self._set_iterations(self._optimizer, int(tf.convert_to_tensor(value)))

    @property
    def dynamic_scale(self) -> Any:
        """The variable of the loss scale, by the name that Keras 3 gives it."""
        return self._loss_scale.current_loss_scale

    @property
    def step_counter(self) -> Any:
        """The counter of finite steps, by the name that Keras 3 gives it."""
        return self._loss_scale.good_steps

    def finalize_variable_values(self, var_list: list[Any] | None = None) -> None:
        """Overwrite the variables with their moving average, if the inner optimizer keeps one.

        Args:
            var_list: the variables; None for those that the optimizer is built for.
        """
        variables = self._given_or_known(var_list, "finalize_variable_values()")
        self._optimizer.finalize_variable_values(variables)
        self._stall.look(self, self._loss_scale)  # `fit` ends here

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Exclude variables from the inner optimizer's weight decay; call it before `build`."""
        self._optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Raise ValueError: Keras has no such method on TensorFlow."""
        raise ValueError(
            "Keras does not support `stateless_apply` with the TensorFlow backend. Call `apply(scaled_gradients, "
            "variables)`, which updates the variables in place."
        )

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, **super().get_config()}

    def _serialized_inner(self) -> Any:
        return keras.saving.serialize_keras_object(self._optimizer)

    @classmethod
    def _deserialized_inner(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        # Keras 3's `optimizers.deserialize` does not find its own Lamb, and its `saving` no old config.
        if "module" in config:
            return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        return keras.optimizers.deserialize(config, custom_objects=custom_objects)

    def _copied_inner(self, memo: dict[int, Any]) -> Any:
        # Keras's own copy of an optimizer that is built has no state.
        inner = self._optimizer
        copied = type(inner).from_config(inner.get_config())
        if hasattr(inner, "_exclude_from_weight_decay"):  # no part of a config
            copied._exclude_from_weight_decay = set(inner._exclude_from_weight_decay)
            copied._exclude_from_weight_decay_pattern = inner._exclude_from_weight_decay_pattern
        if inner.built:
            copied.build(inner._trainable_variables)
        for old, new in zip(inner.variables, copied.variables):
            new.assign(old)
        return copied

    def set_weights(self, weights: list[Any]) -> None:
        if self.built or len(weights) <= len(self.variables):
            super().set_weights(weights)
            return
        # Keras loads an .h5 model's optimizer without the model's variables: the slots are set when it is
        # built, the step count, the learning rate and the loss scale now.
        values = [keras.ops.convert_to_numpy(weight) for weight in weights]
        of_scale = list(self._loss_scale.variables)
        loaded = self.__dict__["_loaded_weights"] = values[: len(values) - len(of_scale)]
        super().set_weights([*loaded[: len(self.weights)], *values[len(loaded) :]])

    # `.keras` files: the order of Keras's own LossScaleOptimizer, so that each reads the other's. The first value is
    # there a step count that stays 0 and is never read, here the overflows that count towards the hysteresis.

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
        if len(values) != len(inner):  # a layer was frozen after the training, for example: Keras warns as well
            _warn_of_other_variables(self._optimizer, len(values), bool(of_scale))
            inner = values = []
        for variable, value in [*zip(inner, values), *of_scale]:
            variable.assign(value)
        self._loss_scale.bring_into_range()

    # Restoring.

    _optimizers = keras.optimizers
    _optimizers_name = "tf.keras.optimizers"
    _with_layer_names = staticmethod(with_layer_names)

    @staticmethod
    def _is_built(optimizer: Any) -> bool:
        return optimizer.built

    @staticmethod
    def _slot_of(inner: Any, variable: Any, slot: str, attribute: str) -> Any:
        del slot
        slots = getattr(inner, attribute, None)
        return slots[inner._get_variable_index(variable)] if slots else None

    @staticmethod
    def _set_iterations(inner: Any, value: int) -> None:
        # With gradient accumulation Keras counts micro-steps inside, and shows steps.
        inner._iterations.assign(value * (inner.gradient_accumulation_steps or 1))

    def _checkpoint_adapter(self, path: str) -> None:
        # TensorFlow calls this before it looks for the parts, so it is here that we see who wrote the checkpoint.
        names = [name for name, _ in tf.train.list_variables(path)]
        self.__dict__["_keras_wrote"] = any("/dynamic_scale/.ATTRIBUTES" in name for name in names)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        if vars(self).get("_keras_wrote") and self.dynamic:
            return _part_of_keras_wrapper(self, name)
        if name == "inner_optimizer" and "_keras_wrote" not in vars(self):
            raise ValueError(
                "keras.optimizers.LossScaleOptimizer wrote this checkpoint, which can be restored with TensorFlow 2.17 "
                f"or newer, but not with {tf.__version__}. Use a newer TensorFlow, or save the model as .keras. "
                "Nothing was restored."
            )
        return self._optimizer._lookup_dependency(name, *args)


def _part_of_keras_wrapper(wrapper: LossScaleOptimizer, name: str) -> Any:
    """Return the counterpart of a part of Keras's LossScaleOptimizer; its count and learning rate are not used."""
    parts = {
        "inner_optimizer": wrapper._optimizer,
        "dynamic_scale": wrapper._loss_scale._lookup_dependency("current_loss_scale"),
        "step_counter": wrapper._loss_scale.good_steps,
    }
    if name not in parts:
        dtype = {"_iterations": tf.int64, "_learning_rate": tf.float32}.get(name)
        with tf.init_scope():
            parts[name] = (
                tf.__internal__.tracking.AutoTrackable()
                if dtype is None
                else tf.Variable(tf.zeros([], dtype), trainable=False)
            )
        # Kept until the next restore: the checkpoint holds it only weakly.
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
    """Return whether saved values begin with those of a wrapper, whose own learning rate is zero."""
    return len(values) >= 4 and all(value.shape == () for value in values[:4]) and values[1][()] == 0


def _overwrites(variable: Any) -> bool:
    return getattr(variable, "overwrite_with_gradient", False)


def _require_valid(options: dict[str, Any]) -> None:
    """Raise for options out of range, by creating a Keras optimizer with them."""
    if options:
        keras.optimizers.SGD(**options)


def _move_under_strategy(inner: Any) -> None:
    """Move an optimizer, created outside the strategy's scope and not built, into that scope.

    Keras notes the strategy, and makes the step count and the learning rate, when the optimizer is constructed.
    """
    strategy = tf.distribute.get_strategy()
    for each in _with_parts(inner):
        if each._distribution_strategy is strategy:
            continue
        each._distribution_strategy = strategy
        for name in ("_iterations", "_learning_rate"):
            variable = vars(each).get(name)
            if isinstance(variable, keras.Variable):
                # The same Keras variable, which may be held elsewhere, with a new one of TensorFlow in it.
                variable._initialize(keras.ops.convert_to_numpy(variable))


def _with_parts(inner: Any) -> list[Any]:
    """Return an optimizer, and the optimizers that it consists of."""
    return [inner, *getattr(inner, "optimizers", [])]


@contextlib.contextmanager
def _gradients_taken_as_they_are(inner: Any) -> Iterator[None]:
    """Keep Keras from reducing and unscaling the gradients in `apply`: both are done already."""
    with contextlib.ExitStack() as stack:
        for each in _with_parts(inner):
            stack.enter_context(replicas.overriding(each, _all_reduce_sum_gradients=list, loss_scale_factor=None))
        yield
