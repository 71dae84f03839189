"""Checkpoints across strategies: another number of replicas, and an optimizer that does not fit."""

import contextlib
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import numerics
from tests.cases import combinations, slow_one_in
from tests.families import ALL_FAMILIES, families
from tf_function_tests.cell import Cell


def checkpoint_of(cell):
    return tf.train.Checkpoint(optimizer=cell.optimizer, weight=cell.weight, bias=cell.bias)


def step(cell, total):
    """A step whose gradients sum to `total` over the replicas."""
    cell.step(*[total / cell.replicas] * cell.replicas)


def restore(cell, path):
    # TensorFlow 1's optimizers make their slots when restored, without looking at the variable's strategy.
    inside = cell.family.name == "tf1" and cell.strategy is not None
    with cell.strategy.scope() if inside else contextlib.nullcontext():
        checkpoint_of(cell).restore(path)


@dataclasses.dataclass
class Trained:
    """A checkpoint of a training, and what the training was and became when it went on."""

    path: str
    scale_when_saved: tuple
    scale: tuple
    weight: np.ndarray


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a family under a strategy: once for all strategies under which the checkpoint is restored."""

    @functools.cache
    def train(family, name):
        cell = Cell(family, name, "function")
        for total in (1.0, np.inf, -0.5, 2.0):
            step(cell, total)
        path = checkpoint_of(cell).save(str(tmp_path_factory.mktemp("trained") / "ckpt"))
        scale_when_saved = cell.scale()[:2]
        for total in GOING_ON:
            step(cell, total)
        return Trained(path, scale_when_saved, cell.scale()[:2], cell.copies(cell.weight)[0])

    return train


GOING_ON = (0.25, 1.0, np.nan)


@pytest.mark.parametrize(
    ("before", "after", "where", "family"),
    combinations(
        [
            ("mirrored_2", "none"),
            ("none", "mirrored_4"),
            ("mirrored_4", "mirrored_2"),
            ("mirrored_2_apart", "mirrored_4"),
            ("mirrored_2", "mirrored_2_apart"),
            ("central_storage", "mirrored_2"),
            ("mirrored_2", "tpu"),
        ],
        ["inside", "outside"],
        ALL_FAMILIES,
        usual=11,
        others=slow_one_in(6),
    ),
)
def test_training_goes_on_with_another_number_of_replicas(family, where, before, after, trained):
    old = trained(family, before)
    new = Cell(family, after, "function", where)
    # Before the first step: what has no variables yet is restored when it gets them.
    restore(new, old.path)
    assert new.scale()[:2] == old.scale_when_saved
    for total in GOING_ON:
        step(new, total)
    assert new.scale()[:2] == old.scale
    for mine in new.copies(new.weight):
        numerics.assert_close(mine, old.weight, 1e-5, [1.0, -2.0])


@families
def test_restoring_into_another_optimizer_names_the_part_that_does_not_fit(family, tmp_path):
    cell = Cell(family, "none", "function")
    step(cell, 1.0)
    path = checkpoint_of(cell).save(str(tmp_path / "ckpt"))

    other = Cell(family, "none", "function", inner=family.sgd)
    step(other, 1.0)
    if family.name == "tf_keras":  # by position: Adam's second slot of the weight would become the momentum of the bias
        with pytest.raises(ValueError, match=r"(?s)\(2,\).*\(\).*m/bias"):
            checkpoint_of(other).restore(path)
    else:
        named = {"keras3": r"optimizer\._variables\.2.*momentum", "tf_keras_legacy": "momentum"}
        with pytest.raises(AssertionError, match=f"(?s){named[family.name]}"):
            checkpoint_of(other).restore(path).assert_consumed()

    wider = Cell(family, "none", "function")
    wider.weight = tf.Variable([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"(?s)Variable.*\(2,\)|\(2,\).*Variable"):
        checkpoint_of(wider).restore(path)
