"""Which tests execute a mutated statement, so that a mutant is tested by those alone, the quickest first."""

from __future__ import annotations

import ast
import difflib
import json
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest


class Measured(NamedTuple):
    """What a run of the tests on the unchanged package found."""

    seconds: Mapping[str, float]  # test -> duration
    tests: Mapping[str, Mapping[int, Sequence[str]]]  # file -> line -> tests that execute the line; "" is an import


class Measurement:
    """A pytest plugin that writes a `Measured` to a file.

    Args:
        folder: the project's folder.
        paths: the files whose lines to measure, relative to the folder.
        output: the file to write.
    """

    def __init__(self, folder: pathlib.Path, paths: Sequence[str], output: pathlib.Path):
        import coverage

        self.folder, self.paths, self.output = folder, paths, output
        self.seconds: dict[str, float] = {}
        include = [str(folder / path) for path in paths]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=include, messages=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.monotonic() - start, 3)
            self.coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        tests = {path: data.contexts_by_lineno(str(self.folder / path)) for path in self.paths}
        self.output.write_text(json.dumps([self.seconds, tests]))


def read(output: pathlib.Path) -> Measured:
    """Read the file that a `Measurement` wrote."""
    seconds, tests = json.loads(output.read_text())
    return Measured(seconds, {path: {int(n): found for n, found in lines.items()} for path, lines in tests.items()})


class Chosen:
    """A pytest plugin that runs only certain tests, in a certain order.

    Args:
        tests: the names of the tests.
    """

    def __init__(self, tests: Sequence[str]):
        self.tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self.tests if name in by_name]


class Fewer:
    """A pytest plugin that runs at most some cases of each parametrized test, from the first to the last.

    Args:
        cases: the number of cases.
    """

    def __init__(self, cases: int):
        self.cases = cases

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        tests: dict[str, list[Any]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        items[:] = [item for each in tests.values() for item in each[:: -(-len(each) // self.cases)]]


def quickest(old: str, new: str, path: str, measured: Measured, limit: float) -> list[str]:
    """Return the tests that execute the changed statement of a file, the quickest first.

    A statement that runs at import is tested by all tests that execute anything in its class or file, and the default
    value of an argument by those that execute the function.

    Args:
        old: the file's text.
        new: the text of the mutant.
        path: the file.
        measured: the run without mutants.
        limit: the sum of the durations, in seconds, at which to stop. At least one test is returned if there is one.
    """
    lines = measured.tests.get(path, {})
    tests: set[str] = set()
    for scope in _scopes(ast.parse(old), _changed(old, new)):
        tests = {test for line in scope for test in lines.get(line, ()) if test}
        if tests:
            break
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda test: (measured.seconds[test], test)):
        total += measured.seconds[test]
        if chosen and total > limit:
            break
        chosen.append(test)
    return chosen


def _changed(old: str, new: str) -> set[int]:
    """Return the numbers of the lines of a text that another text does not have."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return {
        line for tag, i, j, _, _ in matcher.get_opcodes() if tag != "equal" for line in range(i + 1, max(i + 1, j) + 1)
    }


def _scopes(tree: ast.Module, changed: Collection[int]) -> list[range]:
    """Return the lines of the statement that contains changed lines, then of each scope around it."""
    scopes = [range(1, 1 + max(changed) + max((node.end_lineno or 0) for node in tree.body))]
    inner: ast.stmt | None = None
    for node in ast.walk(tree):  # outer nodes come before inner ones
        if isinstance(node, ast.stmt) and any(line in _lines(node) for line in changed):
            inner = node
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                scopes.insert(0, _lines(node))
    if inner is not None and not isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
        body = getattr(inner, "body", None)
        header = range(inner.lineno, body[0].lineno) if body else _lines(inner)
        scopes.insert(0, header if any(line in header for line in changed) else _lines(inner))
    return scopes


def _lines(node: ast.stmt) -> range:
    decorators = getattr(node, "decorator_list", [])
    return range(min([node.lineno, *(each.lineno for each in decorators)]), (node.end_lineno or node.lineno) + 1)
