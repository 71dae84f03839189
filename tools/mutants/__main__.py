"""Mutates files of the package, runs the tests that belong to the files on each mutant, and prints the survivors.

The mutants are those of cosmic-ray. Each one is written into a copy of the project and tested by a process that is
forked after TensorFlow has been imported, because importing TensorFlow takes longer than most of the tests. The process
runs only the tests that execute the changed statement, the quickest first, and ends at the first failure.
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import functools
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tools.mutants import covering

ROOT = pathlib.Path(__file__).parents[2]
NOT_COPIED = (
    *(".git", ".venv", ".venv-record", ".nox", "__pycache__", ".mypy_cache", "runs", "site", "build", "dist"),
    "release-check",
)
MARKERS = "not slow and not exhaustive and not tpu and not gpu"

# Folder of the package -> tests in addition to those in the folder of the same name and to the doctests of the module.
MORE_TESTS = {
    "core": ("tests/wrapper", "tf_function_tests/test_promises.py"),
    "wrapper": ("tests/test_families.py", "tf_function_tests/test_promises.py"),
    "families": ("tests/wrapper", "tests/test_families.py", "tests/test_fit.py"),
}

KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"


class Mutant(NamedTuple):
    """One change of a file."""

    path: str
    number: int  # among those of the file
    operator: str
    source: str


class _WithoutAnnotations(ast.NodeTransformer):
    """Drops annotations and blocks for type checkers. A mutant that differs only there is the same program."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.AST]:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "not TYPE_CHECKING"):
            return []
        return self.generic_visit(node)


def meaning(source: str) -> str:
    """Return the part of a module's syntax tree that a running program depends on.

    >>> meaning("def f(x: int | None): return x") == meaning("def f(x: int + None): return x")
    True
    """
    return ast.dump(_WithoutAnnotations().visit(ast.parse(source)))


@functools.cache
def places(source: str) -> list[tuple[str, int]]:
    """Return the operators of cosmic-ray, each with the numbers of the occurrences that it can change in a text."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, found = list(ast_nodes(get_ast(source))), []
    for name in operator_names():
        if "Variable" not in name:  # those operators need the names of variables
            operator = get_operator(name)()
            count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
            found += [(name, occurrence) for occurrence in range(count)]
    return found


def mutants(source: str, path: str, numbers: Sequence[int] | None = None) -> Iterator[Mutant]:
    """Yield the mutants of a module whose `meaning` differs from that of the module and of all earlier mutants.

    Args:
        source: the module's text.
        path: the module's file.
        numbers: which of the `places` to change; None for all.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    seen, found = {meaning(source)}, places(source)
    for number in range(len(found)) if numbers is None else numbers:
        name, occurrence = found[number]
        try:
            changed = mutate_code(source, get_operator(name)(), occurrence)
            what = meaning(changed)
        except SyntaxError:
            continue
        if what not in seen:
            seen.add(what)
            yield Mutant(path, number, name.removeprefix("core/"), changed)


def sampled(sources: Mapping[str, str], count: int, seed: int) -> Iterator[Mutant]:
    """Yield this many mutants of modules, drawn at random, each part of which is a sample, too.

    Args:
        sources: the modules' texts, by file.
        count: the largest number of mutants.
        seed: of the random numbers.
    """
    all_places = [(path, number) for path, source in sources.items() for number in range(len(places(source)))]
    random.Random(seed).shuffle(all_places)
    drawn: collections.defaultdict[str, set[str]] = collections.defaultdict(set)
    for path, number in all_places:
        for mutant in mutants(sources[path], path, [number]):
            if mutant.source not in drawn[path]:
                drawn[path].add(mutant.source)
                yield mutant
                count -= 1
        if count == 0:
            return


