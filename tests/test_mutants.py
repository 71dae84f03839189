"""Which tests run on a mutant."""

import math

import pytest

from mutants import __main__, covering

SOURCE = """\
LIMIT = 3


class Counter:
    step = 1

    def add(self, number=0):
        if number > 2:
            return number + self.step
        return (
            number -
            self.step
        )


def double(number):
    return 2 * number
"""

MEASURED = covering.Measured(
    seconds={"slow": 9.0, "quick": 0.1, "other": 1.0},
    tests={
        "counter.py": {
            1: [""],
            5: [""],
            8: ["slow", "quick", ""],
            9: ["slow"],
            10: ["quick"],
            11: ["quick"],
            17: ["other"],
        }
    },
)


@pytest.mark.parametrize(
    "old, new, tests",
    [
        ("number + self", "number - self", ["slow"]),
        ("number > 2", "number > 3", ["quick", "slow"]),
        ("number -\n", "number +\n", ["quick"]),
        ("            self.step\n        )", "            -self.step\n        )", ["quick"]),
        ("number=0", "number=1", ["quick", "slow"]),
        ("step = 1", "step = 2", ["quick", "slow"]),
        ("LIMIT = 3", "LIMIT = 4", ["quick", "other", "slow"]),
        ("2 * number", "2 + number", ["other"]),
    ],
)
def test_a_mutant_is_tested_by_the_tests_that_execute_its_statement_the_quickest_first(old, new, tests):
    assert SOURCE.count(old) == 1
    assert covering.quickest(SOURCE, SOURCE.replace(old, new), "counter.py", MEASURED, math.inf) == tests


def test_a_limit_leaves_out_the_slowest_tests_but_never_all():
    mutant = SOURCE.replace("number > 2", "number > 3")
    assert covering.quickest(SOURCE, mutant, "counter.py", MEASURED, 1.0) == ["quick"]
    assert covering.quickest(SOURCE, mutant, "counter.py", MEASURED, 0.0) == ["quick"]


def test_a_statement_that_no_test_executes_is_tested_by_those_around_it():
    measured = MEASURED._replace(tests={"counter.py": {8: ["quick"], 17: ["other"]}})
    mutant = SOURCE.replace("number + self", "number - self")
    assert covering.quickest(SOURCE, mutant, "counter.py", measured, math.inf) == ["quick"]


def test_each_mutant_is_another_program():
    pytest.importorskip("cosmic_ray", reason="only `make mutants` installs it")
    found = [mutant.source for mutant in __main__.mutants(SOURCE, "counter.py")]
    assert len({__main__.meaning(each) for each in [SOURCE, *found]}) == len(found) + 1
    assert any("number - self.step\n" in each for each in found)
    assert [mutant.source for mutant in __main__.mutants(SOURCE, "counter.py", [0])] == found[:1]


def test_a_sample_is_repeatable_and_a_smaller_sample_is_its_beginning():
    pytest.importorskip("cosmic_ray", reason="only `make mutants` installs it")
    sources = {"counter.py": SOURCE, "other.py": "limit = 3 * 4\n"}
    sample = list(__main__.sampled(sources, 20))
    assert len(set(sample)) == len(sample) == 20
    assert list(__main__.sampled(sources, 5)) == sample[:5]
