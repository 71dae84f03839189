"""The tables of the migration guide are those of the cases."""

from tests.migrate.codemod import docs_table


def test_the_tables_are_up_to_date():
    assert docs_table.PAGE.read_text() == docs_table.page(), "run: python -m tests.migrate.codemod.docs_table"
