"""`keep_state`, which undoes what the forward pass of a skipped step wrote into a model's non-trainable variables."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import finished, runs_in_order
from tf_lossscale.wrapper.checks import tensors_of


class keep_state(contextlib.ContextDecorator):
    """Restore a model's non-trainable weights if the step inside is skipped. A decorator, or a context manager.

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
    ... @tf_lossscale.keep_state(model, optimizer)
    ... def train_step(x):
    ...     loss_fn = lambda: tf.reduce_mean(model(x, training=True) ** 2)
    ...     optimizer.minimize(loss_fn, model.trainable_variables)
    >>> _ = train_step(tf.constant([[float("inf")], [1.0]]))
    >>> model.layers[0].moving_mean.numpy()
    array([0.], dtype=float32)

    For Keras's `fit`, decorate the model's `train_step` after `compile`:

    >>> model.compile(optimizer, "mse")
    >>> model.train_step = tf_lossscale.keep_state(model)(model.train_step)

    It works in eager mode, in a `tf.function`, with XLA and on the replicas of a strategy. Metrics are not restored.
    `copy.deepcopy` and `load_model` return a model whose `train_step` is not decorated. A step means everything inside:
    if the function accumulates gradients of several batches, decorate the function that processes all of them.

    Args:
        model: a Keras model or layer, or a `tf.Module`, whose non-trainable variables are restored. These include the
            states of stateful RNN layers, a `tf.Variable` in an attribute of a layer, and the weights of layers with
            `trainable = False`, which another optimizer may train in the same step: for a GAN, pass the generator and
            the discriminator, each with its optimizer, and not the model that contains both.
        optimizer: the LossScaleOptimizer, or the LossScale, that takes the step. The default is `model.optimizer`.

    Raises:
        TypeError: `model` is not one of these, or there is no LossScaleOptimizer.
        RuntimeError: the step is part of a TF1 graph.
        ValueError: the model is not built. Except for the type of `model`, errors are raised when the step begins.
    """

    def __init__(self, model: Any, optimizer: Any = None):
        if not hasattr(type(model), "non_trainable_variables"):
            raise TypeError(
                f"keep_state() needs a Keras model, a layer or a tf.Module, but got: {model!r}. Write "
                "@keep_state(model, optimizer) above the function that takes the step."
            )
        self._model, self._chosen = model, optimizer
        # The copies of this object share the list.
        self._warned: list[bool] = []

    def _recreate_cm(self) -> keep_state:
        # Several threads may call a decorated function at the same time, one for each replica.
        return copy.copy(self)

    def __enter__(self) -> keep_state:
        if not tf.executing_eagerly() and not runs_in_order():
            raise RuntimeError("keep_state() needs eager mode or a tf.function, but a TF1 graph is being built.")
        if not getattr(self._model, "built", True):
            raise ValueError(
                f"keep_state() needs a built model, but {self._model.name} has no variables yet. Call "
                "model.build(input_shape), or call the model on one batch, before the first step."
            )
        self._variables = tensors_of(state_of(self._model))
        self._values = [variable.read_value() for variable in self._variables]
        optimizer: Any = self._chosen or getattr(self._model, "optimizer", None)
        if not hasattr(optimizer, "skipped_steps"):
            raise TypeError(
                f"keep_state() needs the LossScaleOptimizer that takes the step, but got: {optimizer!r}. Pass it as "
                "keep_state(model, optimizer), or compile the model with it first."
            )
        self._optimizer = optimizer
        self._steps = self._steps_called()
        self._skipped, self._total = map(tf.identity, (optimizer.skipped_steps, self._loss_scale.total_steps))
        return self

    def __exit__(self, error: Any, *others: object) -> None:
        # In eager mode a step that reports a stall raises an error after it was counted.
        can_restore = error is None or (tf.executing_eagerly() and not replicas.several_replicas())
        if error is None and not self._warned and not self._took_a_step():
            self._warned.append(True)
            logging.warning(
                "keep_state() restored nothing, because its optimizer %r took no step inside. Pass the optimizer that "
                "takes the step, and decorate the function that takes it.",
                self._optimizer,
            )
        if not can_restore or not self._variables:
            return
        skipped = tf.not_equal(self._optimizer.skipped_steps, self._skipped)
        pairs = list(zip(self._variables, self._values))
        if replicas.uses_merge_call() and not tf.distribute.in_cross_replica_context():
            context: Any = tf.distribute.get_replica_context()
            context.merge_call(_restore_copies, args=(skipped, self._variables, self._values))
        elif replicas.several_replicas():
            # Without merge calls, an assignment may synchronize the replicas, which a tf.cond must not contain.
            for variable, value in pairs:
                variable.assign(tf.where(skipped, value, variable))
        else:
            _restore_if(skipped, pairs)

    def _took_a_step(self) -> bool:
        """Return whether the optimizer took a step inside, or whether one was traced."""
        if self._steps_called() != self._steps:
            return True
        # A tf.function that was traced before takes its steps without Python.
        return tf.executing_eagerly() and bool(tf.not_equal(self._loss_scale.total_steps, self._total))

    def _steps_called(self) -> int:
        """Return how many steps were taken by Python or traced so far."""
        return vars(self._loss_scale).get("_steps_called", 0)

    @property
    def _loss_scale(self) -> Any:
        return getattr(self._optimizer, "_loss_scale", self._optimizer)


def state_of(model: Any) -> list[Any]:
    """Return the variables that a model's forward pass may write, without the states of its metrics."""
    # In Keras 3, `non_trainable_variables` also contains the states of metrics and random number generators.
    state = model.non_trainable_weights if hasattr(model, "non_trainable_weights") else model.non_trainable_variables
    of_metrics = {id(variable) for metric in getattr(model, "metrics", ()) for variable in metric.variables}
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    state = [*state, *(variable for layer in layers for variable in _states_without_weights(layer))]
    found = {id(tensor): variable for variable, tensor in zip(state, tensors_of(state))}
    return [variable for variable in found.values() if id(variable) not in of_metrics]


def _states_without_weights(layer: Any) -> list[Any]:
    """Return the variables that a Keras layer writes, but that are not among its weights."""
    states = tf.nest.flatten(layer.states) if getattr(layer, "stateful", False) and hasattr(layer, "states") else []
    # A Keras 3 layer, which is no tf.Module, does not track a tf.Variable.
    raw = [] if isinstance(layer, tf.Module) else [v for v in vars(layer).values() if isinstance(v, tf.Variable)]
    return [*(state for state in states if state is not None), *(each for each in raw if not each.trainable)]


def _restore_copies(strategy: tf.distribute.Strategy, skipped: Any, variables: list[Any], values: list[Any]) -> None:
    """Restore the copies of the variables on all replicas. Called in the cross-replica context."""
    copies, old = ([strategy.experimental_local_results(each) for each in some] for some in (variables, values))
    pairs = [pair for variable, value in zip(copies, old) for pair in zip(variable, value)]
    _restore_if(strategy.experimental_local_results(skipped)[0], pairs)


def _restore_if(skipped: Any, pairs: list[tuple[Any, Any]]) -> None:
    def restore() -> tf.Tensor:
        return finished([variable.assign(value) for variable, value in pairs])

    if not tf.executing_eagerly():
        tf.cond(skipped, restore, lambda: tf.constant(True))
    elif skipped:
        restore()
