"""What the tests of the optimizers share."""

import pytest

from tests.optimizers.recorded import KERAS, LIBRARIES


@pytest.fixture(params=LIBRARIES)
def library(request):
    """The name of one of the libraries."""
    return request.param


@pytest.fixture
def make(library):
    """The class for this library."""
    return LIBRARIES[library]


@pytest.fixture
def keras(library):
    """The module of this library."""
    return KERAS[library]
