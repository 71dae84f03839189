"""Decides what becomes of `Policy(name, loss_scale=...)`: a policy, and a wrapper around what `compile` is given."""

from __future__ import annotations

import contextlib

import libcst as cst

from tf_lossscale.migrate.codemod import calls as kinds
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import (
    SIGNATURES,
    Argument,
    Unprovable,
    Written,
    bind,
    code,
    rewritten,
    text,
)
from tf_lossscale.migrate.codemod.calls import Calls
from tf_lossscale.migrate.codemod.edits import Edits, Now
from tf_lossscale.migrate.codemod.resolve import Resolver

_GONE = "policies have no loss_scale any more"
_WRAP = f"{_GONE}: give compile() the optimizer in a tf_lossscale.LossScaleOptimizer"


class PolicyPlanner(cst.CSTVisitor):
    """Fills the edits of one module with those of policies.

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
        self._policies: list[tuple[cst.Call, int]] = []  # with the index of loss_scale
        self._compiled: list[tuple[cst.Call, cst.BaseExpression]] = []  # with the optimizer
        self._wraps = False
        self._reads: list[cst.Attribute] = []
        self._consumed: set[cst.CSTNode] = set()  # of these the value is in a wrapper's arguments already

    def visit_Call(self, node: cst.Call) -> None:
        meaning = self._resolver.meaning(node.func)
        if meaning.old and meaning.roles <= {names.POLICY}:
            bound = bind(node.args, SIGNATURES[names.POLICY])
            if bound and "loss_scale" in bound:
                self._policies.append((node, bound["loss_scale"]))
        elif meaning.roles & set(names.WRAPPERS):
            self._wraps = True
            with contextlib.suppress(Unprovable):
                self._consumed.update(self._calls.written(node, meaning).consumed)
        elif isinstance(node.func, cst.Attribute) and node.func.attr.value == "compile":
            for index, argument in enumerate(node.args):
                is_first = index == 0 and argument.keyword is None and len(node.args) > 1
                if is_first or (argument.keyword and argument.keyword.value == "optimizer"):
                    self._compiled.append((node, argument.value))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node.attr.value == "loss_scale" and self._calls.kinds(node.value) == {kinds.POLICY}:
            self._reads.append(node)

    def leave_Module(self, original_node: cst.Module) -> None:
        left = [read for read in self._reads if read not in self._consumed]
        for read in left:
            self._edits.todo(read, f"{_GONE}; give the scale to LossScaleOptimizer.")
        for policy, index in self._policies:
            try:
                if left:
                    raise Unprovable(f"{_GONE}, and this one is read elsewhere")
                self._settle(policy, policy.args[index].value)
            except Unprovable as refusal:
                self._edits.refuse(policy, f"{refusal}.")
                continue
            kept = [(a.keyword.value if a.keyword else None, i) for i, a in enumerate(policy.args) if i != index]
            written = Written("", kept)
            self._rewrite(policy, written)

    def _settle(self, policy: cst.Call, scale: cst.BaseExpression) -> None:
        """Does elsewhere what the policy's loss_scale did, or raises Unprovable."""
        if len(self._policies) > 1 and len({code(p.args[i].value) for p, i in self._policies}) > 1:
            raise Unprovable(f"{_WRAP} (there are several policies in this file)")
        if text(scale) == "auto":
            return  # compile() wraps by itself
        if isinstance(scale, cst.Name) and scale.value == "None":
            self._never_wrap(policy)
            return
        converted = self._calls.scale(scale)
        if not self._compiled and self._wraps and converted is not None:
            self._edits.notice(policy, "the wrapper in this file decides; a compile() in another one needs its own.")
            return
        if not self._compiled:
            if text(scale) == "dynamic" and text(policy.args[0].value) == "mixed_float16":
                self._edits.notice(policy, "compile() wraps by itself: in Keras's class, unless given ours.")
                return
            raise Unprovable(_WRAP)
        if converted is None:
            raise Unprovable(f"{_GONE}: give compile() tf_lossscale.legacy.from_loss_scale(optimizer, {code(scale)})")
        if policy is self._policies[0][0]:
            self._wrap_compiled(*converted)

    def _wrap_compiled(self, arguments: list[Argument], consumed: list[cst.CSTNode]) -> None:
        wanted = []
        for _, optimizer in self._compiled:
            found = self._calls.kinds(optimizer)
            if found == {kinds.WRAPPER}:
                continue
            if found != {kinds.KERAS_OPTIMIZER}:
                raise Unprovable(f"{_WRAP} (here it cannot be seen whether it is in one already)")
            wanted.append(optimizer)
        shown = [code(optimizer) for optimizer in wanted if isinstance(optimizer, (cst.Name, cst.Attribute))]
        if len(shown) != len(set(shown)):
            raise Unprovable(f"{_WRAP} (one optimizer is compiled into several models)")
        self._edits.gone.update(consumed)
        for optimizer in wanted:
            inner = cst.Call(cst.parse_expression(names.WRAPPER), [cst.Arg(optimizer)])
            written = Written(names.WRAPPER, [(None, 0), *arguments])

            def make(updated: cst.CSTNode, now: Now, written: Written = written) -> cst.CSTNode:
                call = cst.Call(cst.parse_expression(names.WRAPPER), [cst.Arg(updated)])
                return rewritten(call, written, None, now)

            self._edits.replace(optimizer, make, code(rewritten(inner, written, None, lambda old: old)))

    def _never_wrap(self, policy: cst.Call) -> None:
        """`loss_scale=None` said: do not wrap."""
        if any(d.startswith("tf_keras") for d in self._resolver.dotted(policy.func)) or not self._compiled:
            raise Unprovable(
                f"{_GONE}: None said that compile() must not wrap; say compile(..., auto_scale_loss=False)"
            )
        for call in dict.fromkeys(call for call, _ in self._compiled):
            if any(a.star or (a.keyword and a.keyword.value == "auto_scale_loss") for a in call.args):
                continue
            kept: list[Argument] = [(a.keyword.value if a.keyword else None, i) for i, a in enumerate(call.args)]
            written = Written("", [*kept, ("auto_scale_loss", "False")])
            self._rewrite(call, written)

    def _rewrite(self, call: cst.Call, written: Written) -> None:
        self._edits.replace(
            call,
            lambda updated, now: rewritten(updated, written, None, now),
            code(rewritten(call, written, None, lambda old: old)),
        )


class RefusalPlanner(cst.CSTVisitor):
    """Fills the edits of one module with the calls that cannot be proven equal to anything new.

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

    def visit_Call(self, node: cst.Call) -> None:
        meaning = self._resolver.meaning(node.func)
        if not meaning.roles & {*names.WRAPPERS, names.GRAPH_REWRITE}:
            return
        try:
            written = self._calls.written(node, meaning)
        except Unprovable as refusal:
            self._edits.refuse(node, f"{refusal}.")
            return
        same_arguments = [(a.keyword.value if a.keyword else None, i) for i, a in enumerate(node.args)]
        if not meaning.sure and (list(written.arguments) != same_arguments or isinstance(node.func, cst.Attribute)):
            self._edits.refuse(node, f"{code(node.func)} may be something else here as well.")
