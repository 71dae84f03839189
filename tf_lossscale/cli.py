"""The `tf-lossscale` command: finds the subcommand's module and runs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from tf_lossscale import __version__
from tf_lossscale.writing import printable

# Maps each subcommand to a module and a help text. The module defines `add_arguments(parser)` and `run(arguments)`, and
# is imported only if the subcommand is used. If `run` raises an ImportError, OSError or ValueError, `main` prints it.
_COMMANDS = {
    "inspect": ("tf_lossscale.migrate.checkpoints.inspect_command", "show what a checkpoint or model holds"),
    "migrate": (
        "tf_lossscale.migrate.codemod.command",
        "rewrite code of TensorFlow 1.13 to 2.15 to this package's API",
    ),
    "run": (
        "tf_lossscale.legacy.run",
        "run a script or module written for TensorFlow 1.13 to 2.15, with the old names of loss scaling; graph code "
        "of TensorFlow 1 must use tf.compat.v1 with disable_v2_behavior()",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand of `tf-lossscale`. Errors are printed to stderr."""
    if argv is None and sys.argv[1:2] != ["run"]:
        # The log messages of TensorFlow's C++ code describe its build and the machine, and would only clutter the
        # output. A program that `run` starts chooses its own log level.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    try:
        code = _run(argv)
        _flush()
    except KeyboardInterrupt:
        return 130
    except (ImportError, OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            print(f"tf-lossscale {argv[0]}: {printable(str(error))}", file=sys.stderr)
        with contextlib.suppress(OSError):
            _flush()
        return 2
    return code


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("tf-lossscale", description="Loss scaling for float16 training in TensorFlow.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, (module, purpose) in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if name in argv[:1]:
            importlib.import_module(module).add_arguments(command)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    return importlib.import_module(_COMMANDS[arguments.command][0]).run(arguments)


def _open_missing_streams() -> None:
    """Open the null device for each standard stream with which the process was not started.

    Otherwise, the next file that is opened gets the stream's file descriptor, and TensorFlow's C++ code logs to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open until the end


def _flush() -> None:
    """Flush stdout. If that fails, redirect stdout to the null device, so that Python does not exit with code 120."""
    if sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError:
        # A replaced sys.stdout may have no file descriptor.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        raise


if __name__ == "__main__":
    sys.exit(main())
