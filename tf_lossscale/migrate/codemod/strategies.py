"""Renames `experimental_run_v2`, a method of tf.distribute's strategies, to `run`, which takes the same arguments.

No other class in TensorFlow had a method of this name, so the method is renamed on objects of every type. In a file
that itself defines or assigns this name, the name is not changed.
"""

from __future__ import annotations

import ast

from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.scopes import string
from tf_lossscale.migrate.codemod.uses import Uses

OLD_RUN = "experimental_run_v2"
_STRING = f"strings are not changed. tf.distribute has no {OLD_RUN} any more: write run."
_OWN = f"this file defines {OLD_RUN} and keeps it. Calls in other files become run. Rename it in this file, too."


def rename_run(source: Uses, edits: Edits) -> None:
    """Plan the edits to one file."""
    uses = [node for node in source.nodes(ast.Attribute) if node.attr == OLD_RUN]
    own = [node for node in source.parents if OLD_RUN in (getattr(node, "name", ""), getattr(node, "id", ""))]
    own += [node for node in uses if isinstance(node.ctx, ast.Store)]
    for node in own:
        # A strategy that gets the old method has both methods.
        is_needed = source.around.wraps is not None and not isinstance(node, ast.Attribute)
        (edits.todo if is_needed else edits.notice)(node, _OWN)
    for constant in source.nodes(ast.Constant):
        if string(constant) == OLD_RUN:
            edits.notice(constant, _STRING)
    for use in uses if not own else ():
        end, outer = source.span(use)[1], source.parents[use]
        # `strategy.run = strategy.experimental_run_v2` is a fallback for TensorFlow versions without `run`.
        is_fallback = isinstance(outer, ast.Assign) and getattr(outer.targets[0], "attr", "") == "run"
        # Before Python 3.12, the parser does not know the places in f-strings.
        if source.code(use).endswith(OLD_RUN) and not is_fallback:
            edits.replace((end - len(OLD_RUN), end), "run")
            edits.rewritten(use)
