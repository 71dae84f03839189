"""`python -m benchmarks`: measures everything, cell by cell, and writes docs/performance.json as it goes.

    python -m benchmarks [--only "tf.function.*legacy"] [--seconds 6] [--json docs/performance.json]

A row of the file is replaced when its cell is measured anew; with the file come the tables and the plot of
docs/performance.md.
"""

import argparse
import gc
import json
import os
import pathlib
import re
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from benchmarks import costs, machine, report, steps

JSON = pathlib.Path(__file__).parents[1] / "docs" / "performance.json"


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints each row and saves all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression, searched for in 'what, mode, family, ...'")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the rounds of one cell")
    parser.add_argument("--rounds", type=int, default=7, help="the least number of rounds of a cell")
    parser.add_argument("--json", type=pathlib.Path, default=JSON)
    options = parser.parse_args(arguments)
    results = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
    results["machine"] = machine.description()
    wanted = [cell for cell in (*steps.cells(), *costs.cells()) if re.search(options.only, ", ".join(cell.values()))]
    if any(cell["mode"] == "mirrored" for cell in wanted):
        _have_two_cpus()
    for cell in wanted:
        where = costs if cell["what"] in ("tracing", "peak memory", "import") else steps
        row = where.measure(cell, options.seconds, least=options.rounds)
        print(report.line(row), flush=True)
        results["rows"] = [*(old for old in results["rows"] if not _same(old, cell)), row]
        _save(options.json, results)
        tf.keras.backend.clear_session()
        gc.collect()  # gigabytes of variables, in circles
    if options.json.with_suffix(".md").exists():
        report.renew(options.json.with_suffix(".md"), results)
        report.plot(options.json.with_suffix(".svg"), results)


def _have_two_cpus() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def _same(row: dict[str, Any], cell: dict[str, str]) -> bool:
    return all(row.get(key) == value for key, value in cell.items())


def _save(path: pathlib.Path, results: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
