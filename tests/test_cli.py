"""The command `tf-lossscale`: finds subcommands, loads none before it is called."""

import subprocess
import sys

import pytest

import tf_lossscale
from tf_lossscale import cli


def exit_code(arguments):
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return stop.code


def test_help_lists_every_command(capsys):
    assert exit_code(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {name} " in printed for name in cli._COMMANDS)


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_command_has_help_of_its_own(command, capsys):
    assert exit_code([command, "--help"]) == 0
    assert f"usage: tf-lossscale {command}" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"tf-lossscale {tf_lossscale.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["none"], ["--none"]])
def test_bad_arguments_exit_with_2_and_show_the_usage(arguments, capsys):
    assert exit_code(arguments) == 2
    assert "usage: tf-lossscale" in capsys.readouterr().err


def test_ctrl_c_in_a_command_exits_with_130(monkeypatch):
    from tf_lossscale.training import command

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert cli.main(["train"]) == 130


def test_help_loads_no_tensorflow():
    code = "import sys; from tf_lossscale import cli\ntry: cli.main(['--help'])\nfinally: print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'tf_lossscale.cli'" in loaded
    assert "'tensorflow'" not in loaded
