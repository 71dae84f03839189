"""No value of a file gets into a wrong variable without a note, in random files and programs."""

import pytest

from tools.fuzz import restores
from tools.fuzz.restores import Case

#: Cases that were silent once, or that show a rule.
FOUND = {
    "a model with another numbering": (Case(structure="two models", change="renumbered"), "right"),
    "unnamed variables in a list": (Case(structure="unnamed", given="list"), "refused"),
    "unnamed variables of tf_keras": (Case("tf_keras", structure="unnamed"), "noted"),
    "layers in lists and dicts": (Case(structure="layers", optimizer="SGD"), "right"),
    "from tf_keras to Keras 3": (Case("legacy", structure="sequential", change="renumbered"), "right"),
    "a part of a model": (Case(structure="layers", change="one more", partial=True), "noted"),
    "a name that is another one without its prefix and its number": (
        Case(reader="legacy", structure="nested", change="one more", given="part of the list", seed=254),
        "noted",
    ),
    "an optimizer that trains nothing": (
        Case(reader="legacy", optimizer="Nadam", change="one more", given="part", frozen=True, seed=524),
        "right",
    ),
    "Saver": (Case("tf1", optimizer="momentum", seed=4), "right"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_restore_is_right_refused_or_noted(name):
    case, expected = FOUND[name]
    verdict, why = restores.verdict(case)
    assert verdict == expected, why


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_restore_exchanges_variables_silently(first):
    for seed in range(first, first + 50):
        case = restores.drawn(seed)
        verdict, why = restores.verdict(case)
        assert verdict != "silent", f"{restores.reduced(case)}: {why}"
