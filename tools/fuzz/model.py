"""A NumPy model of the loss scale's state machine and of the update rules.

The model implements the rules as the documentation states them, and shares no code with the package.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rules:
    """The arguments of a `LossScaleOptimizer`."""

    initial_scale: float = 1024.0
    growth_steps: int = 2
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float | None = None
    dynamic: bool = True

    def arguments(self):
        """Return the keyword arguments for the constructor of `LossScaleOptimizer`."""
        if not self.dynamic:
            return {"dynamic": False, "initial_scale": self.initial_scale}
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["dynamic_growth_steps"] = given.pop("growth_steps")
        return given


class LossScale:
    """The state machine of the loss scale: the scale and its counters."""

    def __init__(self, rules):
        self.rules = rules
        self.scale = np.float32(rules.initial_scale)
        self.good = self.bad = self.total = self.skipped = 0

    def step(self, finite):
        """Update the scale, depending on whether the gradients are finite. Return whether the step is applied."""
        rules = self.rules
        if not rules.dynamic:
            return True
        self.total += 1
        self.skipped += not finite
        if finite:
            self.good, self.bad = self.good + 1, 0
            if self.good >= rules.growth_steps:
                self.good = 0
                bigger = self.scale * np.float32(rules.growth_factor)
                if rules.max_scale is not None:
                    self.scale = min(bigger, np.float32(rules.max_scale))
                elif np.isfinite(bigger):
                    self.scale = bigger
        else:
            self.good, self.bad = 0, self.bad + 1
            if self.bad >= rules.hysteresis:
                self.bad = 0
                self.scale = max(self.scale * np.float32(rules.backoff_factor), np.float32(rules.min_scale))
        return finite


@dataclasses.dataclass
class Rows:
    """A sparse gradient: `values[i]` belongs to row `indices[i]`; values of the same row are summed."""

    values: np.ndarray
    indices: np.ndarray

    def dense(self, shape):
        """Return the gradient as a dense array."""
        found = np.zeros(shape, self.values.dtype)
        np.add.at(found, self.indices, self.values)
        return found


def on_values(function, gradient):
    """Apply a function to the values of a dense or sparse gradient. A gradient that is None is left unchanged."""
    if gradient is None:
        return None
    return Rows(function(gradient.values), gradient.indices) if isinstance(gradient, Rows) else function(gradient)


def scaled(gradient, scale, dtype):
    """Multiply the gradient by the scale in float32, and round the product to the dtype of the variable."""
    return on_values(lambda values: (np.float32(scale) * values).astype(dtype), gradient)


def unscaled(gradient, scale):
    """Divide the gradient by the scale. The result has the gradient's dtype."""
    return on_values(lambda values: (values.astype(np.float64) / np.float64(scale)).astype(values.dtype), gradient)


class SGD:
    """Stochastic gradient descent.

    Without momentum, a step computes `w -= rate * g`. With momentum, it computes `m = momentum * m + g` and then
    `w -= rate * m`.

    Args:
        rate: learning rate.
        momentum: decay rate of the momentum; 0 means no momentum.
        lazy: whether a sparse gradient changes the momentum of only the rows that it contains.
    """

    def __init__(self, rate=0.0625, momentum=0.0, lazy=False):
        self.rate, self.momentum, self.lazy = rate, momentum, lazy
        self.slots = {}

    def update(self, key, gradient, rows, step):
        """Return the array that a step subtracts from a variable.

        Args:
            key: a dictionary key that identifies the variable.
            gradient: the gradient as a dense float64 array.
            rows: the row indices of a sparse gradient, or `...` for a dense gradient.
            step: the number of the optimizer's step, counted from 1.
        """
        del step
        if not self.momentum:
            return self.rate * gradient
        slot = self.slots.setdefault(key, np.zeros_like(gradient))
        rows = rows if self.lazy else ...
        slot[rows] = self.momentum * slot[rows] + gradient[rows]
        change = np.zeros_like(gradient)
        change[rows] = self.rate * slot[rows]
        return change


