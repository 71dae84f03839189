"""Renames `experimental_run_v2`, a method of tf.distribute's strategies, to `run`, which takes the same arguments.

No other class in TensorFlow had a method of this name, so the method is renamed on objects of every type. In a file
that itself defines, assigns or looks up this name, the name is not changed.
"""

from __future__ import annotations

import ast

from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.scopes import string
from tf_lossscale.migrate.codemod.uses import Uses

OLD_RUN = "experimental_run_v2"
_OWN = f"this file defines or looks up {OLD_RUN}, which became run, so it is left unchanged."


def rename_run(source: Uses, edits: Edits) -> None:
    """Plan the edits to one file."""
    uses = [node for node in source.nodes(ast.Attribute) if node.attr == OLD_RUN]
    own = [node for node in source.parents if OLD_RUN in (getattr(node, "name", ""), string(node))]
    own += [node for node in uses if isinstance(node.ctx, ast.Store)]
    for node in own:
        edits.todo(node, _OWN)
    for use in uses if not own else ():
        end = source.span(use)[1]
        # Before Python 3.12, the parser does not know the places in f-strings.
        if source.code(use).endswith(OLD_RUN):
            edits.replace((end - len(OLD_RUN), end), "run")
