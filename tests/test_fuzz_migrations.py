"""No small program that keeps an old module or object is broken by the codemod without a report."""

import pytest

from tools.fuzz import migrations
from tools.fuzz.migrations import Case

MIXED, CALL = migrations.MIXED, "LossScaleOptimizer(tf.keras.optimizers.SGD(), False, 128.0).initial_scale"
#: Programs that were broken without a report once.
REPORTED = {
    "tf.keras in an attribute": Case("tf.keras", f"({{}}).mixed_precision.{CALL}", "attribute"),
    "a module in a conditional expression": Case(MIXED, f"({{}}).{CALL}", "conditional"),
    "a module in a dict of another file": Case("tf", f"({{}}).keras.mixed_precision.{CALL}", "dict", "settings"),
    "a policy in an attribute, in another file": Case(
        f"{MIXED}.experimental.Policy('mixed_float16')", "({}).should_cast_variables", "attribute", "method"
    ),
    "increment_period in another file": Case("optimizer", "({}).loss_scale.increment_period", "alias", "helper"),
    "the loss scale of a compiled optimizer": Case("model", "hasattr(({}).optimizer, 'loss_scale')", "alias", "helper"),
}
RIGHT = {
    "an experimental module in an attribute": Case(
        f"{MIXED}.experimental", "({}).LossScaleOptimizer(tf.keras.optimizers.SGD(), 64.0).initial_scale", "attribute"
    ),
    "the loss scale object of a wrapper, in a list": Case("optimizer.loss_scale", "({})().numpy()", "list"),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_place_that_the_codemod_cannot_follow_is_reported(name):
    ((verdict, code),) = migrations.verdicts([REPORTED[name]]).values()
    assert verdict == "reported", code


@pytest.mark.slow
def test_no_program_is_broken_without_a_report():
    found = migrations.verdicts([*RIGHT.values(), *map(migrations.drawn, range(100))])
    assert {found[case][0] for case in RIGHT.values()} == {"right"}
    assert not [(case, why) for case, (verdict, why) in found.items() if verdict in ("silent", "error")]
