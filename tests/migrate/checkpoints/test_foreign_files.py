"""Files of others: what is read is in the file itself, and a file does not choose what is called."""

import io
import json
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tests.families import FAMILIES, families
from tf_lossscale import LossScaleOptimizer, cli, migrate
from tf_lossscale.migrate.checkpoints import read

SECRET = b"my secret key!!!"  # 16 bytes: four float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A `.keras` file, and its weights as `.weights.h5` and the whole as `.h5`."""
    folder, keras = tmp_path_factory.mktemp("saved"), FAMILIES[0].keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)), keras.losses.MeanSquaredError())
    model.fit(np.ones((2, 3)), np.ones((2, 4)), verbose=0)
    for name in ("model.keras", "model.h5"):
        model.save(folder / name)
    model.save_weights(folder / "model.weights.h5")
    return folder


def external(file, name, folder):
    del file[name]
    file.create_dataset(name, shape=(4,), dtype="f4", external=[(str(folder / "secret"), 0, 16)])


def virtual(file, name, folder):
    with h5py.File(folder / "other.h5", "w") as other:
        other["all"] = np.frombuffer(SECRET, "f4")
    layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "all", shape=(4,))
    del file[name]
    file.create_virtual_dataset(name, layout)


def external_link(file, name, folder):
    with h5py.File(folder / "other.h5", "w") as other:
        other["all"] = np.frombuffer(SECRET, "f4")
    del file[name]
    file[name] = h5py.ExternalLink(str(folder / "other.h5"), "all")


def soft_link(file, name, folder):
    del file[name]
    file[name] = h5py.SoftLink("/anything")


def link_of_a_group(file, name, folder):
    group = file[name].parent.name
    with h5py.File(folder / "other.h5", "w") as other:
        file.copy(group, other, "all")
    del file[group]
    file[group] = h5py.ExternalLink(str(folder / "other.h5"), "all")


@pytest.mark.parametrize("way", [external, virtual, external_link, soft_link, link_of_a_group])
@pytest.mark.parametrize("kind", [".keras", ".h5", ".weights.h5"])
def test_hdf5_files_that_lead_to_other_files_are_refused(saved, tmp_path, capsys, kind, way):
    (tmp_path / "secret").write_bytes(SECRET)
    path, weights = tmp_path / f"bad{kind}", tmp_path / "weights.h5"
    if kind == ".keras":
        with zipfile.ZipFile(saved / "model.keras") as archive:
            weights.write_bytes(archive.read("model.weights.h5"))
    else:
        weights = path
        path.write_bytes((saved / f"model{kind}").read_bytes())
    with h5py.File(weights, "r+") as file:
        found = []
        file.visititems(lambda name, item: found.append(name) if getattr(item, "shape", None) == (4,) else None)
        way(file, next(name for name in found if "optimizer" not in name), tmp_path)
    if kind == ".keras":
        with zipfile.ZipFile(saved / "model.keras") as old, zipfile.ZipFile(path, "w") as new:
            for member in old.namelist():
                new.writestr(member, weights.read_bytes() if member == "model.weights.h5" else old.read(member))
    assert cli.main(["inspect", str(path)]) == 2
    assert "is a link or refers to another file" in capsys.readouterr().err


def changed(saved, tmp_path, change):
    """The `.keras` file with another config of its inner optimizer."""
    path = tmp_path / "changed.keras"
    with zipfile.ZipFile(saved / "model.keras") as old, zipfile.ZipFile(path, "w") as new:
        for member in old.namelist():
            data = old.read(member)
            if member == "config.json":
                config = json.loads(data)
                change(config["compile_config"]["optimizer"]["config"])
                data = json.dumps(config)
            new.writestr(member, data)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["inner_optimizer"]["config"].update(learning_rate=10**400),
        lambda config: config["inner_optimizer"]["config"].update(momentum=-(10**400)),
        lambda config: config["inner_optimizer"]["loss_scale_state"].update(loss_scale=10**400),
        lambda config: config.update(dynamic=False, initial_scale=10**400),
    ],
    ids=["learning_rate", "momentum", "state", "initial_scale"],
)
def test_a_number_that_no_float_holds_is_an_error_with_a_sentence(saved, tmp_path, capsys, change):
    path = changed(saved, tmp_path, change)
    assert cli.main(["inspect", str(path)]) == 2
    assert "(this number is too large for a float: " in capsys.readouterr().err


def test_a_count_that_no_int64_holds_changes_nothing(saved, tmp_path):
    path = tmp_path / "bad.keras"
    with zipfile.ZipFile(saved / "model.keras") as old, zipfile.ZipFile(path, "w") as new:
        for member in old.namelist():
            data = old.read(member)
            if member == "model.weights.h5":
                within = io.BytesIO(data)
                with h5py.File(within, "r+") as file:
                    del file["optimizer/vars/4"]
                    file["optimizer/vars/4"] = np.uint64(2**63 + 5)
                data = within.getvalue()
            new.writestr(member, data)
    variables = [tf.Variable(tf.zeros([3, 4])), tf.Variable(tf.zeros([4]))]
    optimizer = LossScaleOptimizer(FAMILIES[0].keras.optimizers.SGD(momentum=0.9), initial_scale=8.0)
    with pytest.raises(ValueError, match="iterations must be a number of steps from 0 to"):
        migrate.restore(path, optimizer, variables)
    assert not np.any(variables[0]), "nothing of it was restored"
    assert float(optimizer.loss_scale) == 8.0


@pytest.mark.sampled(7)
@pytest.mark.parametrize("suffix", [".h5", ".keras"])
@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("cls", ["SGD", "Adam"])
@families
def test_scale_and_counter_of_a_model_file_are_read_as_they_were(family, cls, hysteresis, suffix, tmp_path):
    keras = family.keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    inner = getattr(family.optimizers, cls)(0.01)
    optimizer = LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=3, hysteresis=hysteresis)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    model.fit(np.ones((32, 3)), np.ones((32, 1)), batch_size=8, verbose=0)  # the scale grows, then another step
    model.save(tmp_path / f"model{suffix}")
    (found,) = read.read(tmp_path / f"model{suffix}").optimizers
    assert (found.scale, found.counter) == (128.0, 1)
    if not (family.name == "tf_keras_legacy" and suffix == ".keras"):  # such a file has no other variable of it
        assert found.iterations == 4
        assert sum(len(slots) for slots in found.slots.values()) == {"SGD": 0, "Adam": 8}[cls] or cls == "SGD"


@pytest.mark.parametrize("suffix", [".h5", ".keras"])
def test_the_file_of_keras_3s_own_wrapper_is_read_too(suffix, tmp_path):
    keras = FAMILIES[0].keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    wrapper = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 64.0, dynamic_growth_steps=3)
    model.compile(wrapper, keras.losses.MeanSquaredError())
    model.fit(np.ones((32, 3)), np.ones((32, 1)), batch_size=8, verbose=0)
    model.save(tmp_path / f"model{suffix}")
    (found,) = read.read(tmp_path / f"model{suffix}").optimizers
    assert (found.scale, found.counter, found.iterations) == (128.0, 1, 4)
    assert [len(slots) for slots in found.slots.values()] == [2, 2]
