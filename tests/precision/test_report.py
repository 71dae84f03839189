"""What a precision report says of made distributions is what NumPy's float16 does with them."""

import io
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from rich.console import Console

from tests.precision.made import counted
from tf_lossscale.precision.counts import COLUMNS, HIGHEST, LOWEST, ExponentCounts, column
from tf_lossscale.precision.report import PrecisionReport
from tf_lossscale.precision.report_text import whether_float16_fits

# Values inside of their bins: 65520 is in the bin of 2**15, but infinite in float16; 2**-25 itself rounds to zero.
VALUES = st.builds(
    lambda exponent, mantissa, sign: sign * mantissa * 2.0**exponent,
    st.integers(-60, 25),
    st.floats(1.01, 1.99),
    st.sampled_from([-1.0, 1.0]),
)
GRADIENTS = st.dictionaries(
    st.sampled_from(["kernel", "bias", "embeddings"]),
    st.lists(st.one_of(VALUES, st.just(0.0)), max_size=20).map(np.array),
    min_size=1,
)


def float16(values, scale):
    with np.errstate(over="ignore"):
        return np.abs((values * scale).astype(np.float16))


@hypothesis.given(GRADIENTS, st.integers(-10, 30))
def test_the_shares_of_float32_gradients_are_those_of_a_cast_to_float16_at_any_scale(gradients, exponent):
    scale = 2.0**exponent
    report = PrecisionReport(counted(gradients)).at(scale)
    for row, values in zip((*report.rows, report.total), (*gradients.values(), np.concatenate([*gradients.values()]))):
        nonzero = values[values != 0]
        cast = float16(nonzero, scale)
        of = max(len(nonzero), 1)
        assert row.values == len(values)
        assert row.zeros == pytest.approx(1 - len(nonzero) / max(len(values), 1) if len(values) else 0)
        assert row.vanished * of == pytest.approx((cast == 0).sum())
        assert row.subnormal * of == pytest.approx(((cast > 0) & (cast < 2.0**-14)).sum())
        assert row.overflow * of == pytest.approx(np.isinf(cast).sum())
        assert row.vanished_unscaled * of == pytest.approx((float16(nonzero, 1.0) == 0).sum())
        assert row.vanished_at_half * of == pytest.approx((float16(nonzero, scale / 2) == 0).sum())
        assert row.vanished_at_twice * of == pytest.approx((float16(nonzero, scale * 2) == 0).sum())
        if len(nonzero):
            assert not np.isinf(float16(nonzero, scale * 2.0**row.headroom)).any()
            assert np.isinf(float16(nonzero, scale * 2.0 ** (row.headroom + 1))).any()
        else:
            assert row.headroom is None


@hypothesis.given(GRADIENTS, st.integers(-3, 6))
def test_the_best_scale_is_the_one_that_trying_all_finds(gradients, exponent):
    values = np.concatenate([*gradients.values()])
    report = PrecisionReport(counted(gradients, scale=2.0**exponent))
    tried = [2.0**k for k in range(-30, 100) if not np.isinf(float16(values, 2.0**k)).any()]
    if not values.any():
        assert report.best_scale is None
        return
    assert report.best_scale == tried[-1]
    lost = [(float16(values, scale) < 2.0**-14).sum() for scale in tried]
    assert (float16(values, report.best_scale) < 2.0**-14).sum() == min(lost)


@hypothesis.given(GRADIENTS, st.integers(-10, 10))
def test_of_gradients_that_float16_computed_the_counts_tell_what_half_and_twice_the_scale_would_lose(gradients, k):
    values = {name: float16(each, 2.0**k).astype(np.float64) for name, each in gradients.items()}
    values = {name: each[np.isfinite(each)] for name, each in values.items()}
    report = PrecisionReport(counted({n: v * 2.0**-k for n, v in values.items()}, scale=2.0**k, float16=True))
    for row, each in zip(report.rows, values.values()):
        nonzero = each[each != 0]
        assert row.rounded
        assert row.vanished == row.vanished_at_twice == 0
        assert row.vanished_at_half * max(len(nonzero), 1) == pytest.approx((float16(nonzero, 0.5) == 0).sum())


