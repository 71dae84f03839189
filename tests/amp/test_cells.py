"""Cells: the loss of a network, one training step, and what they do in replicas."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests import numerics, strategies
from tests.cases import MODES, combinations
from tf_lossscale import LossScaleOptimizer, amp

OUTPUT, LABEL = np.array([[0.2, 0.8], [0.6, 0.4]], "float32"), np.array([[0.5, 0.5], [0.9, 0.1]], "float32")
# sum(label * log(label / output)) / 2, and the same with the two exchanged.
DIVERGENCE, EXCHANGED = 0.2247, 0.2520


def network(keras, *layers):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), *(layers or (keras.layers.Dense(8, activation="relu"),))])
    model.add(keras.layers.Dense(1))
    return model


def mean_square(output, label):
    return tf.reduce_mean((tf.cast(output, tf.float32) - label) ** 2)


def divergence(first, second):
    return tf.reduce_sum(first * tf.math.log(first / second)) / 2


def of_label_and_output(labels, logits):
    return divergence(labels, logits)


def test_each_loss_gets_output_and_label_in_its_own_order(keras):
    losses = keras.losses

    class Own(losses.Loss):
        def call(self, y_true, y_pred):
            return tf.reduce_mean(y_true - 2 * y_pred, axis=-1)

    assert float(divergence(LABEL, OUTPUT)) == pytest.approx(DIVERGENCE, abs=1e-4)
    assert float(divergence(OUTPUT, LABEL)) == pytest.approx(EXCHANGED, abs=1e-4)
    for loss_fn, keywords, expected in (
        (losses.KLDivergence(), {}, DIVERGENCE),
        (losses.get("kl_divergence"), {}, DIVERGENCE),
        (functools.partial(losses.get("kl_divergence")), {}, DIVERGENCE),
        (Own(), {}, 0.5 - 1.0),
        (divergence, {}, EXCHANGED),
        (lambda output, label: divergence(label, output), {}, DIVERGENCE),
        (of_label_and_output, {"label_first": True}, DIVERGENCE),
        (of_label_and_output, {"label_first": False}, EXCHANGED),
        (losses.KLDivergence(), {"label_first": False}, EXCHANGED),
    ):
        loss = amp.WithLoss(lambda x: x, loss_fn, **keywords)(tf.constant(OUTPUT), tf.constant(LABEL))
        assert float(tf.reduce_mean(loss)) == pytest.approx(expected, abs=1e-4), loss_fn


@pytest.mark.parametrize(
    "loss_fn",
    [
        of_label_and_output,
        tf.nn.softmax_cross_entropy_with_logits,
        lambda *both: 0,
        max,
        lambda y, y_pred: 0,
        lambda gt, pred: 0,
        lambda actual, predicted: 0,
        lambda y, y_hat: 0,
        lambda x, logits: 0,
    ],
)
def test_a_loss_whose_order_does_not_show_asks_for_it(loss_fn):
    with pytest.raises(ValueError, match="label_first=True"):
        amp.WithLoss(lambda x: x, loss_fn)
    assert amp.WithLoss(lambda x: x, loss_fn, label_first=True).loss_fn is loss_fn


@pytest.mark.parametrize(
    "loss_fn",
    [lambda pred, y: pred - y, lambda a, b: a - b, lambda y_hat, y: y_hat - y, lambda p, label_probs: p - label_probs],
)
def test_a_loss_whose_names_do_not_contradict_mindspore_takes_the_output_first(loss_fn):
    assert amp.WithLoss(lambda x: x, loss_fn)(3, 1) == 2


def test_a_loss_must_be_a_function():
    with pytest.raises(TypeError, match="must be a function"):
        amp.WithLoss(lambda x: x, "mse")


def test_the_loss_is_computed_in_float32():
    def loss_fn(output, label):
        assert output.dtype == label.dtype == tf.float32
        return mean_square(output, label)

    # 300 squared is no float16.
    cell = amp.WithLoss(lambda x: tf.cast(x, tf.float16), loss_fn)
    assert float(cell(tf.fill([1, 1], 300.0), tf.zeros([1, 1], tf.bfloat16))) == 90000.0


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_backbone_is_in_training_mode_until_set_train_says_otherwise(keras, compiled):
    model = network(keras, keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.5))
    norm = model.layers[0]
    step = amp.TrainOneStepCell(amp.WithLossCell(model, mean_square), keras.optimizers.SGD(0.0))
    take = tf.function(lambda *batch: step(*batch)) if compiled else step
    x, y = tf.fill((64, 3), 4.0), tf.ones((64, 1))
    take(x, y)
    assert np.asarray(norm.moving_mean) == pytest.approx([2.0] * 3)
    assert len({float(take(x + tf.random.normal(x.shape), y)) for _ in range(3)}) == 3
    before = np.asarray(norm.moving_mean)
    assert step.set_train(False) is step
    losses = {float(step(x, y)) for _ in range(3)}
    assert len(losses) == 1, "a dropped unit"
    np.testing.assert_array_equal(np.asarray(norm.moving_mean), before)
    step.network.set_train()
    assert len({float(step(x + 1, y)), *losses}) == 2
    assert (np.asarray(norm.moving_mean) > before).all()


class ByHand(amp.TrainOneStepCell):
    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, tf.fill(loss.shape, self.sens))
        self.update([grad / self.sens for grad in grads])
        return loss


def test_a_cell_with_a_scale_without_one_and_one_that_scales_by_hand_take_the_same_steps(keras, monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    x, y = tf.ones((4, 3)), tf.ones((4, 1))
    results = []
    for cell, sens in ((amp.TrainOneStep, 1.0), (amp.TrainOneStepCell, 1024.0), (ByHand, 1024.0)):
        model = network(keras)
        step = cell(amp.WithLossCell(model, mean_square), keras.optimizers.SGD(0.1), sens)
        losses = [float(step(x, y)) for _ in range(3)]
        assert losses[-1] < losses[0]
        results.append([*losses, *model.get_weights()])
    for a, b, c in zip(*results):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(b, c)
    loss_of_each = step.grad(lambda x: (model(x) - 1.0)[:, 0], step.weights)
    weighted = loss_of_each(x, [1.0, 0.0, 0.0, 2.0])[-1]
    assert float(weighted[0]) == 3.0, "the gradient of the last bias, with a sens for each row"
    assert not said


SCALES = {
    "manager": lambda: amp.DynamicLossScaleManager(init_loss_scale=64, scale_window=100),
    "cell": lambda: amp.DynamicLossScaleUpdateCell(64.0, 2, 100),
    "fixed cell": lambda: amp.FixedLossScaleUpdateCell(64.0),
    "number": lambda: 64,
    "tensor": lambda: tf.constant([64.0]),
    "array": lambda: np.full((1,), 64, "float32"),
    "variable": lambda: tf.Variable(64.0),
    "applied": lambda: amp.FixedLossScaleManager(64, drop_overflow_update=False),
}


@pytest.mark.parametrize("kind", SCALES)
def test_a_step_with_loss_scale_returns_loss_overflow_and_scale(kind):
    model = network(tf.keras)
    cell = amp.TrainOneStepWithLossScale(amp.WithLoss(model, mean_square), tf.keras.optimizers.SGD(0.1), SCALES[kind]())
    good, bad = tf.ones((4, 3)), tf.constant(np.full((4, 3), np.inf, "float32"))
    y = tf.ones((4, 1))
    assert float(cell.sens) == float(cell.scale_sense) == 64.0
    cell(good, y)
    before = [w.copy() for w in model.get_weights()]
    _, overflow, scale = cell(bad, y)
    assert (bool(overflow), float(scale)) == (True, 64.0)
    for a, b in zip(before, model.get_weights()):
        assert np.array_equal(a, b) == (kind != "applied")
    if kind != "applied":
        _, overflow, scale = cell(good, y)
        assert (bool(overflow), float(scale)) == (False, 32.0 if kind in ("manager", "cell") else 64.0)


def test_an_argument_that_would_be_ignored_is_refused():
    loss = amp.WithLoss(network(tf.keras), mean_square)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8)
    with pytest.raises(ValueError, match="`sens` was given as"):
        amp.TrainOneStep(loss, optimizer, 1024.0)
    with pytest.raises(ValueError, match="`scale_sense` was given as"):
        amp.TrainOneStepWithLossScale(loss, optimizer, amp.DynamicLossScaleManager())
    assert float(amp.TrainOneStep(loss, optimizer).sens) == 8.0
    assert float(amp.TrainOneStepWithLossScale(loss, optimizer).sens) == 8.0
    with pytest.raises(TypeError, match="`scale_sense` is missing"):
        amp.TrainOneStepWithLossScale(loss, tf.keras.optimizers.SGD())
    with pytest.raises(TypeError, match="must be a number"):
        amp.TrainOneStepWithLossScale(loss, tf.keras.optimizers.SGD(), tf.constant([1.0, 2.0]))


def test_a_step_of_ones_own_overrides_construct():
    class Clipped(amp.TrainOneStep):
        def construct(self, *inputs):
            loss, gradients = self.loss_and_gradients(*inputs)
            gradients, norm = tf.clip_by_global_norm(gradients, 1e-3)
            self.update(gradients)
            return loss, norm, loss * self.sens

    model = network(tf.keras)
    step = Clipped(amp.WithLoss(model, mean_square), tf.keras.optimizers.SGD(1.0), sens=1024.0)
    before = [w.copy() for w in model.get_weights()]
    loss, norm, scaled = step(tf.ones((4, 3)), 10 * tf.ones((4, 1)))
    moved = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(before, model.get_weights())))
    assert float(norm) > 1
    assert float(scaled) == 1024 * float(loss)
    numerics.assert_close(moved, 1e-3, 1e-6, *before)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_cell_of_several_replicas_that_is_called_outside_of_run_says_so_and_changes_nothing(keras, compiled):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        model = network(keras)
        cell = amp.TrainOneStepCell(amp.WithLossCell(model, mean_square), keras.optimizers.SGD(0.5))
    before = model.get_weights()
    step = tf.function(lambda *batch: cell(*batch)) if compiled else cell
    with pytest.raises(ValueError, match=r"created in the scope of a MirroredStrategy with 2 replicas.*strategy\.run"):
        step(tf.ones((4, 3)), tf.ones((4, 1)))
    error = r"TrainOneStepCell\(\) must be called in a replica context.*strategy.run"
    with strategy.scope(), pytest.raises(ValueError, match=error):
        step(tf.ones((4, 3)), tf.ones((4, 1)))
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("drop", "name", "compiled"),
    combinations(
        [True, False], ["one_device", "mirrored_2"], MODES, usual=["True-mirrored_2-function", "False-mirrored_2-eager"]
    ),
)
def test_a_cell_runs_in_replicas_and_all_of_them_see_an_overflow_of_one(name, compiled, drop):
    strategy = strategies.get(name)
    with strategy.scope():
        model = network(tf.keras)
        manager = amp.FixedLossScaleManager(64.0, drop)
        cell = amp.TrainOneStepWithLossScaleCell(
            amp.WithLossCell(model, mean_square), tf.keras.optimizers.SGD(0.5), manager
        )
    replicas = strategy.num_replicas_in_sync

    def run(x, y):
        return strategy.run(cell, (x, y))

    take = tf.function(run) if compiled else run

    def step(x):
        """Takes a step with a batch for each replica; returns the results of each."""
        batches = [distributed(strategy, values) for values in (x, np.ones((replicas, 4, 1), "float32"))]
        return [[each.numpy() for each in strategy.experimental_local_results(result)] for result in take(*batches)]

    before = [np.array(w) for w in model.get_weights()]
    for bad in range(replicas):
        x = np.ones((replicas, 4, 3), "float32")
        x[bad] = np.inf
        loss, overflow, scale = step(x)
        assert overflow == [True] * replicas
        assert scale == [64.0] * replicas
        assert [np.isfinite(each) for each in loss] == [i != bad for i in range(replicas)]
        changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights())]
        assert any(changed) != drop
        model.set_weights(before)
    _, overflow, _ = step(np.ones((replicas, 4, 3), "float32"))
    assert not any(overflow)
    assert not np.array_equal(before[0], model.get_weights()[0])


def distributed(strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: tf.constant(values[ctx.replica_id_in_sync_group])
    )


class Square:
    """A network with one weight w, which starts at 1, and the loss (w * x)**2."""

    def __init__(self):
        self.weight = tf.Variable(1.0)
        self.trainable_variables = [self.weight]

    def __call__(self, x):
        return (self.weight * x) ** 2


def test_a_session_that_fetches_the_loss_alone_or_all_results_takes_one_step_in_a_tf1_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        network, x = Square(), tf.compat.v1.placeholder(tf.float32, [])
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.25)
        outputs = amp.TrainOneStepWithLossScaleCell(network, optimizer, amp.DynamicLossScaleManager(64))(x)
        session.run(tf.compat.v1.global_variables_initializer())
        taken = [(*session.run(outputs, {x: value}), session.run(network.weight)) for value in (1.0, np.inf, 1.0)]
        assert taken == [(1.0, False, 64.0, 0.5), (np.inf, True, 64.0, 0.5), (0.25, False, 32.0, 0.25)]
        assert (session.run(outputs[0], {x: 1.0}), session.run(network.weight)) == (0.0625, 0.125)


def test_a_step_that_a_strategy_runs_in_a_tf1_graph_needs_a_tf_function():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        strategy = tf.distribute.OneDeviceStrategy("cpu:0")
        with strategy.scope():
            network = Square()
            step = amp.TrainOneStepCell(network, tf.compat.v1.train.GradientDescentOptimizer(0.25))
        with pytest.raises(ValueError, match=r"inside a tf\.function"):
            strategy.run(step, (tf.constant(1.0),))
        loss = tf.function(lambda: strategy.run(step, (tf.constant(1.0),)))()
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(loss) == 1.0
        assert session.run(network.weight) == 0.5


def test_a_new_cell_with_the_same_optimizer_does_not_train_a_layer_that_was_frozen_meanwhile(keras):
    model = network(keras)
    loss = amp.WithLossCell(model, mean_square)
    step = amp.TrainOneStepWithLossScaleCell(loss, keras.optimizers.SGD(0.1), 8.0)
    x, y = tf.ones((4, 3)), tf.ones((4, 1))
    step(x, y)
    model.layers[-1].trainable = False
    before = model.get_weights()
    amp.TrainOneStepWithLossScaleCell(loss, step.optimizer)(x, y)
    first, *_, last = [np.abs(a - b).max() for a, b in zip(model.get_weights(), before)]
    assert first > 0
    assert last == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "mirrored_2"])
@pytest.mark.parametrize("way", ["call", "fit"])
def test_a_cell_adds_the_losses_of_the_layers_as_fit_does(keras, way, name):

    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.25 * tf.reduce_mean(x))
            return x

    def made():
        regularizer = keras.regularizers.L2(10.0)
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", kernel_regularizer=regularizer)
        return keras.Sequential([keras.Input((1,)), dense, Adding()])

    x, y = tf.ones((2, 1)), tf.zeros((2, 1))
    data = tf.data.Dataset.from_tensors((x, y))
    strategy = tf.distribute.get_strategy() if name == "none" else strategies.get(name)
    with strategy.scope():
        model, expected = made(), made()
        replicas = strategy.num_replicas_in_sync
        network = amp.WithLossCell(model, lambda output, label: tf.reduce_mean((output - label) ** 2) / replicas)
        cell = amp.TrainOneStepCell(network, keras.optimizers.SGD(0.01))
        trained = amp.Model(expected, "mse", keras.optimizers.SGD(0.01))
    losses = trained.train(1, data, verbose=0).history["loss"]
    if way == "fit":
        assert amp.Model(cell).train(1, data, verbose=0).history["loss"] == losses == [11.25]
    elif name == "none":
        assert float(cell(x, y)) == losses[0] == 11.25
    else:
        strategy.run(cell, next(iter(strategy.experimental_distribute_dataset(data))))
    np.testing.assert_allclose(model.get_weights()[0], expected.get_weights()[0], rtol=1e-6)
    assert model.get_weights()[0] != 1.0
