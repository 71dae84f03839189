"""Times optimizer steps, calls to `minimize`, and whole training steps.

They run in eager mode, in a `tf.function`, compiled by XLA, and under MirroredStrategy.
"""

import functools
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from benchmarks import clock, contenders, pytorch, workloads
from tf_lossscale.core import finite
from tf_lossscale.diagnosis import exponents

GROWTH = (
    *(f"{count} x 1k" for count in (10, 30, 100, 300, 1000, 2000)),
    *(f"1 x {size}" for size in ("1k", "10k", "100k", "1M", "4M", "16M", "64M")),
)
APPLIED, SKIPPED = "applied", "skipped"
#: The name under which measurements of `LossScaleOptimizer(jit_compile=True)` are stored.
COMPILED = "compiled step"
LARGE = "4 x 4M"
#: The name under which measurements of `LossScaleOptimizer(diagnose="exponents")` are stored.
EXPONENTS = "exponents"
_MANY, _FEW = ("400 x 1k", "200 x 1k", workloads.RESNET), (LARGE, workloads.SPARSE)
#: Maps each mode, such as "eager", to the workloads on which optimizer steps are timed.
MODES = {
    "tf.function": (*_MANY, *_FEW),
    "eager": (*_MANY, *_FEW),
    "jit_compile": ("40 x 1k", *_MANY[1:], *_FEW),
    "mirrored": ("40 x 1k", *_MANY[1:], *_FEW),
}

_COMPILED = (
    ("tf.function", tuple(contenders.FAMILIES), (LARGE, workloads.RESNET)),
    ("eager", ("Keras 3", "tf_keras", "tf_keras legacy"), ("200 x 1k",)),
    ("eager", ("Keras 3",), workloads.MODELS),
    ("mirrored", ("Keras 3",), ("40 x 1k", workloads.RESNET)),
)


def long(cell: dict[str, str]) -> bool:
    """Return whether a step takes minutes to trace or compile, because it updates hundreds of variables."""
    return (
        cell["what"] in ("step", "ablation")
        and cell["mode"] in ("jit_compile", "mirrored")
        and cell["workload"] in _MANY
    )


def cells() -> Iterator[dict[str, str]]:
    for mode, gradients in MODES.items():
        for family in contenders.FAMILIES:
            # TensorFlow 1's wrapper cannot run in a tf.function under a distribution strategy.
            if family == "TensorFlow 1" and mode == "mirrored":
                continue
            for workload in gradients:
                yield {"what": "step", "mode": mode, "family": family, "workload": workload}
            for workload in workloads.MODELS:
                yield {"what": "training step", "mode": mode, "family": family, "workload": workload}
    for mode in ("tf.function", "jit_compile"):
        for family in contenders.FAMILIES:
            yield {"what": "minimize", "mode": mode, "family": family, "workload": LARGE}
    for mode in ("tf.function", "eager"):
        for family in ("Keras 3", "tf_keras legacy"):
            yield {"what": "skipped step", "mode": mode, "family": family, "workload": "200 x 1k"}
    for workload in (*workloads.MODELS, workloads.LENET):
        yield {"what": "diagnose", "mode": "tf.function", "family": "Keras 3", "workload": workload}
    for mode in ("tf.function", "eager", "jit_compile"):
        for workload in (LARGE, "40 x 1k" if mode == "jit_compile" else "200 x 1k"):
            yield {"what": EXPONENTS, "mode": mode, "family": "Keras 3", "workload": workload}
    for mode, families, gradients in _COMPILED:
        for family in families:
            for workload in gradients:
                yield {"what": COMPILED, "mode": mode, "family": family, "workload": workload}
    for workload in GROWTH:
        yield {"what": "growth", "mode": "tf.function", "family": "tf_keras legacy", "workload": workload}
    for workload in MODES["eager"]:
        # PyTorch's Adam does not accept sparse gradients.
        if workload != workloads.SPARSE:
            yield {"what": "step", "mode": "eager", "family": contenders.TORCH, "workload": workload}


def measure(cell: dict[str, str], seconds: float, **rounds: int) -> dict[str, Any]:
    """Take the measurement that the `cell` dictionary describes. Return a copy of `cell` with the results added.

    The results are each optimizer's time divided by the first optimizer's time, and the errors of optimizers that
    cannot run.
    """
    ready: dict[str, Callable[[], object]] = {}
    refused: dict[str, str] = {}
    for name in _names(cell):
        try:
            step = in_mode(cell, name)
            step()
        except Exception as error:
            # A library may raise an error of any type, and the other optimizers must still be measured.
            refused[name] = _reason(error)
        else:
            ready[name] = step
    row: dict[str, Any] = {**cell, **({"refused": refused} if refused else {})}
    if _names(cell)[0] in refused:
        return row
    times = clock.in_turns(ready, seconds, **rounds)
    first = next(iter(times))
    return {
        **row,
        "bare_ms": round(1000 * statistics.median(times[first].processor), 3),
        "ratios": clock.ratios(times, first),
        "rounds": len(times[first].wall),
        "load": clock.load(),
    }


def made(cell: dict[str, str], name: str) -> Callable[[], object]:
    """Return a Python function that takes one step with the optimizer that `name` selects."""
    if cell["family"] == contenders.TORCH:
        return pytorch.step(cell["workload"], name)
    if cell["what"] == "minimize":
        return _minimize(cell, name)
    return _training_step(cell, name) if cell["workload"] in (*workloads.MODELS, workloads.LENET) else _step(cell, name)


