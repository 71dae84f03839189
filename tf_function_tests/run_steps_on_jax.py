"""Runs the steps that `export_steps.py` wrote on JAX's default device and compares; needs jax and numpy only.

    python run_steps_on_jax.py DIRECTORY

Prints the device, then per step the conditionals of the compiled program and the largest difference from TensorFlow's
results on the CPU. Then it prints how long the updates take with each wrapper, in relation to the bare optimizer. Exits
with 1 if a difference is too large, or if a program calls the host.
"""

import json
import pathlib
import re
import statistics
import sys
import time

import jax
import numpy as np

# Devices sum float16 products in other orders. Weights move by 0.1 in a step of Adam and are about 0.2 in size.
RELATIVE, ABSOLUTE = 2e-2, 2e-3


class Program:
    """A compiled step: takes the batch and the variables' values, returns the loss and the values after the step."""

    def __init__(self, text, device):
        self._device = device
        self._executable = device.client.compile_and_load(text, [device])
        # "output k takes the place of parameter p", as the text says: a variable that the step writes.
        aliases = re.findall(r"parameter_number = (\d+) : i64}, output_index = array<i64(?:: (\d+))?>", text)
        self._written = {int(output or 0): int(parameter) for parameter, output in aliases}
        hlo = "\n".join(module.to_string() for module in self._executable.hlo_modules())
        self.conditionals = len(re.findall(r"\bconditional\(", hlo))
        self.callbacks = len(re.findall(r"outfeed|callback", hlo))

    def __call__(self, values):
        """The values after the step, and the loss. The program may reuse the memory of values on the device."""
        after = [value if isinstance(value, jax.Array) else jax.device_put(value, self._device) for value in values]
        results = self._executable.execute_sharded(after).disassemble_into_single_device_arrays()
        for output, parameter in self._written.items():
            after[parameter] = results[output][0]
        return after, results[0][0]


def compare(program, stored):
    """The largest difference between a step's results and the stored ones, and the names that differ by too much."""
    names = stored["names"]
    after, loss = program([stored[f"in_{i}"] for i in range(len(names))])
    results = [("loss", loss, stored["loss"])]
    results += [(name, after[i], stored[f"out_{i}"]) for i, name in enumerate(names) if name != "batch"]
    worst, wrong = 0.0, []
    for name, mine, theirs in results:
        mine = np.asarray(mine)
        if theirs.dtype.kind == "f" and "loss_scale" not in name:
            worst = max(worst, float(np.max(np.abs(mine - theirs), where=~np.isnan(theirs), initial=0.0)))
            same = np.allclose(mine, theirs, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
        else:
            same = np.array_equal(mine, theirs)
        if not same:
            wrong.append(str(name))
    return worst, wrong


def arguments(types):
    """Values for a program's arguments of these shapes, dtypes and scalars."""
    rng, made = np.random.default_rng(0), []
    for shape, dtype, value in types:
        random = shape and np.dtype(dtype).kind == "f"
        made.append(np.abs(0.05 * rng.standard_normal(shape, dtype)) if random else np.full(shape, value or 0, dtype))
    return made


def seconds(programs, values, rounds=15):
    """The median time of each program. The programs take turns."""
    times = [[] for _ in programs]
    for _ in range(rounds):
        for i, program in enumerate(programs):
            jax.block_until_ready(values[i])
            begin = time.perf_counter()
            values[i], _ = program(values[i])
            jax.block_until_ready(values[i])
            times[i].append(time.perf_counter() - begin)
    return [*map(statistics.median, times)]


def print_times(directory, device):
    """Print a line for each workload and wrapper: the time of a step. Each program takes a number of steps."""
    for bare in sorted(directory.glob("*, bare.json"), reverse=True):
        workload = bare.name.split(",")[0]
        texts = sorted(directory.glob(f"{workload}, *.stablehlo"), key=lambda path: not path.stem.endswith("bare"))
        programs = [Program(path.read_text(), device) for path in texts]
        described = [json.loads(path.with_suffix(".json").read_text()) for path in texts]
        values = [program(arguments(each["types"]))[0] for each, program in zip(described, programs)]
        times = seconds(programs, values)
        for path, duration, program, after in zip(texts, times, programs, values):
            said = f"{duration / described[0]['steps'] * 1e3:.3f} ms, {duration / times[0]:.3f} of bare"
            said += f", {program.conditionals} conditionals, {program.callbacks} host callbacks"
            finite = all(np.all(np.isfinite(value)) for value in after)
            counts = [np.asarray(value).tolist() for value in after if value.dtype == np.int64]
            print(f"{path.stem}: {said}, finite: {finite}, counts: {counts}", flush=True)


def main(directory):
    """Returns the exit status."""
    jax.config.update("jax_enable_x64", True)  # counters are int64
    device = jax.devices()[0]
    print(f"device: {device.device_kind} ({device.platform}), jax {jax.__version__}")
    failed = False
    for path in sorted(directory.glob("*.npz")):
        program = Program((directory / f"{path.stem.partition('-')[0]}.stablehlo").read_text(), device)
        worst, wrong = compare(program, np.load(path))
        said = f"{path.stem}: {program.conditionals} conditionals, {program.callbacks} host callbacks"
        said += f", largest difference {worst:.2e}{', WRONG: ' + ', '.join(wrong) if wrong else ''}"
        failed = failed or bool(wrong) or program.callbacks > 0
        print(said, flush=True)
    print_times(directory, device)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
