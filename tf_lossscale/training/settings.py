"""The settings of a training run. This module does not import TensorFlow, so that `--help` is quick."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

OPTIMIZERS = ("adam", "rmsprop", "sgd")


@dataclasses.dataclass
class Settings:
    """The settings of a run. They are saved with its checkpoint, so that `--resume` can read them.

    >>> Settings().optimizer
    'adam'
    """

    optimizer: str = "adam"
    steps: int = 300
    seed: int = 0
    loss_weight: float = 1e-5
    growth_steps: int = 50
    initial_scale: float = 2.0**30


class Setup(NamedTuple):
    """One of the three training setups that `tf-lossscale train` compares.

    >>> SETUPS[0]
    Setup(name='float32', policy='float32', scaled=False)
    """

    name: str
    policy: str
    scaled: bool


SETUPS = (
    Setup("float32", "float32", scaled=False),
    Setup("float16 without scaling", "mixed_float16", scaled=False),
    Setup("float16 with scaling", "mixed_float16", scaled=True),
)
