"""Benchmarks' scripts as modules, or run with a stand-in for `taser` that checks its commands."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence

import numpy as np

from taser_jax.cli import configuration
from taser_jax.cli import main as cli
from taser_jax.evaluation import results
from taser_jax.evaluation.metrics import Evaluation
from taser_jax.systems.muf.tables import write_row

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"
# The programs of this Python first.
PATH = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# Notes its arguments, then does what the test has it do.
_STAND_IN = """#!{python} -S
import json, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
{body}
"""


# For the bodies of stand-ins: a command's flags, and results as `taser evaluate` leaves them.
RESULTS = """
import os, re
flags = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)
flag = lambda name: flags["--gin." + name]

def write(out, system, split, tasks, measures):
    means = {name: sum(values) / len(values) for name, values in measures.items()}
    figures = {"metrics": means, "num_queries": 4}
    result = {"system": system, "tasks": dict.fromkeys(tasks, figures), "parameters": None,
              "fingerprint": "", "details": {}, "format_version": VERSION}
    for folder in ("results", "per_query"):
        os.makedirs(out + "/" + folder, exist_ok=True)
    with open(out + "/results/" + system.replace(" ", "_") + ".json", "w") as file:
        json.dump(result, file)
    for task in tasks:
        name = (system + "." + task + "." + split + ".csv").replace(" ", "_")
        with open(out + "/per_query/" + name, "w") as file:
            file.write(",".join(["query_id", *measures]) + "\\n")
            for number, values in enumerate(zip(*measures.values())):
                file.write(",".join(map(str, [f"q{number}", *values])) + "\\n")
""".replace("VERSION", str(results.FORMAT_VERSION))


def write_hits(
    directory: pathlib.Path,
    system: str,
    hits: Mapping[str, float],
    *,
    measures: Sequence[str] = ("nDCG@10",),
    parameters: int | None = None,
) -> None:
    """A row by query and its results: of ten queries of each task the first so many have a hit."""
    ids = tuple(f"q{number}" for number in range(10))
    tasks = {
        task: Evaluation(ids, dict.fromkeys(measures, (np.arange(10) < count).astype(np.float64)))
        for task, count in hits.items()
    }
    row = results.SystemResult(system, {}, parameters=parameters)
    write_row(directory, system, tasks, split="test", evaluated=row)


def load_script(script: str) -> types.ModuleType:
    """A script, by its path in benchmarks/, as a module; it may import those beside it by name."""
    for folder in (BENCHMARKS, (BENCHMARKS / script).parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    name = f"benchmark_{script.removesuffix('.py').replace('/', '_')}"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / script)
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
    calls, taser = folder / "calls", folder / "bin" / "taser"
    calls.write_text("")
    taser.parent.mkdir(exist_ok=True)
    taser.write_text(_STAND_IN.format(python=sys.executable, calls=str(calls), body=body))
    taser.chmod(0o755)
    path = f"{taser.parent}{os.pathsep}{PATH}"
    ran = run_for_real(script, *arguments, **{"PATH": path, "PYTHONPATH": str(REPOSITORY)} | env)
    given = [json.loads(line) for line in calls.read_text().splitlines()]
    for words in given:
        check_options(words)
    return [" ".join(words) for words in given], ran.stdout


def run_for_real(
    script: str, *arguments: str | os.PathLike[str], **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script that must succeed, by its path in the repository."""
    ran = subprocess.run(
        [REPOSITORY / script, *arguments],
        env=os.environ | {"PATH": PATH} | env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def run_python(script: str, *arguments: str | os.PathLike[str], **env: str) -> str:
    """What a program that must succeed prints, by its path in benchmarks/."""
    command = [sys.executable, BENCHMARKS / script, *arguments]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | env)
    return ran.stdout


def value(call: str, name: str) -> str:
    """Of a binding in a command that `run_script` returned, as given."""
    return call.split(f"--gin.{name}=")[1].split()[0]


def check_options(words: list[str]) -> None:
    """Resolves a command's configuration: every Gin file, macro and parameter is one it has."""
    arguments = cli.parse(words)
    configuration.resolve_command(arguments.command, arguments.flags)
