"""Programs that need a process of their own."""

import os
import subprocess
import sys


def printed(*arguments, **environment):
    """Runs Python with some arguments in a new process, and returns what it prints. An error fails the test."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
