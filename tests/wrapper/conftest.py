"""Fixtures of the wrapper's tests."""

import pytest
from absl import logging

from tf_lossscale.core import factors
from tf_lossscale.wrapper import contract


@pytest.fixture(autouse=True)
def without_earlier_calls():
    """Forget the losses in eager mode of optimizers of earlier tests, which may be in reference cycles."""
    contract._EAGER.call = None
    factors._EVENTS.clear()


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that the package has logged so far."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    monkeypatch.setattr(logging, "log_first_n", lambda level, message, n, *values: said.append(message % values))
    return said
