"""Compares this package's Adafactor with Keras 3's Adafactor and Adam and with PyTorch's Adafactor.

    python -m tools.benchmarks.adafactor [--repetitions 30]

Measures the time of a step and the size of the optimizer's state. All optimizers run in one process. Each round times
one step of every optimizer; the order rotates. The last column of the table is the time of this package's Adafactor
divided by the time of Keras 3's Adafactor, as the median over the rounds. The state sizes of the TensorFlow optimizers
exclude `iterations` and the learning rate.

PyTorch is measured if torch is installed. PyTorch's steps always run eagerly, even in the table rows for `tf.function`
and XLA.
"""

import argparse
import importlib.util
import os
import platform
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# OMP_WAIT_POLICY=passive keeps PyTorch's idle threads from spinning while other libraries are timed.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tensorflow as tf

from tf_lossscale.optimizers import Adafactor
from tools.benchmarks import clock

WORKLOADS = {
    "100 x (256,)": [(256,)] * 100,
    "100 x (64, 32)": [(64, 32)] * 100,
    "20 x (3, 3, 64, 64)": [(3, 3, 64, 64)] * 20,
    "2 x (2048, 2048)": [(2048, 2048)] * 2,
}
MODES = ("eager", "tf.function", "jit_compile")
OURS, PEER = "tf-lossscale", "Keras 3's"
MAKERS = {
    OURS: lambda: Adafactor(lr=1e-3),
    "foreach": lambda: Adafactor(lr=1e-3, foreach=True),
    PEER: lambda: tf.keras.optimizers.Adafactor(1e-3),
    "Adam": lambda: tf.keras.optimizers.Adam(1e-3),
}
TORCH = "PyTorch's"


def contender(make, shapes, mode):
    """Return a pair: a function that performs one optimizer step, and the size of the optimizer's state in bytes."""
    variables = [tf.Variable(tf.random.normal(shape)) for shape in shapes]
    gradients = [tf.random.normal(shape) for shape in shapes]
    optimizer = make()
    optimizer.build(variables)

    def step(gradients):
        optimizer.apply_gradients(zip(gradients, variables))

    called = step if mode == "eager" else tf.function(step, jit_compile=mode == "jit_compile")
    kept = [v.value for v in optimizer.variables if v.name not in ("iteration", "learning_rate")]
    return lambda: called(gradients), sum(value.shape.num_elements() * value.dtype.size for value in kept)


def torch_contender(shapes):
    """Return a pair: a function that performs one step of PyTorch's Adafactor, and the size of its state in bytes."""
    import torch

    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    optimizer = torch.optim.Adafactor(parameters, lr=1e-3)
    optimizer.step()
    kept = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    return optimizer.step, sum(tensor.numel() * tensor.element_size() for tensor in kept)


def kilobytes(size):
    return f"{size / 1000:,.0f} kB"


def main(arguments=None):
    """Print a table of times and a table of state sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    arguments = parser.parse_args(arguments)
    torch = [TORCH] if importlib.util.find_spec("torch") else []
    names = [*MAKERS, *torch]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}\n")
    print(f"| parameters | mode | {' | '.join(names)} | time of tf-lossscale : Keras 3's |")
    print("|---|---|" + "---|" * (len(names) + 1))
    states = {}
    for workload in arguments.workloads:
        shapes = WORKLOADS[workload]
        for mode in arguments.modes:
            made = {name: contender(make, shapes, mode) for name, make in MAKERS.items()}
            made.update({name: torch_contender(shapes) for name in torch})
            states[workload] = {name: size for name, (_, size) in made.items()}
            times = clock.in_turns({name: step for name, (step, _) in made.items()}, 0, least=arguments.repetitions)
            seconds = {name: statistics.median(each.wall) for name, each in times.items()}
            ratio = clock.ratios(times, PEER)[OURS]["wall"]
            cells = " | ".join(f"{1000 * seconds[name]:.1f} ms" for name in names)
            print(f"| {workload} | {mode} | {cells} | {ratio:.2f} |", flush=True)
    print(f"\n| parameters | size | state: {' | '.join(names)} |")
    print("|---|---|" + "---|" * len(names))
    for workload, sizes in states.items():
        own = sum(4 * tf.TensorShape(shape).num_elements() for shape in WORKLOADS[workload])
        print(f"| {workload} | {kilobytes(own)} | {' | '.join(kilobytes(sizes[name]) for name in names)} |")


if __name__ == "__main__":
    main()
