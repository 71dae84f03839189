"""Plans an edit or a finding for each use of an old name. The imports follow in `imports`."""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import decisions, names, policies, wrappers
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.names import legacy_module
from tf_lossscale.migrate.codemod.scopes import Variable
from tf_lossscale.migrate.codemod.uses import Use, Uses

_NOT_FOLLOWED = (
    "this tool cannot follow the module any further. Old names that are looked up in it elsewhere are not changed."
)
PRIVATE_NAME = (
    "{} is a private module. Its names without a replacement are left unchanged: check that your version of TensorFlow "
    "has them."
)
_LOOKED_UP = "the string names {}. Its replacement is {}."
_NO_COUNTERPART = "{} has no counterpart."
_F_STRING = "old names in f-strings are not changed. Compute the value before, and migrate again."
_NO_EFFECT = "the rewritten code uses another name, so this assignment has no effect."
# What the import of a wrapper class becomes, unless its uses stay.
_IMPORTED = (table.WRAPPER, *table.WRAPPERS_WITH_OLD_ARGUMENTS.values())


class Rules:
    """Plans the edits to the uses of old names in one file."""

    def __init__(self, source: Uses, edits: Edits):
        self.source = source
        self.edits = edits
        #: Whether the experimental names keep their old meaning in this file.
        self.is_legacy: bool = decisions.is_legacy(source)
        #: The variables whose imports and uses stay.
        self.left: set[Variable] = decisions.left(source)
        #: The names at the beginning of replaced expressions. They no longer use their imports.
        self.gone: set[ast.AST | None] = set()
        #: Whether the new code contains a dotted name such as `tf_lossscale.LossScaleOptimizer`.
        self.names_package: bool = False

    def apply(self) -> None:
        """Plan the edits for all uses."""
        for use in self.source.uses:
            if isinstance(use.node, ast.Attribute) and not isinstance(use.node.ctx, ast.Load):
                self._assigned(use)
            elif not use.rows:
                self._module(use)
            elif use.roles & names.WRAPPERS:
                self._wrapper(use)
            elif use.roles & policies.ROLES:
                self._policy(use)
            elif not self._stays(use):
                self._replace(use, use.rows[0].new)
        for text, use in self.source.in_f_strings.items():
            if not use.variable:
                self.edits.todo(text, _F_STRING)

    def _stays(self, use: Use) -> bool:
        """Return whether a use reads the same name after its import has changed, or is left."""
        if not self.left.isdisjoint((use.variable, self.source.aliases.get(use.node))):
            return True
        if use.variable is None or (isinstance(use.node, ast.Name) and use.rows):
            return use.variable is not None
        known = self.source.known(use.variable) & table.MODULES.keys()
        return bool(known - names.OF_KERAS) or (self.is_legacy and bool(known) and table.STABLE not in use.roles)

    def _wrapper(self, use: Use) -> None:
        source, node = self.source, use.node
        new = wrappers.form(source, use, self.is_legacy)
        stays = self._stays(use)
        if new.reason and not (stays and self.is_legacy and isinstance(node, ast.Attribute)):
            self.edits.todo(node, new.reason)
        if new.target is None or use.variable in self.left or use.roles == {table.OURS}:
            return
        if not stays or (isinstance(node, ast.Name) and new.target not in _IMPORTED):
            self._replace(use, new.target)
        elif isinstance(node, ast.Attribute):
            return
        for span, text in new.changes:
            self.edits.replace(span, text)
        if isinstance(source.parents[node], ast.ClassDef) and use.roles == {table.STABLE}:
            self._initialized(source.parents[node])

    def _initialized(self, subclass: ast.AST) -> None:
        """Rewrite or report the arguments that a subclass of the stable class passes to its base class."""
        for call in self.source.nodes(ast.Call):
            code = self.source.code(call.func)
            if code.startswith("super(") and code.endswith(").__init__") and subclass in self.source.ancestors(call):
                new = wrappers.form_of_call(self.source, call, {table.STABLE})
                if new.target != table.WRAPPER:
                    self.edits.todo(call, new.reason or wrappers.SECOND)
                for span, text in new.changes:
                    self.edits.replace(span, text)

    def _policy(self, use: Use) -> None:
        source, stays, short = self.source, self._stays(use), use.rows[0].new.rpartition(".")[2]
        call, scale = source.called(use), policies.scale_of(source, use)
        if call:
            policies.change_name(source, self.edits, call, self.is_legacy)
        if call and scale:
            policies.report_scale(source, self.edits, call, *scale)
        if self.is_legacy:
            if not stays and (scale or f"{table.KERAS}.Policy" not in use.canonical):
                self._replace(use, f"{names.EXPERIMENTAL}.{short.replace('set_global_policy', 'set_policy')}")
            return
        # The new name is read through the same module or alias.
        code = source.code(use.node)
        new = f"{use.variable[1]}.{short}" if use.variable else _of_keras("".join(code.split()), f".{short}")
        if new != code and isinstance(use.node, ast.Attribute):
            self.edits.rewrite(use.node, new)
        if call and scale:
            self.edits.replace(source.removal(*scale))

    def _replace(self, use: Use, target: str) -> None:
        """Replace a use with a dotted name, unless the use comes from a star import that becomes a star import."""
        modules = {name.rpartition(".")[0] for name in use.canonical if names.is_gone(name)}
        if isinstance(use.node, ast.Name) and not use.variable and modules and modules <= table.MODULES.keys():
            return
        self.gone |= {self.source.root(use.node), use.node}
        self.names_package = True
        self.edits.rewrite(use.node, target)

    def _module(self, use: Use) -> None:
        """Handle a module that is used as a value, and names that are missing from the table."""
        source, node, known, code = self.source, use.node, use.canonical, self.source.code(use.node)
        alias, modules = source.aliases.get(node), sorted(known & table.MODULES.keys())
        looked_up = source.looked_up(node, use.dotted)
        if source.is_old(looked_up) or (looked_up and table.KERAS in known):
            self._looked_up(use, set(map(names.canonical, looked_up)))
        elif modules:
            if self._stays(use):
                return
            if self.is_legacy or modules[0] not in names.OF_KERAS:
                self._replace(use, legacy_module(modules[0]))
            elif alias and isinstance(node, ast.Attribute):
                self.edits.rewrite(node, _of_keras(code))
        elif table.KERAS in known or known & names.PRIVATE:
            if not alias or (table.KERAS in known and isinstance(alias[0], ast.ClassDef)):
                self.edits.notice(node, _NOT_FOLLOWED)
        elif isinstance(node, ast.Attribute) and any(map(names.is_gone, use.dotted)):
            self.edits.todo(node, _NO_COUNTERPART.format(code))
        elif isinstance(node, ast.Attribute):
            self.edits.notice(node, PRIVATE_NAME.format(source.code(node.value)))

    def _looked_up(self, use: Use, full: set[str]) -> None:
        """Handle a call that looks a name up in a module by a string."""
        source, call = self.source, self.source.parents[use.node]
        new = [table.WRAPPERS_WITH_OLD_ARGUMENTS.get(r.role, r.new) for r in map(table.OLD.get, sorted(full)) if r]
        new += [legacy_module(each) for each in sorted(full) if each in table.MODULES]
        name = next(iter(full)).rpartition(".")[2]
        if not new or new[0] in full or not isinstance(call, ast.Call):
            return
        owner, _, short = new[0].rpartition(".")
        if not source.is_builtin(call.func, "hasattr", "getattr"):
            self.edits.todo(call, _LOOKED_UP.format(name, new[0]))
        elif not self._stays(use) and (new[0] != table.WRAPPER or source.is_builtin(call.func, "getattr")):
            if owner != table.KERAS:
                self._replace(use, owner)
            elif not use.variable:
                self.edits.rewrite(use.node, _of_keras(source.code(use.node)))
            if short != name:
                self.edits.rewrite(call.args[1], source.code(call.args[1]).replace(name, short))

    def _assigned(self, use: Use) -> None:
        """Report an assignment to an old name, such as `tf.keras.mixed_precision.LossScaleOptimizer = ...`."""
        is_new = all(row.new in use.canonical or row.role == table.OURS for row in use.rows)
        if not use.variable and (not is_new or use.canonical & table.MODULES.keys()):
            self.edits.todo(use.node, _NO_EFFECT)


def _of_keras(code: str, name: str = "") -> str:
    """Return the code of today's module, or of a name in it, for the code of an old module or name."""
    new = re.sub(r"\bmixed_precision\b.*", f"mixed_precision{name}", code)
    return new.replace("tensorflow.python.keras", "tensorflow.keras")
