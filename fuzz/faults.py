"""Injects faults on one computer. Saved files and the training state must survive, and variables must stay finite.

Each function in `FAULTS` takes a `random.Random` and an empty directory, and raises an AssertionError if it finds a
bug. If a fault cannot be injected on this computer, its function has a `why_not` attribute that contains the reason.
"""

import contextlib
import copy
import functools
import os
import pathlib
import pickle
import resource
import signal
import subprocess
import threading
import traceback

import numpy as np
import tensorflow as tf

from fuzz import children, saves
from fuzz.saves import FORMATS, STEPS, Trainee, assert_same, expected
from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer

NOBODY = 65534


def _a_format(random):
    name = random.choice(sorted(FORMATS))
    return name, random.choice(FORMATS[name])


def killed_while_saving(random, directory):
    """Kill a process while it saves. Earlier saves must be intact. Later saves must be either intact or unreadable."""
    name, kind = _a_format(random)
    begins = random.randint(2, STEPS)
    when = random.choice([{"killed_at": random.randrange(8)}, {"killed_after": random.uniform(0, 0.05)}])
    children.run(saves.train, directory, name, kind, begins, **when)
    assert_whole(name, kind, directory, count=begins - 1, what=f"{name}, {kind}, {when}")


def assert_whole(name, kind, directory, count, what):
    """Assert that the first `count` saves exist and are intact, and that later saves are intact or unreadable."""
    numbers = saves.saved_numbers(kind, directory)
    assert set(range(1, count + 1)) <= set(numbers), f"{what}: of {count} saves there are {numbers}"
    for i in numbers:
        trainee = Trainee(name)
        try:
            trainee.load(kind, directory, i)
        except Exception as error:
            assert i > count, f"{what}: save {i} cannot be read: {error!r}"
            continue
        assert_same(trainee.state(), expected(name)[i], f"{what}: save {i}")
        assert trainee.is_finite(), f"{what}: save {i}"


def _refused(begin, directory, name, kind, refuse):
    """Train, and call `refuse` after the third save, so that later saves fail. Training must not be affected."""
    trainee = Trainee(name)
    for i in range(STEPS):
        trainee.step(i)
        if i == 2:
            trainee.save(kind, directory, 3)
            begin()
            refuse(directory)
        if i > 2:
            before = trainee.state()
            # h5py raises errors of several types when a write fails.
            with contextlib.suppress(OSError, ValueError, RuntimeError, tf.errors.OpError):
                trainee.save(kind, directory, i + 1)
            assert_same(trainee.state(), before, f"{name}, {kind}: the state after a save that was refused")
    assert_same(trainee.state(), expected(name)[STEPS], f"{name}, {kind}: the state at the end")
    assert trainee.is_finite()


def small_files_only(random, directory):
    """Train and save with a limit on the size of every file (RLIMIT_FSIZE)."""
    name, kind = _a_format(random)
    most = random.choice([0, 100, 1000, 5000, 20000])
    children.run(_refused, directory, name, kind, functools.partial(_limit_files, most), may_crash=_is_hdf5(kind))
    assert_whole(name, kind, directory, count=0, what=f"{name}, {kind}, at most {most} bytes")
    assert_saved(name, kind, directory)


def _is_hdf5(kind):
    # The HDF5 library may crash the process if a file cannot grow.
    return kind in ("h5", "weights")


def assert_saved(name, kind, directory):
    """Assert that the third save, which was written before the fault, is intact."""
    trainee = Trainee(name)
    trainee.load(kind, directory, 3)
    assert_same(trainee.state(), expected(name)[3], f"{name}, {kind}: the save before the fault")


def _limit_files(most, directory):
    del directory
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def full_file_system(random, directory):
    """Train and save on a 2 MB file system that fills up."""
    name, kind = _a_format(random)
    disk = pathlib.Path(directory, "disk")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    try:
        place = disk / "saves"
        place.mkdir()
        fill = functools.partial(_fill, random.randrange(0, 40000))
        children.run(_refused, str(place), name, kind, fill, may_crash=_is_hdf5(kind))
        (disk / "filler").unlink()
        assert_whole(name, kind, place, count=0, what=f"{name}, {kind}, on a full file system")
        assert_saved(name, kind, place)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _fill(left, directory):
    """Fill the file system until `left` bytes are free."""
    free = os.statvfs(directory)
    with open(pathlib.Path(directory).parent / "filler", "wb") as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - left)))


