"""`make release-check`: runs all checks before a release one after another, and prints a table of their outcomes.

The outcome is "not possible" if this machine lacks a device, a library or a version of Python that a check needs. The
table and the output of each check are written to release-check/.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / "release-check"
PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible"


class Step(NamedTuple):
    """A check: a command, and optionally a target of the Makefile (`needs`) that must succeed before the command."""

    name: str
    command: Sequence[str]
    needs: str = ""


PYTHON = ".venv/bin/python"
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
NUMERIC = (*("tests/core", "tests/conformance", "tests/optimizers", "tests/amp", "tf_function_tests/test_promises.py"),)


def numeric(instructions: str, kernels: int, threads: int) -> Step:
    """Return a step that runs the numeric tests as another processor does, which rounds results in another way.

    Args:
        instructions: the newest instruction set that XLA may use.
        kernels: 1 to use the kernels of oneDNN, or 0.
        threads: the number of threads for each operation.
    """
    flags = (f"XLA_FLAGS=--xla_cpu_max_isa={instructions}", f"TF_ENABLE_ONEDNN_OPTS={kernels}")
    command = ("env", *flags, f"TF_NUM_INTRAOP_THREADS={threads}", *PYTEST, "-n", "auto", "--dist", "worksteal")
    return Step(f"processor {instructions}", (*command, "-m", "not tpu and not gpu", *NUMERIC))


STEPS = (
    Step("test", ("make", "test")),
    Step("slow tests", ("make", "test-all")),
    Step("exhaustive", ("make", "test-exhaustive")),
    numeric("SSE4_2", 0, 1),
    numeric("AVX2", 1, 8),
    numeric("AVX512", 0, 8),
    Step("TPU compiler", (*PYTEST, "-m", "tpu", "tf_function_tests"), needs=".venv/.tpu"),
    Step("GPU", (*PYTEST, "-rs", "-m", "gpu", "tf_function_tests")),
    Step("docs", ("make", "docs")),
    Step("dist", ("make", "dist")),
    Step("fuzz", (PYTHON, "-m", "tools.fuzz", "--minutes", "30")),
    Step("differential", (PYTHON, "-m", "tools.fuzz.differential", "--minutes", "30")),
)


def nox_steps() -> list[Step]:
    """Return a step for each session of nox. The session `installed` tests the wheel and the sdist."""
    listed = subprocess.run(["make", "--silent", "sessions"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = [session["session"] for session in json.loads(listed.stdout.splitlines()[-1])]
    report = str(OUT / "nox.json")
    return [Step(f"nox {name}", (".venv/bin/nox", "--session", name, "--report", report)) for name in names]


def run(step: Step) -> tuple[str, str]:
    """Run a step. Return its outcome and a line of text that explains the outcome."""
    log = OUT / f"{re.sub(r'[^a-zA-Z0-9.]+', '-', step.name).strip('-')}.log"
    report = OUT / "nox.json"
    report.unlink(missing_ok=True)
    with log.open("w") as output:
        for command in ([("make", step.needs)] if step.needs else []) + [step.command]:
            code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
            if code:
                break
    return outcome(code, log.read_text(), command[-1] == step.needs, report.read_text() if report.exists() else "")


def outcome(code: int, log: str, needed: bool = False, report: str = "") -> tuple[str, str]:
    """Return the outcome of a command and a line of text that explains it.

    The text is made of the lines that contain numbers of tests. Without such lines, it is the last line of the output.

    Args:
        code: the exit code.
        log: the output.
        needed: whether the command is the step's `needs` target, rather than the step's own command.
        report: the JSON report of nox, or an empty string.
    """
    lines = [line.strip(" =") for line in log.splitlines() if line.strip(" =")] or ["no output"]
    counts = [line for line in lines if re.search(r"\b\d+ (passed|failed|skipped|error|programs)", line)]
    line = "; ".join(counts) if counts else lines[-1]
    skipped_by_nox = report and [each["result"] for each in json.loads(report)["sessions"]] == ["skipped"]
    only_skipped = counts and not any(re.search(r"\d+ (passed|failed|error|programs)", each) for each in counts)
    if code and not needed:
        return FAILED, line
    if code or skipped_by_nox or only_skipped:
        return NOT_POSSIBLE, line
    return PASSED, "; ".join(counts)


def main() -> int:
    """Run the steps. Return 1 if one of them failed; otherwise return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression; run the steps whose names match")
    only = parser.parse_args().only
    OUT.mkdir(exist_ok=True)
    rows = ["| step | outcome | minutes | |", "|---|---|---|---|"]
    print("\n".join(rows), flush=True)
    for step in [*STEPS, *nox_steps()]:
        if re.search(only, step.name):
            start = time.monotonic()
            result, line = run(step)
            rows.append(f"| {step.name} | {result} | {(time.monotonic() - start) / 60:.1f} | {line} |")
            print(rows[-1], flush=True)
    (OUT / "STEPS.md").write_text("\n".join([*rows, ""]))
    return int(any(f"| {FAILED} |" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
