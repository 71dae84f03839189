"""The tables of the migration guide are those of the cases."""

from tools import migration_table


def test_the_tables_are_up_to_date():
    assert migration_table.PAGE.read_text() == migration_table.page(), "run: python -m tools.migration_table"
