"""launch/_host.sh, which runs taser on each host of a pod, and what is installed there before."""

from __future__ import annotations

import os
import shutil
import subprocess

from launch_stubs import LAUNCH


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
