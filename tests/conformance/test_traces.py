"""Every recorded training trace: same scale, counter and iterations after every step, same variables."""

import fnmatch
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations, slow_one_in
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


def case(recording, name):
    return pytest.param(recording, name, id=f"{recording}|{name}")


def refused(recording, case):
    """Arguments that ruin training are a ValueError here. Of the experimental wrapper's, those that 2.3 refused."""
    if recording == replay.EXPERIMENTAL:
        return "error" in case and "clip" not in case["optimizer"]
    growth = case["config"].get("dynamic_growth_steps")
    return growth is not None and (growth < 1 or growth != int(growth))


def differs(recording, case):
    return any(fnmatch.fnmatch(recording, file) and fnmatch.fnmatchcase(case, pattern) for file, pattern in DIFFERENCES)


def without_the_traps_of_keras3(recording, trace):
    """How many steps to compare: Keras 3's scale has no floor and no ceiling, ours has."""
    sane = [recording != "keras3_lso" or 1 <= float(scale) < math.inf for scale in trace["loss_scale"]]
    return [*sane, False].index(False)


def check(recording, name):
    case = recordings.load(recording)["traces"][name]
    if refused(recording, case):
        with pytest.raises(ValueError, match=r"dynamic_growth_steps|at least 1"):
            next(replay.trace(recording, case, "tape"))
        return
    # TensorFlow 2.3 refused to wrap optimizers that clip. They are taken here, and train as in 2.4.
    expected = case["trace"] if "trace" in case else recordings.load("lso_tf24")["traces"][name]["trace"]
    count = without_the_traps_of_keras3(recording, expected)
    if differs(recording, name):
        states = list(replay.trace(recording, case, case["how"].removesuffix("_function")))
        expected = {key: [state[key] for state in states] for key in states[0]}
    rtol = RTOL.get(case.get("var_dtype"), 1e-5)
    # tf_keras's Nadam multiplies its momentum product once for each variable after a skipped step; here it does so
    # once in each step (docs/differences.md). From then on its weights differ.
    is_nadam = recording == "lso_tfkeras221_new" and case["optimizer_class"] == "Nadam"
    differ, scale = False, float(case["config"].get("initial_scale", 2.0**15))
    for step, state in zip(range(count), replay.trace(recording, case, case["how"])):
        differ |= replay.stands_still(recording, scale)
        before, scale = scale, float(state["loss_scale"])
        differ |= is_nadam and scale < before
        for key, value in state.items():
            wanted = expected[key][step] if isinstance(expected[key], list) else expected[key]
            if not key.startswith("w"):
                assert value == (None if wanted is None else float(wanted)), (step, key)
            elif not differ:
                wanted = recordings.array(wanted)
                np.testing.assert_allclose(value, wanted, rtol, rtol, equal_nan=True, err_msg=f"step {step}: {key}")


@pytest.mark.parametrize(
    ("recording", "name"),
    combinations(
        [case(file, name) for file in FILES for name in recordings.load(file)["traces"]],
        usual=11,
        others=slow_one_in(12),
    ),
)
def test_traces_agree_with_the_original(recording, name):
    check(recording, name)


# Optimizers whose arithmetic is the same in tf_keras and Keras 3. Left out are sparse gradients with equal rows, which
# a Keras 3 optimizer squares before it adds them up, wrapped or not, and an infinite gradient under a fixed scale.
SAME_IN_KERAS_3 = ["sgd", "sgd_momentum", "adam", "rmsprop", "adagrad", "adamw", "lion", "sgd_global_clipnorm"]
NOT_THE_SAME = ("*|B_sparse_none|*", "*|F_finite|*", "*|G_one_inf_at_30|*")


TAKEN_BY_KERAS_3 = [
    case("lso_tfkeras221_new", name)
    for name in recordings.load("lso_tfkeras221_new")["traces"]
    if name.split("|")[0] in SAME_IN_KERAS_3 and not any(fnmatch.fnmatchcase(name, each) for each in NOT_THE_SAME)
]


@pytest.mark.parametrize(("recording", "name"), combinations(TAKEN_BY_KERAS_3, usual=11, others=slow_one_in(12)))
def test_keras_3_optimizers_take_tensorflow_2s_recorded_steps(recording, name, monkeypatch):
    monkeypatch.setitem(replay.OPTIMIZERS, recording, tf.keras.optimizers)
    check(recording, name)
