"""Runs functions in child processes, which can be killed or denied system resources during fuzz tests."""

import functools
import multiprocessing
import os
import signal
import sys
import time
import traceback

PATIENCE = 300  # seconds
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    # The fork server imports TensorFlow once, without starting TensorFlow's threads, which would not survive a fork.
    context.set_forkserver_preload(["fuzz.saves"])
    return context


def run(function, *arguments, killed_at=None, killed_after=None, may_crash=False):
    """Call a function in a fresh process, and kill the process if requested.

    Args:
        function: a module-level function whose first argument is a callback `begin`. The process is killed only after
            the function has called `begin()`.
        *arguments: the function's remaining arguments. The first of them is the directory to which the function writes.
        killed_at: the number of file operations, such as open or rename, that the process may perform in the directory
            between the call to `begin()` and the kill.
        killed_after: the number of seconds between the call to `begin()` and the kill.
        may_crash: whether a segmentation fault in the process is treated like a kill.

    Returns:
        None if the process was killed; otherwise the function's result.

    Raises:
        AssertionError: the function raised an error, or the process crashed or did not end in time.
    """
    mine, other = _context().Pipe()
    process = _context().Process(target=_child, args=(other, function, arguments, killed_at))
    process.start()
    other.close()
    answer = None
    deadline = time.monotonic() + PATIENCE
    try:
        while mine.poll(max(0.0, deadline - time.monotonic())):
            kind, answer = mine.recv()
            if kind == "returned":
                return answer
            assert kind == "began", answer
            if killed_after is not None:
                time.sleep(killed_after)
                process.kill()
    except EOFError:
        process.join()
        ends = (-signal.SIGKILL, -signal.SIGSEGV) if may_crash else (-signal.SIGKILL,)
        assert process.exitcode in ends, f"{function.__name__} ended with exit code {process.exitcode}"
        return None
    finally:
        process.kill()
        process.join()
        mine.close()
    raise AssertionError(f"the child process that runs {function.__name__} has not ended after {PATIENCE} seconds")


def _child(connection, function, arguments, killed_at):
    def begin():
        if killed_at is not None:
            _die_at(killed_at, str(arguments[0]))
        connection.send(("began", None))

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        connection.send(("returned", function(begin, *arguments)))
    except BaseException:
        connection.send(("raised", traceback.format_exc()))
    connection.close()
    # Unlike sys.exit, os._exit does not wait for threads.
    os._exit(0)


def _die_at(count, directory):
    seen = []

    def hook(event, arguments):
        if event in _EVENTS and str(arguments[0]).startswith(directory):
            seen.append(event)
            if len(seen) > count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
