"""Reports which layer of a model overflows in the forward pass."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale.core import replicas
from tf_lossscale.diagnosis.plotting import mark_ranges
from tf_lossscale.diagnosis.precision import MAXIMUM, NORMAL, SUBNORMAL, percent
from tf_lossscale.diagnosis.snapshot import Snapshot
from tf_lossscale.libraries import keras_versions, optional
from tf_lossscale.libraries.models import is_metric, is_random_state, name_of, tensors_of, variables_in, walk
from tf_lossscale.writing import aligned

# The smallest normal number of each dtype that does not have the exponents of float32.
_SMALLEST_NORMAL = {"float16": 2.0**NORMAL, "float64": 2.0**-1022}
# From this magnitude on, float16 rounds to infinity.
_INFINITE = 65520.0
# Layers that call an inner layer once for each time step. The calls share a row.
_REPEATING = {"RNN", "TimeDistributed"}
# The name of the row for the loss. No layer has this name.
_LOSS = "loss_fn()"


@dataclasses.dataclass(frozen=True)
class LayerActivations:
    """A row of an activation report: the values that one call of a layer read and returned.

    >>> row = LayerActivations("softmax", "float16", inputs=12.0, outputs=float("inf"), weights=None, infinite=0.5)
    >>> row.infinite
    0.5

    Args:
        layer: the names of the layers inside which the layer was called, and its own name. The name of the second call
            of a shared layer ends in `(call 2)`. All calls by an RNN or TimeDistributed layer share a row.
        dtype: the compute dtype of a Keras layer; otherwise the dtype of the output.
        inputs: the largest magnitude of the inputs, before the layer casts them: NaN if some value is NaN, and None if
            no input has a floating-point dtype.
        outputs: the largest magnitude of the outputs.
        weights: the largest magnitude of the weights, including the weights of inner layers.
        infinite: the fraction of the output's values that are infinite.
        nan: the fraction of NaNs.
        subnormal: the fraction of values in the subnormal range of the output's dtype: in float16, below `2**-14`.
        advice: what to do, if some output was not finite although the inputs were, and although no inner layer
            overflowed; otherwise an empty string.
        weights_advice: what to do, if weights or statistics are infinite or NaN, on any replica of a strategy;
            otherwise an empty string.
    """

    layer: str
    dtype: str
    inputs: float | None
    outputs: float | None
    weights: float | None
    infinite: float = 0.0
    nan: float = 0.0
    subnormal: float = 0.0
    advice: str = ""
    weights_advice: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class ActivationReport:
    """A report on the layers of one forward pass. It prints as a table and a line of advice.

    >>> softmax = LayerActivations("softmax", "float16", 12.0, 1.0, None, subnormal=0.25)
    >>> scale = LayerActivations("scale", "float16", 1.0, float("inf"), 8.0, 0.5, 0.0, 0.0, "`scale` overflows.")
    >>> ActivationReport((softmax, scale))
    layer    dtype    inputs  outputs  weights    inf  NaN  subnormal
    softmax  float16      12        1        -     0%   0%      25.0%
    scale    float16       1      inf        8  50.0%   0%         0%
    `scale` overflows.

    Args:
        rows: a row for each call of a layer, in the order in which the calls returned: the row of a layer follows the
            rows of its inner layers, and the model is last. A loss follows the model.
    """

    rows: tuple[LayerActivations, ...]

    @property
    def first(self) -> LayerActivations | None:
        """The row of the first layer whose output is not finite although its input is, or None."""
        return next((row for row in self.rows if row.advice), None)

    @property
    def advice(self) -> str:
        """One line on where to look for the cause."""
        damage = next((row.weights_advice for row in self.rows if row.weights_advice), "")
        return " ".join(dict.fromkeys(filter(None, (self._advice_on_outputs(bool(damage)), damage))))

    def _advice_on_outputs(self, weights_explain: bool) -> str:
        if self.first is not None:
            return self.first.advice
        bad = next((row for row in self.rows if not _is_finite(row.outputs)), None)
        if bad is not None:
            return f"The input of `{bad.layer}` is already infinite or NaN: look at where it comes from."
        if weights_explain:
            return ""
        if self.rows and self.rows[-1].layer == _LOSS:
            return "Every layer's output is finite, and so is the loss: if steps are skipped, only gradients are not."
        return "Every layer's output is finite: look at the loss and at the gradients."

    def plot(self) -> Any:
        """Plot the largest magnitudes of every layer against the range of float16.

        >>> figure = ActivationReport((LayerActivations("softmax", "float16", 12.0, 1.0, None),)).plot()

        Magnitudes that are infinite or NaN are drawn on the right edge.

        Returns:
            A matplotlib `Figure`. Call its `savefig(path)` method to write it to a file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = optional.load("matplotlib.figure", "plot").Figure(
            figsize=(8, 1.5 + 0.2 * max(8, len(self.rows))), layout="constrained"
        )
        axis, edge = figure.subplots(), MAXIMUM + 6
        for kind, marker in {"weights": "|", "inputs": ".", "outputs": "x"}.items():
            values = [getattr(row, kind) for row in self.rows]
            exponents = [edge if not _is_finite(value) else math.log2(value) if value else math.nan for value in values]
            axis.plot(np.minimum(exponents, edge), range(len(values)), marker, label=kind)
        # Matplotlib reads text between dollar signs as a formula.
        axis.set_yticks(range(len(self.rows)), [row.layer.replace("$", r"\$") for row in self.rows], fontsize=8)
        axis.invert_yaxis()
        axis.set(xlabel="exponent of the largest magnitude", xlim=(SUBNORMAL - 7, edge + 1))
        mark_ranges(axis)
        axis.legend()
        return figure

    def __repr__(self) -> str:
        cells = [("layer", "dtype", "inputs", "outputs", "weights", "inf", "NaN", "subnormal"), *map(_cells, self.rows)]
        return "\n".join([*aligned(cells, left=2), self.advice])


