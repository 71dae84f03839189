"""Plans the edits that rename a strategy's `experimental_run_v2` to `run`, which takes the same arguments.

No other class in TensorFlow had a method of this name, so the method is renamed on objects of every type. In a file
that itself defines or assigns this name, the name is not changed.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import text
from tf_lossscale.migrate.codemod.calls import Calls
from tf_lossscale.migrate.codemod.edits import Edits, Visitor

# Matches `strategy.run = strategy.experimental_run_v2`, a fallback for TensorFlow versions without `run`.
_SHIM = m.Assign([m.AssignTarget(m.Attribute(attr=m.Name("run")))])
_GONE = f"tf.distribute has no {names.OLD_RUN} any more: write run."
_OWN = f"this file defines {names.OLD_RUN} and keeps it. Calls in other files become run. Rename it in this file, too."


class StrategyPlanner(Visitor):
    """Plans the edits to the code in one module that uses tf.distribute strategies."""

    def __init__(self, module: Calls, edits: Edits):
        super().__init__(module, edits)
        self._uses: list[cst.Attribute] = []
        self._own: list[cst.CSTNode] = []

    def visit_Name(self, node: cst.Name) -> None:
        outer = self._module.parents[node]
        if node.value != names.OLD_RUN or m.matches(self._module.parents.get(outer, outer), _SHIM):
            return
        if isinstance(outer, cst.Attribute) and self._module.is_read(outer):
            self._uses.append(outer)
        else:
            self._own.append(node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if text(node) == names.OLD_RUN:
            self._edits.notice(node, f"strings are not changed. {_GONE}")

    def finish(self) -> None:
        for node in self._own:
            self._edits.notice(node, _OWN)
        for use in self._uses if not self._own else ():
            self._edits.rename_attribute(use, "run")
