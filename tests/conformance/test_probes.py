"""Every recorded call: same result, or same class of error. The table says where we differ on purpose, and why."""

import fnmatch
import logging

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests.cases import combinations
from tests.conformance import recordings, replay
from tf_lossscale import legacy
from tf_lossscale.legacy import experimental
from tools.record import calls

# Family of the replay -> the recording it is compared with: Keras 3 has the calls of TensorFlow 2.8 here.
EXPECTED = {
    "lso_tf24": "lso_tf24",
    "lso_tf28": "lso_tf28",
    "lso_tfkeras221_legacy": "lso_tfkeras221_legacy",
    "lso_tfkeras221_new": "lso_tfkeras221_new",
    "keras3_lso": "lso_tf28",
    replay.EXPERIMENTAL: replay.EXPERIMENTAL,
}
TABLES = calls.TABLES
ERRORS = {"AttributeError": AttributeError, "KeyError": KeyError, "TypeError": TypeError, "ValueError": ValueError}


class Bench(calls.Bench):
    """A bench of this package's wrapper with the optimizers of a recording."""

    LossScaleOptimizer = tf_lossscale.LossScaleOptimizer

    def __init__(self, recording):
        super().__init__()
        self.optimizers = replay.OPTIMIZERS[recording]
        self.library = tf.keras if self.optimizers is tf.keras.optimizers else tf_keras


class ExperimentalBench(Bench):
    """A bench of the experimental wrapper."""

    LossScaleOptimizer = experimental.LossScaleOptimizer
    DynamicLossScale = legacy.DynamicLossScale
    arguments = ("dynamic",)

    def wrap(self, name="SGD", kwargs=None, initial_scale=8.0, dynamic_growth_steps=2000):
        kwargs = {"learning_rate": 0.1} if kwargs is None else kwargs
        config = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
        return replay.wrap(replay.EXPERIMENTAL, name, kwargs, **config)


SKIPPED = {"v": [1.0, 2.0], "scale": 4.0, "counter": 0.0}
WITHOUT_SHAPE = {"v": [0.9, 2.0], "scale": 8.0, "counter": 1.0}
OLD = replay.EXPERIMENTAL
SCHEDULES = "learning_rate schedule: wrapper.l*r*"

