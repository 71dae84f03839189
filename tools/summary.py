"""A plugin of pytest for short output: a dot for every ten tests, and at the end the processor seconds of each folder.

The budgets are for the machine of CONTRIBUTING.md. On a slower machine they grow with the time of all tests. A folder
that takes more than three times its budget is a warning, or an error if the environment variable CI is set. A failed or
skipped test is printed as usual.
"""

import collections
import os
import resource
import sys
import time

import pytest

FACTOR = 3
# A folder's first tests also pay for imports and for the start of XLA.
LEAST = 10
# Folder -> processor seconds.
BUDGETS = {
    "tests": 65,
    "tests/amp": 15,
    "tests/conformance": 30,
    "tests/core": 11,
    "tests/defaults": 2,
    "tests/diagnosis": 5,
    "tests/graph_mode": 2,
    "tests/layers": 2,
    "tests/legacy": 8,
    "tests/libraries": 2,
    "tests/migrate/checkpoints": 6,
    "tests/migrate/codemod": 5,
    "tests/optimizers": 10,
    "tests/wrapper": 130,
    "tf_function_tests": 62,
}
# The unit of `ru_maxrss`.
UNIT = 1 if sys.platform == "darwin" else 1000
_last = 0.0


def pytest_collection_finish():
    """Count from here: imports and the collection belong to no folder."""
    global _last
    _last = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Add to each report what its process has used since the report before, and its highest memory so far."""
    global _last
    report = yield
    now = time.process_time()
    report.processor, _last = now - _last, now
    report.gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT / 1e9
    return report


class Summary:
    """Adds up the reports of all processes, and prints a table at the end."""

    def __init__(self):
        self.gigabytes = 0.0
        self.seconds, self.tests = collections.Counter(), collections.Counter()

    def pytest_runtest_logreport(self, report):
        """Add a report to its folder."""
        folder = report.nodeid.partition("::")[0].rpartition("/")[0]
        self.seconds[folder] += report.processor
        self.tests[folder] += report.when == "call"
        self.gigabytes = max(self.gigabytes, report.gigabytes)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        """Print a dot only for every tenth test."""
        if report.when == "call" and report.passed and sum(self.tests.values()) % 10:
            return "passed", "", ""
        return None

    def above(self):
        """Return the folders that take more than their limit."""
        slowness = max(1.0, sum(self.seconds.values()) / max(1, sum(BUDGETS.get(name, 0) for name in self.seconds)))
        limits = {name: FACTOR * slowness * max(LEAST, BUDGETS.get(name, 0)) for name in self.seconds}
        return {name for name, seconds in self.seconds.items() if seconds > limits[name]}

    def pytest_sessionfinish(self, session):
        """Fail in CI if a folder is above its limit."""
        if self.above() and os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        """Print the table."""
        terminalreporter.section("processor seconds")
        for name, seconds in self.seconds.most_common():
            note = f": above {FACTOR} times its budget in tools/summary.py" if name in self.above() else ""
            budget = BUDGETS.get(name, 1)
            terminalreporter.line(f"{name:28}{self.tests[name]:6} tests {seconds:5.0f} s, budget {budget:3} s{note}")
        total = sum(self.seconds.values())
        terminalreporter.line(f"{total:.0f} s in all; a process used at most {self.gigabytes:.1f} GB of memory")


def pytest_configure(config):
    """Print the summary in the process that prints the results."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary())
