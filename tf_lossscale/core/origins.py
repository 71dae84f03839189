"""Finds out by which loss scales the values of a tensor are multiplied, from the graph that computed it.

This is the dimensional analysis of physics, with loss scales as units: the product of a loss and a scale has the degree
1 in this scale, the quotient of two scaled gradients the degree 0, and all terms of a sum must have the same degrees.

Marks tell what a graph does not show. A factor is marked with its unit. The methods of a loss scale mark the tensors
that they take and return as scaled or unscaled, also in eager mode, where nothing else is known about a tensor.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_lossscale.core import graphs


class Unit:
    """A loss scale between two of its steps in one function, where all factors that are read have the same value."""

    def __init__(self, owner: Any, function: Any):
        self._owner = weakref.ref(owner)
        #: The graph of the function, or None in eager mode.
        self.function = function
        #: The tensors that were read, in the function and in its branches and loops.
        self.factors: list[Any] = []
        #: The numbers of operations, at the step that ended the unit, in the graphs that were being built.
        self.end: dict[Any, int] = {}

    @property
    def owner(self) -> Any:
        """The loss scale, or None if it was deleted."""
        return self._owner()


#: The powers to which units multiply a tensor. A power is 0 if the tensor was divided by the unit, and NaN if the
#: tensor is a sum of differently scaled terms or the result of an operation that is neither product nor sum. If the
#: tensor was computed only from constants, variables and a function's arguments, nothing is known: the origin is None.
Origin = dict[Unit, float] | None

_UNIT, _MARK = "_unit_of_tf_lossscale", "_marked_by_tf_lossscale"
_NO_MARK = ((lambda: None), None)
_UNCLEAR = float("nan")

_SUMS = re.compile(
    "Add(N|V2)?|Sub|Pack|Concat(V2)?|Select(V2)?|Merge|DynamicStitch|ParallelDynamicStitch|Complex|MatrixSetDiag(V[23])?|"
    "TensorListPushBack|TensorListSetItem|TensorListConcatLists|TensorScatter(Add|Sub|Update)|(Unsorted)?SegmentSum"
)
_BOUNDS = re.compile("Maximum|Minimum|ClipByValue|TensorScatter(Max|Min)")
_PRODUCTS = re.compile("Mul(NoNan)?|(Batch)?MatMul(V[23])?|Einsum|SquaredDifference")
_QUOTIENTS = re.compile("RealDiv|Div|DivNoNan|Xdivy")
_SOLUTIONS = re.compile("Matrix(Triangular)?Solve")
_POWERS = {"Square": 2.0, "L2Loss": 2.0, "Sqrt": 0.5, "Rsqrt": -0.5, "Reciprocal": -1.0, "Inv": -1.0, "Sign": 0.0}
_POWERS |= {"MatrixInverse": -1.0, "Cholesky": 0.5}
_OTHERS = re.compile(
    "Exp|Expm1|Log|Log1p|Tanh|Sigmoid|LogSoftmax|Softmax|Softplus|Softsign|Selu|Relu6|Sin|Cos|Tan|Asinh?|Acosh?|Atanh?|"
    "Sinh|Cosh|Erfc?|Floor|Ceil|Round|Rint|FloorMod|FloorDiv"
)
_OF_FIRST = re.compile("(Leaky)?ReluGrad")
_PYTHON = re.compile("(Eager)?PyFunc(Stateless)?")


def mark_factor(factor: Any, unit: Unit) -> None:
    """Mark a tensor of a graph as a factor that was read from a loss scale, which may have read it from another one."""
    setattr(factor, _UNIT, unit)
    unit.factors.append(factor)


def mark(tensors: Any, loss_scale: Any, scaled: bool) -> None:
    """Mark the tensors in a structure, also sparse and ragged ones, as multiplied or as divided by a loss scale."""
    for tensor in tf.nest.flatten(tensors):
        if isinstance(tensor, (tf.Tensor, tf.IndexedSlices, tf.RaggedTensor)):
            setattr(tensor, _MARK, (weakref.ref(loss_scale), scaled))
        if isinstance(tensor, tf.IndexedSlices):
            mark(tensor.values, loss_scale, scaled)


def mark_pair(gradients: Any, unscaled: Any, loss_scale: Any) -> None:
    """Mark gradients as multiplied by a loss scale, and the results of their division as divided by it."""
    mark(gradients, loss_scale, True)
    mark(unscaled, loss_scale, False)


def marked_by(tensor: Any) -> tuple[Any, bool | None]:
    """Return the loss scale that a tensor is marked with, and whether it is marked as scaled. Both may be None."""
    reference, scaled = _attribute(tensor, _MARK) or _NO_MARK
    return reference(), scaled


def _attribute(tensor: Any, name: str) -> Any:
    # TensorFlow spends microseconds on the message of an AttributeError, which `getattr` drops.
    return getattr(tensor, "__dict__", {}).get(name)


def origin(tensor: Any) -> Origin:
    """Return the powers to which units multiply a tensor, IndexedSlices or RaggedTensor."""
    return origins([tensor])[0]


def origins(tensors: Iterable[Any]) -> list[Origin]:
    """Return the origin of each tensor in a list, which may contain IndexedSlices and None."""
    walk = _Walk({})
    return [None if tensor is None else walk.of(tensor) for tensor in tensors]


def units_of(found: Origin, loss_scale: Any) -> list[Unit]:
    """Return the units of a loss scale that multiply a tensor, or may do so."""
    return [unit for unit, power in (found or {}).items() if unit.owner is loss_scale and not power <= 0]


class _Walk:
    """A search for origins. `known` maps ids of tensors to origins, and begins with the inputs of a function."""

    def __init__(self, known: dict[int, Origin]):
        self.known = known
        #: The tensors whose ids are known, because an id is used again after a tensor is deleted.
        self.kept: list[Any] = []

    def of(self, tensor: Any) -> Origin:
        """Return the origin of a tensor."""
        if isinstance(tensor, (tf.IndexedSlices, tf.RaggedTensor)):
            values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor.flat_values
            return _with_mark(self.of(values), tensor)
        if not tf.is_symbolic_tensor(tensor):
            return _with_mark(None, tensor)
        path, entered = [tensor], {id(tensor)}
        while path:
            missing = [each for each in _inputs(path[-1]) if id(each) not in self.known and id(each) not in entered]
            if missing:  # A loop of a TF1 graph leads back to a tensor that was entered, about which nothing is known.
                path.extend(missing[:1])
                entered.add(id(missing[0]))
            else:
                self.kept.append(path[-1])
                self.known.setdefault(id(path[-1]), self._from_inputs(path[-1]))
                path.pop()
        return self.known[id(tensor)]

    def _from_inputs(self, tensor: Any) -> Origin:
        unit = _attribute(tensor, _UNIT)
        if unit is not None:
            return {unit: 1.0}
        inputs = _inputs(tensor)
        if not inputs:
            return _with_mark(None, tensor)
        found, bodies = [self.known.get(id(each)) for each in inputs], list(called_bodies(tensor.op))
        if tensor.op.type == "Placeholder":
            result = found[0]
        elif tensor.op.type == "Sub" and inputs[0] is inputs[1]:
            result = None  # tf.clip_by_global_norm adds zero, or NaN if the norm is not finite.
        elif bodies:
            result = self._from_bodies(tensor, bodies)
        elif tensor.op.type == "Pow":
            result = _power(_product(found), _number(inputs[1]))
        elif _BOUNDS.fullmatch(tensor.op.type):
            result = _from_factors(tensor.op.type, [each for i, each in zip(inputs, found) if not _is_zero(i)])
        else:
            is_number = tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant
            result = _from_factors(tensor.op.type, found) if is_number else None
        return _with_mark(result, tensor)

    def _from_bodies(self, tensor: Any, bodies: list[tuple[Any, int]]) -> Origin:
        """Return the origin of a result of a called function, or of a conditional or a loop with several functions."""
        op, results = tensor.op, []
        for body, skipped in bodies:
            inputs = [self.known.get(id(each)) for each in op.inputs[skipped:]]
            inside = _Walk({id(each): known for each, known in zip(body.inputs, inputs)})
            results.append(_outside(inside.of(body.outputs[tensor.value_index]), op, body))
        if op.type in _LOOPS:
            results.append(self.known.get(id(op.inputs[tensor.value_index])))
        return _alike(results)


def _from_factors(kind: str, found: list[Origin]) -> Origin:
    """Return the origin of an operation's results.

    An operation that is not listed is linear in each of its inputs. But if several of them are scaled alike, it may be
    a sum or a product, and nothing is known: a cell of a recurrent network takes the gradients of all of its outputs.
    """
    if _OF_FIRST.fullmatch(kind):
        return found[0]
    if _SUMS.fullmatch(kind):
        return _alike(found)
    if _BOUNDS.fullmatch(kind) and None not in found:
        return _alike(found)
    if _QUOTIENTS.fullmatch(kind):
        return _product([found[0], _power(found[1], -1.0)])
    if _SOLUTIONS.fullmatch(kind):
        return _product([_power(found[0], -1.0), found[1]])
    if _BOUNDS.fullmatch(kind) or _OTHERS.fullmatch(kind):
        return _power(_product(found), _UNCLEAR)
    powers = [{unit: power for unit, power in (each or {}).items() if power} for each in found]
    scaled = [each for each in powers if each]
    are_alike = len(scaled) > 1 and all(each == scaled[0] for each in scaled)
    if (are_alike and not _PRODUCTS.fullmatch(kind)) or (scaled and _PYTHON.fullmatch(kind)):
        return None
    return _power(_product(found), _POWERS.get(kind, 1.0))


def _number(tensor: Any) -> float:
    """Return the value of a constant real scalar. The value of another tensor is unclear."""
    value = tf.get_static_value(tensor) if tensor.dtype.is_floating else None
    return float(value) if value is not None and value.ndim == 0 else _UNCLEAR


def _is_zero(tensor: Any) -> bool:
    """Return whether a tensor is a constant zero, which is zero at every scale."""
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()


#: The attributes that name functions, and the number of inputs of the operation that the functions do not get.
_FUNCTIONS = {"f": 0, "then_branch": 1, "else_branch": 1, "branches": 1, "body": 0, "function": 0}
_LOOPS = ("While", "StatelessWhile")


def called_bodies(op: tf.Operation) -> Iterator[tuple[Any, int]]:
    """Iterate over the graphs of the functions that an operation calls, with the number of inputs that they skip."""
    if op.type.endswith(("Call", "If", "While", "Case", "Launch")):
        for name, skipped in _FUNCTIONS.items():
            for graph in graphs.called_functions(op, name):
                yield graph, skipped


def _outside(found: Origin, op: tf.Operation, body: Any) -> Origin:
    """Replace each unit of a called function by the unit that its caller had at the time of the call."""
    if found is None:
        return None

    def of_caller(unit: Unit) -> Unit:
        return unit.owner._factors.unit_at(unit.owner, op) if unit.function is body else unit

    return _product([{}, *({of_caller(unit): power} for unit, power in found.items() if unit.owner is not None)])


def _inputs(tensor: Any) -> list[Any]:
    """Return the tensors that an operation computes a tensor from. The input of a branch is one outside of it."""
    if not tf.is_symbolic_tensor(tensor) or _attribute(tensor, _UNIT) is not None:
        return []
    return [each for each in graphs.inputs_of(tensor) if each.dtype != tf.resource]


def _with_mark(found: Origin, tensor: Any) -> Origin:
    """Return an origin with what the mark of the tensor adds to it."""
    loss_scale, scaled = marked_by(tensor)
    if loss_scale is None or (scaled and found is not None):
        return found
    result = {loss_scale._factors.unit_here(loss_scale): 1.0 if scaled else 0.0}
    for unit, power in (found or {}).items():
        if unit.owner is not loss_scale:
            result[unit] = power
    return result


def _product(found: Iterable[Origin]) -> Origin:
    """Return the origin of a product. It is unclear if one factor was unscaled and another one is divided by the unit.

    The quotient of a tensor about which nothing is known and a factor has the power -1, and may be unscaled.
    """
    known = [each for each in found if each is not None]
    result: dict[Unit, float] = {}
    for unit, power in (item for each in known for item in each.items()):
        before, after = result.get(unit), result.get(unit, 0.0) + power
        result[unit] = _UNCLEAR if after < 0 and 0.0 in (before, power) else after
    return result if known else None


def _power(found: Origin, exponent: float) -> Origin:
    return None if found is None else {unit: exponent * power if power else 0.0 for unit, power in found.items()}


def _alike(found: Iterable[Origin]) -> Origin:
    """Return the origin of a sum. A term about which nothing is known, such as a constant, is like the others."""
    known = [each for each in found if each is not None]
    factors = [{unit: power for unit, power in each.items() if power} for each in known]
    is_clear = all(each == factors[0] for each in factors)
    units = {unit: power if is_clear else _UNCLEAR for each in factors for unit, power in each.items()}
    return {**{unit: 0.0 for each in known for unit in each}, **units} if known else None
