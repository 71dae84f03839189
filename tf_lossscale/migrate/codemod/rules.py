"""Plans an edit or a finding for each use of an old name. The imports follow in `imports`.

A file has one meaning for all experimental names of Keras. They move to today's names and arguments, or they keep the
old ones, in `tf_lossscale.legacy.experimental`, and their uses stay as they are.
"""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, policies, wrappers
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, Variable, string
from tf_lossscale.migrate.codemod.uses import Use, Uses

NOT_FOLLOWED = (
    "this tool cannot follow the module any further. Old names that are looked up in it elsewhere are not changed. To "
    "restore them, call tf_lossscale.install()."
)
PRIVATE_NAME = (
    "{} is a private module. Its names without a replacement are left unchanged: check that your version of TensorFlow "
    "has them."
)
_LOOKED_UP = "the string names {}. Its replacement is {}."
_NO_COUNTERPART = "{} has no counterpart."
_F_STRING = "old names in f-strings are not changed. Compute the value before, and migrate again."
_NO_EFFECT = "the rewritten code uses another name, so this assignment has no effect."
_OLD_RUN = "experimental_run_v2"
_OWN_RUN = f"this file defines or looks up {_OLD_RUN}, which became run, so it is left unchanged."
# What the import of a wrapper class becomes, unless its uses stay.
_IMPORTED = (table.WRAPPER, *table.WRAPPERS_WITH_OLD_ARGUMENTS.values())


class Rules:
    """Plans the edits to the uses of old names in one file."""

    def __init__(self, source: Uses, edits: Edits):
        self.source = source
        self.edits = edits
        #: Whether the experimental names keep their old meaning in this file.
        self.is_legacy: bool = _is_legacy(source)
        #: The variables whose imports and uses stay.
        self.left: set[Variable] = _left(source)
        #: The names at the beginning of replaced expressions. They no longer use their imports.
        self.gone: set[ast.AST | None] = set()
        #: Whether the new code contains a dotted name such as `tf_lossscale.LossScaleOptimizer`.
        self.names_package: bool = False

    def apply(self) -> None:
        """Plan the edits for all uses."""
        for use in self.source.uses:
            if isinstance(use.node, ast.Attribute) and not isinstance(use.node.ctx, ast.Load):
                # An example is `tf.keras.mixed_precision.LossScaleOptimizer = ...`.
                if not use.variable:
                    self.edits.todo(use.node, _NO_EFFECT)
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
        self._rename_run()

    def _rename_run(self) -> None:
        """Rename a method of tf.distribute's strategies to `run`, which takes the same arguments.

        No other class in TensorFlow had a method of this name, so the method is renamed on objects of every type. In a
        file that itself defines, assigns or looks up this name, the name is not changed.
        """
        source = self.source
        uses = [node for node in source.nodes(ast.Attribute) if node.attr == _OLD_RUN]
        own = [node for node in source.parents if _OLD_RUN in (getattr(node, "name", ""), string(node))]
        own += [node for node in uses if isinstance(node.ctx, ast.Store)]
        for node in own:
            self.edits.todo(node, _OWN_RUN)
        for use in uses if not own else ():
            end = source.span(use)[1]
            # Before Python 3.12, the parser does not know the places in f-strings.
            if source.code(use).endswith(_OLD_RUN):
                self.edits.replace((end - len(_OLD_RUN), end), "run")

    def _stays(self, use: Use) -> bool:
        """Return whether a use reads the same name after its import has changed, or is left."""
        if not self.left.isdisjoint((use.variable, self.source.aliases.get(use.node))):
            return True
        if use.variable is None or (isinstance(use.node, ast.Name) and use.rows):
            return use.variable is not None
        known = self.source.known(use.variable) & table.MODULES.keys()
        return bool(known - table.OF_KERAS) or (self.is_legacy and bool(known) and table.STABLE not in use.roles)

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
        """Report the arguments that a subclass of the stable class passes to its base class, if they are old."""
        for call in self.source.nodes(ast.Call):
            code = self.source.code(call.func)
            if code.startswith("super(") and code.endswith(").__init__") and subclass in self.source.ancestors(call):
                new = wrappers.form_of_call(self.source, call, {table.STABLE})
                if new.changes or new.target != table.WRAPPER:
                    self.edits.todo(call, new.reason or wrappers.SECOND)

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
        """Replace a use with a dotted name."""
        self.gone |= {self.source.root(use.node), use.node}
        self.names_package = True
        self.edits.rewrite(use.node, target)

    def _module(self, use: Use) -> None:
        """Handle a module that is used as a value, and names that are missing from the table."""
        source, node, known, code = self.source, use.node, use.canonical, self.source.code(use.node)
        alias, modules = source.aliases.get(node), sorted(known & table.MODULES.keys())
        looked_up = source.looked_up(node, use.dotted)
        if looked_up and not modules:
            self._looked_up(use, set(map(table.canonical, looked_up)))
        elif modules:
            if self._stays(use):
                return
            if self.is_legacy or modules[0] not in table.OF_KERAS:
                self._replace(use, table.legacy_module(modules[0]))
            elif alias and isinstance(node, ast.Attribute):
                self.edits.rewrite(node, _of_keras(code))
        elif table.KERAS in known or known & table.PRIVATE:
            if not alias or (table.KERAS in known and isinstance(alias[0], ast.ClassDef)):
                # Keras still has a class of the old name in its module.
                (self.edits.todo if table.KERAS in known else self.edits.notice)(node, NOT_FOLLOWED)
        elif isinstance(node, ast.Attribute) and any(map(names.is_gone, use.dotted)):
            self.edits.todo(node, _NO_COUNTERPART.format(code))
        elif isinstance(node, ast.Attribute):
            self.edits.notice(node, PRIVATE_NAME.format(source.code(node.value)))

    def _looked_up(self, use: Use, looked_up: set[str]) -> None:
        """Report a string with which a call looks an old name up in a module."""
        call = self.source.parents[use.node]
        is_tested = isinstance(call, ast.Call) and self.source.is_builtin(call.func, "hasattr")
        for name in sorted(looked_up & {*table.OLD, *table.MODULES}):
            row = table.OLD.get(name)
            new = table.WRAPPERS_WITH_OLD_ARGUMENTS.get(row.role, row.new) if row else table.legacy_module(name)
            # Keras still has a class of this name.
            if new != name and not (is_tested and row and row.role == table.STABLE):
                self.edits.todo(call, _LOOKED_UP.format(name.rpartition(".")[2], new))


