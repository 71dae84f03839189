"""`python -m benchmarks.ablation`: the gain of each trick of `core/fast`, measured with only that trick switched off.

    python -m benchmarks.ablation [--only "tf.function.*4M"] [--seconds 3]

A number is the time of the step without the trick, divided by the time of the same step with all tricks. The contenders
alternate in one process. Measure steps over replicas in a separate process: `--only mirrored`, and
`--only "^(?!.*mirrored)"` for the others.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from benchmarks import __main__ as main_lib
from benchmarks import clock, contenders, steps, workloads
from tf_lossscale.core import fast

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
#: The tricks that have an effect in each mode.
TRICKS = {
    "eager": ("stacks", "sum first"),
    "tf.function": ("stacks", "late unscaling", "one at a time", "one call", "sum first"),
    "jit_compile": ("late unscaling", "loop", "product"),
    "mirrored": ("stacks", "stacked sums", "stacks through merge_call", "sum first"),
}
FAMILIES = ("Keras 3", "tf_keras legacy")


def cells() -> list[dict[str, str]]:
    """Returns the steps that are measured."""
    shapes = [("step", shape) for shape in ("200 x 1k", workloads.RESNET, "4 x 4M")]
    models = [("training step", model) for model in workloads.MODELS]
    return [
        {"what": what, "mode": mode, "family": family, "workload": workload}
        for mode, family, (what, workload) in itertools.product(TRICKS, FAMILIES, [*shapes, *models])
    ]


def measure(cell: dict[str, str], seconds: float) -> dict[str, float]:
    """Returns each trick's ratio."""
    ready: dict[str, Callable[[], object]] = {}
    for trick in (None, *TRICKS[cell["mode"]]):
        with switched_off(trick):
            step = steps.in_mode(cell, contenders.OURS)
            step()
        ready[trick or "all"] = _without(trick, step) if cell["mode"] == "eager" else step
    ratios = clock.ratios(clock.in_turns(ready, seconds), "all")
    return {name: ratio["processor"] for name, ratio in ratios.items() if name != "all"}


def switched_off(trick: str | None) -> contextlib.AbstractContextManager[None]:
    """Switches one trick off, or none."""
    return fast.without(trick) if trick else contextlib.nullcontext()


def _without(trick: str | None, step: Callable[[], object]) -> Callable[[], object]:
    def eager() -> None:
        with switched_off(trick):
            step()

    return eager


def main() -> None:
    """Measures cells and prints the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    wanted = [cell for cell in cells() if re.search(options.only, ", ".join(cell.values()))]
    if any(cell["mode"] == "mirrored" for cell in wanted):
        main_lib._have_two_cpus()
    rows: list[dict[str, Any]] = []
    for cell in wanted:
        ratios = measure(cell, options.seconds)
        rows.append({**cell, "ratios": ratios})
        print(", ".join(cell.values()), ratios, flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
