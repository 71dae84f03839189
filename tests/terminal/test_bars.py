"""What monitors print beside Keras's progress bar, in a terminal and in a file."""

import pytest
import tensorflow as tf

from tests.families import FAMILIES
from tests.terminal.seen import seen
from tf_lossscale.amp import Model, OverflowMonitor


def train(keras):
    network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    data = tf.data.Dataset.from_tensor_slices((tf.ones([4, 1]), tf.zeros([4, 1]))).batch(1)
    model = Model(network, "mse", keras.optimizers.SGD(0.0), amp_level="O2")
    model.train(2, data, callbacks=[OverflowMonitor()])


LINES = [
    f"epoch: {epoch} step: {step}, loss is 0, loss scale is 16777216, overflow: False"
    for epoch in (1, 2)
    for step in (1, 2, 3, 4)
]


@pytest.mark.parametrize("family", FAMILIES[:2], ids=lambda family: family.name)
def test_a_monitor_prints_whole_lines_in_a_terminal_and_into_a_file(family, capsys):
    train(family.keras)
    assert [line for line in capsys.readouterr().out.split("\n") if "epoch:" in line] == LINES
    with seen() as what:
        train(family.keras)
    assert [line.rstrip() for line, _ in what.lines if "epoch:" in line] == LINES
    assert any("4/4" in line for line, _ in what.lines)
    assert what.faults() == []
