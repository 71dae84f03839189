"""Plans edits for dtype policies with a loss scale. Keras's current policies have no loss scale.

The `loss_scale` arguments are removed if all policies in the file have their default loss scale. They are also removed
if all of them are None and the file calls `compile`; `auto_scale_loss=False` is then added to each of these calls. In
all other cases, and in a file that reads a policy's loss scale, the policies are created with
`tf_lossscale.legacy.experimental.Policy`, which still has a loss scale.
"""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst
from libcst.helpers import get_full_name_for_node

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import calls as kinds
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import SIGNATURES, Unprovable, Written, as_they_are, bind, code, text
from tf_lossscale.migrate.codemod.bindings import UNKNOWN
from tf_lossscale.migrate.codemod.calls import Calls
from tf_lossscale.migrate.codemod.edits import Edits, Visitor

_WRAPS = (
    "compile() under mixed_float16 wraps a bare optimizer in Keras's own class. For this package's class give "
    "compile() a tf_lossscale.LossScaleOptimizer, or call tf_lossscale.install()."
)
# Attributes that Keras's current dtype policies do not have.
_OF_OLD_POLICIES = ("loss_scale", "should_cast_variables")
_NOT_IN_KERAS = (
    "if {0} is a dtype policy, it has no {1} in today's Keras. Make it with tf_lossscale.legacy.experimental.Policy, "
    "or take it from tf_lossscale.legacy.experimental.global_policy() or get_layer_policy(layer)."
)
_INFER = (
    "Keras has no policy {} any more. Write 'mixed_float16' if the inputs of the layers are float16, and 'float32' "
    "otherwise."
)
_DOES_NOT_READ = (
    "compile() does not read the loss_scale of a policy. Give compile() a tf_lossscale.LossScaleOptimizer with this "
    "scale, or call tf_lossscale.install()."
)


class _Policy(NamedTuple):
    """A call that creates a dtype policy with a loss scale. The name is None if it is not a string literal."""

    call: cst.Call
    name: str | None
    place: int
    scale: cst.BaseExpression

    @property
    def has_scale(self) -> bool:
        """Whether the loss scale is not None."""
        return code(self.scale) != "None"

    @property
    def is_default(self) -> bool:
        """Whether the loss scale is the default of a policy with this name."""
        if self.name == "mixed_float16":
            return text(self.scale) in ("auto", "dynamic")
        return text(self.scale) == "auto" or (self.name is not None and not self.has_scale)


