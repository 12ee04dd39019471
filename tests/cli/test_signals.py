"""A signal to the command: what it says, what it leaves behind, and with which number it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def command(write_recipe, tmp_path):
    """A recipe that trains for ever, with a reward that tells when it is called."""
    recipe = write_recipe(tmp_path)
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def slow(completions):\n"
        f"    with open({str(tmp_path / 'calls')!r}, 'a') as file: file.write('x')\n"
        "    time.sleep(0.3)\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    options = ["--data.rewards", "[slow.slow]", "--trainer.max_epochs", "500", "--data.val", "null"]
    return [sys.executable, "-m", "lit_rlhf", "fit", "-c", str(recipe), *options]


def started(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """The process, once it has made its second rollout."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    deadline = time.monotonic() + 200
    while not (folder / "calls").exists() or (folder / "calls").stat().st_size < 2:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_with_the_signals_number(command, tmp_path, number):
    process = started(command, tmp_path)
    process.send_signal(number)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 128 + number
    assert f"lit-rlhf: {signal.Signals(number).name}: the run ends after this iteration" in said
    assert "go on with --ckpt_path" in said
    assert "Traceback" not in said
    assert (tmp_path / "kept" / "last.ckpt").exists()


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_two_processes_end_together_though_one_got_the_signal(command, tmp_path):
    process = started([*command, "--trainer.strategy", "ddp", "--trainer.devices", "2"], tmp_path)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "go on with --ckpt_path" in said
    assert (tmp_path / "kept" / "last.ckpt").exists()


@pytest.mark.timeout(300)
def test_a_second_signal_ends_it_at_once(command, tmp_path):
    (tmp_path / "slow.py").write_text((tmp_path / "slow.py").read_text().replace("sleep(0.3)", "sleep(100)"))
    (tmp_path / "calls").write_text("x")
    process = started(command, tmp_path)  # inside the first call
    process.send_signal(signal.SIGTERM)
    assert "the run ends after this iteration" in _until(process, "SIGTERM")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def _until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stderr is not None
    return next(line for line in process.stderr if word in line)
