"""`tf-lossscale convert`: an old checkpoint becomes one that today's optimizer restores with TensorFlow's own means."""

import ast
import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.conformance.test_checkpoints import checkpoints  # noqa: F401
from tests.conformance.test_restore import OLD, make, names, same, step, variables
from tests.migrate.checkpoints import test_restore
from tf_lossscale import LossScaleOptimizer, cli, migrate

LIBRARIES = {"keras3": tf.keras, "tf_keras": tf_keras}


def convert(path, to, out, capsys, *more):
    code = cli.main(["convert", str(path), "--to", to, "--out", str(out), *more])
    return code, capsys.readouterr()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("to", LIBRARIES)
@pytest.mark.parametrize("name", [*names(), *OLD])
def test_what_the_originals_wrote_goes_on_where_they_stopped(checkpoints, tmp_path, capsys, name, to):  # noqa: F811
    meta = json.loads((checkpoints / name / "meta.json").read_text())
    rate = ["--learning-rate", str(meta["optimizer"][1]["learning_rate"])] if name in OLD else []
    code, printed = convert(checkpoints / name / "ckpt", to, tmp_path / "new", capsys, *rate)
    assert code == 0, printed.err
    assert sorted(os.listdir(tmp_path)) == ["new"]
    assert sorted(os.listdir(tmp_path / "new")) == ["checkpoint", "ckpt.data-00000-of-00001", "ckpt.index"]

    optimizer, weights = make(to, meta), variables(meta)
    optimizer.build(weights)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, w0=weights[0], w1=weights[1])
    status = checkpoint.read(tf.train.latest_checkpoint(str(tmp_path / "new")))
    saved = meta["at_save"]
    counter, count = ("good_steps", "global_step") if name in OLD else ("dynamic_counter", "iterations")
    dynamic = saved.get(counter) is not None
    if name not in OLD and not (name.endswith("_lso_sgd") and to == "tf_keras"):
        # Files of TensorFlow 1 have a global_step as well. SGD of tf_keras has momenta even without momentum.
        status.assert_consumed() if dynamic else status.expect_partial()
    assert int(optimizer.iterations) == saved[count]
    if dynamic:
        assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (saved["loss_scale"], saved[counter])
    for i, (event, expected) in enumerate(zip(meta["steps_after"], meta["trace_after"])):
        if ("_plain_" in name or "_fixed_" in name) and event["event"] != "finite":
            break  # applied there, in another way here
        step(optimizer, weights, event, name)
        for weight, w in zip(weights, ("w0", "w1")):
            if "_nadam" not in name:  # its formula has changed
                same(weight, expected[w], f"step {i}: {w}")
        assert int(optimizer.iterations) == expected[count], i


@pytest.mark.sampled(3)
@pytest.mark.parametrize("to", LIBRARIES)
@pytest.mark.parametrize("case", test_restore.CASES, ids=str)
def test_every_legacy_optimizer_becomes_what_restore_makes_of_it(tmp_path, capsys, case, to):
    old = LossScaleOptimizer(getattr(test_restore.LEGACY, case.name)(**case.kwargs), initial_scale=64.0)
    theirs = test_restore.variables()
    test_restore.train(old, theirs, test_restore.gradients(4))
    path = test_restore.checkpoint(tmp_path, old, theirs)
    _, printed = convert(path, to, tmp_path / "new", capsys)
    assert (
        f"LossScaleOptimizer(tf{'_' if to == 'tf_keras' else '.'}keras.optimizers.{case.name}(learning_rate=0.05"
        in (printed.out)
    )
    assert "iterations 4, loss scale 32, counter 0" in printed.out

    cls, options = getattr(LIBRARIES[to].optimizers, case.name), case.kwargs | case.today
    restored, loaded = LossScaleOptimizer(cls(**options)), LossScaleOptimizer(cls(**options))
    mine, again = test_restore.variables(1), test_restore.variables(2)
    migrate.restore(path, restored, mine)
    loaded.build(sorted(again, key=lambda v: v.name))  # as tf.train.Checkpoint puts its keywords
    new = tf.train.Checkpoint(optimizer=loaded, **dict(zip(test_restore.SHAPES, again)))
    status = new.read(str(tmp_path / "new" / "ckpt"))
    if options.get("momentum") or case.name != "SGD":  # tf_keras's SGD has momenta even without momentum
        status.assert_consumed()
    test_restore.train(restored, mine, test_restore.gradients(3, seed=3))
    test_restore.train(loaded, again, test_restore.gradients(3, seed=3))
    for a, b in zip(mine, again):
        np.testing.assert_array_equal(a, b)
    assert float(loaded.loss_scale) == float(restored.loss_scale)


