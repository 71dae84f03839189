"""Adafactor for tf_keras."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_lossscale.libraries import keras_versions
from tf_lossscale.optimizers.torch_surface import TorchSurface
from tf_lossscale.wrapper.checks import CLIPS

tf_keras: Any = keras_versions.keras_2()


@tf_keras.saving.register_keras_serializable(package="tf_lossscale")
class Adafactor(TorchSurface, tf_keras.optimizers.Optimizer):
    """Adafactor with the semantics of `torch.optim.Adafactor`, as a tf_keras optimizer.

    `tf_lossscale.optimizers.keras3.Adafactor` documents the algorithm, the methods and the arguments.

    >>> optimizer = Adafactor(lr=0.25)
    >>> weight = tf.Variable([4.0])
    >>> _ = optimizer.apply_gradients([(tf.constant([1.0]), weight)])
    >>> round(weight.numpy().item(), 4)
    3.0

    Args:
        params: as in `keras3.Adafactor`.
        lr: as in `keras3.Adafactor`, but a function is not allowed.
        beta2_decay: as in `keras3.Adafactor`.
        eps: as in `keras3.Adafactor`.
        d: as in `keras3.Adafactor`.
        weight_decay: as in `keras3.Adafactor`.
        foreach: as in `keras3.Adafactor`. It has no effect with `use_ema`, `jit_compile` or DTensor.
        maximize: as in `keras3.Adafactor`.
        **kwargs: tf_keras's `name, clipnorm, clipvalue, global_clipnorm, use_ema, ema_momentum,
            ema_overwrite_frequency, jit_compile, mesh`; `jit_compile` is False by default.

    Raises:
        TypeError: as in `keras3.Adafactor`.
        ValueError: as in `keras3.Adafactor`.
        KeyError: as in `keras3.Adafactor`.
    """

    _keras_arguments = (
        *("name", *CLIPS, "use_ema", "ema_momentum", "ema_overwrite_frequency"),
        *("jit_compile", "mesh", "is_legacy_optimizer"),
    )
    _schedules = tf_keras.optimizers.schedules

    def _init_keras(self, **arguments: Any) -> None:
        tf_keras.optimizers.Optimizer.__init__(self, **{"name": "Adafactor", "jit_compile": False, **arguments})
        # The learning rates of all groups. tf.train.Checkpoint saves this attribute.
        self._rates: list[Any] = []

    # Required by AdafactorBase. ---------------------------------------------------------------------------------

    @property
    def _is_built(self) -> bool:
        return getattr(self, "_built", False)

    def _tensor_variable(self, variable: Any) -> Any:
        return variable

    def _new_rate_variable(self, value: float, name: str) -> Any:
        if self._mesh:
            return self._build_learning_rate(value)
        with tf.init_scope():
            rate = tf.Variable(value, name=name, dtype=tf.float64, trainable=False)
        self._rates.append(rate)
        return rate

    def _new_moment(self, variable: Any, name: str, shape: Sequence[int], dtype: tf.DType) -> Any:
        return self.add_variable_from_reference(variable, name, shape=shape)

    def _set_iterations(self, steps: int) -> None:
        self._iterations.assign(steps)

    def build(self, var_list: Iterable[Any]) -> None:
        super().build(var_list)
        self._built = True

    def _built_for(self) -> list[Any]:
        return sorted(self._parameters(), key=lambda variable: self._index_dict[self._var_key(variable)])

    def _join(self, variables: list[Any]) -> None:
        if self.use_ema:
            raise ValueError("add_param_group() must be called before the optimizer is built if `use_ema` is set.")
        for variable in variables:
            self._index_dict[self._var_key(variable)] = len(self._index_dict)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        return self._between_hooks(
            lambda: super(Adafactor, self).apply_gradients(pairs, *args, **kwargs), lambda: [v for _, v in pairs]
        )

    def _distributed_apply_gradients_fn(
        self, distribution: Any, grads_and_vars: Sequence[tuple[Any, Any]], **kwargs: Any
    ) -> Any:
        if self.use_ema or self.jit_compile or self._mesh:
            return super()._distributed_apply_gradients_fn(distribution, grads_and_vars, **kwargs)
        self._update_on_devices(distribution, grads_and_vars)
        return self.iterations.assign_add(1)
