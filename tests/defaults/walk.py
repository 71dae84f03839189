"""The public names, the examples that their documentation has, and the members that the examples use."""

import doctest
import importlib
import inspect
import re

MODULES = (
    "tf_lossscale",
    "tf_lossscale.amp",
    "tf_lossscale.diagnosis",
    "tf_lossscale.legacy",
    "tf_lossscale.legacy.experimental",
    "tf_lossscale.migrate",
    "tf_lossscale.optimizers",
)


def public_names():
    """Yield (module, name, object) of every public class and function."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            if not name.startswith("__"):
                yield module, name, getattr(module, name)


def members(cls):
    """Yield (name, documentation) of a class's public members, without the core's, which the step calls."""
    for name in dir(cls):
        home = next((base for base in cls.__mro__ if name in vars(base)), None)
        module = "" if home is None else home.__module__
        if name.startswith("_") or not module.startswith("tf_lossscale.") or module.startswith("tf_lossscale.core."):
            continue
        member = vars(home)[name]
        text = inspect.getdoc(getattr(member, "__func__", member))
        if text and (callable(getattr(cls, name, None)) or isinstance(member, property)):
            yield name, text


def code(text):
    """Return the examples of a docstring as one piece of source code."""
    found = doctest.DocTestParser().get_examples(inspect.cleandoc(text or ""))
    return "".join(example.source for example in found)


def uses(source, member):
    """Return whether source code names a member after a dot."""
    return re.search(rf"\.{member}\b", source) is not None
