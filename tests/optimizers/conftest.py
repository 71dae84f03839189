"""What the tests of the optimizers share."""

import pytest

from tests.optimizers.recorded import LIBRARIES


@pytest.fixture(params=LIBRARIES)
def make(request):
    """The class of one of the libraries."""
    return LIBRARIES[request.param]