def activation_report(
    model: Any, inputs: Any, training: bool = True, loss_fn: Callable[[Any], Any] | None = None
) -> ActivationReport:
    """Run a model on one batch, and report the magnitudes of every layer. Call this function in eager mode.

    >>> keras, half = tf.keras, "mixed_float16"
    >>> hidden = keras.layers.Dense(2, kernel_initializer="ones", dtype=half, name="hidden")
    >>> square = keras.layers.Lambda(lambda x: x**2, dtype=half, name="square")
    >>> model = keras.Sequential([keras.Input((2,)), hidden, square], name="model")
    >>> activation_report(model, tf.constant([[100.0, 200.0]]))
    layer   dtype    inputs  outputs  weights   inf  NaN  subnormal
    hidden  float16     200      300        1    0%   0%         0%
    square  float16     300      inf        -  100%   0%         0%
    model   float32     200      inf        1  100%   0%         0%
    `square` overflows: give it dtype float32.

    The report lists the layers and modules that the model calls and, in a functional model, the operations. Functions
    decorated with `tf.function` run eagerly, but layers that are called in a graph, for example by `tf.vectorized_map`,
    are not listed. At the end, or if the model raises an error, all variables of the model get their values back. Only
    the global random state of TensorFlow advances.

    Args:
        model: a model or layer of Keras 3 or tf_keras, or a `tf.Module` with a `__call__` method, such as a module of
            Sonnet.
        inputs: the first argument of the model, one batch.
        training: passed to the model under this name. For a `tf.Module`, the argument may also be named `is_training`,
            as in Sonnet, or be missing.
        loss_fn: a function that takes the outputs of the model and returns the loss. It gets a row of its own.

    Returns:
        A report that contains plain data and prints as a table.

    Raises:
        RuntimeError: the function was called in a `tf.function` or a TF1 graph.
        TypeError: `model` is not a model, layer or module that can be called.
    """
    if not _is_module(model):
        raise TypeError(
            f"`model` must be a Keras model or layer, or a tf.Module with a __call__ method, but got: {model!r}. Pass "
            "the model that computes the outputs."
        )
    if not tf.executing_eagerly():
        raise RuntimeError("activation_report() needs eager mode. Call it outside of the tf.function, on one batch.")
    recorder, mode = _Recorder(), _mode(model, training)
    with Snapshot([model]).restoring(), recorder.watching(model):
        outputs = model(inputs, **mode)
        if loss_fn is not None:
            recorder.call(_LOSS, loss_fn, outputs)
    return ActivationReport(tuple(map(_row, recorder.places)))


