"""The loss scale in fit's logs, in TensorBoard and as a plot."""

import csv
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests.families import FAMILIES, families
from tf_lossscale import LossScaleMonitor, LossScaleOptimizer, cli, write_summary
from tf_lossscale.monitoring.plot import draw, read
from tf_lossscale.precision import records


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    return said


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


@families
def test_fits_history_bar_and_csv_have_the_scale_the_skips_and_the_norm(family, tmp_path, capsys):
    path = tmp_path / "log.csv"
    callbacks = [LossScaleMonitor(), family.keras.callbacks.CSVLogger(str(path))]
    history, optimizer = fit(family, data(8, bad=[1, 3]), callbacks, epochs=2, verbose=2, diagnose=True)
    assert history["loss_scale"] == [16.0, 4.0]
    assert history["skipped_steps"] == [2, 4]
    assert history["grad_norm"][-1] == pytest.approx(float(optimizer.gradient_norm))
    printed = capsys.readouterr().out
    assert "loss_scale: 16" in printed
    assert "skipped_steps: 4" in printed
    rows = list(csv.DictReader(path.open()))
    assert [float(row["loss_scale"]) for row in rows] == [16.0, 4.0]
    assert [float(row["skipped_steps"]) for row in rows] == [2.0, 4.0]
    assert float(rows[1]["grad_norm"]) > 0


def test_in_graph_mode_keras_2_shows_the_same_and_its_graph_does_not_grow():
    tf_keras = FAMILIES[2].keras
    sizes = []

    def train(callbacks, **kwargs):
        return fit(FAMILIES[2], data(4, bad=[1]), callbacks, epochs=2, **kwargs)[0]

    with tf.Graph().as_default() as graph:
        count = tf_keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: sizes.append(len(graph.get_operations())))
        history = train([LossScaleMonitor(update_freq=1), count], diagnose=True)
        assert history["loss_scale"] == [32.0, 16.0]
        assert history["skipped_steps"] == [1, 2]
        assert all(norm > 0 for norm in history["grad_norm"])
        assert sizes[0] == sizes[1]
        assert train([LossScaleMonitor()], dynamic=False)["skipped_steps"] == [0, 0]


def test_in_graph_mode_a_log_dir_is_refused(tmp_path):
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match=r"Leave `log_dir` out.*TensorBoard callback"):
        fit(FAMILIES[2], data(1), [LossScaleMonitor(log_dir=tmp_path)])


def test_without_tensorboard_the_error_comes_before_training_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    logs = tmp_path / "logs"
    with pytest.raises(ImportError, match=r"log_dir=.*pip install tensorboard\. Or leave out `log_dir`\.$"):
        LossScaleMonitor(log_dir=logs)
    assert not logs.exists()
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())
    with pytest.raises(ImportError, match=r"write_summary.*pip install tensorboard\. Or remove the call\.$"):
        write_summary(optimizer, step=1)
    with pytest.raises(Exception, match=r"ImportError: write_summary.*Or remove the call\."):
        tf.function(write_summary)(optimizer, step=1)
    history, _ = fit(FAMILIES[0], data(2), [LossScaleMonitor()])
    assert history["skipped_steps"] == [0]


@families
def test_with_a_frequency_each_batch_shows_the_last_reading(family):
    seen = []
    show = family.keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: seen.append(logs.get("loss_scale")))
    fit(family, data(6, bad=[0, 3]), [LossScaleMonitor(update_freq=2), show])
    assert seen == [None, 32.0, 32.0, 16.0, 16.0, 16.0]


@families
def test_a_frequency_that_does_not_divide_the_steps_per_execution_is_rounded_up(family):
    seen = []
    show = family.keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: seen.append((batch, logs.get("loss_scale")))
    )
    fit(family, data(10, bad=[0, 4, 9]), [LossScaleMonitor(update_freq=3), show], epochs=2, steps_per_execution=2)
    read = [scale for _, scale in seen]
    assert [batch for batch, _ in seen] == 2 * [1, 3, 5, 7, 9], "Keras names the last batch of each execution"
    assert read == [None, 32.0, 16.0, 16.0, 8.0, 8.0, 4.0, 2.0, 2.0, 1.0]


@families
def test_without_a_frequency_batches_are_not_waited_for(family):
    monitor = LossScaleMonitor()
    assert not monitor._implements_train_batch_hooks()
    assert LossScaleMonitor(update_freq=3)._implements_train_batch_hooks()
    history, _ = fit(family, data(4), [monitor])
    assert "grad_norm" not in history, "only with diagnose=True"


@families
def test_tensorboard_scalars_have_the_plain_names_and_the_steps(family, tmp_path):
    monitor = LossScaleMonitor(update_freq=2, log_dir=tmp_path)
    fit(family, data(6, bad=[0, 3]), [monitor], diagnose=True)
    (run,) = read(tmp_path).values()
    assert sorted(set(run["loss_scale"])) == [(2, 32.0), (4, 16.0), (6, 16.0)]
    assert sorted(set(run["skipped_steps"])) == [(2, 1.0), (4, 2.0), (6, 2.0)]
    assert {step for step, _ in run["loss"]} == {2, 4, 6}
    events = [e for path in tmp_path.glob("*") for e in tf.compat.v1.train.summary_iterator(str(path))]
    assert "grad_norm" in {value.tag for event in events for value in event.summary.value}


