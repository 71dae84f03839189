"""What a user sees while a piece of code runs: a terminal of 80 columns, warnings and log lines."""

import contextlib
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import warnings

from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.util import deprecation

COLUMNS = 80

# What programs print without this package as well: TensorFlow's C++ code at import, and when it finds no GPU; tf_keras
# about float16 on a machine without one, and about callbacks after batches of a millisecond; tf.nest about the sets in
# Sonnet's modes of precision.
_OF_LIBRARIES = re.compile(
    r"WARNING: All log messages before absl::InitializeLog|[IWE]0000 00:00:|\d{4}-\d\d-\d\d [\d:.]+: [IWE] "
    r"|To enable the following instructions|.*Mixed precision compatibility check \(mixed_float16\)"
    r"|The dtype policy mixed_float16 may run slowly|If you will use compatible GPU"
    r"|Sets are not currently considered sequences"
    r"|(WARNING:tensorflow:)?Callback method `on_train_batch_end` is slow compared to the batch time"
)

# Python shows these to the author of a library, and not to the user of one.
_FOR_AUTHORS = (DeprecationWarning, PendingDeprecationWarning, ResourceWarning, ImportWarning)


class Seen:
    """What a user saw: `text` in the terminal, and `faults`, a sentence for each thing that should not be there."""

    def __init__(self):
        self.text = ""
        self.warnings = []
        self.records = []

    @property
    def lines(self):
        """The lines of the terminal: text, and the column that each reached before it was redrawn or ended."""
        return screen(self.text)

    def faults(self, expected=None):
        """Return a sentence for each fault. A warning or log line that matches the pattern `expected` is none."""
        lines = [each for each in self.lines if not _OF_LIBRARIES.match(each[0])]
        found = [f"{width} columns: {line!r}" for line, width in lines if width > COLUMNS and not _is_bar(line)]
        found += [f"a private name: {line!r}" for line, _ in lines if re.search(r"(?<![\w'\"/-])_[a-z]\w*", line)]
        found += [f"a traceback: {line!r}" for line, _ in lines if line.startswith("Traceback")]
        found += [f"a warning: {line!r}" for line, _ in lines if re.match(r"\S+:\d+: \w+: |W\d{4} |WARNING", line)]
        found += [
            f"{w.category.__name__} from {w.filename}:{w.lineno}: {w.message}"
            for w in self.warnings
            if not issubclass(w.category, _FOR_AUTHORS) or "tf_lossscale" in w.filename or w.filename.startswith("<")
        ]
        found += [
            f"{r.levelname} of {r.name}: {r.getMessage()}"
            for r in self.records
            if r.levelno >= logging.WARNING and not _OF_LIBRARIES.match(r.getMessage())
        ]
        return [fault for fault in found if expected is None or not re.search(expected, fault)]


def _is_bar(line):
    return re.fullmatch(r"\s*\d+/(\d+|Unknown) (━+ |\[[=>.]+\] - ).*( - \w+: [-+.e\d]+)*\s*", line) is not None


def screen(text):
    """Return the lines of a terminal, each with the column that was reached in it.

    Characters are written as a terminal without a right margin writes them. It knows carriage return, backspace, and
    of the escape sequences "cursor up" and "erase the rest of the line"; it drops the others.
    """
    lines, row, column = [[]], 0, 0
    widths = {}
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]|\x1b", text):
        if piece == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append([])
        elif piece == "\r":
            column = 0
        elif piece == "\b":
            column = max(column - 1, 0)
        elif piece.startswith("\x1b"):
            if piece.endswith("A"):
                row = max(row - int(piece[2:-1] or 1), 0)
            elif piece.endswith("K"):
                del lines[row][column:]
        else:
            lines[row] += " " * (column - len(lines[row]) + 1)
            lines[row][column] = piece
            column += 1
            widths[row] = max(widths.get(row, 0), column)
    return [("".join(line), widths.get(number, 0)) for number, line in enumerate(lines)]


@contextlib.contextmanager
def terminal():
    """Yield (a new pseudo-terminal of 80 columns as a descriptor, a function that ends it and returns its text)."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.ONLCR  # a line feed stays one
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    read = []

    def drain():
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(master, 65536):
                read.append(data)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()

    def text():
        os.close(slave)
        reader.join(60)
        return b"".join(read).decode(errors="replace")

    try:
        yield slave, text
    finally:
        os.close(master)


class _Keep(logging.Handler):
    def __init__(self, records):
        super().__init__()
        self._records = records

    def emit(self, record):
        self._records.append(record)


@contextlib.contextmanager
def seen():
    """Yield a `Seen`, which is complete at the end of the block. stdout and stderr are a terminal inside."""
    what = Seen()
    loggers = [logging.getLogger(name) for name in (None, "absl", "tensorflow")]
    keep = _Keep(what.records)
    # TensorFlow logs a deprecation once in a process, and counts retracing in all of it. Each block is the first.
    deprecation._PRINTED_WARNING.clear()
    polymorphic_function._frequent_tracing_detector_manager._detectors.clear()
    with terminal() as (slave, text), contextlib.ExitStack() as undo:
        for number, name in ((1, "stdout"), (2, "stderr")):
            getattr(sys, name).flush()
            before = os.dup(number)
            undo.callback(os.close, before)
            undo.callback(os.dup2, before, number)
            os.dup2(slave, number)
            stream = os.fdopen(os.dup(slave), "w", buffering=1, encoding="utf-8")
            undo.callback(setattr, sys, name, getattr(sys, name))
            undo.callback(stream.close)
            setattr(sys, name, stream)
        for logger in loggers:
            logger.addHandler(keep)
            undo.callback(logger.removeHandler, keep)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield what
            finally:
                undo.close()
                what.text = text()
                what.warnings += caught
                what.records[:] = {id(record): record for record in what.records}.values()


def process(command, folder, environment):
    """Run a command in a terminal of its own, and return (its exit code, a `Seen`)."""
    what = Seen()
    with terminal() as (slave, text):
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        code = subprocess.run(command, cwd=folder, env=environment, **streams, timeout=1500).returncode
        what.text = text()
    return code, what
