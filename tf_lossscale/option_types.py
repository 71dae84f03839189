"""Types of command-line options, for `argparse`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable


def whole_number(least: int) -> Callable[[str], int]:
    """Return a function that converts an option's text to an int, and rejects ints below `least`.

    >>> whole_number(1)("20")
    20

    Args:
        least: the smallest number that is allowed.

    Returns:
        A function for the `type` argument of `argparse.ArgumentParser.add_argument`.
    """

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number that is at least {least}, but got: {text}")

    return convert