def test_a_value_at_every_power_of_two_is_lost_where_the_scale_takes_it_out_of_the_range():
    gradients = {"kernel": 1.5 * 2.0 ** np.arange(-40.0, 0.0)}
    report = PrecisionReport(counted(gradients))
    (row,) = report.rows
    assert report.best_scale == 2.0**16, "times 1.5 * 2**-1 is below 65504; twice it is not"
    assert (row.vanished, row.subnormal, row.overflow, row.headroom) == (15 / 40, 11 / 40, 0, 16)
    assert report.at(2.0**16).total.vanished == 0
    assert report.at(2.0**18).total.overflow == 2 / 40
    assert report.at(2.0**18).total.headroom == -2


@pytest.mark.parametrize(("scale", "share"), [(2.0**10, 0.0), (2.0**10.25, 0.25), (2.0**10.75, 0.75), (2.0**11, 1.0)])
def test_a_scale_between_two_powers_moves_a_share_of_each_bin(scale, share):
    spread = 2.0 ** (-36 + (np.arange(1000) + 0.5) / 1000)  # evenly over the logarithm, from 2**-36 to 2**-35
    report = PrecisionReport(counted({"kernel": spread})).at(scale)
    assert report.total.vanished == pytest.approx(1 - share)
    assert (float16(spread, scale) == 0).mean() == pytest.approx(1 - share, abs=0.002)


def test_what_leaves_the_bins_stays_in_the_first_and_the_last():
    counts = counted({"kernel": [1e-30, 1.0, 1e30]})
    assert counts.counts[0, [column(LOWEST), column(0), column(HIGHEST)]].tolist() == [1, 1, 1]
    assert counts.at(2.0**-100).counts[0, column(LOWEST)] == 3
    assert counts.at(2.0**100).counts.sum() == 3


def test_the_best_scale_is_a_power_of_two_for_any_scale():
    gradients = {"kernel": np.array([1.9])}
    assert PrecisionReport(counted(gradients)).best_scale == 2.0**15
    assert PrecisionReport(counted(gradients, scale=1000.0)).best_scale in (2.0**14, 2.0**15)
    assert PrecisionReport(counted({"kernel": np.array([1e-30])})).best_scale <= 2.0**127


def test_all_zeros_ask_for_a_higher_scale_where_float16_may_have_made_them():
    report = PrecisionReport(counted({"kernel": np.full(9, 1e-9)}, float16=True))
    assert report.best_scale is None
    assert report.sentences == (
        "All values are zero: count again with a higher loss scale.",
        "Without a loss scale float16 affects 1 variable: kernel (only zeros).",
    )
    report = PrecisionReport(counted({"kernel": np.zeros(9)}))
    assert report.sentences[0] == "All values are zero."
    assert report.affected == ()


def test_values_that_a_scale_made_infinite_bound_it():
    report = PrecisionReport(counted({"kernel": [1.0, 8.0], "bias": [1e-6]}, scale=2.0**14, float16=True))
    assert report.overflow_is_open
    assert report.best_scale == 2.0**13
    assert [row.headroom for row in report.rows] == [None, 21]
    assert report.sentences == (
        "Values became infinite or NaN at the loss scale 2**14, so it is unknown how large they would be. A scale that "
        "fits is at most 2**13: count again at a lower one.",
        "At 2**14 float16 affects 1 variable: kernel (50.0% overflow).",
    )


def test_all_overflow_bounds_the_scale_too():
    report = PrecisionReport(counted({"kernel": [8.0, 9.0]}, scale=2.0**14, float16=True))
    assert report.total.overflow == 1
    assert report.best_scale == 2.0**13


def test_values_that_are_infinite_in_float32_are_no_matter_of_the_scale():
    report = PrecisionReport(counted({"kernel": [np.inf, np.nan]}))
    assert (report.best_scale, report.total.overflow, report.total.nan) == (None, 0.5, 0.5)
    assert report.sentences[0] == "All values except zeros are infinite or NaN: no loss scale helps."
    assert PrecisionReport(counted({"kernel": [np.inf, 1.5]})).best_scale == 2.0**15


