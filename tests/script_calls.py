"""Benchmarks' scripts as modules, or run with a stand-in for `taser` that checks its commands."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

from taser_jax.cli import configuration
from taser_jax.cli import main as cli

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"
# Notes its arguments, then does what the test has it do.
_STAND_IN = """#!{python} -S
import json, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
{body}
"""


def load_script(script: str) -> types.ModuleType:
    """A script, by its path in benchmarks/, as a module; it may import those beside it by name."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    name = f"benchmark_{script.removesuffix('.py').replace('/', '_')}"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


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
