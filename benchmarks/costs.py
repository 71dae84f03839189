"""Measures the time of tracing, compilation and imports, the size of graphs, and peak memory."""

import functools
import gc
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from benchmarks import clock, contenders, steps

MEMORY = "tf_keras legacy"
ALL = ("tracing", "compiling", "peak memory", "import")


def cells() -> Iterator[dict[str, str]]:
    for family in contenders.FAMILIES:
        if family != "TensorFlow 1":
            yield {"what": "tracing", "mode": "tf.function", "family": family, "workload": "1000 x 1k"}
    for family in ("Keras 3", "tf_keras legacy"):
        yield {"what": "compiling", "mode": "jit_compile", "family": family, "workload": "40 x 1k"}
    yield {"what": "peak memory", "mode": "tf.function", "family": MEMORY, "workload": "16 x 16M"}
    yield {"what": "import", "mode": "python", "family": "tf_lossscale", "workload": "import"}


def measure(cell: dict[str, str], seconds: float, least: int = 3) -> dict[str, Any]:
    """Take the measurement that the `cell` dictionary describes. Return a copy of `cell` with the results added."""
    if cell["what"] in ("tracing", "compiling"):
        return {**cell, **tracing(cell, seconds, min(least, 3))}
    if cell["what"] == "import":
        return {**cell, **importing(min(least, 5))}
    names = [*contenders.names(MEMORY), *contenders.MINIMIZERS]
    return {**cell, "megabytes": {name: peak_apart(cell["workload"], name) for name in names}}


def nodes(function: Any) -> int:
    """Return the number of graph nodes in a concrete function and in the functions that it calls."""
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(called.node_def) for called in graph.library.function)


def tracing(cell: dict[str, str], seconds: float, least: int) -> dict[str, Any]:
    """Measure how long tracing a step takes, and count the graph's nodes.

    The optimizer creates its variables before the measurement. In "jit_compile" mode, the time includes XLA's
    compilation.
    """
    traced: dict[str, Any] = {}
    options = {"jit_compile": True} if cell["mode"] == "jit_compile" else {}
    names = [*contenders.names(cell["family"]), contenders.CONDITIONAL]
    made = {name: steps.made(cell, name) for name in names}
    for name, step in made.items():
        step()
        small = steps.made({**cell, "workload": "3 x 1k"}, name)
        small()
        # Trace a small step first. It triggers imports that TensorFlow delays until then and that must not be timed.
        tf.function(small, **options)()

    def trace(name: str) -> None:
        function = tf.function(made[name], **options)
        traced[name] = function.get_concrete_function()
        if options:
            function()

    gc.collect()
    # The garbage collector must not free one optimizer's graphs while another optimizer is being timed.
    gc.disable()
    try:
        each = {name: functools.partial(trace, name) for name in made}
        times = clock.in_turns(each, seconds, least, most=10, first=0)
    finally:
        gc.enable()
    return {
        "bare_ms": round(1000 * statistics.median(times[contenders.BARE].processor), 1),
        "ratios": clock.ratios(times, contenders.BARE),
        "nodes": {name: nodes(function) for name, function in traced.items()},
        "rounds": len(times[contenders.BARE].wall),
        "load": clock.load(),
    }


def importing(times: int) -> dict[str, Any]:
    """Time `import tf_lossscale` and a subsequent `import tensorflow`. Return the medians over several processes."""
    pairs = [apart("import") for _ in range(times)]
    ours, theirs = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    return {"milliseconds": {"tf_lossscale": round(1000 * ours, 1), "tensorflow": round(1000 * theirs, 1)}}


def apart(*what: str, env: dict[str, str] | None = None) -> Any:
    """Run `benchmarks.apart` with the given arguments in a fresh process, and return the result that `apart` prints."""
    command = [sys.executable, "-m", "benchmarks.apart", *what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def peak_apart(workload: str, name: str) -> float:
    """Call `peak_of_a_step` in a fresh process, and return its result."""
    return apart("memory", workload, name)


def peak_of_a_step(workload: str, name: str) -> float:
    """Take two steps, and return the increase in this process's peak memory, in megabytes.

    The peak includes the variables, the gradients and Adam's moments. The allocator does not return memory to the
    system, so each measurement needs a fresh process.
    """
    before = _peak()
    what = "minimize" if name in contenders.MINIMIZERS else "step"
    step = tf.function(steps.made({"what": what, "mode": "tf.function", "family": MEMORY, "workload": workload}, name))
    for _ in range(2):
        step()
    return round((_peak() - before) / 1024, 1)


def _peak() -> int:
    # VmHWM is the peak memory of this process. Unlike the peak that getrusage returns, it excludes the parent process.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