def tests_of(path: str) -> list[str]:
    """Return the tests that belong to a module: those of its folder, those in MORE_TESTS, and its doctests."""
    folder = pathlib.Path(path).relative_to("tf_lossscale").parts[0].removesuffix(".py")
    own = [f"tests/{folder}"] if (ROOT / "tests" / folder).is_dir() else []
    return [*(own + [*MORE_TESTS.get(folder, ())] or ["tests"]), path]


class Job(NamedTuple):
    """Some tests of some mutant, or of the unchanged package."""

    mutant: Mutant | None
    folder: pathlib.Path
    tests: Sequence[str] = ()


def fork(
    folder: pathlib.Path,
    tests: Sequence[str],
    limit: float,
    measured_paths: Sequence[str] = (),
    cases: int | None = None,
) -> int:
    """Start a process that tests the package in a folder; return its id. It exits with pytest's status.

    Args:
        folder: a copy of the project.
        tests: files; or single tests, which run in this order.
        limit: the number of seconds after which the process ends.
        measured_paths: files whose executed lines to measure.
        cases: the largest number of cases of each parametrized test to run; None for all.
    """
    process = os.fork()
    if process:
        return process
    try:
        signal.alarm(max(1, int(limit)))  # ends the process
        os.chdir(folder)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path[:] = [str(folder), *(each for each in sys.path if each not in ("", str(ROOT)))]
        for name in [each for each in sys.modules if each.partition(".")[0] in ("tests", "conftest", "tf_lossscale")]:
            del sys.modules[name]
        import pytest

        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        plugins: list[Any] = [covering.Chosen(tests)] if files != list(tests) else []
        if cases:
            plugins.append(covering.Fewer(cases))
        if measured_paths:
            plugins.append(covering.Measurement(folder, measured_paths, folder / "measured"))
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants", "--doctest-modules"]
        status = pytest.main([*options, "-m", MARKERS, *files], plugins=plugins)
        sys.stdout.flush()
        os._exit(int(status))
    finally:
        os._exit(99)


def wait(running: dict[int, Job]) -> tuple[Job, str]:
    """Wait for one of the processes; return what it tested, and the outcome."""
    process, status = os.wait()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return running.pop(process), TIMED_OUT
    survived = os.waitstatus_to_exitcode(status) in (0, 5)  # pytest's exit codes: all tests passed; no tests ran
    return running.pop(process), SURVIVED if survived else KILLED


def measure(folder: pathlib.Path, paths: Sequence[str], tests: Sequence[str], cases: int | None) -> str:
    """Run tests on the unchanged package; return which lines of the files each test executes, as JSON.

    Raises:
        SystemExit: a test fails.
    """
    _, outcome = wait({fork(folder, tests, 7200, paths, cases): Job(None, folder)})
    if outcome != SURVIVED:
        raise SystemExit(f"The tests fail without a mutation:\n{(folder / 'output').read_text()[-3000:]}")
    return (folder / "measured").read_text()


def copy_of_the_project(folder: pathlib.Path) -> pathlib.Path:
    """Copy the project to a new folder; return the folder."""
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))


def write(file: pathlib.Path, source: str) -> None:
    """Replace the text of a module, and delete its bytecode: texts of one size within a second would share it."""
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def run_all(
    folders: Sequence[pathlib.Path],
    sources: dict[str, str],
    work: Iterator[Mutant],
    measured: covering.Measured,
    seconds: float,
) -> Iterator[tuple[Job, str]]:
    """Yield each mutant with its outcome.

    Args:
        folders: copies of the project, one for each process.
        sources: the texts of the files, by path.
        work: the mutants.
        measured: the run without mutants.
        seconds: how long the tests of one mutant may take together, by their durations in the run without mutants.
    """
    idle, running = list(folders), dict[int, Job]()
    for mutant in work:
        tests = covering.quickest(sources[mutant.path], mutant.source, mutant.path, measured, seconds)
        if not tests:
            yield Job(mutant, folders[0]), SURVIVED
            continue
        if not idle:
            yield _finished(running, sources, idle)
        folder = idle.pop()
        write(folder / mutant.path, mutant.source)
        limit = 60 + 10 * sum(measured.seconds[test] for test in tests)
        running[fork(folder, tests, limit)] = Job(mutant, folder, tests)
    while running:
        yield _finished(running, sources, idle)


