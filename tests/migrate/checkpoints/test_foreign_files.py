"""Files of others: what is read is in the file itself, and a file does not choose what is called."""

import re

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer, cli, migrate
from tf_lossscale.migrate.checkpoints import read

SECRET = b"my secret key!!!"  # 16 bytes: four float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model as `.h5`, and its weights as `.weights.h5`."""
    folder, keras = tmp_path_factory.mktemp("saved"), FAMILIES[0].keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)), keras.losses.MeanSquaredError())
    model.fit(np.ones((2, 3)), np.ones((2, 4)), verbose=0)
    model.save(folder / "model.h5")
    model.save_weights(folder / "model.weights.h5")
    return folder


def external(file, name, folder):
    del file[name]
    file.create_dataset(name, shape=(4,), dtype="f4", external=[(str(folder / "secret"), 0, 16)])


def virtual(file, name, folder):
    layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "all", shape=(4,))
    del file[name]
    file.create_virtual_dataset(name, layout)


def external_link(file, name, folder):
    del file[name]
    file[name] = h5py.ExternalLink(str(folder / "other.h5"), "all")


def soft_link(file, name, folder):
    del file[name]
    file[name] = h5py.SoftLink("/anything")


def link_of_a_group(file, name, folder):
    group = file[name].parent.name
    with h5py.File(folder / "other.h5", "a") as other:
        file.copy(group, other, "group")
    del file[group]
    file[group] = h5py.ExternalLink(str(folder / "other.h5"), "group")


@pytest.mark.parametrize("way", [external, virtual, external_link, soft_link, link_of_a_group])
@pytest.mark.parametrize("kind", [".h5", ".weights.h5"])
def test_hdf5_files_that_lead_to_other_files_are_refused(saved, tmp_path, capsys, kind, way):
    (tmp_path / "secret").write_bytes(SECRET)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["all"] = np.frombuffer(SECRET, "f4")
    path = tmp_path / f"bad{kind}"
    path.write_bytes((saved / f"model{kind}").read_bytes())
    with h5py.File(path, "r+") as file:
        found = []
        file.visititems(lambda name, item: found.append(name) if getattr(item, "shape", None) == (4,) else None)
        way(file, next(name for name in found if "optimizer" not in name), tmp_path)
    assert cli.main(["inspect", str(path)]) == 2
    assert "is a link or refers to another file" in capsys.readouterr().err


def crafted(folder, **changed):
    """A checkpoint as Keras 3's SGD and a wrapper write it, with other values in some places."""
    values = {"kernel": [1.0, 2.0, 3.0], "bias": [4.0, 5.0], "kernels_momentum": [1.0] * 3, "biass_momentum": [1.0] * 2}
    values |= {"steps": np.int64(3), "rate": 0.01, "loss_scale": 8.0, "good_steps": np.int64(1)} | changed
    made = {
        name: tf.Variable(value if getattr(value, "dtype", None) else tf.constant(value))
        for name, value in values.items()
    }
    node = tf.train.Checkpoint
    optimizer = node(
        _iterations=made["steps"],
        _learning_rate=made["rate"],
        _variables=node(**{"0": made["steps"], "1": made["rate"]}),
        _trainable_variables=node(**{"0": made["kernel"], "1": made["bias"]}),
        momentums=node(**{"0": made["kernels_momentum"], "1": made["biass_momentum"]}),
        loss_scale=node(current_loss_scale=made["loss_scale"], good_steps=made["good_steps"]),
    )
    return node(optimizer=optimizer, kernel=made["kernel"], bias=made["bias"]).write(str(folder / "ckpt"))


def optimizer_and_variables(dtype="float32"):
    variables = [
        tf.Variable(tf.fill([n], tf.constant(-1, dtype)), name=name) for name, n in (("kernel", 3), ("bias", 2))
    ]
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5, momentum=0.9))
    optimizer.build(variables)
    return optimizer, variables, [*variables, *optimizer.variables]


TEXT, COMPLEX, HUGE = np.array([b"a", b"b"]), np.array([1 + 1j, 2.0]), np.array([1e300, 2.0])
UNFIT = [
    ("bias", TEXT, "bias is of dtype string and shape (2,), and its values do not fit into bias of dtype float32"),
    ("bias", COMPLEX, "bias is of dtype complex128"),
    ("bias", HUGE, "bias is of dtype float64"),
    ("biass_momentum", TEXT, "momentums/1 is of dtype string"),
    ("biass_momentum", HUGE, "momentums/1 is of dtype float64"),
    ("rate", np.array(1e300), "learning_rate is of dtype float64"),
    *(
        (name, value, "must be a real number, but is")
        for name in ("steps", "rate", "loss_scale")
        for value in (b"x", 1j)
    ),
    *(("steps", value, "iterations must be a number of steps") for value in (np.int64(-1), np.int64(2**63 - 1), 0.5)),
    *(("good_steps", value, "dynamic_counter must be a number of steps") for value in (np.int64(2**63 - 2), np.nan)),
]


