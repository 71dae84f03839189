"""The optimizers that the benchmarks compare, called contenders.

A family, such as "Keras 3", has several contenders: the bare optimizer without loss scaling, this package's wrapper
around the optimizer, and the family's own loss scaling wrapper.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer

BARE, OURS, THEIRS = "bare", "tf-lossscale", "its own wrapper"
OURS_APPLY, OURS_MINIMIZE, THEIRS_MINIMIZE = f"{OURS}, apply", f"{OURS}, minimize", f"{THEIRS}, minimize"
BARE_MINIMIZE = "bare, minimize"
MINIMIZERS = (BARE_MINIMIZE, OURS_MINIMIZE, THEIRS_MINIMIZE)
OURS_DIAGNOSED = f"{OURS}, diagnose"
#: With `diagnose="exponents"`, some steps count the exponents of the gradients. `OURS_WAITING` is a step that counts no
#: exponents, and `OURS_COUNTING` is a step that counts them. `CHECK` is the overflow check alone, and `COUNT` is the
#: counting alone.
OURS_WAITING, OURS_COUNTING = "no step counted", "every step counted"
CHECK, COUNT = "check", "count"
OURS_COMPILED = f"{OURS}, jit_compile=True"
TORCH = "PyTorch"
LEAST, CONDITIONAL = "one read, one write", "bare, in a tf.cond"
BARE_COMPILED, NO_STEP = "bare, compiled", "no step"


def _tf1_wrapper(inner: Any) -> Any:
    scale = tf.compat.v1.mixed_precision.DynamicLossScale()
    return tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(inner, scale)


FAMILIES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "Keras 3": (tf.keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer),
    "tf_keras": (tf_keras.optimizers.Adam, tf_keras.mixed_precision.LossScaleOptimizer),
    "tf_keras legacy": (tf_keras.optimizers.legacy.Adam, tf_keras.mixed_precision.LossScaleOptimizer),
    "TensorFlow 1": (tf.compat.v1.train.AdamOptimizer, _tf1_wrapper),
}


class _Least:
    """A wrapper that does the minimum work of loss scaling: it reads and unscales each gradient once."""

    def __init__(self, inner: Any):
        self._inner, self._scale, self._finite = inner, tf.Variable(1.0), tf.Variable(True)

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        return loss

    def apply_gradients(self, grads_and_vars: Any) -> None:
        gradients, variables = zip(*grads_and_vars)
        sums = [tf.reduce_sum(gradient) for gradient in gradients]
        self._finite.assign(tf.math.is_finite(tf.add_n(sums)))
        self._inner.apply_gradients(zip([gradient * (1 / self._scale) for gradient in gradients], variables))


class _Conditional:
    """An optimizer that takes its step inside a `tf.cond`, as every wrapper that can skip steps must."""

    def __init__(self, inner: Any):
        self._inner, self._applies = inner, tf.Variable(True)

    def apply_gradients(self, grads_and_vars: Any) -> None:
        pairs = list(grads_and_vars)

        def apply() -> tf.Tensor:
            self._inner.apply_gradients(pairs)
            return tf.constant(True)

        tf.cond(self._applies, apply, lambda: tf.constant(False))


def names(family: str) -> list[str]:
    """Return the names of an optimizer family's contenders. The first contender has no loss scaling."""
    if family == TORCH:
        return [BARE, THEIRS]
    return [BARE, OURS, OURS_APPLY, THEIRS] if family != "TensorFlow 1" else [BARE, OURS, THEIRS]


def installed(family: str) -> bool:
    """Return whether an optimizer family's library is installed. Only PyTorch is optional."""
    return family != TORCH or importlib.util.find_spec("torch") is not None


def optimizer(family: str, name: str, compiled: bool = False) -> Any:
    """Return a new Adam optimizer in the wrapper that `name` selects.

    Args:
        family: a key of `FAMILIES`, which selects the library that provides Adam.
        name: the name of the wrapper, for example `OURS`. `BARE` selects no wrapper.
        compiled: whether XLA will compile the whole step. If so, a tf_keras optimizer is created with
            `jit_compile=False`.
    """
    make, theirs = FAMILIES[family]
    if compiled and family == "tf_keras":
        make = functools.partial(make, jit_compile=False)
    inner = make(1e-3)
    if name in (BARE, BARE_MINIMIZE, NO_STEP):
        return inner
    if name in (THEIRS, THEIRS_MINIMIZE):
        return theirs(inner)
    if name in (LEAST, CONDITIONAL):
        return {LEAST: _Least, CONDITIONAL: _Conditional}[name](inner)
    if name in (OURS_WAITING, OURS_COUNTING):
        return LossScaleOptimizer(inner, diagnose="exponents", diagnose_every=1 if name == OURS_COUNTING else 10**9)
    return LossScaleOptimizer(inner, diagnose=name == OURS_DIAGNOSED, jit_compile=name == OURS_COMPILED)


def scale(opt: Any, name: str, loss: tf.Tensor) -> tf.Tensor:
    """Return the scaled loss. If the optimizer has no loss scale, return the loss unchanged."""
    if name in (BARE, LEAST, CONDITIONAL, NO_STEP):
        return loss
    if name == OURS_APPLY or (hasattr(opt, "scale_loss") and name == THEIRS):
        return opt.scale_loss(loss)
    return opt.get_scaled_loss(loss) if hasattr(opt, "get_scaled_loss") else opt._scale_loss(loss)


def apply(opt: Any, name: str, gradients: list, variables: list) -> None:
    """Unscale the gradients of the scaled loss, and apply them."""
    if name == OURS_APPLY:
        opt.apply(gradients, variables)
        return
    if name != BARE and hasattr(opt, "get_unscaled_gradients"):
        gradients = opt.get_unscaled_gradients(gradients)
    elif hasattr(opt, "_unscale_grads"):
        gradients = opt._unscale_grads(gradients)
    opt.apply_gradients(zip(gradients, variables))


def minimize(opt: Any, loss: Callable[[], tf.Tensor], variables: list) -> None:
    """Take one step that minimizes a loss.

    If the optimizer has no `minimize`, as in Keras 3, compute the gradients with a tape, as Keras 3's trainer does.
    """
    if hasattr(opt, "minimize"):
        opt.minimize(loss, var_list=variables)
        return
    with tf.GradientTape() as tape:
        scaled = opt.scale_loss(loss())
    opt.apply_gradients(zip(tape.gradient(scaled, variables), variables))
