"""What a precision report says of made distributions is what NumPy's float16 does with them."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.diagnosis.made import counted
from tf_lossscale.diagnosis.precision import HIGHEST, LOWEST, PrecisionReport, column

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
    half, twice = report.at(2.0 ** (k - 1)), report.at(2.0 ** (k + 1))
    for row, at_half, at_twice, each in zip(report.rows, half.rows, twice.rows, values.values()):
        nonzero = each[each != 0]
        assert row.rounded
        assert row.vanished == at_twice.vanished == 0
        assert at_half.vanished * max(len(nonzero), 1) == pytest.approx((float16(nonzero, 0.5) == 0).sum())


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


def test_values_that_a_scale_made_infinite_bound_the_best_scale():
    report = PrecisionReport(counted({"kernel": [1.0, 8.0], "bias": [1e-6]}, scale=2.0**14, float16=True))
    assert report.best_scale == 2.0**13
    assert [row.headroom for row in report.rows] == [None, 21]
    report = PrecisionReport(counted({"kernel": [8.0, 9.0]}, scale=2.0**14, float16=True))
    assert report.total.overflow == 1
    assert report.best_scale == 2.0**13


ADVICE = {
    "Best loss scale: 2**15, at which 0% vanish and 0% are subnormal.": counted({"kernel": [1.0, 2.0**-20]}),
    "Infinite or NaN at the loss scale 2**14: count again at 2**13 or lower.": counted(
        {"kernel": [8.0]}, scale=2.0**14, float16=True
    ),
    "Infinite or NaN at the loss scale 1: look for the cause in the model and data.": counted({"kernel": [np.nan, 1]}),
    "All values are zero. If float16 computed them, count again at a higher scale.": counted({"kernel": [0.0]}),
    "No variable had a gradient.": counted({"kernel": []}),
}


def test_the_last_line_says_what_to_do():
    for advice, counts in [*ADVICE.items(), ("No variable had a gradient.", counted({}))]:
        report = PrecisionReport(counts)
        assert repr(report).splitlines()[-1].startswith(advice)
        assert len(report.rows) == len(counts.names)


@pytest.mark.parametrize(("values", "stars"), [([0.0, 1.0], True), ([1.0, 2.0], False), ([0.0, 1e-10], False)], ids=str)
def test_zeros_have_a_footnote_only_if_float16_may_have_made_them(values, stars):
    printed = repr(PrecisionReport(counted({"kernel": values})))
    assert ("%*" in printed, "\n*: if float16" in printed) == (stars, stars)


def test_shares_of_values_that_are_not_zero_are_left_open_where_there_are_none():
    printed = repr(PrecisionReport(counted({"zeros": [0.0, 0.0], "none": [], "some": [1.0]}))).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in printed[2:5]}
    assert rows == {
        "zeros": ["100%*", "-", "-", "-", "-", "-"],
        "none": ["-", "-", "-", "-", "-", "-"],
        "some": ["0%", "0%", "0%", "0%", "0%", "15"],
    }


def test_zeros_are_marked_unless_a_value_is_outside_of_float16s_range():
    report = PrecisionReport(counted({"half": [1e-6, 0.0], "wide": [1e-9, 0.0]}))
    assert [row.rounded for row in report.rows] == [True, False]
    _, _, half, wide, *_ = repr(report).splitlines()
    assert "50.0%*" in half
    assert "*" not in wide


def test_a_report_at_a_wrong_scale_is_refused():
    report = PrecisionReport(counted({"kernel": [1.0]}))
    for scale in (0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="`scale` must be a finite float32 number above 0"):
            report.at(scale)
    with pytest.raises(TypeError, match="`scale` must be a number, but got: '8'"):
        report.at("8")