# (family, probe) patterns -> (our result or error, why).
DIFFERENCES = {
    ("lso_tf24", "nested: LSO(LSO(SGD))"): (TypeError, "the original failed by accident"),
    ("lso_tf*", "IndexedSlices, finite values whose duplicate sum overflows"): (
        SKIPPED,
        "TensorFlow 2.21 looks at the rows one by one and applies a step that makes weights infinite",
    ),
    (f"lso_tf24 {OLD}", "IndexedSlices without dense_shape"): (WITHOUT_SHAPE, "no dense shape is needed, as in 2.21"),
    ("*", "wrapping the same inner again after the first wrapper is gone"): (
        "LossScaleOptimizer",
        "a notebook cell can be run twice",
    ),
    ("*", "apply_gradients int gradient"): (TypeError, "an error of ours that names the variable"),
    ("*", "apply_gradients wrong shape"): (
        (ValueError, tf.errors.InvalidArgumentError),
        "an error of ours, before anything has changed",
    ),
    ("*", "apply_gradients skip_gradients_aggregation=True"): (None, "both families' keywords are honoured in each"),
    (f"lso_tfkeras221_new {OLD}", "minimize with grad_loss"): ([0.4, 1.4], "minimize has grad_loss for every family"),
    ("lso_tfkeras221_new", "get_weights of a built Adam wrapper"): (
        [1, [0.05, -0.05], [0.00025, 0.00025]],
        "get_weights is there for every family",
    ),
    ("lso_tfkeras221_new", "get_updates exists"): (True, "in graph mode `fit` calls it: our error says what to use"),
    ("lso_tfkeras221_new", "set_weights wrong length"): (ValueError, "says how many"),
    ("lso_tfkeras221_new", "variables of a built Adam wrapper"): (
        [1, [0.05, -0.05], [0.00025, 0.00025], 8.0, 1],
        "h5 files hold the optimizer's `variables`: the scale survives in them",
    ),
    (f"lso_tf24 {OLD}", 'learning_rate = "x"'): (
        ValueError,
        "refused, as in 2.21: the next step would stumble over it",
    ),
    ("*", "copy.deepcopy(wrapper)"): ("LossScaleOptimizer", "deepcopy works for every family"),
    (f"lso_tfkeras221_new {OLD}", "wrapper.beta_1 = 0.0 after first step (Adam)"): (
        {"after": [0.97735, 1.99735], "inner_beta_1": 0.0, "wrapper_beta_1": 0.0},
        "hyperparameters reach the inner optimizer, as the documentation has it",
    ),
    ("lso_tfkeras221_new", "wrapper.momentum = 0.9 on SGD built without momentum"): (
        {"v_after_2_steps": [0.71, 1.71], "inner_momentum": 0.9},
        "the same",
    ),
    ("*", "get_unscaled_gradients([[]python float])"): ([0.125], "a number is made a tensor"),
    ("*", "get_unscaled_gradients([[]int tensor])"): (TypeError, "an integer gradient would be cut to zero"),
    ("*", "get_scaled_loss(int tensor)"): (TypeError, "an integer loss has no gradient"),
    ("*", "from_config of a TF <= 2.3 config, Dynamic multiplier 3"): (
        {"config": {"growth_factor": 3.0, "initial_scale": 64.0}, "argument_kept": True},
        "any multiplier is supported",
    ),
    ("lso_tfkeras221_new", "from_config of a TF <= 2.3 config, Fixed"): (
        {"config": {"dynamic": False, "initial_scale": 8.0}, "argument_kept": True},
        "old configs are read for every family",
    ),
    ("lso_tfkeras221_new", "from_config of a TF <= 2.3 config, unknown class"): (ValueError, "says what is known"),
    ("*", "from_config(None)"): (TypeError, "says what a config is"),
    ("*", "from_config inner given as object"): ({"dynamic": True, "initial_scale": 8.0}, "taken, as in 2.21"),
    ("*", "custom inner class without custom_objects"): (
        TypeError,
        "tf_keras 2.21's and Keras 3's error says what to do",
    ),
    (OLD, "minimize(tensor, tape=tape)"): ({"v": [0.8, 1.6], "scale": 8.0}, "every name has the arguments of 2.4"),
    (OLD, "wrapper.momentum = 0.9 on SGD built without momentum"): (
        {"v_after_2_steps": [0.8, 1.8], "inner_momentum": 0.9},
        "hyperparameters reach the inner optimizer, as the documentation of 2.4 has it",
    ),
    # What Keras 3's optimizers do differently when they are not wrapped.
    ("keras3_lso", "variables of a built Adam wrapper"): (
        [1, 0.1, [0.05, -0.05], [0.00025, 0.00025], 8.0, 1],
        "Keras 3 lists the learning rate, and its own wrapper the scale and the counter",
    ),
    ("keras3_lso", "weights of a built Adam wrapper"): (
        [1, 0.1, [0.05, -0.05], [0.00025, 0.00025]],
        "Keras 3 lists the learning rate",
    ),
    ("keras3_lso", "get_weights of a built Adam wrapper"): ([1, 0.1, [0.05, -0.05], [0.00025, 0.00025]], "the same"),
    ("keras3_lso", "set_weights(get_weights()+1)"): ([2, 1.1, [1.05, 0.95], [1.00025, 1.00025]], "the same"),
    ("keras3_lso", "get_updates exists"): (False, "Keras 3 has none"),
    ("keras3_lso", "get_slot*"): (AttributeError, "Keras 3 has no slots"),
    ("keras3_lso", "add_slot"): (AttributeError, "the same"),
    ("keras3_lso", "apply_gradients return value (eager)"): (1, "Keras 3 returns its iterations"),
    ("keras3_lso", "apply_gradients experimental_aggregate_gradients=False"): (1, "the same"),
    ("keras3_lso", "apply_gradients skip_gradients_aggregation=True"): (1, "the same"),
    ("keras3_lso", "optimizers.serialize(wrapper)"): (
        {"class_name": "LossScaleOptimizer", "config": {"initial_scale": 256.0, "dynamic_growth_steps": 7}},
        "its inner optimizers have configs of their own",
    ),
    ("keras3_lso", "get_config after the scale moved"): (
        {"scale_now": 128.0, "config": {"initial_scale": 8.0}, "scale_of_from_config": 8.0},
        "the same",
    ),
    ("keras3_lso", "from_config of a TF <= 2.3 config, Dynamic"): (
        {"config": {"initial_scale": 64.0, "dynamic_growth_steps": 5}, "argument_kept": True},
        "the same",
    ),
    ("keras3_lso", SCHEDULES): (0.1, "Keras 3 reads the schedule's current value"),
    ("keras3_lso", "set wrapper.learning_rate = 0.5 over a schedule"): (TypeError, "Keras 3 refuses"),
    ("keras3_lso", "wrapper.momentum = 0.9 on SGD built without momentum"): (
        {"v_after_2_steps": [0.71, 1.71], "inner_momentum": 0.9},
        "Keras 3 reads the momentum on every step",
    ),
}

