"""Workflows, hooks, issue forms, the release check and the page of versions call and list what exists."""

import ast
import configparser
import importlib.util
import pathlib
import re
import runpy

import pytest
import yaml

from tf_lossscale import LossScaleOptimizer, cli

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)[1].replace("\\\n", " ").split())


def release_check():
    return runpy.run_path(str(ROOT / "tools" / "release_check.py"))


def commands_of(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile_and_nothing_else(workflow):
    commands = commands_of(workflow)
    assert commands
    for command in commands:
        called = re.search(r"\bmake (?:--silent )?([\w-]+)", command)
        assert command == ".ci/run" or called[1] in TARGETS, command


def test_ci_and_contributing_call_targets_of_the_makefile():
    for path in (".ci/run", "CONTRIBUTING.md", "docs/versions.md"):
        for target in re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / path).read_text(), re.MULTILINE):
            assert target in TARGETS, (path, target)


def test_the_release_check_calls_what_exists():
    for step in release_check()["STEPS"]:
        if step.command[0] == "make":
            assert step.command[1] in TARGETS, step
        for each in step.command:
            if each.startswith("tools."):
                assert importlib.util.find_spec(each), step
            if each.startswith(("tests", "tf_function_tests")):
                assert (ROOT / each).exists(), step


def test_hooks_run_the_tools_of_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    for hook in hooks:
        tool = re.match(r"\.venv/bin/(\w+)", hook["entry"])[1]
        assert f"$(BIN)/{tool}" in lint


@pytest.mark.parametrize("form", ["bug", "migration"])
def test_issue_forms_ask_for_output_of_what_exists(form):
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text()
    assert "tf-lossscale inspect" in text
    for command in re.findall(r"`tf-lossscale (\w+)", text):
        assert command in cli._COMMANDS
    for method in re.findall(r"optimizer\.(\w+)\(\)", text):
        assert callable(getattr(LossScaleOptimizer, method))


def test_the_page_of_versions_lists_what_nox_tests_and_pip_installs_on():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (releases,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RELEASES"
    )
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (2\.\d+) \| .* \| (.*) \| (.*) \| .* \|$", page, re.MULTILINE)
    assert rows == [
        (tensorflow, ", ".join(pythons["none"]), probability) for tensorflow, (probability, pythons) in releases.items()
    ]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert f"tensorflow>={min(releases)}" in setup["options"]["install_requires"]
    pythons = {python for _, each in releases.values() for python in each["none"]}
    listed = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert sorted(pythons) == sorted(listed)
