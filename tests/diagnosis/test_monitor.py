"""The loss scale in fit's logs and in TensorBoard."""

import csv
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests.cases import combinations
from tests.families import FAMILIES, families
from tf_lossscale import LossScaleMonitor, LossScaleOptimizer


def fit(family, x, callbacks, epochs=1, verbose=0, jit_compile=False, steps_per_execution=1, **kwargs):
    keras = family.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.01), initial_scale=64.0, **kwargs)
    in_functions = {"jit_compile": jit_compile, "steps_per_execution": steps_per_execution}
    model.compile(optimizer, "mse", **(in_functions if tf.executing_eagerly() else {}))
    y = np.zeros((len(x), 1), np.float32)
    history = model.fit(x, y, batch_size=1, epochs=epochs, verbose=verbose, shuffle=False, callbacks=callbacks)
    return history.history, optimizer


def data(n, bad=()):
    x = np.ones((n, 2), np.float32)
    x[list(bad)] = np.inf
    return x


def written(folder):
    """Return the values that TensorBoard shows of a folder: for each tag, pairs of a step and a number or a list."""
    tags = {}
    for path in folder.glob("*.tfevents.*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                tags.setdefault(value.tag, []).append((event.step, tf.make_ndarray(value.tensor).tolist()))
    return tags


@pytest.mark.parametrize("family", combinations(FAMILIES, usual=["keras3"]))
def test_fits_history_bar_and_csv_have_the_scale_and_the_skips(family, tmp_path, capsys):
    path = tmp_path / "log.csv"
    callbacks = [LossScaleMonitor(), family.keras.callbacks.CSVLogger(str(path))]
    history, _ = fit(family, data(8, bad=[1, 3]), callbacks, epochs=2, verbose=2)
    assert history["loss_scale"] == [16.0, 4.0]
    assert history["skipped_steps"] == [2, 4]
    printed = capsys.readouterr().out
    assert "loss_scale: 16" in printed
    assert "skipped_steps: 4" in printed
    rows = list(csv.DictReader(path.open()))
    assert [float(row["loss_scale"]) for row in rows] == [16.0, 4.0]
    assert [float(row["skipped_steps"]) for row in rows] == [2.0, 4.0]


def test_in_graph_mode_keras_2_shows_the_same_and_its_graph_does_not_grow():
    tf_keras = FAMILIES[2].keras
    sizes = []

    def train(callbacks, **kwargs):
        return fit(FAMILIES[2], data(4, bad=[1]), callbacks, epochs=2, **kwargs)[0]

    with tf.Graph().as_default() as graph:
        count = tf_keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: sizes.append(len(graph.get_operations())))
        history = train([LossScaleMonitor(update_freq=1), count])
        assert history["loss_scale"] == [32.0, 16.0]
        assert history["skipped_steps"] == [1, 2]
        assert sizes[0] == sizes[1]
        assert train([LossScaleMonitor()], dynamic=False)["skipped_steps"] == [0, 0]


def test_in_graph_mode_a_log_dir_is_refused(tmp_path):
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match=r"Leave `log_dir` out.*TensorBoard callback"):
        fit(FAMILIES[2], data(1), [LossScaleMonitor(log_dir=tmp_path)])


def test_without_tensorboard_the_error_comes_before_training_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    logs = tmp_path / "logs"
    with pytest.raises(ImportError, match=r"needs tensorboard, which is not installed.*pip install tensorboard$"):
        LossScaleMonitor(log_dir=logs)
    assert not logs.exists()
    history, _ = fit(FAMILIES[0], data(2), [LossScaleMonitor()])
    assert history["skipped_steps"] == [0]


@pytest.mark.slow
@families
@pytest.mark.parametrize(
    ("update_freq", "steps_per_execution", "bad", "expected"),
    [
        (2, 1, [0, 2], [None, 32.0, 32.0, 16.0, 16.0, 16.0]),
        # A frequency that does not divide the steps per execution is rounded up.
        (3, 2, [0, 4, 9], [None, 32.0, 16.0, 16.0, 8.0, 8.0, 4.0, 2.0, 2.0, 1.0]),
    ],
)
def test_with_a_frequency_each_batch_shows_the_last_reading(family, update_freq, steps_per_execution, bad, expected):
    seen = []
    show = family.keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: seen.append(logs.get("loss_scale")))
    x = data(6 if steps_per_execution == 1 else 10, bad)
    monitor = LossScaleMonitor(update_freq=update_freq)
    fit(family, x, [monitor, show], epochs=steps_per_execution, steps_per_execution=steps_per_execution)
    assert seen == expected


