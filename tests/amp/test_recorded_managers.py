"""Managers and scalers against what MindSpore 2.10 did, recorded."""

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations
from tests.conformance import recordings
from tf_lossscale import amp

RECORDED = recordings.load("mindspore_managers")
SEQUENCES = RECORDED["overflow_sequences"]

# (section, case) -> why we differ on purpose.
DIFFERENCES = {
    ("dynamic_update_cell", "near_max/p10"): "MindSpore's cell goes to infinity and never comes back; ours is bounded",
    ("dynamic_update_cell", "near_max/none"): "the same",
}

# Probes of bad arguments: the same type of error, or, where MindSpore took it, our reason to refuse.
NON_FINITE = "a scale that is not finite ruins training without a word"
REFUSED = {
    "DynamicLossScaleManager(inf)": (ValueError, NON_FINITE),
    "DynamicLossScaleManager(nan)": (ValueError, NON_FINITE),
    "FixedLossScaleManager(inf)": (ValueError, NON_FINITE),
    "FixedLossScaleManager(nan)": (ValueError, NON_FINITE),
    "FixedLossScaleManager(True)": (TypeError, "a bool is no scale"),
    "StaticLossScaler(inf)": (ValueError, NON_FINITE),
    "StaticLossScaler(nan)": (ValueError, NON_FINITE),
    "amp.DynamicLossScaler(inf, 2, 3)": (ValueError, NON_FINITE),
}


# MindSpore takes these arguments without a word.
pytestmark = pytest.mark.filterwarnings("ignore:DynamicLossScaleManager has init_loss_scale=1.5:UserWarning")


def cases(section):
    return sorted(RECORDED[section])


@pytest.mark.parametrize("case", cases("dynamic_manager"))
def test_dynamic_manager_moves_as_recorded(case):
    recorded = RECORDED["dynamic_manager"][case]
    manager = amp.DynamicLossScaleManager(**recorded["kwargs"])
    expected = recorded["result"]["ok"]
    assert manager.get_loss_scale() == expected["initial"]
    types = expected["loss_scale_python_type"]
    for step, overflow in enumerate(SEQUENCES[recorded["sequence"]]):
        manager.update_loss_scale(bool(overflow))
        assert manager.get_loss_scale() == float(expected["loss_scale"][step]), step
        assert type(manager.get_loss_scale()).__name__ == (types if isinstance(types, str) else types[step]), step
        for name in ("cur_iter", "last_overflow_iter", "bad_step"):
            assert getattr(manager, name) == expected[name][step], (name, step)


@pytest.mark.parametrize(("mode", "case"), combinations(["eager", "function"], cases("dynamic_update_cell"), usual=11))
def test_dynamic_update_cell_moves_as_recorded(case, mode):
    recorded = RECORDED["dynamic_update_cell"][case]
    cell = amp.DynamicLossScaleManager(**recorded["kwargs"]).get_update_cell()
    expected = recorded["result"]["ok"]
    scale = tf.Variable(float(cell.get_loss_scale()))
    step_function = tf.function(cell.__call__) if mode == "function" else cell
    bounded = ("dynamic_update_cell", case) in DIFFERENCES
    for step, overflow in enumerate(SEQUENCES[recorded["sequence"]]):
        returned = step_function(scale, tf.constant(bool(overflow)))
        assert bool(returned) == bool(expected["returned"][step])
        assert int(cell.cur_iter) == expected["cur_iter"][step]
        if bounded:
            assert np.isfinite(float(scale)), step
            continue
        assert float(scale) == pytest.approx(float(expected["loss_scale"][step]), rel=2e-7), step
        assert int(cell.last_overflow_iter) == expected["last_overflow_iter"][step], step


@pytest.mark.parametrize("case", cases("amp_DynamicLossScaler"))
def test_dynamic_loss_scaler_moves_as_recorded(case):
    recorded = RECORDED["amp_DynamicLossScaler"][case]
    if "error" in recorded["result"]:
        with pytest.raises(TypeError, match="scale_factor"):
            amp.DynamicLossScaler(**recorded["kwargs"])
        return_value = None
    else:
        scaler = amp.DynamicLossScaler(**recorded["kwargs"])
        expected = recorded["result"]["ok"]
        for step, overflow in enumerate(SEQUENCES[recorded["sequence"]]):
            return_value = scaler.adjust(tf.constant(not overflow))
            assert float(scaler.scale_value) == pytest.approx(float(expected["loss_scale"][step]), rel=2e-7), step
            assert int(scaler.counter) == expected["counter"][step], step
    assert return_value in (None, True)


