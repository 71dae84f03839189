"""Model and monitors."""

import contextlib
import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests import strategies
from tests.amp.networks import of_tokens
from tests.cases import combinations
from tf_lossscale import LossScaleMonitor, LossScaleOptimizer, amp


def network(keras):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])


def dataset(batches=8):
    x = np.random.default_rng(0).normal(size=(batches * 4, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(4)


@contextlib.contextmanager
def mixed_float16(keras):
    """Sets the global policy, as Keras's own programs do."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)


def gradient_step(optimizer, weight, gradient):
    optimizer.get_scaled_loss(0.0)
    (gradient,) = optimizer.get_unscaled_gradients([gradient * optimizer.loss_scale])
    optimizer.apply_gradients([(gradient, weight)])


@pytest.mark.parametrize("make", [tf.keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD])
@pytest.mark.parametrize("compiled", [False, True])
def test_drop_overflow_update_decides_whether_an_overflow_is_applied(make, compiled):
    for drop, after in ((True, 1.0), (False, -np.inf)):
        optimizer = LossScaleOptimizer(make(1.0), loss_scale=amp.FixedLossScaleManager(8.0, drop))
        weight = tf.Variable([1.0])
        step = tf.function(gradient_step) if compiled else gradient_step
        step(optimizer, weight, tf.constant([np.inf]))
        assert weight.numpy().item() == after
        assert float(optimizer.loss_scale) == 8.0
        again = type(optimizer).from_config(optimizer.get_config())
        weight.assign([1.0])
        gradient_step(again, weight, tf.constant([np.inf]))
        assert weight.numpy().item() == after, "lost in the config"


def test_bad_managers_and_combinations_are_refused():
    sgd, manager = tf.keras.optimizers.SGD, amp.DynamicLossScaleManager
    model, wrapped = network(tf.keras), LossScaleOptimizer(sgd())
    for error, message, call in (
        (TypeError, r"TensorFlow 2\.3's argument", lambda: LossScaleOptimizer(sgd(), loss_scale="dynamic")),
        (TypeError, "Pass loss_scale", lambda: LossScaleOptimizer(sgd(), loss_scale_manager=manager())),
        (ValueError, "Leave out", lambda: LossScaleOptimizer(sgd(), initial_scale=8, loss_scale=manager())),
        (ValueError, "growth_factor", lambda: LossScaleOptimizer(sgd(), loss_scale=manager(scale_factor=0.5))),
        (ValueError, "already", lambda: amp.Model(model, "mse", wrapped, loss_scale_manager=manager())),
        (ValueError, "already", lambda: amp.Model(model, "mse", wrapped, loss_scale_manager=None)),
        (ValueError, "needs an optimizer", lambda: amp.Model(model, "mse", loss_scale_manager=manager())),
        (
            ValueError,
            "keep_batchnorm_fp32=False has no effect at level O1",
            lambda: amp.Model(model, "mse", sgd(), amp_level="O1", keep_batchnorm_fp32=False),
        ),
        (ValueError, "'loss'", lambda: amp.Model(model, "mse", sgd(), metrics={"loss": "mae"})),
        (ValueError, "epoch", lambda: amp.Model(model, "mse", sgd()).train(0, dataset())),
        (ValueError, "optimizer", lambda: amp.Model(model).train(1, dataset())),
        (
            ValueError,
            "dataset_sink_mode",
            lambda: amp.Model(model, "mse", sgd()).train(1, dataset(), dataset_sink_mode=True),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    cell = amp.TrainOneStepCell(amp.WithLossCell(model, lambda a, b: a), sgd())
    alone = {"loss_fn": "mse", "optimizer": "sgd", "amp_level": "O2", "loss_scale_manager": None, "metrics": ["mae"]}
    for name, value in alone.items():
        with pytest.raises(ValueError, match="pass it alone"):
            amp.Model(cell, **{name: value})


def test_a_model_that_cannot_be_made_changes_neither_network_nor_optimizer(keras):
    model, optimizer = network(keras), keras.optimizers.SGD(0.1)
    for arguments in ({"loss_scale_manager": "x"}, {"amp_level": "O5"}):
        with pytest.raises((TypeError, ValueError)):
            amp.Model(model, "mse", optimizer, **{"amp_level": "O3", **arguments})
    with pytest.raises(TypeError, match="Keras model"):
        amp.Model(3, "mse", optimizer, amp_level="O2")
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert amp.Model(model, "mse", optimizer, amp_level="O2").optimizer.inner_optimizer is optimizer


def monitor_lines(capsys):
    """The lines of monitors among those of Keras's progress bar, which is the default."""
    return re.findall(r"epoch: \d+ step: .*", capsys.readouterr().out)


@pytest.mark.filterwarnings("error::UserWarning")
def test_monitors_print_the_loss_and_the_scale(keras, capsys):
    manager = amp.DynamicLossScaleManager(init_loss_scale=64, scale_factor=4, scale_window=4)
    model = amp.Model(network(keras), "mse", keras.optimizers.SGD(0.01), loss_scale_manager=manager)
    model.train(2, dataset(batches=8), callbacks=[amp.LossMonitor(8), amp.OverflowMonitor(4)])
    lines = monitor_lines(capsys)
    assert [line.split(",")[0] for line in lines if "scale" not in line] == ["epoch: 1 step: 8", "epoch: 2 step: 8"]
    scales = [line.split(", ", maxsplit=2)[2] for line in lines if "scale" in line]
    assert scales == [f"loss scale is {scale}, overflow: False" for scale in (256, 1024, 4096, 16384)]


@pytest.mark.slow
def test_the_overflow_monitor_reports_an_overflow_that_is_applied_on_all_replicas(keras, capsys):
    manager = amp.FixedLossScaleManager(8, drop_overflow_update=False)
    with strategies.get("mirrored_2").scope():
        model, _ = squares(keras)
        trained = amp.Model(model, "mse", keras.optimizers.SGD(0.0), loss_scale_manager=manager)
    x = np.float32([1, 2, 3, np.inf, 1, 2])[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros_like(x))).batch(2)
    trained.train(1, data, callbacks=amp.OverflowMonitor())
    assert [line.rpartition(": ")[2] for line in monitor_lines(capsys)] == ["False", "True", "True"]  # 0 * inf is NaN


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda inner: inner, ", no loss scale"),
        (lambda inner: LossScaleOptimizer(inner, dynamic=False, initial_scale=8), "is 8, overflow: not checked"),
    ],
    ids=["bare", "fixed"],
)
def test_the_overflow_monitor_claims_nothing_that_is_not_checked(keras, wrap, said, capsys):
    model = amp.Model(network(keras), "mse", wrap(keras.optimizers.SGD(0.01)))
    model.train(1, dataset(batches=1), callbacks=amp.OverflowMonitor())
    (line,) = monitor_lines(capsys)
    assert line.endswith(said)


