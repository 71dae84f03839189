"""Decides what becomes of a variable that stands for an old name, such as an imported class, and of all its uses.

The variable gets one new meaning:

- MODERN: it becomes today's name, and its uses change with it.
- LEGACY: it becomes the name in `tf_lossscale.legacy` that means the same as the old one, and its uses stay.
- LEFT: it stays, because the meaning of a use is not certain. The use is reported.
"""

from __future__ import annotations

import ast

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, policies, wrappers
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, Variable
from tf_lossscale.migrate.codemod.uses import Use, Uses

MODERN, LEGACY, LEFT = "modern", "legacy", "left"

# Modules of TensorFlow 1 and 2.0, for which `tf_lossscale.legacy` has a module with the same names.
_WITH_SAME_NAMES = {module for module, new in table.MODULES.items() if new != table.KERAS}


class Decisions:
    """The new meanings of the variables in one file.

    >>> source = Uses(b"from tensorflow.keras.mixed_precision import experimental as mp\\nmp.set_policy('float32')")
    >>> Decisions(source).of((source.tree, "mp"))
    'modern'

    Args:
        source: the file.
    """

    def __init__(self, source: Uses):
        self._source = source
        #: Whether the policies in this file keep their loss scales, in `tf_lossscale.legacy.experimental`.
        self.keeps_policies: bool = policies.need_scale(source)
        self._of_variable: dict[Variable, list[Use]] = {}
        for use in source.uses:
            if use.variable:
                self._of_variable.setdefault(use.variable, []).append(use)
        self._decisions: dict[Variable, str] = {}

    def of(self, variable: Variable) -> str:
        """Return the new meaning of a variable that stands for an old name: MODERN, LEGACY or LEFT."""
        if variable not in self._decisions:
            self._decisions[variable] = self._decided(variable)
        return self._decisions[variable]

    def _decided(self, variable: Variable) -> str:
        bound = {dotted for each in self._source.bindings[variable] for dotted in self._source.meanings(each)}
        known = {names.canonical(dotted) for dotted in bound}
        if any(map(names.in_copy, bound)):
            return LEFT
        if known & _WITH_SAME_NAMES:
            return LEGACY
        if known & table.MODULES.keys():
            return self._module(variable, any(map(names.is_gone, bound)))
        roles = {table.OLD[name].role for name in known if name in table.OLD} & {table.STABLE, table.EXPERIMENTAL}
        return self._wrapper(variable, roles, UNKNOWN in bound) if roles else MODERN

    def _module(self, variable: Variable, is_gone: bool) -> str:
        source, uses = self._source, self._of_variable.get(variable, [])
        if not is_gone and any(not use.rows and isinstance(use.node, ast.Attribute) for use in uses):
            # A use needs a private name that the module still has.
            return LEFT
        keeps = self.keeps_policies or source.keeps_old_state or self._is_value(variable)
        is_refused = any(use.roles & names.WRAPPERS and not wrappers.form(source, use).target for use in uses)
        return LEGACY if keeps or is_refused or not all(use.is_sure for use in uses) else MODERN

    def _wrapper(self, variable: Variable, roles: set[str], may_be_other: bool) -> str:
        source, uses = self._source, self._of_variable.get(variable, [])
        forms = [wrappers.form(source, use) for use in uses]
        keeps = may_be_other or self._is_value(variable) or self._is_alias_of_legacy(variable)
        if table.EXPERIMENTAL in roles and (keeps or any(f.target == wrappers.WITH_OLD_ARGUMENTS for f in forms)):
            return LEGACY if roles == {table.EXPERIMENTAL} or not uses else LEFT
        is_refused = any(f.reason and source.called(use) for f, use in zip(forms, uses, strict=True))
        return LEFT if is_refused else MODERN

    def _is_value(self, variable: Variable) -> bool:
        """Return whether a variable is read other than at the beginning of an old name, here or in another file."""
        source, read = self._source, self._source.names.get(variable, ())
        uses = self._of_variable.get(variable, [])
        roots = {source.root(use.node) for use in uses if use.rows or source.looked_up(use.node, use.dotted)}
        return source.is_exported(variable, len(read)) or any(name not in roots for name in read)

    def _is_alias_of_legacy(self, variable: Variable) -> bool:
        values = [binding.value for binding in self._source.bindings[variable]]
        aliased = [use for use in self._source.uses if use.node in values and use.variable]
        return any(isinstance(use.node, ast.Name) or self.of(use.variable) == LEGACY for use in aliased if use.variable)