WHERE_THE_CLASS_IS = ("module", "registered_name", "how")

# Names in dir() that a Keras 3 optimizer does not have.
NOT_IN_KERAS_3 = {"add_slot", "add_weight", "decay", "get_slot", "get_slot_names", "get_updates"}


def bench(family):
    return (ExperimentalBench if family == replay.EXPERIMENTAL else Bench)(family)


def table_of(family, section):
    """The calls to a family, by their names in a part of its recording."""
    return {**TABLES[section], **(calls.EXPERIMENTAL if family == replay.EXPERIMENTAL else {})}


def difference(family, probe):
    """The last entry that fits: those of one family come after those of all."""
    fitting = [
        entry
        for (families, pattern), entry in DIFFERENCES.items()
        if any(fnmatch.fnmatchcase(family, each) for each in families.split()) and fnmatch.fnmatchcase(probe, pattern)
    ]
    return fitting[-1] if fitting else None


def comparable(recorded):
    """A recorded value in the shape that the probes return: values only, names without modules."""
    if isinstance(recorded, str) and recorded not in ("nan", "inf", "-inf"):
        return recorded.rsplit(".", 1)[-1].removesuffix("V3")  # there is one public class
    if isinstance(recorded, list):
        pairs = recorded and all(isinstance(r, list) and len(r) == 2 and isinstance(r[0], str) for r in recorded)
        return [comparable(r[1] if pairs else r) for r in recorded]
    if isinstance(recorded, dict) and isinstance(recorded.get("value"), dict) and "__object__" in recorded["value"]:
        return comparable(recorded["type"])
    if isinstance(recorded, dict) and "value" in recorded:
        return recorded["value"]
    if isinstance(recorded, dict) and set(recorded) == {"type", "loss_scale", "config"}:
        return {key: recorded[key] for key in ("loss_scale", "config")}
    if isinstance(recorded, dict):
        return {key: comparable(value) for key, value in recorded.items() if key not in WHERE_THE_CLASS_IS}
    return recorded


