"""What a loss scale costs: the optimizer's step with it, as a ratio to the bare inner optimizer's.

    python benchmarks/steps.py [--repetitions 30] [--json docs/performance.json]

All contenders of a row take turns in one process; a ratio is the median of the ratios of neighbouring turns.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer

WORKLOADS = {"200 x 1k": (200, 1_000), "4 x 4M": (4, 4_000_000)}
MODES = ("eager", "tf.function", "jit_compile")
FAMILIES = {
    "Keras 3": (tf.keras.optimizers.Adam, {"Keras 3's wrapper": keras.optimizers.LossScaleOptimizer}),
    "tf_keras": (tf_keras.optimizers.Adam, {"tf_keras's wrapper": tf_keras.mixed_precision.LossScaleOptimizer}),
    "tf_keras legacy": (
        tf_keras.optimizers.legacy.Adam,
        {"tf_keras's wrapper": tf_keras.mixed_precision.LossScaleOptimizer},
    ),
}


def contender(make, wrap, count, size, mode):
    """Returns a function that takes one step of scaled gradients with one optimizer."""
    variables = [tf.Variable(tf.zeros([size])) for _ in range(count)]
    optimizer = make(1e-3)
    optimizer = optimizer if wrap is None else wrap(optimizer)

    def step(gradients):
        if wrap is None:
            optimizer.apply_gradients(zip(gradients, variables))
        elif hasattr(optimizer, "get_unscaled_gradients"):
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), variables))
        else:
            optimizer.apply_gradients(zip(gradients, variables))

    if mode == "eager":
        return step
    return tf.function(step, jit_compile=mode == "jit_compile")


def measure(steps, gradients, repetitions):
    """Returns the median ratio of each step's time to the first one's, taken in turns."""
    for step in steps.values():
        for _ in range(3):
            step(gradients)
    times = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            start = time.perf_counter()
            step(gradients)
            times[name].append(time.perf_counter() - start)
    bare = next(iter(times.values()))
    return {name: statistics.median(t / b for t, b in zip(taken, bare)) for name, taken in times.items()}, bare


def main():
    """Prints the table, and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}\n")
    print("| inner Adam of | gradients | mode | bare step | tf-lossscale | the library's wrapper |")
    print("|---|---|---|---|---|---|")
    for family, (make, peers) in FAMILIES.items():
        for workload, (count, size) in WORKLOADS.items():
            gradients = [tf.random.normal([size]) for _ in range(count)]
            for mode in MODES:
                (peer_name, peer), *_ = peers.items()
                if family == "tf_keras" and mode == "jit_compile":
                    # Its optimizers compile themselves otherwise, inside a compiled function.
                    maker = lambda rate, make=make: make(rate, jit_compile=False)  # noqa: E731
                else:
                    maker = make
                wraps = {"bare": None, "tf-lossscale": LossScaleOptimizer, peer_name: peer}
                steps = {name: contender(maker, wrap, count, size, mode) for name, wrap in wraps.items()}
                ratios, bare = measure(steps, gradients, arguments.repetitions)
                rows.append({"family": family, "workload": workload, "mode": mode, "ratios": ratios})
                milliseconds = 1000 * statistics.median(bare)
                print(
                    f"| {family} | {workload} | {mode} | {milliseconds:.1f} ms | {ratios['tf-lossscale']:.2f} | "
                    f"{ratios[peer_name]:.2f} |",
                    flush=True,
                )
    if arguments.json:
        temporary = arguments.json.with_suffix(".tmp")
        temporary.write_text(
            json.dumps({"tensorflow": tf.__version__, "cores": os.cpu_count(), "rows": rows}, indent=1)
        )
        os.replace(temporary, arguments.json)


if __name__ == "__main__":
    main()
