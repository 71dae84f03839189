"""Recorded constructors, errors, hyperparameters, scaling, extremes and configs of the originals."""

import fnmatch
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations, slow_one_in
from tests.conformance import recordings, replay
from tests.conformance.replay import wrap

FILES = ["lso_tf24", "lso_tf28", "lso_tfkeras221_legacy", "lso_tfkeras221_new"]
FAMILIES = [*FILES, "keras3_lso"]
ERRORS = {"TypeError": TypeError, "ValueError": ValueError, "OverflowError": ValueError, "KeyError": KeyError}


def recorded_for(family):
    """What a family is compared with: Keras 3's optimizers, in the calls that Keras 3 has not, with TensorFlow 2.8."""
    return recordings.load("lso_tf28" if family == "keras3_lso" else family)


# Constructor calls that the originals took and that ruin training: a scale that turns gradients into zero or NaN, or
# that has every step skipped; a part of a step; strings.
RUINOUS = r'initial_scale=(0|nan|1e39|-4|"8"|"x")$|growth_steps=(0|2.7|"5")$'
# Keras 3's options, which are honoured where the family has them, and otherwise a ValueError that says so.
HONOURED = ["*clipnorm=*", "clipvalue=*", "weight_decay=*", "use_ema=*", "ema_*=*", "loss_scale_factor=*"]
HONOURED += ["gradient_accumulation_steps=*"]


def constructor_probes(recording):
    for probe, recorded in recorded_for(recording)["errors"].items():
        call = re.fullmatch(r"LSO\(SGD, (\w+=.*)\)", probe)
        if call and "(positional)" not in probe and "twice" not in probe:
            yield call.group(1), recorded


@pytest.mark.parametrize("recording", FAMILIES)
def test_constructor_takes_and_refuses_what_the_original_did_but_for_what_ruins_training(recording):
    scope, ruinous = {"tf": tf, "np": np, "nan": float("nan"), "inf": float("inf")}, 0
    for arguments, recorded in constructor_probes(recording):
        config = eval(f"dict({arguments})", scope)
        if re.search(RUINOUS, arguments):
            ruinous += 1
            with pytest.raises((TypeError, ValueError), match=r"initial_scale|dynamic_growth_steps"):
                wrap(recording, **config)
        elif any(fnmatch.fnmatchcase(arguments, pattern) for pattern in HONOURED):
            continue
        elif "error" in recorded:
            with pytest.raises(ERRORS[recorded["error"]["type"]]):
                wrap(recording, **config)
        else:
            optimizer = wrap(recording, **config)
            assert float(optimizer.loss_scale) == float(recorded["ok"]["loss_scale"]), arguments
            assert optimizer.get_config().items() >= recorded["ok"]["config"].items(), arguments
    assert ruinous >= 8


HYPERS = [(recording, name) for recording in FAMILIES for name in recordings.load(recording)["hyperparameters"]]
# The two families that the original's rules are carried over to: they have no `_set_hyper`.
NEWER = ("lso_tfkeras221_new", "keras3_lso")

CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
# Names that the new families' wrappers read and set on the inner optimizer, beside its hyperparameters.
DELEGATED = {
    "lso_tfkeras221_new": {*CLIPPING, "jit_compile"},
    "keras3_lso": {*CLIPPING, "ema_momentum", "gradient_accumulation_steps", "use_ema", "weight_decay"},
}

# Names that the wrappers have and the recorded one had not, or had not alike, with the reason.
OUR_OWN = {
    "weights": "for every family; the recorded lists depend on what was read before",
    "ema_overwrite_frequency": "Keras 3's options are delegated",
    **dict.fromkeys(("lr", "loss_scale", "dynamic", "dynamic_counter"), "for Keras 3 too"),
    **dict.fromkeys(("dynamic_scale", "step_counter"), "for Keras 3 before it is built, too"),
    "iterations": "can be set for Keras 3 too",
    "name": "numbered by Keras 3",
    "_name": "Keras 3's has none",
}


# Setting one of them would do nothing. Keras 3 takes it.
READ_ONLY = ("initial_scale", "dynamic_growth_steps", "inner_optimizer")


