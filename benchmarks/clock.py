"""Interleaved timing: each round calls every function once, so that all run under the same load of the machine."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass
class Times:
    """Durations of the calls of one function, in seconds."""

    wall: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)


def in_turns(
    functions: dict[str, Callable[[], object]], seconds: float, least: int = 7, most: int = 200, first: int = 2
) -> dict[str, Times]:
    """Call the functions in turn, and return the times of each.

    Args:
        functions: functions by name. The function that begins changes from round to round.
        seconds: time for all rounds together. A round that has started is always finished.
        least: minimum number of rounds, however long they take.
        most: maximum number of rounds.
        first: number of untimed calls of each function before the first round.
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
    """Return the ratio of each function's time to the time of the function `to`: the median over all rounds.

    There are two clocks. `processor` is the processor time of this process on all cores; other processes hardly change
    it. `wall` is wall-clock time; it is meaningful only on an otherwise idle machine.
    """
    found: dict[str, dict[str, float]] = {}
    for name, of in times.items():
        found[name] = {
            clock: round(statistics.median(a / b for a, b in zip(getattr(of, clock), getattr(times[to], clock))), 4)
            for clock in ("processor", "wall")
        }
    return found


def load() -> float:
    """Return the load average of the last minute, this process included."""
    return round(os.getloadavg()[0], 1)
