"""Steps with and without a loss scale: an optimizer's step alone, and whole training steps of small models."""

import functools
import gc
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer
from tools.benchmarks import clock, workloads

BARE, OURS, THEIRS = "bare", "tf-lossscale", "its own wrapper"
FAMILIES = {
    "Keras 3": (keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer),
    "tf_keras": (
        functools.partial(tf_keras.optimizers.Adam, jit_compile=False),
        tf_keras.mixed_precision.LossScaleOptimizer,
    ),
    "tf_keras legacy": (tf_keras.optimizers.legacy.Adam, tf_keras.mixed_precision.LossScaleOptimizer),
}
MODES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "tf.function": tf.function,
    "XLA": functools.partial(tf.function, jit_compile=True),
}


def cells() -> Iterator[dict[str, str]]:
    """Yield what is measured: a kind of step, a mode, an optimizer family and a workload."""
    for mode in ("tf.function", "XLA", "eager"):
        for family in FAMILIES:
            for workload in workloads.MODELS:
                yield {"what": "training step", "mode": mode, "family": family, "workload": workload}
    for mode in MODES:
        for family in FAMILIES:
            for workload in ("200 x 1k", "4 x 4M", workloads.RESNET):
                yield {"what": "step", "mode": mode, "family": family, "workload": workload}


def measure(cell: dict[str, str], seconds: float, least: int = 15) -> dict[str, Any]:
    """Time a step with each wrapper in turn. Return the cell, with each one's time divided by the bare optimizer's."""
    ready = {}
    for name in (BARE, OURS, THEIRS):
        step = made(cell, name)
        step()  # creates the optimizer's variables
        ready[name] = MODES[cell["mode"]](step)
    times = clock.in_turns(ready, seconds, least)
    return {
        **cell,
        "bare_ms": round(1000 * statistics.median(times[BARE].processor), 3),
        "ratios": {name: both["processor"] for name, both in clock.ratios(times, BARE).items()},
        "rounds": len(times[BARE].wall),
    }


def made(cell: dict[str, str], name: str) -> Callable[[], None]:
    """Return a function that takes one step with the optimizer in the wrapper that `name` selects."""
    make, theirs = FAMILIES[cell["family"]]
    optimizer = {BARE: lambda inner: inner, OURS: LossScaleOptimizer, THEIRS: theirs}[name](make(1e-3))
    if cell["workload"] in workloads.MODELS:
        variables, loss = workloads.model(cell["workload"])
        gradients = lambda tape, scaled: tape.gradient(scaled, variables)  # noqa: E731
    else:
        variables, loss = workloads.variables(cell["workload"]), lambda: tf.constant(1.0)
        # The gradients are in variables, because tracing would turn tensors into constants.
        held = [tf.Variable(gradient, trainable=False) for gradient in workloads.gradients(cell["workload"])]
        gradients = lambda tape, scaled: [tf.convert_to_tensor(each) for each in held]  # noqa: E731

    def step() -> None:
        with tf.GradientTape() as tape:
            scaled = _scaled(optimizer, name, loss())
        found = gradients(tape, scaled)
        if hasattr(optimizer, "get_unscaled_gradients") and name != BARE:
            found = optimizer.get_unscaled_gradients(found)
        optimizer.apply_gradients(zip(found, variables))

    return step


def _scaled(optimizer: Any, name: str, loss: tf.Tensor) -> tf.Tensor:
    if name == BARE:
        return loss
    return optimizer.get_scaled_loss(loss) if hasattr(optimizer, "get_scaled_loss") else optimizer.scale_loss(loss)


def peak_memory(family: str, name: str, workload: str = "16 x 16M") -> float:
    """Take two steps in a `tf.function`, and return the increase in this process's peak memory, in megabytes."""
    # VmHWM is the peak memory of this process. Unlike the peak that getrusage returns, it excludes the parent process.
    before = _kilobytes("VmHWM")
    step = made({"family": family, "workload": workload}, name)
    step = tf.function(step)
    for _ in range(2):
        step()
    return (_kilobytes("VmHWM") - before) / 1024


def kept_memory(family: str, name: str, repetitions: int = 300) -> float:
    """Create and drop an optimizer, three variables and a traced step. Return the kilobytes that each time leaves."""

    def make_and_drop() -> None:
        tf.function(made({"family": family, "workload": "3 x 1k"}, name))()

    for _ in range(20):
        make_and_drop()
    gc.collect()
    before = _kilobytes("VmRSS")
    for _ in range(repetitions):
        make_and_drop()
    gc.collect()
    return (_kilobytes("VmRSS") - before) / repetitions


def _kilobytes(entry: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry))
