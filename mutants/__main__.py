"""Mutates one file of the package, runs the tests that belong to the file on each mutant, and prints the survivors.

The mutants are those of cosmic-ray. Each one is written into a copy of the project and tested by a process that is
forked after TensorFlow has been imported, because importing TensorFlow takes longer than most of the tests.
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
NOT_COPIED = (".git", ".venv", ".nox", "__pycache__", ".mypy_cache", "runs", "site", "build", "dist", "release-check")
MARKERS = "not slow and not exhaustive and not tpu and not gpu"

# Module -> tests in addition to tests/**/test_<module>.py and the module's doctests.
MORE_TESTS = {
    "core/scaling.py": ("tests/core/test_quotients.py",),
    "core/state.py": ("tests/wrapper/test_optimizer.py", "tests/wrapper/test_readings.py"),
    "core/step.py": ("tests/wrapper/test_contract.py", "tests/wrapper/test_gradient_handling.py"),
    "core/replicas.py": ("tf_function_tests/test_promises.py",),
    "core/diagnosis.py": ("tests/wrapper/test_readings.py",),
    "wrapper/update.py": ("tests/wrapper/test_contract.py", "tests/wrapper/test_gradient_handling.py"),
    "adapters/keras3.py": ("tests/test_families.py", "tests/test_fit.py"),
}

KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"


class Mutant(NamedTuple):
    """One change of the file."""

    number: int
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


def mutants(source: str) -> Iterator[Mutant]:
    """Yield the mutants of a module whose `meaning` differs from that of the module and of all earlier mutants."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    seen, number = {meaning(source)}, 0
    for name in operator_names():
        if "Variable" in name:  # these operators need the names of variables
            continue
        occurrence = 0
        while (changed := mutate_code(source, get_operator(name)(), occurrence)) is not None:
            occurrence += 1
            try:
                what = meaning(changed)
            except SyntaxError:
                continue
            if what not in seen:
                seen.add(what)
                yield Mutant(number, name.removeprefix("core/"), changed)
                number += 1


def tests_of(path: str) -> list[str]:
    """Return the tests that belong to a module: those with its name, those in MORE_TESTS, and its doctests."""
    inside = path.removeprefix("tf_lossscale/")
    own = sorted(str(each.relative_to(ROOT)) for each in ROOT.glob(f"tests/**/test_{pathlib.Path(path).name}"))
    return [*own, *MORE_TESTS.get(inside, ()), path]


def fork(folder: pathlib.Path, chosen: Sequence[str], limit: float) -> int:
    """Start a process that tests the package in a folder; return its id. It exits with pytest's status."""
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

        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants", "--doctest-modules"]
        status = pytest.main([*options, "-m", MARKERS, *chosen])
        sys.stdout.flush()
        os._exit(int(status))
    finally:
        os._exit(99)


def wait(folders: dict[int, tuple[Mutant | None, pathlib.Path]]) -> tuple[Mutant | None, pathlib.Path, str]:
    """Wait for one of the processes; return its mutant, its folder and the outcome."""
    process, status = os.wait()
    mutant, folder = folders.pop(process)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return mutant, folder, TIMED_OUT
    return mutant, folder, SURVIVED if os.waitstatus_to_exitcode(status) == 0 else KILLED


def copy_of_the_project(folder: pathlib.Path) -> pathlib.Path:
    """Copy the project to a new folder; return the folder."""
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))


def run_all(path: str, chosen: Sequence[str], work: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant with its outcome.

    Raises:
        SystemExit: the tests fail on the unchanged file.
    """
    with tempfile.TemporaryDirectory() as temporary:
        idle = [copy_of_the_project(pathlib.Path(temporary, str(i))) for i in range(jobs)]
        start = time.monotonic()
        running: dict[int, tuple[Mutant | None, pathlib.Path]] = {fork(idle[0], chosen, 3600): (None, idle[0])}
        _, folder, outcome = wait(running)
        if outcome != SURVIVED:
            raise SystemExit(f"The tests fail without a mutation:\n{(folder / 'output').read_text()[-3000:]}")
        limit = 60 + 10 * (time.monotonic() - start)
        waiting = collections.deque(work)
        while waiting or running:
            if waiting and idle:
                mutant, folder = waiting.popleft(), idle.pop()
                (folder / path).write_text(mutant.source)
                running[fork(folder, chosen, limit)] = (mutant, folder)
                continue
            done, folder, outcome = wait(running)
            idle.append(folder)
            assert done is not None
            yield done, outcome


def changed_lines(old: str, new: str) -> str:
    """Return the changed lines, without context."""
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    return "\n".join(f"    {line}" for line in lines)


def import_libraries() -> None:
    """Import the libraries that the tests import, so that every fork has them, but not the package to mutate."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    sys.dont_write_bytecode = True  # two mutants of one size written within a second would share a .pyc file
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


def main() -> int:
    """Run the command line; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("file", help="a module, for example tf_lossscale/core/rules.py")
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes")
    parser.add_argument("--sample", type=int, help="test this many mutants, drawn with the seed 0")
    parser.add_argument("--only", help="test only the mutants with these numbers: 3,14")
    parser.add_argument("--tests", nargs="+", help="run these tests instead of those that belong to the file")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    path = str(pathlib.Path(arguments.file).resolve().relative_to(ROOT))
    source = (ROOT / path).read_text()
    work = list(mutants(source))
    total = len(work)
    if arguments.only:
        work = [work[int(number)] for number in arguments.only.split(",")]
    if arguments.sample and arguments.sample < len(work):
        work = sorted(random.Random(0).sample(work, arguments.sample))
    chosen = arguments.tests or tests_of(path)
    print(f"{path}: {len(work)} of {total} mutants, tested by {' '.join(chosen)}")
    import_libraries()
    outcomes: collections.Counter[str] = collections.Counter()
    for mutant, outcome in run_all(path, chosen, work, arguments.jobs):
        outcomes[outcome] += 1
        if outcome == SURVIVED:
            print(f"survivor {mutant.number}, {mutant.operator}:\n{changed_lines(source, mutant.source)}")
        if outcomes.total() % 20 == 0:
            print(f"{outcomes.total()} of {len(work)}", file=sys.stderr)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return int(outcomes[SURVIVED] > 0)


if __name__ == "__main__":
    sys.exit(main())
