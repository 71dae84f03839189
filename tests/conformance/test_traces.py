"""Every recorded training trace: same scale, counter and iterations after every step, same variables."""

import fnmatch
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.conformance import recordings, replay

# These hold the same traces, of the same classes: one of them is replayed.
LEGACY = ("lso_tf24", "lso_tf28", "lso_tfkeras221_legacy")
FILES = [recording for recording in replay.OPTIMIZERS if recording not in LEGACY[1:]]

# (recording, pattern of cases) -> why we differ on purpose. What we do instead is what eager mode does.
DIFFERENCES = {
    ("lso_*", "*|C_overflow_bursts|*_function"): (
        "the graph optimizer hid an overflow that only the scaling causes; here a tf.function sees what eager sees"
    ),
    ("lso_*", "*|nearmax|F_dense_finite|*_function"): (
        "the graph optimizer multiplied a small gradient by the reciprocal of a large scale first, and got zero"
    ),
}

# float16 variables round to 11 bits.
RTOL = {"float16": 2e-3}


def cases(recording):
    by_optimizer = {}
    for name in recordings.load(recording)["traces"]:
        by_optimizer.setdefault(name.split("|")[0], []).append(name)
    return by_optimizer


GROUPS = [(recording, optimizer) for recording in FILES for optimizer in cases(recording)]


def refused(case):
    """Arguments that ruin training are a ValueError here."""
    growth = case["config"].get("dynamic_growth_steps")
    return growth is not None and (growth < 1 or growth != int(growth))


def differs(recording, case):
    return any(fnmatch.fnmatch(recording, file) and fnmatch.fnmatchcase(case, pattern) for file, pattern in DIFFERENCES)


def without_the_traps_of_keras3(recording, case, events):
    """How many steps to compare: Keras 3's scale has no floor and no ceiling, ours has."""
    if recording != "keras3_lso":
        return len(events)
    scales = [float(scale) for scale in case["trace"]["loss_scale"]]
    sane = [1 <= scale < math.inf for scale in scales]
    return sane.index(False) if False in sane else len(events)


def eager_trace(recording, case):
    recorded = recordings.load(recording)
    running = replay.Replay(
        recording, {**case, "how": case["how"].removesuffix("_function")}, recorded["initial_variables"]
    )
    states = []
    for event in recorded["sequences"][case["sequence"]]:
        running.step(event["grads"])
        states.append(running.state())
    return {key: [state[key] for state in states] for key in states[0]}


def check(recording, name):
    recorded = recordings.load(recording)
    case = recorded["traces"][name]
    expected = case.get("trace")
    if refused(case):
        with pytest.raises(ValueError, match="dynamic_growth_steps"):
            replay.wrapped(recording, case)
        return None
    if differs(recording, name):
        expected = eager_trace(recording, case)
    kind = replay.GraphReplay if case["how"] == "graph" else replay.Replay
    running = kind(recording, case, recorded["initial_variables"])
    try:
        events = recorded["sequences"][case["sequence"]]
        weights = {key: recordings.array(expected[key]) for key in ("w0", "w1", "w2")}
        stands_still, scale = False, float(case["config"].get("initial_scale", 2.0**15))
        for step, event in enumerate(events[: without_the_traps_of_keras3(recording, case, events)]):
            stands_still |= replay.stands_still(recording, scale)
            running.step(event["grads"])
            state = running.state()
            scale = float(state["loss_scale"])
            for key in ("loss_scale", "dynamic_counter", "iterations"):
                value = expected[key][step] if isinstance(expected[key], list) else expected[key]
                value = None if value is None else float(value)
                if state[key] != value:
                    return f"{name}: step {step} ({event['event']}): {key} is {state[key]}, recorded {value}"
            for key in () if stands_still else weights:
                rtol = RTOL.get(case.get("var_dtype"), 1e-5)
                wanted = weights[key][step]
                if not np.allclose(state[key], wanted, rtol=rtol, atol=rtol, equal_nan=True):
                    return f"{name}: step {step} ({event['event']}): {key} is {state[key]}, recorded {wanted}"
    finally:
        if kind is replay.GraphReplay:
            running.close()
    return None


@pytest.mark.parametrize("recording", LEGACY[1:])
def test_the_legacy_optimizers_of_all_versions_took_the_same_steps(recording):
    first, other = recordings.load(LEGACY[0]), recordings.load(recording)
    assert replay.OPTIMIZERS[recording] is replay.OPTIMIZERS[LEGACY[0]]
    for part in ("traces", "sequences", "initial_variables"):
        assert other[part] == first[part]
    assert len(first["traces"]) == 106


@pytest.mark.parametrize(("recording", "optimizer"), GROUPS, ids=["-".join(group) for group in GROUPS])
def test_traces_agree_with_the_original(recording, optimizer):
    failures = [failure for name in cases(recording)[optimizer] if (failure := check(recording, name))]
    assert not failures, "\n".join(failures)


# Optimizers whose arithmetic is the same in tf_keras and Keras 3. Left out are sparse gradients with equal rows, which
# a Keras 3 optimizer squares before it adds them up, wrapped or not, and an infinite gradient under a fixed scale.
SAME_IN_KERAS_3 = ["sgd", "sgd_momentum", "adam", "rmsprop", "adagrad", "adamw", "lion", "sgd_global_clipnorm"]
NOT_THE_SAME = ("*|B_sparse_none|*", "*|F_finite|*", "*|G_one_inf_at_30|*")


@pytest.mark.parametrize("optimizer", SAME_IN_KERAS_3)
def test_keras_3_optimizers_take_tensorflow_2s_recorded_steps(optimizer, monkeypatch):
    recording = "lso_tfkeras221_new"
    monkeypatch.setitem(replay.OPTIMIZERS, recording, tf.keras.optimizers)
    names = [
        name
        for name in cases(recording)[optimizer]
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_THE_SAME)
    ]
    assert names
    failures = [failure for name in names if (failure := check(recording, name))]
    assert not failures, "\n".join(failures)
