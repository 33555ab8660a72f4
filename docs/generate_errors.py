"""Writes docs/errors.md by making slips and noting what the commands answer.

The slips are those of docs/slips.py and docs/file_slips.py.

    python docs/generate_errors.py [FILE]

`tests/test_docs.py` compares some of them with the page, and with --release all.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence

import slips
from file_slips import FILE_SLIPS
from slips import PREPARE, TOKENIZE, TRAIN, Slip, World, interrupt, write_files

from taser_jax.cli import main as cli

SLIPS = (*slips.SLIPS, *FILE_SLIPS)
PATH = pathlib.Path(__file__).resolve().parent / "errors.md"
HEAD = """\
# Errors

<!-- Written by docs/generate_errors.py, which makes each of these slips: edit those. -->

What common mistakes lead to. A message says what is wrong, where, and how to fix it; the command
ends with status 2 and leaves no half-written result. Mistakes in Gin files are in
[configuration.md](configuration.md#errors). Of several commands, the last one prints the message.
`faq.gin` sets the project's paths and a tiny model; `docs/slips.py` has it and the other files.
"""


class Worlds:
    """Directories to make slips in, each made once and copied.

    Args:
        root: where they are made.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root

    def answer(self, slip: Slip) -> str:
        """What the last of a slip's commands prints, in a directory of its own."""
        made = self._made(slip.world)
        with tempfile.TemporaryDirectory(dir=self._root) as name:
            directory = pathlib.Path(name)
            shutil.copytree(made, directory, dirs_exist_ok=True)
            slip.change(directory)
            with contextlib.chdir(directory):
                _succeed(slip.commands[:-1])
                return _answer(slip, str(directory.resolve()))

    @functools.cache  # noqa: B019  # lives as long as the page is being written
    def _made(self, world: World) -> pathlib.Path:
        directory = self._root / world.name.lower()
        if world is World.FILES:
            directory.mkdir(parents=True)
            write_files(directory)
            return directory
        shutil.copytree(self._made(World(world - 1)), directory)
        prepare = f"{PREPARE} --gin.VALIDATION_SHARE=0.2"
        steps = {World.TOKENS: [prepare, f"{TOKENIZE} --gin.VOCAB_SIZE=120"], World.MODEL: [TRAIN]}
        with contextlib.chdir(directory):
            _succeed(steps[world])
        return directory


def section(slip: Slip, worlds: Worlds) -> str:
    """The page's section about a slip."""
    typed = "\n".join(f"$ taser {_quoted(command)}" for command in slip.commands)
    return f"## {slip.title}\n\n```\n{typed}\n{worlds.answer(slip)}\n```\n"


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as root:
        worlds = Worlds(pathlib.Path(root))
        return "\n".join([HEAD, *(section(slip, worlds) for slip in SLIPS)])


def _succeed(commands: Sequence[str]) -> None:
    for command in commands:
        status, printed = _run(command)
        if status:
            raise RuntimeError(f"taser {command} ended with status {status}:\n{printed}")


def _answer(slip: Slip, directory: str) -> str:
    """The error, or the lines that the slip shows; without what differs from run to run."""
    status, printed = _run(slip.commands[-1], interrupted=slip.interrupted)
    lines = printed.splitlines()
    if slip.shows:
        if status:
            raise RuntimeError(f"status {status}:\n{printed}")
        lines = [line for line in lines if slip.shows in line]
    else:
        starts = [i for i, line in enumerate(lines) if re.match("error|interrupted", line)]
        if not status or not starts:
            raise RuntimeError(f"no error, status {status}:\n{printed}")
        lines = lines[starts[-1] :]
    text = "\n".join(line.rstrip() for line in lines)
    text = re.sub(r"\b[0-9a-f]{16}\b", "0123456789abcdef", text)
    text = re.sub(r"\bin \d+ s\b", "in 1 s", text)
    return text.replace(f"{directory}/", "").replace(directory, ".")


def _quoted(command: str) -> str:
    """The command as a shell takes it: quotes inside of braces are part of a value."""
    return re.sub(r"(\S*\{.*?\})", r'"\1"', command)


class _Interrupts(io.StringIO):
    """Ctrl-C, once the first step is validated."""

    def write(self, text: str) -> int:
        if "validation after step 1" in text:
            interrupt()
        return super().write(text)


def _run(command: str, *, interrupted: bool = False) -> tuple[int, str]:
    """Status and what a command writes to stderr."""
    errors = io.StringIO()
    printed = _Interrupts() if interrupted else io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed):
        status = cli.run(shlex.split(_quoted(command)))
    return status, errors.getvalue()


if __name__ == "__main__":
    pathlib.Path(*(sys.argv[1:] or [PATH])).write_text(page(), encoding="utf-8")
