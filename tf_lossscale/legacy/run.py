"""The `tf-lossscale run` subcommand, which runs `python` with the old names in place."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

_STARTUP = pathlib.Path(__file__).parent / "startup"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tf-lossscale run`."""
    parser.usage = "%(prog)s [-h] SCRIPT [ARG ...]\n       %(prog)s [-h] -m MODULE [ARG ...]"
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script to run, and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process with a `python` process that runs the program.

    The `sitecustomize` module in `startup` calls `install` when Python starts. The Python processes that the program
    starts inherit PYTHONPATH, so they have the old names too.
    """
    # argparse ends the arguments of `-m` at the first "--", and stores the rest as the script's.
    words = [*(arguments.module or ()), *arguments.script]
    if not words:
        raise ValueError("nothing to run. Call tf-lossscale run SCRIPT [ARG ...] or run -m MODULE [ARG ...].")
    # An empty entry in PYTHONPATH would stand for the current folder.
    path = os.pathsep.join(filter(None, [str(_STARTUP), os.environ.get("PYTHONPATH")]))
    option = [] if arguments.module is None else ["-m"]
    os.execve(sys.executable, [sys.executable, *option, *words], {**os.environ, "PYTHONPATH": path})
