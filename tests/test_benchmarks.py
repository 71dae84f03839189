"""The benchmarks run from end to end, and the page says what they measured."""

import json
import pathlib

import pytest
import tensorflow as tf

from benchmarks import __main__ as command
from benchmarks import beside, clock, contenders, costs, report, steps, workloads

DOCS = pathlib.Path(__file__).parents[1] / "docs"
TINY = {"mode": "tf.function", "family": "tf_keras legacy", "workload": "3 x 1k"}


@pytest.fixture(scope="module")
def results():
    return json.loads((DOCS / "performance.json").read_text())


@pytest.fixture
def only_tiny(monkeypatch):
    """The suite has one cell."""
    monkeypatch.setattr(steps, "cells", lambda: iter([{"what": "step", **TINY}]))
    for module in (costs, beside):
        monkeypatch.setattr(module, "cells", lambda: iter([]))


@pytest.mark.parametrize(
    "what", ["step", "minimize", "skipped step", "diagnose", "growth", steps.COMPILED, steps.EXPONENTS]
)
def test_a_cell_is_measured_for_every_contender(what):
    row = steps.measure({"what": what, **TINY}, seconds=0, least=1)
    assert row["rounds"] == 1
    wanted = {
        "step": 4,
        "minimize": 4,
        "skipped step": 2,
        "diagnose": 2,
        "growth": 2,
        steps.COMPILED: 4,
        steps.EXPONENTS: 4,
    }
    assert len(row["ratios"]) == wanted[what]
    bare, *others = row["ratios"].values()
    assert bare == {"processor": 1.0, "wall": 1.0}
    assert all(both["processor"] > 0 for both in others)
    assert TINY["workload"] in report.line(row)


def test_every_cell_has_a_name_of_its_own_and_every_workload_has_as_many_gradients_as_variables():
    cells = [tuple(cell.values()) for cell in (*steps.cells(), *costs.cells(), *beside.cells())]
    assert len(cells) == len(set(cells))
    for workload in (workloads.SPARSE, "3 x 1k"):
        assert len(workloads.gradients(workload)) == len(workloads.variables(workload))
    assert len(workloads.shapes(workloads.RESNET)) == 160


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("family", contenders.FAMILIES)
@pytest.mark.parametrize("mode", ["tf.function", "eager", "jit_compile"])
def test_each_family_minimizes_in_each_mode(mode, family):
    row = steps.measure({"what": "minimize", **TINY, "mode": mode, "family": family}, seconds=0, least=1, first=0)
    assert set(row["ratios"]) == {*contenders.MINIMIZERS, contenders.LEAST}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("workload", [*workloads.MODELS, workloads.LENET])
def test_each_model_learns_its_batch(workload):
    variables, loss = workloads.model(workload)
    optimizer = contenders.optimizer("Keras 3", contenders.OURS)
    before = float(loss())
    for _ in range(3):
        with tf.GradientTape() as tape:
            scaled = contenders.scale(optimizer, contenders.OURS, loss())
        contenders.apply(optimizer, contenders.OURS, tape.gradient(scaled, variables), variables)
    assert float(loss()) < before


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("what", "mode"), [("tracing", "tf.function"), ("compiling", "jit_compile")])
def test_tracing_counts_the_nodes_that_each_contender_adds(what, mode):
    row = costs.measure({"what": what, **TINY, "mode": mode}, seconds=0, least=1)
    assert row["nodes"][contenders.OURS] > row["nodes"][contenders.BARE] > 0
    assert f"| {row['nodes'][contenders.OURS] - row['nodes'][contenders.BARE]} |" in _table([row], what)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_of_its_own_tells_its_own_peak():
    ballast = tf.zeros([100_000_000])  # 400 MB that are not the other's
    assert costs.apart("memory", "4 x 1M", contenders.BARE) > 4 * 4 * 3
    del ballast


def test_peak_memory_is_compared_with_the_bare_optimizer_that_does_the_same():
    megabytes = {"bare": 100.0, "tf-lossscale": 130.0, "bare, minimize": 120.0, "tf-lossscale, minimize": 125.0}
    row = {"what": "peak memory", **TINY, "megabytes": megabytes}
    table = _table([row], "peak memory")
    assert "| tf-lossscale | 130 MB | 30 MB |" in table
    assert "| tf-lossscale, minimize | 125 MB | 5 MB |" in table


def test_all_libraries_are_beside_each_other_in_one_table(monkeypatch):
    monkeypatch.setattr(contenders, "FAMILIES", {"Keras 3": contenders.FAMILIES["Keras 3"]})
    cell = {"what": "beside", "mode": "tf.function", "family": "all", "workload": "3 x 1k"}
    row = beside.measure(cell, seconds=0, least=1, first=0)
    assert list(row["milliseconds"])[:4] == [f"Keras 3: {name}" for name in beside.COLUMNS]
    assert min(row["milliseconds"].values()) > 0
    assert "| 3 x 1k | Keras 3 | " in _table([row], "beside")


def test_pytorch_takes_part_where_it_is_installed():
    assert any(cell["family"] == contenders.TORCH for cell in steps.cells())
    pytest.importorskip("torch")
    row = steps.measure({**TINY, "what": "step", "mode": "eager", "family": contenders.TORCH}, seconds=0, least=1)
    assert set(row["ratios"]) == {contenders.BARE, contenders.THEIRS}


def test_without_pytorch_the_command_leaves_its_cells_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    command.main(["--list", "--json", str(tmp_path / "numbers.json")])
    listed = capsys.readouterr().out.splitlines()
    assert listed
    assert not any(contenders.TORCH in line for line in listed)


