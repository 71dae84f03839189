"""Goes through a module first of all, for the calls that have to stay: others depend on which those are."""

from __future__ import annotations

import libcst as cst

from tf_lossscale.migrate import names
from tf_lossscale.migrate.arguments import Unprovable, code
from tf_lossscale.migrate.calls import Calls
from tf_lossscale.migrate.edits import Edits
from tf_lossscale.migrate.resolve import Resolver


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
