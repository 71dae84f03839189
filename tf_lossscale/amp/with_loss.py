"""A network and its loss as one function, for hand-written training steps."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale import layers
from tf_lossscale.amp import casting

if TYPE_CHECKING:
    from tf_lossscale.types import Variable


class WithLossCell:
    """A network and its loss as one function of the data and the label. The loss is computed in float32.

    As in Keras's `fit`, the losses of the backbone's layers are added, such as the loss of a `kernel_regularizer`. In a
    replica of a strategy, their share is added, so that the replicas' losses contain them once.

    Keras's losses take (label, output). Other functions take (output, label), as MindSpore's do:

    >>> WithLossCell(lambda x: 2 * x, lambda output, label: output - label)(3, 1)
    5
    >>> network = WithLossCell(tf.keras.layers.Flatten(), tf.keras.losses.KLDivergence())
    >>> round(float(network(tf.constant([[0.25, 0.75]]), tf.constant([[0.5, 0.5]]))), 4)
    0.1438

    Args:
        backbone: a Keras model or any function.
        loss_fn: the loss function. If its first two parameters are called `y_true` and `y_pred`, as in all Keras
            losses, it is called with (label, output). Otherwise, it is called with (output, label).
        label_first: True if `loss_fn` takes (label, output), False if it takes (output, label). Required if the first
            parameter of `loss_fn` has a name like `label` or `target`, if only the second one has a name like `output`
            or `pred`, or if `loss_fn` has fewer than two positional parameters.

    Raises:
        TypeError: `loss_fn` is not a function.
        ValueError: `label_first` is required, but missing.

    Source: MindSpore, `mindspore.nn.WithLossCell`.
    """

    def __init__(self, backbone: Callable[..., Any], loss_fn: Callable[..., Any], *, label_first: bool | None = None):
        self.backbone: Any = backbone
        self.loss_fn = loss_fn
        self.training: bool = True
        self._label_first = _takes_label_first(loss_fn) if label_first is None else label_first
        self._is_layer = layers.is_layer(backbone)

    def __call__(self, data: Any, label: Any) -> Any:
        """Return the loss of one batch.

        Args:
            data: the backbone's input.
            label: the label. A half-precision label is cast to float32, like the backbone's output.

        Returns:
            The result of `loss_fn`, plus the losses of the backbone's layers.
        """
        keywords = {"training": self.training} if self._is_layer else {}
        output = casting.in_float32(self.backbone(data, **keywords))
        label = casting.in_float32(label)
        loss = self.loss_fn(label, output) if self._label_first else self.loss_fn(output, label)
        for of_layer in self.backbone.losses if self._is_layer else []:
            loss += tf.reduce_sum(tf.cast(of_layer, loss.dtype)) / tf.distribute.get_strategy().num_replicas_in_sync
        return loss

    def set_train(self, mode: bool = True) -> WithLossCell:
        """Choose whether a Keras backbone is called in training mode, which is the default.

        >>> network = WithLossCell(tf.keras.layers.Dropout(0.5), lambda output, label: output)
        >>> network.set_train(False)(tf.ones(2), None).numpy().tolist()
        [1.0, 1.0]

        Args:
            mode: True for training (dropout drops, batch normalization updates its averages), False for inference.

        Returns:
            The cell itself.
        """
        self.training = bool(mode)
        return self

    @property
    def trainable_variables(self) -> list[Variable]:
        """The backbone's trainable variables."""
        return self.backbone.trainable_variables


WithLoss = WithLossCell
"""Short name of `WithLossCell`."""

_LABEL = re.compile("label|target|true|truth", re.IGNORECASE)
_OUTPUT = re.compile("output|pred|logit|prob|hat", re.IGNORECASE)


def _takes_label_first(loss_fn: Any) -> bool:
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn` must be a function, but got: {loss_fn!r}. To use a Keras loss by name, pass "
            "keras.losses.get(name)."
        )
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        # Some functions written in C have no signature, so the names of their parameters are unknown.
        parameters = []
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][:2]
    if names == ["y_true", "y_pred"]:
        return True
    # A name such as `label_probs` is that of a label.
    kinds = [next((kind for kind in (_LABEL, _OUTPUT) if kind.search(name)), None) for name in names]
    if len(names) < 2 or kinds[0] is _LABEL or kinds == [None, _OUTPUT]:
        raise ValueError(
            f"The first parameters of `loss_fn`, {names}, do not show whether it takes (label, output) or (output, "
            "label). Pass label_first=True for (label, output), or label_first=False for (output, label)."
        )
    return False
