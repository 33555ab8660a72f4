"""Writes docs/commands.md from the commands' docstrings and default Gin files.

    python docs/generate_commands.py

`docs/build.sh` does so for the site; the file is not in the repository.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pathlib
import re
import typing
from collections.abc import Callable
from typing import Any

from taser_jax.cli import command_line, command_table
from taser_jax.cli.command_line import description, entries, options, shown_default
from taser_jax.cli.gin_files import read
from taser_jax.storage.typed_files import is_enum

PATH = pathlib.Path(__file__).resolve().parent / "commands.md"
HEAD = f"""\
# Commands

<!-- Written by docs/generate_commands.py from docstrings and Gin files: edit those. -->

Every command is one function whose arguments are set by Gin files and `--gin.NAME=VALUE`. How that
works is in [configuration.md](configuration.md). `taser <command> --help` prints what is below
of one command, and `taser --show_gin FILE` a Gin file.

```
{command_line.usage()}```

A command ends with status 0 when it has finished, 2 for a problem whose fix its message names, 75
when SIGTERM preempted it (rerun the command to resume), 134 when another of several hosts is lost
(rerun it on all), and 130 for Ctrl-C.

Below, **Option** is what to write after `--gin.`; options that are **required** have no default.
Options in capitals are macros of the command's default Gin file; options with a dot are parameters
of its function. Everything else that a command takes is a field of an [object](#objects), set by
its full name, for example `--gin.EncodeConfig.length_multiple=16`.
"""


def main() -> None:
    """Writes the page."""
    PATH.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    objects: dict[str, Any] = {}
    for name, command in command_table.COMMANDS.items():
        configurables = command_table.configurables_of(name)
        parts.append(_command(name, command, command_table.load(name), configurables))
        for configurable in configurables:
            objects[configurable.__name__] = configurable
    parts.append("## Objects\n\nWhat options may refer to, with the fields that Gin can set.\n")
    parts += [_object(objects[name]) for name in sorted(objects)]
    return "\n".join(parts)


def _command(
    name: str, command: command_table.Command, function: Callable[..., Any], configurables: Any
) -> str:
    lines = [f"## taser {name}\n", description(inspect.getdoc(function) or ""), ""]
    lines += [f"Gin file: `{command.gin_file}`\n", *_notes(command.gin_file)]
    lines += ["| Option | Default | What it is |", "|---|---|---|"]
    for option in options(command.gin_file, function, configurables):
        shown = f" (`{option.parameter}`)" if option.parameter not in ("", option.name) else ""
        meaning = _cell(option.meaning)
        lines.append(f"| `{option.name}` | {_default(option.default)} | {meaning}{shown} |")
    if configurables:
        links = sorted(f"[{c.__name__}](#{c.__name__.lower()})" for c in configurables)
        lines += ["", f"Objects: {', '.join(links)}."]
    return "\n".join(lines) + "\n"


def _object(target: Any) -> str:
    """A dataclass with its fields, or a function that makes one with its parameters."""
    doc = inspect.getdoc(target) or ""
    meanings = entries(doc, "Args")
    # A class describes its own fields; those that it inherits are described where they come from.
    for part in reversed(inspect.getmro(target) if inspect.isclass(target) else ()):
        meanings |= entries(inspect.cleandoc(part.__doc__ or ""), "Attributes")
    hints = typing.get_type_hints(target)
    lines = [f"### {target.__name__}\n", description(doc), ""]
    lines += ["| Field | Default | What it is |", "|---|---|---|"]
    if dataclasses.is_dataclass(target):
        defaults = {f.name: _field_value(f) for f in dataclasses.fields(target)}
    else:
        defaults = {p.name: p.default for p in inspect.signature(target).parameters.values()}
    for name, default in defaults.items():
        choices = _choices(hints[name])
        meaning = _cell(meanings.get(name, "")) + (f" One of {choices}." if choices else "")
        lines.append(f"| `{name}` | {_default(shown_default(default))} | {meaning.strip()} |")
    for choice in dict.fromkeys(filter(None, (_enum(hints[name]) for name in defaults))):
        lines += ["", f"`{choice.__name__}`: " + " ".join((inspect.getdoc(choice) or "").split())]
    return "\n".join(lines) + "\n"


def _notes(gin_file: str) -> list[str]:
    """The comment at the top of a Gin file, as paragraphs."""
    comment = []
    for line in read(gin_file).splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    paragraphs = re.split(r"\n{2,}", "\n".join(comment))
    # Which options are required is in the table.
    return [f"{p}\n" for p in paragraphs if not p.startswith("Required:")]


def _enum(hint: Any) -> type[enum.Enum] | None:
    for option in typing.get_args(hint) or (hint,):
        if is_enum(option):
            return option
    return None


def _choices(hint: Any) -> str:
    choice = _enum(hint)
    return ", ".join(f"`{member.value}`" for member in choice) if choice else ""


def _field_value(field: dataclasses.Field[Any]) -> Any:
    """A field's default; `inspect.Parameter.empty` where it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty


def _default(text: str | None) -> str:
    return "**required**" if text is None else f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
