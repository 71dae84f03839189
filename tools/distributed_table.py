"""Writes the tables of docs/distributed.md from what the suite runs: `python -m tools.distributed_table`."""

from tests.families import ALL_FAMILIES
from tf_function_tests.cell import CALLS, why_not
from tools import pages

PAGE = pages.DOCS / "distributed.md"

_STRATEGIES = {
    "none": "none",
    "one_device": "`OneDeviceStrategy`",
    "mirrored_2": "`MirroredStrategy`",
    "mirrored_2_apart": "`MirroredStrategy` without `merge_call`",
    "workers_2": "`MultiWorkerMirroredStrategy`",
    "parameter_server": "`ParameterServerStrategy`",
    "central_storage": "`CentralStorageStrategy`",
    "tpu": "`TPUStrategy`",
}
_CALLS = {
    "eager": "eager",
    "function": "`tf.function`",
    "compiled": "`jit_compile`",
    "dataset_loop": "loop over a dataset",
    "while_loop": "`tf.while_loop`",
    "fit": "`fit`",
}
_FAMILIES = {
    "keras3": "Keras 3",
    "tf_keras": "tf_keras",
    "tf_keras_legacy": "tf_keras legacy",
    "tf1": "TensorFlow 1",
    "sonnet": "Sonnet 2",
}


def tables():
    """The tables, one for all families whose tables agree, and the reasons that their cells name by number."""
    assert [*CALLS, "fit"] == [*_CALLS]
    reasons = {}
    families = {}
    for family in ALL_FAMILIES:
        strategies = {}
        for name, shown in _STRATEGIES.items():
            whys = [why_not(family, name, call) for call in _CALLS]
            cells = ["yes" if why is None else f"no ({reasons.setdefault(why, len(reasons) + 1)})" for why in whys]
            strategies.setdefault(" | ".join(cells), []).append(shown)
        rows = [f"| {', '.join(each)} | {cells} |" for cells, each in strategies.items()]
        families.setdefault("\n".join(rows), []).append(_FAMILIES[family.name])
    lines = []
    for rows, names in families.items():
        lines += [f"### {' and '.join(names)}", "", f"| strategy | {' | '.join(_CALLS.values())} |"]
        lines += ["|---" * (len(_CALLS) + 1) + "|", rows, ""]
    lines += ["### Why not, and what to do instead", ""]
    lines += [f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in reasons.items()]
    return "\n".join(lines)


def page():
    """The page with its tables up to date."""
    return pages.with_part(PAGE.name, "distributed_table", tables())


if __name__ == "__main__":
    PAGE.write_text(page())
