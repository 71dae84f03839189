"""Adapter for Keras 3's optimizers, which are `tf.keras.optimizers` in TensorFlow 2.16 and newer."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.families import keras3_files as files
from tf_lossscale.libraries import keras_versions
from tf_lossscale.libraries.models import tensors_of, unique
from tf_lossscale.wrapper import checks, family, forwarding, optimizer, registry, saving
from tf_lossscale.wrapper.checks import assign_all
from tf_lossscale.wrapper.forwarding import of_inner

keras: Any = keras_versions.keras_3()
_OwnWrapper: Any = keras_versions.own_class(keras.optimizers.Optimizer, "LossScaleOptimizer")


class Keras3Family(family.Family):
    """The adapter for Keras 3's optimizers."""

    _writes_variables_directly = False
    _saving = keras.saving
    _options: tuple[str, ...] = tuple(checks.DEFAULTS)
    delegated: tuple[str, ...] = (
        *(name for name in _options if name not in ("name", "loss_scale_factor")),
        *("_iterations", "_learning_rate"),
    )

    def __init__(self, inner: Any):
        super().__init__(inner)
        #: The name scope in which `build` creates the optimizer's variables.
        self.scope: str = "loss_scale_optimizer"
        #: Values that were loaded before the optimizer was built, which `build` assigns to the optimizer's variables.
        #: The values of a loss scale may come after them.
        self._loaded_weights: list[Any] | None = None
        #: The names of these values in the file, or None for each value that does not come from a file.
        self._loaded_names: list[str | None] = []
        #: The wrapper's argument of this name.
        self.loss_scale_factor: Any = None

    def _custom_sum(self) -> Any:
        # A user may override this method to sum gradients over workers without a distribution strategy.
        custom_sum = family.overridden(self.inner, "_all_reduce_sum_gradients", keras.optimizers.Optimizer)
        return custom_sum and (lambda pairs: custom_sum([(g, tensors_of([variable])[0]) for g, variable in pairs]))

    def _checked_options(self, given: dict[str, Any]) -> dict[str, Any]:
        self.scope = checks.take_name(given) or self.scope
        wanted = super()._checked_options(given)
        if wanted:
            # Keras's constructor raises an error if an option is out of range.
            keras.optimizers.SGD(**wanted)
        return wanted

    def _set_options(self, wanted: dict[str, Any]) -> None:
        if replicas.several_processes():
            # When several processes train together, Keras 3's `fit` fails before it calls the optimizer. Its error
            # message does not name the cause, so this warning does.
            logging.warning(
                "Keras 3's model.fit fails under %s, whichever optimizer is used. Write a custom training loop, or use "
                "a tf_keras model with a tf_keras optimizer (pip install tf-keras).",
                type(tf.distribute.get_strategy()).__name__,
            )
        # The wrapper multiplies by this factor and divides by it. Keras must not divide a second time.
        self.loss_scale_factor = wanted.get("loss_scale_factor")
        if self.inner.loss_scale_factor is not None:
            if self.loss_scale_factor is None:
                logging.warning(
                    "loss_scale_factor=%s of the inner optimizer is ignored: the loss is scaled by LossScaleOptimizer.",
                    self.inner.loss_scale_factor,
                )
            self.inner.loss_scale_factor = None
        super()._set_options({name: value for name, value in wanted.items() if name != "loss_scale_factor"})

    def build(self, variables: list[Any]) -> None:
        if replicas.uses_merge_call() and any(part.gradient_accumulation_steps for part in _with_parts(self.inner)):
            raise ValueError(
                "Keras 3's optimizers do not support `gradient_accumulation_steps` on several replicas, with or "
                "without a LossScaleOptimizer. Use larger batches, or add up the gradients in variables of your "
                "own and call apply_gradients() only in every n-th step."
            )

        def build() -> None:
            with tf.init_scope(), keras.name_scope(self.scope):
                _move_under_strategy(self.inner, variables)
                # The step count and the learning rate exist before `build`. If values were loaded, `set_weights` has
                # therefore already assigned these two.
                before = len(self.inner.variables)
                self.inner.build(variables)
                loaded, self._loaded_weights = self._loaded_weights, None
                own = self.inner.variables
                names = zip(self._loaded_names[before:], own[before:])
                have_names = all(name in (None, files.name_of(variable)) for name, variable in names)
                if loaded is not None and have_names and files.same_shapes(loaded[: len(own)], own):
                    assign_all(own[before:], loaded[before : len(own)])
                elif loaded is not None:
                    files.warn_of_other_variables(self.inner, len(loaded), True)
                    # The saved slots do not fit the variables, so the slots start at zero. The step count, which
                    # `set_weights` has already loaded, must start at zero as well.
                    self._set_iterations(0)

        if not self.inner.built and variables:
            replicas.once(build)

    @property
    def _is_built(self) -> bool:
        return self.inner.built

    def known_variables(self) -> list[Any] | None:
        return self.inner._trainable_variables if self.inner.built else None

    def _reduces_itself(self, variables: list[Any]) -> bool:
        return replicas.several_replicas() and any(map(self._overwrites, variables))

    def _reduce(self, gradients: list[Any], variables: list[Any], custom_sum: Any) -> list[Any]:
        reduce = functools.partial(super()._reduce, custom_sum=custom_sum)
        return self._unless_overwritten(reduce, gradients, variables)

    def _unscale(self, gradients: list[Any], factor: tf.Tensor, variables: list[Any] | None = None) -> list[Any]:
        if variables is None:
            return super()._unscale(gradients, factor)
        unscale = super()._unscale
        return self._unless_overwritten(lambda given, _: unscale(given, factor), gradients, variables)

    def _overwrites(self, variable: Any) -> bool:
        # Keras's float8 layers return the new values of their quantization scales as gradients.
        return getattr(variable, "overwrite_with_gradient", False)

    def apply(self, gradients: list[Any], variables: list[Any], **kwargs: Any) -> None:
        if self.inner.loss_scale_factor is not None:
            raise ValueError(
                f"loss_scale_factor={self.inner.loss_scale_factor} was set on the inner {type(self.inner).__name__}, "
                "which would divide the gradients once more. Set it on the LossScaleOptimizer."
            )
        # Keras's own `apply_gradients` only calls `apply`, but a user may override `apply_gradients`.
        override = family.overridden(self.inner, "apply_gradients", keras.optimizers.Optimizer)
        with contextlib.ExitStack() as stack:
            # Even on one replica, Keras's method would keep the graph of a traced step alive.
            for optimizer in _with_parts(self.inner):
                stack.enter_context(family.without_summing(optimizer, "_all_reduce_sum_gradients"))
            if override is None:
                self.inner.apply(gradients, variables, **kwargs)
            else:
                override(list(zip(gradients, variables)), **kwargs)

    def count_skipped_step(self) -> Any:
        # With gradient accumulation, `_iterations` counts micro-steps. A skipped step adds nothing to the accumulators,
        # so skipped steps are not counted.
        counting = [part for part in _with_parts(self.inner) if not part.gradient_accumulation_steps]
        return [each._iterations.assign_add(1) for each in counting]

    def _start_averages(self) -> Any:
        # Keras initializes a moving average in the step in which `iterations` is 0. If that step is skipped, this
        # method initializes the average. Otherwise the average would start at zero, and `finalize_variable_values`
        # would overwrite the weights with averages that are too small.
        return [
            average.assign(tf.where(tf.equal(part.iterations, 0), tf.convert_to_tensor(variable), average.value))
            for part in _with_parts(self.inner)
            # A MultiOptimizer may contain an optimizer that has no variables and is therefore not built.
            if part.use_ema and part.built
            for variable, average in zip(part._trainable_variables, part._model_variables_moving_average)
            if average is not None
        ]

    def _replica_variables(self) -> Iterable[tuple[Any, str]]:
        return ((variable, "_value") for variable in self.inner.variables)

    def _result(self) -> Any:
        return self.inner.iterations

    def hyperparameter_names(self) -> tuple[str, ...]:
        return forwarding.names(self.inner)

    def config(self) -> Any:
        return keras.saving.serialize_keras_object(self.inner)

    @classmethod
    def from_config(cls, config: Any, custom_objects: dict[str, Any] | None) -> Any:
        # `keras.optimizers.deserialize` does not recognize Keras's own Lamb, but `keras.saving` does. However,
        # `keras.saving` can read only configs that have a `module` key, which older configs lack.
        if "module" in config:
            return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        return keras.optimizers.deserialize(config, custom_objects=custom_objects)

    def _copied(self, memo: dict[int, Any]) -> Any:
        # The copy that Keras makes of a built optimizer has no state. The optimizer is therefore created again from its
        # config, and the values of its variables are copied.
        inner = self.inner
        with contextlib.nullcontext() if tf.distribute.has_strategy() else inner._distribution_strategy.scope():
            new = type(inner).from_config(inner.get_config())
            # A config does not contain the variables that are excluded from weight decay, which `build` reads, or
            # attributes that were set later.
            _copy_attributes(inner, new, (set, re.Pattern))
            if inner.built:
                new.build(inner._trainable_variables)
        _copy_attributes(inner, new, (bool, int, float, str))
        for old, copied in zip(inner.variables, new.variables):
            copied.assign(old)
        return new

    def _set_iterations(self, value: int) -> None:
        """Set the step count."""
        # With gradient accumulation, `_iterations` counts micro-steps, whereas `iterations` counts complete steps.
        self.inner._iterations.assign(value * (self.inner.gradient_accumulation_steps or 1))


