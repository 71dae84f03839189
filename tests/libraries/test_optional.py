"""The error for an optional library says what is the matter with it."""

import sys

import pytest

from tf_lossscale.libraries import keras_versions, optional


def test_a_library_that_is_not_installed_comes_with_the_line_that_installs_it(monkeypatch):
    with pytest.raises(ImportError, match=r"^This feature needs no_such, .*pip install '\.\[demo\]'$"):
        optional.load("no_such.part", "demo")
    with pytest.raises(ImportError, match=r"pip install no_such$"):
        optional.load("no_such", "")
    monkeypatch.setitem(sys.modules, "keras.no_such", None)
    with pytest.raises(ImportError) as caught:
        keras_versions.keras_3("no_such")
    assert "[]" not in str(caught.value)


@pytest.mark.parametrize(
    "code", ["import no_such_part", "from json import no_such_name", "raise ImportError('broken')"]
)
def test_an_installed_library_whose_import_fails_is_not_called_missing(code, tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        optional.load("halfway", "demo")
    assert "pip install" not in str(caught.value)
    assert caught.traceback[-1].path == tmp_path / "halfway.py" or "no_such" in str(caught.value)
