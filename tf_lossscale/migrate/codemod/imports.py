"""Plans the edits to import statements once it is known which imported names are still used."""

from __future__ import annotations

import ast

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, policies
from tf_lossscale.migrate.codemod.decisions import LEFT, MODERN
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.rules import Rules, legacy_module
from tf_lossscale.migrate.codemod.scopes import Binding, Variable, module_of, string
from tf_lossscale.migrate.codemod.uses import Uses

_STAYS = "{} stays because not every use of it could be rewritten."


class Imports:
    """Plans the edits to the imports of one file.

    Args:
        source: the file.
        edits: receives the edits.
        rules: what became of the uses of the imported names.
    """

    def __init__(self, source: Uses, edits: Edits, rules: Rules):
        self._source = source
        self._edits = edits
        self._rules = rules

    def apply(self) -> None:
        """Plan the edits to all imports, and import this package if the new code needs it."""
        bindings = {b.node: (variable, b) for variable, bound in self._source.bindings.items() for b in bound}
        for statement in list(self._source.parents):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self._star(statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                new = [self._new(statement, alias, *bindings[alias]) for alias in statement.names]
                self._write(statement, new)
        imported = [alias for each in self._source.tree.body if isinstance(each, ast.Import) for alias in each.names]
        is_imported = any(alias.name.startswith("tf_lossscale") and not alias.asname for alias in imported)
        if self._rules.names_package and not is_imported:
            self._import_package()

    def _import_package(self) -> None:
        """Import this package after the docstring and the imports at the beginning of the file."""
        place, newline = 0, self._source.newline
        for i, statement in enumerate(self._source.tree.body):
            value = getattr(statement, "value", None)
            if isinstance(statement, (ast.Import, ast.ImportFrom)) or (i == 0 and value and string(value) is not None):
                place = self._source.line_of(self._source.span(statement)[1])
            # Lines that are valid only in IPython, such as magics, may appear between the imports.
            elif not getattr(value, "id", "").startswith(names.IPYTHON):
                break
        end = self._source.start_of_line(place + 1)
        is_cut = end > 0 and self._source.text[end - 1] not in "\r\n"
        self._edits.replace((end, end), f"{newline}import tf_lossscale" if is_cut else f"import tf_lossscale{newline}")

    def _write(self, statement: ast.Import | ast.ImportFrom, new: list[str | None]) -> None:
        """Replace the names in an import. `new` holds the new import of each name, its old one, or None."""
        old = [_statement(statement, alias) for alias in statement.names]
        if new == old:
            return
        by_start: dict[str, list[str]] = {}
        for each in dict.fromkeys(filter(None, new)):
            start, _, name = each.rpartition("import ")
            # All names of one module go into one statement, but `import a, b` becomes two.
            by_start.setdefault(start or each, []).append(name)
        lines = [
            f"{start}import {', '.join(each)}" if start.startswith("from") else start
            for start, each in by_start.items()
        ]
        if not lines:
            self._edits.remove_statement(statement)
        else:
            self._edits.replace(self._source.span(statement), self._between(statement).join(lines))
        self._edits.rewritten(statement, "; ".join(lines) or "(removed)")

    def _between(self, statement: ast.stmt) -> str:
        line = self._source.line(statement.lineno)
        start = self._source.span(statement)[0] - self._source.start_of_line(statement.lineno)
        return "; " if line[:start].strip() else f"{self._source.newline}{line[:start]}"

    def _new(
        self, statement: ast.Import | ast.ImportFrom, alias: ast.alias, variable: Variable, binding: Binding
    ) -> str | None:
        """Return the new import of a name: the same import if it stays, or None if it is removed."""
        old, dotted = _statement(statement, alias), alias.name if isinstance(statement, ast.Import) else binding.dotted
        name, bound = names.canonical(dotted), variable[1]
        is_known = name in {*table.OLD, *names.EMPTIED}
        bindings = self._source.bindings[variable]
        if names.in_copy(dotted) or (is_known and any(names.in_copy(each.dotted) for each in bindings)):
            self._edits.notice(statement, f"{dotted} {names.IN_COPY}")
        elif self._source.is_on_any_backend(dotted) or name.startswith("tf_lossscale"):
            return old
        elif isinstance(statement, ast.Import) and not alias.asname:
            return f"import {bound}" if name in table.MODULES or names.is_gone(dotted) or name in names.PRIVATE else old
        elif is_known:
            return self._known(statement, old, dotted, variable)
        elif names.is_gone(dotted):
            return self._without_counterpart(statement, old, dotted, variable)
        elif name.rpartition(".")[0] in names.PRIVATE:
            self._edits.notice(statement, f"{alias.name} {names.PRIVATE_NAME}")
        return old

    def _known(self, statement: ast.stmt, old: str, dotted: str, variable: Variable) -> str | None:
        """Return the new import of an old name, or of a module that contains only old names."""
        name, bound = names.canonical(dotted), variable[1]
        uses, remain = self._uses(variable)
        is_unused = not remain and not self._source.is_exported(variable, uses)
        if name in names.PRIVATE and names.is_gone(dotted) and not is_unused:
            return self._without_counterpart(statement, old, dotted, variable)
        if name == table.KERAS or name in names.PRIVATE:
            return None if is_unused else old
        decision = self._rules.decisions.of(variable)
        if decision == LEFT:
            self._edits.notice(statement, _STAYS.format(bound))
            return old
        if is_unused:
            return None
        if name in table.MODULES:
            is_modern = decision == MODERN
            return _from(f"{_library(dotted)}.mixed_precision" if is_modern else legacy_module(name), bound)
        row = table.OLD[name]
        target = row.new if decision == MODERN else table.WRAPPERS_WITH_OLD_ARGUMENTS.get(row.role, row.new)
        if row.role == table.CONTRIB:
            target = table.WRAPPERS_WITH_OLD_ARGUMENTS[table.CONTRIB]
        if row.role in policies.ROLES and self._rules.decisions.keeps_policies:
            short = row.new.rpartition(".")[2].replace("set_global_policy", "set_policy")
            target = f"{names.EXPERIMENTAL}.{short}"
        elif target.startswith("keras."):
            target = _library(dotted) + target.removeprefix("keras")
        return _from(target, bound)

    def _without_counterpart(self, statement: ast.stmt, old: str, dotted: str, variable: Variable) -> str | None:
        """Return the new import of a name or private module that no longer exists."""
        remain = self._uses(variable)[1]
        # The remaining uses of a module are reported where they are.
        if remain and names.canonical(dotted) in names.PRIVATE:
            return old
        if not remain and not self._source.is_exported(variable, uses=1):
            return None
        self._edits.todo(statement, f"{dotted} no longer exists and has no counterpart.")
        return old

    def _star(self, statement: ast.ImportFrom) -> None:
        module = module_of(statement)
        name = names.canonical(module)
        if names.in_copy(module):
            self._edits.notice(statement, f"{module} {names.IN_COPY}")
        elif name in table.MODULES:
            self._edits.replace(self._source.span(statement), f"from {legacy_module(name)} import *")
            self._edits.rewritten(statement)
        elif name in names.PRIVATE and names.is_gone(module):
            self._edits.todo(statement, f"{module} no longer exists. Import its names one by one, and migrate again.")

    def _uses(self, variable: Variable) -> tuple[int, int]:
        """Return how often this file uses an imported name, and how many of the uses remain after the edits."""
        uses = self._source.names.get(variable, ())
        return len(uses), sum(node not in self._rules.gone for node in uses)


def _statement(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return an import of only one of the names in an import statement."""
    start = f"from {module_of(statement)} import" if isinstance(statement, ast.ImportFrom) else "import"
    return f"{start} {alias.name}" + (f" as {alias.asname}" if alias.asname else "")


def _from(dotted: str, bound: str) -> str:
    module, _, name = dotted.rpartition(".")
    return f"from {module} import {name}" + ("" if bound == name else f" as {bound}")


def _library(dotted: str) -> str:
    """Return the Keras library that an old dotted name belongs to."""
    root = dotted.split(".", 1)[0]
    return root if root in ("tf_keras", "keras") else "tensorflow.keras"
