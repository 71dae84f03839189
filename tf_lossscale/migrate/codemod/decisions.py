"""Decides which old names keep their old meaning in a file.

A file has one meaning for all experimental names of Keras. They move to today's names and arguments, or they keep the
old ones, in `tf_lossscale.legacy.experimental`, and their uses stay as they are.
"""

from __future__ import annotations

import ast

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, policies, wrappers
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, Variable
from tf_lossscale.migrate.codemod.uses import Use, Uses


def is_legacy(source: Uses) -> bool:
    """Return whether the experimental names keep their old meaning in a file.

    They do if the file needs an old object, or if code that the codemod does not follow may read a name.

    >>> is_legacy(Uses(b"from tensorflow.keras.mixed_precision import experimental as mp\\nmp.set_policy('float32')"))
    False
    """
    return (
        source.keeps_old_state
        or policies.need_scale(source)
        or not names.OF_KERAS.isdisjoint(map(names.canonical, source.stars))
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
        is_named = is_alias or source.is_old(source.looked_up(use.node, use.dotted))
        return bool(use.canonical & names.OF_KERAS) and not is_named
    if not use.is_sure or source.called(use):
        return not use.is_sure or bool(wrappers.form(source, use).reason)
    return not is_alias and not source.is_tested(use.node)


def _is_shared(source: Uses, variable: Variable) -> bool:
    """Return whether a variable for an experimental name may be read elsewhere, or may be something else."""
    known = source.known(variable)
    is_unsure = UNKNOWN in known or not source.names.get(variable) or source.is_requested(variable)
    return is_unsure and bool(known & names.OF_KERAS or table.EXPERIMENTAL in source.roles_of(variable))


def left(source: Uses) -> set[Variable]:
    """Return the variables whose imports stay, because the meaning of a use is not certain."""
    found = set()
    for use in source.uses:
        if use.variable and isinstance(use.node, ast.Name) and use.roles & (names.WRAPPERS - {table.EXPERIMENTAL}):
            is_refused = source.called(use) and wrappers.form(source, use).reason
            found |= {use.variable} if is_refused else set()
    return found