@pytest.mark.parametrize("in_notebook", [False, True])
def test_a_line_overwrites_the_bar_only_in_a_notebook(in_notebook, monkeypatch, capsys):
    shell = types.SimpleNamespace(kernel=object()) if in_notebook else None
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    model, _ = squares(tf.keras)
    trained = amp.Model(model, "mse", tf.keras.optimizers.SGD(0.0))
    data = tf.data.Dataset.from_tensor_slices((np.ones((4, 1), "f"), np.ones((4, 1), "f"))).batch(2)
    trained.train(1, data, callbacks=amp.LossMonitor())
    assert ("\repoch: 1 step: 2" in capsys.readouterr().out) == in_notebook


def test_an_evaluation_by_a_callback_leaves_the_loss_of_the_step_to_the_monitor(capsys):
    def batch(x):
        return tf.data.Dataset.from_tensors((tf.fill((4, 1), x), tf.zeros((4, 1))))

    model, _ = squares(tf.keras)
    trained = amp.Model(model, "mse", tf.keras.optimizers.SGD(0.0))
    evaluation = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch_number, logs: trained.eval(batch(9.0))
    )
    trained.train(1, batch(3.0), callbacks=[evaluation, amp.LossMonitor()])
    assert printed(capsys) == [9.0]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_a_monitor_prints_every_whole_number_of_steps(bad):
    with pytest.raises(ValueError, match="per_print_times"):
        amp.LossMonitor(bad)


