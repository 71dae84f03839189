"""Goes through a module for what is read and called on the wrappers that it makes: their old and private attributes."""

from __future__ import annotations

import libcst as cst

from tf_lossscale.migrate.codemod import calls as kinds
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import code
from tf_lossscale.migrate.codemod.calls import Calls
from tf_lossscale.migrate.codemod.edits import Edits, with_parentheses_of
from tf_lossscale.migrate.codemod.project import UNKNOWN
from tf_lossscale.migrate.codemod.resolve import Resolver


class ObjectPlanner(cst.CSTVisitor):
    """Fills the edits of one module with those of attributes.

    Args:
        resolver: of the module.
        calls: of the module.
        edits: to be filled.
    """

    def __init__(self, resolver: Resolver, calls: Calls, edits: Edits):
        super().__init__()
        self._resolver = resolver
        self._calls = calls
        self._edits = edits
        self._handled: set[cst.CSTNode] = set()

    def visit_Call(self, node: cst.Call) -> None:
        self._call_of_loss_scale(node)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node not in self._handled and node.attr.value in ("_optimizer", "_loss_scale", "loss_scale"):
            self._attribute(node)

    def _call_of_loss_scale(self, node: cst.Call) -> None:
        """`opt.loss_scale()`: a method-like object until TensorFlow 2.3, a tensor since."""
        func = node.func
        if node.args or not isinstance(func, cst.Attribute) or func.attr.value not in ("loss_scale", "_loss_scale"):
            if isinstance(func, cst.Name) and not node.args:
                self._call_of_kept_loss_scale(node, func)
            return
        found = self._calls.kinds(func.value)
        if found == {kinds.WRAPPER}:
            self._handled.add(func)
            self._edits.replace(
                node,
                lambda updated, now: with_parentheses_of(
                    updated,
                    updated.func.with_changes(attr=cst.Name("loss_scale")),
                ),
                f"{code(func.value)}.loss_scale",
            )
        elif (
            (UNKNOWN in found or kinds.WRAPPER in found)
            and self._resolver.uses_old_api
            and not self._is_own_method(func)
        ):
            self._handled.add(func)
            self._edits.todo(
                node,
                f"if {code(func.value)} is a LossScaleOptimizer, write {code(func.value)}.loss_scale: it is a tensor, "
                "not a function.",
            )

    def _call_of_kept_loss_scale(self, node: cst.Call, func: cst.Name) -> None:
        for value in self._resolver.values(func):
            if not isinstance(value, cst.Attribute) or value.attr.value not in ("loss_scale", "_loss_scale"):
                continue
            if self._calls.kinds(value.value) == {kinds.WRAPPER}:
                shown = f"{code(value.value)}.loss_scale"
                self._edits.todo(node, f"{func.value} is a tensor now, of the moment it was read. Read {shown} here.")

    def _is_own_method(self, func: cst.Attribute) -> bool:
        owner = self._resolver.enclosing(func, cst.ClassDef)
        if not isinstance(owner, cst.ClassDef) or not isinstance(func.value, cst.Name) or func.value.value != "self":
            return False
        is_face = any(self._resolver.meaning(base.value).old for base in owner.bases)
        body = owner.body.body
        return is_face or any(isinstance(s, cst.FunctionDef) and s.name.value == func.attr.value for s in body)

    def _attribute(self, node: cst.Attribute) -> None:
        """Private attributes of a wrapper, and those of its old loss scale object."""
        found = self._calls.kinds(node.value)
        attribute = node.attr.value
        if kinds.WRAPPER not in found:
            return
        parent = self._resolver.parents[node]
        if attribute == "_optimizer":
            if found == {kinds.WRAPPER}:
                self._rename(node, "inner_optimizer")
            else:
                self._edits.todo(node, f"if {code(node.value)} is a LossScaleOptimizer, write inner_optimizer.")
        elif not self._resolver.is_read(node):
            if attribute == "_loss_scale":
                self._edits.todo(
                    node,
                    "only a tf_lossscale.legacy.LossScale can be put in. Better: give LossScaleOptimizer its numbers.",
                )
        elif isinstance(parent, cst.Attribute) and parent.value is node:
            self._state(parent, node, found)
        elif attribute == "_loss_scale" and found == {kinds.WRAPPER} and not self._resolver.assigns("_loss_scale"):
            self._rename(node, "loss_scale")

    def _state(self, outer: cst.Attribute, node: cst.Attribute, found: set[str]) -> None:
        name = outer.attr.value
        if name in names.STATE and found == {kinds.WRAPPER}:
            new = names.STATE[name]
            self._handled.add(node)
            self._edits.replace(
                outer,
                lambda updated, now: updated.with_changes(value=updated.value.value, attr=cst.Name(new)),
                f"{code(node.value)}.{new}",
            )
        elif node.attr.value == "_loss_scale" or name in ("update", "multiplier", "get_config"):
            self._edits.todo(outer, f"the loss scale is no object any more; {name} has no public counterpart.")

    def _rename(self, node: cst.Attribute, new: str) -> None:
        shown = f"{code(node.value)}.{new}"
        self._edits.replace(node, lambda updated, now: updated.with_changes(attr=cst.Name(new)), shown)