@families
def test_kerass_own_tensorboard_callback_writes_them_too_and_plot_reads_it(family, tmp_path):
    callbacks = [LossScaleMonitor(), family.keras.callbacks.TensorBoard(str(tmp_path))]
    fit(family, data(4, bad=[1]), callbacks)
    assert read(tmp_path)["train"]["loss_scale"] == [(0, 32.0)]


def test_too_many_skipped_steps_are_said_once_with_what_to_try(warnings):
    x = data(60, bad=range(0, 60, 4))
    fit(FAMILIES[0], x, [LossScaleMonitor()], epochs=3, min_scale=2.0**-100)
    assert len(warnings) == 1
    assert "25% of the last 60 steps were skipped, more than 20%" in warnings[0]
    assert "overflow_report()" in warnings[0]


def test_few_skipped_steps_or_few_steps_at_all_are_not_worth_a_warning(warnings):
    fit(FAMILIES[0], data(60, bad=range(0, 60, 6)), [LossScaleMonitor()], min_scale=2.0**-100)
    fit(FAMILIES[0], data(10, bad=range(10)), [LossScaleMonitor()], min_scale=2.0**-100)
    assert not warnings


def test_a_stall_is_noticed_at_the_end_of_the_epoch_where_xla_compiles():
    with pytest.raises(FloatingPointError, match="The last 120 steps were all skipped"):
        fit(FAMILIES[0], data(120, bad=range(120)), [LossScaleMonitor()], 5, jit_compile=True, on_stall="raise")


def test_one_of_several_optimizers_is_watched_and_a_fixed_scale_too():
    other = LossScaleOptimizer(tf.keras.optimizers.SGD(), dynamic=False, initial_scale=8)
    history, _ = fit(FAMILIES[0], data(2), [LossScaleMonitor(optimizer=other)])
    assert (history["loss_scale"], history["skipped_steps"]) == ([8.0], [0])


def test_an_optimizer_without_a_loss_scale_is_refused_with_what_to_do():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"Wrap it before compile.*tf_lossscale\.wrap_in_compile\(\) before compile"):
        model.fit(data(2), data(2), verbose=0, callbacks=[LossScaleMonitor()])
    for call in (lambda: LossScaleMonitor(optimizer=3), lambda: write_summary(3)):
        with pytest.raises(TypeError, match=r"must be a tf_lossscale\.LossScaleOptimizer"):
            call()
    for arguments in ({"update_freq": 0}, {"update_freq": 1.5}, {"max_skipped": -1}):
        with pytest.raises(ValueError, match="must"):
            LossScaleMonitor(**arguments)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_loop_of_ones_own_writes_the_same_scalars(compiled, tmp_path):
    optimizer, weight = (
        LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=64, diagnose=True),
        tf.Variable(1.0),
    )

    def step(i, gradient):
        optimizer.get_scaled_loss(0.0), optimizer.get_unscaled_gradients([])
        optimizer.apply_gradients([(gradient, weight)])
        write_summary(optimizer, i, loss=gradient)

    function = tf.function(step) if compiled else step
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        for i, gradient in enumerate((1.0, np.nan, 2.0)):
            function(tf.constant(i, tf.int64), tf.constant(gradient))
    writer.close()
    (run,) = read(tmp_path).values()
    assert run["loss_scale"] == [(0, 64.0), (1, 32.0), (2, 32.0)]
    assert run["skipped_steps"] == [(0, 0.0), (1, 1.0), (2, 1.0)]
    assert [run["loss"][0], run["loss"][2]] == [(0, 1.0), (2, 2.0)]


@pytest.mark.parametrize("writers", [1, 2])
def test_plot_leaves_out_what_a_resumed_run_had_logged_after_the_step_that_it_resumed_from(writers, tmp_path):
    def log(readings):
        for step, scale, skipped in readings:
            tf.summary.scalar("loss_scale", scale, step)
            tf.summary.scalar("skipped_steps", skipped, step)

    killed = [(10, 8.0, 0.0), (20, 4.0, 1.0), (25, 4.0, 1.0), (30, 2.0, 2.0)]
    resumed = [(20, 8.0, 0.0), (30, 16.0, 0.0), (40, 8.0, 1.0)]
    for readings in (killed, resumed) if writers == 2 else (killed + resumed,):
        with tf.summary.create_file_writer(str(tmp_path)).as_default():
            log(readings)
    (run,) = read(tmp_path).values()
    assert run["loss_scale"] == [(10, 8.0), (20, 8.0), (30, 16.0), (40, 8.0)]
    assert run["skipped_steps"] == [(10, 0.0), (20, 0.0), (30, 0.0), (40, 1.0)]


