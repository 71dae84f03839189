"""What `seen` calls a fault is one, and nothing else is."""

import logging
import sys
import warnings

import pytest
import tensorflow as tf
from absl import logging as absl_logging

from tests.defaults.seen import screen, seen


def in_file(path, text):
    exec(compile(text, path, "exec"), {"__name__": path})


FAULTS = {
    "a long line": (lambda: print(81 * "x"), "81 columns"),
    "a long line on stderr": (lambda: print(81 * "x", file=sys.stderr), "81 columns"),
    "a long line that is redrawn": (lambda: print(81 * "x", end="\rshort\n"), "81 columns"),
    "a private name": (lambda: print("call _state.assign"), "a private name"),
    "a traceback": (lambda: print("Traceback (most recent call last):"), "a traceback"),
    "a warning": (lambda: warnings.warn("careful", stacklevel=1), "UserWarning"),
    "a warning of NumPy": (
        lambda: in_file("numpy.py", "import numpy as n; n.float32(1e38) * n.float32(10)"),
        "overflow",
    ),
    "a deprecation for the user": (
        lambda: in_file("<script>", "import warnings; warnings.warn('old', DeprecationWarning)"),
        "DeprecationWarning",
    ),
    "a deprecation for this package": (
        lambda: in_file("/x/tf_lossscale/a.py", "import warnings; warnings.warn('old', DeprecationWarning)"),
        "DeprecationWarning",
    ),
    "a log line": (lambda: logging.getLogger("some").warning("careful"), "WARNING of some: careful"),
    "a log line of absl": (lambda: absl_logging.warning("careful"), "careful"),
    "a log line of TensorFlow": (lambda: tf.get_logger().warning("careful"), "careful"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_seen(case):
    run, fault = FAULTS[case]
    with seen() as what:
        run()
    assert any(fault in each for each in what.faults())
    assert what.faults(fault) == []


def test_what_should_be_there_is_no_fault():
    with seen() as what:
        print(80 * "x")
        print(3 * (50 * "-" + "\r"), end="\n", file=sys.stderr)
        print("\x1b[32m" + 80 * "x" + "\x1b[0m __init__ in training_step")
        in_file("/x/another/a.py", "import warnings; warnings.warn('old', DeprecationWarning)")
        logging.getLogger("some").info("news")
    assert [fault for fault in what.faults() if "columns" not in fault] == []
    assert [width for _, width in what.lines] == [80, 50, 80 + len(" __init__ in training_step"), 0]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_the_streams_are_a_terminal_inside_and_their_own_after(name):
    before = getattr(sys, name)
    with pytest.raises(KeyError), seen() as what:
        assert getattr(sys, name).isatty()
        print("inside")
        raise KeyError
    assert getattr(sys, name) is before
    assert what.text == "inside\n"


def test_a_deprecation_of_tensorflow_is_seen_each_time():
    for _ in range(2):
        with seen() as what:
            tf.compat.v1.disable_resource_variables  # noqa: B018 - deprecated when it is called
            tf.compat.v1.to_float(1)
        assert "to_float" in "".join(what.faults())


def test_the_screen_is_that_of_a_terminal():
    assert screen("ab\rc\nde\b\bf") == [("cb", 2), ("fe", 2)]
    assert screen("one\ntwo\n\x1b[2Athree\x1b[K\x1b[1m!\x1b[0m") == [("three!", 6), ("two", 3), ("", 0)]