def original_names(recording, optimizer):
    """The hyperparameters of the optimizer's original; newer families have those of TensorFlow 2.8."""
    known = recordings.load(recording)["hyperparameters"][optimizer]
    if known["inner_hyper_names"] is not None:
        return set(known["inner_hyper_names"])
    name = known["optimizer"][0]
    if name in ("AdamW", "Lion", "Lamb", "Muon", "ScheduleFreeAdamW"):
        name = "Adam"  # younger than TensorFlow 2.8; they follow their nearest relative
    same_class = [h for h in recordings.load("lso_tf28")["hyperparameters"].values() if h["optimizer"][0] == name]
    names = set(same_class[0]["inner_hyper_names"]) if same_class else set()
    return names - {"decay", "learning_rate"}


def number(value):
    """A hyperparameter's value, however it is held."""
    return float(value) if tf.is_tensor(value) or hasattr(value, "numpy") else value


def same(got, expected):
    got = number(got)
    return got == (pytest.approx(expected) if isinstance(expected, float) else expected)


def reaches_inner(recording, optimizer, hyper):
    """Whether a name is one that our wrapper takes to the inner optimizer where the recorded one did not."""
    return recording in NEWER and hyper in original_names(recording, optimizer) | DELEGATED[recording]


@pytest.mark.parametrize(("recording", "optimizer"), HYPERS, ids=["-".join(h) for h in HYPERS])
def test_hyperparameters_are_read_and_listed_as_in_the_original(recording, optimizer):
    recorded = recordings.load(recording)["hyperparameters"][optimizer]
    name, kwargs = recorded["optimizer"]
    for hyper, probe in recorded["read"].items():
        if hyper in OUR_OWN:
            continue
        wrapper = wrap(recording, name, kwargs)
        if reaches_inner(recording, optimizer, hyper):
            assert getattr(wrapper, hyper) == getattr(wrapper.inner_optimizer, hyper), hyper
        elif "error" in probe["wrapper"]:
            with pytest.raises(AttributeError, match=hyper):
                getattr(wrapper, hyper)
        elif "__object__" not in str(probe["wrapper"]["ok"].get("value")):
            assert same(getattr(wrapper, hyper), probe["wrapper"]["ok"]["value"]), hyper
    wrapper = wrap(recording, name, kwargs)
    listed = {*recorded["dir_beyond_class_and_instance"], *original_names(recording, optimizer)}
    assert listed <= set(dir(wrapper))


@pytest.mark.parametrize(("recording", "optimizer"), combinations(HYPERS, usual=11, others=pytest.mark.slow))
def test_setting_a_hyperparameter_reaches_the_inner_optimizer_where_the_original_did(recording, optimizer):
    recorded = recordings.load(recording)["hyperparameters"][optimizer]
    name, kwargs = recorded["optimizer"]
    for hyper, probe in recorded["set"].items():
        if recording in NEWER and hyper in {*OUR_OWN, *READ_ONLY}:
            continue
        wrapper = wrap(recording, name, kwargs)
        inner, value, result = wrapper.inner_optimizer, probe["value"], probe["result"]
        if "error" in result:
            with pytest.raises(AttributeError):
                setattr(wrapper, hyper, value)
            continue
        in_wrapper = result["ok"]["stored_in_wrapper___dict__"] and not reaches_inner(recording, optimizer, hyper)
        before = number(getattr(inner, hyper, None)) if in_wrapper else None
        setattr(wrapper, hyper, value)
        assert same(getattr(wrapper, hyper), value), hyper
        assert (hyper in vars(wrapper)) == in_wrapper, hyper
        assert same(getattr(inner, hyper, None), before if in_wrapper else value), hyper


