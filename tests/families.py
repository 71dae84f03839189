"""The table of optimizer families: every promise is tested for each row."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import sonnet
import tensorflow as tf

from tf_lossscale.libraries import keras_versions

tf_keras = keras_versions.keras_2()


class NoKeras3:
    """What stands for Keras 3 on TensorFlow 2.15: a test that asks it for anything is skipped."""

    def __getattr__(self, name):
        pytest.skip("TensorFlow 2.15: its Keras is Keras 2")

    def __dir__(self):
        return self.names


_KERAS_2_ALONE = tf_keras.__name__ == "keras"
# Its optimizers and itself.
_KERAS_3 = (NoKeras3(),) * 2 if _KERAS_2_ALONE else (tf.keras.optimizers, tf.keras)


@dataclasses.dataclass(frozen=True)
class Family:
    """One row: a library's optimizers and what of them can be compared."""

    name: str
    optimizers: Any
    keras: Any
    classes: tuple[str, ...]  # the names of all optimizers in `optimizers` that take a step of their own
    arguments: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict, hash=False)  # name -> what it needs
    base: str = "Optimizer"  # the name of their common base class
    variable: Callable[..., Any] = tf.Variable
    counts: bool = True  # whether the optimizers count their steps, in `iterations`
    distributes: bool = True  # whether the optimizers work under TensorFlow's own strategies for several replicas

    def adam(self, **kwargs):
        """An Adam with the usual arguments."""
        return self.optimizers.Adam(0.1, **kwargs)

    def sgd(self, **kwargs):
        """An SGD with a learning rate of 0.5."""
        return self.optimizers.SGD(0.5, **kwargs)

    def apply(self, inner, gradients, variables):
        """Has a bare optimizer take a step."""
        inner.apply_gradients(zip(gradients, variables))


class TensorFlow1(Family):
    """Optimizers whose methods take TensorFlow 1's arguments."""

    def adam(self):
        return self.optimizers.AdamOptimizer(0.1)

    def sgd(self):
        return self.optimizers.GradientDescentOptimizer(0.5)


class ApplyOnly(Family):
    """Optimizers that have `apply` only."""

    def adam(self, **kwargs):
        """An optimizer with state: an Adam if there is one."""
        return super().adam(**kwargs) if "Adam" in self.classes else self.sgd(momentum=0.5, **kwargs)

    def apply(self, inner, gradients, variables):
        inner.apply(gradients, variables)


#: What the optimizers of libraries without default arguments need.
RATE = {"learning_rate": 0.1}
_OF_KERAS = ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD")
_OF_TENSORFLOW_1 = (
    *("AdadeltaOptimizer", "AdagradDAOptimizer", "AdagradOptimizer", "AdamOptimizer", "FtrlOptimizer"),
    *("GradientDescentOptimizer", "MomentumOptimizer", "ProximalAdagradOptimizer"),
    *("ProximalGradientDescentOptimizer", "RMSPropOptimizer"),
)
_OF_SONNET = ("Adam", "Momentum", "RMSProp", "SGD")

FAMILIES = (
    Family("keras3", *_KERAS_3, (*_OF_KERAS, "Adafactor", "AdamW", "Lamb", "Lion", "Muon", "ScheduleFreeAdamW")),
    Family("tf_keras", tf_keras.optimizers, tf_keras, (*_OF_KERAS, "Adafactor", "AdamW", "Lion")),
    Family("tf_keras_legacy", tf_keras.optimizers.legacy, tf_keras, _OF_KERAS, base="OptimizerV2"),
)
IDS = [family.name for family in FAMILIES]

# Without the Keras families' attributes, configs and fit: for what a step promises.
ALL_FAMILIES = (
    *FAMILIES,
    TensorFlow1(
        "tf1",
        tf.compat.v1.train,
        None,
        _OF_TENSORFLOW_1,
        dict.fromkeys(_OF_TENSORFLOW_1, RATE) | {"MomentumOptimizer": {**RATE, "momentum": 0.9}},
        counts=False,
    ),
    ApplyOnly(
        "sonnet",
        sonnet.optimizers,
        None,
        _OF_SONNET,
        dict.fromkeys(_OF_SONNET, RATE) | {"Momentum": {**RATE, "momentum": 0.9}},
        counts=False,
        distributes=False,
    ),
)
ALL_IDS = [family.name for family in ALL_FAMILIES]

# Decorators for a test that needs Keras 3, or Keras 3 and tf_keras; and for one that needs TensorFlow 2.15.
with_keras_3 = pytest.mark.skipif(_KERAS_2_ALONE, reason="TensorFlow 2.15: Keras 2 alone")
with_keras_2_alone = pytest.mark.skipif(not _KERAS_2_ALONE, reason="needs TensorFlow 2.15")
# Decorators: a test that runs for each family.
families = pytest.mark.parametrize("family", FAMILIES, ids=IDS)
keras_2_families = pytest.mark.parametrize("family", FAMILIES[1:], ids=IDS[1:])
all_families = pytest.mark.parametrize("family", ALL_FAMILIES, ids=ALL_IDS)
