"""The error for an optional library says what is the matter with it."""

import sys

import pytest

from tf_lossscale import serialization
from tf_lossscale.legacy import experimental
from tf_lossscale.libraries import keras_versions, optional
from tf_lossscale.wrapper import registry


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


def test_a_keras_without_a_class_that_we_need_is_imported_all_the_same(monkeypatch, caplog):
    def lacking(library):
        raise ImportError("keras has no class LossScaleOptimizer")

    registered = []
    monkeypatch.setattr(registry, "wrapper_classes_of", lacking)
    monkeypatch.setitem(sys.modules, "tf_lossscale.optimizers.keras3", None)
    serialization._register(keras_versions.keras_3())
    said = [record.getMessage() for record in caplog.records]
    assert "tf_lossscale leaves keras as it is: keras has no class LossScaleOptimizer." in said
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tf_lossscale.optimizers.keras3", None)
    monkeypatch.setattr(experimental, "register", registered.append)
    serialization._register(keras_versions.keras_3())
    assert registered == ["keras"], "a module that cannot be imported takes others down"
