"""Plans an edit or a finding for each use of an old name. The imports follow in `imports`."""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, policies, wrappers
from tf_lossscale.migrate.codemod.decisions import LEFT, LEGACY, MODERN, Decisions
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.uses import Use, Uses

_NOT_FOLLOWED = (
    "this tool cannot follow the module any further. Old names that are looked up in it elsewhere are not changed."
)
_COMPARED = "the type of a wrapper is a subclass of its class: write isinstance()."
_F_STRING = "old names in f-strings are not changed. Compute the value before, and migrate again."
_NO_EFFECT = "the rewritten code uses another name, so this assignment has no effect."
_BACKEND = "this file does not import TensorFlow, so keras may run on another backend."
# What the import of a wrapper class becomes, unless its uses stay.
_IMPORTED = (table.WRAPPER, table.WRAPPERS_WITH_OLD_ARGUMENTS[table.CONTRIB])
_SET = {f"{table.KERAS}.set_global_policy": "set_policy"}


class Rules:
    """Plans the edits to the uses of old names in one file.

    Args:
        source: the file.
        edits: receives the edits.
    """

    def __init__(self, source: Uses, edits: Edits):
        self.source = source
        self.edits = edits
        #: The new meanings of the variables that stand for old names.
        self.decisions: Decisions = Decisions(source)
        #: The names at the beginning of replaced expressions. They no longer use their imports.
        self.gone: set[ast.AST | None] = set()
        #: Whether the new code contains a dotted name such as `tf_lossscale.LossScaleOptimizer`.
        self.names_package: bool = False

    def apply(self) -> None:
        """Plan the edits for all uses."""
        for use in self.source.uses:
            self._apply(use)
        for node in self.source.assigned:
            self._assigned(node)
        for text in self.source.in_f_strings:
            self.edits.todo(text, _F_STRING)

    def _apply(self, use: Use) -> None:
        source, node = self.source, use.node
        decision = self.decisions.of(use.variable) if use.variable else None
        if any(map(names.in_copy, use.dotted)):
            root = source.root(node)
            if not root or not any(map(names.in_copy, source.dotted(root))):
                self.edits.notice(node, f"{source.code(node)} {names.IN_COPY}")
        elif any(map(source.is_on_any_backend, use.dotted)):
            self.edits.notice(node, _BACKEND)
        elif not use.rows:
            self._module(use, decision)
        elif use.roles & names.WRAPPERS:
            self._wrapper(use, decision)
        elif use.roles & policies.ROLES:
            self._policy(use, decision)
        else:
            self._renamed_arguments(use)
            if decision not in (LEGACY, LEFT) and not (decision and isinstance(node, ast.Name)):
                self._replace(use, use.rows[0].new)

    def _wrapper(self, use: Use, decision: str | None) -> None:
        source, node = self.source, use.node
        new, call = wrappers.form(source, use), source.called(use)
        if decision == LEGACY and table.STABLE in use.roles:
            # The variable may also be the current module, whose class is not the old one.
            decision = None
        if new.reason and decision != LEGACY:
            self.edits.todo(node, new.reason)
        test = source.parents[node]
        if isinstance(test, ast.Compare) and node is not test.left:
            self.edits.todo(test, _COMPARED)
        alias = source.aliases.get(node)
        target = new.target
        if alias and target == wrappers.WITH_OLD_ARGUMENTS and not (use.variable and isinstance(node, ast.Name)):
            target = table.WRAPPER if self.decisions.of(alias) == MODERN else target
        if target is None or decision in (LEGACY, LEFT) or use.roles == {table.OURS}:
            return
        if not (isinstance(node, ast.Name) and use.variable and target in _IMPORTED):
            self._replace(use, target, report=call is None)
        for span, text in new.changes:
            self.edits.replace(span, text)
        if call and (new.changes or node in self.gone or source.root(node) in self.gone):
            self.edits.rewritten(call)

    def _policy(self, use: Use, decision: str | None) -> None:
        source, node, row = self.source, use.node, use.rows[0]
        call, scale = source.called(use), policies.scale_of(source, use)
        is_old = self.decisions.keeps_policies or decision in (LEGACY, LEFT)
        if call:
            policies.change_name(source, self.edits, call, is_old)
        if call and scale:
            policies.report_scale(source, self.edits, call, *scale)
        if decision == LEGACY and isinstance(node, ast.Attribute) and node.attr == "set_global_policy":
            # Only the current module had this name, to which the variable no longer leads.
            self._replace(use, f"{names.EXPERIMENTAL}.set_policy")
        if decision in (LEGACY, LEFT):
            return
        if self.decisions.keeps_policies and not source.is_tested(node):
            if not (use.variable and isinstance(node, ast.Name)):
                self._replace(use, f"{names.EXPERIMENTAL}.{_SET.get(row.new, row.new.rpartition('.')[2])}")
            return
        self._rename_policy(use, row.new.rpartition(".")[2])
        if call and scale and not self.decisions.keeps_policies:
            self.edits.replace(source.removal(*scale))
            self.edits.rewritten(call)

    def _rename_policy(self, use: Use, short: str) -> None:
        """Write `keras.mixed_precision.short` for an old dotted name, through the same module or alias."""
        node, code = use.node, self.source.code(use.node)
        if isinstance(node, ast.Name):
            return
        if use.variable:
            new = f"{use.variable[1]}.{short}"
        elif isinstance(node, ast.Call):
            new = f"{self.source.code(node.args[0])}.{short}"
        else:
            new = re.sub(r"\bmixed_precision\b.*", f"mixed_precision.{short}", "".join(code.split()))
        new = new.replace("tensorflow.python.keras", "tensorflow.keras")
        if new != code:
            self.edits.replace(self.source.span(node), new)
            self.edits.rewritten(node)

    def _replace(self, use: Use, target: str, report: bool = True) -> None:
        """Replace a use with a dotted name, unless the use comes from a star import that becomes a star import."""
        root = self.source.root(use.node)
        if isinstance(use.node, ast.Name) and not use.variable and all(map(names.is_gone, use.dotted)):
            return
        self.gone |= {root, use.node}
        self.names_package = True
        self.edits.replace(self.source.span(use.node), target)
        if report:
            self.edits.rewritten(use.node)

    def _renamed_arguments(self, use: Use) -> None:
        call = self.source.called(use)
        for argument in self.source.arguments(call) if call else ():
            new = use.rows[0].renamed.get(argument.keyword or "")
            if new:
                start = argument.span[0]
                self.edits.replace((start, start + len(argument.keyword or "")), new)

    # Modules. ---------------------------------------------------------------------------------------------------------

    def _module(self, use: Use, decision: str | None) -> None:
        """Handle a module that is used as a value, and names that are missing from the table."""
        source, node, known = self.source, use.node, use.canonical
        parent = source.parents[node]
        if isinstance(parent, ast.Call) and node in parent.args and self._looked_up(use, parent, decision):
            return
        alias = source.aliases.get(node)
        if known & table.MODULES.keys():
            if alias and self.decisions.of(alias) == MODERN and decision != LEGACY:
                code = re.sub(r"\bmixed_precision\b.*", "mixed_precision", source.code(node))
                self.edits.replace(source.span(node), code.replace("tensorflow.python.keras", "tensorflow.keras"))
                self.edits.rewritten(node)
            elif decision is None:
                (module, *_) = known & table.MODULES.keys()
                self._replace(use, legacy_module(module))
        elif table.KERAS in known:
            if not alias or isinstance(alias[0], ast.ClassDef):
                self.edits.notice(node, _NOT_FOLLOWED)
        elif isinstance(node, ast.Attribute) and not known & names.PRIVATE:
            if any(map(names.is_gone, use.dotted)):
                self.edits.todo(node, f"{source.code(node)} has no counterpart.")
            else:
                self.edits.notice(node, f"{source.code(node)} {names.PRIVATE_NAME}")
        elif known & names.PRIVATE and not alias:
            self.edits.notice(node, _NOT_FOLLOWED)

    def _looked_up(self, use: Use, call: ast.Call, decision: str | None) -> bool:
        """Handle a call that looks a name up in a module by a string, and return whether the call is handled."""
        source, node = self.source, use.node
        full = {names.canonical(each) for each in source.looked_up(node, use.dotted)}
        if not full:
            return False
        name = next(iter(full)).rpartition(".")[2]
        row = next((table.OLD[each] for each in sorted(full) if each in table.OLD), None)
        module = next((legacy_module(each) for each in sorted(full) if each in table.MODULES), None)
        new = table.WRAPPERS_WITH_OLD_ARGUMENTS.get(row.role, row.new) if row else module
        if not new or new in full:
            return True
        if not source.is_builtin(call.func, "hasattr", "getattr"):
            self.edits.todo(call, f"the string names {name}. Its replacement is {new}.")
            return True
        is_default = source.is_builtin(call.func, "getattr")
        if decision == LEGACY or (row and row.role == table.STABLE and not is_default):
            # The module still has this name, so the call need not change.
            return True
        owner, _, short = new.rpartition(".")
        if owner != table.KERAS:
            self._replace(use, owner)
        if short != name:
            self.edits.replace(source.span(call.args[1]), source.code(call.args[1]).replace(name, short))
            self.edits.rewritten(call.args[1])
        return True

    def _assigned(self, node: ast.Attribute) -> None:
        """Report assignments to old names, such as `tf.keras.mixed_precision.LossScaleOptimizer = ...`."""
        known = {names.canonical(dotted) for dotted in self.source.dotted(node)}
        rows = [table.OLD[name] for name in known if name in table.OLD]
        is_new = rows and all(row.new in known or row.role == table.OURS for row in rows)
        root = self.source.root(node)
        if root and self.source.is_old(self.source.dotted(root)):
            return
        if (rows and not is_new) or known & table.MODULES.keys():
            self.edits.todo(node, _NO_EFFECT)


def legacy_module(module: str) -> str:
    """Return the module of this package that has the names of a removed module, with their old meaning.

    >>> legacy_module("keras.mixed_precision.experimental.policy")
    'tf_lossscale.legacy.experimental'

    Args:
        module: the canonical name of a removed module.
    """
    new = table.MODULES[module]
    return names.EXPERIMENTAL if new == table.KERAS else new
