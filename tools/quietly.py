"""`python -m tools.quietly PROGRAM ...`: runs a program without the lines that TensorFlow prints when it starts.

TensorFlow prints some of these lines before it reads TF_CPP_MIN_LOG_LEVEL.
"""

import contextlib
import os
import runpy
import sys


@contextlib.contextmanager
def without_stderr():
    """Discard what the process writes to its standard error in a `with` block, also from C++."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)


def main():
    """Import TensorFlow, and run the program that is named first among the arguments."""
    with without_stderr():
        import tensorflow as tf

        tf.config.list_logical_devices()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
