"""One cell of the table of promises: a family under a strategy, called in one way."""

import contextlib
import re

import numpy as np
import pytest
import tensorflow as tf

from tests import loops, strategies
from tf_lossscale import LossScaleOptimizer

CALLS = ["eager", "function", "compiled", "dataset_loop", "while_loop"]


def why_not(family, name, call):
    """Why the libraries themselves cannot do this, and what to do instead; or None. `docs/distributed.md` has it all.

    Args:
        family: a row of `tests/families.py`.
        name: of a strategy, in `tests/strategies.py`.
        call: how the step is called: of CALLS, or "fit".
    """
    several = name in ("mirrored_1", "mirrored_2", "mirrored_2_apart", "mirrored_4", "workers_2", "workers_2_apart")
    if name == "gpu" and not tf.config.list_physical_devices("GPU"):
        return "TensorFlow finds no GPU here"
    if call == "fit" and family.keras is None:
        return "TensorFlow 1 and Sonnet have no `fit`"
    if not family.distributes and (several or name in ("central_storage", "parameter_server", "tpu")):
        if family.name == "sonnet":
            return "Sonnet's optimizers refuse this strategy: use `sonnet.distribute.Replicator` or `TpuReplicator`"
        return "the library's optimizers have no variables for several replicas"
    if call == "fit":
        return _why_not_fit(family, name)
    if call == "compiled" and (several or name == "central_storage"):
        return "XLA cannot compile a function for several virtual CPUs, so `jit_compile` is not tested: leave it out"
    if name == "parameter_server" and call in ("eager", "compiled"):
        return "the coordinator of parameter servers accepts only a `tf.function` without `jit_compile`"
    if name.endswith("_apart") and call == "eager":
        return "`merge_call` is missing only in functions that XLA compiles, never in eager mode"
    if name.endswith("_apart") and family.name == "tf1":
        return "TensorFlow 1's optimizers need `merge_call`: use Keras 3 or tf_keras, or leave out `jit_compile`"
    return None


def _why_not_fit(family, name):
    if name == "tpu":
        return "a `TPUStrategy` feeds datasets only to TPUs, so `fit` is not tested without a TPU"
    if family.name == "keras3" and name.startswith(("workers", "parameter_server")):
        return (
            "Keras 3's `fit` fails on several workers and on parameter servers, with any optimizer: write a training "
            "loop, or use a tf_keras model"
        )
    return None


@tf.function
def of_all_workers(value):
    """Every worker's value, in a new first dimension."""

    def gathered():
        return tf.distribute.get_replica_context().all_gather(value[tf.newaxis], axis=0)

    return strategies.get("workers_2").run(gathered)


class Cell:
    """A weight, an optimizer and a step under one strategy; gradients are given per replica."""

    def __init__(self, family, name, call, where="inside", inner=None, **config):
        reason = why_not(family, name, call)
        if reason:
            pytest.skip(reason)
        self.apart = name.endswith("_apart")
        strategy = strategies.get(name.removesuffix("_apart"))
        self.family = family
        self.steps = 0
        self.bias_gradient = 0.25
        self.strategy = strategy
        self.replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        config = {"initial_scale": 16.0, "dynamic_growth_steps": 3, **config}
        make_inner = inner or family.adam
        self.optimizer = LossScaleOptimizer(make_inner(), **config) if where == "outside" else None
        with tf.distribute.get_strategy().scope() if strategy is None else strategy.scope():
            self.weight = tf.Variable([1.0, -2.0], name="weight")
            self.bias = tf.Variable(0.5, name="bias")
            self.optimizer = self.optimizer or LossScaleOptimizer(make_inner(), **config)
        self._step = step = {
            "eager": self._one,
            "function": tf.function(self._one),
            "compiled": tf.function(self._one, jit_compile=True),
            "dataset_loop": tf.function(self._dataset_loop),
            "while_loop": tf.function(self._while_loop),
        }[call]
        if name == "parameter_server":
            self._step, self._on_a_worker = self._scheduled, step

    def step(self, *gradients):
        """Takes a step in which replica i sees gradients[i] for each value of the weight."""
        assert len(gradients) == self.replicas
        self.steps += 1
        with strategies.apart(self.strategy) if self.apart else contextlib.nullcontext():
            self._step(tf.constant(gradients, tf.float32))

    def _scheduled(self, gradients):
        strategies.coordinator().schedule(self._on_a_worker, args=(gradients,))
        strategies.coordinator().join()

    def _replica(self, gradients):
        gradient = strategies.mine(gradients)

        def loss():
            return tf.reduce_sum(self.weight) * gradient + self.bias * self.bias_gradient

        loops.step(self.optimizer, loss, [self.weight, self.bias])

    def _one(self, gradients):
        if self.strategy is None:
            self._replica(gradients)
        else:
            self.strategy.run(self._replica, args=(gradients,))

    def _dataset_loop(self, gradients):
        for row in tf.data.Dataset.from_tensors(gradients):
            self._one(row)

    def _while_loop(self, gradients):
        tf.while_loop(lambda i: i < 1, lambda i: [self._once_more(i, gradients)], [tf.constant(0)])

    def _once_more(self, i, gradients):
        self._one(gradients)
        return i + 1

    def copies(self, variable):
        """The values of a variable on all replicas."""
        copies = self._local_copies(variable)
        return list(of_all_workers(copies[0]).numpy()) if strategies.ROLE == "worker" else copies

    def _local_copies(self, variable):
        if tf.is_tensor(variable) and not isinstance(variable, (tf.Variable, tf.distribute.DistributedValues)):
            return [variable.numpy()]
        if not isinstance(variable, (tf.Variable, tf.distribute.DistributedValues)):
            variable = variable.value
        if self.strategy is None:
            return [variable.numpy()]
        return [copy.numpy() for copy in self.strategy.experimental_local_results(variable)]

    def state(self):
        """Every variable, on every replica."""
        weights = self.optimizer.weights
        if self.family.name == "tf1":  # which sorts them by name, Adam_10 before Adam_9
            weights = sorted(weights, key=lambda v: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", v.name)])
        return [self.copies(v) for v in (self.weight, self.bias, *weights)]

    def scale(self):
        """(scale, counter, iterations or, where the family does not count, steps), equal on all replicas."""
        loss_scale = self.optimizer._loss_scale
        parts = [loss_scale.current_loss_scale, loss_scale.good_steps]
        if self.family.counts:
            parts.append(self.optimizer.iterations)
        values = [self._local_copies(part) for part in parts]
        if strategies.ROLE == "worker":
            values = of_all_workers(np.array([copies[0] for copies in values], "float64")).numpy().T
        assert all(len(set(map(float, copies))) == 1 for copies in values), values
        scale = tuple(float(copies[0]) for copies in values)
        return scale if self.family.counts else (*scale, float(self.steps))
