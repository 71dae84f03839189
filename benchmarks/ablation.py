"""Measures how much time or memory each optimization in `tf_lossscale.core.fast` saves.

Each step is measured with all optimizations, and then with one optimization at a time switched off.
"""

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from benchmarks import clock, contenders, costs, steps, workloads
from tf_lossscale.core import fast

WHAT, ALL, TRACING, MEMORY = "ablation", "all tricks", "tracing", "peak memory"
#: Maps each mode, such as "eager" or "tracing", to the names of the optimizations in `tf_lossscale.core.fast` that
#: affect it.
TRICKS = {
    "eager": ("stacks", "sum first"),
    "tf.function": ("stacks", "late unscaling", "one at a time", "one call", "sum first"),
    "jit_compile": ("late unscaling", "loop", "product", "sum first", "one check"),
    "mirrored": ("stacks", "stacked sums", "sum first"),
    TRACING: ("stacks", "late unscaling", "one at a time", "one call", "sum first"),
    MEMORY: ("late unscaling", "one at a time"),
}
_SHAPES = ("200 x 1k", workloads.RESNET, "4 x 4M", *workloads.MODELS)


def cells() -> Iterator[dict[str, str]]:
    for mode, family, workload in itertools.product(TRICKS, ("Keras 3", "tf_keras legacy"), _SHAPES):
        if mode not in (TRACING, MEMORY):
            yield {"what": WHAT, "mode": mode, "family": family, "workload": workload}
    yield {"what": WHAT, "mode": TRACING, "family": "Keras 3", "workload": "200 x 1k"}
    yield {"what": WHAT, "mode": MEMORY, "family": costs.MEMORY, "workload": "16 x 16M"}


def measure(cell: dict[str, str], seconds: float, least: int = 7) -> dict[str, Any]:
    """Measure a step with all optimizations, and then with one optimization at a time switched off.

    For each optimization, the result contains a ratio: the time without this optimization divided by the time with all
    optimizations. In the "peak memory" mode, the result contains the peak memory in megabytes instead.
    """
    names = (ALL, *TRICKS[cell["mode"]])
    if cell["mode"] == MEMORY:
        peaks = {name: costs.peak_apart(cell["workload"], contenders.OURS, name) for name in names}
        return {**cell, "megabytes": peaks}
    make = _tracing if cell["mode"] == TRACING else _step
    times = clock.in_turns({name: make(cell, name) for name in names}, seconds, least)
    return {
        **cell,
        "bare_ms": round(1000 * statistics.median(times[ALL].processor), 3),
        "ratios": clock.ratios(times, ALL),
        "rounds": len(times[ALL].wall),
        "load": clock.load(),
    }


def switched_off(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that switches off the named optimization, or a null context if the name is `ALL`."""
    return contextlib.nullcontext() if name == ALL else fast.without(name)


def _step(cell: dict[str, str], name: str) -> Callable[[], object]:
    with switched_off(name):
        step = steps.in_mode(cell, contenders.OURS)
        step()
    return functools.partial(_call, name, step) if cell["mode"] == "eager" else step


def _tracing(cell: dict[str, str], name: str) -> Callable[[], object]:
    step = steps.made(cell, contenders.OURS)
    step()
    return functools.partial(_call, name, lambda: tf.function(step).get_concrete_function())


def _call(name: str, step: Callable[[], object]) -> None:
    with switched_off(name):
        step()
