"""Plans edits for old and private attributes of the wrappers that a module creates."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import calls as kinds
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import code, text
from tf_lossscale.migrate.codemod.bindings import UNKNOWN
from tf_lossscale.migrate.codemod.calls import Calls, optimizer_of
from tf_lossscale.migrate.codemod.edits import Edits, Visitor, with_parentheses_of
from tf_lossscale.migrate.codemod.tree import methods

# Kinds of objects whose `loss_scale` attribute cannot be called. A wrapper's attribute is a tensor, and a plain
# optimizer never had a function of this name.
_HAVE_A_TENSOR = {kinds.WRAPPER, kinds.WRAPPER_WITH_OLD_ARGUMENTS, kinds.OPTIMIZER}
# If an object can only be of these kinds and the code reads its `_optimizer` or `_loss_scale` attribute, the object is
# a wrapper, because a plain optimizer has no such attribute.
_PLAIN_OR_WRAPPER = {kinds.WRAPPER, kinds.OPTIMIZER}
_OF_WRAPPERS = ("_optimizer", "_loss_scale", "loss_scale")
_SCALES = ("loss_scale", "_loss_scale")
_NAMED_LOSS_SCALE = m.Name("loss_scale") | m.Attribute(attr=m.Name("loss_scale") | m.Name("_loss_scale"))
# Methods of the old wrapper class that Keras's current class does not have.
_METHODS = ("get_scaled_loss", "get_unscaled_gradients")
_COMPILED = "compile() under mixed_float16 wraps a bare optimizer in Keras's own class"
_TAKES = "_loss_scale takes an object with the methods __call__() and update(grads), such as a LossScale, not a number."
_UPDATED = (
    "if {} is the loss scale of a LossScaleOptimizer, it is a tensor and has no update. The wrapper updates its loss "
    "scale automatically."
)
_NO_STATE = "the loss scale is a tensor and has no {}. The wrapper updates its loss scale itself."
_IF_WRAPPED = "if {0} is a LossScaleOptimizer, write {0}.{1}"
_GIVE = "Give compile() a tf_lossscale.LossScaleOptimizer."


class ObjectPlanner(Visitor):
    """Plans the edits to the code in one module that uses wrappers' attributes."""

    def __init__(self, module: Calls, edits: Edits):
        super().__init__(module, edits)
        self._handled: set[cst.CSTNode] = set()
        self._open: set[cst.CSTNode] = set()
        # Notices about code that fails if the optimizer is a wrapper that `compile` created. A key consists of the
        # enclosing function and the source code of the expression that refers to the optimizer. A value consists of the
        # node to report and the reason why its code fails.
        self._suspected: dict[tuple[cst.CSTNode | None, str], tuple[cst.CSTNode, str]] = {}

    def visit_Call(self, node: cst.Call) -> None:
        self._call_of_loss_scale(node)
        # In the rewritten code, `LossScaleOptimizer` is this package's class. For an instance of Keras's own
        # LossScaleOptimizer, both `isinstance(x, LossScaleOptimizer)` and `hasattr(x, "get_scaled_loss")` are then
        # false.
        tested, what = [argument.value for argument in node.args] if len(node.args) == 2 else (None, None)
        if tested and self._module.is_builtin(node.func, "isinstance"):
            self._compared(node, tested, what)
        elif tested and text(what) in _METHODS and self._module.is_builtin(node.func, "hasattr"):
            self._suspect(node, tested, f"has no {text(what)}")

    def finish(self) -> None:
        for node, what in self._suspected.values():
            why = self._why_suspected(node)
            if why:
                self._edits.notice(node, f"{_COMPILED}, which {what}. {_GIVE} {why}")

    def _why_suspected(self, node: cst.CSTNode) -> str | None:
        """Return why the optimizer may be a wrapper that `compile` created, or None if nothing suggests this."""
        compiled = self._module.compiled
        bare = [call for call in compiled if self._module.kinds(optimizer_of(call)) != {kinds.WRAPPER}]
        train_step = methods(self._module.enclosing(node, cst.ClassDef)).get("train_step")
        # A Keras model's `train_step` method has no parameters other than self and data.
        if not bare and train_step and len(train_step.params.params) == 2:
            return "Suspected because this class is a Keras model."
        only_wrapped = compiled and not bare and not self._module.around.compiles
        return None if only_wrapped else self._module.why_compiled(bare)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node not in self._handled and node.attr.value in _OF_WRAPPERS:
            self._attribute(node)
        if node.attr.value == "update":
            self._update(node)
        if node.attr.value in names.GONE_HOOKS and self._is_hook_of_wrapper(node):
            self._edits.todo(node, f"{node.attr.value} {names.GONE_HOOK}")
        if node.attr.value in _METHODS:
            self._suspect(node, node.value, f"has no {node.attr.value}")

    def _is_hook_of_wrapper(self, node: cst.Attribute) -> bool:
        """Return whether an attribute is a private method of a wrapper or is inherited from a wrapper class."""
        owner = self._module.enclosing(node, cst.ClassDef)
        is_inherited = code(node.value) == "self" and node.attr.value not in methods(owner)
        if m.matches(node.value, m.Call(m.Name("super"))) or is_inherited:
            return self._module.is_wrapper_class(owner)
        return bool(self._module.kinds(node.value) & {kinds.WRAPPER, kinds.WRAPPER_WITH_OLD_ARGUMENTS})

    def _update(self, node: cst.Attribute) -> None:
        """Report `loss_scale.update(...)` if the kind of the object `loss_scale` is unknown."""
        scale = node.value
        values = [scale, *(value for value in self._module.values(scale) if value is not None)]
        named = [each for each in values if m.matches(each, _NAMED_LOSS_SCALE)]
        owners = [each.value for each in named if isinstance(each, cst.Attribute)]
        if not named or any(isinstance(each, cst.Call) for each in values) or not self._module.uses_an_old_name:
            return
        if any(self._is_own_wrapper(owner) or kinds.WRAPPER in self._module.kinds(owner) for owner in owners):
            return
        if self._module.kinds(scale) == {UNKNOWN} and not self._module.is_never_wrapper(scale):
            self._edits.notice(node, _UPDATED.format(code(scale)))

    def visit_Comparison(self, node: cst.Comparison) -> None:
        tested = self._module.type_tested(node)
        if tested is not None:
            self._compared(node, tested, node.comparisons[0].comparator)

    def _compared(self, node: cst.CSTNode, tested: cst.BaseExpression, what: cst.BaseExpression) -> None:
        if self._module.meaning(what).roles & {table.STABLE, table.EXPERIMENTAL}:
            self._suspect(node, tested, "is no instance of this class")

    def _suspect(self, node: cst.CSTNode, optimizer: cst.BaseExpression, what: str) -> None:
        """Record a node whose code fails if the optimizer is a wrapper that `compile` created.

        Only one node is recorded per function and optimizer.
        """
        if self._may_be_compiled(optimizer):
            place = self._module.enclosing(node, cst.FunctionDef), code(optimizer)
            self._suspected.setdefault(place, (node, what))

    def _may_be_compiled(self, expression: cst.BaseExpression) -> bool:
        """Return whether `model.optimizer`, or a function's parameter, may be a wrapper that `compile` created."""
        is_known = UNKNOWN not in self._module.kinds(expression) and not self._module.is_annotated(expression)
        if expression in self._open or is_known:
            return False
        if isinstance(expression, cst.Name):
            reaching = [getattr(a, "node", None) for a in self._module.reaching(expression)]
            parameters = [node for node in reaching if isinstance(node, cst.Param)]
            if parameters:
                # A Keras model's methods normally read self.optimizer. If a method takes an optimizer as an argument
                # and this file does not call `compile`, the program has probably created the optimizer itself.
                is_possible = self._module.compiled or self._module.enclosing(expression, cst.ClassDef) is None
                is_own = expression.value == "self" or any(map(self._is_given_a_wrapper, parameters))
                return bool(is_possible) and self._module.uses_old_api and not is_own
        elif not isinstance(expression, cst.Attribute) or expression.attr.value != "optimizer":
            return False
        values = [value for value in self._module.values(expression) if value is not None]
        if not values:
            return isinstance(expression, cst.Attribute)
        self._open.add(expression)
        any_compiled = any(self._may_be_compiled(value) for value in values)
        self._open.discard(expression)
        return any_compiled

    def _is_given_a_wrapper(self, parameter: cst.Param) -> bool:
        """Return whether a call in this file passes a wrapper to the function that has this parameter."""
        function = self._module.enclosing(parameter, cst.FunctionDef)
        uses = self._module.names.get(function.name.value, ()) if function else ()
        calls = [call for use in uses if isinstance(call := self._module.parents.get(use), cst.Call)]
        return any(kinds.WRAPPER in self._module.kinds(argument.value) for call in calls for argument in call.args)

    def _is_of_model(self, expression: cst.BaseExpression) -> bool:
        """Return whether an expression is `model.optimizer` and this file never assigns it."""
        is_unknown = self._module.values(expression) == [None] and isinstance(expression, cst.Attribute)
        return is_unknown and self._may_be_compiled(expression)

    def _call_of_loss_scale(self, node: cst.Call) -> None:
        """Handle `opt.loss_scale()`. The attribute was callable up to TensorFlow 2.3, and is now a tensor."""
        func = node.func
        if isinstance(func, cst.Name) and not node.args:
            self._call_of_kept_loss_scale(node, func)
        if node.args or not isinstance(func, cst.Attribute) or func.attr.value not in _SCALES:
            return
        object_kinds = self._module.kinds(func.value)
        of_model = self._is_of_model(func.value) and self._module.uses_an_old_name
        if of_model:
            self._suspect(node, func.value, "has no loss_scale")
        if of_model or (kinds.WRAPPER in object_kinds and object_kinds <= _HAVE_A_TENSOR):
            self._handled.add(func)
            name = cst.Name("loss_scale")
            self._edits.replace(node, lambda old, now: with_parentheses_of(old, old.func.with_changes(attr=name)))
        # A wrapper's `_loss_scale` can still be called, unlike its `loss_scale`.
        elif (
            object_kinds & {UNKNOWN, kinds.WRAPPER}
            and func.attr.value == "loss_scale"
            and self._may_be_of_wrapper(func)
        ):
            self._handled.add(func)
            self._edits.todo(node, _IF_WRAPPED.format(code(func.value), "loss_scale: it is a tensor, not a function."))

    def _may_be_of_wrapper(self, attribute: cst.Attribute) -> bool:
        """Return whether `x` in `x.loss_scale` may be a wrapper, for an `x` whose kind is not certain."""
        wraps, is_self = self._module.around.wraps, code(attribute.value) == "self"
        is_wrapped_elsewhere = self._module.imports_tensorflow if wraps is None else wraps
        if not self._module.uses_an_old_name and (is_self or not is_wrapped_elsewhere):
            return False
        owner = self._module.enclosing(attribute, cst.ClassDef)
        is_subclass = owner and any(self._module.meaning(base.value).old for base in owner.bases)
        if is_self and (is_subclass or attribute.attr.value in methods(owner)):
            return False
        return not self._module.is_never_wrapper(attribute) and not self._module.is_never_wrapper(attribute.value)

    def _call_of_kept_loss_scale(self, node: cst.Call, func: cst.Name) -> None:
        for value in self._module.values(func):
            if not isinstance(value, cst.Attribute) or value.attr.value != "loss_scale":
                continue
            if kinds.WRAPPER in self._module.kinds(value.value):
                shown = f"{code(value.value)}.loss_scale"
                self._edits.todo(
                    node, f"{func.value} is a tensor, which cannot be called and does not change. Read {shown} instead."
                )

    def _attribute(self, node: cst.Attribute) -> None:
        """Handle private attributes of a wrapper, and attributes of its old loss scale object."""
        object_kinds = self._module.kinds(node.value)
        attribute = node.attr.value
        if attribute == "_loss_scale" and not self._module.is_read(node):
            if object_kinds & {kinds.WRAPPER, kinds.WRAPPER_WITH_OLD_ARGUMENTS} or self._is_own_wrapper(node.value):
                self._edits.notice(node, _TAKES)
            return
        if kinds.WRAPPER not in object_kinds or not self._module.is_read(node):
            return
        parent = self._module.parents[node]
        if attribute == "_optimizer":
            if object_kinds <= _PLAIN_OR_WRAPPER:
                self._edits.rename_attribute(node, "inner_optimizer")
        elif isinstance(parent, cst.Attribute) and parent.value is node:
            self._state(parent, node, object_kinds)
        elif (
            attribute == "_loss_scale"
            # If the value of `_loss_scale` is stored or returned, the attribute is not renamed. Other code may call
            # this value, whereas the value of `loss_scale` cannot be called.
            and not isinstance(parent, (cst.Assign, cst.AnnAssign, cst.NamedExpr, cst.Return))
            and object_kinds <= _PLAIN_OR_WRAPPER
            and not self._module.assigns("_loss_scale")
        ):
            self._edits.rename_attribute(node, "loss_scale")

    def _is_own_wrapper(self, expression: cst.BaseExpression) -> bool:
        """Return whether an expression is `self` in a subclass of an old wrapper class."""
        owner = self._module.enclosing(expression, cst.ClassDef)
        return code(expression) == "self" and self._module.is_wrapper_class(owner)

    def _state(self, outer: cst.Attribute, node: cst.Attribute, found: set[str]) -> None:
        name = outer.attr.value
        if node.attr.value == "_loss_scale" and (name == "multiplier" or not self._module.is_read(outer)):
            # The `_loss_scale` of this package's wrapper has `multiplier`, too. Its attributes can be assigned.
            return
        if name in names.STATE and found <= _PLAIN_OR_WRAPPER:
            new = cst.Name(names.STATE[name])
            self._handled.add(node)
            self._edits.replace(outer, lambda old, now: old.with_changes(value=old.value.value, attr=new))
        elif name in names.STATE:
            self._edits.todo(outer, _IF_WRAPPED.format(code(node.value), f"{names.STATE[name]}."))
        elif node.attr.value == "_loss_scale" or name in ("update", "multiplier", "get_config"):
            self._edits.todo(outer, _NO_STATE.format(name))
