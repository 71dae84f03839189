"""Fixtures of all tests."""

import pytest
from absl import logging


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that the package has logged so far."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    return said
