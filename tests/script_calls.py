"""Scripts run with a stand-in for `taser`: what commands they give, checked as `taser` would."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from taser_jax.cli import configuration
from taser_jax.cli import main as cli

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
# Notes its arguments, then does what the test has it do.
_STAND_IN = """#!{python} -S
import json, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
{body}
"""


def run_script(
    script: str,
    *arguments: str | os.PathLike[str],
    folder: pathlib.Path,
    body: str = "",
    **env: str,
) -> tuple[list[str], str]:
    """Runs a script that must succeed.

    Args:
        script: its path in the repository.
        arguments: of the script.
        folder: for the stand-in and its notes.
        body: Python that the stand-in runs, with `sys.argv` as `taser` gets it.
        env: environment variables.

    Returns:
        The commands' arguments, joined by spaces, and what the script printed.
    """
    calls = folder / "calls"
    calls.write_text("")
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    taser = binaries / "taser"
    taser.write_text(_STAND_IN.format(python=sys.executable, calls=str(calls), body=body))
    taser.chmod(0o755)
    path = os.pathsep.join(
        [str(binaries), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    )
    ran = subprocess.run(
        [REPOSITORY / script, *arguments],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY)} | env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    given = [json.loads(line) for line in calls.read_text().splitlines()]
    for words in given:
        check_options(words)
    return [" ".join(words) for words in given], ran.stdout


def check_options(words: list[str]) -> None:
    """Resolves a command's configuration: every Gin file, macro and parameter is one it has."""
    arguments = cli.parse(words)
    configuration.resolve_command(arguments.command, arguments.flags)
