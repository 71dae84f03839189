"""`tf-lossscale inspect`: what is in a file, of whichever format and version; a clear error for every other file."""

import json

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.conformance.test_checkpoints import checkpoints  # noqa: F401
from tests.conformance.test_restore import FILES, OLD, model_files, names
from tf_lossscale import LossScaleOptimizer, cli

MODELS = [name for name in model_files() if not name.endswith("_keras")]
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


@pytest.mark.parametrize("name", [*names(), *OLD, *MODELS])
def test_it_shows_what_the_original_had_when_it_saved(checkpoints, capsys, name):  # noqa: F811
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    kind = name.rpartition("_adam_")[2]
    shown = inspect_json(checkpoints / name / FILES.get(kind, "ckpt"), capsys)
    (optimizer,) = shown["optimizers"]
    saved = meta["at_save"]
    writer = next(text for prefix, text in WRITERS.items() if name.startswith(prefix))
    if name in MODELS and not name.endswith("weights_tf"):
        writer = "Keras 3" if "keras3" in name else "TensorFlow"  # these say a version instead
    assert writer in shown["written_by"]

    # A fixed scale of tf_keras's new optimizers leaves no trace in the file.
    wrapped = "plain" not in name and name != "tfkeras2.21_new_lso_fixed_adam"
    assert (optimizer["wrapper"] is not None) == wrapped
    assert optimizer["iterations"] == saved.get("iterations", saved.get("global_step"))
    lost = name in MODELS and "keras3" not in name and name.endswith("_h5")
    counter = saved.get("good_steps", saved.get("dynamic_counter"))
    there = wrapped and counter is not None and not lost
    assert optimizer["loss_scale"] == (saved["loss_scale"] if there else None)
    assert optimizer["counter"] == (counter if there else None)
    usual = {"momentum"} if "momentum" in name else {"m", "v"}
    assert optimizer["class"] == {"AdamOptimizer": "Adam", "MomentumOptimizer": "SGD"}.get(*2 * meta["optimizer"][:1])
    assert set(optimizer["slots"]) == set(saved.get("slots", usual))
    trained = [each for each in shown["variables"] if each["path"] != "global_step"]
    for slot in optimizer["slots"].values():
        assert [each["variable"] for each in slot] == [each["path"] for each in trained]
        assert [each["shape"] for each in slot] == [each["shape"] for each in trained]


def test_the_table_is_for_people(checkpoints, capsys):  # noqa: F811
    code, printed = inspect(checkpoints / "tf2.8.4_lso_adam" / "ckpt", capsys)
    lines = [line.split(maxsplit=1) for line in printed.out.splitlines() if line.strip()]
    assert code == 0
    assert all(line == line.rstrip() for line in printed.out.splitlines())
    for row in (
        ["kind", "tf.train.Checkpoint"],
        ["written", "by  TensorFlow 2.0 to 2.15, or tf_keras legacy"],
        ["iterations", "9"],
        ["counter", "2"],
        ["beta_1", "0.9"],
        ["slots", "m (2), v (2)"],
        ["w1", "(3, 2)  float32  m, v"],
    ):
        assert row in [[part.strip() for part in line] for line in lines], row


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


@pytest.mark.parametrize("prefix", ["runs.data-2020/ckpt", "runs.index/ckpt"])
@pytest.mark.parametrize("suffix", ["", ".index", ".data-00000-of-00001"])
def test_a_checkpoint_is_found_whatever_its_folder_is_called(tmp_path, capsys, prefix, suffix):
    (tmp_path / prefix).parent.mkdir(exist_ok=True)
    tf.train.Checkpoint(weight=tf.Variable([1.0, 2.0])).write(str(tmp_path / prefix))
    (variable,) = inspect_json(f"{tmp_path / prefix}{suffix}", capsys)["variables"]
    assert variable["shape"] == [2]


def test_a_temporary_file_of_a_save_that_was_killed_does_not_matter(tmp_path, capsys):
    prefix = tf.train.Checkpoint(weight=tf.Variable([1.0, 2.0])).write(str(tmp_path / "ckpt"))
    (tmp_path / "ckpt.data-00000-of-00001.tempstate17").write_bytes(b"")
    assert len(inspect_json(prefix, capsys)["variables"]) == 1


def test_weights_alone_are_shown_too(tmp_path, capsys):
    model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3)])
    model.save_weights(tmp_path / "model.h5")
    shown = inspect_json(tmp_path / "model.h5", capsys)
    assert (shown["kind"], shown["optimizers"]) == (".h5", [])
    assert [each["shape"] for each in shown["variables"]] == [[4, 3], [3]]
    _, printed = inspect(tmp_path / "model.h5", capsys)
    assert "no optimizer\n" in printed.out


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


def nothing(folder):
    return folder / "ckpt-1"


def empty_folder(folder):
    return folder


def two_checkpoints(folder):
    for name in ("one", "two"):
        tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(folder / name))
    return folder


def picture(folder):
    (folder / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    return folder / "cat.png"


def nothing_in_it(folder):
    (folder / "model.keras").write_bytes(b"")
    return folder / "model.keras"


def keras_archive(folder):
    tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)]).save(folder / "model.keras")
    return folder / "model.keras"