class _ScaleVariable(keras.Variable):
    """A variable of the loss scale among the optimizer's variables, which are Keras's own."""

    def __init__(self, variable: tf.Variable, name: str):
        self._held = variable
        value, dtype = tf.convert_to_tensor(variable), variable.dtype.name
        super().__init__(value, dtype=dtype, trainable=False, autocast=False, name=name)

    def _initialize(self, value: Any) -> None:
        del value
        self._value = self._held


@keras.saving.register_keras_serializable("tf_lossscale")
@registry.named
class Keras3Wrapper(
    optimizer.LossScaleOptimizer,
    tf.__internal__.tracking.DelegatingTrackableMixin,
    _OwnWrapper,
):
    """The wrapper around a Keras 3 optimizer.

    Under the `mixed_float16` dtype policy, `compile` wraps every optimizer that is not an instance of Keras's own
    LossScaleOptimizer. This class derives from Keras's class to avoid a second wrapper, but runs none of its code. The
    wrapper has no variables other than the inner optimizer's and the loss scale's.
    """

    _family_class = Keras3Family
    _family: Keras3Family

    def _init_base(self) -> None:
        # Keras's setters read `_lock`. Its constructor, which would set it, is not called.
        self.__dict__.update(name=self._family.scope, _lock=False, loss_scale_factor=self._family.loss_scale_factor)

    @property
    def variables(self) -> saving.CallableList:
        """The inner optimizer's variables, followed by the loss scale's, each as a `keras.Variable`."""
        of_scale = self.scaler.variables
        listed = self.__dict__.setdefault("_listed", [])
        if [id(entry.value) for entry in listed] != [id(variable) for variable in of_scale]:
            # In h5 files, Keras uses each variable's path as its name.
            names = unique([variable.name.split(":")[0] for variable in of_scale])
            with tf.init_scope(), keras.name_scope(self.name):
                listed[:] = map(_ScaleVariable, of_scale, names)
        return saving.CallableList([*self.weights, *listed])

    @property
    def built(self) -> bool:
        """Whether the inner optimizer has created its variables."""
        return self._optimizer.built

    @property
    def iterations(self) -> Any:
        """The inner optimizer's step count."""
        return self._optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self._family._set_iterations(int(tf.convert_to_tensor(value)))

    @property
    def dynamic_scale(self) -> Any:
        """The loss scale variable, which Keras 3 calls `dynamic_scale`."""
        return self.scaler.current_loss_scale

    @property
    def step_counter(self) -> Any:
        """The number of finite steps counted towards the next growth of the scale. The name is Keras 3's."""
        return self.scaler.good_steps

    finalize_variable_values = optimizer.finalize_variable_values
    exclude_from_weight_decay = of_inner(keras.optimizers.Optimizer.exclude_from_weight_decay)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Raise ValueError, because Keras does not support this method with the TensorFlow backend."""
        raise ValueError(
            "Keras does not support `stateless_apply` with the TensorFlow backend. Call `apply(scaled_gradients, "
            "variables)`, which updates the variables in place."
        )

    def get_config(self) -> dict[str, Any]:
        factor = {} if self.loss_scale_factor is None else {"loss_scale_factor": self.loss_scale_factor}
        return {"name": self.name, **super().get_config(), **factor}

    def set_weights(self, weights: list[Any]) -> None:
        if self.built or len(weights) <= len(self.variables):
            super().set_weights(weights)
            return
        # When Keras loads an optimizer from an .h5 file, the optimizer does not know the model's variables yet. The
        # step count, the learning rate and the loss scale are set immediately. The slots are set when the optimizer is
        # built.
        values = [keras.ops.convert_to_numpy(weight) for weight in weights]
        of_scale = self._of_scale_in(values)
        super().set_weights([*values[: len(self.weights)], *of_scale])
        self._family._loaded_weights = values
        self._family._loaded_names = [files.name_of(weight) for weight in weights]

    def _of_scale_in(self, values: list[Any]) -> list[Any]:
        """Return the values of the loss scale in an .h5 file, which come last, or none if they are of another rule."""
        count = len(self.scaler.variables)
        # A rule of the user's, which the config does not contain, has variables of its own at the end.
        for end in range(len(values), len(self.weights) + count - 1, -1):
            if self._are_of_scale(values[end - count : end]):
                return values[end - count : end]
        return []

    save_own_variables = files.save
    load_own_variables = files.load
    _checkpoint_adapter = files.note_checkpoint
    _lookup_dependency = files.dependency


LossScaleOptimizer = Keras3Wrapper


def _move_under_strategy(inner: Any, variables: list[Any]) -> None:
    """Move an unbuilt optimizer into the strategy's scope if it was created outside of the scope.

    A Keras optimizer's constructor records the strategy in use, and creates the step count and the learning rate. If no
    strategy is in use now, this function uses the strategy under which the trained variables were created.
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy():
        strategy = replicas.strategy_of(tensors_of(variables)[0]) or strategy
    for part in _with_parts(inner):
        if part._distribution_strategy is strategy:
            continue
        part._distribution_strategy = strategy
        for name in ("_iterations", "_learning_rate"):
            variable = vars(part).get(name)
            if isinstance(variable, keras.Variable):
                # Keep the Keras variable, because other objects may refer to it, but put a new TensorFlow variable into
                # it.
                variable._initialize(keras.ops.convert_to_numpy(variable))


def _copy_attributes(inner: Any, new: Any, types: tuple[type, ...]) -> None:
    """Copy those attributes of an optimizer and its parts whose values have one of the types."""
    for old, copied in zip(_with_parts(inner), _with_parts(new)):
        vars(copied).update({name: copy.copy(x) for name, x in vars(old).items() if isinstance(x, types)})


def _with_parts(inner: Any) -> list[Any]:
    """Return a list that contains the optimizer and, if it is a MultiOptimizer, the optimizers inside it."""
    return [inner, *getattr(inner, "optimizers", [])]
