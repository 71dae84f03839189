"""Mixed-precision levels. A level determines which layers of a model compute in half precision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_lossscale import layers
from tf_lossscale.amp.casting import set_casts

if TYPE_CHECKING:
    from tf_lossscale.types import DType, Same

# Layers that compute matrix products or convolutions. They gain the most from half precision.
_MATRIX_LAYERS = re.compile(
    "(Depthwise|Separable)?Conv[123]D(Transpose)?|Dense|EinsumDense|Dot|(SimpleRNN|GRU|LSTM|ConvLSTM)Cell"
    "|(MultiHead|GroupedQuery)Attention"
)
_RECTIFIERS = frozenset({"ReLU", "PReLU"})
# Normalization layers, whose means and variances are too inaccurate in half precision.
_NORMALIZATION = frozenset({"BatchNormalization", "LayerNormalization", "Normalization", "SyncBatchNormalization"})
# Composite layers. Keras does not cast the tensors that their parts exchange, so all parts need the same dtype.
_OF_ONE_DTYPE = frozenset({"RNN", "MultiHeadAttention", "GroupedQueryAttention"})

LEVELS = ("O0", "O1", "O2", "O3", "auto")
_HALF = ("float16", "bfloat16")


def auto_mixed_precision(model: Same, amp_level: str = "O0", dtype: DType = "float16") -> Same:
    """Set the dtype in which each layer of a model computes. The variables stay float32.

    ====== ===========================================================================================
    level  effect
    ====== ===========================================================================================
    O0     nothing
    O1     convolution, dense, multi-head attention and recurrent layers, ReLU and PReLU to half precision
    O2     batch and layer normalization to float32, all other layers to half precision
    O3     all layers to half precision
    auto   convolution, dense, multi-head attention and recurrent layers to half precision
    ====== ===========================================================================================

    O2 and O3 set the dtype of every layer; call `to_float` afterwards to change individual layers. O1 and auto skip
    layers whose dtype was set by `to_float`, O2 or O3. To undo a level, call `to_float(model, "float32")`; setting a
    different level is not enough. A `tf.function` of your own that has already been traced keeps the dtypes that it was
    traced with. So does a model that has called `fit`, `evaluate` or `predict` before `to_float` changed one of its
    layers, or a level was set for a model inside it: compile the model again.

    Layers of different dtypes can be combined, because their inputs are cast. At O1 and auto, half-precision layers
    return float32 tensors. At O2, normalization layers return half-precision tensors. At O2 and O3, models return
    half-precision tensors, and the inputs of a subclassed model that defines its own `call` are cast to half precision.
    `Model` and `WithLossCell` compute the loss in float32.

    >>> import tensorflow as tf
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(2), tf.keras.layers.BatchNormalization()])
    >>> _ = auto_mixed_precision(model, "O2")
    >>> [layer.compute_dtype for layer in model.layers]
    ['float16', 'float32']

    Args:
        model: a Keras model (Keras 3 or tf_keras), built or not.
        amp_level: "O0", "O1", "O2", "O3" or "auto".
        dtype: the half-precision dtype, float16 or bfloat16, as a string or as a TensorFlow or NumPy dtype.

    Returns:
        The same model. `dtype_table(model)` shows the result.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the level or the dtype is unknown, or a layer is quantized.

    Source: MindSpore, `mindspore.amp.auto_mixed_precision`.
    """
    require_level(model, amp_level)
    dtype = _dtype(dtype, _HALF)
    if amp_level == "O0":
        return model
    _forget_traces(model)
    model_dtype = getattr(model, "compute_dtype", None)
    for _, layer, decides in _layers(model):
        in_half = _in_half(decides, amp_level)
        # Under the global policy `mixed_float16`, Keras has already set this layer and the tensors around it.
        is_set = model_dtype == layer.compute_dtype == dtype or getattr(layer, _KEEPS_DTYPE, False)
        if amp_level in ("O2", "O3"):
            _set(layer, dtype if in_half else "float32")
            object.__setattr__(layer, _KEEPS_DTYPE, True)
            if type(layer).__name__ in ("TFOpLambda", "SlicingOpLambda"):
                # TFOpLambda and SlicingOpLambda wrap operations such as `x + y` in functional tf_keras models.
                set_casts(layer, inputs=dtype, only_mixed=True)
            else:
                set_casts(layer, outputs=None if in_half else dtype)
        elif in_half and not is_set:
            _set(layer, dtype)
            # A recurrent cell gets no casts, because the state that it returns is an input to its next step.
            is_cell = hasattr(layer, "state_size") and not hasattr(layer, "cell")
            if layer is decides and not is_cell:
                set_casts(layer, inputs=dtype, outputs="float32")
    if amp_level in ("O2", "O3"):
        for each in _models(model):
            set_casts(each, inputs=dtype)
    return model


_changes = 0


def changes() -> int:
    """Return how often levels and dtypes were set. A `tf.function` traced before the last change is outdated."""
    return _changes


def _forget_traces(layer: Any) -> None:
    """Count a change, and make Keras trace the training, evaluation and prediction of a model again."""
    global _changes
    _changes += 1
    if _is_model(layer):
        layer.train_function = layer.test_function = layer.predict_function = None


def require_level(model: Any, amp_level: Any) -> None:
    """Check a model and a level, and raise the same errors as `auto_mixed_precision`."""
    if amp_level not in LEVELS:
        raise ValueError(f"The amp level {amp_level!r} is not supported. Choose one of {', '.join(LEVELS)}.")
    inner = _layers(model)
    if amp_level != "O0":
        _require_unquantized(inner)


def to_float(layer: Same, dtype: DType) -> Same:
    """Set the dtype in which a layer and its sublayers compute.

    >>> import tensorflow as tf
    >>> to_float(tf.keras.layers.Dense(2), "float16").compute_dtype
    'float16'

    Args:
        layer: a Keras layer or model (Keras 3 or tf_keras), built or not.
        dtype: float32, float16 or bfloat16, as a string or as a TensorFlow or NumPy dtype. Variables stay float32.

    Returns:
        The same layer.

    Raises:
        TypeError: `layer` is not a Keras layer.
        ValueError: the dtype is not one of the three, or a layer is quantized.

    Source: MindSpore, `mindspore.nn.Cell.to_float`.
    """
    dtype = _dtype(dtype, ("float32", *_HALF))
    # This call raises a TypeError if `layer` is not a Keras layer.
    layers.layers_of(layer)
    as_layer: Any = layer
    inner = _layers(layer) if _layers_inside(layer) else list(_with_parts(layer, as_layer.name, layer))
    _require_unquantized(inner)
    _forget_traces(layer)
    for _, each, _ in inner:
        _set(each, dtype)
        set_casts(each)
        object.__setattr__(each, _KEEPS_DTYPE, True)
    if _layers_inside(layer):
        for each in _models(layer):
            set_casts(each)
    return layer


def dtype_table(model: object) -> list[tuple[str, str, str, str]]:
    """Return the name, type, compute dtype and variable dtype of each layer of a model.

    >>> parts = [tf.keras.layers.Dense(2, name="out"), tf.keras.layers.ReLU(name="relu")]
    >>> model = tf.keras.Sequential(parts)
    >>> for row in dtype_table(auto_mixed_precision(model, "auto")):
    ...     print(row)
    ('out', 'Dense', 'float16', 'float32')
    ('relu', 'ReLU', 'float32', 'float32')

    Args:
        model: a Keras model (Keras 3 or tf_keras).

    Returns:
        A list with a tuple for each layer, including the layers of nested models and the parts of layers.

    Raises:
        TypeError: `model` is not a Keras model.
    """
    return [
        (name, type(layer).__name__, str(layer.compute_dtype), str(layer.variable_dtype))
        for name, layer, _ in _layers(model)
    ]


# `to_float` and the levels O2 and O3 set this attribute on a layer. Levels O1 and auto skip layers that have it.
_KEEPS_DTYPE = "_tf_lossscale_keeps_dtype"


def _in_half(layer: Any, amp_level: str) -> bool:
    names = {base.__name__ for base in type(layer).__mro__}
    if amp_level in ("O2", "O3"):
        return amp_level == "O3" or not names & _NORMALIZATION
    if names & {"RNN", "StackedRNNCells"}:
        cells = getattr(layer, "cells", None) or [layer.cell]
        return all(_in_half(cell, amp_level) for cell in cells)
    if any(map(_MATRIX_LAYERS.fullmatch, names)):
        return True
    is_relu = getattr(getattr(layer, "activation", None), "__name__", "") == "relu" and "Activation" in names
    return amp_level == "O1" and (bool(names & _RECTIFIERS) or is_relu)


def _models(model: Any) -> Iterator[Any]:
    """Yield the model and its nested models, except Functional and Sequential models that do not override `call`."""
    # The `call` of a Functional or Sequential model only passes tensors from layer to layer.
    graphs = [base for base in type(model).__mro__ if base.__name__ in ("Functional", "Sequential")]
    if not any(type(model).call is vars(base).get("call") for base in graphs):
        yield model
    for layer in model.layers:
        if _layers_inside(layer):
            yield from _models(layer)


# Keras 3 and tf_keras store a layer's own variables, without its sublayers' variables, in these attributes.
_OWN_VARIABLES = ("_trainable_variables", "_trainable_weights")

# A tuple (name, layer, deciding layer). The deciding layer is the layer itself or a layer that contains it. The type of
# the deciding layer determines whether the layer computes in half precision.
_Entry = tuple[str, Any, Any]


def _layers(model: Any) -> list[_Entry]:
    """Return a (name, layer, deciding layer) tuple for each layer of a model and of its nested models."""
    if not _is_model(model):
        raise TypeError(f"`model` must be a Keras model, but got: {model!r}.")
    return list(_walk(model))


def _is_model(value: Any) -> bool:
    # A layer that is no model may have an attribute `layers`, which need not contain all of its sublayers.
    return layers.is_layer(value) and isinstance(value, layers.layers_of(value).library.Model)


def _layers_inside(layer: Any) -> Any:
    """Return the layers of a model. Return an empty list for a layer that is not a model."""
    return layer.layers if _is_model(layer) else []


def _walk(model: Any) -> Iterator[_Entry]:
    if any(getattr(model, own, None) for own in _OWN_VARIABLES):
        yield model.name, model, model
    for layer in model.layers:
        if _layers_inside(layer):
            yield from _walk(layer)
        else:
            yield from _with_parts(layer, layer.name, layer)


def _with_parts(layer: Any, name: str, decides: Any) -> Iterator[_Entry]:
    """Yield a layer and its parts, such as the cell of an RNN or the projections of an attention layer."""
    yield name, layer, decides
    decides_for_all = any(base.__name__ in _OF_ONE_DTYPE for base in type(decides).__mro__)
    for part in layer._flatten_layers(include_self=False, recursive=False):
        yield from _with_parts(part, f"{name}/{part.name}", decides if decides_for_all else part)


def _require_unquantized(inner: list[_Entry]) -> None:
    for name, layer, _ in inner:
        mode = getattr(layer, "quantization_mode", None)
        if mode is not None:
            raise ValueError(
                f"The layer {name!r} is quantized ({mode}), so its dtype cannot be changed: without its own dtype "
                "policy, it would compute with the quantized numbers as if they were weights. Set the dtypes of a "
                "model that is not quantized, or call to_float for each of the other layers."
            )


def _dtype(dtype: Any, allowed: tuple[str, ...]) -> str:
    try:
        # `as_dtype` would also accept an int, because TensorFlow numbers its dtypes.
        name = "" if isinstance(dtype, int) else tf.as_dtype(dtype).name
    except TypeError:
        name = ""
    if name not in allowed:
        raise ValueError(f"`dtype` must be one of {', '.join(allowed)}, but got: {dtype!r}.")
    return name


def _set(layer: Any, dtype: str) -> None:
    layers.layers_of(layer).set_compute_dtype(layer, dtype)