def weights_only(folder):
    tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)]).save_weights(folder / "model.weights.h5")
    return folder / "model.weights.h5"


def another_h5(folder):
    with h5py.File(folder / "data.h5", "w") as file:
        file["x"] = np.zeros(3)
    return folder / "data.h5"


def without_data(folder):
    path = tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(folder / "ckpt"))
    (folder / "ckpt.data-00000-of-00001").unlink()
    return path


def without_index(folder):
    path = tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(folder / "ckpt"))
    (folder / "ckpt.index").unlink()
    return path


def with_brackets(folder):
    return tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(folder / "ckpt[best]"))


def damaged_state(folder):
    (folder / "checkpoint").write_bytes(b'model_checkpoint_path: "ck\xff')
    return folder


WRONG = {
    nothing: "ckpt-1: there is no such file, folder or checkpoint",
    empty_folder: "the folder has no checkpoint, and is not a SavedModel",
    two_checkpoints: "the folder has 2 checkpoints. Pass one of them, for example ",
    picture: "cat.png: the file is neither a checkpoint nor an .h5 model",
    nothing_in_it: "model.keras: the file is neither a checkpoint nor an .h5 model",
    keras_archive: "model.keras: a .keras file is loaded by the Keras library that wrote it",
    weights_only: "If it is a .weights.h5 file, load it into a compiled model",
    another_h5: "data.h5: the HDF5 file is not a Keras model",
    without_data: "ckpt.data-00000-of-00001: this file of the checkpoint is missing",
    without_index: "ckpt.index: this file of the checkpoint is missing",
    with_brackets: "ckpt[best]: TensorFlow cannot read this checkpoint, because it interprets the brackets",
    damaged_state: ": the file `checkpoint` cannot be read, because the file is truncated or damaged",
}


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_what_is_no_checkpoint_is_an_error_that_names_the_file_and_the_part(tmp_path, capsys, make):
    code, printed = inspect(make(tmp_path), capsys)
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("tf-lossscale inspect: ")
    assert WRONG[make] in printed.err


DAMAGED = [
    "tf2.8.4_lso_adam/ckpt.index",
    "tf2.8.4_lso_adam/ckpt.data-00000-of-00001",
    "tf1.15.5_mpls_adam_saver/ckpt.index",
    "tf1.15.5_mpls_adam_saver/ckpt.data-00000-of-00001",
    "keras3.15.1_model_adam_h5/model.h5",
    "tf2.8.4_model_adam_h5/model.h5",
    "tf2.8.4_model_adam_savedmodel/model_savedmodel/saved_model.pb",
    "tf2.8.4_model_adam_savedmodel/model_savedmodel/variables/variables.index",
    "tf2.8.4_model_adam_savedmodel/model_savedmodel/variables/variables.data-00000-of-00001",
]


def whole(path):
    """What the user passes to mean the file that this is a part of."""
    if "model_savedmodel" in path.parts:
        return path.parents[path.parts[::-1].index("model_savedmodel") - 1]
    return path


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_cut_short_is_an_error_that_names_it(checkpoints, tmp_path, capsys, name):  # noqa: F811
    folder = checkpoints / name.partition("/")[0]
    good = (checkpoints / name).read_bytes()
    for length in (0, 1, len(good) // 3, len(good) // 2, len(good) - 1):
        copy = tmp_path / str(length)
        _copied(folder, copy)
        part = copy / name.partition("/")[2]
        part.write_bytes(good[:length])
        code, printed = inspect(whole(part), capsys)
        if part.name == "saved_model.pb" and length == len(good) // 2:
            continue  # a protocol buffer may be cut between two of its fields
        assert code == 2, length
        assert printed.out == ""
        assert str(copy) in printed.err, length
        assert (
            "cannot be read, because the file is truncated or damaged" in printed.err
            or "is truncated" in printed.err
            or ("the file is neither a checkpoint nor an .h5 model" in printed.err)
        ), printed.err


@pytest.mark.parametrize("name", DAMAGED)
def test_bytes_that_are_not_as_written_give_an_error_and_never_a_crash(checkpoints, tmp_path, capsys, name):  # noqa: F811
    folder = checkpoints / name.partition("/")[0]
    _copied(folder, tmp_path / "copy")
    part = tmp_path / "copy" / name.partition("/")[2]
    good = np.frombuffer(part.read_bytes(), np.uint8)
    rng = np.random.default_rng(5)
    found = 0
    for _ in range(25):
        bad = good.copy()
        where = rng.integers(0, len(bad), 8)
        bad[where] ^= rng.integers(1, 256, 8).astype(np.uint8)
        part.write_bytes(bad.tobytes())
        code, printed = inspect(whole(part), capsys)
        assert code in (0, 2)
        if code == 2:
            found += 1
            assert str(tmp_path) in printed.err
    assert found or "data" in name or name.endswith(".pb") or name.endswith(".h5")


def _copied(folder, to):
    import shutil

    shutil.copytree(folder, to)


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
