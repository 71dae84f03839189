"""docs/libraries.md says of each library what its trial shows; see trials.py."""

import importlib.util
import pathlib
import re

import pytest
import tensorflow as tf

from tests.libraries.trials import TF_2_15, TODAY_KERAS_2, TRIALS
from tests.processes import printed

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("library", TRIALS)
def test_a_library_does_under_mixed_float16_what_the_page_says(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    tried_with, _ = TRIALS[library]
    if tf.__version__.startswith("2.15.") != (tried_with == TF_2_15):
        pytest.skip(f"{library} is tried with {tried_with}")
    legacy = str(int(tried_with == TODAY_KERAS_2))
    printed("-m", "tests.libraries.trials", library, TF_USE_LEGACY_KERAS=legacy, PYTHONPATH=str(ROOT))


def test_every_row_of_the_page_has_a_trial():
    page = (ROOT / "docs" / "libraries.md").read_text()
    rows = re.findall(r"^\| `(\w+)` [\d.]+ \| ([^|]+) \|", page, re.MULTILINE)
    assert dict(rows) == {library: tried_with for library, (tried_with, _) in TRIALS.items()}