def _of_keras(code: str, name: str = "") -> str:
    """Return the code of today's module, or of a name in it, for the code of an old module or name."""
    new = re.sub(r"\bmixed_precision\b.*", f"mixed_precision{name}", code)
    return new.replace("tensorflow.python.keras", "tensorflow.keras")


def _is_legacy(source: Uses) -> bool:
    """Return whether the experimental names keep their old meaning in a file.

    They do if the file needs an old object, or if code that the codemod does not follow may read a name.

    >>> _is_legacy(Uses(b"from tensorflow.keras.mixed_precision import experimental as mp\\nmp.set_policy('float32')"))
    False
    """
    return (
        source.keeps_old_state
        or policies.need_scale(source)
        or any(use.variable for use in source.in_f_strings.values())
        or any(_is_value(source, use) for use in source.uses)
        or any(_is_shared(source, variable) for variable in source.bindings)
    )


def _is_value(source: Uses, use: Use) -> bool:
    """Return whether a class or module is used in a way that today's names do not support for certain."""
    is_alias = use.node in source.aliases
    if not isinstance(getattr(use.node, "ctx", ast.Load()), ast.Load):
        return use.variable is not None
    if use.roles != {table.EXPERIMENTAL}:
        return bool(use.canonical & table.OF_KERAS) and not is_alias
    if not use.is_sure or source.called(use):
        return not use.is_sure or bool(wrappers.form(source, use).reason)
    return not is_alias and not source.is_tested(use.node)


def _is_shared(source: Uses, variable: Variable) -> bool:
    """Return whether a variable for an experimental name may be read elsewhere, or may be something else."""
    known = source.known(variable)
    is_unsure = UNKNOWN in known or not source.names.get(variable) or source.is_requested(variable)
    return is_unsure and bool(known & table.OF_KERAS or table.EXPERIMENTAL in source.roles_of(variable))


def _left(source: Uses) -> set[Variable]:
    """Return the variables whose imports stay, because the meaning of a use is not certain."""
    found = set()
    for use in source.uses:
        if use.variable and isinstance(use.node, ast.Name) and use.roles & (names.WRAPPERS - {table.EXPERIMENTAL}):
            is_refused = source.called(use) and wrappers.form(source, use).reason
            found |= {use.variable} if is_refused else set()
    return found