def functional(keras):
    layers = keras.layers
    given = keras.Input((6,))
    x = layers.Reshape((2, 3))(given)
    x = layers.LSTM(4)(x)
    x = layers.BatchNormalization()(layers.Dense(4, use_bias=False)(x))
    return keras.Model(given, layers.Dense(1)(x))


def sequential(keras):
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, use_bias=False), layers.BatchNormalization(), layers.Dense(1)]
    )


def subclassed(keras):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(4, use_bias=False)
            self.norm = keras.layers.BatchNormalization()
            self.out = keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.out(self.norm(self.hidden(x), training=training))

    model = Model()
    model(np.zeros((1, 6), "float32"))
    return model


def with_a_weight_of_its_own(keras):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(1)
            self.gain = self.add_weight(shape=(1,), initializer="ones", name="gain")

        def call(self, x):
            return self.hidden(x) * self.gain

    model = Model()
    model(np.zeros((1, 6), "float32"))
    return model


def batch(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, 6)).astype("float32")
    return x, x.sum(1, keepdims=True)


def trained(keras, make_model, optimizer, path=None):
    model = make_model(keras)
    model.compile(optimizer, "mse")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    if path:
        checkpoint.restore(path)
    return model, checkpoint


MODELS = [(to, make) for to in LIBRARIES for make in (functional, sequential, subclassed)]


@pytest.mark.sampled(3)
# Keras 3 has a model's own weights before those of its layers, Keras 2 after them.
@pytest.mark.parametrize(
    ("to", "make_model"),
    [
        pytest.param(to, make, id=f"{to}-{make.__name__}")
        for to, make in [*MODELS, ("keras3", with_a_weight_of_its_own)]
    ],
)
def test_a_model_of_keras_2_goes_on_as_the_model_of_today(tmp_path, capsys, to, make_model):
    old = LossScaleOptimizer(tf_keras.optimizers.legacy.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=3)
    theirs, checkpoint = trained(tf_keras, make_model, old)
    for i in range(4):
        theirs.train_on_batch(*batch(i))
    path = checkpoint.save(str(tmp_path / "old" / "ckpt"))
    code, printed = convert(tmp_path / "old", to, tmp_path / "new", capsys)
    assert code == 0, printed.err

    new = LossScaleOptimizer(LIBRARIES[to].optimizers.Adam(0.01), dynamic_growth_steps=3)
    mine, checkpoint = trained(LIBRARIES[to], make_model, new, tf.train.latest_checkpoint(str(tmp_path / "new")))
    assert path
    for i in range(4, 8):
        theirs.train_on_batch(*batch(i))
        mine.train_on_batch(*batch(i))
        weights = mine.get_weights()
        if make_model is with_a_weight_of_its_own:
            weights = [*weights[1:], weights[0]]
        for a, b in zip(weights, theirs.get_weights()):
            np.testing.assert_allclose(a, b, 2e-4, 2e-5, err_msg=str(i))
        assert float(new.loss_scale) == float(old.loss_scale)
        assert int(new.dynamic_counter) == int(old.dynamic_counter)
    assert int(checkpoint.save_counter) == 1, "a manager goes on to number them"


