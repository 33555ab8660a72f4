"""What runs on a host: launch/_host.sh, what installs there, and launch/local.sh."""

import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from launch_stubs import LAUNCH, STAYS, TPU, TRAIN, program

pytestmark = pytest.mark.slow


def host(tmp_path, text: str, *words: str) -> subprocess.Popen[str]:
    """Starts _host.sh in a checkout whose taser is a small program."""
    (tmp_path / "launch").mkdir(exist_ok=True)
    for name in ("_host.sh", "_task.sh"):
        shutil.copy(LAUNCH / name, tmp_path / "launch")
    taser = program(tmp_path / "taser", text)
    return subprocess.Popen(
        [
            # A test run that ignores hang-ups (under nohup) must not hand that on.
            *("env", "--default-signal=HUP"),
            *("bash", str(tmp_path / "launch" / "_host.sh"), *(words or ("train", "a b"))),
        ],
        env=os.environ | {"TASER": taser},
        stdout=subprocess.PIPE,
        text=True,
        # As sshd starts it.
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, int]:
    """What it printed, and its status."""
    output, _ = process.communicate(timeout=120)
    return output, process.returncode


def test_a_host_reports_its_status(tmp_path):
    output, status = ended(host(tmp_path, 'printf "%s|" "$@"; exit 75'))
    assert status == 75
    assert output.startswith("train|a b|--multihost|")
    assert "taser-status 75 on " in output


def test_a_host_that_must_stop_lets_taser_save(tmp_path):
    """Its connection ends it, or a second one that is made for it."""
    for ended_from_outside in (False, True):
        process = host(tmp_path, STAYS)
        assert process.stdout.readline() == "ready\n"
        if ended_from_outside:
            assert ended(host(tmp_path, STAYS, "--end"))[1] == 0
        else:
            process.terminate()
        output, status = ended(process)
        assert (output.splitlines()[0], status) == ("saved", 75)


def test_what_an_earlier_attempt_left_is_ended_first(tmp_path):
    left = host(tmp_path, STAYS)
    assert left.stdout.readline() == "ready\n"
    # Its connection is lost; taser goes on.
    left.kill()
    left.wait()
    output, status = ended(host(tmp_path, "exit 0"))
    assert status == 0
    assert "of an earlier attempt" in output
    assert left.stdout.read().startswith("saved\ntaser-status 75 on ")


GOES_ON = "echo ready; until [ -e more ]; do sleep 0.1; done; echo more; exit 3"


def test_a_command_goes_on_without_its_connection_and_is_followed_again(tmp_path):
    cut_off = host(tmp_path, GOES_ON)
    assert cut_off.stdout.readline() == "ready\n"
    # What the connection's end does to all that runs in it.
    os.killpg(cut_off.pid, signal.SIGHUP)
    cut_off.communicate(timeout=120)
    again = host(tmp_path, GOES_ON, "--attach")
    assert again.stdout.readline() == "ready\n"
    (tmp_path / "more").touch()
    output, status = ended(again)
    assert status == 3
    assert output.startswith("more\ntaser-status 3 on ")
    # What has ended says so once more.
    output, status = ended(host(tmp_path, GOES_ON, "--attach"))
    assert (output.splitlines()[:2], status) == (["ready", "more"], 3)


def test_a_host_that_was_started_anew_is_a_lost_one(tmp_path):
    """The process is gone and has left no status; or nothing was ever started."""
    output, _ = ended(host(tmp_path, "exit 0", "--attach"))
    assert "no command was started" in output
    assert "taser-status 75 on " in output
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / ".taser.pid").write_text(f"{gone.pid}\n")
    (tmp_path / "taser.log").write_text("loss 1.0\n")
    output, status = ended(host(tmp_path, "exit 0", "--attach"))
    assert (output.splitlines()[0], status) == ("loss 1.0", 75)


def test_a_host_with_a_full_disk_says_so(tmp_path):
    (tmp_path / ".taser.pid.new").symlink_to("/dev/full")
    printed, status = ended(host(tmp_path, "sleep 100"))
    assert status == 2
    assert f"error: {tmp_path}: no file can be written; free some space" in printed
    assert "taser-status 2 on " in printed