def _names(cell: dict[str, str]) -> list[str]:
    """Return the names of the optimizers to measure. All times are divided by the time of the first optimizer."""
    special = {
        "skipped step": [APPLIED, SKIPPED],
        "growth": [contenders.BARE, contenders.OURS],
        "minimize": [*contenders.MINIMIZERS, contenders.LEAST],
        "diagnose": [contenders.OURS, contenders.OURS_DIAGNOSED],
        EXPONENTS: [
            *(contenders.OURS, contenders.OURS_WAITING, contenders.OURS_COUNTING),
            *(contenders.CHECK, contenders.COUNT),
        ],
        COMPILED: [contenders.BARE, contenders.OURS, contenders.OURS_COMPILED, *_limits(cell)],
    }
    usual = contenders.names(cell["family"])
    return special.get(cell["what"]) or ([*usual, contenders.LEAST] if _has_a_line(cell) else usual)


def _limits(cell: dict[str, str]) -> list[str]:
    """Return the names of steps whose times are lower bounds for a step with `LossScaleOptimizer(jit_compile=True)`.

    If the workload is a model, the lower bound is a training step that applies no gradients. Otherwise it is an
    optimizer step without loss scaling, compiled by XLA, which is not measured under MirroredStrategy.
    """
    if cell["workload"] in workloads.MODELS:
        return [contenders.NO_STEP]
    return [contenders.BARE_COMPILED] if cell["mode"] != "mirrored" else []


def _has_a_line(cell: dict[str, str]) -> bool:
    """Return whether to measure `contenders.LEAST`, the least work that loss scaling needs.

    The cost of this work is visible only with large variables or in eager mode.
    """
    large = cell["what"] == "step" and cell["workload"] == LARGE and cell["mode"] in ("tf.function", "jit_compile")
    return large or (cell["what"] == "training step" and cell["mode"] == "eager")


def in_mode(cell: dict[str, str], name: str) -> Callable[[], object]:
    """Return a function that takes one step. `cell` determines how the step runs, for example compiled by XLA."""
    if name == contenders.BARE_COMPILED:
        return in_mode({**cell, "mode": "jit_compile"}, contenders.BARE)
    mode = cell["mode"]
    if mode == "mirrored":
        strategy = _two_replicas()
        with strategy.scope():
            step = made(cell, name)
        return _traced(lambda: strategy.run(step))
    step = made(cell, name)
    return step if mode == "eager" else _traced(step, jit_compile=mode == "jit_compile")


@functools.cache
def _two_replicas() -> tf.distribute.Strategy:
    """Return this process's only MirroredStrategy. A second one would use the same collective keys and fail."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _traced(step: Callable[[], object], **options: Any) -> Callable[[], object]:
    # Create the optimizer's variables eagerly, because a tf.function that creates variables is traced twice.
    step()
    return tf.function(step, **options)


def _reason(error: Exception) -> str:
    """Return the type and message of an error on one line, without file paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if "in user code" in lines[0] else lines[0]
    name = type(error).__name__
    text = re.sub(r"\S*/\S*/\S*", "...", text.removeprefix(f"{name}: ")).replace("|", "/")
    return f"{name}: {text if len(text) <= 160 else text[:157] + '...'}"


def _optimizer(cell: dict[str, str], name: str) -> Any:
    return contenders.optimizer(cell["family"], name, compiled=cell["mode"] == "jit_compile")


def _step(cell: dict[str, str], name: str) -> Callable[[], object]:
    gradients = workloads.gradients(cell["workload"])
    if name == SKIPPED:
        gradients[-1] *= float("nan")
    # Keep the gradients in variables, because tracing would turn tensors into constants.
    held = [tf.Variable(g.values if isinstance(g, tf.IndexedSlices) else g, trainable=False) for g in gradients]

    def given() -> list:
        return [_as(gradient, tf.convert_to_tensor(value)) for gradient, value in zip(gradients, held)]

    if name in (contenders.CHECK, contenders.COUNT):
        alone = finite.all_finite if name == contenders.CHECK else exponents.table
        return lambda: alone(given())
    variables, optimizer = workloads.variables(cell["workload"]), _optimizer(cell, name)

    def step() -> None:
        contenders.scale(optimizer, name, tf.constant(1.0))
        contenders.apply(optimizer, name, given(), variables)

    return step


def _as(like: Any, values: tf.Tensor) -> Any:
    return tf.IndexedSlices(values, like.indices, like.dense_shape) if isinstance(like, tf.IndexedSlices) else values


def _minimize(cell: dict[str, str], name: str) -> Callable[[], None]:
    (variables, loss), optimizer = workloads.layers(cell["workload"]), _optimizer(cell, name)

    def step() -> None:
        contenders.minimize(optimizer, loss, variables)

    return step


def _training_step(cell: dict[str, str], name: str) -> Callable[[], None]:
    (variables, loss), optimizer = workloads.model(cell["workload"]), _optimizer(cell, name)

    def step() -> None:
        with tf.GradientTape() as tape:
            scaled = contenders.scale(optimizer, name, loss())
        gradients = tape.gradient(scaled, variables)
        if name != contenders.NO_STEP:
            contenders.apply(optimizer, name, gradients, variables)

    return step
