"""Matches the variables of a file with the user's variables. A pair is taken only if something proves it."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tf_lossscale.migrate.checkpoints.saved import File, FileError, Optimizer, Tensor

Pair = tuple[Tensor, Any]
_PASS_A_DICT = "Pass a dict {path in the file: model or variable}."


def pairs(file: File, saved: Optimizer, given: Any, match: str, partial: bool) -> tuple[list[Pair], list[str]]:
    """Pair each of the user's variables with a variable in the file. Return the pairs and notes about them."""
    if file.known is not None:
        return file.known, []
    made, notes = (_of_list if isinstance(given, list) else _of_objects)(file, saved, given, match, partial)
    counts = collections.Counter([key for tensor, variable in made for key in (tensor.path, id(variable))])
    twice = [pair for pair in made if max(counts[pair[0].path], counts[id(pair[1])]) > 1]
    if twice:
        raise FileError(f"{file.path}: these pairs contradict each other: {_shown(twice)}. {_PASS_A_DICT}")
    return made, notes


def name_of(variable: Any) -> str:
    """Return a variable's full name, including its name scopes, as it is stored in a checkpoint."""
    return getattr(variable, "path", None) or variable.name.partition(":")[0]


def variables_in(given: Any, trained: bool = False) -> list[Any]:
    """Return the variables, or those to train, of a variable, a model, or a list or dict of these, each one once."""
    if hasattr(given, "assign"):
        return [given] if getattr(given, "trainable", True) or not trained else []
    if isinstance(given, (list, tuple, Mapping)):
        parts: Any = given.values() if isinstance(given, Mapping) else given
    else:
        # Keras's `variables` also contain the states of random number generators.
        prefix = "trainable_" if trained else ""
        parts = getattr(given, f"{prefix}weights", getattr(given, f"{prefix}variables", None))
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                "`variables` must be a model, a list of variables, or a dict of models and variables, but it is or "
                f"contains: {given!r}. Pass the model or its variables, such as model.variables, and not their values."
            )
    return list({id(each): each for part in parts for each in variables_in(part, trained)}.values())


def _of_objects(file: File, saved: Optimizer, given: Any, match: str, partial: bool) -> tuple[list[Pair], list[str]]:
    """Match models by their paths in the file's object graph, or by the names of their variables."""
    named: Mapping[Any, Any] = given if isinstance(given, Mapping) else {None: given}
    of_names = [(_named(file, name, each, partial), each) for name, each in named.items() if hasattr(each, "assign")]
    made = [(tensor, variable) for tensor, variable in of_names if tensor is not None]
    models = {name: each for name, each in named.items() if not hasattr(each, "assign")}
    if file.graph is None and models:
        # These files do not contain the names that a checkpoint's keywords give to models.
        models = {None: [*models.values()]}
    # An optimizer knows only the variables that it trained.
    is_live = file.kind == "live optimizer"
    notes: list[str] = []
    there: list[Tensor] = []
    for name, model in models.items():
        tensors, found = _in_graph(file, name, model)
        tensors = _without(tensors, made)
        found, of_found = _or_by_names(tensors, found, variables_in(model, is_live), partial)
        made, there, notes = made + found, there + tensors, notes + of_found
    variables = variables_in(given, is_live)
    by_position = _by_position(saved, variables_in(given, trained=True), made, there)
    if by_position:
        made = made + by_position
        notes.append(f"These were matched by their positions in the optimizer: {_shown(by_position)}.")
    missing, left = _missing(variables, made), _without(there, made)
    if not missing and not left:
        return made, notes
    if match == "order" and not partial:
        return _in_order(file, saved, variables)
    differ = f"Not in the file: {_listed(missing)}. Not in the given objects: {_listed(left)}."
    if not partial or not made:
        remedy = "" if partial else "To restore the others, pass partial=True. "
        raise FileError(
            f"{file.path}: the given objects differ from the file. {differ} {remedy}If only names or the structure "
            f'differ, pass match="order" if the order is the same, or a dict {{path in the file: model or variable}}.'
        )
    return made, [*notes, f"A part was restored: {_shown(made)}. {differ}"]


def _or_by_names(
    tensors: list[Tensor], found: list[Pair], variables: list[Any], partial: bool
) -> tuple[list[Pair], list[str]]:
    """Add pairs by names to the pairs of the object graph, if the names pair all other variables."""
    found = [(tensor, variable) for tensor, variable in found if tensor.shape == tuple(variable.shape)]
    tensors, variables = _without(tensors, found), _missing(variables, found)
    names, others = [each.name for each in tensors], [*map(name_of, variables)]
    ranked = _by_names(_ranked(names), tensors, _ranked(others), variables)
    if len(ranked) == len(tensors) == len(variables):
        return found + ranked, _numbered(tensors, ranked)
    return found or (_by_names(names, tensors, others, variables) if partial else []), []


