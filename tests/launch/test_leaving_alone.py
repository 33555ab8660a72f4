"""A launcher that one can leave alone: lost connections, --attach, --env and --max_hours."""

import ast
import os
import pty
import shutil
import signal
import subprocess
import sys
import time

import _hosts
import pytest
from launch_stubs import LAUNCH, ONE, SEVERAL, TPU, TRAIN, attaches, finished, node, program

pytestmark = pytest.mark.slow

SKIP = ("--skip_install", "--retries=0")
HANGS = (" ssh ", "$ exec tail -f /dev/null", 0)


def ssh(stubs) -> list[list[str]]:
    return stubs.asked("tpu-vm", "ssh")


def test_a_real_host_goes_on_while_its_connection_is_lost(stubs):
    """The first connection is cut after a second; taser waits until the second one is made."""
    checkout = stubs.folder / "home" / "taser_jax"
    (checkout / "launch").mkdir(parents=True)
    for name in ("_host.sh", "_task.sh"):
        shutil.copy(LAUNCH / name, checkout / "launch")
    taser = 'echo "step 49 of $*"; until [ -e again ]; do sleep 0.1; done; echo step 51'
    program(checkout / ".venv" / "bin" / "taser", taser)
    program(
        stubs.folder / "bin" / "ssh",
        f"export PATH=/usr/bin:/bin; cd {stubs.folder}/home\n"
        'case "$*" in *--attach) touch taser_jax/again; exec bash -c "${@: -1}";;\n'
        '*_host.sh*) timeout --signal=HUP 1 bash -c "${@: -1}"; exit 255;; esac',
    )
    result = stubs.run("hosts.sh", "--hosts=a", *SKIP, "--", "train", "--gin.X=a b")
    lines = [line for line in result.stdout.splitlines() if line.startswith("step")]
    # What was shown before is shown again, so that nothing is missed.
    first = "step 49 of train --gin.X=a b --multihost"
    assert lines == [first, first, "step 51"]
    assert result.stderr.count("the connection to a was lost; the command goes on there") == 1
    assert stubs.sleeps == 1


@pytest.mark.parametrize(
    ("script", "options", "connections"),
    [("tpu_vm.sh", (), 1), ("tpu_multislice.sh", ("--slices=2",), 2)],
)
@pytest.mark.parametrize("status", [0, 1, 75])
def test_what_runs_is_followed_again(stubs, script, options, connections, status):
    stubs.answer(("_host.sh", finished(1, status), status))
    result = stubs.run(script, "--attach", "pod", "--zone=us-central2-b", *options, status=status)
    assert len(ssh(stubs)) == connections
    assert all(attaches(call) for call in ssh(stubs))
    # Nothing is installed, created or deleted.
    assert {call[3] for call in stubs.calls} == {"describe", "ssh"}
    assert "give --delete=success to delete it" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("others", [(), ("taser_jax-somebody",)])
def test_what_is_followed_again_is_deleted_on_request(stubs, others):
    stubs.answer(states=[node("READY", *others)])
    stubs.run("tpu_vm.sh", "--attach=pod", TPU[1], "--delete=success")
    assert len(stubs.asked("tpu-vm", "delete")) == (not others)


def test_nothing_to_follow(stubs):
    stubs.answer(states=["ABSENT"])
    result = stubs.run("tpu_vm.sh", "--attach=pod", TPU[1], status=75)
    assert "the hosts are not there" in result.stderr
    stubs.run("tpu_vm.sh", "--attach=pod", TPU[1], *TRAIN, status=2)
    result = stubs.run("tpu_vm.sh", "--attach", TPU[1], status=2)
    assert "--name is missing" in result.stderr


def test_variables_reach_hosts_and_no_dry_run(stubs, monkeypatch):
    monkeypatch.setenv("SECRET", "it's 1")
    options = (*SKIP, "--env=A=b c", "--env", "SECRET", "--env=EMPTY=")
    stubs.run("tpu_vm.sh", *TPU, *options, *TRAIN)
    command = ssh(stubs)[0][6].removeprefix("--command=")
    # The host's shell sets them for what follows.
    shell = command.partition("bash ")[0] + "env"
    told = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env={})
    assert {"A=b c", "SECRET=it's 1", "EMPTY="} <= set(told.stdout.splitlines())
    dry = stubs.run("tpu_vm.sh", "--dry_run", *TPU, *options, *TRAIN)
    assert "SECRET=..." in dry.stdout
    assert "it's" not in dry.stdout


@pytest.mark.parametrize(
    ("options", "last"),
    [
        (("--type=v4-32",), "TPU pod was deleted; nothing is billed any more"),
        (("--type=v4-32", "--delete=success"), "TPU pod was deleted; nothing is billed any more"),
        (("--type=v4-32", "--delete=never"), "billed until you delete it"),
        ((), "billed until you delete it"),
    ],
)
def test_a_run_that_hangs_is_ended_with_its_tpu(stubs, options, last):
    stubs.answer((" --end", "", 0), HANGS)
    begin = time.monotonic()
    options = (*options, *SKIP, "--max_hours=0.0005", "--", "train", "--gin.MODEL_DIR=model")
    result = stubs.run("tpu_vm.sh", *TPU, *options, status=124)
    assert time.monotonic() - begin > 0.0005 * 3600
    assert "_host.sh --end" in ssh(stubs)[-1][6]
    assert last in result.stderr.splitlines()[-1]
    assert len(stubs.asked("tpu-vm", "delete")) == ("was deleted" in last)