@pytest.mark.parametrize(("name", "value", "message"), UNFIT, ids=str)
def test_a_value_that_does_not_fit_is_refused_before_anything_changes(name, value, message, tmp_path, capsys):
    path = crafted(tmp_path, **{name: value})
    optimizer, variables, state = optimizer_and_variables()
    before = [np.array(each) for each in state]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        migrate.restore(path, optimizer, variables)
    assert str(caught.value).startswith(path)
    np.testing.assert_equal([np.array(each) for each in state], before)
    for command in (["inspect"], ["inspect", "--json"]):
        assert cli.main([*command, path]) == (2 if "real number" in message else 0)


@pytest.mark.parametrize("value", [-8.0, 0.0, np.inf, np.nan])
def test_a_loss_scale_that_is_no_positive_number_is_not_restored_and_a_note_says_so(value, tmp_path):
    path = crafted(tmp_path, loss_scale=value)
    optimizer, variables, _ = optimizer_and_variables()
    note = f"The saved loss scale is {value:g}, but must be a finite float32 number above 0. The loss scale stays at "
    assert any(note in each for each in migrate.restore(path, optimizer, variables).notes)
    assert float(optimizer.loss_scale) == optimizer.initial_scale
    *_, note = migrate.restore(path, tf.keras.optimizers.SGD(0.5, momentum=0.9), variables).notes
    assert f"loss_scale={value:g}" in note


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_assignment_that_fails_every_variable_has_its_old_value(error, tmp_path, monkeypatch):
    optimizer, variables, state = optimizer_and_variables()
    before = [np.array(each) for each in state]

    def fails(value):
        raise error

    monkeypatch.setattr(optimizer.inner_optimizer._iterations, "assign", fails)
    with pytest.raises(error):
        migrate.restore(crafted(tmp_path), optimizer, variables)
    np.testing.assert_equal([np.array(each) for each in state], before)


def test_values_of_a_lower_precision_are_noted_and_values_beyond_its_range_are_refused(tmp_path):
    optimizer, variables, _ = optimizer_and_variables("float16")
    *_, note = migrate.restore(crafted(tmp_path, bias=[0.1, 0.5]), optimizer, variables).notes
    assert note.startswith("These values are rounded") and note.endswith(": bias.")
    for name in ("bias", "biass_momentum"):
        with pytest.raises(ValueError, match="do not fit into bias of dtype float16"):
            migrate.restore(crafted(tmp_path, **{name: [1e5, 1.0]}), optimizer, variables)


def test_a_checkpoint_file_leads_only_into_its_own_folder_unless_its_target_is_passed(tmp_path, capsys):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    path = crafted(outside)
    (folder / "part").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    for target in (path, "../outside/ckpt", "link/ckpt", "part/../../outside/ckpt"):
        (folder / "checkpoint").write_text(f'model_checkpoint_path: "{target}"\n')
        assert cli.main(["inspect", str(folder)]) == 2
        assert "the file `checkpoint` leads to another folder" in capsys.readouterr().err
    assert cli.main(["inspect", path]) == 0
    for suffix in (".index", ".data-00000-of-00001"):
        (folder / "part" / f"ckpt{suffix}").write_bytes((outside / f"ckpt{suffix}").read_bytes())
    (folder / "checkpoint").write_text('model_checkpoint_path: "part/ckpt"\n')
    assert cli.main(["inspect", str(folder)]) == 0


def test_names_in_a_file_are_printed_without_control_characters(tmp_path, capsys):
    evil = "a\x1b[2J\x9b\u202e\nfaked line"
    variables = {name: tf.Variable([1.0], name="variable") for name in (evil, "b")}
    optimizer = tf.keras.optimizers.SGD()
    setattr(optimizer, evil, tf.Variable(1.0))
    path = tf.train.Checkpoint(**{f"{evil}s optimizer": optimizer, **variables}).write(str(tmp_path / "c"))
    (note,) = migrate.restore(path, tf.keras.optimizers.SGD(), {"b": variables["b"]}).notes
    assert note.endswith(r"s optimizer/a\x1b[2J\x9b\u202e\nfaked line.")
    assert cli.main(["inspect", path]) == 0
    printed = capsys.readouterr()
    assert r"a\x1b[2J\x9b\u202e\nfaked line" in printed.out
    with pytest.raises(ValueError, match="several variables") as caught:
        migrate.restore(path, tf.keras.optimizers.SGD(), {"variable": variables["b"]})
    assert cli.main(["inspect", f"{path}{evil}"]) == 2
    (tmp_path / "checkpoint").write_text(evil)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "the file `checkpoint` cannot be read" in errors
    for text in (printed.out, errors, str(caught.value), note):
        assert all(each.isprintable() for each in text.replace("\n", "")) and "\nfaked" not in text


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, FAMILIES[0].keras.optimizers.LossScaleOptimizer])
def test_scale_and_counter_of_a_model_file_are_read_as_they_were(wrapper, tmp_path):
    keras = FAMILIES[0].keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = wrapper(keras.optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=3)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    model.fit(np.ones((32, 3)), np.ones((32, 1)), batch_size=8, verbose=0)  # the scale grows, then another step
    model.save(tmp_path / "model.h5")
    (found,) = read.read(tmp_path / "model.h5").optimizers
    assert (found.scale_state["loss_scale"], found.scale_state["dynamic_counter"], found.iterations) == (128.0, 1, 4)
    assert [len(slots) for slots in found.slots.values()] == [2, 2]
