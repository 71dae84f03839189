"""Adafactor for tf_keras."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale.libraries import keras_versions
from tf_lossscale.optimizers.adafactor import AdafactorBase

if TYPE_CHECKING:
    from tf_lossscale.types import Variable

tf_keras: Any = keras_versions.keras_2()

_OPTIONS = (
    "name",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "jit_compile",
    "mesh",
    "is_legacy_optimizer",
)


@tf_keras.saving.register_keras_serializable(package="tf_lossscale")
class Adafactor(AdafactorBase, tf_keras.optimizers.Optimizer):
    """Adafactor with the semantics of `torch.optim.Adafactor`, as an optimizer of tf_keras.

    `tf_lossscale.optimizers.keras3.Adafactor` documents the algorithm, the methods and the arguments.

    >>> optimizer = Adafactor(lr=0.25)
    >>> weight = tf.Variable([4.0])
    >>> _ = optimizer.apply_gradients([(tf.constant([1.0]), weight)])
    >>> round(weight.numpy().item(), 4)
    3.0

    Args:
        params: as in `keras3.Adafactor`.
        lr: as in `keras3.Adafactor`, but not a function.
        beta2_decay: as in `keras3.Adafactor`.
        eps: as in `keras3.Adafactor`.
        d: as in `keras3.Adafactor`.
        weight_decay: as in `keras3.Adafactor`.
        foreach: as in `keras3.Adafactor`. It has no effect with `use_ema`, `jit_compile` or DTensor.
        maximize: as in `keras3.Adafactor`.
        **kwargs: tf_keras's `name, clipnorm, clipvalue, global_clipnorm, use_ema, ema_momentum,
            ema_overwrite_frequency, jit_compile, mesh`; `jit_compile` is False unless given.

    Raises:
        TypeError: as in `keras3.Adafactor`.
        ValueError: as in `keras3.Adafactor`.
        KeyError: as in `keras3.Adafactor`.
    """

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
        lr = kwargs.pop("learning_rate", lr)
        for name in kwargs:
            if name not in _OPTIONS:
                raise TypeError(f"Adafactor.__init__() got an unexpected keyword argument '{name}'")
        options = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        given = self._prepare(params, options)
        kwargs = {"name": "Adafactor", "jit_compile": False, **kwargs}
        super().__init__(weight_decay=weight_decay, **kwargs)
        # The learning rates of all groups. tf.train.Checkpoint saves this attribute.
        self._rates: list[Any] = []
        for group in given:
            self._add_group(group)

    # Required by AdafactorBase. ---------------------------------------------------------------------------------

    @property
    def _is_built(self) -> bool:  # type: ignore[override]
        return getattr(self, "_built", False)

    def _key(self, variable: Any) -> Any:
        return self._var_key(variable)

    def _tensor_variable(self, variable: Any) -> Any:
        return variable

    def _new_rate_variable(self, value: float) -> Any:
        if self._mesh:
            return self._build_learning_rate(value)
        with tf.init_scope():
            rate = tf.Variable(value, name="learning_rate", dtype=tf.float64, trainable=False)
        self._rates.append(rate)
        return rate

    def _new_moment(self, variable: Any, name: str, shape: Sequence[int], dtype: tf.DType) -> Any:
        return self.add_variable_from_reference(variable, name, shape=shape)

    def _is_schedule(self, source: Any) -> bool:
        return isinstance(source, tf_keras.optimizers.schedules.LearningRateSchedule)

    def _set_iterations(self, steps: int) -> None:
        self._iterations.assign(steps)

    @classmethod
    def _serialized_schedule(cls, schedule: Any) -> dict[str, Any]:
        return tf_keras.optimizers.schedules.serialize(schedule)

    @classmethod
    def _deserialized_schedule(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None) -> Any:
        return tf_keras.optimizers.schedules.deserialize(config, custom_objects=custom_objects)

    # Required by tf_keras. --------------------------------------------------------------------------------------

    def build(self, var_list: Iterable[Any]) -> None:
        """Create the state for the variables, and for the variables of the parameter groups.

        Args:
            var_list: an iterable of `tf.Variable`.

        Raises:
            ValueError: a variable is in none of the groups that were passed to the constructor.
        """
        if self._is_built:
            return
        super().build(self._take(var_list))
        for group in self._groups:
            self._make_state(group)
        self._built = True

    def _built_for(self) -> list[Any]:
        if not self._is_built:
            return super()._built_for()
        return sorted(self._parameters(), key=lambda variable: self._index_dict[self._key(variable)])

    def _join(self, variables: list[Any]) -> None:
        if self.use_ema:
            raise ValueError("add_param_group() must be called before the optimizer is built if `use_ema` is set.")
        for variable in variables:
            self._index_dict[self._key(variable)] = len(self._index_dict)

    def _apply_weight_decay(self, variables: Any) -> None:
        pass  # Adafactor's own update includes the weight decay

    def _distributed_apply_gradients_fn(
        self, distribution: Any, grads_and_vars: Sequence[tuple[Any, Any]], **kwargs: Any
    ) -> Any:
        def beside(variable: Any, function: Any, arguments: Any) -> None:
            distribution.extended.update(variable, function, args=arguments, group=False)

        def update() -> Any:
            if self.use_ema or self.jit_compile or self._mesh:
                return super(Adafactor, self)._distributed_apply_gradients_fn(distribution, pairs, **kwargs)
            self._update_all(pairs, beside)
            return self.iterations.assign_add(1)

        pairs = list(grads_and_vars)
        return self._between_hooks([variable for _, variable in pairs], update)

    def update_step(self, gradient: Any, variable: Any) -> None:
        """Update one variable.

        Args:
            gradient: a tensor or IndexedSlices.
            variable: a variable that the optimizer is built for.
        """
        self._update_all([(gradient, variable)], lambda _, function, arguments: function(variable, *arguments))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._own_config()}
