"""Files of others: what is read is in the file itself, and a file does not choose what is called."""

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer, cli, migrate
from tf_lossscale.migrate.checkpoints import read

pytestmark = pytest.mark.wide("files that somebody else wrote")

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


@pytest.mark.first
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


def test_a_count_that_no_int64_holds_changes_nothing(saved, tmp_path):
    path = tmp_path / "bad.h5"
    path.write_bytes((saved / "model.h5").read_bytes())
    with h5py.File(path, "r+") as file:
        group = file["optimizer_weights"]
        name = group.attrs["weight_names"][0]
        del group[name]
        group[name] = np.uint64(2**63 + 5)
    variables = [tf.Variable(tf.zeros([3, 4])), tf.Variable(tf.zeros([4]))]
    optimizer = LossScaleOptimizer(FAMILIES[0].keras.optimizers.SGD(momentum=0.9), initial_scale=8.0)
    with pytest.raises(ValueError, match="iterations must be a number of steps from 0 to"):
        migrate.restore(path, optimizer, variables)
    assert not np.any(variables[0]), "nothing of it was restored"
    assert float(optimizer.loss_scale) == 8.0


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
