"""The tables of docs/distributed.md are what the suite runs."""

from tests import strategies
from tf_function_tests.test_promises import STRATEGIES
from tools import distributed_table


def test_the_tables_are_up_to_date():
    assert distributed_table.PAGE.read_text() == distributed_table.page(), "run: python -m tools.distributed_table"


def test_every_strategy_of_the_suite_is_in_the_tables():
    tested = {name for name in STRATEGIES if isinstance(name, str)} - {"mirrored_4"}
    tested.update(*strategies.OVER_PROCESSES.values())
    assert tested == set(distributed_table._STRATEGIES)
