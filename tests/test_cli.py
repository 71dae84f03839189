"""The command `tf-lossscale`: finds subcommands, loads none before it is called."""

import os
import sys

import pytest

import tf_lossscale
from tests.processes import printed
from tf_lossscale import cli


def exit_code(arguments):
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(("arguments", "code", "stream"), [(["--help"], 0, "out"), ([], 2, "err")])
def test_with_help_and_without_arguments_it_lists_every_command(arguments, code, stream, capsys):
    assert exit_code(arguments) == code
    printed = getattr(capsys.readouterr(), stream)
    assert all(f"\n    {name} " in printed for name in cli._COMMANDS)


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_command_has_help_of_its_own_that_fits_into_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"usage: tf-lossscale {command}" in printed
    assert max(map(len, printed.splitlines())) <= 80


SENTENCES = [
    (["run"], "nothing to run. Call tf-lossscale run SCRIPT [ARG ...] or run -m MODULE [ARG ...]."),
    (["inspect", "logs"], "logs: the folder has no checkpoint, and is not a SavedModel."),
    (["inspect", "nologs"], "nologs: there is no such file, folder or checkpoint."),
]


@pytest.mark.parametrize(("arguments", "sentence"), SENTENCES, ids=lambda value: " ".join(value).partition(": ")[0])
def test_a_mistake_is_said_in_one_line_without_private_names(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tf-lossscale"])
    (tmp_path / "logs" / "checkpoint").mkdir(parents=True)
    assert exit_code(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("tf-lossscale")
    assert sentence in last
    others = printed.err.splitlines()[:-1]
    assert not [line for line in others if not line.startswith(("usage:", " "))]
    assert "Traceback" not in printed.err


def test_the_version_is_the_packages(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"tf-lossscale {tf_lossscale.__version__}\n"


@pytest.mark.parametrize("arguments", [["none"], ["--none"]])
def test_bad_arguments_exit_with_2_and_show_the_usage(arguments, capsys):
    assert exit_code(arguments) == 2
    assert "usage: tf-lossscale" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["importlib.import_module", "tf_lossscale.migrate.checkpoints.inspect_command.run"])
def test_ctrl_c_while_a_command_is_loaded_or_runs_exits_with_130(place, monkeypatch, capsys):
    def interrupted(argument):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    assert cli.main(["inspect", "logs"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_output_that_cannot_be_written_exits_with_2_and_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.py").write_text("import tensorflow as tf\ntf.keras.mixed_precision.experimental.set_policy(p)\n")
    full = open("/dev/full", "w")  # noqa: SIM115 - closed below, where nothing may be left to write
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main(["migrate", str(tmp_path / "a.py")]) == 2
    full.close()
    assert "tf-lossscale migrate: [Errno 28] No space left on device\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_stream_that_the_process_lacks_changes_neither_the_work_nor_the_exit_code(name, tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("import tensorflow as tf\ntf.keras.mixed_precision.experimental.set_policy(p)\n")
    monkeypatch.setattr(sys, name, None)
    assert cli.main(["migrate", "--check", str(tmp_path / "a.py")]) == 1
    assert cli.main(["migrate", "--write", str(tmp_path / "a.py")]) == 0
    assert "set_global_policy" in (tmp_path / "a.py").read_text()
    getattr(sys, name).close()


def test_a_program_that_run_starts_chooses_its_own_log_level(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tf-lossscale", "run", "a.py"])
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    levels = []
    monkeypatch.setattr(os, "execve", lambda *call: levels.append(call[2].get("TF_CPP_MIN_LOG_LEVEL")))
    cli.main()
    assert levels == [None]


def test_help_loads_no_tensorflow():
    code = """
import sys
from tf_lossscale import cli

for command in ([], *([name] for name in cli._COMMANDS)):
    try:
        cli.main([*command, "--help"])
    except SystemExit:
        pass
print(sorted(sys.modules))
"""
    loaded = printed("-c", code)
    assert "'tf_lossscale.migrate.checkpoints.inspect_command'" in loaded
    assert "'tensorflow'" not in loaded
