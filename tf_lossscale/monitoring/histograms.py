"""Writes the exponent counts of gradients to TensorBoard as histograms."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.precision.counts import FINITE, LOWEST, ExponentCounts

_KIND = tf.compat.v1.SummaryMetadata(plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="histograms"))


def write_histograms(counts: ExponentCounts, step: Any = None) -> None:
    """Write a histogram of exponents for each variable to the default `tf.summary` writer.

    The bucket from e to e + 1 counts the scaled gradient's values with magnitudes from 2**e to 2**(e + 1).
    `tf.summary.histogram` cannot be used, because it needs the values themselves instead of counts.

    >>> import tempfile
    >>> from tf_lossscale.precision.counts import COLUMNS
    >>> counts = ExponentCounts(("kernel",), np.ones([1, COLUMNS], np.int64), scale=1.0, step=100)
    >>> with tf.summary.create_file_writer(tempfile.mkdtemp()).as_default():
    ...     write_histograms(counts)

    Args:
        counts: the exponent counts of one step.
        step: the step to show in TensorBoard, an int, or None for `counts.step`.
    """
    for name, row in zip(counts.names, counts.counts[:, FINITE]):
        seen = np.flatnonzero(row)
        if not seen.size:
            continue
        bins = np.arange(seen[0], seen[-1] + 1)
        buckets = np.stack([bins + LOWEST, bins + LOWEST + 1, row[bins]], axis=1).astype(np.float64)
        tf.summary.write(f"exponents/{name}", buckets, step=counts.step if step is None else step, metadata=_KIND)
