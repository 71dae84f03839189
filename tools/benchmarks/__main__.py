"""`python -m tools.benchmarks`: measures what a loss scale costs, and writes the tables of docs/performance.md.

    python -m tools.benchmarks [--only "step, tf.function"] [--seconds 3]

Each measurement is identified by four strings: its kind, a mode, an optimizer family and a workload. `--only` takes a
regular expression that is searched for in them, joined by ", ", and prints the results without changing the page.
"""

import argparse
import gc
import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tools.benchmarks import steps

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "performance.md"
MEMORY = "tf_keras legacy"


def main(arguments: list[str] | None = None) -> None:
    """Take the measurements and print them. Unless `--only` selects some of them, write them into the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression, searched for in 'what, mode, family, ...'")
    parser.add_argument("--seconds", type=float, default=3.0, help="the time for the rounds of one measurement")
    options = parser.parse_args(arguments)
    rows = []
    for cell in steps.cells():
        if re.search(options.only, ", ".join(cell.values())):
            rows.append(steps.measure(cell, options.seconds))
            print(line(rows[-1]), flush=True)
            gc.collect()
    if not options.only:
        renew(
            PAGE,
            {**tables(rows), "peak memory": memory(), "kept memory": kept(), "import": imports(), "machine": machine()},
        )


def line(row: dict[str, Any]) -> str:
    """Return a row of a table."""
    ratios = [f"{row['ratios'][name]:.2f}" for name in (steps.OURS, steps.THEIRS)]
    return _line(row["mode"], row["family"], row["workload"], f"{row['bare_ms']:.1f} ms", *ratios, row["rounds"])


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of times, by the names that they have on the page."""
    head = _head("mode", "Adam of", "what is trained", steps.BARE, steps.OURS, steps.THEIRS, "rounds")
    kinds = dict.fromkeys(row["what"] for row in rows)
    return {what: "\n".join([*head, *(line(row) for row in rows if row["what"] == what)]) for what in kinds}


def memory() -> str:
    """Measure the peak memory of a step on 16 variables of 16 million values, each wrapper in a process of its own."""
    code = "from tools.benchmarks import steps; print(steps.peak_memory({!r}, {!r}))"
    lines = _head("Adam of " + MEMORY, "peak")
    for name in (steps.BARE, steps.OURS, steps.THEIRS):
        lines.append(_line(name, f"{float(_printed(code.format(MEMORY, name))):.0f} MB"))
    return "\n".join(lines)


def kept() -> str:
    """Measure the memory that stays in use when models are made and dropped, each wrapper in a process of its own."""
    code = "from tools.benchmarks import steps; print(steps.kept_memory({!r}, {!r}))"
    wrappers = (steps.BARE, steps.OURS, steps.THEIRS)
    lines = _head("Adam of", *wrappers)
    for family in steps.FAMILIES:
        lines.append(_line(family, *(f"{float(_printed(code.format(family, name))):.0f} KB" for name in wrappers)))
    return "\n".join(lines)


def imports(times: int = 5) -> str:
    """Time `import tf_lossscale` and, after it, `import tensorflow`, in processes of their own."""
    code = "import time; a = time.process_time(); import tf_lossscale; b = time.process_time(); import tensorflow; "
    code += "print(b - a, time.process_time() - b)"
    pairs = [list(map(float, _printed(code).split())) for _ in range(times)]
    medians = [statistics.median(each) for each in zip(*pairs)]
    names = ("tf_lossscale", "tensorflow")
    return "\n".join([*_head("import", "takes"), *(_line(n, f"{1000 * m:.0f} ms") for n, m in zip(names, medians))])


def machine() -> str:
    """Return a sentence with the processor and the versions of Python and the libraries."""
    libraries = [f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "tf_keras")]
    models = re.findall(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    versions = f"{', '.join(libraries)}, Python {platform.python_version()}"
    return f"{models[0]}, {len(os.sched_getaffinity(0))} cores; {versions}."


def renew(page: pathlib.Path, found: dict[str, str]) -> None:
    """Replace the parts of a page between comments such as `<!-- step -->` and `<!-- end -->`."""
    text = page.read_text()
    for name, table in found.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marks.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)
    page.write_text(text)


def _printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def _head(*cells: str) -> list[str]:
    return [_line(*cells), _line(*["---"] * len(cells))]


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