def test_the_default_level_keeps_what_was_set_by_hand_and_scales_nothing(keras):
    model = network(keras)
    amp.to_float(model.layers[0], "float16")
    amp.Model(model, "mse", keras.optimizers.SGD(0.01)).train(1, dataset())
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32"]
    with mixed_float16(keras):
        model = network(keras)
    amp.Model(model, "mse", keras.optimizers.SGD(0.01)).train(1, dataset())
    assert [layer.compute_dtype for layer in model.layers] == ["float16"] * 2
    assert float(model.optimizer.loss_scale) == 1.0  # Keras would wrap an optimizer that is not wrapped.
    assert not model.optimizer.dynamic


def test_o2_and_auto_have_a_dynamic_loss_scale_unless_the_manager_is_none(keras):
    for level in ("O0", "O1", "O2", "O3", "auto"):
        optimizer = keras.optimizers.SGD(0.01)
        model = amp.Model(network(keras), "mse", optimizer, amp_level=level, loss_scale_manager=None)
        assert model.optimizer is model.network.optimizer is optimizer
        wrapped = amp.Model(network(keras), "mse", optimizer, amp_level=level).optimizer
        if level in ("O2", "auto"):
            assert (wrapped.inner_optimizer is optimizer, float(wrapped.loss_scale)) == (True, 2.0**24)
        else:
            assert wrapped is optimizer


def test_normalization_is_kept_in_float32_as_asked(keras):
    for level, keep, expected in (
        ("O2", None, "float32"),
        ("O2", True, "float32"),
        ("O2", False, "float16"),
        ("O3", None, "float16"),
        ("O3", True, "float32"),
        ("O3", False, "float16"),
        ("O1", True, "float32"),
    ):
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])
        amp.Model(model, "mse", keras.optimizers.SGD(0.01), amp_level=level, keep_batchnorm_fp32=keep)
        assert [layer.compute_dtype for layer in model.layers] == ["float16", expected], (level, keep)


def test_the_loss_is_computed_in_float32(keras):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("linear"), keras.layers.Dense(1, "linear")])
    model.set_weights([np.ones((1, 1)), np.zeros(1)])
    trained = amp.Model(model, "mse", keras.optimizers.SGD(0.0), amp_level="O3")
    batch = tf.data.Dataset.from_tensors((np.full((1, 1), 300.0, "float32"), np.zeros((1, 1), "float32")))
    assert trained.eval(batch) == {"loss": 90000.0}  # which is no float16
    assert trained.train(1, batch).history["loss"] == [90000.0]
    assert model(np.ones((1, 1), "float32")).dtype == "float16"
    assert trained.predict(np.ones((1, 1), "float32")).dtype == "float32"


def test_two_metrics_of_one_class_a_function_and_a_name_keep_the_names_they_are_given(keras):
    top = keras.metrics.SparseTopKCategoricalAccuracy
    metrics = {
        "Top1": top(1),
        "Top5": top(5),
        "Function": keras.metrics.sparse_categorical_accuracy,
        "Name": "sparse_categorical_accuracy",
        "Accuracy": "accuracy",
    }
    model = keras.Sequential([keras.Input((10,)), keras.layers.Activation("linear")])
    scores = np.arange(10, dtype="float32")[None].repeat(4, 0)  # 9 is the best
    data = tf.data.Dataset.from_tensors((scores, np.array([9, 8, 6, 1])))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained = amp.Model(model, loss, "sgd", metrics=metrics)
    trained.train(1, data)
    found = trained.eval(data, dataset_sink_mode=False)
    expected = {"Top1": 0.25, "Top5": 0.75, "Function": 0.25, "Name": 0.25, "Accuracy": 0.25}
    assert {name: found[name] for name in expected} == expected
    assert set(found) == {"loss", *expected}
    assert set(amp.Model(model, loss, "sgd", metrics={"loss", "accuracy"}).eval(data)) == {"loss", "accuracy"}


def test_an_optimizer_by_name_is_wrapped_as_an_object_is(keras):
    model = amp.Model(network(keras), "mse", "adam", amp_level="O2")
    assert type(model.optimizer.inner_optimizer).__name__ == "Adam"
    assert model.network.optimizer is model.optimizer
    assert amp.Model(network(keras), "mse", "adam").optimizer is not None


def test_at_level_o0_predict_returns_what_the_network_does():
    network = tf.keras.Sequential([amp.to_float(tf.keras.layers.Dense(3), "float16")])
    assert amp.Model(network).predict(tf.ones((2, 4))).dtype == "float16"