def _in_graph(file: File, name: str | None, model: Any) -> tuple[list[Tensor], list[Pair]]:
    """Return the file's variables at the place of a model, and the pairs that the object graph tells."""
    graph = file.graph
    if graph is None:
        return [each for each in file.variables if each.is_weight], []
    if name is not None and name not in graph.places:
        names = ", ".join(repr(each) for each in graph.places if each and "/" not in each)
        raise FileError(
            f"{file.path}: the file has no object {name!r}, only: {names}. Pass a dict with one of these names, or the "
            "model alone."
        )
    # An object may have several names; the root is also called "root".
    of_root = {graph.places[each]: each for each in graph.places if "/" not in each}
    places = [*of_root.values()] if name is None else [name]
    found = {place: graph.match(graph.places[place], model) for place in places}
    fitting = [place for place in places if found[place]] if name is None else places
    if len(fitting) > 1:
        raise FileError(
            f"{file.path}: the model may be any of these objects in the file: {', '.join(map(repr, fitting))}. Pass a "
            "dict, such as {" + repr(fitting[-1]) + ": model}."
        )
    if not fitting:
        return [each for each in file.variables if each.is_weight], []
    (place,) = fitting
    tensors = [each for each in graph.under(graph.places[place]) if each.is_weight]
    contrary = [pair for pair in found[place] if _has_name_of_another(pair, tensors)]
    if contrary:
        raise FileError(
            f"{file.path}: the paths in the file give the pairs {_shown(contrary)}, but the names say that they are "
            f"exchanged. {_PASS_A_DICT}"
        )
    return tensors, found[place]


def _has_name_of_another(pair: Pair, tensors: list[Tensor]) -> bool:
    tensor, name = pair[0], _unnumbered(name_of(pair[1]))
    others = [each for each in tensors if each.shape == tensor.shape and _same(_unnumbered(each.name), name)]
    return bool(others) and not _same(_unnumbered(tensor.name), name)


def _by_position(saved: Optimizer, trained: list[Any], made: list[Pair], there: list[Tensor]) -> list[Pair]:
    """Pair variables by their positions in a Keras 3 optimizer, whose other variables are where the new ones are.

    Keras 3's object graphs do not contain the layers that a model has in a list or dict.
    """
    of = {id(variable): tensor for tensor, variable in made}
    in_graph = {tensor.path for tensor in (*there, *of.values())}
    both = list(zip(saved.trained, trained))
    fits = _shapes(saved.trained) == _shapes(trained) and all(
        of.get(id(each), tensor) == tensor for tensor, each in both
    )
    found = [pair for pair in both if id(pair[1]) not in of]
    return found if fits and not any(tensor.path in in_graph for tensor, _ in found) else []


def _of_list(file: File, saved: Optimizer, given: list[Any], match: str, partial: bool) -> tuple[list[Pair], list[str]]:
    """Match a list by names, if each name is unique on both sides, or by shapes, if all of them differ."""
    if match == "order":
        return _in_order(file, saved, given)
    weights = [each for each in file.variables if each.is_weight]
    made = _by_names([each.name for each in file.variables], file.variables, [*map(name_of, given)], given)
    trained = {slot.owner for slots in saved.slots.values() for slot in slots} | {*saved.trained}
    matched = {tensor for tensor, _ in made}
    order = next((each for each in (file.variables, weights) if _shapes(each) == _shapes(given)), [])
    if len(made) == len(given):
        if trained & matched or not {*_shapes(trained - {None})} & {*_shapes(matched)}:
            return made, _numbered(weights, made)
        why = f"The saved optimizer did not train these, which have the names of yours: {_shown(made)}."
    elif len({*_shapes(given)}) == len(given) and sorted(_shapes(weights)) == sorted(_shapes(given)):
        of = {tensor.shape: tensor for tensor in weights}
        made = [(of[tuple(each.shape)], each) for each in given]
        return made, [f"The names differ, so these were matched by their shapes: {_shown(made)}."]
    else:
        why = f"The file has: {_listed(file.variables)}. `variables` has: {_listed(given)}."
        if order and file.order_is_known:
            why += f' If these pairs are right, pass match="order": {_shown(zip(order, given))}.'
    raise FileError(
        f"{file.path}: nothing proves which of `variables` is which variable of the file. {why} Pass the model in "
        "place of its variables, or a dict {name in the file: variable}."
    )


