"""The `tf-lossscale probe` subcommand, which reports whether a float32 program's gradients would fit in float16."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import os
import pathlib
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from tf_lossscale import option_types
from tf_lossscale.legacy.changes import Changes
from tf_lossscale.precision import records
from tf_lossscale.precision.report import PrecisionReport
from tf_lossscale.precision.report_text import whether_float16_fits

_EVERY = 10

# Maps each module of Keras and tf_keras that defines a base class of optimizers to the name of that class. Keras 3 has
# no `legacy.optimizer_v2` module, so the entry `keras.src.optimizers.legacy.optimizer_v2` has no effect.
_PLACES = {
    f"{package}.src.optimizers.{module}": name
    for package in ("keras", "tf_keras")
    for module, name in (("optimizer", "Optimizer"), ("legacy.optimizer_v2", "OptimizerV2"))
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tf-lossscale probe`.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> arguments = parser.parse_args(["--every", "5", "train.py", "--epochs", "3"])
    >>> arguments.every, arguments.script
    (5, ['train.py', '--epochs', '3'])

    Args:
        parser: the parser of the subcommand.
    """
    options = "%(prog)s [-h] [--every N] [--out FOLDER]"
    parser.usage = f"{options} SCRIPT [ARG ...]\n       {options} -m MODULE [ARG ...]"
    what = "count the gradients in one of every N steps; the report shows the last count (default: %(default)s)"
    parser.add_argument("--every", type=option_types.whole_number(1), default=_EVERY, metavar="N", help=what)
    what = "folder to write the counts to, for tf-lossscale plot"
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help=what)
    add_program(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `tf-lossscale probe`.

    Args:
        arguments: the parsed arguments; see `add_arguments`.

    Returns:
        The exit code of the program, or 2 if the program succeeded but no gradient was counted.
    """
    with every_optimizer_probed(arguments.every) as probes:
        try:
            code = run_program(arguments, "probe")
        except SystemExit as stop:
            code = _code(stop)
    counted = _report(probes, arguments.out)
    return code if counted else code or 2


@contextlib.contextmanager
def every_optimizer_probed(every: int) -> Iterator[dict[str, Any]]:
    """Count the gradients by exponent for each Keras optimizer that takes a step inside the `with` block.

    >>> with every_optimizer_probed(1) as probes:
    ...     import tensorflow as tf
    ...     optimizer = tf.keras.optimizers.SGD(name="first")
    ...     _ = optimizer.apply_gradients([(tf.constant([0.5]), tf.Variable([1.0]))])
    >>> probes["first"].precision_report().total.values
    1

    Args:
        every: the number of steps from one count of gradients to the next.

    Yields:
        A dict with an entry for each optimizer that took a step. The key is the optimizer's name. The value is its
        `Probe`, or None if the optimizer already scales its loss.
    """
    patches, probes = Changes(), _Probes(every)
    for module, name in _PLACES.items():
        patches.when_imported(module, functools.partial(probes.watch, name))
    try:
        with probes.entered:
            yield probes.by_name
    finally:
        patches.undo()


class _Probes:
    def __init__(self, every: int):
        self.by_name: dict[str, Any] = {}
        self.entered = contextlib.ExitStack()
        self._every = every
        # The optimizers that took a step, by id. The dict keeps each optimizer alive, so no other object can get the
        # same id.
        self._known: dict[int, Any] = {}

    def watch(self, name: str, patches: Changes, module: types.ModuleType) -> None:
        """Patch an optimizer class so that the gradients of each instance are counted from its first step on."""
        cls: Any = getattr(module, name)
        methods = {method: getattr(cls, method) for method in ("apply", "apply_gradients") if hasattr(cls, method)}
        patches.put(cls, {method: self._watched(original) for method, original in methods.items()})

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        # This import loads TensorFlow, so it is done as late as possible.
        from tf_lossscale.core.graphs import do_not_convert

        @do_not_convert
        @functools.wraps(method)
        def watched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(method, optimizer)
            if id(optimizer) not in self._known:
                self._known[id(optimizer)] = optimizer
                probe = self._enter(optimizer)
                if probe is not None:
                    # The probe has replaced the optimizer's methods, but the current step is already running the
                    # original method. Wrap this method explicitly, so that the current step is counted too.
                    bound = probe.method(bound)
            return bound(*args, **kwargs)

        return watched

    def _enter(self, optimizer: Any) -> Any:
        from tf_lossscale.families import registry as families
        from tf_lossscale.monitoring.probing import probe

        name = self._free_name(getattr(optimizer, "name", None) or type(optimizer).__name__)
        if families.scales_losses(optimizer) or families.is_wrapped(optimizer):
            inner = getattr(optimizer, "inner_optimizer", None)
            self._known[id(inner)] = inner
            self.by_name[name] = None
            return None
        self.by_name[name] = self.entered.enter_context(probe(optimizer, self._every))
        return self.by_name[name]

    def _free_name(self, name: str) -> str:
        names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
        return next(each for each in names if each not in self.by_name)


def _report(probes: dict[str, Any], out: pathlib.Path | None) -> bool:
    """Print a report for each optimizer. Return whether any report was printed."""
    any_printed = False
    if not probes:
        _say("no Keras 3 or tf_keras optimizer took a step. For other optimizers, use tf_lossscale.probe(optimizer).")
    for name, probe in probes.items():
        if probe is None:
            _say(
                f"{name} scales its loss already. Wrap its inner optimizer in LossScaleOptimizer(inner, "
                'diagnose="exponents"), and read precision_report().'
            )
            continue
        try:
            report = probe.precision_report()
        except (ValueError, RuntimeError) as error:
            _say(f"{name}: {error}")
            continue
        any_printed = True
        _print(name, report)
        if out is not None:
            folder = out if len(probes) == 1 else out / name
            report.write(folder)
            print(f"wrote {folder / records.FILE}, which tf-lossscale plot {folder} draws")
    return any_printed


def _print(name: str, report: PrecisionReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"\n{name}", markup=False)
    console.print(report)
    console.print(f"\n{whether_float16_fits(report)}", markup=False)


def _say(message: str) -> None:
    print(f"tf-lossscale probe: {message}", file=sys.stderr)


def _code(stop: SystemExit) -> int:
    """Return the exit code that Python would use for this SystemExit. Print its message if it has one."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that specify a program: a script or a module, and the program's own arguments.

    >>> parser = argparse.ArgumentParser()
    >>> add_program(parser)
    >>> parser.parse_args(["-m", "trainer", "--epochs", "3"]).module
    ['trainer', '--epochs', '3']

    Args:
        parser: the subcommand's parser.
    """
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script to run, and its arguments")


def run_program(arguments: argparse.Namespace, command: str) -> int:
    """Run a script or module as `python` would, with the same `sys.argv`, `__main__`, exit code and traceback.

    Args:
        arguments: a namespace. Its `module` attribute is a list: the name of a module, then the module's arguments. If
            this list is empty, its `script` attribute is a list: the path of a script, then the script's arguments.
        command: the name of the calling subcommand, for messages.

    Returns:
        The exit code: 0 if the program succeeds, 1 after an uncaught exception, 130 after Ctrl-C, and 1 or 2 if the
        program does not exist. An uncaught exception is printed.

    Raises:
        SystemExit: the script raised it.
    """
    words = arguments.module or arguments.script
    if words[:1] == ["--"]:
        print(f"tf-lossscale {command}: the -- before the script is not needed.", file=sys.stderr)
        words = words[1:]
    if not words:
        usage = f"Call tf-lossscale {command} SCRIPT [ARG ...] or {command} -m MODULE [ARG ...]."
        return _fail(f"{command}: nothing to run. {usage}", 2)
    if arguments.module:
        return _run_module(words[0], words[1:])
    return _run_script(words[0], words[1:])


def _run_script(path: str, arguments: list[str]) -> int:
    sys.argv = [path, *arguments]
    is_folder = os.path.isdir(path)
    if is_folder or zipfile.is_zipfile(path):
        content: Any = pathlib.Path(path) if is_folder else zipfile.Path(path)
        if not any((content / name).exists() for name in ("__main__.py", "__main__.pyc")):
            if is_folder:
                return _fail(f"{path!r} is a folder without a __main__.py. Pass a script, or -m and a module.", 2)
            return _fail(f"there is no __main__.py in {path!r}. Name the script to run.", 1)
        _look_first_in(path)
        return _as_python(lambda: runpy.run_path(path, run_name="__main__"), skip=_is_of_runpy)
    _look_first_in(os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        return _fail(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", 2)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main

    def execute() -> None:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    return _as_python(execute, skip=lambda frame: frame.f_code is execute.__code__)


def _run_module(name: str, arguments: list[str]) -> int:
    _look_first_in(os.getcwd())
    sys.argv = ["-m", *arguments]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        return _fail(f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})", 1)
    if spec is None:
        return _fail(f"No module named {name}", 1)
    return _as_python(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), skip=_is_of_runpy)


def _look_first_in(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _as_python(execute: Callable[[], Any], skip: Callable[[types.FrameType], bool]) -> int:
    """Run the program by calling `execute`. If it raises an exception, print the traceback without our own frames."""
    try:
        execute()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and (trace.tb_frame.f_code is _as_python.__code__ or skip(trace.tb_frame)):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _is_of_runpy(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__") in ("runpy", __name__)


def _fail(message: str, code: int) -> int:
    print(f"tf-lossscale: {message}", file=sys.stderr)
    return code