def test_a_host_that_does_not_answer_is_deleted_all_the_same(stubs, monkeypatch):
    monkeypatch.setattr(_hosts, "ENDING", 1)
    stubs.answer(HANGS)
    stubs.run(*ONE, *SKIP, "--max_hours=0.0005", *TRAIN, status=124)
    assert "_host.sh --end" in ssh(stubs)[-1][6]
    assert len(stubs.asked("tpu-vm", "delete")) == 1


def follows_until_told(stubs) -> None:
    """Makes a TPU whose command ends when there is a file `again`."""
    waiting = f"until [ -e {stubs.folder}/again ]; do :; done"
    stubs.answer((" ssh ", f"$ echo connected; {waiting}; echo taser-status 0 on a", 0))


def test_a_terminal_that_is_closed_does_not_prevent_the_deletion(stubs):
    follows_until_told(stubs)
    terminal, its_end = pty.openpty()
    launcher = subprocess.Popen(
        ["bash", str(LAUNCH / ONE[0]), *ONE[1:], *SKIP, "--delete=always", *TRAIN],
        **dict.fromkeys(("stdin", "stdout", "stderr"), its_end),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    os.close(its_end)
    told = b""
    while b"connected" not in told:
        told += os.read(terminal, 1000)
    os.close(terminal)
    # The kernel and the shell each send one, at any moment.
    for _ in range(50):
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.002)
    assert launcher.wait(timeout=60) == 128 + signal.SIGHUP
    assert len(stubs.asked("tpu-vm", "delete")) == 1


def test_under_nohup_a_closed_terminal_ends_nothing(stubs):
    follows_until_told(stubs)
    launcher = subprocess.Popen(
        ["nohup", "bash", str(LAUNCH / "tpu_vm.sh"), *TPU, *SKIP, *TRAIN],
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert "connected\n" in iter(launcher.stdout.readline, "")
        launcher.send_signal(signal.SIGHUP)
        (stubs.folder / "again").touch()
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert output.endswith("finished\n")


def test_the_end_of_waiting_for_capacity_is_max_hours_too(stubs):
    stubs.answer(("create", "ERROR: no more capacity", 1), states=["ABSENT"])
    program(stubs.folder / "bin" / "sleep", "exec tail -f /dev/null")
    command = (*ONE, "--skip_install", "--max_hours=0.0005", *TRAIN)
    with stubs.start(*command, start_new_session=True) as launcher:
        try:
            launcher.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise
    assert launcher.returncode == 124


PAID = ("--price_per_hour=36",)
STEPS = "training: 90 of 100, 00:05 left, 2.00step/s, loss=1"


@pytest.mark.parametrize(
    ("options", "line", "cost"),
    [
        # 1,000 steps take 500 s, and an hour costs 36 dollars.
        (PAID, STEPS, "$5.00 for 1,000 steps, at 2 steps"),
        (PAID, "90 of 100, 00:05 left,  4.00s/step, loss=1", "$40.00 for 1,000 steps, at 0.25"),
        (PAID, "training: 90 of 100, ?step/s", None),
        # Words of other programs.
        (PAID, "seconds etc. s/step", None),
        (PAID, "version 1.2.3 it/s\n2.00step/s", "$5.00 for 1,000 steps, at 2 steps"),
        # 4 chips at 4.20 dollars, but not of --spot.
        (("--type=v5p-8",), STEPS, "$2.33 for 1,000 steps"),
        (("--type=v5p-8", "--spot"), STEPS, None),
        (("--type=v5p-8", "--spot", *PAID), STEPS, "$5.00 for 1,000 steps"),
    ],
)
def test_the_price_of_a_thousand_steps_is_printed_at_the_end(stubs, options, line, cost):
    stubs.answer(("_host.sh", f"{line}\n{finished()}", 0))
    result = stubs.run("tpu_vm.sh", *TPU, *SKIP, *options, *TRAIN)
    if cost:
        assert f"cost: about {cost}" in result.stdout
    else:
        assert "1,000 steps" not in result.stdout


def test_slices_are_prepared_at_the_same_time(stubs):
    """Each waits for the other to have begun."""
    waiting = f"while [ $(ls {stubs.folder} | grep -c begun) != 2 ]; do :; done"
    stubs.answer(("mount", f"$ touch {stubs.folder}/begun-$5; {waiting}", 0))
    stubs.run(*SEVERAL, *SKIP, "--setup=mount x", *TRAIN)


def test_launchers_are_python_3_9_of_the_standard_library():
    names = {path.stem for path in LAUNCH.glob("*.py")}
    for path in LAUNCH.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))))
        modules = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        modules |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
        # Hosts run _fetch.py.
        if path.name != "_fetch.py":
            roots = {module.split(".")[0] for module in modules}
            assert roots <= sys.stdlib_module_names | names, path.name
