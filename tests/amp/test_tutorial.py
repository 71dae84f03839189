"""The programs of MindSpore's tutorial on mixed precision, with their defaults: what they print is looked at."""

import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer
from tf_lossscale.amp import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    LossMonitor,
    Model,
    TrainOneStep,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
    all_finite,
    auto_mixed_precision,
    to_float,
)

pytestmark = pytest.mark.wide("the levels and managers in the programs of MindSpore's tutorial")

LIBRARIES = {"keras3": tf.keras, "tf_keras": tf_keras}
libraries = pytest.mark.parametrize("library", LIBRARIES)

MANAGERS = {
    "none": dict,
    "fixed": lambda: {"loss_scale_manager": FixedLossScaleManager(1024.0)},
    "fixed, applied": lambda: {"loss_scale_manager": FixedLossScaleManager(1024.0, drop_overflow_update=False)},
    "dynamic": lambda: {"loss_scale_manager": DynamicLossScaleManager(scale_factor=4, scale_window=3000)},
}


def network(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    stack = [layers.Conv2D(2, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(3)]
    return keras.Sequential([keras.Input((6, 6, 1)), *stack])


def create_dataset():
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((images, np.arange(8) % 3)).batch(4)


def require_ordinary(said, epochs=2):
    """Check what a training printed: the bar to its end, the lines of the monitor, and no fault."""
    assert f"Epoch {epochs}/{epochs}" in said.out
    assert said.out.count("2/2") >= epochs
    assert len(re.findall(r"epoch: \d+ step: \d+, loss is [\d.e+-]+", said.out)) == 2 * epochs
    assert not re.search("Traceback|Warning|Error|nan", said.out + said.err), said


@pytest.mark.table("O3-keras3", "O0-tf_keras", "O1-keras3", every=1)
@libraries
@pytest.mark.parametrize("amp_level", ["O0", "O1", "O2", "O3", "auto"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_model_trains_at_a_level(library, amp_level, capfd):
    keras = LIBRARIES[library]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = {"Accuracy": keras.metrics.SparseCategoricalAccuracy()}
    opt = keras.optimizers.SGD(0.01, momentum=0.9)
    model = Model(network(keras), loss_fn=loss, optimizer=opt, metrics=metrics, amp_level=amp_level)
    history = model.train(2, create_dataset(), callbacks=[LossMonitor()])
    require_ordinary(capfd.readouterr())
    is_dynamic = amp_level in ("O2", "auto")
    assert isinstance(model.optimizer, LossScaleOptimizer) == is_dynamic
    # A scale of 2**24 overflows, so a model with a dynamic scale skips its first steps.
    assert (history.history["loss"][-1] < history.history["loss"][0]) or (
        is_dynamic and model.optimizer.skipped_steps > 0
    )
    assert set(model.eval(create_dataset())) == {"loss", "Accuracy"}
    assert model.predict(tf.ones((2, 6, 6, 1))).shape == (2, 3)


@libraries
@pytest.mark.parametrize("manager", MANAGERS)
def test_a_model_trains_with_each_manager_and_one_layer_by_hand(library, manager, capfd):
    keras = LIBRARIES[library]
    net = network(keras)
    to_float(net.layers[-1], tf.float16)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = Model(net, loss, keras.optimizers.SGD(0.01), amp_level="O0", **MANAGERS[manager]())
    model.train(epoch=2, train_dataset=create_dataset(), callbacks=[LossMonitor()])
    require_ordinary(capfd.readouterr())


@libraries
@pytest.mark.parametrize("kind", ["TrainOneStep", "manager", "cell of one's own"])
def test_a_model_of_a_training_cell_trains(library, kind, capfd):
    keras = LIBRARIES[library]

    class CustomTrainOneStepCell(TrainOneStepCell):
        def construct(self, *inputs):
            loss = self.network(*inputs)
            sens = tf.fill(loss.shape, tf.cast(self.sens, loss.dtype))
            grads = self.grad(self.network, self.weights)(*inputs, sens)
            self.update([grad / self.sens for grad in grads])
            return loss

    net_with_loss = WithLossCell(network(keras), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    opt = keras.optimizers.SGD(0.01, momentum=0.9)
    if kind == "manager":
        net_with_train = TrainOneStepWithLossScaleCell(net_with_loss, opt, DynamicLossScaleManager(64))
    else:
        net_with_train = (TrainOneStep if kind == "TrainOneStep" else CustomTrainOneStepCell)(net_with_loss, opt, 64.0)
    model = Model(net_with_train)
    model.train(epoch=2, train_dataset=create_dataset(), callbacks=[LossMonitor()])
    require_ordinary(capfd.readouterr())


@libraries
def test_a_training_step_by_hand_with_a_scaler(library):
    keras = LIBRARIES[library]
    net = auto_mixed_precision(network(keras), "O3")
    loss_fn = WithLossCell(net, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer = keras.optimizers.SGD(0.01)
    loss_scaler = DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=50)

    @tf.function
    def train_step(data, label):
        with tf.GradientTape() as tape:
            loss = loss_fn(data, label)
            scaled = loss_scaler.scale(loss)
        grads = tape.gradient(scaled, net.trainable_variables)
        is_finite = all_finite(grads)
        if is_finite:
            optimizer.apply_gradients(zip(loss_scaler.unscale(grads), net.trainable_variables))
        loss_scaler.adjust(is_finite)
        return loss

    losses = [float(tf.reduce_mean([train_step(*batch) for batch in create_dataset()])) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert int(loss_scaler.counter) == 6
