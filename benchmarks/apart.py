"""Takes a measurement that needs a separate process, and prints the result as JSON."""

import json
import sys
import time


def main(what: str, *arguments: str) -> None:
    """Print one measurement.

    Args:
        what: "import" for the import times, "first call" for a step's first call, or "memory" for its peak memory.
        *arguments: for "first call" the family, workload and contender; for "memory" the workload and contender.
    """
    if what == "import":
        start = time.process_time()
        import tf_lossscale  # noqa: F401

        ours = time.process_time() - start
        start = time.process_time()
        import tensorflow  # noqa: F401

        print(json.dumps([ours, time.process_time() - start]))
        return
    if what == "first call":
        from benchmarks import beside

        print(json.dumps(beside.first_call(*arguments)))
        return
    from benchmarks import costs

    print(json.dumps(costs.peak_of_a_step(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
