"""Reports whether a training step respects the loss scale."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core.dynamic import DynamicLossScale
from tf_lossscale.core.loss_scale import LossScale
from tf_lossscale.core.variables import as_number
from tf_lossscale.diagnosis.comparison import (
    ANOTHER_WAY,
    FACTOR,
    LOST,
    MOVED,
    NOT_DIVIDED,
    NOT_SCALED,
    OTHER_SCALE,
    PART_NOT_SCALED,
    RANDOM,
    Comparison,
    has_growing_part,
    norm,
)
from tf_lossscale.diagnosis.snapshot import Snapshot
from tf_lossscale.libraries import optional
from tf_lossscale.libraries.models import name_of, tensors_of, unique, variables_in
from tf_lossscale.writing import aligned

# At the two lowest scales, a large part of the loss that was not scaled outweighs all the rest.
_LOWEST = 2.0**-9
# The step is not tried at lower scales than this one.
_HOPELESS = 2.0**-24
# No gradient is finite at this scale, unless it is tiny in float32.
_OVERFLOWING = 2.0**127

#: Maps each finding to the advice on it, the clearest first.
_ADVICE = {
    OTHER_SCALE: "divide the gradients with the optimizer that scaled their loss.",
    NOT_DIVIDED: "call get_unscaled_gradients() before you apply, sum or log gradients, and divide the inner gradient "
    "of a gradient penalty by the loss scale.",
    NOT_SCALED: "call get_scaled_loss() for each loss and get_unscaled_gradients() once for its gradients, and let a "
    "tf.custom_gradient multiply by its upstream gradient.",
    PART_NOT_SCALED: "add regularization and auxiliary losses before get_scaled_loss().",
    MOVED: "accumulate unscaled gradients.",
    ANOTHER_WAY: "clip, normalize and compare gradients after get_unscaled_gradients(), and let a tf.custom_gradient "
    "multiply by its upstream gradient.",
    RANDOM: "pass seeds to the random operations of the step, or leave dropout out.",
    LOST: "this is no mistake, but what loss scaling prevents; for a judgment, pass a higher initial_scale.",
}
_NOTES = (RANDOM, LOST)

# The changes of all variables at lower scales, or None where the step was skipped. The keys are the highest scale
# divided by each of them.
_Runs = dict[float, "list[np.ndarray] | None"]


@dataclasses.dataclass(frozen=True)
class ScaleDependence:
    """A row of an invariance report: a variable or slot whose change in a step depends on the loss scale.

    >>> ScaleDependence("dense/kernel", "not divided", 1024.0, (80.0, 10.0, 0.001)).is_mistake
    True

    Args:
        variable: the name of the variable or of the optimizer's slot.
        finding: the kind of mistake, or why the variable could not be judged.
        scale: the highest loss scale at which the step was taken.
        changes: the size (L2 norm) of the change at this scale, at an eighth of it, and at the lowest scale. NaN if the
            step was skipped.
    """

    variable: str
    finding: str
    scale: float
    changes: tuple[float, float, float]

    @property
    def is_mistake(self) -> bool:
        """Whether the finding is a mistake in the loop, and not a note that the variable could not be judged."""
        return self.finding not in _NOTES


@dataclasses.dataclass(frozen=True, repr=False)
class InvarianceReport:
    """A report on a training step. It prints as a table and a line of advice.

    >>> part = ScaleDependence("dense/kernel", PART_NOT_SCALED, 1024.0, (0.5, 0.51, 9.0))
    >>> InvarianceReport((part,))
    variable      scale  change  at 1/8  at lowest                         finding
    dense/kernel   1024     0.5    0.51          9  part of its loss is not scaled
    part of its loss is not scaled: add regularization and auxiliary losses before get_scaled_loss().
    >>> InvarianceReport(())
    The step does not depend on the loss scale.

    Args:
        rows: a row for each variable that depends on the loss scale or could not be judged, the worst first.
        is_skipped: whether the step was skipped at every loss scale, so that nothing could be compared.
    """

    rows: tuple[ScaleDependence, ...]
    is_skipped: bool = False

    @property
    def ok(self) -> bool:
        """Whether no mistake was found."""
        return not self.is_skipped and not any(row.is_mistake for row in self.rows)

    @property
    def advice(self) -> str:
        """One line on what to do."""
        if self.is_skipped:
            return (
                "The step was skipped at every loss scale, so nothing could be compared: activation_report(model, x) "
                "finds the layer that overflows."
            )
        if not self.rows:
            return "The step does not depend on the loss scale."
        return f"{self.rows[0].finding}: {_ADVICE[self.rows[0].finding]}"

    def plot(self) -> Any:
        """Plot the size of each row's change against the loss scale, relative to the change at the highest scale.

        >>> row = ScaleDependence("dense/kernel", "not divided", 1024.0, (80.0, 10.0, 0.001))
        >>> figure = InvarianceReport((row,)).plot()

        Returns:
            A matplotlib `Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = optional.load("matplotlib.figure", "plot").Figure(layout="constrained")
        axis = figure.subplots()
        for row in self.rows:
            scales = row.scale, row.scale / FACTOR, _lowest_below(row.scale)
            axis.plot(scales, [change / row.changes[0] for change in row.changes], marker="o", label=row.variable)
        axis.set(xscale="log", yscale="log", xlabel="loss scale", ylabel="change / change at the highest scale")
        if self.rows:
            axis.legend()
        return figure

    def __repr__(self) -> str:
        if not self.rows:
            return self.advice
        cells = [(row.variable, *(f"{x:.4g}" for x in (row.scale, *row.changes)), row.finding) for row in self.rows]
        titles = "variable", "scale", "change", "at 1/8", "at lowest", "finding"
        return "\n".join([*aligned([titles, *cells]), self.advice])


def invariance_report(step: Callable[[], Any], optimizers: Any, state: Any = ()) -> InvarianceReport:
    """Take a training step at several loss scales from the same state, and report what depends on the scale.

    What a step does to the weights must not depend on the loss scale. Each common mistake changes that: gradients that
    are clipped before they are unscaled, a loss or a part of it that nobody scales, gradients that are not divided, or
    divided twice or by another optimizer, a custom gradient that ignores its upstream gradient.

    >>> import tensorflow as tf
    >>> import tf_lossscale
    >>> weight = tf.Variable([1.0, 2.0], name="weight")
    >>> optimizer = tf_lossscale.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), initial_scale=1024)
    >>> @tf.function
    ... def train_step():
    ...     with tf.GradientTape() as tape:
    ...         scaled_loss = optimizer.get_scaled_loss(tf.reduce_sum(weight**2))
    ...     gradients = tape.gradient(scaled_loss, [weight])
    ...     gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    ...     gradients = optimizer.get_unscaled_gradients(gradients)
    ...     optimizer.apply_gradients(zip(gradients, [weight]))
    >>> report = tf_lossscale.diagnosis.invariance_report(train_step, optimizer, [weight])
    >>> report.ok, report.rows[0].variable, report.rows[0].finding
    (False, 'weight', 'depends on the scale in another way')

    The step is taken at the present scale twice, because the difference is the step's own randomness, and at lower
    scales; with several loss scales, each is lowered by itself. At the end, or if the step raises an error, all
    variables get their values back: weights, slots, loss scales, counts, metrics and seeds, also on all replicas, and
    the states of Python's and NumPy's random numbers. The random state of TensorFlow advances.

    A mistake that is the same at each scale is not found, such as gradients that are summed over the replicas twice.

    Args:
        step: a function without arguments that takes one training step, such as `lambda: train_step(x, y)`,
            `lambda: model.train_on_batch(x, y)` or `lambda: strategy.run(train_step, args=(x, y))`. If gradients are
            accumulated over several calls, it makes all calls of one cycle.
        optimizers: the LossScaleOptimizer or LossScale of the step, or a list of several. A SharedLossScale stands for
            its optimizers.
        state: the models and variables that the step changes, or a list of them: what is not named, or reachable from
            the optimizers, is neither compared nor restored.

    Returns:
        A report that contains plain data and prints as a table. In a test: `assert report.ok, report`.

    Raises:
        TypeError: `step` is no function, or an optimizer has no loss scale of this package.
        ValueError: a loss scale is not dynamic, or the step changes nothing.
        RuntimeError: the function was called in a `tf.function` or a TF1 graph.
    """
    if not callable(step):
        raise TypeError(f"`step` must be a function without arguments that takes a training step, but got: {step!r}.")
    if not tf.executing_eagerly():
        raise RuntimeError(
            "invariance_report() needs eager mode, but a graph is being built. Call it outside of tf.function, for "
            "example invariance_report(lambda: train_step(x, y), optimizer, model). TF1 graphs are not supported."
        )
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    scalers = list({id(scaler): scaler for scaler in map(_scaler_of, listed)}.values())
    if not scalers:
        raise ValueError("`optimizers` must contain at least one optimizer, but is empty.")
    trials = _Trials(step, scalers, Snapshot([listed, scalers, state]))
    with trials.snapshot.restoring():
        try:
            return _report(trials)
        finally:
            trials.restore_memory()


def _scaler_of(optimizer: Any) -> Any:
    scaler = getattr(optimizer, "scaler", optimizer)
    if not isinstance(scaler, LossScale):
        raise TypeError(
            "`optimizers` must be a tf_lossscale.LossScaleOptimizer, a LossScale, or a list of them, but got: "
            f"{optimizer!r}."
        )
    if not isinstance(scaler, DynamicLossScale):
        raise ValueError(
            f"invariance_report() changes the loss scale, but a {type(scaler).__name__} determines it itself, and a "
            "traced function contains a fixed scale as a constant. In the test of the loop, use a DynamicLossScale, "
            "for example LossScaleOptimizer(inner, initial_scale=1024), whose scale it may change."
        )
    return scaler


class _Trials:
    """Takes a step at different loss scales from the same state."""

    def __init__(self, step: Callable[[], Any], scalers: Sequence[Any], snapshot: Snapshot):
        self._step, self.scalers, self.snapshot = step, scalers, snapshot
        self._randomness = random.getstate(), np.random.get_state()
        # The factors by which the losses of eager mode were multiplied.
        factors = [vars(scaler._factors) for scaler in scalers]
        in_thread = [vars(each) for held in factors for each in held.values() if isinstance(each, threading.local)]
        self._factors = [(held, dict(held)) for held in (*factors, *in_thread)]
        self._own = {id(tensor) for tensor in tensors_of(variables_in(scalers))}
        #: Whether the step differed when it was repeated at the same scales.
        self.is_random = False
        # The floating-point variables to compare, with their copies and values.
        self._compared: list[tuple[Any, list[tuple[Any, tf.Tensor]]]] | None = None

    def variables(self) -> list[tuple[Any, list[tuple[Any, tf.Tensor]]]]:
        """Return the floating-point variables to compare, with their copies and values.

        They include the variables that the first step creates in the optimizers and models, but no temporary ones.
        """
        if self._compared is None:
            there = {id(*tensors_of([variable])): variable for variable in self.snapshot.variables()}
            saved = {id(*tensors_of([variable])): (variable, copies) for variable, copies in self.snapshot.saved}
            missing = [name_of(each) for key, each in there.items() if each.trainable and key not in saved]
            if missing:
                raise ValueError(
                    f"`step` created the variables {', '.join(missing)} in a tf.function, so it cannot be taken again "
                    "from the same state. Build the model, or take one step, before the report."
                )
            compared = [each for key, each in saved.items() if key in there.keys() - self._own]
            self._compared = [each for each in compared if tf.as_dtype(each[1][0][0].dtype).is_floating]
        return self._compared

    def names(self) -> tuple[str, ...]:
        """Return the names of these variables."""
        return unique(name_of(variable) for variable, _ in self.variables())

    def take(self, scales: Sequence[float], grows: bool = False) -> list[np.ndarray]:
        """Take the step and return the changes of all variables. Set `skipped` for each scale.

        If `grows`, the scales grow in the first step of a cycle, and otherwise in none.
        """
        self.snapshot.restore()
        self.restore_memory()
        for scaler, scale in zip(self.scalers, scales):
            scaler.current_loss_scale.assign(scale)
            scaler.good_steps.assign(scaler.growth_steps - 1 if grows else -(2**30))
        before = self._counts(0), self._counts(1)
        self._step()
        self.took_steps = self._counts(0) != before[0]
        self.skipped = [now > then for now, then in zip(self._counts(1), before[1])]
        return [_change(copies) for _, copies in self.variables()]

    def take_below(self, scales: list[float], i: int, factors: list[float], runs: _Runs) -> None:
        """Take the step with the i-th scale divided by each factor, unless the runs contain it already."""
        for factor in factors:
            if factor not in runs:
                changes = self.take([*scales[:i], scales[i] / factor, *scales[i + 1 :]])
                runs[factor] = None if self.skipped[i] else changes

    def restore_memory(self) -> None:
        """Restore what is not in variables: random numbers of Python and NumPy, and the factors of losses."""
        random.setstate(self._randomness[0])
        np.random.set_state(self._randomness[1])
        for held, before in self._factors:
            held.clear()
            held.update(before)

    def _counts(self, which: int) -> list[int]:
        return [as_number(scaler.step_counts)[which] for scaler in self.scalers]


def _change(copies: Iterable[tuple[Any, tf.Tensor]]) -> np.ndarray:
    return np.concatenate([_flat(copy.read_value()) - _flat(value) for copy, value in copies])


def _flat(value: Any) -> np.ndarray:
    # An infinite weight must not hide what a step does to the others.
    return np.nan_to_num(np.asarray(tf.cast(value, tf.float64)).ravel(), nan=0.0, posinf=0.0, neginf=0.0)


def _lowest_below(scale: float) -> float:
    """Return the lowest scale of a trial: a power of 8 below the scale."""
    return scale * FACTOR ** min(-3, math.floor(math.log(_LOWEST / scale, FACTOR)))


def _report(trials: _Trials) -> InvarianceReport:
    scales = [float(as_number(scaler.current_loss_scale)) for scaler in trials.scalers]
    base = trials.take(scales)
    while any(trials.skipped) and min(scales) > _HOPELESS:
        scales = [scale / FACTOR if skipped else scale for scale, skipped in zip(scales, trials.skipped)]
        base = trials.take(scales)
    if any(trials.skipped):
        return InvarianceReport((), is_skipped=True)
    _require_step(trials, base)
    rows = _dependences(trials, scales, base)
    if trials.is_random and any(row.is_mistake for row in rows):
        # Chance seldom repeats itself.
        found = {(row.variable, row.finding) for row in _dependences(trials, scales, base)}
        rows = [row for row in rows if not row.is_mistake or (row.variable, row.finding) in found]
    for _ in range(2):
        # float16 may have lost a part of small gradients. If so, they change as much at a higher scale, but lose less.
        scales = [scale * FACTOR**2 for scale in scales]
        if not {LOST, ANOTHER_WAY} & {row.finding for row in rows} or max(scales) > _OVERFLOWING:
            break
        base = trials.take(scales)
        if any(trials.skipped):
            break
        sizes = dict(zip(trials.names(), map(norm, base)))
        still = {row.variable for row in _dependences(trials, scales, base)}
        rows = [row for row in rows if row.variable in still or sizes[row.variable] < row.changes[0] / 2]
    return InvarianceReport(tuple(rows))


def _dependences(trials: _Trials, scales: list[float], base: list[np.ndarray]) -> list[ScaleDependence]:
    """Return the rows of a report whose highest scales are `scales`."""
    again, in_growth = trials.take(scales), trials.take(scales, grows=True)
    moved = None if any(trials.skipped) else in_growth
    by_scale, all_runs = [], []
    for i, scale in enumerate(scales):
        lowest = scale / _lowest_below(scale)
        runs: _Runs = {}
        trials.take_below(scales, i, [FACTOR, FACTOR**2, lowest / FACTOR, lowest], runs)
        has_both = runs[lowest / FACTOR] is not None and runs[lowest] is not None
        lower = [lowest / FACTOR, lowest] if has_both else [FACTOR, FACTOR**2]
        found = _rows(trials, scale, base, again, moved, runs, lower)
        if not trials.is_random and {NOT_SCALED, PART_NOT_SCALED} & {row.finding for row in found.values()}:
            lower = _with_between(lower)
            trials.take_below(scales, i, lower, runs)
            found = _rows(trials, scale, base, again, moved, runs, lower)
        by_scale.append(found)
        all_runs.append(runs)
    rows = _combined(trials, scales, base, by_scale)
    if not rows and not trials.is_random:
        rows = _hidden_parts(trials, scales, base, all_runs)
    # After a mistake in one gradient, everything that is computed from it depends on the scale.
    for vague in (LOST, ANOTHER_WAY):
        others = [row for row in rows if row.finding != vague]
        rows = others if any(row.is_mistake for row in others) else rows
    order = list(_ADVICE)  # the notes are last
    return sorted(rows, key=lambda row: order.index(row.finding))


def _require_step(trials: _Trials, base: list[np.ndarray]) -> None:
    trained = [change for (variable, _), change in zip(trials.variables(), base) if variable.trainable]
    if not base or not (trials.took_steps or any(map(np.any, trained))):
        raise ValueError(
            "`step` took no step with these optimizers, and changed no trained variable. If it accumulates gradients, "
            "pass a function that makes all calls of one cycle, up to the call that applies the gradients. Name the "
            "optimizers, models and variables of the step."
        )


def _rows(
    trials: _Trials,
    scale: float,
    base: list[np.ndarray],
    again: list[np.ndarray],
    moved: list[np.ndarray] | None,
    runs: _Runs,
    lower: list[float],
) -> dict[int, ScaleDependence]:
    """Return the rows of one loss scale, by the positions of the variables."""
    old = [np.concatenate([_flat(value) for _, value in copies]) for _, copies in trials.variables()]
    comparisons = [Comparison(*each) for each in zip(old, base, again)]
    trials.is_random, rows = any(each.is_random for each in comparisons), {}
    for i, name in enumerate(trials.names()):
        own = _of_variable(i, runs)
        finding = comparisons[i].finding(own, lower, None if moved is None else moved[i], trials.is_random)
        if finding:
            rows[i] = _row(name, finding, scale, base[i], own)
    return rows


def _of_variable(i: int, runs: _Runs) -> dict[float, np.ndarray | None]:
    return {factor: None if changes is None else changes[i] for factor, changes in runs.items()}


def _row(
    name: str, finding: str, scale: float, base: np.ndarray, runs: dict[float, np.ndarray | None]
) -> ScaleDependence:
    near, lowest = (math.nan if change is None else norm(change) for change in (runs[FACTOR], runs[max(runs)]))
    return ScaleDependence(name, finding, scale, (norm(base), near, lowest))


def _with_between(factors: list[float]) -> list[float]:
    """Return two factors that are `FACTOR` apart with two others between them.

    By chance, the rounding errors of a few elements grow alike at two scales, but hardly at four.
    """
    return [factors[0], 2 * factors[0], 4 * factors[0], factors[1]]


def _hidden_parts(
    trials: _Trials, scales: list[float], base: list[np.ndarray], all_runs: list[_Runs]
) -> list[ScaleDependence]:
    """Return rows for an unscaled part of the loss that clipping, or a normalizing optimizer, hides at low scales.

    Such a part shows at higher scales, where it changes the step only a little. If the step is the same at the lowest
    scale, there is no such part.
    """
    for i, runs in enumerate(all_runs):
        at_lowest = runs[max(runs)]
        is_same = at_lowest is not None and all(map(np.array_equal, base, at_lowest))
        rows = [] if is_same else _hidden_part(trials, scales, i, base, runs)
        if rows:
            return rows
    return []


def _hidden_part(
    trials: _Trials, scales: list[float], i: int, base: list[np.ndarray], runs: _Runs
) -> list[ScaleDependence]:
    """Return the rows of the loss scale at position i."""
    lower = [FACTOR, FACTOR**2]
    while lower[0] < scales[i] / _lowest_below(scales[i]):
        trials.take_below(scales, i, lower, runs)
        if _growing(base, runs, lower):
            four = _with_between(lower)
            trials.take_below(scales, i, four, runs)
            growing = [(k, trials.names()[k]) for k in _growing(base, runs, four)]
            if growing:
                return [_row(name, PART_NOT_SCALED, scales[i], base[k], _of_variable(k, runs)) for k, name in growing]
        lower = [FACTOR * each for each in lower]
    return []


def _growing(base: list[np.ndarray], runs: _Runs, lower: list[float]) -> list[int]:
    """Return the positions of the variables whose change has a small part that grows toward low scales."""
    those = {factor: runs[factor] for factor in lower}
    return [k for k in range(len(base)) if has_growing_part(base[k], _of_variable(k, those))]


def _combined(
    trials: _Trials, scales: list[float], base: list[np.ndarray], by_scale: list[dict[int, ScaleDependence]]
) -> list[ScaleDependence]:
    """Return the rows of all loss scales, without those of variables that depend on a mistake made elsewhere."""
    if len(by_scale) == 1 or not any(by_scale):
        return [row for rows in by_scale for row in rows.values()]
    # If the step of a scale overflows, the variables that it changes keep their values.
    kept = []
    for i in range(len(scales)):
        changes = trials.take([_OVERFLOWING if i == j else each for j, each in enumerate(scales)])
        kept.append([norm(change) <= 1e-6 * norm(before) for change, before in zip(changes, base)])
    combined = []
    for k in sorted({k for rows in by_scale for k in rows}):
        of_each = {i: rows[k] for i, rows in enumerate(by_scale) if k in rows}
        row = next(iter(of_each.values()))
        if {row.finding for row in of_each.values()} >= {NOT_DIVIDED, NOT_SCALED}:
            combined.append(dataclasses.replace(row, finding=OTHER_SCALE))
        else:
            owners = [i for i in range(len(scales)) if kept[i][k]] or list(of_each)
            combined += [row for i, row in of_each.items() if i in owners][:1]
    return combined