# One weight w of 1, loss w**2 * x**2, and a rate of 0: a step's own loss is x**2.
LOSSES = [1.0, 9.0, 4.0, 25.0]


def squares(keras, **kwargs):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, **kwargs)])
    model.set_weights([np.ones((1, 1))])
    x = np.sqrt(np.float32(LOSSES))[:, None]
    return model, tf.data.Dataset.from_tensor_slices((x, np.zeros_like(x)))


def printed(capsys):
    return [float(loss) for loss in re.findall(r"loss is ([\d.]+)", capsys.readouterr().out)]


def test_the_overflow_monitor_prints_the_scale_in_graph_mode(capsys):
    with tf.Graph().as_default():
        model, _ = squares(tf_keras)
        optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.0), initial_scale=64.0)
        model.compile(optimizer, "mse")
        x = np.float32([[2], [np.inf]])
        monitor = amp.OverflowMonitor().as_callback(tf_keras)
        model.fit(x, np.zeros_like(x), batch_size=1, shuffle=False, verbose=0, callbacks=[monitor])
    first, second = monitor_lines(capsys)
    assert first.endswith("loss scale is 64, overflow: False")
    assert second.endswith("loss scale is 32, overflow: True")


@pytest.mark.slow
def test_the_loss_monitor_prints_the_loss_of_the_step(keras, capsys):
    model, data = squares(keras)
    data = data.batch(1).filter(lambda x, y: True)  # of unknown length
    for _ in range(2):  # a second Model of one network
        trained = amp.Model(model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.0), amp_level="O2")
        history = trained.train(2, data, callbacks=[amp.LossMonitor(), amp.OverflowMonitor(2)])
        both = [1.0, 9.0, 9.0, 4.0, 25.0, 25.0]
        assert printed(capsys) == both * 2
        assert history.history["loss"] == [9.75, 9.75]
        assert trained.eval(data) == {"loss": 9.75}


def test_the_loss_monitor_prints_the_loss_of_all_replicas_and_regularizers(keras, capsys):
    with strategies.get("mirrored_2").scope():
        model, data = squares(keras, kernel_regularizer=keras.regularizers.L2(0.5))
        trained = amp.Model(model, "mse", keras.optimizers.SGD(0.0))
    history = trained.train(1, data.batch(2), callbacks=amp.LossMonitor())
    assert printed(capsys) == [5.5, 15.0]
    assert history.history["loss"] == pytest.approx([10.25])


def test_the_loss_monitor_prints_keras_loss_where_a_train_step_computes_it_alone(capsys):
    class Alone(tf.keras.Sequential):
        def train_step(self, data):
            return {"loss": tf.reduce_mean(data[0])}

    model = amp.Model(Alone([tf.keras.layers.Dense(1)]), "mse", tf.keras.optimizers.SGD(0.0))
    model.train(1, dataset(2).map(lambda x, y: (7 * tf.ones_like(x), y)), callbacks=amp.LossMonitor())
    assert printed(capsys) == [7.0, 7.0]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("kind", ["TrainOneStepCell", "TrainOneStepWithLossScaleCell"])
def test_a_training_cell_is_trained_by_the_model(keras, kind, capsys):
    model, data = squares(keras)
    network = amp.WithLossCell(model, keras.losses.MeanSquaredError())
    cell = getattr(amp, kind)(
        network, keras.optimizers.SGD(0.0), amp.FixedLossScaleManager(64) if "Scale" in kind else 8
    )
    trained = amp.Model(cell)
    seen = []

    class Seeing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, logs["loss"], self.model.network is model))
            self.model.stop_training = epoch == 1

    history = trained.train(5, data.batch(1), callbacks=[amp.LossMonitor(2), Seeing()])
    assert printed(capsys) == [9.0, 25.0] * 2
    assert seen == [(0, 9.75, True), (1, 9.75, True)]
    assert history.history["loss"] == [9.75, 9.75]
    assert float(trained.optimizer.loss_scale) == (64 if "Scale" in kind else 8)
    assert trained.predict(tf.fill((1, 1), 3.0)).numpy() == [[3.0]]
    with pytest.raises(ValueError, match="is a training cell"):
        trained.eval(data)


def cell_of(keras, kind="TrainOneStepWithLossScaleCell", layer=None):
    model = layer or keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    network = amp.WithLossCell(model, keras.losses.MeanSquaredError())
    return getattr(amp, kind)(network, keras.optimizers.Adam(0.01), 64.0)