def read_only_folder(random, directory):
    """Train and save in a folder without write permission."""
    name, kind = _a_format(random)
    os.chmod(directory, 0o755)
    children.run(_refused, directory, name, kind, _become_nobody)
    assert saves.saved_numbers(kind, directory) == [3], "a file was written without write permission"
    assert_saved(name, kind, directory)


def _become_nobody(directory):
    del directory
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def copied(random, directory):
    """Pickle or deep-copy an optimizer during training. The copy must have the same state, but must not share it."""
    del directory
    name = random.choice(sorted(FORMATS))
    trainee, cut = Trainee(name), random.randrange(1, STEPS)
    for i in range(cut):
        trainee.step(i)
    before = trainee.optimizer.state(), trainee.optimizer.get_weights()
    # tf_keras's optimizers cannot be pickled. Keras 3's optimizers lose their slots when they are pickled, so the
    # weights of a pickled copy are not compared.
    if name == "keras3" and random.random() < 0.5:
        again = pickle.loads(pickle.dumps(trainee.optimizer))
    else:
        again = copy.deepcopy(trainee.optimizer)
        assert_same(again.get_weights(), before[1], f"{name}: the copy, made after {cut} steps")
    for i in range(cut, STEPS):
        trainee.step(i)
    assert_same(trainee.state(), expected(name)[STEPS], f"{name}: the original, copied after {cut} steps")
    for key in ("loss_scale", "dynamic_counter"):
        assert again.state()[key] == before[0][key], f"{name}: {key} of the copy, made after {cut} steps"
    again.set_state({"loss_scale": 3.0, "dynamic_counter": 1})
    assert_same(trainee.state(), expected(name)[STEPS], f"{name}: the original, after its copy was changed")


def saved_while_another_thread_steps(random, directory):
    """Save checkpoints while another thread takes optimizer steps.

    All saved values must be finite, the loss scale must be within its bounds, and `total_steps` must include every
    step.
    """
    family = random.choice(FAMILIES)
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=64.0, dynamic_growth_steps=3)
    weight = tf.Variable(tf.ones(1000))
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, weight=weight)
    bad = [random.random() < 0.3 for _ in range(200)]

    def step(gradient):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_sum(weight) * gradient)
        unscaled = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(unscaled, [weight]))

    step = tf.function(step) if random.random() < 0.5 else step
    step(tf.constant(1.0))
    thread = threading.Thread(target=lambda: [step(tf.constant(np.inf if each else 1.0)) for each in bad])
    thread.start()
    paths = []
    while thread.is_alive() or not paths:
        paths.append(checkpoint.write(f"{directory}/{len(paths)}"))
    thread.join()
    state = optimizer.state()
    assert (state["total_steps"], state["skipped_steps"]) == (len(bad) + 1, sum(bad)), state
    for path in paths:
        checkpoint.read(path).assert_existing_objects_matched()
        found = optimizer.state()
        assert 1.0 <= found["loss_scale"] <= 2.0**127 and np.log2(found["loss_scale"]) % 1 == 0, found
        assert 0 <= found["dynamic_counter"] < 3, found
        for variable in (weight, *optimizer.variables):
            assert np.isfinite(np.asarray(variable, np.float64)).all(), variable


def forked(random, directory):
    """Fork during training. If the child sets the optimizer's state, the parent's state must not change."""
    name = random.choice(sorted(FORMATS))
    children.run(_fork, directory, name, random.randrange(1, STEPS))


def _fork(begin, directory, name, cut):
    begin()
    trainee, error = Trainee(name), pathlib.Path(directory, "error.txt")
    for i in range(STEPS):
        if i == cut:
            child = os.fork()
            if not child:
                # TensorFlow's threads do not survive a fork, so the child may hang.
                signal.alarm(20)
                try:
                    assert_same(trainee.state(), expected(name)[cut], "the child")
                    trainee.optimizer.set_state({"loss_scale": 3.0, "dynamic_counter": 0})
                    trainee.optimizer.get_config()
                except Exception:
                    error.write_text(traceback.format_exc())
                finally:
                    os._exit(0)
        trainee.step(i)
    os.waitpid(child, 0)
    assert not error.exists(), error.read_text()
    assert_same(trainee.state(), expected(name)[STEPS], f"{name}: the parent of a fork")


def _needs_root(function, why="needs to be root"):
    if os.geteuid():
        function.why_not = why
    return function


FAULTS = [
    killed_while_saving,
    killed_while_saving,
    small_files_only,
    _needs_root(full_file_system),
    _needs_root(read_only_folder),
    copied,
    saved_while_another_thread_steps,
    forked,
]