MAKERS = {
    "DynamicLossScaleManager": amp.DynamicLossScaleManager,
    "FixedLossScaleManager": amp.FixedLossScaleManager,
    "StaticLossScaler": amp.StaticLossScaler,
    "amp.DynamicLossScaler": amp.DynamicLossScaler,
}
PROBES = [
    name
    for name in RECORDED["api_probes"]
    if name.split("(")[0] in MAKERS and "Tensor" not in name and name.endswith(")") and ".scale" not in name
]


@pytest.mark.parametrize("probe", PROBES)
def test_constructors_take_and_refuse_what_was_recorded(probe):
    name, arguments = probe.split("(", maxsplit=1)
    scope = {"make": MAKERS[name], "inf": float("inf"), "nan": float("nan")}
    recorded = RECORDED["api_probes"][probe]
    if probe in REFUSED:
        error, why = REFUSED[probe]
        assert why
        with pytest.raises(error, match="scale"):
            eval(f"make({arguments}", scope)
    elif "error" in recorded:
        with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[recorded["error"]["type"]]):
            eval(f"make({arguments}", scope)
    else:
        made = eval(f"make({arguments}", scope)
        for attribute, value in recorded["ok"].items():
            if isinstance(value, (int, float)) and hasattr(made, attribute):
                assert float(getattr(made, attribute)) == value, attribute


@pytest.mark.slow
def test_the_1001st_overflow_in_a_row_is_an_error():
    manager = amp.DynamicLossScaleManager()
    for _ in range(1000):
        manager.update_loss_scale(True)
    with pytest.raises(RuntimeError, match="1001 steps in a row"):
        manager.update_loss_scale(True)
    assert (manager.loss_scale, manager.cur_iter) == (1, 1001)


def test_update_loss_scale_takes_anything_with_a_truth_value():
    for overflow in (1, "x", [0], True, tf.constant(True)):
        manager = amp.DynamicLossScaleManager(64)
        manager.update_loss_scale(overflow)
        assert manager.get_loss_scale() == 32.0
    for overflow in (0, "", None, tf.constant(False)):
        manager = amp.DynamicLossScaleManager(64, 2, 1)
        manager.update_loss_scale(overflow)
        assert manager.get_loss_scale() == 128


def test_fixed_manager_stays_and_its_cell_hands_the_flag_through():
    manager = amp.FixedLossScaleManager(64)
    manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 64
    cell, scale = manager.get_update_cell(), tf.Variable(64.0)
    assert [bool(cell(scale, tf.constant(flag))) for flag in (True, False)] == [True, False]
    assert float(scale) == 64.0
    assert amp.FixedLossScaleManager(8, False).get_update_cell() is None


@pytest.mark.parametrize("probe", [p for p in RECORDED["api_probes"] if p.endswith(".scale/unscale")])
def test_scale_and_unscale_as_recorded(probe):
    scale = float(probe.split("(")[1].split(")")[0])
    scaler = amp.StaticLossScaler(scale)
    for dtype, recorded in RECORDED["api_probes"][probe]["ok"].items():
        values = tf.constant([float(v) for v in recorded["input"]], dtype.lower())
        for method in ("scale", "unscale"):
            got = getattr(scaler, method)(values)
            expected = np.array([float(v) for v in recorded[method]])
            if method == "unscale":
                expected = recordings.right_gradients(recorded, expected, scale, dtype.lower())
            assert got.dtype == values.dtype
            np.testing.assert_allclose(np.asarray(tf.cast(got, tf.float64)), expected, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((tf.constant([1.0]), tf.constant([2.0], tf.float16)), True),
        ([tf.constant([3.4028234e38])], True),
        ([tf.zeros([0])], True),
        ([tf.constant([True])], True),
        ([tf.constant([1 + 1j]), tf.constant(1.0)], True),
        ([tf.constant([float("-inf")], tf.float64)], False),
        ({"a": tf.constant(np.inf)}, False),
        ([[1.0, [np.nan]]], False),
        ((tf.ones(2), {"b": np.array([np.inf])}), False),
        ([tf.constant([complex("nan")]), tf.constant(1.0)], False),
        ([tf.constant([complex(0, np.inf)]), tf.constant(1.0)], False),
    ],
)
def test_all_finite_looks_at_each_part_of_each_number_in_a_structure(inputs, expected):
    assert bool(amp.all_finite(inputs)) is expected


