"""Takes turns: functions are timed one call each, round after round, so that all see the same machine."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass
class Times:
    """What one function's calls took, in seconds."""

    wall: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)


def in_turns(
    functions: dict[str, Callable[[], object]], seconds: float, least: int = 7, most: int = 200, first: int = 2
) -> dict[str, Times]:
    """Returns the times of each function.

    Args:
        functions: by name; each round calls every one of them once, and begins one further on than the last.
        seconds: for all rounds together; a started round is finished.
        least: number of rounds, whatever they take.
        most: number of rounds.
        first: number of calls of each before that, which are not timed.
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
    """Returns each function's time as a ratio to one of them: the median over the rounds of each round's ratio.

    Two clocks: `processor`, the time that the machine worked for this process on all its cores together, which other
    processes hardly change; and `wall`, which is what one waits for on a machine that does nothing else.
    """
    found: dict[str, dict[str, float]] = {}
    for name, of in times.items():
        found[name] = {
            clock: round(statistics.median(a / b for a, b in zip(getattr(of, clock), getattr(times[to], clock))), 4)
            for clock in ("processor", "wall")
        }
    return found


def load() -> float:
    """Returns how many processes wanted a core in the last minute, this one among them."""
    return round(os.getloadavg()[0], 1)
