"""Something is done with a module once it is imported."""

import importlib
import sys

import pytest

import tf_lossscale
from tf_lossscale.libraries import import_hooks


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose __init__ imports its part half-way through."""
    folder = tmp_path / "a_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("begun = True\nfrom a_package import part\ncomplete = True\n")
    (folder / "part.py").write_text("value = 1\n")
    (folder / "later.py").write_text("value = 2\n")
    (folder / "broken.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "a_package"
    for name in [name for name in sys.modules if name.split(".")[0] == "a_package"]:
        del sys.modules[name]


@pytest.fixture
def module_of_ours(tmp_path, monkeypatch):
    """Makes a module of this package from its source and returns its name."""
    monkeypatch.setattr(tf_lossscale, "__path__", [*tf_lossscale.__path__, str(tmp_path)])

    def make(source):
        (tmp_path / "a_module_of_ours.py").write_text(source)
        importlib.invalidate_caches()
        return "tf_lossscale.a_module_of_ours"

    yield make
    sys.modules.pop("tf_lossscale.a_module_of_ours", None)
    vars(tf_lossscale).pop("a_module_of_ours", None)


@pytest.fixture
def when_imported():
    cancels = []
    before = list(sys.meta_path)

    def watch(name, action, **kwargs):
        cancels.append(import_hooks.when_imported(name, action, **kwargs))
        return cancels[-1]

    yield watch
    for cancel in cancels:
        cancel()
    assert [finder for finder in sys.meta_path if finder not in before] == []


@pytest.mark.parametrize(
    ("name", "after", "counts"),
    [
        ("a_package", [], [1, 1]),
        ("a_package.part", [], [1, 1]),
        ("a_package.part", ["a_package"], [1, 1]),
        ("a_package.later", [], [0, 1]),
        ("a_package.part", ["a_package.later"], [0, 1]),
        ("a_package.later", ["a_package.part"], [0, 1]),
    ],
)
def test_an_action_runs_once_when_its_module_and_those_that_it_needs_are_complete(
    package, when_imported, name, after, counts
):
    seen = []
    when_imported(name, lambda module: seen.append((module.__name__, sys.modules[package].complete)), after=after)
    assert seen == []
    for imported, count in zip((package, f"{package}.later"), counts, strict=True):
        importlib.import_module(imported)
        assert seen == [(name, True)] * count
    importlib.reload(sys.modules[name])
    assert len(seen) == 1


def test_an_action_never_runs_for_a_module_that_must_not_be_imported(package, when_imported, monkeypatch):
    monkeypatch.setitem(sys.modules, "a_blocked_module", None)
    seen = []
    when_imported("a_blocked_module", seen.append)
    when_imported(package, seen.append)
    importlib.import_module(package)
    assert seen == [sys.modules[package]]


def test_an_action_runs_at_once_where_the_module_is_there(package, when_imported):
    seen = []
    importlib.import_module(package)
    when_imported(f"{package}.part", lambda module: seen.append(module.value))
    assert seen == [1]


def test_an_action_waits_for_the_module_of_ours_that_imports_the_package(package, when_imported, module_of_ours):
    ours = module_of_ours(f"import {package}\nloaded = True\n")
    seen = []
    when_imported(package, lambda module: seen.append(sys.modules[ours].loaded))
    importlib.import_module(ours)
    assert seen == [True]


def test_an_action_asked_for_in_a_module_of_ours_waits_for_its_end(package, when_imported, module_of_ours):
    ours = module_of_ours(
        f"import {package}\nfrom tf_lossscale.libraries import import_hooks\n"
        f"import_hooks.when_imported({package!r}, lambda module: seen.append(loaded))\nseen = []\nloaded = True\n"
    )
    when_imported(f"{package}.later", lambda module: None)  # somebody watches
    assert importlib.import_module(ours).seen == [True]


def test_an_action_runs_where_the_module_of_ours_that_imports_the_package_fails(package, when_imported, module_of_ours):
    ours = module_of_ours(f"import {package}\nraise ImportError('an optional library')\n")
    seen = []
    when_imported(package, lambda module: seen.append(module.complete))
    with pytest.raises(ImportError, match="optional"):
        importlib.import_module(ours)
    assert seen == [True]


def test_a_cancelled_action_does_not_run(package, when_imported):
    seen = []
    when_imported(package, seen.append)()
    importlib.import_module(package)
    assert seen == []


def test_a_failing_import_fails_as_ever_and_calls_nothing(package, when_imported):
    seen = []
    when_imported(f"{package}.broken", seen.append)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            importlib.import_module(f"{package}.broken")
    assert seen == []
    importlib.import_module(f"{package}.later")


def test_the_loader_of_a_watched_module_is_its_own(package, when_imported):
    when_imported(package, lambda module: None)
    module = importlib.import_module(package)
    assert module.__loader__ is module.__spec__.loader
    assert "exec_module" not in vars(module.__loader__)
    assert module.__loader__.get_source(package).startswith("begun")


def test_a_module_that_is_not_there_is_not_found(when_imported):
    when_imported("no_such_package.part", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package.part")
