"""`keep_state`, which undoes what the forward pass of a skipped step wrote into a model's non-trainable variables."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas, skipping
from tf_lossscale.core.graphs import finished, functions, notes, runs_in_order
from tf_lossscale.core.loss_scale import LossScale
from tf_lossscale.core.variables import LazyVariable, Variables
from tf_lossscale.libraries.models import (
    distinct,
    is_metric,
    is_random_state,
    is_variable,
    tensors_of,
    variables_of,
    walk,
)
from tf_lossscale.wrapper.optimizer import LossScaleOptimizer


class keep_state(contextlib.ContextDecorator):
    """Restore the non-trainable weights of models if a step inside is skipped. A decorator, or a context manager.

    A batch that overflows in the forward pass makes the moving mean and variance of a BatchNormalization layer NaN. The
    loss scale skips the step, but only for the trainable weights. All later predictions would be NaN.

    In a custom training loop, decorate the function that takes the step:

    >>> import tensorflow as tf
    >>> import tf_lossscale
    >>> keras = tf.keras
    >>> layers = keras.layers.BatchNormalization(), keras.layers.Dense(1)
    >>> model = keras.Sequential([keras.Input((1,)), *layers])
    >>> optimizer = tf_lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    >>> @tf.function
    ... @tf_lossscale.keep_state(model)
    ... def train_step(x):
    ...     loss_fn = lambda: tf.reduce_mean(model(x, training=True) ** 2)
    ...     optimizer.minimize(loss_fn, model.trainable_variables)
    >>> _ = train_step(tf.constant([[float("inf")], [1.0]]))
    >>> model.layers[0].moving_mean.numpy()
    array([0.], dtype=float32)

    For Keras's `fit`, decorate the model's `train_step` after `compile`:

    >>> model.compile(optimizer, "mse")
    >>> model.train_step = tf_lossscale.keep_state(model)(model.train_step)

    If `fit` has run before, also call `model.make_train_function(force=True)`, or `fit` keeps the old step.

    It works in eager mode, in a `tf.function`, with XLA and on the replicas of a strategy, for the steps of every
    LossScaleOptimizer and LossScale inside. The weights are restored to their values at the start of the function, as
    soon as a step is skipped, so an average of the weights that is updated after the step stays finite. If the step is
    in a `tf.function` of its own inside, they are restored at the end. Metrics are not restored.

    Name every model whose forward pass runs inside: for a GAN the generator and the discriminator, and a copy that runs
    in training mode. Decorate the function that contains a whole step: if gradients of several batches are
    accumulated, the one that processes all of them. `copy.deepcopy` and `load_model` return a model whose `train_step`
    is not decorated.

    Args:
        *models: Keras models or layers, or objects of `tf.Module`. Their non-trainable variables include the states of
            stateful RNN layers, each `tf.Variable` in an attribute of a layer, also in a list, a dict or a `tf.Module`,
            and the weights of layers with `trainable = False`. An optimizer among the models has no effect.

    Raises:
        TypeError: an argument is not one of these, or there is no model.
        RuntimeError: the step is part of a TF1 graph.
        ValueError: a model has no variables yet. The last two errors are raised when the step begins.
    """

    def __init__(self, *models: Any):
        self._models = [each for each in models if not isinstance(each, (LossScaleOptimizer, LossScale, type(None)))]
        for model in self._models or [None]:
            if not hasattr(type(model), "non_trainable_variables"):
                raise TypeError(
                    f"keep_state() needs Keras models, layers or objects of tf.Module, but got: {model!r}. Write "
                    "@keep_state(model) above the function that takes the step."
                )
        # The copies of this object share the flag.
        self._flag = _Flag()

    def _recreate_cm(self) -> keep_state:
        # Several threads may call a decorated function at the same time, one for each replica.
        return copy.copy(self)

    def __enter__(self) -> keep_state:
        if not tf.executing_eagerly() and not runs_in_order():
            raise RuntimeError("keep_state() needs eager mode or a tf.function, but a TF1 graph is being built.")
        for model in self._models:
            if not getattr(model, "built", True) and not variables_of(model):
                raise ValueError(
                    f"keep_state() needs a built model, but {model.name} has no variables yet. Call "
                    "model.build(input_shape), or call the model on one batch, before the first step."
                )
        kept = tensors_of(distinct(variable for model in self._models for variable in state_of(model)))
        self._strategies = [replicas.strategy_of(variable) for variable in kept]
        if not self._must_wait():
            kept = [local for variable in kept for local in replicas.local_copies_of(variable)]
        self._kept = [(variable, variable.read_value()) for variable in kept]
        self._entered_in, self._thread, self._seen = functions()[:1], threading.current_thread(), False
        # A `with` block that an interrupt prevents from starting is not left by `__exit__`.
        try:
            skipping.watch(self)
            return self
        except BaseException:
            skipping.unwatch(self)
            raise

    def __exit__(self, error: Any, *others: object) -> None:
        try:
            skipping.unwatch(self)
        finally:
            skipping.unwatch(self)
        # An error may follow a skipped step.
        if error is None or (self._flag.exists and tf.executing_eagerly()):
            self._restore_at_end()

    def _restore_at_end(self) -> None:
        if not self._seen and not self._flag.exists and not self._flag.warned:
            self._flag.warned = True
            logging.warning(
                "keep_state() restored nothing, because no step of a LossScaleOptimizer was taken inside. Decorate the "
                "function that takes the step, before it is called for the first time."
            )
        if not self._flag.exists:
            return
        skipped = tf.identity(self._flag.raised)
        if self._must_wait():
            # Such an assignment may synchronize the replicas, which a tf.cond must not contain.
            for variable, value in self._kept:
                variable.assign(tf.where(skipped, value, variable))
        elif not tf.executing_eagerly():
            tf.cond(skipped, lambda: finished(self._restore()), lambda: tf.constant(True))
        elif skipped:
            self._restore()
        self._flag.raised.assign(False)

    # A step calls these two methods of each watcher.

    def _step_starts(self) -> None:
        """Prepare for a step that is taken or traced inside."""
        self._seen = True
        if not self._restores_at_once():
            if not self._flag.exists:
                replicas.once(self._flag.create)
            for function in functions():
                notes(function)[self._flag] = self._flag  # The graph does not keep its variables alive.

    def _skipped(self) -> Any:
        """Restore the state. This is called in the branch that skips the step."""
        return self._restore() if self._restores_at_once() else self._flag.raised.assign(True)

    def _restore(self) -> list[Any]:
        return [variable.assign(value) for variable, value in self._kept]

    def _is_inside(self) -> bool:
        """Return whether a step that the calling thread takes is inside of the block."""
        # The replicas of a strategy run in threads of their own, which do not know the thread that has started them.
        if threading.current_thread() is self._thread:
            return True
        return tf.distribute.has_strategy() and tf.distribute.get_strategy() in self._strategies

    def _restores_at_once(self) -> bool:
        # The values belong to the function in which they were read.
        return functions()[:1] == self._entered_in and not self._must_wait()

    def _must_wait(self) -> bool:
        """Return whether the state can be restored only at the end, not in the branch that skips the step."""
        return replicas.several_replicas() and not replicas.uses_merge_call()


class _Flag(Variables):
    """Whether a step was skipped that could not restore the state itself."""

    def __init__(self) -> None:
        super().__init__(name="skipped")

    warned = False
    raised: Any = LazyVariable(False, tf.bool, tracked=False)

    @property
    def exists(self) -> bool:
        return not self._is_missing("raised")

    def create(self) -> None:
        _ = self.raised


def state_of(model: Any) -> list[Any]:
    """Return the variables that a model's forward pass may write, without the states of its metrics."""
    parts = list(walk([model], without=_keeps_its_own_state))
    # A model lists the weights of its layers, but not those of layers that a plain object holds, and in Keras 3 not
    # those of modules.
    roots = [part for holder, part in parts if _lists_weights(part) and not _is_listed(part, holder)]
    # In Keras 3, `non_trainable_variables` also contains the states of metrics and random number generators.
    names = "non_trainable_weights", "non_trainable_variables"
    lists = [variables_of(root, names[0] if hasattr(type(root), names[0]) else names[1]) for root in roots]
    weights = {id(tensor) for listed in lists for tensor in tensors_of(listed)}
    return distinct(part for holder, part in parts if is_variable(part) and _writes(holder, part, weights))


def _lists_weights(part: Any) -> bool:
    return hasattr(type(part), "non_trainable_variables")


def _is_listed(part: Any, holder: Any) -> bool:
    """Return whether the weights of a layer or a module are among those of its holder."""
    return _lists_weights(holder) and isinstance(holder, tf.Module) == isinstance(part, tf.Module)


def _writes(holder: Any, variable: Any, weights: set[int]) -> bool:
    """Return whether the forward pass of a holder may write a variable: weights that are not trained, and states."""
    [tensor] = tensors_of([variable])
    is_rnn_state = getattr(holder, "stateful", False) and hasattr(holder, "states")
    # The other variables of a tf.Module are trained, or count the batches of a model of tf_keras.
    is_untracked = not isinstance(holder, tf.Module) and not tensor.trainable
    return id(tensor) in weights or is_rnn_state or is_untracked


def _keeps_its_own_state(part: Any) -> bool:
    """Return whether a part of a model does not get its state back: a metric, an optimizer or a random generator."""
    is_optimizer = isinstance(part, (LossScale, LossScaleOptimizer)) or hasattr(part, "apply_gradients")
    return is_optimizer or is_metric(part) or is_random_state(part)
