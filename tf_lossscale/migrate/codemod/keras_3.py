"""Finds the programs for Keras 3's LossScaleOptimizer, which has the name of the old class, but other methods.

With Keras 3's class, every update divides the gradients by the scale. A program that relies on this would compute other
numbers with this package's class, so the codemod does not replace the class.
"""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy.table import KERAS, canonical
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, Scopes, string

#: Methods that only the wrappers of TensorFlow 2 have.
OLD_METHODS = ("get_scaled_loss", "get_unscaled_gradients")
_METHODS = ("apply", "dynamic_scale", "scale_loss", "stateless_apply", "step_counter")
#: The customary names of optimizers.
OPTIMIZER = re.compile(r"optimi[sz]er|(^|_)opts?($|_)", re.IGNORECASE)


def uses(source: Scopes) -> list[ast.AST]:
    """Return the uses and overrides of members that only Keras 3's class has, in the order of the file.

    A name that the file itself defines, except in a subclass of the wrapper, is the file's own.
    """
    functions = source.nodes(ast.FunctionDef)
    own = {node.name for node in functions if not _is_subclass(source, source.parents[node])}
    members = {*_METHODS} - own
    return [node for node in source.parents if _is_use(source, node, members)]


def is_for_keras_3(source: Scopes) -> bool:
    """Return whether a file uses members of Keras 3's class, and no method of the old class and no older name."""
    older = {name for name in source.mentioned if canonical(name).startswith(f"{KERAS}.experimental")}
    old = (getattr(node, "attr", None) or string(node) for node in source.parents)
    return bool(uses(source)) and not older and not any(name in OLD_METHODS for name in old)


def _is_use(source: Scopes, node: ast.AST, members: set[str]) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in members and _is_subclass(source, source.parents[node])
    owner, member = source.read(node)
    if member not in members:
        return False
    name = getattr(owner, "attr", getattr(owner, "id", source.code(owner)))
    if name in ("self", "super()"):
        return any(_is_subclass(source, outer) for outer in source.ancestors(node))
    is_made = any(isinstance(each, ast.Call) and _is_class(source, each.func) for each in source.values(owner))
    is_only = member == "scale_loss" and source.dotted(owner) == {UNKNOWN}
    return is_made or is_only or bool(OPTIMIZER.search(name))


def _is_class(source: Scopes, node: ast.AST) -> bool:
    return f"{KERAS}.LossScaleOptimizer" in map(canonical, source.dotted(node))


def _is_subclass(source: Scopes, node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(_is_class(source, base) for base in node.bases)
