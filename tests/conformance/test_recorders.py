"""Every recording has a program that makes it again, and a difference between two recordings is found."""

import copy
import pathlib

import pytest

from tests.conformance import recordings
from tests.conformance.record import __main__ as command
from tests.conformance.record import comparison, originals, program

FOLDER = pathlib.Path(__file__).parent
NAMES = sorted(path.name.removesuffix(".json.gz") for path in (FOLDER / "data").glob("*.json.gz"))


def test_every_recording_belongs_to_one_original_and_one_program():
    assert sorted(name for original in originals.ORIGINALS.values() for name in original.recordings) == NAMES
    assert sorted(program.RECORDERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_names_the_program_and_the_versions_that_made_it(name):
    module, libraries = program.RECORDERS[name]
    made_with = recordings.load(name)["made_with"]
    assert made_with["program"] == f"tests/conformance/record/{module}.py"
    assert (FOLDER.parents[1] / made_with["program"]).is_file()
    assert {"date", "python", *libraries} <= set(made_with)
    [original] = [original for original in originals.ORIGINALS.values() if name in original.recordings]
    assert made_with["python"].startswith(f"{original.python}.")
    pinned = dict(requirement.split("==") for requirement in original.requirements if "==" in requirement)
    for library in set(libraries) & set(pinned):
        assert made_with[library].split("+")[0] == pinned[library]


def test_every_case_has_a_program_except_those_that_the_readme_names():
    kept = {name: recordings.load(name)["made_with"]["kept"] for name in NAMES}
    assert {name: counts for name, counts in kept.items() if counts} == {
        "mindspore_managers": {"auto_mixed_precision": 9}
    }
    assert "nine cases of `auto_mixed_precision`" in " ".join((FOLDER / "README.md").read_text().split())


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_the_recording_its_program_and_its_parts(name):
    readme = (FOLDER / "README.md").read_text()
    rows = [line for line in readme.splitlines() if f"`{name}`" in line and line.startswith("|")]
    assert [f"`{program.RECORDERS[name][0]}.py`" in row for row in rows] == [True]
    parts = set(recordings.load(name)) - {"shapes"}
    assert {part for part in parts if f"`{part}`" not in readme} == set()


RECORDED = {
    "made_with": {},
    "traces": {
        "one": {"trace": {"w0": [[1.0, "nan"]], "loss_scale": [8.0, 4.0]}},
        "two": {"error": {"type": "TypeError", "message": "a"}},
    },
}
CHANGES = {
    "a scale": ("one", lambda case: case["trace"].update(loss_scale=[8.0, 4.0000001])),
    "a weight": ("one", lambda case: case["trace"].update(w0=[[1.001, "nan"]])),
    "a NaN": ("one", lambda case: case["trace"].update(w0=[[1.0, 1.0]])),
    "a step less": ("one", lambda case: case["trace"].update(loss_scale=[8.0])),
    "an error": ("two", lambda case: case["error"].update(type="ValueError")),
    "a result instead of an error": ("two", lambda case: case.update(ok=1)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_difference_is_reported_with_its_case(what, capsys):
    case, change = CHANGES[what]
    new = copy.deepcopy(RECORDED)
    change(new["traces"][case])
    assert command.report("recording", RECORDED, new, "*") == 1
    assert f"traces/{case}: 1 differences" in capsys.readouterr().out


def test_the_last_bits_of_weights_and_the_messages_of_errors_may_differ():
    new = copy.deepcopy(RECORDED)
    new["traces"]["one"]["trace"]["w0"] = [[1.000001, "nan"]]
    new["traces"]["two"]["error"]["message"] = "b"
    assert not list(comparison.differences(RECORDED, new, comparison.recorded(new)))


def test_cases_that_no_program_records_are_kept_and_counted():
    new = {"made_with": {"program": "p"}, "traces": {"one": {"trace": {}}}}
    assert command.kept(RECORDED, new) == {"traces": 1}
    assert command.merged(RECORDED, new)["traces"] == {**RECORDED["traces"], "one": {"trace": {}}}


def test_an_original_that_cannot_be_installed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(originals, "ENVIRONMENTS", pathlib.Path("no such folder"))
    monkeypatch.setattr(originals.shutil, "which", lambda command: None)
    assert command.main(["tf24"]) == 2
    assert "tf24 cannot be recorded here: there is no Python 3.8 here" in capsys.readouterr().out


def test_messages_name_no_folder_of_the_machine_that_recorded():
    checkout = pathlib.Path(__file__).parents[2]
    library = f"{checkout}/.venv-record/tf24/lib/python3.8/site-packages"
    message = f'File "{library}/numpy/a.py", {checkout}/tests/b.py, {checkout}:'
    assert program.without_folders(message) == 'File "numpy/a.py", tests/b.py, .:'
