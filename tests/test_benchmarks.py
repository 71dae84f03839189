"""The benchmarks run, and the page has what they measured."""

import pathlib
import re

import pytest

from tools.benchmarks import __main__ as command
from tools.benchmarks import steps

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"


@pytest.mark.parametrize("family", steps.FAMILIES)
def test_a_cell_is_measured_for_every_wrapper(family):
    what, workload = "step", "3 x 1k"
    row = steps.measure({"what": what, "mode": "tf.function", "family": family, "workload": workload}, 0, least=1)
    assert row["rounds"] == 1
    assert set(row["ratios"]) == {steps.BARE, steps.OURS, steps.THEIRS}
    assert row["ratios"][steps.BARE] == 1.0
    assert command.line(row) in command.tables([row])[what]


def test_the_page_has_a_row_for_each_measurement_and_every_table(tmp_path):
    text = PAGE.read_text()
    for cell in steps.cells():
        shown = f"| {cell['mode']} | {cell['family']} | {cell['workload']} | "
        assert shown in text, f"run `python -m tools.benchmarks`: {cell}"
    assert not re.findall(r"<!-- (?!end)[\w ]+ -->\n<!-- end -->", text), "run `python -m tools.benchmarks`"
    page = tmp_path / "page.md"
    page.write_text(text)
    command.renew(page, {"machine": "A machine."})
    assert "<!-- machine -->\nA machine.\n<!-- end -->" in page.read_text()
