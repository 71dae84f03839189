"""The table "What is kept" of docs/checkpoints.md is true for every family and format."""

import copy
import pathlib
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"
STATE = {
    "loss_scale": 64.0,
    "dynamic_counter": 3,
    "bad_steps": 1,
    "skipped_steps": 7,
    "skipped_in_a_row": 2,
    "total_steps": 9,
}


def made(family):
    return LossScaleOptimizer(family.adam(), hysteresis=2, diagnose=True)


def model_of(family):
    model = family.keras.Sequential([family.keras.Input((2,)), family.keras.layers.Dense(1)])
    model.compile(made(family), family.keras.losses.MeanSquaredError())
    return model


def used(family):
    """A model after one step that overflowed, and with the counts of a longer training."""
    model = model_of(family)
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.apply_gradients((tf.fill(variable.shape, np.inf), variable) for variable in variables)
    optimizer.set_state(STATE)
    return model


def saved(ending):
    def way(family, model, path):
        model.save(path + ending, **({"save_format": "tf"} if not ending else {}))
        return family.keras.models.load_model(path + ending).optimizer

    return way


def weights_saved(ending):
    def way(family, model, path):
        model.save_weights(path + ending)
        other = model_of(family)
        other.optimizer.build(other.trainable_variables)
        other.load_weights(path + ending)
        return other.optimizer

    return way


def checkpoint(family, model, path):
    saved = tf.train.Checkpoint(optimizer=model.optimizer).write(path)
    other = model_of(family).optimizer
    tf.train.Checkpoint(optimizer=other).read(saved)
    return other


def state(family, model, path):
    other = made(family)
    other.set_state(model.optimizer.state())
    return other


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def pickled_model(family, model, path):
    return pickled(model).optimizer


# Way, as in the table -> for each family, the variants that it has. Keras 2's optimizers cannot be pickled alone.
KERAS_2_FILES = [saved(".keras"), saved(".h5"), saved("")]
WAYS = {
    "copy.copy": ([lambda family, model, path: copy.copy(model.optimizer)],) * 3,
    "copy.deepcopy": ([lambda family, model, path: copy.deepcopy(model.optimizer)],) * 3,
    "model.save": ([saved(".keras"), saved(".h5")], KERAS_2_FILES, KERAS_2_FILES),
    "pickle": ([pickled_model, lambda family, model, path: pickled(model.optimizer)], [pickled_model], [pickled_model]),
    "set_state": ([state],) * 3,
    "tf.train.Checkpoint": ([checkpoint],) * 3,
    "save_weights": (
        [weights_saved(".weights.h5")],
        [weights_saved(".weights.h5"), weights_saved("")],
        [weights_saved("")],
    ),
    "from_config": ([lambda family, model, path: type(model.optimizer).from_config(model.optimizer.get_config())],) * 3,
}
CASES = [
    pytest.param(family, way, variant, id=f"{family.name}-{way}-{i}")
    for way, of_families in WAYS.items()
    for family, variants in zip(FAMILIES, of_families)
    for i, variant in enumerate(variants)
]


def table():
    """Yields (ways, what is kept) of each row of the page."""
    section = PAGE.read_text().split("## What is kept")[1].split("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    for ways, *cells in rows:
        assert set(cells) <= {"kept", "new"}
        kept = [names for names, cell in zip(head, cells, strict=True) if cell == "kept"]
        yield ways.replace("`", "").split(", "), set(", ".join(kept).replace("`", "").split(", ")) - {""}


def test_the_table_has_every_way_and_every_count():
    rows = list(table())
    assert [way for ways, _ in rows for way in ways] == list(WAYS)
    assert max((kept for _, kept in rows), key=len) == {*STATE, "overflow_report()"}


@pytest.mark.parametrize(("family", "way", "variant"), CASES)
def test_what_the_table_says_is_kept_and_all_else_is_new(family, way, variant, tmp_path):
    optimizer = variant(family, used(family), str(tmp_path / "file"))
    (kept,) = (kept for ways, kept in table() if way in ways)
    new = made(family).state()
    assert optimizer.state() == {name: (STATE if name in kept else new)[name] for name in STATE}
    assert bool(optimizer.overflow_report()) == ("overflow_report()" in kept)
