"""Casts a layer's inputs and outputs, so that a model can combine half-precision and float32 layers."""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

_HALF = (tf.float16, tf.bfloat16)


def set_casts(layer: Any, inputs: str | None = None, outputs: str | None = None, only_mixed: bool = False) -> None:
    """Make a layer cast the floating-point tensors that its `call` takes or returns.

    Each call to `set_casts` replaces the casts that an earlier call set.

    >>> layer = tf.keras.layers.Dense(1, dtype="mixed_float16")
    >>> set_casts(layer, outputs="float32")
    >>> layer(tf.ones((1, 1))).dtype.name
    'float32'

    Args:
        layer: a Keras layer or model.
        inputs: the dtype that all arguments are cast to, or None for no cast.
        outputs: the dtype that the outputs are cast to, or None for no cast.
        only_mixed: whether to cast the arguments only if their floating-point dtypes differ from one another.
    """
    attributes = vars(layer)
    # tf_keras layers that wrap a single operation, such as TFOpLambda, set `call` on the instance. Keep that function.
    earlier = attributes.pop("call", None)
    own = getattr(earlier, _OWN, earlier)
    if own is not None:
        attributes["call"] = own
    # tf_keras casts the first argument before `call`, and loses the argument's mask. The function below casts all
    # arguments and keeps their masks, so it takes the place of this cast.
    autocast = getattr(earlier, _AUTOCAST, attributes.get("_autocast"))
    if autocast is not None:
        attributes["_autocast"] = autocast and inputs is None
    if inputs is None and outputs is None:
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not only_mixed or len(_floating_dtypes((args, kwargs))) > 1:
            args, kwargs = floats_to(inputs, (args, kwargs))
        result = type(self).call(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        return floats_to(outputs, result)

    setattr(call, _OWN, own)
    setattr(call, _AUTOCAST, autocast)
    # Store a bound method, not a plain function: `copy.deepcopy` of the layer binds the method to the copy.
    attributes["call"] = types.MethodType(call, layer)


# The name of an attribute that `set_casts` adds to the function it stores as a layer's `call`. Its value is the `call`
# previously set on the layer object, or None if the layer used its class's method.
_OWN = "_tf_lossscale_own"
# The name of an attribute of the same function: the original value of a tf_keras layer's `_autocast`, or None.
_AUTOCAST = "_tf_lossscale_autocast"


def _floating_dtypes(values: Any) -> set[tf.DType]:
    tensors = [each for each in tf.nest.flatten(values) if tf.is_tensor(each)]
    return {tf.as_dtype(tensor.dtype) for tensor in tensors if tf.as_dtype(tensor.dtype).is_floating}


def floats_to(dtype: str | None, values: Any, dtypes: Any = None) -> Any:
    """Cast floating-point tensors in a nested structure.

    >>> [each.dtype.name for each in floats_to("float32", [tf.constant(1.0, tf.float16), tf.constant(1)])]
    ['float32', 'int32']

    Args:
        dtype: the dtype to cast to. If it is None, nothing is cast.
        values: a tensor, or a nested structure of tensors and other objects.
        dtypes: the dtypes to cast from, or None for all floating-point dtypes.

    Returns:
        The structure with its floating-point tensors cast, which keep their Keras masks and logits. Integer tensors,
        variables and other objects do not change.
    """
    if dtype is None:
        return values

    def cast(value: Any) -> Any:
        if not tf.is_tensor(value) or isinstance(value, tf.Variable) or not value.dtype.is_floating:
            return value
        if dtypes is not None and value.dtype not in dtypes:
            return value
        new = tf.cast(value, dtype)
        # Keras stores two values on tensors: a mask, and the logits of a softmax or sigmoid, from which its losses are
        # computed.
        if getattr(value, "_keras_mask", None) is not None:
            new._keras_mask = value._keras_mask
        if getattr(value, "_keras_logits", None) is not None:
            new._keras_logits = tf.cast(value._keras_logits, dtype)
        return new

    return tf.nest.map_structure(cast, values)


def in_float32(outputs: Any) -> Any:
    """Cast half-precision tensors to float32, the dtype in which losses are computed.

    >>> [each.dtype.name for each in in_float32([tf.constant(1.0, tf.float16), tf.constant(1)])]
    ['float32', 'int32']

    Args:
        outputs: a tensor, or a nested structure of tensors and other objects.

    Returns:
        The same structure. Only float16 and bfloat16 tensors change.
    """
    return floats_to("float32", outputs, _HALF)
