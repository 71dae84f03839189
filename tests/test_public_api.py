"""The public names and their signatures, so that a change of one is seen."""

import importlib
import inspect
import pathlib

from tests.families import with_keras_3

FILE = pathlib.Path(__file__).with_name("public_api.txt")
MODULES = ("", ".amp", ".diagnosis", ".legacy", ".legacy.contrib", ".legacy.experimental", ".migrate", ".optimizers")


def lines():
    """Return a line for each public function, class and attribute of a class."""
    found = []
    for suffix in MODULES:
        module = importlib.import_module(f"tf_lossscale{suffix}")
        names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if inspect.isclass(v)]
        for name in sorted(names):
            value = getattr(module, name)
            if inspect.ismodule(value) or not getattr(value, "__module__", "").startswith("tf_lossscale"):
                continue
            found.append(f"{module.__name__}.{name}{_signature(value)}")
            if inspect.isclass(value):
                found += [f"{module.__name__}.{name}.{line}" for line in _members(value)]
    return sorted({*found})


def _members(cls):
    ours = [base for base in cls.__mro__ if base.__module__.startswith("tf_lossscale")]
    for name in sorted({name for base in ours for name in vars(base)}):
        value = inspect.getattr_static(cls, name)
        if not name.startswith("_"):
            function = getattr(value, "__func__", value)
            yield name + (_signature(function) if callable(function) else "")


def _signature(value):
    """Return the names and the defaults of the parameters."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(plain))


@with_keras_3
def test_the_public_names_and_signatures_are_those_of_the_file():
    assert lines() == FILE.read_text().splitlines(), (
        "The public API has changed. Say so in CHANGELOG.md, and write the new names with "
        "`python -m tests.test_public_api`."
    )


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
