"""The main job, as a user runs it."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tf_lossscale import cli

TRAIN = [sys.executable, "-m", "tf_lossscale.cli", "train"]


def test_it_compares_the_three_runs_and_plots(tmp_path, capsys):
    assert cli.main(["train", "--steps", "60", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in ("test accuracy", "skipped steps", "float32", "float16 without", "float16 with"):
        assert text in printed
    accuracy = [float(part.split("%")[0].split()[-1]) for part in printed.splitlines() if part.count("%") == 2]
    float32, unscaled, scaled = accuracy
    assert unscaled < 30 < 60 < scaled
    assert abs(scaled - float32) < 10
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_other_optimizers_learn_too(tmp_path, optimizer):
    arguments = ["train", "--optimizer", optimizer, "--steps", "60", "--out", str(tmp_path), "--no-compare"]
    assert cli.main(arguments) == 0
    history = json.loads((tmp_path / "state.json").read_text())["history"]
    assert history[-1][0] < 0.7 * history[0][0]


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_resume_goes_on_as_if_nothing_had_happened(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = ["--steps", "150", "--growth-steps", "10", "--no-compare"]
    subprocess.run([*TRAIN, *options, "--out", whole], check=True, capture_output=True)

    running = subprocess.Popen([*TRAIN, *options, "--out", cut], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = b""
    deadline = time.monotonic() + 120
    while b"/150" not in seen.split(b"0/150")[-1] and time.monotonic() < deadline:
        seen += running.stderr.read(1)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 130, out
    stopped = json.loads((cut / "state.json").read_text())
    assert 0 < len(stopped["history"]) < 150
    assert b"--resume" in out

    resumed = subprocess.run([*TRAIN, "--resume", "--no-compare", "--out", cut], check=True, capture_output=True)
    assert f"loss scale {stopped['loss_scale']:g} and counter {stopped['counter']}" in resumed.stdout.decode()
    a, b = (json.loads((folder / "state.json").read_text()) for folder in (whole, cut))
    assert a["history"] == b["history"]
    assert (a["loss_scale"], a["counter"]) == (b["loss_scale"], b["counter"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "0"], "--steps"),
        (["--optimizer", "none"], "--optimizer"),
        (["--resume"], "nothing to resume"),
        (["--initial-scale", "-1"], "initial_scale"),
    ],
)
def test_bad_options_exit_with_2_and_say_why(tmp_path, capsys, arguments, text):
    try:
        code = cli.main(["train", *arguments, "--out", str(tmp_path / "out")])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out" / "state.json").exists()
