"""TensorBoard shows the exponents of each variable as a histogram."""

import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.histogram import metadata

from tests.precision.made import counted
from tf_lossscale.monitoring.histograms import write_histograms


def test_tensorboard_reads_a_histogram_for_each_variable_with_values(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        write_histograms(counted({"kernel": [1.0, 1.5, 5.0, 0.0], "bias": [0.0]}, scale=2.0, step=100))
        write_histograms(counted({"kernel": [0.25]}, step=200), step=7)
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert list(events.PluginTagToContent(metadata.PLUGIN_NAME)) == ["exponents/kernel"]
    metadata.parse_plugin_metadata(events.PluginTagToContent(metadata.PLUGIN_NAME)["exponents/kernel"])
    first, second = events.Tensors("exponents/kernel")
    assert (first.step, second.step) == (100, 7)
    assert tf.make_ndarray(first.tensor_proto).tolist() == [[1, 2, 2], [2, 3, 0], [3, 4, 1]]
    assert tf.make_ndarray(second.tensor_proto).tolist() == [[-2, -1, 1]]
