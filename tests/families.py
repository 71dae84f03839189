"""The table of optimizer families: every promise is tested for each row."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras


@dataclasses.dataclass(frozen=True)
class Family:
    """One row: a library's optimizers and what of them can be compared."""

    name: str
    optimizers: Any
    keras: Any
    variable: Callable[..., Any] = tf.Variable

    def adam(self, **kwargs):
        """An Adam with the usual arguments."""
        return self.optimizers.Adam(0.1, **kwargs)

    def sgd(self, **kwargs):
        """An SGD with a learning rate of 0.5."""
        return self.optimizers.SGD(0.5, **kwargs)


FAMILIES = (
    Family("keras3", tf.keras.optimizers, tf.keras),
    Family("tf_keras", tf_keras.optimizers, tf_keras),
    Family("tf_keras_legacy", tf_keras.optimizers.legacy, tf_keras),
)
IDS = [family.name for family in FAMILIES]
