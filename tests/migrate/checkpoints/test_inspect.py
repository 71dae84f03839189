"""`tf-lossscale inspect`: what is in a file, of whichever format and version; a clear error for every other file."""

import json
import os
import re
import shutil

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.conformance import checkpoints, recordings
from tf_lossscale import LossScaleOptimizer, cli

MODELS = [name for name in checkpoints.OF_MODELS if not name.endswith("_keras")]
WRITERS = {
    "keras3": "Keras 3",
    "tf1": "TensorFlow 1.",
    **dict.fromkeys(("tf2.0", "tf2.1", "tf2.2"), "TensorFlow 1.14 to 2.2 (tf.keras)"),
    "tf2": "TensorFlow 2.0 to 2.15, or tf_keras legacy",
    "tfkeras2.21_legacy": "TensorFlow 2.0 to 2.15, or tf_keras legacy",
    "tfkeras2.21_new": "TensorFlow 2.11 to 2.15, or tf_keras",
}


def inspect(path, capsys, *more):
    code = cli.main(["inspect", str(path), *more])
    return code, capsys.readouterr()


def inspect_json(path, capsys):
    code, printed = inspect(path, capsys, "--json")
    assert code == 0, printed.err
    return json.loads(printed.out)


def written(folder, name="ckpt"):
    """The prefix of a checkpoint with one variable."""
    folder.mkdir(exist_ok=True)
    return tf.train.Checkpoint(v=tf.Variable([1.0, 2.0])).write(str(folder / name))


@pytest.mark.parametrize("name", [*checkpoints.OF_OPTIMIZERS, *checkpoints.OF_TF1, *MODELS])
def test_it_shows_what_the_original_had_when_it_saved(capsys, name):
    _, meta = recordings.checkpoint(name)
    shown = inspect_json(checkpoints.path(name), capsys)
    (optimizer,) = shown["optimizers"]
    saved = meta["at_save"]
    iterations, loss_scale, counter = checkpoints.counts(saved)
    writer = next(text for prefix, text in WRITERS.items() if name.startswith(prefix))
    if name in MODELS and not name.endswith("weights_tf"):
        writer = "Keras 3" if "keras3" in name else "TensorFlow"  # these say a version instead
    assert writer in shown["written_by"]

    # A fixed scale of tf_keras's new optimizers leaves no trace in the file.
    wrapped = "plain" not in name and name != "tfkeras2.21_new_lso_fixed_adam"
    assert (optimizer["wrapper"] is not None) == wrapped
    assert optimizer["iterations"] == iterations
    lost = name in MODELS and "keras3" not in name and name.endswith("_h5")
    there = wrapped and counter is not None and not lost
    assert optimizer["loss_scale"] == (loss_scale if there else None)
    assert optimizer["counter"] == (counter if there else None)
    usual = {"momentum"} if "momentum" in name else {"m", "v"}
    assert optimizer["class"] == {"AdamOptimizer": "Adam", "MomentumOptimizer": "SGD"}.get(*2 * meta["optimizer"][:1])
    assert set(optimizer["slots"]) == set(saved.get("slots", usual))
    trained = [each for each in shown["variables"] if each["path"] != "global_step"]
    for slot in optimizer["slots"].values():
        assert [each["variable"] for each in slot] == [each["path"] for each in trained]
        assert [each["shape"] for each in slot] == [each["shape"] for each in trained]


def test_the_table_is_for_people(capsys):
    code, printed = inspect(checkpoints.path("tf2.8.4_lso_adam"), capsys)
    lines = printed.out.splitlines()
    assert code == 0
    assert lines == [line.rstrip() for line in lines]
    words = [line.split() for line in lines]
    for row in (
        "kind tf.train.Checkpoint",
        "written by TensorFlow 2.0 to 2.15, or tf_keras legacy",
        "iterations 9",
        "counter 2",
        "beta_1 0.9",
        "slots m (2), v (2)",
        "w1 (3, 2) float32 m, v",
    ):
        assert row.split() in words, row


def test_a_folder_is_its_latest_checkpoint_and_a_scale_of_infinity_is_shown(tmp_path, capsys):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(optimizer=optimizer), str(tmp_path), max_to_keep=2)
    for scale in (2.0, 4.0, np.inf):
        optimizer._loss_scale.current_loss_scale.assign(scale)
        latest = manager.save()
    assert inspect_json(tmp_path, capsys)["optimizers"][0]["loss_scale"] == "inf"
    assert inspect_json(latest, capsys)["path"] == latest
    assert inspect_json(f"{tmp_path}/ckpt-2.index", capsys)["optimizers"][0]["loss_scale"] == 4.0
    assert inspect_json(f"{tmp_path}/ckpt-2.data-00000-of-00001", capsys)["optimizers"][0]["loss_scale"] == 4.0