@families
def test_without_a_frequency_batches_are_not_waited_for(family):
    monitor = LossScaleMonitor()
    assert not monitor._implements_train_batch_hooks()
    assert LossScaleMonitor(update_freq=3)._implements_train_batch_hooks()


@pytest.mark.parametrize("family", combinations(FAMILIES, usual=["keras3"]))
def test_tensorboard_scalars_have_the_plain_names_and_the_steps(family, tmp_path):
    monitor = LossScaleMonitor(update_freq=2, log_dir=tmp_path)
    fit(family, data(6, bad=[0, 3]), [monitor])
    run = written(tmp_path)
    assert sorted(set(run["loss_scale"])) == [(2, 32.0), (4, 16.0), (6, 16.0)]
    assert sorted(set(run["skipped_steps"])) == [(2, 1.0), (4, 2.0), (6, 2.0)]
    assert {step for step, _ in run["loss"]} == {2, 4, 6}


@pytest.mark.slow
@families
def test_kerass_own_tensorboard_callback_writes_them_too(family, tmp_path):
    callbacks = [LossScaleMonitor(), family.keras.callbacks.TensorBoard(str(tmp_path))]
    fit(family, data(4, bad=[1]), callbacks)
    assert written(tmp_path / "train")["epoch_loss_scale"] == [(0, 32.0)]


@pytest.mark.slow
def test_too_many_skipped_steps_are_said_once_with_what_to_try(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    fit(FAMILIES[0], data(60, bad=range(0, 60, 4)), [LossScaleMonitor()], epochs=3, min_scale=2.0**-100)
    (message,) = said
    assert "25% of the last 60 steps were skipped, more than 20%" in message and "overflow_report()" in message


@pytest.mark.slow
@families
@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "XLA"])
def test_a_stall_ends_fit_at_the_step_that_was_asked_for(family, jit_compile):
    optimizer, monitor = LossScaleOptimizer(family.sgd()), LossScaleMonitor(optimizer=None, stop_after=20)
    model = family.keras.Sequential([family.keras.Input((2,)), family.keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    x = data(90, bad=[*range(5, 12), *range(30, 90)])
    with pytest.raises(
        FloatingPointError, match=r"The last 20 steps were all skipped\. The loss scale is 1 now\. Look"
    ):
        model.fit(x, np.zeros((90, 1)), batch_size=1, shuffle=False, epochs=3, callbacks=[monitor])
    assert (optimizer.state()["total_steps"], optimizer.state()["skipped_in_a_row"]) == (50, 20)
    with pytest.raises(FloatingPointError, match="The last 20 steps"):
        model.fit(x, np.zeros((90, 1)), callbacks=[monitor])  # The training is still stalled.


def test_one_of_several_optimizers_is_watched_and_a_fixed_scale_too():
    other = LossScaleOptimizer(tf.keras.optimizers.SGD(), dynamic=False, initial_scale=8)
    history, _ = fit(FAMILIES[0], data(2), [LossScaleMonitor(optimizer=other)])
    assert (history["loss_scale"], history["skipped_steps"]) == ([8.0], [0])


def test_an_optimizer_without_a_loss_scale_is_refused_with_what_to_do():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"Wrap it before compile.*tf_lossscale\.wrap_in_compile\(\) before compile"):
        model.fit(data(2), data(2), verbose=0, callbacks=[LossScaleMonitor()])
    with pytest.raises(TypeError, match=r"must be a tf_lossscale\.LossScaleOptimizer"):
        LossScaleMonitor(optimizer=3)
    for arguments in (
        {"update_freq": 0},
        {"update_freq": 1.5},
        {"stop_after": 0},
        {"max_skipped": -1},
        {"max_skipped": 2.0},
    ):
        with pytest.raises(ValueError, match="must"):
            LossScaleMonitor(**arguments)


def test_the_fraction_is_counted_anew_after_the_counts_were_reset(caplog):
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    reset = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            batch == 70 and optimizer.set_state({"loss_scale": 64.0, "dynamic_counter": 0})
        )
    )
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    monitor = LossScaleMonitor(update_freq=10)
    model.fit(data(150, range(150)), np.zeros((150, 1)), batch_size=1, verbose=0, callbacks=[reset, monitor])
    assert "of the last 60 steps were skipped" in caplog.text or "of the last 50 steps were skipped" in caplog.text


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(FAMILIES[0], data(2), [LossScaleMonitor()])
    assert list(tmp_path.iterdir()) == []
