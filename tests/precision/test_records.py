"""The file in which a run keeps its counts."""

import numpy as np
import pytest

from tests.precision.made import counted, write
from tf_lossscale.precision import records
from tf_lossscale.precision.counts import COLUMNS, ExponentCounts
from tf_lossscale.precision.report import PrecisionReport


def same(a, b):
    facts = [(each.names, each.scale, each.step, each.full_precision) for each in (a, b)]
    return facts[0] == facts[1] and np.array_equal(a.counts, b.counts)


def test_a_record_keeps_every_column(tmp_path):
    rng = np.random.default_rng(0)
    written = ExponentCounts(("a", "b"), rng.integers(0, 2**40, [2, COLUMNS]), 1000.5, 7, full_precision=True)
    records.append(tmp_path / "new", written)
    (read,) = records.read(tmp_path / "new")
    assert same(read, written)
    assert read.counts.dtype == np.int64


@pytest.mark.parametrize("gradients", [{}, {"kernel": []}, {"kernel": [0.0, np.inf, np.nan]}])
def test_a_record_keeps_counts_without_a_finite_value(gradients, tmp_path):
    records.append(tmp_path, counted(gradients))
    (read,) = records.read(tmp_path)
    assert same(read, counted(gradients))


def test_a_record_without_values_far_apart_is_short(tmp_path):
    records.append(tmp_path, counted({"kernel": [1.0, 2.0]}))
    assert '"lowest_exponent": 0, "bins": [1, 1]' in (tmp_path / records.FILE).read_text()
    (read,) = records.read(tmp_path)
    assert same(read, counted({"kernel": [1.0, 2.0]}))


def test_a_resumed_run_and_a_killed_one_are_read(tmp_path):
    write(tmp_path, [100, 200, 300])
    write(tmp_path, [200, 300], scale=4.0)
    path = tmp_path / records.FILE
    path.write_text(path.read_text()[:-20])
    assert [(counts.step, counts.scale) for counts in records.read(tmp_path)] == [
        (100, 2.0**10),
        (200, 4.0),
        (300, 2.0**10),
    ]


def test_a_report_is_written_as_a_step_of_the_run(tmp_path):
    report = PrecisionReport(counted({"kernel": [1.0]}, step=7))
    report.write(tmp_path)
    report.write(tmp_path, step=107)
    assert [counts.step for counts in records.read(tmp_path)] == [7, 107]
    with pytest.raises(ValueError, match="`step` must be a whole number that is at least 1, but got: 0"):
        report.write(tmp_path, step=0)


@pytest.mark.parametrize("line", ["{", "[]", '{"variables": {}}', '{"variables": {"a": {}}}', "3"])
def test_a_damaged_line_is_named(line, tmp_path):
    write(tmp_path, [100])
    with (tmp_path / records.FILE).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"Line 2 of .*exponents\.jsonl is damaged"):
        records.read(tmp_path)