@pytest.mark.parametrize("folder", ["runs.data-2020", "runs.index"])
@pytest.mark.parametrize("suffix", ["", ".index", ".data-00000-of-00001"])
def test_a_checkpoint_is_found_whatever_its_folder_is_called_and_whatever_else_is_there(
    tmp_path, capsys, folder, suffix
):
    prefix = written(tmp_path / folder)
    (tmp_path / folder / "ckpt.data-00000-of-00001.tempstate17").write_bytes(b"")  # of a save that was killed
    (variable,) = inspect_json(f"{prefix}{suffix}", capsys)["variables"]
    assert variable["shape"] == [2]


def test_weights_alone_are_shown_too(tmp_path, capsys):
    model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3)])
    model.save_weights(tmp_path / "model.h5")
    shown = inspect_json(tmp_path / "model.h5", capsys)
    assert (shown["kind"], shown["optimizers"]) == (".h5", [])
    assert [each["shape"] for each in shown["variables"]] == [[4, 3], [3]]
    _, printed = inspect(tmp_path / "model.h5", capsys)
    assert "no optimizer\n" in printed.out


@pytest.mark.skipif(not hasattr(tf.keras.optimizers, "Muon"), reason="this Keras has no Muon")
def test_an_optimizer_whose_slots_are_in_lists_that_are_not_saved_is_not_taken_for_sgd(tmp_path, capsys):
    for optimizer, name in ((tf.keras.optimizers.Muon(0.1), None), (tf.keras.optimizers.SGD(0.1), "SGD")):
        optimizer.build([tf.keras.Variable([[1.0]])])
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / f"of_{name}"))
        [found] = inspect_json(path, capsys)["optimizers"]
        assert found["class"] == name


def test_a_slot_whose_variable_the_file_does_not_tell_has_a_row_of_its_own(tmp_path, capsys):
    weights = {name: tf.Variable([1.0, 2.0], name="Variable") for name in ("w0", "w1")}
    optimizer = tf_keras.optimizers.SGD(momentum=0.9)
    optimizer.build([*weights.values()])
    path = tf.train.Checkpoint(optimizer=optimizer, **weights).write(str(tmp_path / "ckpt"))
    (slots,) = inspect_json(path, capsys)["optimizers"][0]["slots"].values()
    assert [slot["variable"] for slot in slots] == [None, None]
    _, printed = inspect(path, capsys)
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["w0", "(2,)", "float32"] in rows
    assert sum(row[-3:] == ["(2,)", "float32", "momentum"] for row in rows) == 2


