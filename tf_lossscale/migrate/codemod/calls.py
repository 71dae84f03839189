"""Determines how to rewrite calls to old wrapper classes, and which kinds of objects an expression may evaluate to."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import (
    SIGNATURES,
    Argument,
    Unprovable,
    Written,
    as_they_are,
    bind,
    number,
    scale_arguments,
    text,
)
from tf_lossscale.migrate.codemod.bindings import UNKNOWN
from tf_lossscale.migrate.codemod.project import Around
from tf_lossscale.migrate.codemod.resolve import Meaning, Resolver, is_none

# The kinds of objects that an expression may evaluate to. WRAPPER stands for an object that is an instance of
# `tf_lossscale.LossScaleOptimizer` in the rewritten code.
WRAPPER = "wrapper"
# An instance of an old class from `tf_lossscale.legacy`.
WRAPPER_WITH_OLD_ARGUMENTS = "face"
LEFT = "left as it is"
POLICY = "policy"
# An optimizer that is certainly not a wrapper.
OPTIMIZER = "optimizer of Keras or tf.compat.v1.train"
OTHER = "something else"

_COMPILE = m.Attribute(attr=m.Name("compile"))
_SUPER_INIT = m.Call(m.Attribute(m.Call(m.Name("super")), m.Name("__init__")))
_FROM_CONFIG = m.Attribute(attr=m.Name("from_config"))


class Calls(Resolver):
    """Analyzes the calls in one module, and the kinds of objects that its expressions may evaluate to.

    Args:
        module: the module's syntax tree.
        around: facts about the other files of the project.
    """

    def __init__(self, module: cst.Module, around: Around):
        super().__init__(module, around)
        self._written: dict[cst.Call, Written] = {}
        self._examined: set[cst.CSTNode] = set()

    def written(self, call: cst.Call, meaning: Meaning) -> Written:
        """Return the new form of a call to a wrapper's constructor.

        Args:
            call: a call to one of the classes in `names.WRAPPERS`.
            meaning: the old names that `call.func` may refer to.

        Raises:
            Unprovable: no new form of the call is provably equivalent.
        """
        if call not in self._written:
            self._written[call] = self._decided(call, meaning)
        return self._written[call]

    def _decided(self, call: cst.Call, meaning: Meaning) -> Written:
        roles = meaning.roles
        if roles == {table.CONTRIB}:
            return _unchanged(call, table.WRAPPERS_WITH_OLD_ARGUMENTS[table.CONTRIB])
        if roles <= {table.STABLE, table.OURS, table.EXPERIMENTAL}:
            # If the name may mean the old or the new class, the arguments may show which class is called.
            if roles == {table.EXPERIMENTAL} or self._has_old_arguments(call):
                return self._experimental(call, roles)
            if table.EXPERIMENTAL not in roles or self._is_certainly_stable(call):
                return _unchanged(call, table.WRAPPER)
        raise Unprovable(
            f"this may be a call to {' or '.join(sorted({dotted for dotted, _ in meaning.old}))}, and the arguments "
            f"fit both. Write {table.WRAPPER} or {names.HELPER}"
        )

    def takes_newer_arguments(self, owner: cst.ClassDef) -> bool:
        """Return whether a subclass calls `super().__init__` with arguments that only the newer base class takes."""
        calls = [call for call in m.findall(owner.body, _SUPER_INIT) if isinstance(call, cst.Call)]
        return bool(calls) and all(self._is_certainly_stable(c) and not self._has_old_arguments(c) for c in calls)

    def _has_old_arguments(self, call: cst.Call) -> bool:
        """Return whether the arguments of a call match only the old signature `(optimizer, loss_scale)`."""
        keywords = {argument.keyword.value for argument in call.args if argument.keyword}
        if any(argument.star for argument in call.args):
            return False
        if keywords & {"loss_scale", "optimizer"}:
            return True
        second = _argument(call, 1, "dynamic")
        if second is None:
            return False
        values = self._literals(second)
        return "dynamic" in values or number(second) is not None or self.loss_scale_class(second) is not None

    def _literals(self, expression: cst.BaseExpression | None, through: int = 1) -> set[str]:
        """Return the values that an expression may have: True, False, "dynamic", and "?" for any other value.

        Args:
            expression: an expression, or None if the expression is unknown.
            through: the number of assignments to follow from variable to variable. If it is 0, the value of a variable
                is "?".
        """
        if isinstance(expression, cst.IfExp):
            return self._literals(expression.body, through) | self._literals(expression.orelse, through)
        if isinstance(expression, cst.Name) and expression.value not in ("True", "False") and through:
            values = self.values(expression)
            return {literal for value in values for literal in self._literals(value, through - 1)}
        return {_literal(expression)}

    def _is_certainly_stable(self, call: cst.Call) -> bool:
        stars = {argument.star for argument in call.args} - {""}
        if stars:
            # A program that supports both the old and the new LossScaleOptimizer may unpack a dict of arguments that
            # depends on the version of TensorFlow. The codemod assumes that only the new class is called with `**`.
            return stars == {"**"} and _argument(call, 1, "dynamic") is None
        second = _argument(call, 1, "dynamic")
        keywords = {argument.keyword.value for argument in call.args if argument.keyword}
        return (
            second is None
            or bool(keywords & {"dynamic", "initial_scale", "dynamic_growth_steps"})
            or self._literals(second) <= {"True", "False"}
            or len(call.args) > 2
        )

    def _experimental(self, call: cst.Call, roles: set[str]) -> Written:
        second = _argument(call, 1, "dynamic")
        if roles == {table.STABLE} and second is not None and number(second) is not None:
            raise Unprovable(
                "a number as the second argument is a fixed scale in TensorFlow 2.3 and the initial scale in Keras 3. "
                "For a fixed scale, write dynamic=False, initial_scale=N. For a scale that only starts at N, write "
                "initial_scale=N"
            )
        if any(argument.star for argument in call.args):
            return _unchanged(call, table.WRAPPERS_WITH_OLD_ARGUMENTS[table.EXPERIMENTAL])
        newer = ("inner_optimizer", "loss_scale")
        bound = bind(call.args, SIGNATURES[table.EXPERIMENTAL]) or bind(call.args, newer) or {}
        optimizer = bound.get("optimizer", bound.get("inner_optimizer"))
        if optimizer is None:
            raise Unprovable("the arguments do not match the signature (optimizer, loss_scale)")
        if "loss_scale" not in bound:
            return Written(table.WRAPPER, [_inner(call, optimizer)])
        return self._wrapped(call, optimizer, bound["loss_scale"])

    def _wrapped(self, call: cst.Call, optimizer: int, scale: int) -> Written:
        """Return a call to LossScaleOptimizer, or to `from_loss_scale` if the scale is known only at run time."""
        value = call.args[scale].value
        is_read = isinstance(value, cst.Attribute) and value.attr.value in ("loss_scale", "_loss_scale")
        if is_read and self.kinds(value.value) & {WRAPPER, WRAPPER_WITH_OLD_ARGUMENTS, LEFT}:
            raise Unprovable("two wrappers share one loss scale. Pass one tf_lossscale.SharedLossScale to both of them")
        if self._literals(value) <= {"True", "dynamic"}:
            value = cst.SimpleString("'dynamic'")
        converted = scale_arguments(value, self.loss_scale_class(value))
        if converted is None:
            return Written(names.HELPER, [(None, optimizer), (None, scale)])
        arguments, consumed = converted
        inner = _inner(call, optimizer)
        new: list[Argument] = [inner, *arguments] if optimizer < scale else [*arguments, inner]
        return Written(table.WRAPPER, new, tuple(consumed))

    # Objects. ---------------------------------------------------------------------------------------------------

    def loss_scale_class(self, expression: cst.BaseExpression) -> str | None:
        """Return the name of the loss scale class that an expression instantiates, or None for other expressions."""
        meaning = self.meaning(expression.func) if isinstance(expression, cst.Call) else None
        if meaning is None or not meaning.sure:
            return None
        new = {old.new.rpartition(".")[2] for _, old in meaning.old}
        return new.pop() if len(new) == 1 and new <= {"FixedLossScale", "DynamicLossScale"} else None

    def is_global_policy(self, expression: cst.BaseExpression) -> bool:
        """Return whether an expression calls `global_policy()` of the old or the new API."""
        dotted = self.dotted(expression.func) if isinstance(expression, cst.Call) else ()
        return any(d.endswith(".global_policy") for d in dotted)

    @functools.cached_property
    def compiled(self) -> list[cst.Call]:
        """The calls that pass an optimizer to a `compile` method. Functions such as `re.compile` do not count."""
        calls = [node for node in self.parents if isinstance(node, cst.Call) and m.matches(node.func, _COMPILE)]
        return [c for c in calls if optimizer_of(c) and not all(map(_is_in_module, self.dotted(c.func)))]

    def why_compiled(self, calls: Sequence[cst.Call]) -> str | None:
        """Return why an optimizer may be a wrapper that `compile` created. Return None if no file calls `compile`.

        If `calls` is not empty, the reason is the first of these calls. Otherwise, the reason is that another file
        calls or may call `compile`.
        """
        if calls:
            return f"Suspected because of compile() in line {self.start(calls[0])[0]}."
        if self.around.compiles is None:
            return "Suspected because the files that call compile() were not given."
        return "Suspected because another file calls compile()." if self.around.compiles else None

    def kinds(self, expression: cst.BaseExpression) -> set[str]:
        """Return the kinds of objects that an expression may evaluate to.

        Each kind is one of this module's constants or UNKNOWN.
        """
        if isinstance(expression, (cst.Name, cst.Attribute)) and self._is_guarded(expression):
            return {WRAPPER}
        if isinstance(expression, cst.IfExp):
            return self.kinds(expression.body) | self.kinds(expression.orelse)
        if isinstance(expression, (cst.NamedExpr, cst.Await)):
            return self.kinds(expression.value if isinstance(expression, cst.NamedExpr) else expression.expression)
        if isinstance(expression, cst.Call):
            return self._kinds_of_call(expression)
        if not isinstance(expression, (cst.Name, cst.Attribute)):
            return {UNKNOWN}
        kinds = self._kinds_of(self.values(expression))
        return kinds - {UNKNOWN} | {WRAPPER} if UNKNOWN in kinds and self.is_annotated(expression) else kinds

    def _kinds_of(self, values: Iterable[cst.BaseExpression | None]) -> set[str]:
        """Return the kinds of objects that these expressions may evaluate to. The constant None is ignored."""
        kinds: set[str] = set()
        for value in values:
            if value is None:
                kinds.add(UNKNOWN)
            elif value not in self._examined and not is_none(value):
                self._examined.add(value)
                kinds |= self.kinds(value)
                self._examined.discard(value)
        return kinds or {UNKNOWN}

    def is_annotated(self, expression: cst.BaseExpression) -> bool:
        """Return whether a variable or attribute is annotated with a wrapper class, possibly inside `Optional`."""
        classes = self.annotated_classes(expression)
        return bool(classes) and all(self._is_wrapper(cls) for cls in classes)

    def _is_wrapper(self, cls: cst.BaseExpression) -> bool:
        meaning = self.meaning(cls)
        return bool(meaning.old) and meaning.roles <= {table.STABLE, table.EXPERIMENTAL, table.OURS}

    def _kinds_of_call(self, call: cst.Call) -> set[str]:
        meaning = self.meaning(call.func)
        if self.is_global_policy(call):
            return {POLICY}
        if meaning.old and meaning.sure:
            return {self._kind_of_old(call, meaning)}
        dotted = self.dotted(call.func)
        made = call.func.value if m.matches(call.func, _FROM_CONFIG) else None
        made = call.args[0].value if dotted == {"typing.cast"} and call.args else made
        if names.HELPER in dotted or (made and self._is_wrapper(made)):
            return {WRAPPER}
        if dotted and dotted <= set(table.WRAPPERS_WITH_OLD_ARGUMENTS.values()):
            return {WRAPPER_WITH_OLD_ARGUMENTS}
        if UNKNOWN in dotted:
            classes = self._definitions(call.func)
            is_own = classes and len(classes) == len(self.assignments(call.func))
            return {OTHER} if is_own else self._kinds_of(self.returned(call.func))
        is_optimizer = all(names.canonical(d).startswith(("keras.optimizers.", "tensorflow.train.")) for d in dotted)
        return {OPTIMIZER} if is_optimizer else {UNKNOWN}

    def _kind_of_old(self, call: cst.Call, meaning: Meaning) -> str:
        """Return the kind of object that a call to an old class or function creates."""
        if meaning.roles <= {table.POLICY}:
            return POLICY
        if meaning.roles <= {table.GRAPH_REWRITE}:
            return WRAPPER
        if not meaning.roles <= {*names.WRAPPERS}:
            return OTHER
        try:
            target = self.written(call, meaning).target
        except Unprovable:
            return LEFT
        return WRAPPER_WITH_OLD_ARGUMENTS if target in table.WRAPPERS_WITH_OLD_ARGUMENTS.values() else WRAPPER

    def _is_guarded(self, expression: cst.BaseExpression) -> bool:
        """Return whether an expression is inside an `if` that is true only for a wrapper."""
        if any(classes and all(map(self._is_wrapper, classes)) for classes in self._tested(expression)):
            return True
        return any(self._wraps_under(condition, expression) for condition in self._conditions(expression))

    def is_never_wrapper(self, expression: cst.BaseExpression) -> bool:
        """Return whether an expression is inside an `if` that is false for every wrapper."""
        return any(not any(map(self._is_wrapper, classes)) for classes in self._tested(expression))

    def _tested(self, expression: cst.BaseExpression) -> Iterator[list[cst.BaseExpression]]:
        """Yield the classes in each `isinstance(expression, ...)` check in the `if` statements around an expression.

        For each `callable(expression)` check, yield an empty list.
        """
        asked = m.Call(
            m.Name("isinstance") | m.Name("callable"), [m.Arg(m.MatchIfTrue(expression.deep_equals)), m.ZeroOrMore()]
        )
        for test in [test for condition in self._conditions(expression) for test in _conjuncts(condition)]:
            if isinstance(test, cst.Call) and m.matches(test, asked):
                yield [argument.value for argument in test.args[1:]]

    def _conditions(self, expression: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """Yield the conditions of all `if` statements that enclose an expression within its function."""
        inner = expression
        for node in self.ancestors(expression, stop=(cst.FunctionDef, cst.Lambda)):
            if isinstance(node, (cst.If, cst.IfExp)) and inner is node.body:
                yield node.test
            inner = node

    def _wraps_under(self, condition: cst.BaseExpression, expression: cst.BaseExpression) -> bool:
        """Return whether `expression` may be a wrapper that is created inside an `if` with the given condition."""
        shown = _bare(condition)
        return shown is not None and any(
            isinstance(value, cst.Call)
            and self.meaning(value.func).roles & {*names.WRAPPERS}
            and any(_bare(other) == shown for other in self._conditions(value))
            for value in self.values(expression)
        )


def _is_in_module(dotted: str) -> bool:
    """Return whether a dotted name such as `re.compile` refers to a function in a module."""
    return dotted.count(".") == 1 or names.canonical(dotted).startswith("tensorflow.")


def optimizer_of(call: cst.Call) -> cst.BaseExpression | None:
    """Return the optimizer argument of a call to `compile`, or None.

    A single positional argument may be a pattern, as in `re.compile(pattern)`. In this case, the result is None.
    """
    return _argument(call, 0, "optimizer") if len(call.args) > 1 or any(a.keyword for a in call.args) else None


def _conjuncts(test: cst.BaseExpression) -> Sequence[cst.BaseExpression]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [*_conjuncts(test.left), *_conjuncts(test.right)]
    return [test]


def _literal(value: cst.BaseExpression | None) -> str:
    if isinstance(value, cst.Name) and value.value in ("True", "False"):
        return value.value
    return "dynamic" if value is not None and text(value) == "dynamic" else "?"


def _bare(condition: cst.BaseExpression) -> str | None:
    """Return the name in a condition such as `name` or `self.name`. Return None for any other condition."""
    return (get_full_name_for_node(condition) or "").removeprefix("self.") or None


def _argument(call: cst.Call, index: int, keyword: str) -> cst.BaseExpression | None:
    for position, argument in enumerate(call.args):
        is_here = position == index and not argument.star
        if argument.keyword.value == keyword if argument.keyword else is_here:
            return argument.value
    return None


def _inner(call: cst.Call, index: int) -> Argument:
    return ("inner_optimizer" if call.args[index].keyword else None), index


def _unchanged(call: cst.Call, target: str) -> Written:
    return Written(target, as_they_are(call))