class PolicyPlanner(Visitor):
    """Plans the edits to the dtype policies in one module."""

    def __init__(self, module: Calls, edits: Edits):
        super().__init__(module, edits)
        self._policies: list[_Policy] = []
        self._wraps = False
        self._reads: list[cst.Attribute] = []
        # Expressions that read the `should_cast_variables` attribute of a policy.
        self._casts: list[cst.Attribute] = []

    def visit_Call(self, node: cst.Call) -> None:
        meaning = self._module.meaning(node.func)
        if meaning.roles & {table.POLICY, table.KERAS_FUNCTION}:
            self._inferred(node)
        if meaning.old and meaning.roles <= {table.POLICY}:
            bound = bind(node.args, SIGNATURES[table.POLICY])
            if bound and len(bound) == len(SIGNATURES[table.POLICY]):
                name, place = text(node.args[bound["name"]].value), bound["loss_scale"]
                self._policies.append(_Policy(node, name, place, node.args[place].value))
        elif meaning.roles & set(names.WRAPPERS):
            self._wraps = True

    def _inferred(self, node: cst.Call) -> None:
        """Replace policy names that told old versions of TensorFlow to infer the dtype.

        The name None and TensorFlow 2.0's name "infer" are replaced with "float32". "infer_float32_vars" is only
        reported, because its dtype depends on the data.
        """
        first = node.args[0].value if node.args else cst.Name("float32")
        if code(first) == "None" or text(first) == "infer":
            quote = first.quote if isinstance(first, cst.SimpleString) else '"'
            self._edits.replace_name(first, f"{quote}float32{quote}")
        elif text(first) in ("infer_float32_vars", "infer_with_float32_vars"):
            self._edits.todo(node, _INFER.format(code(first)))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node.attr.value not in _OF_OLD_POLICIES or not self._module.is_read(node):
            return
        object_kinds = self._module.kinds(node.value)
        if object_kinds == {kinds.POLICY}:
            (self._reads if node.attr.value == "loss_scale" else self._casts).append(node)
        elif object_kinds == {UNKNOWN} and self._may_be_policy(node.value):
            self._edits.todo(node, _NOT_IN_KERAS.format(code(node.value), node.attr.value))

    def finish(self) -> None:
        if self._reads or not all(policy.is_default for policy in self._policies):
            if self._module.compiled and not self._reads and not any(policy.has_scale for policy in self._policies):
                self._never_wrap()
            else:
                self._edits.legacy_policies = True
        self._read_from_old_policies()
        for call, _, place, _ in self._policies if not self._edits.legacy_policies else ():
            kept = [(keyword, index) for keyword, index in as_they_are(call) if index != place]
            self._edits.rewrite_call(call, Written("", kept))
        for policy in self._policies:
            is_suspect = self._module.compiled or not self._wraps or self._is_argument(policy.scale)
            why = self._module.why_compiled(self._module.compiled) if is_suspect else None
            if why and policy.name in (None, "mixed_float16") and policy.has_scale:
                self._edits.notice(policy.call, f"{_WRAPS if policy.is_default else _DOES_NOT_READ} {why}")

    def _may_be_policy(self, expression: cst.BaseExpression) -> bool:
        """Return whether the name of an object of unknown type suggests that it is a dtype policy."""
        name = (get_full_name_for_node(expression) or "").rsplit(".", 1)[-1].lower()
        is_named = name == "policy" and self._module.uses_an_old_name
        return is_named or name.endswith(("dtype_policy", "precision_policy"))

    def _is_argument(self, scale: cst.BaseExpression) -> bool:
        """Return whether a loss scale is a parameter of a function.

        Another file may then call this function to create a policy, and call `compile` as well.
        """
        reaching = self._module.reaching(scale) if isinstance(scale, cst.Name) else []
        return any(isinstance(getattr(assignment, "node", None), cst.Param) for assignment in reaching)

    def _read_from_old_policies(self) -> None:
        for read in (*self._reads, *self._casts):
            for policy in (read.value, *self._module.values(read.value)):
                if isinstance(policy, cst.Call) and f"{names.POLICIES}.global_policy" not in self._module.dotted(
                    policy.func
                ):
                    short = "global_policy" if self._module.is_global_policy(policy) else "Policy"
                    self._edits.replace_name(policy.func, f"{names.POLICIES}.{short}")

    def _never_wrap(self) -> None:
        """Add `auto_scale_loss=False`, the counterpart of the old `loss_scale=None`, to all calls to `compile`."""
        for call in self._module.compiled:
            if not any(a.star or (a.keyword and a.keyword.value == "auto_scale_loss") for a in call.args):
                self._edits.rewrite_call(call, Written("", [*as_they_are(call), ("auto_scale_loss", "False")]))


class RefusalPlanner(Visitor):
    """Plans TODO comments for calls that have no provably equivalent new form."""

    def visit_Call(self, node: cst.Call) -> None:
        self._named_by_string(node)
        meaning = self._module.meaning(node.func)
        if not meaning.roles & {*names.WRAPPERS}:
            return
        try:
            written = self._module.written(node, meaning)
        except Unprovable as refusal:
            self._edits.refuse(node, f"{refusal}.")
            return
        if not meaning.sure and (list(written.arguments) != as_they_are(node) or isinstance(node.func, cst.Attribute)):
            self._edits.refuse(node, f"{code(node.func)} may also be something other than TensorFlow's class.")

    def _named_by_string(self, node: cst.Call) -> None:
        """Report `setattr(module, "old name", ...)` and `mock.patch.object(module, "old name")`."""
        if len(node.args) < 2 or any(self._module.is_builtin(node.func, name) for name in ("getattr", "hasattr")):
            return
        module, name = node.args[0].value, text(node.args[1].value)
        if name and self._module.is_shim(node, name):
            return
        full = {names.canonical(f"{dotted}.{name}") for dotted in self._module.dotted(module)}
        new = {
            table.WRAPPERS_WITH_OLD_ARGUMENTS.get(old.role, old.new)
            for d in full
            if (old := table.OLD.get(d)) and old.new != d
        }
        if new:
            self._edits.refuse(node, f"the string names {name}. Its replacement is {' or '.join(sorted(new))}.", module)
