"""The comparison that the tests of numbers share."""

import numpy as np
import pytest

from tests import numerics

BEFORE = np.float32([1.75, 0.5])
UNIT = 2.0**-22  # two units in the last place of 1.75


def test_what_a_step_leaves_is_compared_in_the_unit_of_what_it_was_subtracted_from():
    assert numerics.difference([UNIT, 0.25], [0.0, 0.25], BEFORE) == UNIT / 1.75
    assert numerics.difference([UNIT, 0.0], [0.0, 0.0]) > 1
    numerics.assert_close([UNIT, 0.25], [0.0, 0.25], 2e-7, BEFORE)


def test_an_error_of_the_size_of_the_operands_is_found():
    assert numerics.difference([1.0], [2.0]) == 0.5
    assert numerics.difference([1.0], [2.0], [4.0], [3.0]) == 0.25
    with pytest.raises(AssertionError, match=r"step 3: \[0.001 0.25"):
        numerics.assert_close(np.array([0.001, 0.25]), [0.0, 0.25], 1e-6, BEFORE, where="step 3")


@pytest.mark.parametrize(
    ("actual", "expected"), [([np.nan], [1.0]), ([1.0], [np.inf]), ([1.0, 1.0], [1.0]), ([np.nan], [np.inf])], ids=str
)
def test_other_shapes_and_other_elements_that_are_not_finite_are_a_difference(actual, expected):
    assert numerics.difference(actual, expected) == np.inf


def test_elements_that_are_not_finite_set_no_unit():
    assert numerics.difference([np.inf, 1.0], [np.inf, 2.0], [np.nan, 4.0]) == 0.25
    assert numerics.difference([np.inf, np.nan], [np.inf, np.nan]) == 0
    assert numerics.difference([], []) == 0
