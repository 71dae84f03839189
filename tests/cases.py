"""The cases of tests that combine several parameters."""

import itertools
import zlib

import pytest

from tests import strategies


def named(values):
    """Return the values of a dictionary for `parametrize`, with its keys as their ids."""
    return [pytest.param(value, id=name) for name, value in values.items()]


MODES = named({"eager": False, "function": True})


def _id(value):
    return getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)


def _param(case):
    """Return one of the cases of `parametrize` as a pytest.param with an id. A tuple holds several arguments."""
    if not hasattr(case, "marks"):
        case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
    return case._replace(id=case.id or "-".join(map(_id, case.values)))


def slow_one_in(count):
    """Return a function for `combinations` that marks one in so many cases as slow, and the others as exhaustive."""
    return lambda name: pytest.mark.exhaustive if zlib.crc32(name.encode()) % count else pytest.mark.slow


def combinations(*axes, usual, others=pytest.mark.exhaustive):
    """Return the cases for `parametrize` of all combinations, of which only those in `usual` run in `make test`.

    Args:
        *axes: for each parameter its values, as `parametrize` takes them.
        usual: the ids of the cases without a marker, such as "function-keras3"; or their number, if any cases will do.
            They are spread evenly over all cases.
        others: the marker of all other cases, or a function that returns it for the id of a case.
    """
    products = [[*parts] for parts in itertools.product(*([*map(_param, axis)] for axis in axes))]
    names = ["-".join(part.id for part in parts) for parts in products]
    if isinstance(usual, int):
        usual = [names[i * len(names) // usual] for i in range(usual)]
    cases = []
    for parts, name in zip(products, names):
        marks = [mark for part in parts for mark in part.marks]
        if name not in usual:
            marks.append(others if isinstance(others, pytest.MarkDecorator) else others(name))
        cases.append(pytest.param(*(value for part in parts for value in part.values), id=name, marks=marks))
    unknown = {*usual} - {case.id for case in cases}
    if unknown and not strategies.ROLE:  # over several processes, other strategies are tested
        raise ValueError(f"these are the ids of no combination: {sorted(unknown)}")
    return cases


#: Parameters whose values are further examples of the same behavior.
_REPEATING = {"family", "keras", "library", "recording", "name", "mode", "compiled", "way"}


def mark_repetitions(items):
    """Share out the cases of each test that has several parameters, or a repeating one.

    Of cases without a marker, a third runs in `make test` and a sixth is slow. Of slow cases, a third stays slow. All
    others are exhaustive. The cases are chosen by their names, so they do not change from run to run.
    """
    tests = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if not item.get_closest_marker("exhaustive") and (len(parameters) > 1 or parameters.keys() & _REPEATING):
            is_slow = item.get_closest_marker("slow") is not None
            tests.setdefault((item.nodeid.split("[")[0], is_slow), []).append(item)
    for (_, is_slow), cases in tests.items():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        third = (len(cases) + 2) // 3
        slow_until = third if is_slow else third + (third + 1) // 2
        for i, item in enumerate(cases[third:], third):
            item.add_marker("slow" if i < slow_until else "exhaustive")