def test_values_that_are_not_finite_at_a_low_scale_point_to_another_cause():
    report = PrecisionReport(counted({"kernel": [np.nan, 1.0], "bias": [1.0]}, float16=True))
    assert report.sentences == (
        "Values are infinite or NaN although the loss scale is only 1: look for the cause in the loss, the layers and "
        "the data.",
        "Without a loss scale float16 affects 1 variable: kernel (50.0% NaN).",
    )
    both = PrecisionReport(counted({"kernel": [np.nan, np.inf, 1.0, 1.0]}, scale=8.0, float16=True))
    assert both.sentences[1] == "At 2**3 float16 affects 1 variable: kernel (25.0% overflow and 25.0% NaN)."


def test_shares_of_values_that_are_not_zero_are_left_open_where_there_are_none():
    printed = repr(PrecisionReport(counted({"zeros": [0.0, 0.0], "none": [], "some": [1.0]}))).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in printed if line[:4] in ("zero", "none", "some")}
    assert rows["zeros"] == ["100%", "-", "-", "-", "-", "-"]
    assert rows["none"] == ["-"] * 6
    assert rows["some"] == ["0%", "0%", "0%", "15", "0%", "0%"]
    assert PrecisionReport(counted({"zeros": [0.0]})).sentences == (
        "All values are zero.",
        "No variable has values that float16 could lose.",
    )


def test_a_report_at_a_wrong_scale_is_refused():
    report = PrecisionReport(counted({"kernel": [1.0]}))
    for scale in (0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="`scale` must be a finite float32 number above 0"):
            report.at(scale)
    with pytest.raises(TypeError, match="`scale` must be a number, but got: '8'"):
        report.at("8")


@pytest.mark.parametrize("gradients", [{}, {"kernel": []}, {"kernel": [], "bias": []}])
def test_without_a_gradient_the_report_says_so(gradients):
    report = PrecisionReport(counted(gradients))
    assert report.sentences[0] == "No variable had a gradient."
    assert report.best_scale is None
    assert len(report.rows) == len(gradients)
    assert "all" in repr(report)


def test_the_sentences_name_the_scale_and_the_worst_variables():
    fine = {f"fine_{i}": np.ones(10) for i in range(3)}
    hurt = {f"hurt_{i}": np.array([2.0**-30] * (i + 3) + [1.0] * (7 - i)) for i in range(5)}
    report = PrecisionReport(counted({**fine, **hurt}))
    assert report.sentences == (
        "The highest loss scale at which no value overflows is 2**15; of the values that are not zero, 0% vanish and "
        "31.2% are subnormal at this scale (without a loss scale: 31.2% vanish and 0% are subnormal).",
        "Without a loss scale float16 affects 5 variables: hurt_4 (70.0% vanish or are subnormal, 70.0% at 2**15), "
        "hurt_3 (60.0% vanish or are subnormal, 60.0% at 2**15), hurt_2 (50.0% vanish or are subnormal, 50.0% at "
        "2**15), and 2 more.",
    )
    best = PrecisionReport(counted(fine, scale=2.0**15))
    assert best.sentences == (
        "The highest loss scale at which no value overflows is 2**15; of the values that are not zero, 0% vanish and "
        "0% are subnormal at this scale.",
        "At 2**15 no variable is affected: each has at least 90% of its values in float16's normal range.",
    )


def test_what_vanishes_of_float32_layers_is_said_beside_layers_that_float16_rounded():
    mixed = counted({"float16": [1e-9, 2.0**-20]}, float16=True)
    wide = counted({"float32": [2.0**-30, 1.0]})
    counts = ExponentCounts(("float16", "float32"), np.concatenate([mixed.counts, wide.counts]), scale=1.0, step=1)
    report = PrecisionReport(counts)
    assert [row.rounded for row in report.rows] == [True, False]
    assert "(without a loss scale: 33.3% vanish and 33.3% are subnormal)" in report.sentences[0]