def _in_order(file: File, saved: Optimizer, variables: list[Any]) -> tuple[list[Pair], list[str]]:
    """Match variables by their order: that of the optimizer, or else that of the file."""
    weights = [each for each in file.variables if each.is_weight]
    orders = [saved.trained, *((file.variables, weights) if file.order_is_known else ())]
    made = next((list(zip(each, variables)) for each in orders if _shapes(each) == _shapes(variables)), None)
    if made is None:
        why = "have other shapes, or are in another order" if file.order_is_known else "have no order"
        raise FileError(
            f'{file.path}: match="order" is impossible, because the variables in the file {why}. The file has: '
            f"{_listed(file.variables)}. `variables` has: {_listed(variables)}. {_PASS_A_DICT}"
        )
    return made, [f"These were matched by order, as asked: {_shown(made)}."]


def _named(file: File, name: str, variable: Any, partial: bool) -> Tensor | None:
    named = [tensor for tensor in file.variables if name == tensor.path]
    named = named or [tensor for tensor in file.variables if name == tensor.name]
    if len(named) > 1:
        paths = ", ".join(tensor.path for tensor in named)
        raise FileError(f"{file.path}: the file has several variables {name!r}. Pass one of their paths: {paths}.")
    if not named and partial:
        return None
    if not named:
        raise FileError(
            f"{file.path}: the file has no variable {name!r}, only: {_listed(file.variables)}. To restore the others, "
            "pass partial=True."
        )
    if named[0].shape != tuple(variable.shape):
        raise FileError(
            f"{file.path}: the variable {name!r} has shape {named[0].shape}, but yours has {tuple(variable.shape)}. "
            "Pass a variable of this shape, or leave it out."
        )
    return named[0]


def _by_names(names: list[str], tensors: list[Tensor], others: list[str], variables: list[Any]) -> list[Pair]:
    """Pair the variables whose names exactly one variable in the file and one of the user's have, and one shape."""
    found = []
    for other, variable in zip(others, variables):
        same = [each for each, name in zip(tensors, names) if other in (name, each.path)]
        same = same or [each for each, name in zip(tensors, names) if _same(name, other)]
        if len(same) == 1 and same[0].shape == tuple(variable.shape):
            found.append((same[0], variable))
    counts = collections.Counter(tensor.path for tensor, _ in found)
    return [pair for pair in found if counts[pair[0].path] == 1]


def _same(name: str, other: str) -> bool:
    # In Keras 3, variable names begin with the name of the model. Either name may lack this prefix.
    return f"/{name}".endswith(f"/{other}") or f"/{other}".endswith(f"/{name}")


def _unnumbered(name: str) -> str:
    """Return a name without the numbers by which Keras tells layers of one class apart."""
    return re.sub(r"_\d+(?=/|$)", "", name)


def _ranked(names: Iterable[str]) -> list[str]:
    """Replace the numbers that Keras counts in a program by their ranks among the names: the first, the second..."""
    split = [[re.fullmatch(r"(.*?)(?:_(\d+))?", part) for part in name.split("/")] for name in names]
    parts = [[(match[1], int(match[2] or 0)) for match in each if match] for each in split]
    ranks: dict[str, list[int]] = {}
    for base, number in sorted({part for each in parts for part in each}):
        ranks.setdefault(base, []).append(number)
    return ["/".join(f"{base}_{ranks[base].index(number)}" for base, number in each) for each in parts]


def _numbered(tensors: list[Tensor], made: list[Pair]) -> list[str]:
    """Return a note about the pairs that only a number in an automatic name tells apart from others in the file."""
    alike: dict[Any, list[Tensor]] = collections.defaultdict(list)
    for tensor in tensors:
        alike[tensor.shape].append(tensor)

    def is_told(tensor: Tensor) -> bool:
        others = (each for each in alike[tensor.shape] if each.path != tensor.path)
        return any(_same(_unnumbered(each.name), _unnumbered(tensor.name)) for each in others)

    told = [pair for pair in made if is_told(pair[0])]
    return [f"Only the numbers in their names tell these from others in the file: {_shown(told)}."] if told else []


def _without(tensors: Iterable[Tensor], made: list[Pair]) -> list[Tensor]:
    matched = {tensor.path for tensor, _ in made}
    return [tensor for tensor in tensors if tensor.path not in matched]


def _missing(variables: list[Any], made: list[Pair]) -> list[Any]:
    matched = {id(variable) for _, variable in made}
    return [variable for variable in variables if id(variable) not in matched]


def _shapes(variables: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in variables]


def _shown(made: Iterable[Pair]) -> str:
    return ", ".join(f"{tensor.path} -> {name_of(variable)}" for tensor, variable in made)


def _listed(variables: list[Any]) -> str:
    shown = ", ".join(f"{getattr(each, 'path', None) or name_of(each)} {tuple(each.shape)}" for each in variables[:12])
    return f"{shown}, and {len(variables) - 12} more" if len(variables) > 12 else shown or "none"
