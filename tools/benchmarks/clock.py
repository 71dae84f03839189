"""Interleaved timing: each round calls every function once, so that all functions are timed under the same load."""

import dataclasses
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass
class Times:
    """How long each call to one function took, in seconds."""

    wall: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)


def in_turns(
    functions: dict[str, Callable[[], object]], seconds: float, least: int = 7, most: int = 200, first: int = 2
) -> dict[str, Times]:
    """Call the functions in rounds, and return how long each call took.

    Args:
        functions: a dictionary that maps names to functions. A round calls each function once; the order rotates from
            round to round.
        seconds: time limit. No further round starts after this time, except to reach `least` rounds.
        least: minimum number of rounds.
        most: maximum number of rounds.
        first: the number of untimed calls to each function before the first round.
    """
    names = list(functions)
    for function in functions.values():
        for _ in range(first):
            function()
    times = {name: Times() for name in names}
    start, done = time.perf_counter(), 0
    while done < least or (done < most and time.perf_counter() - start < seconds):
        for i in range(len(names)):
            name = names[(done + i) % len(names)]
            wall, processor = time.perf_counter(), time.process_time()
            functions[name]()
            times[name].processor.append(time.process_time() - processor)
            times[name].wall.append(time.perf_counter() - wall)
        done += 1
    return times


def ratios(times: dict[str, Times], to: str) -> dict[str, dict[str, float]]:
    """Return each function's time divided by the time of the `to` function, as the median over the rounds.

    Each ratio is computed for two clocks. `processor` is the processor time of this process on all cores; other
    processes hardly affect it. `wall` is wall-clock time; it is meaningful only on an otherwise idle machine.
    """
    found: dict[str, dict[str, float]] = {}
    for name, of in times.items():
        found[name] = {
            clock: round(statistics.median(a / b for a, b in zip(getattr(of, clock), getattr(times[to], clock))), 4)
            for clock in ("processor", "wall")
        }
    return found