def scalars(folder, scales=(64.0, 32.0, 32.0)):
    with tf.summary.create_file_writer(str(folder)).as_default():
        for i, scale in enumerate(scales):
            for name, value in (("loss_scale", scale), ("skipped_steps", i / 2), ("loss", 1.0 / (i + 1))):
                tf.summary.scalar(name, value, step=i)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_draws_all_runs_of_a_folder(suffix, tmp_path, capsys):
    scalars(tmp_path / "logs" / "a")
    scalars(tmp_path / "logs" / "b")
    out = tmp_path / f"scale.{suffix}"
    assert cli.main(["plot", str(tmp_path / "logs"), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"drew {out} from 2 runs: a, b\n", "")
    start = out.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", out.name], "nothing else is left behind"


def test_plot_keeps_a_picture_that_is_there_and_writes_into_the_folder_by_itself(tmp_path, capsys):
    scalars(tmp_path)
    assert cli.main(["plot", str(tmp_path)]) == 0
    before = (tmp_path / "loss_scale.png").read_bytes()
    assert cli.main(["plot", str(tmp_path)]) == 2
    assert "add --force" in capsys.readouterr().err
    assert (tmp_path / "loss_scale.png").read_bytes() == before
    assert cli.main(["plot", str(tmp_path), "--force"]) == 0


def test_plot_reads_what_a_killed_run_left(tmp_path):
    scalars(tmp_path)
    (path,) = tmp_path.glob("*.tfevents.*")
    path.write_bytes(path.read_bytes()[:-5])
    (run,) = read(tmp_path).values()
    assert len(run["loss_scale"]) == 3
    assert len(run["loss"]) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["."], "no event file with a loss scale"),
        (["none"], "none does not exist. Pass a folder."),
        (["none", "--out", "a.pdf"], "must end in .png or .svg"),
    ],
)
def test_plot_says_what_is_wrong(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", *arguments]) == 2
    assert text in capsys.readouterr().err


@families
def test_the_counts_of_exponents_go_into_the_folder_once_for_each_counted_step(family, tmp_path):
    monitor = LossScaleMonitor(update_freq=2, log_dir=tmp_path)
    _, optimizer = fit(family, data(10, bad=[6]), [monitor], diagnose="exponents", diagnose_every=3)
    counts = records.read(tmp_path)
    assert [each.step for each in counts] == [1, 4, 7, 10], "the readings were after the steps 2, 4, 6, 8 and 10"
    assert [each.scale for each in counts] == [64.0, 64.0, 64.0, 32.0]
    last = optimizer.precision_report().counts
    assert counts[-1].names == last.names
    np.testing.assert_array_equal(counts[-1].counts, last.counts)
    events = [e for path in tmp_path.glob("*tfevents*") for e in tf.compat.v1.train.summary_iterator(str(path))]
    histograms = [(e.step, v.tag) for e in events for v in e.summary.value if v.tag.startswith("exponents/")]
    assert {step for step, _ in histograms} == {1, 4, 10}, "no value of step 7 is finite"
    assert len(histograms) == len(set(histograms))


@families
def test_a_run_that_goes_on_with_a_loaded_optimizer_adds_its_counts(family, tmp_path):
    def monitored(model):
        x, y = np.ones([4, 1], np.float32), np.ones([4, 1], np.float32)
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[LossScaleMonitor(update_freq=1, log_dir=tmp_path)])

    model = family.keras.Sequential([family.keras.layers.Input((1,)), family.keras.layers.Dense(1)])
    model.compile(
        LossScaleOptimizer(family.sgd(), diagnose="exponents", diagnose_every=3), family.keras.losses.MeanSquaredError()
    )
    monitored(model)
    path = str(tmp_path / "model.h5")
    model.save(path)
    loaded = family.keras.models.load_model(path)
    monitored(loaded)
    monitored(loaded)
    assert [counts.step for counts in records.read(tmp_path)] == [1, 4, 5, 8, 11]


def test_a_monitor_writes_the_counts_of_a_second_optimizer_too(tmp_path):
    monitor = LossScaleMonitor(log_dir=tmp_path)
    for _ in range(2):
        fit(FAMILIES[0], data(1), [monitor], diagnose="exponents")
    assert len((tmp_path / records.FILE).read_text().splitlines()) == 2


def test_without_a_folder_counts_are_not_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(FAMILIES[0], data(2), [LossScaleMonitor()], diagnose="exponents")
    assert list(tmp_path.iterdir()) == []


def test_the_ticks_of_skipped_steps_are_whole_numbers(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **kwargs: drawn.append(figure) or open(path, "w").close()
    )
    run = {"loss_scale": [(1, 8.0), (2, 4.0)], "loss": [], "skipped_steps": [(1, 0.0), (2, 1.0)]}
    draw({"run": run}, tmp_path / "scale.png")
    ticks = drawn[0].axes[2].get_yticks()
    assert all(tick == round(tick) for tick in ticks), ticks