def test_the_printed_report_fits_80_columns_and_says_what_cannot_be_told(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"transformer/encoder/block_{i}/attention/query/kernel" for i in range(60)]
    printed = repr(PrecisionReport(counted({name: [1e-6, 0.0] for name in names}, scale=2.0**10, float16=True)))
    assert max(map(len, printed.splitlines())) <= 80
    assert "values that\nvanished are among the zeros" in printed
    assert "50.0%*" in printed
    printed = repr(PrecisionReport(counted({"kernel": [1e-6, 0.0]})))
    assert "*" not in printed.replace("2**", "")


def test_rich_prints_it_as_it_is_and_json_keeps_the_numbers():
    report = PrecisionReport(counted({"[bold]kernel": [1e-6, 3.0]}, step=7))
    console = Console(file=io.StringIO(), width=100)
    console.print(report)
    assert "[bold]kernel" in console.file.getvalue()
    read = json.loads(json.dumps(report.as_dict()))
    assert (read["step"], read["scale"], read["best_scale"]) == (7, 1.0, 2.0**14)
    assert read["rows"][0]["variable"] == "[bold]kernel"
    assert read["total"]["values"] == 2
    assert read["sentences"] == list(report.sentences)


def test_counts_of_a_wrong_shape_scale_or_name_are_refused():
    with pytest.raises(ValueError, match=r"`counts` must have the shape \(2, 99\), with a row for each name"):
        ExponentCounts(("a", "b"), np.zeros([1, COLUMNS]), 1.0, 1)
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="`scale` must be a finite number above 0"):
            ExponentCounts((), np.zeros([0, COLUMNS]), scale, 1)
    with pytest.raises(ValueError, match=r"`names` must not contain the same name twice, but got: \('a', 'a'\)"):
        ExponentCounts(("a", "a"), np.zeros([2, COLUMNS]), 1.0, 1)


UNKNOWN = "These gradients do not tell whether float16 fits"


def spread(low, high):
    """A value in each bin."""
    return 1.5 * 2.0 ** np.arange(low, high + 1.0)


@pytest.mark.parametrize(
    ("gradients", "answer"),
    [
        (
            {"kernel": spread(-10, 10)},
            "Float16 fits even without a loss scale: 0% of the values that are not zero are outside its normal range.",
        ),
        (
            {"kernel": spread(-34, -20), "bias": spread(-10, -5)},
            "Float16 fits with a loss scale: without one 71.4% of the values that are not zero are outside its normal "
            "range, with a loss scale of 2**20 0%.",
        ),
        (
            {"kernel": spread(-20, -10)},  # nothing vanishes, but bits are lost
            "Float16 fits with a loss scale: without one 54.5% of the values that are not zero are outside its normal "
            "range, with a loss scale of 2**25 0%.",
        ),
        (
            {"kernel": spread(0, 10), "huge": spread(17, 18)},
            "Float16 fits with a loss scale: without one 15.4% of the values that are not zero are outside its normal "
            "range, with a loss scale of 2**-3 0%.",
        ),
        (
            {"kernel": np.tile(spread(0, 10), 99), "rare": np.array([2.0**-40])},
            "Float16's range is too narrow: without a loss scale <0.1% of the values that are not zero are outside its "
            "normal range, with the best loss scale, 2**5, <0.1%. Use bfloat16 or float32 for the variables with the "
            "largest fraction outside the range: rare (100%).",
        ),
        (
            {"wide": spread(-60, 15)},
            "Float16's range is too narrow: without a loss scale 60.5% of the values that are not zero are outside its "
            "normal range, with the best loss scale, 1, 60.5%. Use bfloat16 or float32 for the variables with the "
            "largest fraction outside the range: wide (60.5%).",
        ),
        ({"kernel": np.zeros(3)}, f"{UNKNOWN}: all of their values are zero."),
        ({}, f"{UNKNOWN}: all of their values are zero."),
        (
            {"kernel": np.array([1.0, np.nan])},
            f"{UNKNOWN}: some are infinite or NaN even in this program, without float16. Count a step with finite "
            "gradients.",
        ),
    ],
)
def test_whether_float16_fits_follows_from_what_is_outside_its_normal_range(gradients, answer):
    assert whether_float16_fits(PrecisionReport(counted(gradients))) == answer
