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
    """

    def __init__(self, source: Scopes):
        self.source = source
        #: The variables and attributes to which this file assigns dtype policies.
        self.policies: set[str] = self._targets(
            lambda value: self._makes(value, {table.POLICY}) or self._calls(value, "policy")
        )
        self._wrappers = self._targets(lambda value: self._makes(value, _WRAPPERS))
        self._configs = self._targets(lambda value: self._calls(value, "get_config"))
        self._has_method = any(node.name == "loss_scale" for node in source.nodes(ast.FunctionDef))
        self._kept = self._targets(self._is_loss_scale)

    def _targets(self, is_wanted: Callable[[ast.expr], bool]) -> set[str]:
        """Return the code of the variables and attributes to which this file assigns certain values."""
        assigned = (node for node in self.source.nodes(ast.Assign) if is_wanted(node.value))
        return {self.source.code(target) for node in assigned for target in node.targets}

    def _makes(self, node: ast.AST, roles: set[str]) -> bool:
        """Return whether a node is a call to an old name with one of the given roles."""
        known = map(names.canonical, self.source.dotted(node.func)) if isinstance(node, ast.Call) else ()
        return any(name in table.OLD and table.OLD[name].role in roles for name in known)

    def _calls(self, node: ast.AST, name: str) -> bool:
        return isinstance(node, ast.Call) and self.source.code(node.func).endswith(name)

    def is_policy(self, node: ast.AST) -> bool:
        """Return whether an expression's name suggests that it is a dtype policy, or this file makes it as one."""
        name = self.source.code(node.func if isinstance(node, ast.Call) else node)
        return "policy" in name.rpartition(".")[2].lower() or name in self.policies

    def _is_loss_scale(self, node: ast.AST) -> bool:
        """Return whether an expression reads an attribute `loss_scale` that may be an optimizer's."""
        if not isinstance(node, ast.Attribute) or node.attr != "loss_scale" or self.is_policy(node.value):
            return False
        return not (self._has_method and self.source.code(node.value) in ("self", "cls"))

    def _is_kept(self, node: ast.AST) -> bool:
        return self._is_loss_scale(node) or (isinstance(node, ast.Name) and node.id in self._kept)

    @functools.cached_property
    def reads(self) -> list[ast.expr]:
        """The expressions that stand for the old object, in the order of the file."""
        return [read for node in self.source.parents for read in self._read_by(node)]

    def _read_by(self, node: ast.AST) -> Iterator[ast.expr]:
        source = self.source
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if not given and self._is_kept(node.func):
                yield node.func
            elif source.is_builtin(node.func, "isinstance"):
                yield from filter(self._is_loss_scale, given[:1])
            elif self._makes(node, _WRAPPERS):
                # Two wrappers share one loss scale.
                shared = {f"{wrapper}.{name}" for wrapper in self._wrappers for name in ("loss_scale", "_loss_scale")}
                yield from (each for each in given if source.code(each) in shared)
        elif isinstance(node, ast.Attribute) and node.attr in _OF_OBJECT:
            is_private = isinstance(node.value, ast.Attribute) and node.value.attr == "_loss_scale"
            if self._is_kept(node.value) or (is_private and node.attr not in _STILL_THERE):
                yield node.value
        elif isinstance(node, ast.Subscript) and string(node.slice) in ("loss_scale", "optimizer"):
            is_config = self._calls(node.value, "get_config") or source.code(node.value) in self._configs
            yield from [node.value] if is_config else []
