"""Formats benchmark results as lines of text, and as the tables and the plot in docs/performance.md."""

import pathlib
import re
from collections.abc import Iterable
from typing import Any

from benchmarks import beside, contenders, steps, workloads

Row = dict[str, Any]
COLUMNS = {name: name for name in (contenders.OURS, contenders.OURS_APPLY, contenders.THEIRS)}
_COMPILED = {
    contenders.OURS: contenders.OURS,
    contenders.OURS_COMPILED: "jit_compile=True",
    contenders.BARE_COMPILED: contenders.BARE_COMPILED,
    contenders.NO_STEP: contenders.NO_STEP,
}
_EXPONENTS = (contenders.OURS_WAITING, contenders.OURS_COUNTING)
UNMEASURED = "Not measured yet: `make bench` fills this in."
_MINIMIZE = {
    contenders.OURS_MINIMIZE: contenders.OURS,
    contenders.THEIRS_MINIMIZE: contenders.THEIRS,
    contenders.LEAST: contenders.LEAST,
}
_SIZES = {"k": 1_000, "M": 1_000_000}


def line(row: Row) -> str:
    """Return the result of one measurement as a line of text."""
    where = ", ".join(row[key] for key in ("what", "mode", "family", "workload"))
    ratios = "  ".join(
        f"{name} {both['processor']:.2f} (wall {both['wall']:.2f})" for name, both in row.get("ratios", {}).items()
    )
    others = "  ".join(f"{key} {row[key]}" for key in ("nodes", "megabytes", "milliseconds", "rounds") if key in row)
    refused = "  ".join(f"{name}: {why}" for name, why in row.get("refused", {}).items())
    return f"{where}: {ratios}  {others}  {refused}".rstrip()


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return a dictionary of the tables in docs/performance.md. A table without measurements is `UNMEASURED`."""
    rows = [row for row in results["rows"] if "refused" not in row or "ratios" in row]
    found = {
        "summary": _summary(rows),
        "step": _ratios(_sorted(rows, "step"), COLUMNS),
        "least": _table(
            ["mode", "Adam of", "what is trained", contenders.LEAST, *COLUMNS],
            [
                [row["mode"], row["family"], row["workload"], *(_ratio(row, n) for n in (contenders.LEAST, *COLUMNS))]
                for row in [*_sorted(rows, "step"), *_sorted(rows, "training step")]
                if contenders.LEAST in row["ratios"]
            ],
        ),
        "minimize": _ratios(_sorted(rows, "minimize"), _MINIMIZE),
        "training step": _ratios(_sorted(rows, "training step"), COLUMNS),
        "diagnose": _ratios(_sorted(rows, "diagnose"), {contenders.OURS_DIAGNOSED: "diagnose=True"}),
        steps.EXPONENTS: _table(
            ["mode", "Adam of", "what is trained", contenders.OURS, *_EXPONENTS, "count : check", "rounds"],
            [
                [row["mode"], row["family"], row["workload"], f"{row['bare_ms']:.1f} ms"]
                + [_ratio(row, name) for name in _EXPONENTS]
                + [_quotient(row, contenders.COUNT, contenders.CHECK), row["rounds"]]
                for row in _sorted(rows, steps.EXPONENTS)
            ],
        ),
        "skipped step": _table(
            ["mode", "Adam of", "gradients", "skipped : applied"],
            [[r["mode"], r["family"], r["workload"], _ratio(r, "skipped")] for r in _sorted(rows, "skipped step")],
        ),
        steps.COMPILED: _ratios(_sorted(rows, steps.COMPILED), _COMPILED),
        "beside": _beside(_sorted(rows, beside.WHAT)),
        "first call": _first_calls(_sorted(rows, beside.FIRST_CALL)),
        "tracing": _traced(_sorted(rows, "tracing")),
        "compiling": _traced(_sorted(rows, "compiling")),
        "peak memory": _table(
            ["contender", "peak", "more than bare"],
            [
                [name, f"{value:.0f} MB", f"{value - _bare_of(row['megabytes'], name):.0f} MB"]
                for row in _sorted(rows, "peak memory")
                for name, value in row["megabytes"].items()
            ],
        ),
        "import": _table(
            ["import", "takes"],
            [
                [name, f"{value:.0f} ms"]
                for row in _sorted(rows, "import")
                for name, value in row["milliseconds"].items()
            ],
        ),
        "growth": _table(
            ["gradients", "bare", contenders.OURS, "more"],
            [
                [r["workload"], f"{r['bare_ms']:.2f} ms", _ratio(r, contenders.OURS), _more(r)]
                for r in growth_rows(rows)
            ],
        ),
    }
    for name, table in found.items():
        found[name] = table and table + _measured_on(_sorted(rows, name), results["machine"])
    pages = {name: table + _left_out(results["rows"], name) or UNMEASURED for name, table in found.items()}
    return {"machine": _machine(results), **pages}


# The rows of the summary table. Each has a label, a filter for measurements, the optimizer to show and an explanation.
_SUMMARY = (
    (
        "a training step in a `tf.function`",
        {"what": "training step", "mode": "tf.function", "family": "Keras 3"},
        contenders.OURS,
        "The forward and backward passes take far more time than the loss scale.",
    ),
    (
        "a training step in eager mode",
        {"what": "training step", "mode": "eager", "family": "Keras 3"},
        contenders.OURS,
        "Each gradient needs one additional operation for the check and one for unscaling.",
    ),
    (
        "the optimizer's step alone, Keras 3's Adam, in a `tf.function`",
        {"what": "step", "mode": "tf.function", "family": "Keras 3", "workload": workloads.RESNET},
        contenders.OURS,
        "The check reads every gradient again.",
    ),
    (
        "the same with `jit_compile=True`",
        {"what": steps.COMPILED, "mode": "tf.function", "family": "Keras 3", "workload": workloads.RESNET},
        contenders.OURS_COMPILED,
        "XLA fuses the dozen operations of Keras 3's update.",
    ),
    (
        "the optimizer's step alone, tf_keras's legacy Adam",
        {"what": "step", "mode": "tf.function", "family": "tf_keras legacy", "workload": workloads.RESNET},
        contenders.OURS,
        "This Adam is a single operation, so the additional passes over the gradients show.",
    ),
)


def _summary(rows: list[Row]) -> str:
    body = []
    for label, where, name, sentence in _SUMMARY:
        found = [row for row in rows if where.items() <= row.items() and name in row["ratios"]]
        ratios = sorted(f"{row['ratios'][name]['processor']:.2f}" for row in found)
        if ratios:
            body.append([label, " to ".join(dict.fromkeys((ratios[0], ratios[-1]))), sentence])
    return _table(["what runs", "bare = 1", "why"], body)


def _beside(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        for family in dict.fromkeys(name.rpartition(": ")[0] for name in row["milliseconds"]):
            own = [row["milliseconds"].get(f"{family}: {name}") for name in beside.COLUMNS]
            lines.append([row["workload"], family, *("" if value is None else f"{value:.1f} ms" for value in own)])
    return _table(["gradients", "Adam of", *beside.COLUMNS], lines)


def _first_calls(rows: list[Row]) -> str:
    names = (contenders.BARE, contenders.OURS, contenders.OURS_COMPILED, beside.CACHED)
    lines = [[row["family"], *(f"{row['milliseconds'][name] / 1000:.1f} s" for name in names)] for row in rows]
    return _table(["Adam of", *names], lines)


def _measured_on(rows: Iterable[Row], machine: Row) -> str:
    """Return a note that names the machines, other than `machine`, on which rows of a table were measured."""
    others = [row["machine"] for row in rows if row.get("machine", machine) != machine]
    shown = sorted({f"{other['processor']}, {other['cores']} cores" for other in others})
    return f"\n\nMeasured on: {'; '.join(shown)}." if shown else ""


def renew(page: pathlib.Path, results: dict[str, Any]) -> None:
    """Update the tables on a page. Each table is enclosed in comments such as `<!-- step -->` and `<!-- end -->`."""
    text = page.read_text()
    for name, table in tables(results).items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marks.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    page.write_text(text)


def overhead(row: Row) -> float:
    """Return the time that the loss scale adds to a step, in microseconds per variable."""
    return 1000 * row["bare_ms"] * (row["ratios"][contenders.OURS]["processor"] - 1) / int(row["workload"].split()[0])


def growth_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the "growth" measurements, sorted by size. Measurements with a single variable come last."""
    return sorted(
        (row for row in rows if row["what"] == "growth" and "ratios" in row),
        key=lambda row: (_size(row)[0] == 1, *_size(row)),
    )


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Plot the measurements that were taken in a `tf.function`.

    The left panel shows the times of optimizer steps and of whole training steps, divided by the times without loss
    scaling. The right panel plots the time added by loss scaling against the number of variables and against their
    size.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [
        row
        for what in ("step", "training step")
        for row in _sorted(results["rows"], what)
        if row["mode"] == "tf.function" and "ratios" in row
    ]
    figure = Figure(figsize=(11, max(5, len(rows) / 4)), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, name in enumerate(COLUMNS):
        have = [(at, row["ratios"][name]["processor"]) for at, row in enumerate(rows) if name in row["ratios"]]
        left.barh([at + 0.27 * (i - 1) for at, _ in have], [ratio - 1 for _, ratio in have], 0.25, left=1, label=name)
    left.set_yticks(range(len(rows)), [f"{row['family']}, {row['workload']}" for row in rows], fontsize=7)
    left.invert_yaxis()
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("processor time of a step, bare optimizer = 1")
    left.legend(fontsize=7)
    for label, many in (("n variables of 1k values", True), ("one variable of n values", False)):
        points = [
            (count if many else values, overhead(row) / (1 if many else values) * (1 if many else 1000))
            for row in growth_rows(results["rows"])
            for count, values in [_size(row)]
            if (count > 1) == many
        ]
        # Noise can make the added time zero or negative, which a logarithmic axis cannot show.
        seen = [(n, added) for n, added in points if added > 0]
        if seen:
            right.plot(*zip(*seen), "o-", label=label)
    right.set(xscale="log", xlabel="n", ylabel="added per variable (µs), or per 1000 values (µs)", yscale="log")
    if right.lines:
        right.legend(fontsize=7)
    # With a fixed salt, Matplotlib generates the same element ids in the SVG file every time.
    with matplotlib.rc_context({"svg.hashsalt": "performance"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _size(row: Row) -> tuple[int, int]:
    count, size = row["workload"].split(" x ")
    return int(count), int(size[:-1]) * _SIZES[size[-1]]


def _sorted(rows: Iterable[Row], what: str) -> list[Row]:
    return sorted((r for r in rows if r["what"] == what), key=lambda r: (r["mode"], r["family"], r["workload"]))


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    loads = [row["load"] for row in results["rows"] if "load" in row] or [0.0]
    torch = f"PyTorch {machine['torch']}, " if "torch" in machine else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores; TensorFlow {machine['tensorflow']}, Keras "
        f"{machine['keras']}, tf_keras {machine['tf_keras']}, {torch}Python {machine['python']}. The load average "
        f"was {min(loads):.1f} to {max(loads):.1f} during the measurements, including the benchmark itself."
    )


def _ratios(rows: list[Row], columns: dict[str, str]) -> str:
    """Return a table in which each optimizer's time is divided by the first optimizer's time.

    Args:
        rows: the measurements.
        columns: maps the name of each optimizer to its column heading.
    """
    body = [
        [row["mode"], row["family"], row["workload"], f"{row['bare_ms']:.1f} ms"]
        + [_ratio(row, name) for name in columns]
        + [row["rounds"]]
        for row in rows
    ]
    first = contenders.OURS if contenders.OURS_DIAGNOSED in columns else contenders.BARE
    return _table(["mode", "Adam of", "what is trained", first, *columns.values(), "rounds"], body)


def _traced(rows: list[Row]) -> str:
    body = [
        [row["family"], f"{row['bare_ms'] / 1000:.2f} s", row["nodes"][contenders.BARE]]
        + [_ratio(row, contenders.CONDITIONAL)]
        + [cell for name in COLUMNS for cell in (_ratio(row, name), row["nodes"][name] - row["nodes"][contenders.BARE])]
        for row in rows
    ]
    return _table(
        [
            "Adam of",
            "bare",
            "nodes",
            contenders.CONDITIONAL,
            *(head for name in COLUMNS for head in (name, "nodes added")),
        ],
        body,
    )


def _bare_of(found: dict[str, float], name: str) -> float:
    return found[contenders.BARE_MINIMIZE if name in contenders.MINIMIZERS else contenders.BARE]


def _left_out(rows: list[Row], what: str) -> str:
    """Return a note that lists the optimizers that could not run, with their errors."""
    where: dict[tuple[str, ...], list[str]] = {}
    for row in _sorted(rows, what):
        for name, why in row.get("refused", {}).items():
            where.setdefault((name, row["family"], row["mode"], why), []).append(row["workload"])
    lines = [
        f"- {family}, {mode}, {' and '.join(workloads)}: without **{name}**. `{why}`"
        for (name, family, mode, why), workloads in where.items()
    ]
    return "\n".join(["", "", *lines]) if lines else ""


def _ratio(row: Row, name: str) -> str:
    return f"{row['ratios'][name]['processor']:.2f}" if name in row["ratios"] else ""


def _quotient(row: Row, name: str, other: str) -> str:
    return f"{row['ratios'][name]['processor'] / row['ratios'][other]['processor']:.1f}"


def _more(row: Row) -> str:
    count, values = _size(row)
    if count > 1:
        return f"{overhead(row):.2f} µs per variable"
    return f"{1000 * overhead(row) / values:.3f} µs per 1000 values"


def _table(head: list[str], body: list[list[Any]]) -> str:
    if not body:
        return ""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in [head, ["---"] * len(head), *body])