def test_each_optimizer_of_a_gan_is_converted(tmp_path, capsys):
    weights = test_restore.variables()
    one = LossScaleOptimizer(tf_keras.optimizers.legacy.Adam(0.5), initial_scale=2.0)
    two = tf_keras.optimizers.legacy.SGD(0.25, momentum=0.8)
    test_restore.train(one, weights[:2], [[tf.ones((3, 2)), tf.ones((2,))]])
    two.apply_gradients([(tf.ones(()), weights[2])])
    named = dict(zip(test_restore.SHAPES, weights))
    path = tf.train.Checkpoint(discriminator=one, generator=two, **named).write(str(tmp_path / "gan"))
    code, printed = convert(path, "keras3", tmp_path / "new", capsys)
    assert code == 0, printed.err
    # tf.train.Checkpoint sorts its keywords, and so the variables.
    assert "discriminator: tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(learning_rate=0.5" in printed.out
    assert "generator: tf.keras.optimizers.SGD(learning_rate=0.25, momentum=0.8)" in printed.out
    assert "built for bias, kernel\n" in printed.out
    assert "built for scalar\n" in printed.out
    adam, sgd = LossScaleOptimizer(tf.keras.optimizers.Adam()), tf.keras.optimizers.SGD(momentum=0.8)
    mine = dict(zip(test_restore.SHAPES, test_restore.variables(1)))
    adam.build([mine["bias"], mine["kernel"]])
    sgd.build([mine["scalar"]])
    tf.train.Checkpoint(discriminator=adam, generator=sgd, **mine).read(
        str(tmp_path / "new" / "ckpt")
    ).assert_consumed()
    assert float(adam.loss_scale) == 2.0
    assert float(sgd.momentums[0]) == float(two.get_slot(weights[2], "momentum"))


@pytest.mark.parametrize("to", LIBRARIES)
def test_an_optimizer_that_had_a_schedule_restores_into_one_that_has_it_again(tmp_path, capsys, to):
    def schedule(library):
        return library.optimizers.schedules.InverseTimeDecay(0.05, 1, 0.1)

    old, theirs = tf_keras.optimizers.legacy.Adam(schedule(tf_keras)), test_restore.variables()
    old.apply_gradients(list(zip(next(test_restore.gradients(1)), theirs)))
    code, printed = convert(test_restore.checkpoint(tmp_path, old, theirs), to, tmp_path / "new", capsys)
    assert code == 0, printed.err
    assert "Adam(learning_rate=<its schedule>, beta_1=0.9, beta_2=0.999)" in printed.out
    library = LIBRARIES[to]
    new, mine = library.optimizers.Adam(schedule(library)), test_restore.variables(1)
    new.build(sorted(mine, key=lambda v: v.name))
    named = dict(zip(test_restore.SHAPES, mine))
    tf.train.Checkpoint(optimizer=new, **named).read(str(tmp_path / "new" / "ckpt")).assert_consumed()
    for each in test_restore.gradients(3, seed=3):
        for optimizer, weights in ((old, theirs), (new, mine)):
            optimizer.apply_gradients(list(zip(each, weights)))
    for a, b in zip(mine, theirs):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_a_model_file_becomes_a_checkpoint_of_its_variables_by_name(checkpoints, tmp_path, capsys):  # noqa: F811
    meta = json.loads((checkpoints / "tf2.8.4_model_adam_h5" / "meta.json").read_text())
    code, printed = convert(checkpoints / "tf2.8.4_model_adam_h5" / "model.h5", "keras3", tmp_path / "new", capsys)
    assert code == 0, printed.err
    assert "built for d1/kernel, d1/bias, d2/kernel, d2/bias" in printed.out
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    named = dict(zip(("d1/kernel", "d1/bias", "d2/kernel", "d2/bias"), model.trainable_variables))
    status = tf.train.Checkpoint(optimizer=optimizer, **named).read(str(tmp_path / "new" / "ckpt"))
    status.assert_consumed()
    for weight, expected in zip(model.get_weights(), meta["at_save"]["weights"]):
        np.testing.assert_allclose(weight, expected, 1e-6)


