"""Every Python block of the README and the docs runs, and prints what fits a terminal, without a foreign warning."""

import pathlib
import re

import pytest

from tests.terminal.seen import seen

ROOT = pathlib.Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{i}", marks=() if path.name == "README.md" else pytest.mark.slow)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
]

# Keras compiles a function for each model, and TensorFlow says so from the fifth model of a program on.
MANY_MODELS = r"calls to <function (TensorFlowTrainer|Model)\."


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs_and_says_nothing_unasked(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block)
    with seen() as what:
        exec(compile(block, str(script), "exec"), {"__name__": "__main__"})
    assert what.faults(MANY_MODELS) == []