def test_a_contender_that_cannot_run_is_left_out_with_its_reason(monkeypatch):
    def refuse(opt, name, gradients, variables):
        if name == contenders.THEIRS:
            raise NotImplementedError(
                "in user code:\n\n    File /home/me/x.py, line 3\n\n    NotImplementedError: No | XLA."
            )

    monkeypatch.setattr(contenders, "apply", refuse)
    row = steps.measure({"what": "step", **TINY}, seconds=0, least=1)
    assert contenders.THEIRS not in row["ratios"]
    table = _table([row], "step")
    assert f"- {TINY['family']}, {TINY['mode']}, 3 x 1k: without **its own wrapper**." in table
    assert table.endswith("`NotImplementedError: No / XLA.`")
    assert "No / XLA" in report.line(row)


def test_a_row_whose_first_contender_cannot_run_has_its_reason_alone(monkeypatch):
    monkeypatch.setattr(contenders, "apply", lambda *given: [][0])
    row = steps.measure({"what": "step", **TINY}, seconds=0, least=1)
    assert "ratios" not in row
    assert "IndexError" in _table([row], "step")


def test_what_no_loss_scale_can_leave_out_is_measured_beside_the_large_steps(monkeypatch):
    monkeypatch.setattr(steps, "LARGE", TINY["workload"])
    row = steps.measure({"what": "step", **TINY}, seconds=0, least=1)
    assert contenders.LEAST in row["ratios"]
    assert f"| {TINY['workload']} | {row['ratios'][contenders.LEAST]['processor']:.2f} |" in _table([row], "least")
    row = steps.measure({"what": "minimize", **TINY}, seconds=0, least=1)
    assert f"| {row['ratios'][contenders.LEAST]['processor']:.2f} | 1 |" in _table([row], "minimize")


def _table(rows, name):
    machine = dict.fromkeys(("processor", "cores", "python", "tensorflow", "keras", "tf_keras"), "")
    return report.tables({"machine": machine, "rows": rows})[name]


@pytest.mark.usefixtures("only_tiny")
def test_the_command_measures_what_it_is_asked_for_and_renews_the_page(tmp_path, capsys):
    (tmp_path / "numbers.md").write_text(
        "Before.\n<!-- step -->\nold\n<!-- end -->\n<!-- import -->\nold\n<!-- end -->\nAfter.\n"
    )
    command.main(["--only", "^step", "--seconds", "0", "--rounds", "1", "--json", str(tmp_path / "numbers.json")])
    (row,) = json.loads((tmp_path / "numbers.json").read_text())["rows"]
    text = (tmp_path / "numbers.md").read_text()
    ours = f"{row['ratios'][contenders.OURS]['processor']:.2f}"
    assert text.startswith("Before.\n")
    assert text.endswith(f"<!-- import -->\n{report.UNMEASURED}\n<!-- end -->\nAfter.\n")
    assert "old" not in text
    assert ours in text
    assert ours in capsys.readouterr().out
    picture = (tmp_path / "numbers.svg").read_bytes()
    command.main(["--missing", "--json", str(tmp_path / "numbers.json")])
    assert (tmp_path / "numbers.md").read_text() == text
    assert (tmp_path / "numbers.svg").read_bytes() == picture


def test_cells_that_take_minutes_to_begin_are_measured_on_demand(tmp_path, capsys):
    def listed(*more):
        command.main(["--list", "--json", str(tmp_path / "numbers.json"), *more])
        return set(capsys.readouterr().out.splitlines())

    usual, more = listed(), listed("--long") - listed()
    assert usual
    assert "step, mirrored, Keras 3, ResNet-50" in more
    long = [f"{what}, {mode}, " for what in ("step",) for mode in ("jit_compile", "mirrored")]
    assert all(line.startswith(tuple(long)) for line in more)


@pytest.mark.usefixtures("only_tiny")
def test_no_cell_is_begun_when_the_time_is_over(tmp_path, capsys):
    command.main(["--minutes", "0", "--json", str(tmp_path / "numbers.json")])
    assert capsys.readouterr().out == "measurements left after 0 minutes: 1; continue with --missing\n"


@pytest.mark.usefixtures("only_tiny")
def test_a_run_goes_on_with_what_is_missing(tmp_path, capsys):
    (tmp_path / "numbers.json").write_text(
        json.dumps({"rows": [{"what": "step", **TINY, "measured": "2026-01-31T15:00"}]})
    )

    def listed(*more):
        command.main(["--list", "--json", str(tmp_path / "numbers.json"), *more])
        return capsys.readouterr().out

    name = f"step, {TINY['mode']}, {TINY['family']}, {TINY['workload']}"
    assert listed() == f"{name} (2026-01-31T15:00)\n"
    assert listed("--only", "eager") == ""
    assert listed("--missing") == ""
    assert listed("--missing", "2026-01-31T14:59") == ""
    assert listed("--missing", "2026-01-31T15:01").startswith(name)
    (tmp_path / "numbers.json").write_text(json.dumps({"rows": [{"what": "step", **TINY, "refused": {"bare": "no"}}]}))
    assert listed("--missing").startswith(name)


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
    always = {"processor", "cores", "python", "tensorflow", "keras", "tf_keras"}
    assert set(results["machine"]) | {"torch"} == always | {"torch"}


def test_this_package_runs_in_every_row(results):
    assert not any(name.startswith(contenders.OURS) for row in results["rows"] for name in row.get("refused", {}))