FAMILIES = {"keras3": (tf.keras, tf.keras.optimizers), "tf_keras": (tf_keras, tf_keras.optimizers)}
FAMILIES["legacy"] = (tf_keras, tf_keras.optimizers.legacy)
FORMATS = {"keras": ".keras", "h5": ".h5", "checkpoint": "", "SavedModel": ""}


def saved_model(family, make, kind, folder, steps=1):
    """Saves a model after some steps; returns the path."""
    keras, optimizers = FAMILIES[family]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    model.compile(make(optimizers), "mse")
    for i in range(steps):
        model.train_on_batch(np.full((2, 2), i + 1, "float32"), np.eye(2, dtype="float32"))
    path = str(folder / f"model{FORMATS[kind]}")
    if kind == "checkpoint":
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    model.save(path, **({"save_format": "tf"} if kind == "SavedModel" else {}))
    return path


SOURCES = [(family, kind) for family in FAMILIES for kind in FORMATS if (family, kind) != ("keras3", "SavedModel")]


@pytest.mark.parametrize("to", LIBRARIES)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(("family", "kind"), SOURCES)
@pytest.mark.sampled(5)
def test_the_momentum_of_sgd_is_that_of_the_file_or_is_said_to_be_unknown(family, kind, momentum, to, tmp_path, capsys):
    path = saved_model(family, lambda library: library.SGD(0.01, momentum=momentum), kind, tmp_path)
    code, printed = convert(path, to, tmp_path / "new", capsys)
    assert code == 0, printed.err
    (shown,) = re.findall(r"SGD\(.*\bmomentum=([^,)]*)", printed.out) or ["none"]
    if family == "legacy" or kind in ("keras", "h5"):
        assert shown == str(momentum), printed.out
    elif family == "keras3" and not momentum:
        assert shown == "none", "its SGD has no slots without a momentum"
    else:
        assert shown == "<its momentum>", printed.out
    assert ("does not hold all arguments" in printed.out) == (kind not in ("keras", "h5"))
    assert "nesterov" in printed.out
    assert "has no slots for" not in printed.out
    assert "ema_" not in printed.out.replace("use_ema", "ema_"), "without effect here"


def test_momenta_of_zeros_are_no_momentum(tmp_path, capsys):
    optimizer, weight = tf_keras.optimizers.SGD(0.01), tf.Variable([1.0])
    optimizer.apply_gradients([(tf.zeros([1]), weight)])
    path = tf.train.Checkpoint(optimizer=optimizer, weight=weight).write(str(tmp_path / "old"))
    code, printed = convert(path, "keras3", tmp_path / "new", capsys)
    assert (code, printed.err) == (0, "")
    assert "tf.keras.optimizers.SGD(learning_rate=0.01)\n" in printed.out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["h5", "checkpoint"])
def test_the_arguments_of_the_wrapper_are_those_of_the_file_or_are_said_to_be_unknown(family, kind, tmp_path, capsys):
    def dynamic(library):
        return LossScaleOptimizer(library.SGD(0.5), initial_scale=64.0, dynamic_growth_steps=7, hysteresis=2)

    code, printed = convert(saved_model(family, dynamic, kind, tmp_path), "keras3", tmp_path / "new", capsys)
    assert code == 0, printed.err
    assert "loss scale 64, counter 1" in printed.out
    known = ", initial_scale=64.0, dynamic_growth_steps=7, hysteresis=2)" in printed.out
    assert known == (kind == "h5")
    assert ("dynamic_growth_steps, ..." in printed.out) == (kind != "h5")

    def fixed(library):
        return LossScaleOptimizer(library.SGD(0.5), dynamic=False, initial_scale=64.0)

    code, printed = convert(saved_model(family, fixed, kind, tmp_path), "keras3", tmp_path / "fixed", capsys)
    assert code == 0, printed.err
    if kind == "h5":
        assert "), dynamic=False, initial_scale=64.0)\n" in printed.out
    assert "loss scale 64, counter" not in printed.out, "a fixed scale has none"


