"""The `tf-lossscale run` subcommand, which calls `install` and then runs a script or module."""

from __future__ import annotations

import argparse
import importlib.util
import io
import multiprocessing.spawn
import os
import pathlib
import runpy
import sys
import types
import zipfile
from collections.abc import Callable
from typing import Any

from tf_lossscale.legacy.hints import hint
from tf_lossscale.legacy.install import install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tf-lossscale run`.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["train.py", "--epochs", "3"]).script
    ['train.py', '--epochs', '3']

    Args:
        parser: the parser of the subcommand.
    """
    parser.usage = "%(prog)s [-h] SCRIPT [ARG ...]\n       %(prog)s [-h] -m MODULE [ARG ...]"
    add_program(parser)


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


def run(arguments: argparse.Namespace) -> int:
    """Call `install`, then run a script or module as `python` would.

    Args:
        arguments: the parsed arguments; see `add_arguments`.

    Returns:
        The exit code of `run_program`.

    Raises:
        SystemExit: the script raised it.
    """
    install()
    _install_in_spawned_processes()
    return run_program(arguments, "run")


def run_program(arguments: argparse.Namespace, command: str) -> int:
    """Run a script or module as `python` would, with the same `sys.argv`, `__main__`, exit code and traceback.

    Args:
        arguments: a namespace. Its `module` attribute is a list: the name of a module, then the module's arguments. If
            this list is empty, its `script` attribute is a list: the path of a script, then the script's arguments.
        command: the name of the calling subcommand, for messages.

    Returns:
        The exit code: 0 if the program succeeds, 1 after an uncaught exception, 130 after Ctrl-C, and 1 or 2 if the
        program does not exist. An uncaught exception is printed, with a hint if its cause is known.

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


def _install_in_spawned_processes() -> None:
    """Make each process that multiprocessing spawns call `install` before it imports the program."""
    multiprocessing.spawn.get_command_line = _spawning_with_old_names


_usual_command_line = multiprocessing.spawn.get_command_line


def _spawning_with_old_names(**kwargs: Any) -> list[str]:
    command = _usual_command_line(**kwargs)
    # The command line of a frozen executable contains no "-c".
    if "-c" in command:
        code = command.index("-c") + 1
        command[code] = f"import tf_lossscale; tf_lossscale.install(); {command[code]}"
    return command


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
        text = hint(error)
        if text is not None:
            print(f"tf-lossscale: {text}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _is_of_runpy(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__") in ("runpy", __name__)


def _fail(message: str, code: int) -> int:
    print(f"tf-lossscale: {message}", file=sys.stderr)
    return code