def bash(
    *words: str | pathlib.Path, cwd: pathlib.Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs it with some environment variables set."""
    env = os.environ | env
    return subprocess.run(["bash", *words], cwd=cwd, env=env, capture_output=True, text=True)


def environment(checkout: pathlib.Path, **programs: str) -> pathlib.Path:
    """Puts small programs into a checkout's environment."""
    folder = checkout / ".venv" / "bin"
    for name, text in programs.items():
        program(folder / name, text)
    return folder


def test_local_runs_in_the_checkout_wherever_it_is_called(stubs, checkout, tmp_path):
    told = 'for word; do printf "%s|" "$word"; done; pwd'
    environment(checkout, python="exit 0", pip="", taser=told)
    caller = {"cwd": tmp_path, "env": os.environ | {"PYTHON": sys.executable}}
    completed = stubs.run("local.sh", "--directory=my dir", checkout=checkout, **caller)
    lines = [line for line in completed.stdout.splitlines() if "|" in line]
    assert len(lines) == 3
    assert {line.split("|")[-1] for line in lines} == {str(checkout)}
    assert "|--gin.DATA_DIR=my dir/data|" in lines[0]


@pytest.mark.parametrize(
    ("uv", "archive", "status"), [("exit 0", True, 0), ("exit 3", True, 3), ("exit 0", False, 2)]
)
def test_what_installs_on_a_host_ends_as_its_steps_do(
    stubs, checkout, tmp_path, uv, archive, status
):
    dry = stubs.run("tpu_vm.sh", *TPU, "--dry_run", *TRAIN)
    install = next(line for line in dry.stdout.splitlines() if "_install.sh" in line)
    (shell,) = [word for word in shlex.split(install) if word.startswith("--command=")]
    home = tmp_path / "home"
    asked = f'echo "$*" >>{home}/asked; mkdir -p .venv'
    program(home / ".local" / "bin" / "uv", f"{asked}\n{uv}")

    def send() -> None:
        command = ["tar", "-czf", home / "taser_jax.tgz", "launch", "setup.py", "pyproject.toml"]
        subprocess.run(command, cwd=checkout, check=True)

    def run() -> int:
        command = shell.removeprefix("--command=")
        return bash("-c", command, cwd=home, HOME=str(home)).returncode

    if archive:
        send()
    assert run() == status
    if status == 0:
        # The locked versions first; a second start finds them.
        assert run() == 0
        made, locked, package = (home / "asked").read_text().splitlines()
        assert "venv --quiet --clear --python 3.12 .venv" in made
        assert "--require-hashes -r launch/requirements-tpu.txt" in locked
        assert "--no-deps --no-build-isolation --editable ." in package
        # Other versions are installed again.
        (checkout / "setup.py").write_text("other")
        send()
        assert run() == 0
        assert len((home / "asked").read_text().splitlines()) == 6


def test_a_host_without_uv_installs_one_version_of_it(checkout, tmp_path):
    program(tmp_path / "bin" / "python3", 'echo "$*"; exit 4')
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    completed = bash(checkout / "launch" / "_install.sh", HOME=str(tmp_path), PATH=path)
    assert completed.returncode == 4
    assert completed.stdout.startswith("-m pip install --quiet --user uv==")


MAKES_ONE = 'case "$*" in "-m venv "*) echo made; echo >.venv/bin/pip;; esac'


def use_environment(
    checkout: pathlib.Path, folder: pathlib.Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What the launchers' shells do first, with the programs of a folder before all others."""
    script = f". {shlex.quote(str(checkout))}/launch/_environment.sh; use_environment ''"
    path = f"{folder}:{os.environ['PATH']}"
    return bash("-ec", script, **{"PATH": path, "PYTHON": ""} | variables)


@pytest.mark.parametrize("failing", ["upgrade pip", "editable"])
def test_an_installation_that_fails_is_not_taken_for_one(stubs, checkout, failing):
    """As launch/hosts.sh runs it over ssh, where no `set -e` ends the shell."""
    folder = environment(checkout, python=f'case "$*" in *"{failing}"*) exit 3;; esac', pip="")
    dry = stubs.run("hosts.sh", "--hosts=a", "--extra=cuda", "--dry_run", *TRAIN)
    install = next(line for line in dry.stdout.splitlines() if "use_environment" in line)
    command = shlex.split(install)[-1].rpartition("cd taser_jax && ")[2]
    for _ in range(2):
        assert bash("-c", command, cwd=checkout, PYTHON=sys.executable).returncode == 3
    assert not list(folder.parent.glob("installed*"))


def test_a_command_that_starts_no_interpreter_is_passed_over(checkout, tmp_path):
    """As pyenv's commands are for versions that are installed but not chosen."""
    environment(checkout, python="exit 0")
    program(tmp_path / "python3.12", 'echo "not chosen" >&2; exit 127')
    program(tmp_path / "python3.11", MAKES_ONE)
    completed = use_environment(checkout, tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[0] == "made"


@pytest.mark.parametrize("version", ["3.10", "3.15"])
def test_a_python_that_is_too_old_or_too_new_is_refused(checkout, tmp_path, version):
    """Of the given version by its own word, and to the script that asks it."""
    major, minor = version.split(".")
    python = program(
        tmp_path / "python3",
        f'[ "$1" = --version ] && echo "Python {version}.0" && exit\n'
        f'exec {sys.executable} -c "import sys; sys.version_info = ({major}, {minor}, 0); $2"',
    )
    completed = use_environment(checkout, tmp_path, PYTHON=python)
    assert completed.returncode == 2
    assert f"Python {version}.0 found; Python 3.11 to 3.14 is needed" in completed.stderr
    assert "PYTHON=/path/to/python3.12" in completed.stderr
