"""Tests of meaning run twice: with the tricks of core/fast, and without."""

import pytest

from tf_lossscale.core import fast

BOTH_WAYS = ("test_finite", "test_scaling")


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in BOTH_WAYS:
        metafunc.fixturenames.append("tricks")
        metafunc.parametrize("tricks", ["fast", "plain"], indirect=True)


@pytest.fixture
def tricks(request):
    if request.param == "fast":
        yield
        return
    with fast.without():
        yield
