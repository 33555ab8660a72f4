"""What runs on a host: launch/_host.sh, what installs there, and launch/local.sh."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
from launch_stubs import LAUNCH, TPU, TRAIN

pytestmark = pytest.mark.slow


def host(tmp_path, program: str) -> subprocess.Popen[str]:
    """Starts _host.sh in a checkout whose taser is a small program."""
    (tmp_path / "launch").mkdir(exist_ok=True)
    shutil.copy(LAUNCH / "_host.sh", tmp_path / "launch")
    taser = tmp_path / "taser"
    taser.write_text(f"#!/usr/bin/env bash\n{program}\n")
    taser.chmod(0o755)
    return subprocess.Popen(
        ["bash", str(tmp_path / "launch" / "_host.sh"), "train", "a b"],
        env=os.environ | {"TASER": str(taser)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_host_tells_its_status(tmp_path):
    process = host(tmp_path, 'printf "%s|" "$@"; exit 75')
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert output.startswith("train|a b|--multihost|")
    assert "taser-status 75 on " in output


def test_a_host_that_is_told_to_stop_lets_taser_save(tmp_path):
    saves = "trap 'sleep 1; echo saved; exit 75' TERM; echo ready; while true; do sleep 0.1; done"
    process = host(tmp_path, saves)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert output.splitlines()[0] == "saved"


def test_what_an_earlier_attempt_left_is_ended_first(tmp_path):
    stays = "trap 'echo ended; exit 75' TERM; echo ready; while true; do sleep 0.1; done"
    left = host(tmp_path, stays)
    assert left.stdout.readline() == "ready\n"
    # Its connection is lost; taser goes on.
    left.kill()
    left.wait()
    again = host(tmp_path, "exit 0")
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert "of an earlier attempt" in output
    assert left.stdout.read() == "ended\n"


def environment(checkout: pathlib.Path, **programs: str) -> pathlib.Path:
    """Puts small programs into a checkout's environment."""
    folder = checkout / ".venv" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def test_local_runs_in_the_checkout_wherever_it_is_called(checkout, tmp_path):
    told = 'for word; do printf "%s|" "$word"; done; pwd'
    environment(checkout, python="exit 0", pip="", taser=told)
    found = subprocess.run(
        ["bash", str(checkout / "launch" / "local.sh"), "--directory=my dir"],
        env=os.environ | {"PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stdout.splitlines() if "|" in line]
    assert len(lines) == 4
    assert {line.split("|")[-1] for line in lines} == {str(checkout)}
    assert "|--gin.DATA_DIR=my dir/data|" in lines[0]


@pytest.mark.parametrize(
    ("pip", "archive", "status"), [("exit 0", True, 0), ("exit 3", True, 3), ("exit 0", False, 2)]
)
def test_what_installs_on_a_host_ends_as_its_steps_do(
    stubs, checkout, tmp_path, pip, archive, status
):
    dry = stubs.run("tpu_vm.sh", *TPU, "--dry_run", *TRAIN)
    install = next(line for line in dry.stdout.splitlines() if "apt-get" in line)
    (command,) = [word for word in bash_words(install) if word.startswith("--command=")]
    home = tmp_path / "home"
    environment(home / "taser_jax", python=pip, pip="")
    # A host's own interpreter, for what is not found there.
    (home / "bin").mkdir()
    (home / "bin" / "python3.11").symlink_to(sys.executable)
    if archive:
        names = ["launch", "setup.py", "pyproject.toml"]
        subprocess.run(["tar", "-czf", home / "taser_jax.tgz", *names], cwd=checkout, check=True)
    found = subprocess.run(
        ["bash", "-c", command.removeprefix("--command=")],
        env=os.environ | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert found.returncode == status, found.stderr
    # What failed is what is told.
    assert "_environment.sh" not in found.stderr


def bash_words(line: str) -> list[str]:
    """The words of a line that bash quoted."""
    script = f"printf '%s\\0' {line}"
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return printed.stdout.split("\0")[:-1]


def test_an_environment_without_pip_is_made_again(checkout, tmp_path):
    environment(checkout, python="exit 0")
    made = tmp_path / "python3.11"
    made.write_text('#!/bin/sh\ncase "$*" in "-m venv "*) echo made; echo >.venv/bin/pip;; esac\n')
    made.chmod(0o755)
    script = f". {shlex.quote(str(checkout))}/launch/_environment.sh; use_environment ''"
    command = ["bash", "-ec", script]
    found = subprocess.run(
        command, env=os.environ | {"PYTHON": str(made)}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0] == "made"
