"""The `tf-lossscale convert` subcommand."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap

_EXIT_CODES = """\
exit code:
  0  all went well
  2  bad arguments, or a file could not be read, converted or written; the
     output folder is as it was
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tf-lossscale convert`.

    Args:
        parser: the parser of the subcommand.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    parser.add_argument("path", metavar="CKPT", help="any file or folder that `tf-lossscale inspect` reads")
    what = "the library of the optimizer that will continue the training"
    parser.add_argument("--to", required=True, choices=("keras3", "tf_keras"), help=what)
    what = "needed for TensorFlow 1 optimizers, whose files do not contain it"
    parser.add_argument("--learning-rate", type=float, metavar="RATE", help=what)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to create")


def run(arguments: argparse.Namespace) -> int:
    """Run `tf-lossscale convert`.

    Args:
        arguments: the parsed arguments; see `add_arguments`.

    Returns:
        The exit code, 0.

    Raises:
        ImportError: an optional library is missing.
        OSError: a file cannot be read or written.
        ValueError: the file is damaged, or its optimizer cannot be converted.
    """
    from tf_lossscale.migrate.checkpoints.convert import convert

    for each in convert(arguments.path, arguments.to, arguments.out, arguments.learning_rate):
        restored = each.restored
        scaled = ""
        if restored.loss_scale is not None:
            scaled = f", loss scale {restored.loss_scale:g}, counter {restored.dynamic_counter}"
        _say(f"{each.path}: {each.construct}")
        _say(f"  iterations {'not in the file' if restored.iterations is None else restored.iterations}{scaled}")
        _say(f"  built for {', '.join(each.variables) or 'any variables'}")
        for note in restored.notes:
            _say(f"  note: {note}")
    print(f"written to {arguments.out}")
    return 0


def _say(line: str) -> None:
    """Print a line, wrapped at word boundaries in a terminal and unwrapped in a pipe."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        # The added space lets `textwrap` break a line of code after an opening bracket.
        spaced = line.replace("(", "( ")
        folded = textwrap.fill(spaced, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        line = folded.replace("( ", "(")
    print(line)
