"""The benchmarks run from end to end, and the page says what they measured."""

import json
import pathlib

import pytest

from benchmarks import __main__ as command
from benchmarks import clock, contenders, report, steps, workloads

DOCS = pathlib.Path(__file__).parents[1] / "docs"
TINY = {"mode": "tf.function", "family": "tf_keras legacy", "workload": "3 x 1k"}


@pytest.fixture(scope="module")
def results():
    return json.loads((DOCS / "performance.json").read_text())


@pytest.mark.parametrize("what", ["step", "minimize", "skipped step", "growth"])
def test_a_cell_is_measured_for_every_contender(what):
    row = steps.measure({"what": what, **TINY}, seconds=0, least=1)
    assert row["rounds"] == 1
    assert len(row["ratios"]) == {"step": 4, "minimize": 3, "skipped step": 2, "growth": 2}[what]
    bare, *others = row["ratios"].values()
    assert bare == {"processor": 1.0, "wall": 1.0}
    assert all(both["processor"] > 0 for both in others)
    assert TINY["workload"] in report.line(row)


def test_every_cell_has_a_name_of_its_own_and_every_workload_has_as_many_gradients_as_variables():
    cells = [tuple(cell.values()) for cell in (*steps.cells(), *command.costs.cells())]
    assert len(cells) == len(set(cells))
    for workload in (workloads.SPARSE, "3 x 1k"):
        assert len(workloads.gradients(workload)) == len(workloads.variables(workload))
    assert len(workloads.shapes(workloads.RESNET)) == 160


def test_the_command_measures_what_it_is_asked_for_and_renews_the_page(tmp_path, capsys):
    cells = [{"what": "step", **TINY}]
    (tmp_path / "numbers.md").write_text("Before.\n<!-- step -->\nold\n<!-- end -->\nAfter.\n")
    original = steps.cells
    try:
        steps.cells = lambda: iter(cells)
        command.main(["--only", "^step", "--seconds", "0", "--rounds", "1", "--json", str(tmp_path / "numbers.json")])
    finally:
        steps.cells = original
    (row,) = json.loads((tmp_path / "numbers.json").read_text())["rows"]
    text = (tmp_path / "numbers.md").read_text()
    ours = f"{row['ratios'][contenders.OURS]['processor']:.2f}"
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert ours in text
    assert ours in capsys.readouterr().out
    assert (tmp_path / "numbers.svg").exists()


def test_turns_are_taken_and_ratios_are_medians_of_rounds():
    calls = []
    times = clock.in_turns({name: (lambda name=name: calls.append(name)) for name in "ab"}, seconds=0, least=3)
    assert calls == ["a", "a", "b", "b", *"abbaab"]
    times["a"].processor, times["b"].processor = [1.0, 2.0, 4.0], [2.0, 2.0, 4.0]
    assert clock.ratios(times, to="a")["b"]["processor"] == 1.0


def test_the_page_has_the_numbers_of_the_file(results):
    text = (DOCS / "performance.md").read_text()
    for name, table in report.tables(results).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end -->" in text, (
            f"run `python -m benchmarks`; the page needs <!-- {name} -->"
        )


def test_the_file_names_no_machine_beyond_its_processor(results):
    assert set(results["machine"]) == {"processor", "cores", "python", "tensorflow", "keras", "tf_keras"}
