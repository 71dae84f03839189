"""The rows as a line each, as the tables of docs/performance.md, and as its plot."""

import pathlib
import re
from collections.abc import Iterable
from typing import Any

from benchmarks import contenders

Row = dict[str, Any]
COLUMNS = (contenders.OURS, contenders.OURS_APPLY, contenders.THEIRS)
_OF_MINIMIZE = {contenders.OURS: contenders.OURS_MINIMIZE, contenders.THEIRS: contenders.THEIRS_MINIMIZE}


def line(row: Row) -> str:
    """Returns a row as a line of text."""
    where = ", ".join(row[key] for key in ("what", "mode", "family", "workload"))
    ratios = "  ".join(
        f"{name} {both['processor']:.2f} (wall {both['wall']:.2f})" for name, both in row.get("ratios", {}).items()
    )
    others = "  ".join(f"{key} {row[key]}" for key in ("nodes", "megabytes", "milliseconds", "rounds") if key in row)
    return f"{where}: {ratios}  {others}"


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the tables of the page by name, of what has been measured."""
    rows = results["rows"]
    found = {"machine": _machine(results)}
    for what in ("step", "minimize", "training step"):
        found[what] = _ratios([row for row in rows if row["what"] == what])
    skipped = [
        [row["mode"], row["family"], row["workload"], _ratio(row, "skipped")] for row in _sorted(rows, "skipped step")
    ]
    found["skipped step"] = _table(["mode", "Adam of", "gradients", "skipped : applied"], skipped)
    traced = [
        [row["family"], f"{row['bare_ms']:.0f} ms", row["nodes"][contenders.BARE]]
        + [cell for name in COLUMNS for cell in (_ratio(row, name), _more(row, name))]
        for row in _sorted(rows, "tracing")
    ]
    head = [title for name in COLUMNS for title in (name, "nodes more")]
    found["tracing"] = _table(["Adam of", "bare", "nodes", *head], traced)
    memory = [
        [name, f"{value:.0f} MB"] for row in _sorted(rows, "peak memory") for name, value in row["megabytes"].items()
    ]
    found["peak memory"] = _table(["contender", "a step of 4 x 16M needs"], memory)
    imports = [
        [name, f"{value:.0f} ms"] for row in _sorted(rows, "import") for name, value in row["milliseconds"].items()
    ]
    found["import"] = _table(["import", "takes"], imports)
    growth = [
        [row["workload"], f"{row['bare_ms']:.2f} ms", _ratio(row, contenders.OURS), f"{microseconds:.2f} µs"]
        for row, microseconds in ((row, overhead(row)) for row in growth_rows(rows))
    ]
    found["growth"] = _table(["gradients", "bare", contenders.OURS, "more, per variable"], growth)
    return {name: table for name, table in found.items() if table}


def renew(page: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes the tables between their marks in the page: `<!-- step -->` and `<!-- end -->`."""
    text = page.read_text()
    for name, table in tables(results).items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marks.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    page.write_text(text)


def overhead(row: Row) -> float:
    """Returns what the loss scale adds to a step, per variable, in microseconds."""
    return 1000 * row["bare_ms"] * (row["ratios"][contenders.OURS]["processor"] - 1) / int(row["workload"].split()[0])


def growth_rows(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of growth: first by the number of variables, then by their size."""
    sizes = {"k": 1_000, "M": 1_000_000}

    def order(row: Row) -> tuple[bool, int, int]:
        count, size = row["workload"].split(" x ")
        return int(count) == 1, int(count), int(size[:-1]) * sizes[size[-1]]

    return sorted((row for row in rows if row["what"] == "growth"), key=order)


def plot(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes the ratios of the optimizer's step in a tf.function, and the growth, as one picture."""
    from matplotlib.figure import Figure

    rows = [r for r in _sorted(results["rows"], "step") if r["mode"] == "tf.function"]
    figure = Figure(figsize=(11, 5), layout="constrained")
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
        right.plot(*zip(*points), "o-", label=label) if points else None
    right.set(xscale="log", xlabel="n", ylabel="added per variable (µs), or per 1000 values (µs)", yscale="log")
    right.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _size(row: Row) -> tuple[int, int]:
    count, size = row["workload"].split(" x ")
    return int(count), int(size[:-1]) * {"k": 1_000, "M": 1_000_000}[size[-1]]


def _sorted(rows: Iterable[Row], what: str) -> list[Row]:
    return sorted((r for r in rows if r["what"] == what), key=lambda r: (r["mode"], r["family"], r["workload"]))


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    loads = [row["load"] for row in results["rows"] if "load" in row] or [0.0]
    return (
        f"{machine['processor']}, {machine['cores']} cores; TensorFlow {machine['tensorflow']}, Keras "
        f"{machine['keras']}, tf_keras {machine['tf_keras']}, Python {machine['python']}. Other work ran on "
        f"the machine: {min(loads):.0f} to {max(loads):.0f} processes wanted its cores while this was measured."
    )


def _ratios(rows: list[Row]) -> str:
    body = []
    for what in {row["what"] for row in rows}:
        for row in _sorted(rows, what):
            names = [_OF_MINIMIZE.get(name, name) if what == "minimize" else name for name in COLUMNS]
            body.append(
                [row["mode"], row["family"], row["workload"], f"{row['bare_ms']:.1f} ms"]
                + [_ratio(row, name) for name in names]
                + [row["rounds"]]
            )
    return _table(["mode", "Adam of", "what is trained", "bare", *COLUMNS, "rounds"], body)


def _ratio(row: Row, name: str) -> str:
    return f"{row['ratios'][name]['processor']:.2f}" if name in row["ratios"] else ""


def _more(row: Row, name: str) -> str:
    return f"{row['nodes'][name] - row['nodes'][contenders.BARE]}"


def _table(head: list[str], body: list[list[Any]]) -> str:
    if not body:
        return ""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in [head, ["---"] * len(head), *body])
