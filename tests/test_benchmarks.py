"""The benchmarks run, and the page has what they measured."""

import pathlib
import re

import pytest

from benchmarks import __main__ as command
from benchmarks import clock, steps, workloads

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"


@pytest.mark.parametrize("family", steps.FAMILIES)
@pytest.mark.parametrize("what", ["step", "training step"])
def test_a_cell_is_measured_for_every_wrapper(family, what):
    workload = "3 x 1k" if what == "step" else "convnet"
    row = steps.measure({"what": what, "mode": "tf.function", "family": family, "workload": workload}, 0, least=1)
    assert row["rounds"] == 1
    assert set(row["ratios"]) == {steps.BARE, steps.OURS, steps.THEIRS}
    assert row["ratios"][steps.BARE] == 1.0
    assert command.line(row) in command.tables([row])[what]


def test_the_page_has_a_row_for_each_measurement_and_every_table(tmp_path):
    text = PAGE.read_text()
    for cell in steps.cells():
        shown = f"| {cell['mode']} | {cell['family']} | {cell['workload']} | "
        assert shown in text, f"run `make bench`: {cell}"
    assert not re.findall(r"<!-- (?!end)[\w ]+ -->\n<!-- end -->", text), "run `make bench`"
    page = tmp_path / "page.md"
    page.write_text(text)
    command.renew(page, {"machine": "A machine."})
    assert "<!-- machine -->\nA machine.\n<!-- end -->" in page.read_text()


def test_workloads_have_as_many_gradients_as_variables():
    assert len(workloads.gradients("3 x 1k")) == len(workloads.variables("3 x 1k")) == 3
    assert len(workloads.shapes(workloads.RESNET)) == 160


def test_turns_are_taken_and_ratios_are_medians_of_rounds():
    calls = []
    times = clock.in_turns({name: (lambda name=name: calls.append(name)) for name in "ab"}, seconds=0, least=3)
    assert calls == ["a", "a", "b", "b", *"abbaab"]
    times["a"].processor, times["b"].processor = [1.0, 2.0, 4.0], [2.0, 2.0, 4.0]
    assert clock.ratios(times, to="a")["b"]["processor"] == 1.0
