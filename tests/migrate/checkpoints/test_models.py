"""`migrate.restore` of models: what the file's object graph and names prove, and the errors about what they do not."""

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

from tf_lossscale import migrate

KERAS = {"keras3": tf.keras, "tf_keras": tf_keras}


def dense(keras, outputs=(3, 3), **names):
    keras.backend.clear_session()
    return more_dense(keras, outputs, **names)


def more_dense(keras, outputs=(3, 3), names=(None, None)):
    layers = [keras.layers.Dense(n, name=name) for n, name in zip(outputs, names)]
    return keras.Sequential([keras.Input((3,)), *layers])


def numbered(variables, start=1.0):
    for i, variable in enumerate(variables):
        variable.assign(np.full(variable.shape, start + i))


def numbers(variables):
    return [float(np.ravel(np.asarray(variable))[0]) for variable in variables]


def saved(folder, library, **objects):
    """A checkpoint of objects, and of the Adam of each."""
    optimizers = {}
    for name, each in objects.items():
        optimizer = optimizers[f"{name}_optimizer"] = library.optimizers.Adam()
        optimizer.build(list(each.trainable_variables))
        numbered(optimizer._momentums, 100.0)
    return tf.train.Checkpoint(**objects, **optimizers).write(str(folder / "ckpt"))


@pytest.mark.parametrize("new", KERAS)
@pytest.mark.parametrize("old", KERAS)
def test_each_model_gets_its_own_values_whatever_the_numbers_in_its_names(old, new, tmp_path):
    keras = KERAS[old]
    models = {"generator": dense(keras), "discriminator": more_dense(keras)}
    numbered([*models["generator"].weights, *models["discriminator"].weights])
    path = saved(tmp_path, keras, **models)
    discriminator, optimizer = dense(KERAS[new]), KERAS[new].optimizers.Adam()
    given, name = {"discriminator": discriminator}, "discriminator_optimizer"
    notes = migrate.restore(path, optimizer, given, name=name).notes
    assert numbers(discriminator.weights) == [5.0, 6.0, 7.0, 8.0]
    assert numbers(optimizer._momentums) == [100.0, 101.0, 102.0, 103.0]
    # Between the libraries, only the names are the same.
    assert notes == () if old == new else "Only the numbers in their names" in notes[0]
    with pytest.raises(ValueError, match="may be any of these objects in the file: 'discriminator', 'generator'"):
        migrate.restore(path, KERAS[old].optimizers.Adam(), dense(KERAS[old]), name=name)


def sonnet_model():
    model = snt.Sequential([snt.Linear(3), snt.Linear(3)])
    model(tf.ones([1, 3]))
    return model


def module():
    made = tf.Module()
    made.parts = {"a": [tf.Variable([0.0]), tf.Variable([0.0])], "b": tf.Variable([0.0])}
    return made


@pytest.mark.parametrize("make", [sonnet_model, module, lambda: dense(tf.keras)])
@pytest.mark.parametrize("is_root", [False, True])
def test_a_model_alone_is_found_in_the_file(is_root, make, tmp_path):
    old, new, saved_optimizer, optimizer = make(), make(), tf.keras.optimizers.Adam(), tf.keras.optimizers.Adam()
    numbered(old.variables)
    saved_optimizer.build(list(old.trainable_variables))
    numbered(saved_optimizer._momentums, 100.0)
    objects = {"root": old} if is_root else {"network": old}
    checkpoint = tf.train.Checkpoint(objects.pop("root", None), optimizer=saved_optimizer, **objects)
    assert migrate.restore(checkpoint.write(str(tmp_path / "ckpt")), optimizer, new).notes == ()
    assert numbers(new.variables) == numbers(old.variables)
    assert numbers(optimizer._momentums) == numbers(saved_optimizer._momentums)


def test_a_new_head_is_an_error_unless_a_part_is_asked_for(tmp_path):
    old, new, optimizer = dense(tf.keras), dense(tf.keras, (3, 5)), tf.keras.optimizers.Adam()
    numbered(old.weights)
    path, before = saved(tmp_path, tf.keras, model=old), numbers(new.weights)
    message = r"Not in the file: .*dense_1/kernel \(3, 5\).* Not in the given objects: .* \(3, 3\).*pass partial=True"
    with pytest.raises(ValueError, match=message):
        migrate.restore(path, optimizer, new)
    assert numbers(new.weights) == before
    (note, lost, unset) = migrate.restore(path, optimizer, {"model": new}, partial=True).notes
    assert note.startswith("A part was restored: ") and "-> sequential/dense/kernel" in note
    assert "the slots of" in lost and "dense_1_kernel_momentum" in unset
    assert numbers(new.weights) == [1.0, 2.0, *before[2:]]
    assert numbers(optimizer._momentums) == [100.0, 101.0, 0.0, 0.0]


@pytest.mark.parametrize("keras", KERAS.values(), ids=KERAS)
def test_paths_and_names_that_contradict_each_other_are_an_error(keras, tmp_path):
    path = saved(tmp_path, keras, model=dense(keras, names=("a", "b")))
    with pytest.raises(ValueError, match=r"but the names say that they are exchanged\. Pass a dict"):
        migrate.restore(path, keras.optimizers.Adam(), dense(keras, names=("b", "a")))


def test_objects_that_are_connected_in_another_way_are_an_error(tmp_path):
    first, second = tf.Variable([1.0]), tf.Variable([2.0])
    old = tf.train.Checkpoint(optimizer=tf.keras.optimizers.SGD(), model=tf.train.Checkpoint(a=first, b=first))
    new = tf.Module()
    new.a, new.b = tf.Variable([0.0]), tf.Variable([0.0])
    path = old.write(str(tmp_path / "ckpt"))
    with pytest.raises(ValueError, match="the objects are not connected as in the file: b leads to model/a"):
        migrate.restore(path, tf.keras.optimizers.SGD(), {"model": new})
    with pytest.raises(ValueError, match=r"these pairs contradict each other: model/a -> .*, model/a -> "):
        migrate.restore(path, tf.keras.optimizers.SGD(), {"model/a": second, "Variable": new.a})
    with pytest.raises(ValueError, match="the file has no object 'network', only: 'model', 'optimizer'"):
        migrate.restore(path, tf.keras.optimizers.SGD(), {"network": new})


def test_another_models_weights_are_refused_if_the_optimizer_did_not_train_them(tmp_path):
    models = {"generator": dense(tf.keras), "discriminator": more_dense(tf.keras)}
    path = saved(tmp_path, tf.keras, **models)
    with pytest.raises(ValueError, match=r"did not train these, which have the names of yours: .*Pass the model"):
        migrate.restore(path, tf.keras.optimizers.Adam(), dense(tf.keras).variables, name="discriminator_optimizer")