def _finished(running: dict[int, Job], sources: Mapping[str, str], idle: list[pathlib.Path]) -> tuple[Job, str]:
    done, outcome = wait(running)
    assert done.mutant is not None
    write(done.folder / done.mutant.path, sources[done.mutant.path])
    idle.append(done.folder)
    return done, outcome


def changed_lines(old: str, new: str) -> str:
    """Return the changed lines, without context."""
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    return "\n".join(f"    {line}" for line in lines)


def failed_test(output: str) -> str:
    """Return the name of the test that failed, from pytest's output.

    >>> failed_test("...\\nFAILED tests/test_a.py::test_b - assert 1 == 2\\n")
    'tests/test_a.py::test_b'
    """
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else "no test; the process ended"


def import_libraries() -> None:
    """Import the libraries that the tests import, so that every fork has them, but not the package to mutate."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    import hypothesis
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import sonnet  # noqa: F401
    import tensorflow as tf
    import tf_keras  # noqa: F401

    _ = tf.keras.optimizers
    # A failing example kills the mutant; shrinking it would take most of the time.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, database=None, phases=phases)


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", help="modules, for example tf_lossscale/core/rules.py")
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes")
    parser.add_argument("--sample", type=int, help="test this many mutants of all files together, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--only", help="test only the mutants with these numbers: 3,14. For one file.")
    parser.add_argument("--tests", nargs="+", help="run these tests instead of those that belong to the files")
    parser.add_argument("--cases", type=int, help="run at most this many cases of each parametrized test")
    parser.add_argument(
        "--measured", help="a file for what each test executes; if it exists, the tests are not measured"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="test a mutant for at most about this long")
    arguments = parser.parse_args()
    if arguments.only and len(arguments.files) > 1:
        parser.error("argument --only: the numbers are those of one file, but there are several files")
    return arguments


def main() -> int:
    """Run the command line; return 1 if a mutant survived."""
    arguments = parsed()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    paths = [str(pathlib.Path(file).resolve().relative_to(ROOT)) for file in arguments.files]
    sources = {path: (ROOT / path).read_text() for path in paths}
    if arguments.sample:
        work = sampled(sources, arguments.sample, arguments.seed)
    else:
        only = [int(number) for number in arguments.only.split(",")] if arguments.only else None
        work = (mutant for path, source in sources.items() for mutant in mutants(source, path, only))
    chosen = arguments.tests or list(dict.fromkeys(test for path in paths for test in tests_of(path)))
    print(f"tested by {' '.join(chosen)}")
    import_libraries()
    outcomes: dict[str, collections.Counter[str]] = {path: collections.Counter() for path in paths}
    with tempfile.TemporaryDirectory() as temporary:
        folders = [copy_of_the_project(pathlib.Path(temporary, str(i))) for i in range(arguments.jobs)]
        stored = pathlib.Path(arguments.measured or temporary + "/measured")
        if not stored.exists():
            stored.write_text(measure(folders[0], paths, chosen, arguments.cases))
        measured = covering.read(stored)
        for job, outcome in run_all(folders, sources, work, measured, arguments.seconds):
            mutant = job.mutant
            assert mutant is not None
            outcomes[mutant.path][outcome] += 1
            print(f"{mutant.path} {mutant.number} {outcome}", end=" ")
            if outcome == KILLED:
                print(f"by {failed_test((job.folder / 'output').read_text())}")
            else:
                print(f"{len(job.tests)} tests: {mutant.operator}")
                print(changed_lines(sources[mutant.path], mutant.source))
    for path, counts in outcomes.items():
        print(f"{path}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return int(any(counts[SURVIVED] for counts in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
