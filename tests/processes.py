"""Programs that need a process of their own."""

import os
import subprocess
import sys


def call(command, cwd=None, **environment):
    """Runs a command in a new process, and returns its exit code and its output as text."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def printed(*arguments, **environment):
    """Runs Python with some arguments in a new process, and returns what it prints. An error fails the test."""
    done = call([sys.executable, *arguments], **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