@pytest.mark.slow
@pytest.mark.parametrize(("known", "verbose"), [(False, "auto"), (True, 1), (True, 2), (False, 0)])
def test_a_cell_is_trained_with_the_progress_bar_of_keras(keras, known, verbose, capsys):
    data = dataset(batches=3)
    data = data if known else data.filter(lambda *_: True)
    history = amp.Model(cell_of(keras)).train(epoch=2, train_dataset=data, verbose=verbose)
    said = capsys.readouterr().out
    assert len(history.history["loss"]) == 2
    assert ("Epoch 2/2" in said) == (verbose != 0)
    assert ("3/3" in said) == (verbose != 0)
    assert ("1/3" in said or "1/Unknown" in said) == (verbose in ("auto", 1))


def callbacks_of(keras, folder):
    callbacks = keras.callbacks
    return [
        LossScaleMonitor(),
        callbacks.CSVLogger(f"{folder}/log.csv"),
        callbacks.EarlyStopping("loss", patience=5),
        callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        callbacks.ModelCheckpoint(f"{folder}/model.keras"),
        callbacks.ReduceLROnPlateau("loss"),
        callbacks.TensorBoard(f"{folder}/board", histogram_freq=1),
        callbacks.TerminateOnNaN(),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [False, True], ids=["model", "layer"])
