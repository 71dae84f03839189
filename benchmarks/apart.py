"""A script that takes one measurement and prints the result as JSON. The benchmarks run it in a fresh process."""

import json
import sys
import time


def main(what: str, *arguments: str) -> None:
    """Take one measurement and print it.

    Args:
        what: "import" to time imports, "first call" to time the first call to a step function, or "memory" to measure
            the peak memory of a step.
        *arguments: the arguments of `beside.first_call` if `what` is "first call", or the arguments of
            `costs.peak_of_a_step` if `what` is "memory".
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
