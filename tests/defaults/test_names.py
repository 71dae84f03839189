"""Every public class, function and method works as its documentation shows it, in both Kerases, and prints no more."""

import inspect

import pytest
import tensorflow as tf

import tf_lossscale
from tests.defaults import rows, walk
from tests.defaults.seen import seen
from tests.families import FAMILIES, NoKeras3, tf_keras

pytestmark = pytest.mark.wide("the examples of the docstrings once more, in a terminal")

NOT_BY_USERS = set().union(*rows.CALLED_BY.values())

# Case -> the warning that its code asks for in a process that has made sessions and traced steps before.
ASKED_FOR = {
    "legacy.enable_mixed_precision_graph_rewrite": "A Session was created before enable_mixed_precision_graph_rewrite",
    "optimizers.register_optimizer_step_post_hook": "A step hook was registered after a tf.function",
    "optimizers.register_optimizer_step_pre_hook": "A step hook was registered after a tf.function",
}


def row_of(module, name):
    """Return the key in `rows.MEMBERS` for a public class."""
    of_module = f"{module.__name__.rpartition('.')[2]}.{name}"
    return of_module if of_module in rows.MEMBERS else rows.SAME.get(name, name)


def texts_of(module, name, public):
    """Yield (case, source code): the example of a public name, those of its members, and its row."""
    case = f"{module.__name__}.{name}".removeprefix("tf_lossscale.")
    yield case, walk.code(inspect.getdoc(public))
    if inspect.isclass(public):
        yield f"{case}, members", rows.MEMBERS.get(row_of(module, name), "")
        for member, text in walk.members(public):
            if member not in NOT_BY_USERS:
                yield f"{case}.{member}", walk.code(text)


def cases():
    """Yield each example and row once for each Keras that it may use."""
    done = set()
    for module, name, public in walk.public_names():
        for case, source in texts_of(module, name, public):
            if source and source not in done:
                done.add(source)
                yield pytest.param(FAMILIES[0].keras, module, source, id=case)
                if "tf.keras" in source and not isinstance(FAMILIES[0].keras, NoKeras3):
                    yield pytest.param(tf_keras, module, source, id=f"{case}, tf_keras")


@pytest.mark.parametrize(("keras", "module", "source"), list(cases()))
def test_what_is_documented_works_and_says_nothing_unasked(keras, module, source, tmp_path, monkeypatch, request):
    if isinstance(keras, NoKeras3):
        keras = tf_keras
    monkeypatch.setattr(tf, "keras", keras)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"  # a file: AutoGraph reads the source of a function
    script.write_text(source)
    names = {"tf": tf, "tf_lossscale": tf_lossscale} | {name: getattr(module, name) for name in module.__all__}
    try:
        with seen() as what:
            exec(compile(source, str(script), "exec"), {"__name__": "__main__", **names})
    finally:
        keras.mixed_precision.set_global_policy("float32")
    case = request.node.callspec.id.removesuffix(", tf_keras")
    assert what.faults(ASKED_FOR.get(case)) == []


@pytest.mark.first
def test_every_public_name_is_shown_at_work():
    sources, missing = {}, []
    for module, name, public in walk.public_names():
        sources[public] = "".join(source for _, source in texts_of(module, name, public))
        if not sources[public]:
            missing.append(f"{module.__name__}.{name}")
    for public in filter(inspect.isclass, sources):
        if public.__name__ in rows.ONLY_TO_DERIVE_FROM:
            continue
        shown = "".join(sources.get(base, "") for base in public.__mro__)
        for member, _ in walk.members(public):
            if member not in NOT_BY_USERS and not walk.uses(shown, member):
                missing.append(f"{public.__module__}.{public.__name__}.{member}")
    assert not missing, missing


@pytest.mark.first
def test_every_row_is_of_a_public_class():
    classes = {row_of(module, name): public for module, name, public in walk.public_names() if inspect.isclass(public)}
    assert set(rows.MEMBERS) <= set(classes)
    assert {member for public in classes.values() for member, _ in walk.members(public)} >= NOT_BY_USERS


def test_every_subpackage_and_module_with_public_names_is_walked():
    walked = {module.removeprefix("tf_lossscale").removeprefix(".") for module in walk.MODULES}
    assert walked == {"", *tf_lossscale._SUBPACKAGES, "legacy.experimental"}
