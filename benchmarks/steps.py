"""The optimizer's step alone, `minimize`, and a whole training step: eager, in a function, compiled, and mirrored."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from benchmarks import clock, contenders, workloads

GROWTH = (
    *(f"{count} x 1k" for count in (10, 30, 100, 300, 1000, 2000)),
    *(f"1 x {size}" for size in ("1k", "10k", "100k", "1M", "4M", "16M", "64M")),
)
APPLIED, SKIPPED = "applied", "skipped"
MODES = ("tf.function", "eager", "jit_compile", "mirrored")


def cells() -> Iterator[dict[str, str]]:
    """Yields everything that is measured here."""
    for mode in MODES:
        for family in contenders.FAMILIES:
            if family == "TensorFlow 1" and mode == "mirrored":
                continue  # its wrapper cannot be called in a tf.function under a strategy
            for workload in workloads.GRADIENTS:
                yield {"what": "step", "mode": mode, "family": family, "workload": workload}
            if mode != "eager" and family != "TensorFlow 1":
                for workload in workloads.MODELS:
                    yield {"what": "training step", "mode": mode, "family": family, "workload": workload}
    for mode in ("tf.function", "jit_compile"):
        for family in ("tf_keras legacy", "tf_keras"):
            yield {"what": "minimize", "mode": mode, "family": family, "workload": "4 x 4M"}
    for mode in ("tf.function", "eager"):
        for family in ("Keras 3", "tf_keras legacy"):
            yield {"what": "skipped step", "mode": mode, "family": family, "workload": "200 x 1k"}
    for workload in GROWTH:
        yield {"what": "growth", "mode": "tf.function", "family": "tf_keras legacy", "workload": workload}


def measure(cell: dict[str, str], seconds: float, **rounds: int) -> dict[str, Any]:
    """Returns the cell with its ratios to the bare optimizer."""
    if cell["what"] == "skipped step":
        names = [APPLIED, SKIPPED]
    elif cell["what"] == "growth":
        names = [contenders.BARE, contenders.OURS]
    elif cell["what"] == "minimize":
        names = [contenders.BARE_MINIMIZE, contenders.OURS_MINIMIZE, contenders.THEIRS_MINIMIZE]
    else:
        names = contenders.names(cell["family"])
    maker = {"training step": _training_step, "minimize": _minimize}.get(cell["what"], _step)
    times = clock.in_turns({name: _in_mode(maker, cell, name) for name in names}, seconds, **rounds)
    return {
        **cell,
        "bare_ms": round(1000 * statistics.median(times[names[0]].processor), 3),
        "ratios": clock.ratios(times, names[0]),
        "rounds": len(times[names[0]].wall),
        "load": clock.load(),
    }


def made(cell: dict[str, str], name: str) -> Callable[[], None]:
    """Returns one contender's step alone, neither traced nor compiled."""
    return _step(cell, name)


def _in_mode(maker: Callable[..., Callable[[], None]], cell: dict[str, str], name: str) -> Callable[[], None]:
    mode = cell["mode"]
    if mode != "mirrored":
        step = maker(cell, name)
        return step if mode == "eager" else tf.function(step, jit_compile=mode == "jit_compile")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        step = maker(cell, name)
    return tf.function(lambda: strategy.run(step))


def _optimizer(cell: dict[str, str], name: str) -> Any:
    return contenders.optimizer(cell["family"], name, compiled=cell["mode"] == "jit_compile")


def _step(cell: dict[str, str], name: str) -> Callable[[], None]:
    variables, optimizer = workloads.variables(cell["workload"]), _optimizer(cell, name)
    gradients = workloads.gradients(cell["workload"])
    if name == SKIPPED:
        gradients[-1] *= float("nan")
    # Held in variables: a function must not know their values.
    held = [tf.Variable(g.values if isinstance(g, tf.IndexedSlices) else g, trainable=False) for g in gradients]

    def step() -> None:
        contenders.scale(optimizer, name, tf.constant(1.0))
        given = [_as(gradient, tf.convert_to_tensor(value)) for gradient, value in zip(gradients, held)]
        contenders.apply(optimizer, name, given, variables)

    return step


def _as(like: Any, values: tf.Tensor) -> Any:
    return tf.IndexedSlices(values, like.indices, like.dense_shape) if isinstance(like, tf.IndexedSlices) else values


def _minimize(cell: dict[str, str], name: str) -> Callable[[], None]:
    variables, optimizer = workloads.variables(cell["workload"]), _optimizer(cell, name)
    held = [tf.Variable(g, trainable=False) for g in workloads.gradients(cell["workload"])]

    def loss() -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(variable * value) for variable, value in zip(variables, held)])

    def step() -> None:
        optimizer.minimize(loss, variables)

    return step


def _training_step(cell: dict[str, str], name: str) -> Callable[[], None]:
    (variables, loss), optimizer = workloads.model(cell["workload"]), _optimizer(cell, name)

    def step() -> None:
        with tf.GradientTape() as tape:
            scaled = contenders.scale(optimizer, name, loss())
        contenders.apply(optimizer, name, tape.gradient(scaled, variables), variables)

    return step
