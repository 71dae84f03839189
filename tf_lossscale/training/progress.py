"""Progress of a run, shown as a bar in a terminal, or as a line every few steps if the output is a file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tf_lossscale.libraries import optional

# A narrow terminal cuts off the end of the line, so the text and the step number come before the bar.
_BAR = "{desc} {n_fmt}/{total_fmt} {bar} [{elapsed}]"
_LINES = 10


@contextlib.contextmanager
def shown(name: str, first: int, total: int) -> Iterator[Callable[[str], None]]:
    """Show the progress of a run. Yield a function, which must be called after each step with a string to show.

    >>> import contextlib, sys
    >>> with contextlib.redirect_stderr(sys.stdout), shown("float32", 0, 20) as report:
    ...     for i in range(3):
    ...         report(f"loss={i}")
    float32: 2/20 loss=1

    Args:
        name: the name of the run.
        first: the number of steps that the run has already taken.
        total: the number of steps of the whole run.
    """
    if sys.stderr.isatty():
        with optional.load("tqdm", "train").tqdm(
            desc=name, initial=first, total=total, bar_format=_BAR, dynamic_ncols=True, file=sys.stderr
        ) as bar:

            def redraw(text: str) -> None:
                bar.set_description_str(f"{name}: {text}", refresh=False)
                bar.update()

            yield redraw
        return

    step, every = first, max(1, total // _LINES)

    def line(text: str) -> None:
        nonlocal step
        step += 1
        if step % every == 0 or step == total:
            print(f"{name}: {step}/{total} {text}", file=sys.stderr, flush=True)

    yield line
