"""`python -m benchmarks`: takes measurements, and saves each result in docs/performance.json.

    python -m benchmarks [--only "tf.function.*legacy"] [--missing [SINCE]] [--seconds 3] [--list]

Each measurement is identified by four strings: its kind (such as "step" or "tracing"), a mode (such as "eager"), an
optimizer family and a workload. `--only` takes a regular expression, which is searched for in the four strings, joined
by ", ". A repeated measurement replaces its earlier row in docs/performance.json. At the end, the tables and the plot
in docs/performance.md are updated. `--missing` skips the measurements that docs/performance.json already contains,
except failed ones. `--missing SINCE` skips only measurements that were taken at or after the UTC time SINCE.

Run the measurements with several replicas in a separate process: `--only "^[^,]+, mirrored"` selects them, and
`--only "^[^,]+, (?!mirrored)"` selects all other measurements.
"""

import argparse
import datetime
import gc
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# OMP_WAIT_POLICY=passive keeps PyTorch's idle threads from spinning while other libraries are timed.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tensorflow as tf

from benchmarks import beside, contenders, costs, machine, report, steps

JSON = pathlib.Path(__file__).parents[1] / "docs" / "performance.json"


def main(arguments: list[str] | None = None) -> None:
    """Take the selected measurements. Print each result, and save it in docs/performance.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression, searched for in 'what, mode, family, ...'")
    parser.add_argument("--list", action="store_true", help="print the measurements and when they were taken, and stop")
    parser.add_argument("--long", action="store_true", help="include the measurements whose first step takes minutes")
    parser.add_argument(
        "--missing",
        nargs="?",
        const="",
        metavar="SINCE",
        help="take only measurements that are not in the file, or not since a UTC time such as 2026-01-31T15:00",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="the time for the rounds of one measurement")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further measurement after this time")
    parser.add_argument("--rounds", type=int, default=7, help="the minimum number of rounds of a measurement")
    parser.add_argument("--json", type=pathlib.Path, default=JSON)
    options = parser.parse_args(arguments)
    results = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
    wanted = [
        cell
        for cell in (*steps.cells(), *costs.cells(), *beside.cells())
        if re.search(options.only, ", ".join(cell.values()))
    ]
    wanted = [
        cell for cell in wanted if contenders.installed(cell["family"]) and (options.long or not steps.long(cell))
    ]
    if options.missing is not None:
        wanted = [cell for cell in wanted if not any(_done(row, cell, options.missing) for row in results["rows"])]
    if options.list:
        for cell in wanted:
            done = [row.get("measured", "before") for row in results["rows"] if _same(row, cell)]
            print(", ".join(cell.values()), *(f"({when})" for when in done))
        return
    results.setdefault("machine", machine.description())
    if any(cell["mode"] == "mirrored" for cell in wanted):
        _have_two_cpus()
    try:
        _measure(wanted, options, results)
    finally:
        if options.json.with_suffix(".md").exists():
            report.renew(options.json.with_suffix(".md"), results)
            report.plot(options.json.with_suffix(".svg"), results)


_MODULES = {beside.WHAT: beside, beside.FIRST_CALL: beside, **dict.fromkeys(costs.ALL, costs)}


def _measure(wanted: list[dict[str, str]], options: argparse.Namespace, results: dict[str, Any]) -> None:
    begun = time.perf_counter()
    for i, cell in enumerate(wanted):
        start = time.perf_counter()
        if start - begun > 60 * options.minutes:
            print(f"measurements left after {options.minutes:g} minutes: {len(wanted) - i}; continue with --missing")
            break
        where = _MODULES.get(cell["what"], steps)
        row = where.measure(cell, options.seconds, least=options.rounds)
        row["machine"] = machine.description()
        row["measured"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M")
        print(f"{time.perf_counter() - start:5.1f} s  {report.line(row)}", flush=True)
        results["rows"] = [*(old for old in results["rows"] if not _same(old, cell)), row]
        _save(options.json, results)
        tf.keras.backend.clear_session()
        # Variables in reference cycles occupy gigabytes until the garbage collector runs.
        gc.collect()


def _have_two_cpus() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def _same(row: dict[str, Any], cell: dict[str, str]) -> bool:
    return all(row.get(key) == value for key, value in cell.items())


def _done(row: dict[str, Any], cell: dict[str, str], since: str) -> bool:
    failed = "refused" in row and "ratios" not in row
    return _same(row, cell) and not failed and row.get("measured", "") >= since


def _save(path: pathlib.Path, results: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
