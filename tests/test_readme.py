"""Every Python block of the README and the docs runs."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{i}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block)
    exec(compile(block, str(script), "exec"), {"__name__": "__main__"})


def test_the_readme_shows_the_two_commands_first():
    first = (ROOT / "README.md").read_text().split("```")[1]
    assert "make demo" in first
    assert "make test" in first


def test_links_between_documents_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", path.read_text()):
            assert (path.parent / target).exists(), (path.name, target)