# TensorFlow 2.4, 2.8 and tf_keras legacy scaled alike.
@pytest.mark.parametrize("recording", [*FAMILIES[2:], replay.EXPERIMENTAL])
def test_loss_and_gradients_are_scaled_to_the_recorded_numbers(recording):
    for probe, recorded in recorded_for(recording)["scaling"].items():
        if not probe.startswith("scale "):
            continue
        scale, dtype = re.fullmatch(r"scale (\S+), dtype (\w+)", probe).groups()
        recorded, of_gradients = recorded["ok"], recorded["ok"]["get_unscaled_gradients"]
        optimizer = wrap(recording, initial_scale=float(scale), dynamic_growth_steps=2000)
        values = tf.constant(recordings.array(recorded["input"]), dtype)
        losses = optimizer.get_scaled_loss(values), optimizer.get_scaled_loss(lambda values=values: values)()
        slices = tf.IndexedSlices(values, tf.range(tf.size(values)))
        dense, none, sparse = optimizer.get_unscaled_gradients([values, None, slices])
        assert none is None
        assert isinstance(sparse, tf.IndexedSlices)
        rtol = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 1e-6)
        for got, expected in (
            (losses[0], recorded["get_scaled_loss"]["value"]),
            (losses[1], recorded["get_scaled_loss(callable)()"]["value"]),
            (dense, recordings.right_gradients(recorded, of_gradients["dense"], float(scale), dtype)),
            (sparse.values, recordings.right_gradients(recorded, of_gradients["slices_values"], float(scale), dtype)),
        ):
            assert got.dtype.name == dtype, probe
            tiny = 1e-7 if dtype == "float16" else 1e-37
            got = tf.cast(got, tf.float64)
            np.testing.assert_allclose(got, recordings.array(expected), rtol, tiny, err_msg=probe)


# Extremes that start from an argument which is a ValueError here.
REFUSED_EXTREMES = (
    "initial_scale 0.0",
    "initial_scale inf",
    "initial_scale nan",
    "dynamic_growth_steps 0",
    "dynamic_growth_steps 2.5",
)


def extremes():
    for recording in [*FAMILIES, replay.EXPERIMENTAL]:
        for case, recorded in recorded_for(recording)["extremes"].items():
            if case not in REFUSED_EXTREMES:
                yield recording, case, recorded


EXTREMES = list(replay.once(extremes()))


@pytest.mark.parametrize(("recording", "case"), combinations(EXTREMES, usual=11, others=slow_one_in(6)))
def test_the_ends_of_float32_are_survived_as_recorded(recording, case):
    recorded = recorded_for(recording)["extremes"][case]
    name, kwargs = recorded["optimizer"]
    optimizer = wrap(recording, name, kwargs, **recorded["config"])
    expected, ahead, before = recorded["result"]["ok"], 0.0, float(optimizer.loss_scale)
    for i, (gradient, (scale, counter, iterations, value)) in enumerate(replay.extreme(optimizer, recorded)):
        ahead += recordings.passed_over(before, expected["loss_scale"][i], gradient, **kwargs)
        before = scale
        assert scale == pytest.approx(float(expected["loss_scale"][i]), rel=1e-7), i
        assert (counter, iterations) == (expected["counter"][i], expected["iterations"][i]), i
        assert value == pytest.approx(float(expected["v"][i]) - ahead, rel=1e-6, abs=1e-7), i


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_is_read_as_recorded(family):
    for probe, recorded in recorded_for(family)["api_probes"].items():
        if not probe.startswith("state attributes, config "):
            continue
        state = {name: result["ok"] for name, result in recorded["ok"].items() if "ok" in result}
        if state["dynamic_growth_steps"]["value"] == 0:
            continue  # refused here
        arguments = {name: state[name]["value"] for name in ("dynamic", "initial_scale", "dynamic_growth_steps")}
        optimizer = wrap(family, **arguments)
        for name in ("loss_scale", "dynamic", "initial_scale", "dynamic_growth_steps", "dynamic_counter"):
            value, expected = getattr(optimizer, name), state[name]
            assert same(value, expected["value"]), (probe, name)
            if "dtype" in expected:
                assert value.dtype.name == expected["dtype"], (probe, name)
            else:
                assert type(value).__name__ == expected["type"], (probe, name)


@pytest.mark.parametrize("recording", FILES)
def test_configs_are_those_of_the_original_and_round_trip(recording):
    recorded_configs = recordings.load(recording)["configs"]
    for probe, recorded in recorded_configs.items():
        if not probe.startswith("get_config of ") or "ok" not in recorded:
            continue
        config = recorded["ok"]
        inner = config["inner_optimizer"]
        made = type(wrap(recording)).from_config(config)
        ours = made.get_config()
        for key in ("dynamic", "initial_scale", "dynamic_growth_steps"):
            assert ours[key] == config[key], (probe, key)
        assert ours["inner_optimizer"]["class_name"] == inner["class_name"]
        for key, value in inner["config"].items():
            got = ours["inner_optimizer"]["config"][key]
            assert got == (pytest.approx(value) if isinstance(value, float) else value), (probe, key)
        again = type(made).from_config(ours)
        assert again.get_config() == ours
