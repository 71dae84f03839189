"""Reports modules that a program keeps in objects, and the old names that it reads in such objects.

The rules follow imports and aliases, but no module in an attribute, a collection, an argument or a result.
"""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names, wrappers
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.rules import NOT_FOLLOWED
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, leads_to_old
from tf_lossscale.migrate.codemod.uses import Uses

# The customary names of the libraries.
_CUSTOMARY = ("tf", "tensorflow", "keras", "tf_keras")
#: The beginning of the findings about old names in objects that may be modules.
START = "this file does not show where "
_NO_ORIGIN = START + "{0} comes from. If it comes from TensorFlow or Keras, {1} {2}. Write {3}."
# The ends by which an old name is recognized in an object, and the name that each end most likely stands for.
_ENDS: dict[str, str] = {}
for _name, _row in table.OLD.items():
    for _end in (".".join(_name.split(".")[i:]) for i in range(1, _name.count(".") + 1)):
        _is_kept = _row.role == table.OURS or (_row.role == table.POLICY and "experimental" not in _name)
        if re.search(r"LossScale|mixed_precision|^experimental\.", _end) and not _is_kept:
            _ENDS.setdefault(_end, _name)
_SHORT = {end.rpartition(".")[2] for end in _ENDS}


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    for node in source.parents:
        owner, member = source.read(node)
        path = [*names.WORD.findall(source.code(owner)), member] if member in _SHORT else []
        end = next((end for i in range(len(path)) if (end := ".".join(path[i:])) in _ENDS), None)
        if end and _is_open(source, node, end):
            row = table.OLD[_ENDS[end]]
            change = "is now another class" if row.role == table.STABLE else "no longer exists"
            start = path[0] if path[0] in _CUSTOMARY else source.code(owner)
            new = table.WRAPPERS_WITH_OLD_ARGUMENTS.get(row.role, row.new)
            edits.todo(node, " ".join(_NO_ORIGIN.format(start, source.code(node), change, new).split()))
    for kept in source.parents if source.project.reads_modules else ():
        parent, alias = source.parents[kept], source.aliases.get(kept)
        is_read = isinstance(parent, (ast.Attribute, ast.Expr)) or source.looked_up(kept, ["module"])
        is_module = bool({"tensorflow", "keras"} & set(map(names.canonical, source.dotted(kept))))
        is_loaded = isinstance(getattr(kept, "ctx", None), ast.Load)
        if is_module and is_loaded and not is_read and (not alias or isinstance(alias[0], ast.ClassDef)):
            edits.todo(kept, NOT_FOLLOWED)


def _is_open(source: Uses, node: ast.AST, end: str) -> bool:
    """Return whether an expression may be the old name that ends in the same way, and the rules do not handle it."""
    dotted, root, modules = source.dotted(node), source.root(source.read(node)[0]), source.project.modules
    call = source.parents[node]
    if root and any(map(leads_to_old, source.dotted(root))):
        return False
    if isinstance(call, ast.Call) and call.func is node and table.OLD[_ENDS[end]].role == table.STABLE:
        # A module whose class has other arguments is replaced where it is kept.
        new = wrappers.form_of_call(source, call, {table.STABLE})
        if new != wrappers.Form(table.WRAPPER) and not end.startswith("keras."):
            return False
    # A class that a module of the project defines or imports, or Keras 3's class.
    owners = {each.split(".")[-2] for each in dotted if "." in each}
    if end in _SHORT and not owners.isdisjoint({"optimizers", *modules}):
        return False
    is_customary = root is not None and root.id in _CUSTOMARY
    return is_customary or not {each.partition(".")[0] for each in dotted}.isdisjoint({UNKNOWN, "", *modules})
