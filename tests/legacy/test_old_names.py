"""The names that install() sets and those that the codemod rewrites are the same old public names."""

import importlib

import pytest

from tf_lossscale.legacy import old_names, table
from tf_lossscale.legacy.changes import Changes
from tf_lossscale.migrate.codemod import names

# The modules in which TensorFlow's API had the names, in the codemod's canonical form.
PUBLIC = {
    "keras.mixed_precision",
    "keras.mixed_precision.experimental",
    "tensorflow.contrib.mixed_precision",
    "tensorflow.mixed_precision",
    "tensorflow.mixed_precision.experimental",
    "tensorflow.train.experimental",
}
# Names that only the codemod knows, with the reason.
NOT_INSTALLED = {
    "set_global_policy": "tf.keras has it; in the experimental module it was set_policy",
}


class Recorder(Changes):
    """Writes down what would be put where, and changes nothing."""

    def __init__(self, place):
        super().__init__()
        self.place, self.found = place, set()

    def put(self, module, values):
        self._add(self.place, values)

    replace = put

    def _add(self, place, values):
        for name, value in values.items():
            if isinstance(value, dict):
                self._add(f"{place}.{name}", value)
            else:
                self.found.add(f"{place}.{name}")


def public(dotted):
    return {name for name in dotted if name.rpartition(".")[0] in PUBLIC}


@pytest.fixture(scope="module")
def installed():
    found = set()
    for place, put in old_names.places().items():
        try:
            module = importlib.import_module(place)
        except ImportError:  # of another version of TensorFlow
            continue
        recorder = Recorder(place)
        put(recorder, module)
        found |= recorder.found
    return public(map(names.canonical, found))


def test_every_name_that_install_puts_back_is_one_that_the_codemod_rewrites(installed):
    assert len(installed) >= 20
    assert installed - {*table.OLD, *names.CURRENT} == set()


def test_every_name_that_the_codemod_rewrites_is_put_back_by_install(installed):
    missing = public(table.OLD) - installed
    assert {n for n in missing if n not in NOT_INSTALLED and n.rpartition(".")[2] not in NOT_INSTALLED} == set()
    for exception in NOT_INSTALLED:
        assert any(f".{name}".endswith(f".{exception}") for name in missing), f"{exception} is no exception"
