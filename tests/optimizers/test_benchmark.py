"""The benchmark runs, and what it says of the state is so."""

import pathlib
import runpy

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "adafactor.py"


def test_the_benchmark_prints_times_and_a_state_of_n_plus_m_numbers(capsys, tmp_path):
    main = runpy.run_path(str(BENCHMARK))["main"]
    workload = "20 x (3, 3, 64, 64)"
    rows, states = main(
        ["--repetitions", "1", "--workloads", workload, "--modes", "tf.function", "--json", str(tmp_path / "out.json")]
    )
    # For each of 20: nine matrices of 64 rows and 64 columns, and the number of steps; four bytes each.
    assert states[workload]["tf-lossscale"] == 20 * 4 * (9 * (64 + 64) + 1)
    assert states[workload]["tf-lossscale"] == states[workload]["foreach"] <= states[workload]["Keras 3's"]
    assert rows[0]["ratios"]["tf-lossscale"] == 1.0
    assert all(seconds > 0 for seconds in rows[0]["seconds"].values())
    printed = capsys.readouterr().out
    assert printed.count(f"| {workload} |") == 2
    assert (tmp_path / "out.json").exists()
