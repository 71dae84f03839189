"""Plans the edits to import statements once it is known which imported names are still used."""

from __future__ import annotations

import ast

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, policies, unseen
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.rules import PRIVATE_NAME, Rules
from tf_lossscale.migrate.codemod.scopes import Binding, Variable, module_of, string
from tf_lossscale.migrate.codemod.uses import Uses

_STAR = "old names of {} are not changed after this import. Import its names one by one, and migrate again."
_GONE = "{} no longer exists and has no counterpart."
_STAYS = "{} stays because not every use of it could be rewritten."


class Imports:
    """Plans the edits to the imports of one file, after the rules have been applied."""

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
        package = self._source.bindings.get((self._source.tree, "tf_lossscale"), ())
        if self._rules.names_package and not any(binding.dotted for binding in package):
            self._import_package()

    def _import_package(self) -> None:
        """Import this package after the docstring and the imports at the beginning of the file."""
        source, place = self._source, 0
        for statement in source.tree.body:
            value = statement.value if isinstance(statement, ast.Expr) else statement
            if isinstance(statement, (ast.Import, ast.ImportFrom)) or string(value) is not None:
                place = source.start_of_line(source.line_of(source.span(statement)[1]) + 1)
            # Lines that are valid only in IPython, such as magics, may appear between the imports.
            elif not getattr(value, "id", "").startswith(names.IPYTHON):
                break
        is_cut = place > 0 and source.text[place - 1] not in "\r\n"
        line = f"{source.newline}import tf_lossscale" if is_cut else f"import tf_lossscale{source.newline}"
        self._edits.replace((place, place), line)

    def _write(self, statement: ast.Import | ast.ImportFrom, new: list[str | None]) -> None:
        """Replace the names in an import. `new` holds the new import of each name, its old one, or None."""
        if new == [_statement(statement, alias) for alias in statement.names]:
            return
        by_start: dict[str, list[str]] = {}
        for line in dict.fromkeys(filter(None, new)):
            start, _, name = line.rpartition("import ")
            # All names of one module go into one statement, but `import a, b` becomes two.
            by_start.setdefault(f"{start}import " if start else line, []).append(name if start else "")
        lines = [start + ", ".join(bound) for start, bound in by_start.items()]
        indent = self._source.line(statement.lineno)[: self._source.column(statement)]
        if lines:
            between = "; " if indent.strip() else f"{self._source.newline}{indent}"
            self._edits.replace(self._source.span(statement), between.join(lines))
        else:
            self._edits.removed.append(statement)

    def _new(
        self, statement: ast.Import | ast.ImportFrom, alias: ast.alias, variable: Variable, binding: Binding
    ) -> str | None:
        """Return the new import of a name: the same import if it stays, or None if it is removed."""
        old, dotted = _statement(statement, alias), alias.name if isinstance(statement, ast.Import) else binding.dotted
        name, bound, source = table.canonical(dotted), variable[1], self._source
        is_old, is_gone = name in {*table.OLD, *names.EMPTIED}, names.is_gone(dotted)
        reason = next(filter(None, map(source.stays, (dotted, *source.meanings(variable)))), None)
        if reason and (is_old or source.stays(dotted)):
            unseen.report_kept(source, self._edits, statement, dotted, reason)
            return old
        if isinstance(statement, ast.Import) and not alias.asname:
            return f"import {bound}" if is_gone or name in {*table.MODULES, *table.PRIVATE} else old
        if not (is_old or is_gone) or name.startswith("tf_lossscale"):
            if name.rpartition(".")[0] in table.PRIVATE:
                self._edits.notice(statement, PRIVATE_NAME.format(dotted.rpartition(".")[0]))
            return old
        if variable in self._rules.left:
            self._edits.notice(statement, _STAYS.format(bound))
            return old
        used = source.names.get(variable, ())
        remains = any(node not in self._rules.gone for node in used)
        has_new = name in {*table.OLD, *table.MODULES}
        if not remains and not source.is_requested(variable) and (used or not has_new):
            return None
        if has_new:
            return _from(self._target(name, dotted, variable), bound)
        # The remaining uses of a module are reported where they are.
        if is_gone and not (remains and name in table.PRIVATE):
            self._edits.todo(statement, _GONE.format(dotted))
        return old

    def _target(self, name: str, dotted: str, variable: Variable) -> str:
        """Return the new dotted name of an old name, or of a module that contains only old names."""
        root = dotted.split(".", 1)[0]
        library = root if root in ("tf_keras", "keras") else "tensorflow.keras"
        if name in table.MODULES:
            is_modern = name in table.OF_KERAS and not self._rules.is_legacy
            return f"{library}.mixed_precision" if is_modern else table.legacy_module(name)
        row = table.OLD[name]
        is_either = self._source.roles_of(variable) >= {table.STABLE, table.EXPERIMENTAL}
        is_called = is_either and self._source.names.get(variable)
        if self._rules.is_legacy and row.role == table.EXPERIMENTAL and not is_called:
            return table.WRAPPERS_WITH_OLD_ARGUMENTS[row.role]
        if self._rules.is_legacy and row.role in policies.ROLES and name != f"{table.KERAS}.Policy":
            short = row.new.rpartition(".")[2].replace("set_global_policy", "set_policy")
            return f"{names.EXPERIMENTAL}.{short}"
        return library + row.new.removeprefix("keras") if row.new.startswith("keras.") else row.new

    def _star(self, statement: ast.ImportFrom) -> None:
        module = module_of(statement)
        if reason := self._source.stays(module):
            unseen.report_kept(self._source, self._edits, statement, module, reason)
        elif names.is_gone(module) or table.canonical(module) in names.EMPTIED:
            self._edits.todo(statement, _STAR.format(module))


def _statement(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return an import of only one of the names in an import statement."""
    start = f"from {module_of(statement)} import" if isinstance(statement, ast.ImportFrom) else "import"
    return f"{start} {alias.name}" + (f" as {alias.asname}" if alias.asname else "")


def _from(dotted: str, bound: str) -> str:
    module, _, name = dotted.rpartition(".")
    return f"from {module} import {name}" + ("" if bound == name else f" as {bound}")
