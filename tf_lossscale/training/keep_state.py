"""`keep_state`, which undoes what the forward pass of a skipped step wrote into a model's non-trainable variables."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import finished, functions, runs_in_order
from tf_lossscale.core.loss_scale import LossScale
from tf_lossscale.core.skipping import watchers
from tf_lossscale.core.variables import LazyVariable, Variables
from tf_lossscale.libraries.models import of_no_metric, variables_of
from tf_lossscale.wrapper.checks import tensors_of
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
        variables = {id(tensor): tensor for model in self._models for tensor in tensors_of(state_of(model))}
        if self._must_wait():
            kept = list(variables.values())
        else:
            kept = [local for variable in variables.values() for local in replicas.local_copies_of(variable)]
        self._kept = [(variable, variable.read_value()) for variable in kept]
        self._entered_in, self._thread, self._seen = functions()[:1], threading.current_thread(), False
        watchers.append(self)
        return self

    def __exit__(self, error: Any, *others: object) -> None:
        watchers.remove(self)
        if error is not None:
            return
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
        if self._is_inside():
            self._seen = True
            if not self._restores_at_once() and not self._flag.exists:
                replicas.once(self._flag.create)

    def _skipped(self) -> Any:
        """Restore the state. This is called in the branch that skips the step."""
        if not self._is_inside():
            return None
        return self._restore() if self._restores_at_once() else self._flag.raised.assign(True)

    def _restore(self) -> list[Any]:
        return [variable.assign(value) for variable, value in self._kept]

    def _is_inside(self) -> bool:
        # The replicas of a strategy run in threads of their own.
        return threading.current_thread() is self._thread or tf.distribute.has_strategy()

    def _restores_at_once(self) -> bool:
        # The values belong to the function in which they were read.
        return functions()[:1] == self._entered_in and not self._must_wait()

    def _must_wait(self) -> bool:
        """Return whether the state can be restored only at the end, not in the branch that skips the step."""
        return replicas.several_replicas() and not replicas.uses_merge_call()


class _Flag(Variables):
    """Whether a step was skipped that could not restore the state itself."""

    warned = False
    raised: Any = LazyVariable(False, tf.bool, tracked=False)

    @property
    def exists(self) -> bool:
        return not self._is_missing("raised")

    def create(self) -> None:
        _ = self.raised


def state_of(model: Any) -> list[Any]:
    """Return the variables that a model's forward pass may write, without the states of its metrics."""
    # In Keras 3, `non_trainable_variables` also contains the states of metrics and random number generators.
    state = model.non_trainable_weights if hasattr(model, "non_trainable_weights") else model.non_trainable_variables
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    state = [*state, *(variable for layer in layers for variable in _states_without_weights(layer))]
    found = {id(tensor): variable for variable, tensor in zip(state, tensors_of(state))}
    return of_no_metric(list(found.values()), model)


def _states_without_weights(layer: Any) -> list[Any]:
    """Return the variables that a Keras layer writes, but that are not among its weights."""
    states = tf.nest.flatten(layer.states) if getattr(layer, "stateful", False) and hasattr(layer, "states") else []
    # A Keras 3 layer, which is no tf.Module, does not track a tf.Variable.
    raw = (
        [] if isinstance(layer, tf.Module) else [variable for value in vars(layer).values() for variable in _in(value)]
    )
    return [*(state for state in states if state is not None), *(each for each in raw if not each.trainable)]


def _in(value: Any) -> list[tf.Variable]:
    """Return the TensorFlow variables in a value, also in lists, dicts and modules."""
    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, tf.Module):
        return list(value.variables)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [variable for part in parts for variable in _in(part)]