@pytest.mark.parametrize("inputs", [tf.constant([1.0]), None, 3, "ab", ["ab"]])
def test_all_finite_refuses_a_single_tensor_and_what_holds_none(inputs):
    with pytest.raises(TypeError, match="single tensor" if tf.is_tensor(inputs) else "inputs"):
        amp.all_finite(inputs)


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_what_cannot_be_scaled_is_refused_and_sparse_stays_sparse(method):
    # An integer would be cut to zero; MindSpore refuses None with the same error.
    scale = getattr(amp.StaticLossScaler(8.0), method)
    for inputs in (None, [None], "x", tf.constant(1), (tf.ones(2), tf.constant(1))):
        with pytest.raises(TypeError, match="inputs"):
            scale(inputs)
    factor = {"scale": 8.0, "unscale": 0.125}[method]
    sparse = scale({"rows": tf.IndexedSlices(tf.constant([2.0]), tf.constant([7])), "number": 2.0})
    assert sparse["rows"].values.numpy().tolist() == [2 * factor]
    assert sparse["rows"].indices.numpy().tolist() == [7]
    assert float(sparse["number"]) == 2 * factor


@pytest.mark.parametrize("flag", [None, "x"])
def test_a_flag_that_is_none_moves_nothing(flag):
    scaler = amp.DynamicLossScaler(8, 2, 1)
    with pytest.raises(TypeError, match="grads_finite"):
        scaler.adjust(flag)
    assert (float(scaler.scale_value), int(scaler.counter)) == (8.0, 0)


def test_a_factor_and_a_window_by_position_are_taken_with_a_warning():
    with pytest.warns(UserWarning, match=r"scale_factor=4, scale_window=3000") as warned:
        manager = amp.DynamicLossScaleManager(4, 3000)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert (manager.loss_scale, manager.scale_factor, manager.scale_window) == (4, 3000, 2000)
    manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 1


def test_numbers_that_no_float_holds_are_refused():
    for make in (amp.FixedLossScaleManager, amp.DynamicLossScaleManager, lambda v: amp.DynamicLossScaleManager(8, v)):
        with pytest.raises(ValueError, match="finite"):
            make(10**400)
    with pytest.raises(ValueError, match="scale_factor"):
        amp.DynamicLossScaleUpdateCell(64.0, 0, 3)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_loop_by_hand_follows_the_recorded_one(compiled):
    recorded = RECORDED["api_probes"]["training loop with amp.DynamicLossScaler(64, 2, 3) and SGD(0.1)"]["ok"]
    scaler = amp.DynamicLossScaler(64, 2, 3)
    w = tf.Variable([1.0, -2.0])

    def train(x):
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_sum(w * x))
        (gradient,) = scaler.unscale(tape.gradient(loss, [w]))
        finite = amp.all_finite([gradient])
        scaler.adjust(finite)
        if finite:
            w.assign_sub(0.1 * gradient)
        return finite

    train = tf.function(train) if compiled else train
    for step in recorded:
        assert bool(train(tf.constant([float(v) for v in step["x"]]))) == step["finite"]
        np.testing.assert_allclose(w.numpy(), step["w"], rtol=1e-5)
        assert (float(scaler.scale_value), int(scaler.counter)) == (step["scale"], step["counter"])


@pytest.mark.parametrize("of_class", [False, True], ids=["of the object", "of the class"])
def test_a_minimum_that_is_set_on_an_update_cell_is_kept(of_class):
    class Cell(amp.DynamicLossScaleUpdateCell):
        minimum_loss_scale = 16.0

    cell = Cell(64.0, 2, 100) if of_class else amp.DynamicLossScaleUpdateCell(64.0, 2, 100)
    cell.minimum_loss_scale = cell.minimum_loss_scale if of_class else tf.constant(16.0)
    scale = tf.Variable(64.0)
    for _ in range(5):
        cell(scale, tf.constant(True))
    assert scale.numpy() == 16.0


def test_a_factor_and_a_window_that_are_set_later_count():
    cell, scale = amp.DynamicLossScaleUpdateCell(64.0, 2, 100), tf.Variable(64.0)
    scaler = amp.DynamicLossScaler(64.0, 2, 100)
    for each in (cell, scaler):
        each.scale_factor, each.scale_window = 4, 1
    cell(scale, tf.constant(False))
    scaler.adjust(True)
    assert scale.numpy() == scaler.scale_value.numpy() == 256.0