@dataclasses.dataclass(eq=False)
class _Values:
    """Statistics of floating-point values. `counts` has the numbers of all, infinite, NaN and subnormal values."""

    dtypes: set[str] = dataclasses.field(default_factory=set)
    largest: float = 0.0
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(4))

    def add(self, structure: Any) -> bool:
        """Add all floating-point tensors and arrays in a structure. Return whether they are finite."""
        finite = True
        for each in tf.nest.flatten(structure, expand_composites=True):
            if not (tf.is_tensor(each) or isinstance(each, np.ndarray)) or not tf.as_dtype(each.dtype).is_floating:
                continue
            # TensorFlow may treat subnormal numbers as zeros, but NumPy does not.
            values, dtype = np.abs(np.asarray(each).astype(np.float64)), tf.as_dtype(each.dtype).name
            is_subnormal = (values > 0) & (values < _SMALLEST_NORMAL.get(dtype, 2.0**-126))
            kinds = map(np.count_nonzero, (np.isinf(values), np.isnan(values), is_subnormal))
            largest = float(np.max(values, initial=0.0))
            self.dtypes.add(dtype)
            self.largest = float(np.maximum(self.largest, largest))  # NaN if either is NaN
            self.counts = np.add(self.counts, (values.size, *kinds))
            finite = finite and math.isfinite(largest)
        return finite

    @property
    def magnitude(self) -> float | None:
        return self.largest if self.counts[0] else None


@dataclasses.dataclass(eq=False)
class _Place:
    """The calls of a layer from one place of the forward pass. Only an RNN calls its cell repeatedly from one place."""

    module: Any
    path: str
    label: str
    cell_of: str
    inputs: _Values = dataclasses.field(default_factory=_Values)
    outputs: _Values = dataclasses.field(default_factory=_Values)
    inner: dict[Any, _Place] = dataclasses.field(default_factory=dict)
    overflows: bool = False


@dataclasses.dataclass(eq=False)
class _Call:
    """A call that has not returned yet."""

    place: _Place
    times: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    explained: bool = False  # whether an inner layer overflows


