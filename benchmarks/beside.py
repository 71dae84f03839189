"""Times the optimizer steps of all libraries, including PyTorch, on variables with the same shapes.

Also times the first call to a step function, which includes tracing and compilation.
"""

import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import clock, contenders, costs, pytorch, steps, workloads

WHAT, FIRST_CALL = "beside", "first call"
COLUMNS = (contenders.BARE, contenders.OURS, contenders.OURS_COMPILED, contenders.THEIRS)
CACHED = f"{contenders.OURS_COMPILED}, with XLA's persistent cache"


def cells() -> Iterator[dict[str, str]]:
    for workload in ("200 x 1k", workloads.RESNET, steps.LARGE):
        yield {"what": WHAT, "mode": "tf.function", "family": "all", "workload": workload}
    for family in ("Keras 3", "tf_keras legacy"):
        yield {"what": FIRST_CALL, "mode": "tf.function", "family": family, "workload": "200 x 1k"}


def measure(cell: dict[str, str], seconds: float, **rounds: int) -> dict[str, Any]:
    """Take the measurement that the `cell` dictionary describes. Return a copy of `cell` with the results added.

    The results are the wall-clock time and the processor time of each optimizer's step, or the wall-clock time of the
    first call to each step function, in milliseconds.
    """
    if cell["what"] == FIRST_CALL:
        return {**cell, "milliseconds": first_calls(cell["family"], cell["workload"])}
    times = clock.in_turns(_steps(cell["workload"]), 5 * seconds, **rounds)
    return {
        **cell,
        "milliseconds": {name: round(1000 * statistics.median(each.wall), 2) for name, each in times.items()},
        "processor": {name: round(1000 * statistics.median(each.processor), 2) for name, each in times.items()},
        "rounds": len(next(iter(times.values())).wall),
        "load": clock.load(),
    }


def _steps(workload: str) -> dict[str, Callable[[], object]]:
    found = {}
    for family in contenders.FAMILIES:
        cell = {"what": "step", "mode": "tf.function", "family": family, "workload": workload}
        for name in COLUMNS:
            found[f"{family}: {name}"] = steps.in_mode(cell, name)
    if contenders.installed(contenders.TORCH):
        for update in pytorch.UPDATES:
            for name in (contenders.BARE, contenders.THEIRS):
                found[f"{contenders.TORCH}, {update}: {name}"] = pytorch.step(workload, name, update)
    return found


def first_calls(family: str, workload: str) -> dict[str, float]:
    """Return how many milliseconds the first call to a step function takes, with and without this package's wrapper.

    Each call runs in a fresh process. Its time includes tracing and compilation.
    """
    first = functools.partial(costs.apart, "first call", family, workload)
    found = {name: first(name) for name in (contenders.BARE, contenders.OURS, contenders.OURS_COMPILED)}
    with tempfile.TemporaryDirectory() as folder:
        cached = {**os.environ, "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={folder}"}
        first(contenders.OURS_COMPILED, env=cached)
        found[CACHED] = first(contenders.OURS_COMPILED, env=cached)
    return found


def first_call(family: str, workload: str, name: str) -> float:
    """Return how many milliseconds the first call to a step function takes.

    A step with fewer variables runs first, so the time does not include loading libraries.
    """
    cell = {"what": "step", "mode": "tf.function", "family": family, "workload": workload}
    steps.in_mode({**cell, "workload": "3 x 1k"}, name)()
    step = steps.in_mode(cell, name)
    times = clock.in_turns({name: step}, 0, least=1, first=0)[name]
    return round(1000 * times.wall[0], 1)