def test_a_scale_that_the_original_did_not_write_is_said_to_be_missing(checkpoints, tmp_path, capsys):  # noqa: F811
    code, printed = convert(checkpoints / "tf2.8.4_model_adam_h5" / "model.h5", "keras3", tmp_path / "new", capsys)
    assert code == 0, printed.err
    assert re.search(r"LossScaleOptimizer\(.*, initial_scale=256.0, dynamic_growth_steps=4\)\n", printed.out)
    assert "note: The file does not hold the loss scale. It starts again from the initial scale." in printed.out


def test_the_fixed_scale_of_tensorflow_2_2_is_said_to_be_unknown(checkpoints, tmp_path, capsys):  # noqa: F811
    code, printed = convert(checkpoints / "tf2.2.3_lso_fixed_adam" / "ckpt", "keras3", tmp_path / "new", capsys)
    assert code == 0, printed.err
    assert "dynamic=False, initial_scale=<its loss scale>)" in printed.out


@pytest.mark.parametrize(("family", "named"), [("keras3", True), ("tf_keras", False)])
@pytest.mark.parametrize("name", ["Adam", "Lion"])
def test_an_optimizer_is_never_taken_for_one_of_another_class(family, named, name, tmp_path, capsys):
    """tf_keras's Lion has slots of the same name as SGD, and an optimizer before its first step has none."""
    for steps in (0, 1):
        folder = tmp_path / str(steps)
        folder.mkdir()
        make = lambda library: getattr(library, name)(0.1)  # noqa: E731
        code, printed = convert(
            saved_model(family, make, "checkpoint", folder, steps), "keras3", folder / "new", capsys
        )
        known = name == "Adam" and (named or steps)
        assert code == (0 if known else 2), printed.out
        assert "SGD" not in printed.out
        assert ("optimizers.Adam(" if known else "the file does not name the class") in printed.out + printed.err


def test_in_a_terminal_its_lines_are_folded_and_the_code_is_still_python(checkpoints, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    path = checkpoints / "tf2.8.4_model_adam_h5" / "model.h5"
    code, printed = convert(path, "keras3", tmp_path / "new", capsys)
    assert code == 0, printed.err
    lines = printed.out.removesuffix(f"written to {tmp_path / 'new'}\n").splitlines()
    assert max(map(len, lines)) <= 80
    construct = printed.out.partition("\n  iterations")[0].removeprefix("optimizer:").strip()
    assert ast.parse(construct)


@pytest.fixture
def good(tmp_path):
    weights = test_restore.variables()
    optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.Adam(0.5), initial_scale=2.0)
    test_restore.train(optimizer, weights, test_restore.gradients(1))
    (tmp_path / "old").mkdir()
    return test_restore.checkpoint(tmp_path / "old", optimizer, weights)


def test_a_folder_with_something_in_it_is_left_as_it_is(good, tmp_path, capsys):
    out = tmp_path / "new"
    out.mkdir()
    (out / "thesis.tex").write_text("all of it")
    code, printed = convert(good, "keras3", out, capsys)
    assert (code, printed.out) == (2, "")
    assert "new: this path is not an empty folder. Pass an empty folder or a new path." in printed.err
    assert [(each.name, each.read_text()) for each in out.iterdir()] == [("thesis.tex", "all of it")]
    (out / "thesis.tex").unlink()
    assert convert(good, "keras3", out, capsys)[0] == 0
    assert convert(good, "keras3", out / "deeper" / "still", capsys)[0] == 0