def file(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def two_checkpoints(folder):
    written(folder, "one"), written(folder, "two")
    return folder


def saved(name, save):
    def make(folder):
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        getattr(model, save)(folder / name)
        return folder / name

    return make


def another_h5(folder):
    with h5py.File(folder / "data.h5", "w") as file:
        file["x"] = np.zeros(3)
    return folder / "data.h5"


def without(suffix):
    def make(folder):
        path = written(folder)
        (folder / f"ckpt{suffix}").unlink()
        return path

    return make


def halved(folder):
    # The data file starts with the list of objects, which is complete in this half.
    path = tf.train.Checkpoint(v=tf.Variable(tf.zeros([1000]))).write(str(folder / "ckpt"))
    os.truncate(f"{path}.data-00000-of-00001", 2000)
    return path


def damaged_state(folder):
    (folder / "checkpoint").write_bytes(b'model_checkpoint_path: "ck\xff')
    return folder


def pipe(name):
    def make(folder):
        path = written(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        return path

    return make


WRONG = {
    "ckpt.index: this file of the checkpoint is missing, and the data files cannot be read": pipe("ckpt.index"),
    "00001: this file of the checkpoint is missing": pipe("ckpt.data-00000-of-00001"),
    "ckpt-1: there is no such file, folder or checkpoint": lambda folder: folder / "ckpt-1",
    "the folder has no checkpoint, and is not a SavedModel": lambda folder: folder,
    "the folder has 2 checkpoints. Pass one of them, for example ": two_checkpoints,
    "cat.png: the file is neither a checkpoint nor an .h5 model": file("cat.png", b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "model.keras: the file is neither a checkpoint nor an .h5 model": file("model.keras", b""),
    "model.keras: a .keras file is loaded by the Keras library that wrote it": saved("model.keras", "save"),
    "If it is a .weights.h5 file, load it into a compiled model": saved("model.weights.h5", "save_weights"),
    "data.h5: the HDF5 file is not a Keras model": another_h5,
    "ckpt.data-00000-of-00001: this file of the checkpoint is missing": without(".data-00000-of-00001"),
    "ckpt.index: this file of the checkpoint is missing": without(".index"),
    "[best]: TensorFlow cannot read this checkpoint, because it": lambda folder: written(folder, "ckpt[best]"),
    ": the file `checkpoint` cannot be read, because the file is truncated or damaged": damaged_state,
    ": the variables need 4000 bytes, but the data files contain only 2000": halved,
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_no_checkpoint_is_an_error_that_names_the_file_and_the_part(tmp_path, capsys, message):
    code, printed = inspect(WRONG[message](tmp_path), capsys)
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("tf-lossscale inspect: ")
    assert message in printed.err


DAMAGED = [
    *(f"tf2.8.4_lso_adam/ckpt.{suffix}" for suffix in ("index", "data-00000-of-00001")),
    *(f"tf1.15.5_mpls_adam_saver/ckpt.{suffix}" for suffix in ("index", "data-00000-of-00001")),
    *(f"{version}_model_adam_h5/model.h5" for version in ("keras3.15.1", "tf2.8.4")),
    "tf2.8.4_model_adam_savedmodel/model_savedmodel/saved_model.pb",
    "tf2.8.4_model_adam_savedmodel/model_savedmodel/variables/variables.index",
    "tf2.8.4_model_adam_savedmodel/model_savedmodel/variables/variables.data-00000-of-00001",
]


def inspect_damaged(name, content, folder, capsys):
    """Inspect a copy of a checkpoint, one of whose files has another content."""
    shutil.copytree(checkpoints.FOLDER / name.partition("/")[0], folder, dirs_exist_ok=True)
    part = folder / name.partition("/")[2]
    part.write_bytes(content)
    code, printed = inspect(folder / "model_savedmodel" if "model_savedmodel" in name else part, capsys)
    assert code in (0, 2)
    if code == 2:
        assert printed.out == ""
        assert str(folder) in printed.err
    return code, printed.err


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_cut_short_is_an_error_that_names_it(tmp_path, capsys, name):
    good = (checkpoints.FOLDER / name).read_bytes()
    for length in (0, 1, len(good) // 3, len(good) // 2, len(good) - 1):
        code, error = inspect_damaged(name, good[:length], tmp_path / str(length), capsys)
        # A protocol buffer may be cut between two of its fields.
        assert code == 2 or (name.endswith(".pb") and length == len(good) // 2)
        damaged = "is truncated|because the file is truncated or damaged|neither a checkpoint nor an .h5 model"
        assert code == 0 or re.search(damaged, error), error


@pytest.mark.parametrize("name", DAMAGED)
def test_bytes_that_are_not_as_written_give_an_error_and_never_a_crash(tmp_path, capsys, name):
    good = np.frombuffer((checkpoints.FOLDER / name).read_bytes(), np.uint8)
    rng = np.random.default_rng(5)
    codes = set()
    for _ in range(25):
        bad = good.copy()
        bad[rng.integers(0, len(bad), 8)] ^= rng.integers(1, 256, 8).astype(np.uint8)
        codes.add(inspect_damaged(name, bad.tobytes(), tmp_path / "copy", capsys)[0])
    assert 2 in codes or not name.endswith(".index")


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"]])
@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e400"])
def test_a_number_that_no_float_holds_does_not_stop_it(tmp_path, capsys, number, command):
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(tf.keras.optimizers.Adam()), "mse")
    model.save(tmp_path / "bad.h5")
    with h5py.File(tmp_path / "bad.h5", "r+") as file:
        config = json.loads(file.attrs["training_config"])
        config["optimizer_config"]["config"]["inner_optimizer"]["config"]["epsilon"] = "NUMBER"
        file.attrs["training_config"] = json.dumps(config).replace('"NUMBER"', number)
    assert cli.main([*command, str(tmp_path / "bad.h5")]) == 0
    assert ("inf" in capsys.readouterr().out) == (number == "1e400")