class _Recorder:
    """Records the calls of layers in one thread."""

    def __init__(self) -> None:
        self.places: list[_Place] = []  # in the order in which their first calls returned
        self._calls: list[_Call] = []
        self._numbers: dict[str, dict[int, int]] = collections.defaultdict(dict)
        self._places_of: collections.Counter[int] = collections.Counter()
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Record the calls of a model's layers."""
        classes = {base for _, part in walk([model]) if _is_module(part) for base in type(part).__mro__}
        methods = {cls: vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)}
        with contextlib.ExitStack() as restored:
            restored.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
            tf.config.run_functions_eagerly(True)
            for each, method in methods.items():
                restored.callback(setattr, each, "__call__", method)
                setattr(each, "__call__", self._recorded(method))  # noqa: B010  # mypy refuses `each.__call__ = ...`
            yield

    def _recorded(self, method: Any) -> Callable[..., Any]:
        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self.call(this, method.__get__(this, type(this)), *args, **kwargs)

        return call

    def call(self, module: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record it as a call of a module."""
        outer = self._calls[-1] if self._calls else None
        calls_base_class = outer is not None and outer.place.module is module
        # A Sequential model builds its layers by calling them with KerasTensors.
        is_symbolic = not tf.executing_eagerly() or "KerasTensor" in {type(each).__name__ for each in args}
        if calls_base_class or is_symbolic or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        call = _Call(self._place(module, outer))
        place = call.place
        finite = place.inputs.add((args, kwargs))
        self._calls.append(call)
        try:
            results = function(*args, **kwargs)
        finally:
            self._calls.pop()
        overflows = not place.outputs.add(results) and finite and not call.explained
        place.overflows |= overflows
        if outer is not None:
            outer.explained |= overflows or call.explained
        if place not in self.places:
            self.places.append(place)
        return results

    def _place(self, module: Any, outer: _Call | None) -> _Place:
        """Return the place of a call: a new one, or the place of an earlier time step."""
        name = getattr(module, "name", module)
        if outer is None:
            # The names of inner layers do not repeat the model's name.
            return _Place(module, "" if module is not _LOSS else name, name, "")
        bases = {base.__name__ for base in type(outer.place.module).__mro__}
        time = 0 if bases & _REPEATING else outer.times[id(module)]
        outer.times[id(module)] += 1
        if (id(module), time) not in outer.place.inner:
            path = f"{outer.place.path}/{name}".lstrip("/")
            # Modules of tf.Module may have the same name.
            same = self._numbers[path]
            number = same.setdefault(id(module), len(same))
            path = f"{path}_{number}" if number else path
            self._places_of[id(module)] += 1
            count = self._places_of[id(module)]
            label = f"{path} (call {count})" if count > 1 else path
            outer.place.inner[id(module), time] = _Place(
                module, path, label, outer.place.label if "RNN" in bases else ""
            )
        return outer.place.inner[id(module), time]


def _is_module(value: Any) -> bool:
    return callable(value) and hasattr(type(value), "non_trainable_variables")


def _is_layer(value: Any) -> bool:
    """Return whether a module is a Keras layer with a dtype. A layer of tf_keras that is an operation has none."""
    return hasattr(value, "compute_dtype") and type(value).__name__ not in ("SlicingOpLambda", "TFOpLambda")


def _mode(model: Any, training: bool) -> dict[str, bool]:
    """Return the keyword argument that tells a model whether it is trained."""
    if _is_layer(model):
        return {"training": training}
    parameters = inspect.signature(model.__call__).parameters
    return {name: training for name in ("training", "is_training") if name in parameters}


def _row(place: _Place) -> LayerActivations:
    module, outputs, weights = place.module, place.outputs, _Values()
    damaged = []
    for variable in variables_in([module], without=_is_no_weight):
        # A replica may have statistics of its own.
        if not weights.add([copy.read_value() for copy in replicas.local_copies_of(*tensors_of([variable]))]):
            damaged.append(variable)
    row = LayerActivations(
        place.label,
        module.compute_dtype if _is_layer(module) else ", ".join(sorted(outputs.dtypes)) or "-",
        place.inputs.magnitude,
        outputs.magnitude,
        weights.magnitude,
        *(outputs.counts[1:] / max(outputs.counts[0], 1)).tolist(),
    )
    row = dataclasses.replace(row, weights_advice=_advice_on_weights(place.label, damaged))
    return dataclasses.replace(row, advice=_advice(place, row)) if place.overflows else row


def _is_no_weight(part: Any) -> bool:
    return is_metric(part) or is_random_state(part) or hasattr(part, "apply_gradients")


def _advice_on_weights(layer: str, damaged: list[Any]) -> str:
    """Return a sentence on variables of a layer that are infinite or NaN."""
    if not damaged:
        return ""
    if any(variable.trainable for variable in damaged):
        return f"`{layer}` has infinite or NaN weights: restore an older checkpoint."
    names = ", ".join(name_of(variable).rpartition("/")[2] for variable in damaged)
    return (
        f"`{layer}` has infinite or NaN statistics ({names}): restore an older checkpoint, and train with "
        "keep_state(model), which undoes what a skipped step writes into them."
    )


def _advice(place: _Place, row: LayerActivations) -> str:
    """Return a sentence on a layer whose output is not finite although its input is."""
    name = f"`{row.layer}`"
    if row.weights_advice:
        return row.weights_advice
    if not _uses_float16(place):
        return f"{name} computes infinity or NaN in {row.dtype}: look for a division by zero or log(0)."
    keeps_float16 = _keeps_dtype(place.module) and "float16" in place.inputs.dtypes
    has_dtype = _is_layer(place.module) and (row.dtype == "float16" or keeps_float16)
    give = "give it and the layer before it" if keeps_float16 else "give it"
    for kind, largest in (("inputs", row.inputs), ("weights", row.weights)):
        if has_dtype and largest is not None and _INFINITE <= largest < math.inf:
            return f"{name} casts {kind} of {largest:.3g} to float16: {give} dtype float32."
    if place.inner:
        later = next((each for each in place.inner.values() if not math.isfinite(each.inputs.largest)), None)
        where = f"before `{later.label}`" if later else "after its inner layers"
        # Users cannot change a part of a layer of Keras itself, such as MultiHeadAttention.
        is_of_keras = keras_versions.library_in(type(place.module).__module__) in keras_versions.MODULES
        remedy = f"{give} dtype float32" if is_of_keras and has_dtype else "compute that part in float32"
        return f"{name} overflows {where}: {remedy}."
    if not has_dtype:
        return f"{name} overflows: compute it in float32."
    return f"{name} overflows: {give}{f' and `{place.cell_of}`' if place.cell_of else ''} dtype float32."


def _uses_float16(place: _Place) -> bool:
    """Return whether float16 may be the reason for an overflow."""
    dtypes = {place.module.compute_dtype} if _is_layer(place.module) else set()
    if not dtypes or _keeps_dtype(place.module):
        dtypes |= place.inputs.dtypes
    return "float16" in dtypes | place.outputs.dtypes or any(map(_uses_float16, place.inner.values()))


def _keeps_dtype(module: Any) -> bool:
    """Return whether a layer computes in the dtype of its inputs, as Keras 3's normalization layers do."""
    return _is_layer(module) and not getattr(module, "autocast", True)


def _is_finite(magnitude: float | None) -> bool:
    return magnitude is None or math.isfinite(magnitude)


def _cells(row: LayerActivations) -> tuple[str, ...]:
    magnitudes = ("-" if each is None else f"{each:.3g}" for each in (row.inputs, row.outputs, row.weights))
    shares = (percent(each) for each in (row.infinite, row.nan, row.subnormal))
    return row.layer, row.dtype, *magnitudes, *shares