def test_callbacks_of_keras_see_the_optimizer_of_the_cell(keras, layer, tmp_path):
    cell = cell_of(keras, layer=keras.layers.Dense(1) if layer else None)
    callbacks = [each for each in callbacks_of(keras, tmp_path) if not (layer and "Checkpoint" in type(each).__name__)]
    history = amp.Model(cell).train(2, dataset(batches=2), callbacks=callbacks).history
    assert history["loss_scale"] == [64.0, 64.0]
    assert float(tf.convert_to_tensor(cell.optimizer.learning_rate)) == pytest.approx(0.01 / 4)
    if not layer:
        saved = keras.models.load_model(tmp_path / "model.keras")
        for a, b in zip(saved.get_weights(), cell.network.backbone.get_weights()):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_model_that_was_compiled_is_the_same_after_its_cell_was_trained(keras):
    cell = cell_of(keras)
    model = cell.network.backbone
    before = amp.Model(model, "mse", keras.optimizers.SGD(0.5), metrics={"Error": "mae"})

    class Evaluating(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert self.model.optimizer is cell.optimizer
            assert set(before.eval(dataset(1))) == {"loss", "Error"}

    amp.Model(cell).train(1, dataset(1), callbacks=Evaluating())
    assert model.optimizer is before.optimizer


@pytest.mark.slow
def test_a_backup_restores_the_weights_and_the_optimizer_of_a_cell(keras, tmp_path):

    class Interrupting(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    found = []
    for interrupted in (False, True):
        keras.utils.set_random_seed(0)
        cell = cell_of(keras)
        if interrupted:
            backup = keras.callbacks.BackupAndRestore(tmp_path)
            with pytest.raises(KeyboardInterrupt):
                amp.Model(cell).train(4, dataset(2), callbacks=[backup, Interrupting()])
            cell = cell_of(keras)
            backup = keras.callbacks.BackupAndRestore(tmp_path)
            assert len(amp.Model(cell).train(4, dataset(2), callbacks=backup).history["loss"]) == 2
        else:
            amp.Model(cell).train(4, dataset(2))
        found.append([*cell.network.backbone.get_weights(), int(cell.optimizer.iterations)])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


BAD_DATA = {
    "arrays": (lambda: (np.ones((4, 3)), np.ones((4, 1))), r"from_tensor_slices\(\(data, label\)\)"),
    "batches": (lambda: [(np.ones((4, 3)), np.ones((4, 1)))] * 2, r"\(data, label\), but got 1 parts"),
    "dict of arrays": (lambda: {"data": np.ones((4, 3))}, r"\(data, label\).*keys \['data'\]"),
    "dicts": (
        lambda: dataset(1).map(lambda x, y: {"data": x, "label": y}),
        r"\(data, label\).*keys \['data', 'label'\]",
    ),
    "triples": (lambda: dataset(1).map(lambda x, y: (x, y, y)), r"\(data, label\), but got 3 parts"),
    "endless": (lambda: dataset(1).repeat(), r"Leave out \.repeat\(\)"),
    "empty": (lambda: dataset(1).take(0), "`train_dataset` has no batch"),
    "generator": (
        lambda: (batch for batch in dataset(2)),
        "is a generator, which can be read only once, but `epoch` is 2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD_DATA)
def test_data_that_does_not_fit_is_an_error_that_says_what_does(kind):
    make, message = BAD_DATA[kind]
    trained = [amp.Model(cell_of(tf.keras))]
    if kind in ("empty", "endless", "generator"):
        trained.append(amp.Model(network(tf.keras), "mse", "sgd"))
    for model in trained:
        with pytest.raises(ValueError, match=message):
            model.train(2, make())
    if kind == "generator":
        assert np.isfinite(trained[0].train(1, make()).history["loss"]).all()


def test_a_cell_takes_networks_of_three_inputs():
    class Weighted(amp.WithLossCell):
        def __call__(self, data, label, weight):
            return tf.reduce_mean(weight * (self.backbone(data) - label) ** 2)

    weighted = Weighted(tf.keras.layers.Dense(1), lambda output, label: output)
    cell = amp.TrainOneStepCell(weighted, tf.keras.optimizers.SGD(0.1))
    amp.Model(cell).train(1, dataset(1).map(lambda x, y: (x, y, y)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored_2", "one_device"])
def test_a_cell_made_in_the_scope_of_a_strategy_is_trained_on_its_replicas(keras, name, capsys):
    strategy = strategies.get(name)
    with strategy.scope():
        model, _ = squares(keras)
        cell = amp.TrainOneStepWithLossScaleCell(
            amp.WithLossCell(model, lambda output, label: tf.reduce_mean((output - label) ** 2)),
            keras.optimizers.SGD(0.0),
            64.0,
        )
    x = np.float32([1, 3, np.inf, 1, 2, 4])[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros_like(x))).batch(2)
    history = amp.Model(cell).train(1, data, callbacks=[amp.OverflowMonitor(), LossScaleMonitor()])
    said = [line.partition(", ")[2] for line in monitor_lines(capsys)]
    assert [each.partition("overflow: ")[2] for each in said] == ["False", "True", "False"]
    replicas = strategy.num_replicas_in_sync  # whose losses add up
    assert said[0].startswith(f"loss is {5 * replicas},")
    assert said[2].startswith(f"loss is {10 * replicas},")
    assert history.history["skipped_steps"] == [1]


@pytest.mark.slow
def test_the_loss_of_a_cell_on_two_replicas_is_the_sum_of_what_they_return(keras):
    of_each = keras.losses.get("mse")
    losses = [
        lambda output, label: tf.reduce_mean((output - label) ** 2) / 2,
        lambda output, label: of_each(label, output) / 2,  # one number for each sample
    ]
    if keras is tf.keras:  # tf_keras's own loss objects refuse to compute a mean in a replica
        losses.append(keras.losses.MeanSquaredError())
    x = np.float32([1, 3, 2, 4])[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros_like(x))).batch(4)
    for loss in losses:
        with strategies.get("mirrored_2").scope():
            model, _ = squares(keras)
            network = amp.WithLossCell(model, loss)
            cell = amp.TrainOneStepWithLossScaleCell(network, keras.optimizers.SGD(0.0), 64.0)
        for _ in range(2):
            assert amp.Model(cell).train(1, data, verbose=0).history["loss"] == [7.5]


def masked(keras):
    return of_tokens(
        keras, lambda embedded: keras.layers.Dense(1)(keras.layers.LSTM(3, return_sequences=True)(embedded))
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", combinations(["O1", "O2", "O3"], usual=["O2"]))
def test_padding_does_not_count_in_the_loss(keras, level):
    tokens = np.array([[1, 2, 0, 0], [3, 1, 2, 0]])
    targets = np.array([[[1.0], [2.0], [9.0], [9.0]], [[3.0], [1.0], [2.0], [9.0]]], "float32")
    batch = tf.data.Dataset.from_tensors((tokens, targets))
    plain = masked(keras)
    plain.compile("sgd", "mse")
    expected = plain.evaluate(batch)
    model = amp.Model(masked(keras), "mse", keras.optimizers.SGD(0.1), amp_level=level)
    assert model.eval(batch)["loss"] == pytest.approx(expected, rel=1e-3)
    assert model.train(1, batch).history["loss"][0] == pytest.approx(expected, rel=1e-3)
    cell = amp.WithLossCell(amp.auto_mixed_precision(masked(keras), level), keras.losses.MeanSquaredError())
    assert float(cell(tokens, targets)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation, loss, label",
    [("softmax", "sparse_categorical_crossentropy", 0), ("sigmoid", "binary_crossentropy", [1.0, 1.0])],
)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_wrong_and_certain_prediction_is_corrected(keras, level, activation, loss, label):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, activation)])
    start = np.array([[-20.0, 0.0 if activation == "softmax" else -20.0]], "float32")
    model.set_weights([start, np.zeros(2)])
    trained = amp.Model(model, loss, keras.optimizers.SGD(1.0), amp_level=level, loss_scale_manager=None)
    losses = trained.train(1, tf.data.Dataset.from_tensors((np.ones((1, 1)), np.array([label])))).history["loss"]
    # Of the probabilities in float16, which are 0 and 1, the loss is 16.118, and the gradient is zero.
    assert losses == [pytest.approx(20.0)]
    assert model.get_weights()[0][0, 0] > start[0, 0] + 0.4


def one_weight(keras):
    """A network `weight * x`, and data with the loss (3 - weight)**2."""
    network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    return network, tf.data.Dataset.from_tensors((np.ones((1, 1), "float32"), np.full((1, 1), 3.0, "float32")))


@pytest.mark.slow
def test_a_second_model_for_evaluation_does_not_change_how_the_first_one_trains(keras, capsys):
    results = []
    for evaluates in (False, True):
        network, data = one_weight(keras)
        manager = amp.DynamicLossScaleManager(init_loss_scale=8, scale_window=1)
        model = amp.Model(network, "mse", keras.optimizers.SGD(0.125), amp_level="O2", loss_scale_manager=manager)
        model.train(1, data, verbose=0)
        if evaluates:
            other = amp.Model(network, "mse", metrics={"Error": "mae"})
            assert other.eval(data) == {"loss": 2.25, "Error": 1.5}
            assert network.optimizer is model.optimizer
        model.train(2, data, callbacks=amp.OverflowMonitor(), verbose=0)
        assert set(model.eval(data)) == {"loss"}
        if evaluates:
            assert set(other.eval(data)) == {"loss", "Error"}
        results.append((network.get_weights(), float(model.optimizer.loss_scale), monitor_lines(capsys)))
    assert results[0] == results[1]
    assert results[0][1] == 64.0


@pytest.mark.slow
def test_two_models_train_one_network_in_turn_with_their_own_optimizers(keras):
    with mixed_float16(keras):
        network, data = one_weight(keras)
    first, second = (amp.Model(network, "mse", keras.optimizers.SGD(rate)) for rate in (0.25, 0.0))
    weights = []
    for model in (first, second, first, second):
        model.train(1, data, verbose=0)
        weights.append(float(network.get_weights()[0][0, 0]))
    assert weights == [2.0, 2.0, 2.5, 2.5]


def test_a_network_is_not_compiled_by_a_second_model_while_the_first_one_trains(keras):
    network, data = one_weight(keras)
    other = amp.Model(network, "mse", metrics={"Error": "mae"})
    model = amp.Model(network, "mse", keras.optimizers.SGD(0.125), metrics={"Error": "mae"})
    seen = []

    class Evaluating(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(model.eval(data)["loss"])
            for evaluate in (lambda: other.eval(data), lambda: amp.Model(network, "mse")):
                with pytest.raises(ValueError, match="is being trained by another Model"):
                    evaluate()

    model.train(2, data, callbacks=Evaluating(), verbose=0)
    assert seen == [2.25, 1.265625]
    assert other.eval(data) == {"loss": 1.265625, "Error": 1.125}


def test_a_model_without_an_optimizer_keeps_the_optimizer_that_keras_wrapped():
    with mixed_float16(tf_keras):
        network, data = one_weight(tf_keras)
        network.compile(tf_keras.optimizers.SGD(0.125), "mse")
    optimizer = network.optimizer
    assert amp.Model(network, "mse").eval(data) == {"loss": 4.0}
    assert network.optimizer is optimizer