def agrees(got, expected):
    """Whether a probe's result is what is expected; of a dict, the expected keys are looked at."""
    if isinstance(expected, dict):
        return all(agrees(got[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(agrees, got, expected))
    if isinstance(expected, (bool, str)) or expected is None:
        return bool(got is expected or got == expected) if not isinstance(expected, bool) else bool(got) == expected
    return np.allclose(float(got), float(expected), rtol=1e-5, atol=1e-7)


def check(family, probe, call, recorded):
    """Returns what is wrong with a probe, or None."""
    different = difference(family, probe)
    if different is not None:
        expected = different[0]
    elif "error" in recorded:
        expected = ERRORS[recorded["error"]["type"]]
    else:
        expected = comparable(recorded["ok"])
    is_error = isinstance(expected, (type, tuple))
    try:
        got = call(bench(family))
    except Exception as error:
        return None if is_error and isinstance(error, expected) else f"{probe}: {error!r}, expected {expected}"
    if probe.startswith("dir(wrapper)"):
        missing = set(expected) - set(got) - (NOT_IN_KERAS_3 if family == "keras3_lso" else set())
        return f"{probe}: without {missing}" if missing else None
    if is_error or not agrees(got, expected):
        return f"{probe}: {got!r}, expected {expected!r}"
    return None


@pytest.mark.parametrize(
    ("family", "section"),
    combinations(
        EXPECTED,
        TABLES,
        usual=[
            "lso_tfkeras221_legacy-scaling",
            "lso_tf24-configs",
            "lso_tfkeras221_new-api_probes",
            "lso_tf28-warnings",
            "keras3_lso-errors",
            *(f"lso_experimental_tf23-{section}" for section in TABLES),
        ],
        others=pytest.mark.slow,
    ),
)
def test_calls_do_what_the_recorded_ones_did(family, section):
    recorded = recordings.load(EXPECTED[family])[section]
    failures = [
        failure
        for probe, call in table_of(family, section).items()
        if probe in recorded and (failure := check(family, probe, call, recorded[probe]))
    ]
    assert not failures, "\n".join(failures)


# Recorded probes that no call here stands for, with the reason; the others that are not in the tables fail the test.
ELSEWHERE = {
    "LSO(SGD, *": "test_api.py and test_experimental.py read the arguments from the name",
    "experimental.*": "the experimental class has recordings of its own",
    "LossScaleOptimizerV1 *": "the same",
    "*LossScaleOptimizerV3*": "there is one public class",
    "*BaseLossScaleOptimizer*": "tests/wrapper/test_optimizer.py: isinstance for every family",
    "isinstance of the optimizer base": "the same",
    "public class with the other family": "the same",
    "LSO(keras 3 optimizer)": "all families are accepted",
    "LSO(experimental new optimizer)": "all families are accepted",
    "LSO(tensorflow.python.keras optimizer)": "a private module that TensorFlow no longer has",
    "compile(*": "tests/test_fit.py: compile and fit",
    "mro": "an implementation detail",
    "repr(wrapper)": "ours says what the wrapper is",
    "get_config of *": "test_api.py: the configs",
    "get_config, config *": "the same",
    "round trip of *": "the same",
    "scale *": "test_api.py: the numbers of scaling",
    "state attributes, *": "test_api.py: the state",
    "custom LossScale subclass": "tests/legacy/test_own_loss_scales.py",
    "clipnorm inner": "test_traces.py: clipping optimizers are taken",
    "set wrapper.clipnorm": "the same",
    "get_scaled_loss(None)": "test_api.py: the numbers of scaling",
    "get_scaled_loss(python float)": "a number is made a tensor",
}


@pytest.mark.parametrize("section", TABLES)
@pytest.mark.parametrize("family", [f for f in EXPECTED if f != "keras3_lso"])
def test_no_recorded_call_is_left_out(family, section):
    left_out = [
        probe
        for probe in recordings.load(family)[section]
        if probe not in table_of(family, section)
        and not any(fnmatch.fnmatchcase(probe, pattern) for pattern in ELSEWHERE)
    ]
    assert not left_out


class _Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("family", ["lso_tfkeras221_legacy", "lso_tfkeras221_new"])
def test_the_recorded_warnings_are_given_once(family):
    for probe, recorded in recordings.load(family)["warnings"].items():
        handler = _Warnings()
        logger = logging.getLogger("absl")
        logger.addHandler(handler)
        try:
            calls.WARNINGS[probe](bench(family))
        finally:
            logger.removeHandler(handler)
        forgotten = [m.split(" before calling ")[0] for m in handler.messages if "You forgot" in m]
        expected = [
            log["message"].split(" before calling ")[0] for log in recorded["logs"] if "forgot" in log["message"]
        ]
        # The original repeated it on every step and in every trace.
        assert forgotten == expected[:1], probe
