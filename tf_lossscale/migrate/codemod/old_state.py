"""Finds where a file reads the old loss scale object of a wrapper, in whose place there is a tensor today.

Up to TensorFlow 2.3, `optimizer.loss_scale` was an object that could be called. It had attributes and methods, and its
class and the config of the wrapper showed what it was.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.scopes import Scopes, string

_WRAPPERS = {table.STABLE, table.EXPERIMENTAL}
# Attributes of the old object. A tensor has none of them.
_OF_OBJECT = {
    *("_current_loss_scale", "_increment_period", "_initial_loss_scale", "_multiplier", "_num_good_steps", "counter"),
    *("current_loss_scale", "get_config", "increment_period", "initial_loss_scale", "multiplier", "update"),
}
# Attributes that today's `optimizer._loss_scale` has as well.
_STILL_THERE = {"counter", "current_loss_scale", "multiplier"}


class OldState:
    """The expressions in a file that read, or may read, the old loss scale object of a wrapper.

    >>> state = OldState(Scopes(b"print(optimizer.loss_scale(), policy.loss_scale())"))
    >>> [state.source.code(node) for node in state.reads]
    ['optimizer.loss_scale']

    Args:
        source: the file.
    """

    def __init__(self, source: Scopes):
        self.source = source
        self._assigned = source.nodes(ast.Assign)
        #: The variables and attributes to which this file assigns dtype policies.
        self.policies: set[str] = self._targets(
            lambda value: self._makes(value, {table.POLICY}) or self._calls(value, "policy")
        )
        self._wrappers = self._targets(lambda value: self._makes(value, _WRAPPERS))
        self._configs = self._targets(lambda value: self._calls(value, "get_config"))
        self._has_method = any(each.name == "loss_scale" for each in source.nodes(ast.FunctionDef))
        self._kept = self._targets(self._is_loss_scale)

    def _targets(self, is_wanted: Callable[[ast.expr], bool]) -> set[str]:
        """Return the code of the variables and attributes to which this file assigns certain values."""
        assigned = (node for node in self._assigned if is_wanted(node.value))
        return {self.source.code(target) for node in assigned for target in node.targets}

    def _makes(self, node: ast.AST, roles: set[str]) -> bool:
        """Return whether a node is a call to an old name with one of the given roles."""
        dotted = self.source.dotted(node.func) if isinstance(node, ast.Call) else ()
        rows = [table.OLD.get(names.canonical(each)) for each in dotted]
        return any(row is not None and row.role in roles for row in rows)

    def _calls(self, node: ast.AST, name: str) -> bool:
        function = node.func if isinstance(node, ast.Call) else None
        return str(getattr(function, "attr", getattr(function, "id", ""))).endswith(name)

    def is_policy(self, node: ast.AST) -> bool:
        """Return whether an expression's name suggests that it is a dtype policy, or this file makes it as one."""
        name = self.source.code(node.func if isinstance(node, ast.Call) else node)
        return "policy" in name.rpartition(".")[2].lower() or name in self.policies

    def is_shared(self, node: ast.AST) -> bool:
        """Return whether an expression is the loss scale of a wrapper that this file makes."""
        is_scale = isinstance(node, ast.Attribute) and node.attr in ("loss_scale", "_loss_scale")
        return is_scale and self.source.code(node).rpartition(".")[0] in self._wrappers

    def _is_loss_scale(self, node: ast.AST) -> bool:
        """Return whether an expression reads an attribute `loss_scale` that may be an optimizer's."""
        if not isinstance(node, ast.Attribute) or node.attr != "loss_scale" or self.is_policy(node.value):
            return False
        return not (self._has_method and self.source.code(node.value) in ("self", "cls"))

    @functools.cached_property
    def reads(self) -> list[ast.expr]:
        """The expressions that stand for the old object, in the order of the file."""
        return [read for node in self.source.parents for read in self._read_by(node)]

    def _read_by(self, node: ast.AST) -> Iterator[ast.expr]:
        source = self.source
        if isinstance(node, ast.Call):
            is_kept = isinstance(node.func, ast.Name) and node.func.id in self._kept
            if not node.args and not node.keywords and (is_kept or self._is_loss_scale(node.func)):
                yield node.func
            elif source.is_builtin(node.func, "isinstance") and node.args and self._is_loss_scale(node.args[0]):
                yield node.args[0]
            elif self._makes(node, _WRAPPERS):
                given = (*node.args[1:], *(keyword.value for keyword in node.keywords))
                yield from filter(self.is_shared, given)
        elif isinstance(node, ast.Attribute) and node.attr in _OF_OBJECT:
            is_private = isinstance(node.value, ast.Attribute) and node.value.attr == "_loss_scale"
            is_kept = isinstance(node.value, ast.Name) and node.value.id in self._kept
            if is_kept or self._is_loss_scale(node.value) or (is_private and node.attr not in _STILL_THERE):
                yield node.value
        elif isinstance(node, ast.Subscript) and string(node.slice) in ("loss_scale", "optimizer"):
            is_config = self._calls(node.value, "get_config") or source.code(node.value) in self._configs
            yield from [node.value] if is_config else []