def without_an_optimizer(good, tmp_path):
    return tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(tmp_path / "old" / "weights"))


def cut_short(good, tmp_path):
    data = tmp_path / "old" / "old.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:8])
    return good


def with_other_bytes(good, tmp_path):
    data = tmp_path / "old" / "old.data-00000-of-00001"
    slot = next(name for name, _ in tf.train.list_variables(good) if "/m/" in name)
    value = tf.train.load_variable(good, slot).tobytes()
    data.write_bytes(data.read_bytes().replace(value, bytes(len(value) - 1) + b"x"))
    return good


def of_an_unknown_class(good, tmp_path):
    class Mine(tf_keras.optimizers.legacy.SGD):
        def _create_slots(self, var_list):
            for variable in var_list:
                self.add_slot(variable, "z")

    optimizer, weight = Mine(), tf.Variable([1.0])
    optimizer.apply_gradients([(tf.ones([1]), weight)])
    return tf.train.Checkpoint(optimizer=optimizer, w=weight).write(str(tmp_path / "old" / "mine"))


WRONG = {
    without_an_optimizer: "weights: the file has no optimizer, only 1 variables",
    cut_short: r"old.data-00000-of-00001: the variables need \d+ bytes, but the data files contain only \d+, so",
    with_other_bytes: r"old: the variable \S+ cannot be read, because the file is truncated or damaged",
    of_an_unknown_class: "because the file does not name the class of optimizer. Construct the optimizer in code",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_what_cannot_be_converted_is_an_error_and_nothing_is_written(good, tmp_path, capsys, wrong):
    path = wrong(good, tmp_path)
    (tmp_path / "new").mkdir()
    code, printed = convert(path, "keras3", tmp_path / "new", capsys)
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("tf-lossscale convert: ")
    assert len(printed.err.splitlines()) == 1
    assert re.search(WRONG[wrong], printed.err), printed.err
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize(
    "stops",
    [
        OSError("No space left on device"),
        tf.errors.ResourceExhaustedError(None, None, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_stops_the_writing_leaves_nothing_behind(good, tmp_path, capsys, monkeypatch, stops):
    write = tf.train.Checkpoint.write

    def stopped(self, prefix):
        write(self, prefix)
        raise stops

    monkeypatch.setattr(tf.train.Checkpoint, "write", stopped)
    code, printed = convert(good, "keras3", tmp_path / "new", capsys)
    assert code == (130 if isinstance(stops, KeyboardInterrupt) else 2)
    assert printed.out == ""
    if code == 2:
        reason = "cannot write a checkpoint to this path (No space left on device)"
        message = f"{tmp_path / 'new'}: {reason}. Nothing was changed.\n"
        assert printed.err == f"tf-lossscale convert: {message}"
    assert os.listdir(tmp_path) == ["old"]


def _below_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    return tmp_path / "file" / "new"


def _a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    return tmp_path / "link"


@pytest.mark.parametrize("where", [_below_a_file, _a_link_that_leads_nowhere])
def test_a_place_that_cannot_hold_the_folder_is_said_and_left(good, tmp_path, capsys, where):
    out = where(tmp_path)
    before = sorted(os.listdir(tmp_path))
    code, printed = convert(good, "keras3", out, capsys)
    assert (code, printed.out) == (2, "")
    assert str(out) in printed.err
    assert sorted(os.listdir(tmp_path)) == before


def test_files_of_tensorflow_1_need_the_learning_rate(checkpoints, tmp_path, capsys):  # noqa: F811
    path = checkpoints / "tf1.15.5_mpls_momentum_saver" / "ckpt"
    code, printed = convert(path, "keras3", tmp_path / "new", capsys)
    assert code == 2
    assert "the file does not contain the learning rate" in printed.err
    assert "--learning-rate" in printed.err
    assert os.listdir(tmp_path) == []
