"""Runs the steps that `export_steps.py` wrote on JAX's default device, compares, and times; needs jax and numpy only.

    python run_steps_on_jax.py DIRECTORY [--no-times]

Prints the device, then per step the conditionals of the compiled program and the largest difference from TensorFlow's
results on the CPU, then per family the time of a wrapped and a bare step. Exits with 1 if a difference is too large.
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
REPEATS, ROUNDS = 20, 9


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

    def on_device(self, values):
        return [jax.device_put(value, self._device) for value in values]

    def __call__(self, parameters):
        """The parameters after the step, of which those that it wrote are new, and the loss."""
        results = self._executable.execute_sharded(parameters).disassemble_into_single_device_arrays()
        after = list(parameters)
        for output, parameter in self._written.items():
            after[parameter] = results[output][0]
        return after, results[0][0]


def made_by_seed(parameters):
    """Values for a large step: weights that keep the signal's size, a state as in mid-training."""
    rng = np.random.default_rng(0)
    made = []
    for name, shape, dtype, scalar in parameters:
        if shape:
            value = rng.standard_normal(shape, np.float32) * np.float32(1 if name == "batch" else shape[-1] ** -0.5)
            made.append(np.abs(value) if re.search(r"/v|v/|velocity", name) else value)
        else:
            made.append(np.asarray(2.0**10 if "loss_scale" in name else scalar, dtype))
    return made


def compare(step, program, stored):
    """The largest difference between a step's results and the stored ones, and the names that differ by too much."""
    count = len(step["parameters"])
    after, loss = program(program.on_device([stored[f"in_{i}"] for i in range(count)]))
    results = [("loss", loss, stored["loss"])]
    results += [(step["parameters"][i][0], after[i], stored[f"out_{i - 1}"]) for i in range(1, count)]
    worst, wrong = 0.0, []
    for name, mine, theirs in results:
        mine = np.asarray(mine)
        if theirs.dtype.kind == "f" and "loss_scale" not in name:
            worst = max(worst, float(np.max(np.abs(mine - theirs))))
            same = np.allclose(mine, theirs, rtol=RELATIVE, atol=ABSOLUTE)
        else:
            same = np.array_equal(mine, theirs)
        if not same:
            wrong.append(name)
    return worst, wrong


def rounds(programs):
    """Milliseconds a step, per program a list with one value per round; the programs take turns."""
    parameters = {name: program.on_device(made_by_seed(listed)) for name, (program, listed) in programs.items()}
    taken = {name: [] for name in programs}
    for i in range(ROUNDS + 1):
        for name, (program, _) in programs.items():
            jax.block_until_ready(parameters[name])
            start = time.perf_counter()
            for _ in range(REPEATS):
                parameters[name], loss = program(parameters[name])
            jax.block_until_ready([parameters[name], loss])
            if i:  # the first round warms up
                taken[name].append(1e3 * (time.perf_counter() - start) / REPEATS)
            if not np.isfinite(np.asarray(loss)):
                raise SystemExit(f"{name}: the loss is not finite, so the times say nothing")
    return taken


def main(directory, times):
    """Returns the exit status."""
    jax.config.update("jax_enable_x64", True)  # counters are int64
    device = jax.devices()[0]
    print(f"device: {device.device_kind} ({device.platform}), jax {jax.__version__}")
    failed, timed = False, {}
    for step in json.loads((directory / "steps.json").read_text()):
        name = step["name"]
        program = Program((directory / f"{step['program']}.stablehlo").read_text(), device)
        said = f"{name}: {program.conditionals} conditionals, {program.callbacks} host callbacks"
        if step.get("timed"):
            timed.setdefault(name.rpartition("-")[0], {})[name] = program, step["parameters"]
            wrong = []
        else:
            worst, wrong = compare(step, program, np.load(directory / f"{name}.npz"))
            said += f", largest difference {worst:.2e}{', WRONG: ' + ', '.join(wrong) if wrong else ''}"
        failed = failed or bool(wrong) or program.callbacks > 0
        print(said, flush=True)
    for family, programs in timed.items() if times else ():
        taken = rounds(programs)
        for name, times in taken.items():
            print(f"{name}: {statistics.median(times):.3f} ms a step (rounds {min(times):.3f} to {max(times):.3f})")
        ratios = [a / b for a, b in zip(taken[f"{family}-wrapped"], taken[f"{family}-bare"])]
        print(f"{family}: a wrapped step takes {statistics.median(ratios):.3f} of a bare one", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), times="--no-times" not in sys.argv))
