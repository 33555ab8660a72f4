"""Writes docs/commands.md from the commands' docstrings and default Gin files.

    python docs/generate_commands.py

`tests/test_docs.py` fails while the file is not what this would write.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pathlib
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

from taser_jax import command_line, gin_files

PATH = pathlib.Path(__file__).resolve().parent / "commands.md"
# Parameters that the command line fills in.
_NOT_OPTIONS = ("config_text", "dry_run")
HEAD = f"""\
# Commands

<!-- Written by docs/generate_commands.py from docstrings and Gin files: edit those. -->

Every command is one function whose arguments are set by Gin files and `--gin.NAME=VALUE`. How that
works is in [configuration.md](configuration.md). `taser <command> --help` prints the docstring and
the Gin file that a command reads.

```
{command_line.usage()}```

A command ends with status 0 when it has finished, 2 for a problem whose fix its message names, 75
when SIGTERM preempted it (rerun the command to resume), and 130 for Ctrl-C.

Below, **Option** is what to write after `--gin.`; options that are **required** have no default.
Options in capitals are macros of the command's default Gin file; options with a dot are parameters
of its function. Everything else that a command takes is a field of an [object](#objects), set by
its full name, for example `--gin.EncodeConfig.length_multiple=16`.
"""


@dataclasses.dataclass(frozen=True)
class Option:
    """One macro of a Gin file.

    Attributes:
        name: the macro.
        value: its default as Gin text.
        parameter: what it sets, as `Owner.parameter`; empty where nothing of the command's.
    """

    name: str
    value: str
    parameter: str


def main() -> None:
    """Writes the page."""
    PATH.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    objects: dict[str, Any] = {}
    for name, command in command_line.COMMANDS.items():
        module = importlib.import_module(f"taser_jax.{command.module}")
        function = getattr(module, command.function)
        parts.append(_command(name, command, function, module.CONFIGURABLES))
        for configurable in module.CONFIGURABLES:
            objects[configurable.__name__] = configurable
    parts.append("## Objects\n\nWhat options may refer to, with the fields that Gin can set.\n")
    parts += [_object(objects[name]) for name in sorted(objects)]
    return "\n".join(parts)


def _command(
    name: str, command: command_line.Command, function: Callable[..., Any], configurables: Any
) -> str:
    doc = inspect.getdoc(function) or ""
    about = {function.__name__: _entries(doc, "Args")}
    about |= {c.__name__: _entries(inspect.getdoc(c) or "", "Attributes") for c in configurables}
    lines = [f"## taser {name}\n", _description(doc), ""]
    lines += [f"Gin file: `{command.gin_file}`\n", *_notes(command.gin_file)]
    lines += ["| Option | Default | What it is |", "|---|---|---|"]
    for option in options(command.gin_file):
        owner, _, parameter = option.parameter.rpartition(".")
        meaning = about.get(owner, {}).get(parameter, "")
        shown = f" (`{option.parameter}`)" if option.parameter else ""
        lines.append(f"| `{option.name}` | {_default(option.value)} | {_cell(meaning)}{shown} |")
    bound = dict(_bindings(command.gin_file))
    for parameter, described in inspect.signature(function).parameters.items():
        full = f"{function.__name__}.{parameter}"
        if full not in bound and parameter not in _NOT_OPTIONS:
            meaning = about[function.__name__].get(parameter, "")
            lines.append(f"| `{full}` | {_field_default(described.default)} | {_cell(meaning)} |")
    if configurables:
        links = sorted(f"[{c.__name__}](#{c.__name__.lower()})" for c in configurables)
        lines += ["", f"Objects: {', '.join(links)}."]
    return "\n".join(lines) + "\n"


def _object(target: Any) -> str:
    """A dataclass with its fields, or a function that makes one with its parameters."""
    doc = inspect.getdoc(target) or ""
    meanings = _entries(doc, "Args")
    # A class describes its own fields; those that it inherits are described where they come from.
    for part in reversed(inspect.getmro(target) if inspect.isclass(target) else ()):
        meanings |= _entries(inspect.cleandoc(part.__doc__ or ""), "Attributes")
    hints = typing.get_type_hints(target)
    lines = [f"### {target.__name__}\n", _description(doc), ""]
    lines += ["| Field | Default | What it is |", "|---|---|---|"]
    if dataclasses.is_dataclass(target):
        defaults = {f.name: _field_value(f) for f in dataclasses.fields(target)}
    else:
        defaults = {p.name: p.default for p in inspect.signature(target).parameters.values()}
    for name, default in defaults.items():
        choices = _choices(hints[name])
        meaning = _cell(meanings.get(name, "")) + (f" One of {choices}." if choices else "")
        lines.append(f"| `{name}` | {_field_default(default)} | {meaning.strip()} |")
    for choice in dict.fromkeys(filter(None, (_enum(hints[name]) for name in defaults))):
        lines += ["", f"`{choice.__name__}`: " + " ".join((inspect.getdoc(choice) or "").split())]
    return "\n".join(lines) + "\n"


def options(gin_file: str) -> list[Option]:
    """Macros of a Gin file and of those it includes, in order, with what they set."""
    values: dict[str, str] = {}
    targets: dict[str, str] = {}
    for left, right in _bindings(gin_file):
        if left.isupper():
            values[left] = right
        elif right.startswith("%") and right != "%gin.REQUIRED":
            targets.setdefault(right[1:], left)
    # A macro that is only a part of another value is set for that value's sake.
    return [Option(name, value, targets.get(name, "")) for name, value in values.items()]


def _bindings(gin_file: str) -> Iterator[tuple[str, str]]:
    text = _read(gin_file)
    pending = ""
    for line in text.splitlines():
        line = line.split(" #")[0].rstrip() if not line.startswith("#") else ""
        if line.startswith("include "):
            yield from _bindings(line.split(" ", 1)[1].strip("'\""))
            continue
        pending += line.strip() + (" " if line.endswith(",") else "")
        closed = all(pending.count(a) == pending.count(b) for a, b in ("()", "[]", "{}"))
        if pending and closed:
            left, _, right = pending.partition("=")
            yield left.strip(), re.sub(r", ?([\])}])", r"\1", right.strip())
            pending = ""


def _notes(gin_file: str) -> list[str]:
    """The comment at the top of a Gin file, as paragraphs."""
    comment = []
    for line in _read(gin_file).splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    paragraphs = re.split(r"\n{2,}", "\n".join(comment))
    # Which options are required is in the table.
    return [f"{p}\n" for p in paragraphs if not p.startswith("Required:")]


def _read(gin_file: str) -> str:
    return (gin_files.gin_directory() / gin_file).read_text(encoding="utf-8")


def _description(doc: str) -> str:
    """A docstring up to its first section."""
    kept = re.split(r"\n(?=(?:Args|Attributes|Example|Returns|Raises|Yields|Source):)", doc)[0]
    return kept.strip()


def _entries(doc: str, section: str) -> dict[str, str]:
    """`name: text` entries of a section of a Google docstring."""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    entries: dict[str, str] = {}
    name = ""
    for line in found.group(1).splitlines() if found else ():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start.group(1)
            entries[name] = start.group(2)
        elif name and line.strip():
            entries[name] += " " + line.strip()
    return entries


def _enum(hint: Any) -> type[enum.Enum] | None:
    for option in typing.get_args(hint) or (hint,):
        if inspect.isclass(option) and issubclass(option, enum.Enum):
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


def _field_default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "**required**"
    if isinstance(value, enum.Enum):
        return f"`{value.value}`"
    if dataclasses.is_dataclass(value):
        return f"`{type(value).__name__}()`"
    return f"`{_cell(repr(value))}`"


def _default(value: str) -> str:
    return "**required**" if value == "%gin.REQUIRED" else f"`{_cell(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
