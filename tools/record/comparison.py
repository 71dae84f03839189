"""Finds the differences between a new recording and the stored recording."""

import math

#: Names of values that may differ by TOLERANCE. All other values must be equal.
WEIGHTS = ("w0", "w1", "w2", "a", "b", "v", "u", "params", "slots_final", "unscaled_grads")
TOLERANCE = 1e-5
#: Error messages contain memory addresses and depend on the Python version, so only the classes of errors are compared.
NOT_COMPARED = ("message",)


def differences(stored, new, chosen):
    """Yield a tuple ("part/case", path in the case, stored value, new value) for each difference.

    Args:
        stored: a recording.
        new: another recording of the same cases.
        chosen: `chosen(part, case)` returns whether a case was recorded again.
    """
    for part in sorted(set(stored) & set(new) - {"file", "made_with"}):
        for case in cases(stored[part]):
            if chosen(part, case):
                old = stored[part] if case is None else stored[part][case]
                now = new[part] if case is None else new[part][case]
                for where, *values in _walk(old, now, "", False):
                    yield (part if case is None else part + "/" + case, where, *values)


def recorded(new):
    """Return a function `chosen(part, case)` that returns whether a recording contains a case."""
    return lambda part, case: part in new and (case is None or case in new[part])


def cases(part):
    """Return the names of a part's cases. A part that is not a dict has a single case, named None."""
    return list(part) if isinstance(part, dict) else [None]


def _walk(stored, new, where, weight):
    if isinstance(stored, dict) and isinstance(new, dict):
        for key in sorted(set(stored) | set(new)):
            if key not in NOT_COMPARED:
                yield from _walk(
                    stored.get(key, "<missing>"),
                    new.get(key, "<missing>"),
                    where + "." + key,
                    weight or key in WEIGHTS,
                )
    elif isinstance(stored, list) and isinstance(new, list) and len(stored) == len(new):
        for i, (old, now) in enumerate(zip(stored, new)):
            yield from _walk(old, now, "{}[{}]".format(where, i), weight)
    elif not _same(stored, new, weight):
        yield where, stored, new


def _same(stored, new, weight):
    if stored == new and type(stored) is type(new):
        return True
    try:
        old, now = float(stored), float(new)
    except (TypeError, ValueError):
        return False
    return old == now or (weight and math.isclose(old, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE))
