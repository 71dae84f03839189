"""Tests of meaning run twice: with the tricks of core/fast, and without.

A module of such tests says `pytestmark = pytest.mark.with_and_without_tricks`.
"""

import pytest

from tf_lossscale.core import fast


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("with_and_without_tricks"):
        metafunc.fixturenames.append("tricks")
        metafunc.parametrize("tricks", ["fast", "plain"], indirect=True)


@pytest.fixture
def tricks(request):
    if request.param == "fast":
        yield
        return
    with fast.without():
        yield
