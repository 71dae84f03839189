"""A plugin of pytest that prints the processor seconds of each folder of tests beside its budget.

The option `budget` in pyproject.toml states the budgets, in seconds on the machine of CONTRIBUTING.md. Each folder may
take three times its budget, because other processors are slower. A folder above this limit is a warning, or an error if
the environment variable CI is set.
"""

import collections
import os
import resource
import time

import pytest

FACTOR = 3
_last = time.process_time()


def pytest_addoption(parser):
    """Add the option to pyproject.toml."""
    parser.addini("budget", "a line for each folder: the folder, and its processor seconds", type="linelist")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add to each report what the process has used since its previous report, and its highest memory so far."""
    global _last
    del item, call
    report = yield
    now = time.process_time()
    report.processor, _last = now - _last, now
    report.gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return report


class Table:
    """Adds up the reports of all processes, and prints the table at the end."""

    def __init__(self, budgets):
        self.budgets, self.seconds = budgets, collections.Counter()
        self.tests, self.gigabytes = collections.Counter(), 0.0

    def pytest_runtest_logreport(self, report):
        """Add a report to its folder."""
        folder = report.nodeid.rpartition("/")[0]
        self.seconds[folder] += report.processor
        self.tests[folder] += report.when == "call"
        self.gigabytes = max(self.gigabytes, report.gigabytes)

    def above(self):
        """Return the folders whose tests take more than the limit."""
        return [name for name, seconds in self.seconds.items() if seconds > FACTOR * self.budgets.get(name, 0)]

    def pytest_sessionfinish(self, session):
        """Fail in CI if a folder is above its limit."""
        if self.above() and os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        """Print the table."""
        terminalreporter.section("processor seconds")
        for name, seconds in sorted(self.seconds.items(), key=lambda each: -each[1]):
            note = f", more than {FACTOR} times its budget" if name in self.above() else ""
            budget = self.budgets.get(name, 0)
            terminalreporter.line(f"{name:28}{self.tests[name]:6} tests {seconds:7.0f} of {budget}{note}")
        total = sum(self.seconds.values())
        terminalreporter.line(f"all: {total:.0f} s; a process used at most {self.gigabytes:.1f} GB of memory")


def pytest_configure(config):
    """Print the table in the process that prints the results."""
    if not hasattr(config, "workerinput"):
        budgets = dict(line.split() for line in config.getini("budget"))
        config.pluginmanager.register(Table({name: int(seconds) for name, seconds in budgets.items()}))