class Adam:
    """The Adam optimizer of Kingma and Ba, https://arxiv.org/abs/1412.6980.

    Args:
        rate: learning rate.
        beta_1: decay rate of the first moment.
        beta_2: decay rate of the second moment.
        epsilon: constant that is added to the square root of the second moment.
        hat: True to add epsilon after bias correction, as in the paper's algorithm 1. False to add it before bias
            correction, as in the more efficient form of section 2.
        lazy: whether a sparse gradient changes the moments and values of only the rows that it contains.
    """

    def __init__(self, rate=0.0625, beta_1=0.5, beta_2=0.75, epsilon=0.0625, hat=False, lazy=False):
        self.rate, self.betas, self.epsilon, self.hat, self.lazy = rate, (beta_1, beta_2), epsilon, hat, lazy
        self.slots = {}

    def update(self, key, gradient, rows, step):
        """Return the array that a step subtracts from a variable; see `SGD.update`."""
        first, second = self.slots.setdefault(key, (np.zeros_like(gradient), np.zeros_like(gradient)))
        rows = rows if self.lazy else ...
        (b1, b2), g = self.betas, gradient[rows]
        first[rows] = b1 * first[rows] + (1 - b1) * g
        second[rows] = b2 * second[rows] + (1 - b2) * g * g
        correction_1, correction_2 = 1 - b1**step, 1 - b2**step
        root = np.sqrt(second[rows] / correction_2)
        epsilon = self.epsilon if self.hat else self.epsilon / np.sqrt(correction_2)
        change = np.zeros_like(gradient)
        change[rows] = self.rate * first[rows] / correction_1 / (root + epsilon)
        return change


@dataclasses.dataclass
class Averages:
    """Moving averages of variables. Each applied step updates the averages with a decay of 0.5.

    Args:
        frequency: the averages are copied to the variables every `frequency` steps; 0 means never.
        starts_late: whether to follow Keras 3's rule. With Keras 3's rule, the averages start as the values of the
            variables after the first applied step. With tf_keras's rule, they start as the values before that step,
            and a step updates the average of a variable only if the variable has a gradient.
    """

    frequency: int
    starts_late: bool


class Training:
    """Training in NumPy, with variables, an update rule and a loss scale.

    Args:
        rules: the settings that determine how the loss scale changes.
        inner: the update rule, an `SGD` or an `Adam`.
        values: initial values of the variables.
        averaging: an `Averages`. None means that there are no moving averages.
    """

    def __init__(self, rules, inner, values, averaging=None):
        self.loss_scale = LossScale(rules)
        self.inner = inner
        self.values = [np.asarray(value, np.float64) for value in values]
        self.iterations = 0
        # The first step fills the list of averages.
        self.averaging, self.averages = averaging, []

    def step(self, of_replicas, count_skipped):
        """Take a training step. Return whether the step was applied.

        Args:
            of_replicas: for each replica, a list of the variables' unscaled gradients, any of which may be None.
            count_skipped: whether a skipped step advances `iterations`.
        """
        reduced = [self._reduced(i, column) for i, column in enumerate(zip(*of_replicas, strict=True))]
        finite = all(found is None or np.isfinite(found[0]).all() for found in reduced)
        applied = self.loss_scale.step(finite)
        if self.averaging and (not self.averages or (self.averaging.starts_late and self.iterations == 0)):
            self.averages = list(self.values)
        self.iterations += applied or count_skipped
        for i, found in enumerate(reduced):
            if applied and found is not None:
                gradient, rows = found
                self.values[i] = self.values[i] - self.inner.update(
                    i, gradient.astype(np.float64), rows, self.iterations
                )
        if applied and self.averaging:
            self._average([i for i, found in enumerate(reduced) if found is not None or self.averaging.starts_late])
        return applied

    def _average(self, followed):
        starts = self.averaging.starts_late and self.iterations == 1
        for i in followed:
            self.averages[i] = self.values[i] if starts else (self.averages[i] + self.values[i]) / 2
            if self.averaging.frequency and self.iterations % self.averaging.frequency == 0:
                self.values[i] = self.averages[i]

    def finalize(self):
        """Replace the variables with their moving averages."""
        self.values = list(self.averages)

    def _reduced(self, i, gradients):
        """Return the sum of the replicas' gradients of variable `i`, and the indices of rows that have a gradient."""
        if gradients[0] is None:
            return None
        rows = np.unique(np.concatenate([g.indices for g in gradients])) if isinstance(gradients[0], Rows) else ...
        dense = [g.dense(self.values[i].shape) if isinstance(g, Rows) else g for g in gradients]
        return np.sum(dense, axis=0, dtype=dense[0].dtype), rows
