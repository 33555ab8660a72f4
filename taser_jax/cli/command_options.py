"""What can be set for a command: names, defaults and meanings, from Gin files and docstrings."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import inspect
import os
import pathlib
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence

from taser_jax.cli.command_table import COMMANDS, configurables_of, load
from taser_jax.cli.gin_files import FILLED_IN, find_gin_file, gin_directory
from taser_jax.storage.publishing import cache_folder

_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Option:
    """What to write after `--gin.`.

    Attributes:
        name: a macro of the command's Gin file, or `function.parameter`.
        default: as Gin text; None where one is required.
        parameter: what a macro sets, as `Owner.parameter`; empty where nothing of the command's.
        meaning: from the docstring.
    """

    name: str
    default: str | None
    parameter: str
    meaning: str


def options(
    gin_file: str, function: Callable[..., object], configurables: Collection[Callable[..., object]]
) -> list[Option]:
    """The macros of a command's Gin file, then parameters that the file does not bind.

    Args:
        gin_file: a packaged file.
        function: the command's.
        configurables: what its bindings may refer to.
    """
    about = {function.__name__: entries(inspect.getdoc(function) or "", "Args")}
    about |= {c.__name__: entries(inspect.getdoc(c) or "", "Attributes") for c in configurables}
    explained = []
    for name, (value, parameter) in _macros(gin_file).items():
        owner, _, field = parameter.rpartition(".")
        default = None if value == "%gin.REQUIRED" else value
        explained.append(Option(name, default, parameter, about.get(owner, {}).get(field, "")))
    bound = dict(bindings(gin_file))
    for field, described in inspect.signature(function).parameters.items():
        full = f"{function.__name__}.{field}"
        if full not in bound and field not in FILLED_IN:
            meaning = about[function.__name__].get(field, "")
            explained.append(Option(full, shown_default(described.default), full, meaning))
    return explained


def _macros(gin_file: str) -> dict[str, tuple[str, str]]:
    """Macro -> (its value, what it sets first), of a Gin file and of those it includes."""
    values: dict[str, str] = {}
    targets: dict[str, str] = {}
    for left, right in bindings(gin_file):
        if left.isupper():
            values[left] = right
        elif right.startswith("%") and right != "%gin.REQUIRED":
            targets.setdefault(right[1:], left)
    # A macro that is only a part of another value is set for that value's sake.
    return {name: (value, targets.get(name, "")) for name, value in values.items()}


def bindings(gin_file: str) -> Iterator[tuple[str, str]]:
    """(name, value as text) of a packaged Gin file's bindings, and of those it includes."""
    pending = ""
    for line in read(gin_file).splitlines():
        line = line.split(" #")[0].rstrip() if not line.startswith("#") else ""
        if line.startswith("include "):
            yield from bindings(line.split(" ", 1)[1].strip("'\""))
            continue
        pending += line.strip() + (" " if line.endswith(",") else "")
        closed = all(pending.count(a) == pending.count(b) for a, b in ("()", "[]", "{}"))
        if pending and closed:
            left, _, right = pending.partition("=")
            yield left.strip(), re.sub(r", ?([\])}])", r"\1", right.strip())
            pending = ""


def read(gin_file: str) -> str:
    """The text of a packaged Gin file."""
    return (gin_directory() / gin_file).read_text(encoding="utf-8")


def entries(doc: str, section: str) -> dict[str, str]:
    """`name: text` entries of a section of a Google docstring."""
    text = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    meanings: dict[str, str] = {}
    name = ""
    for line in text.group(1).splitlines() if text else ():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start.group(1)
            meanings[name] = start.group(2)
        elif name and line.strip():
            meanings[name] += " " + line.strip()
    return meanings


def description(doc: str) -> str:
    """A docstring up to its first section."""
    head = re.split(r"\n(?=(?:Args|Attributes|Example|Returns|Raises|Yields|Source):)", doc)[0]
    return head.strip()


def shown_default(value: object) -> str | None:
    """A default as text; None where one is required."""
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, enum.Enum):
        return str(value.value)
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)


def packaged() -> list[str]:
    """Names of all packaged Gin files."""
    folder = gin_directory()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gin"))


def first_comment(text: str) -> str:
    """The first sentence of a Gin file's first comment; empty without one."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return re.split(r"(?<=[.;])\s", " ".join(lines), maxsplit=1)[0].rstrip(".;:")


def command_help(name: str) -> str:
    """`help_text` of a command, from the user's cache where the sources have not changed since.

    Making it imports the command with its libraries, which takes seconds.
    """
    package = pathlib.Path(__file__).parents[1]
    sources = sorted([*package.rglob("*.py"), *gin_directory().rglob("*.gin")])
    times = "".join(f"{path} {path.stat().st_mtime_ns}\n" for path in sources)
    version = hashlib.sha256(times.encode()).hexdigest()
    file = cache_folder("help", f"{name}.txt")
    # A home directory may be missing, full or read-only.
    with contextlib.suppress(OSError):
        of_version, _, text = file.read_text(encoding="utf-8").partition("\n")
        if of_version == version:
            return text
    text = help_text(name)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(f"{version}\n{text}", encoding="utf-8")
        scratch.replace(file)
    return text


def help_text(name: str) -> str:
    """What a command does, and all that can be set for it."""
    command, function, configurables = COMMANDS[name], load(name), configurables_of(name)
    words = command.argument.rpartition(".")[2].upper() if command.argument else ""
    words = f" [{words}]" if command.optional else f" {words}" if words else ""
    about = description(inspect.getdoc(function) or "")
    usage = f"usage: taser {name}{words} [flags]"
    parts = [f"{usage}\n\ntaser {name}: {command.summary}\n\n{about}\n"]
    if command.flags:
        parts.append("".join(f"  {flag}=VALUE  sets {m}\n" for flag, m in command.flags.items()))
    if explained := "".join(map(_explained, options(command.gin_file, function, configurables))):
        parts.append("After --gin. (in capitals: also a line of a Gin file), with the default:\n")
        parts.append(explained)
    if objects := sorted(target.__name__ for target in configurables):
        text = (
            "Objects, set as --gin.NAME.FIELD=VALUE (`python docs/generate_commands.py` writes a "
            f"page of all fields): {', '.join(objects)}."
        )
        parts.append(textwrap.fill(text, _WIDTH) + "\n")
    parts.append(
        f"Without --gin_file it reads {' and then '.join(command.gin_files())}. "
        "`taser --show_gin` lists all Gin files, `taser --show_gin FILE` prints one."
    )
    return "\n".join(parts)


def _explained(option: Option) -> str:
    default = "required" if option.default is None else option.default
    sets = f" ({option.parameter})" if option.parameter not in ("", option.name) else ""
    meaning = textwrap.fill(
        f"{option.meaning}{sets}".strip(), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
    )
    return f"  {option.name} = {default}\n" + (meaning + "\n" if meaning else "")


def listed(names: Sequence[str]) -> str:
    """Gin files with their first comments, as indented lines."""
    width = max(map(len, names), default=0)
    comments = (first_comment(find_gin_file(name).read_text(encoding="utf-8")) for name in names)
    return "".join(
        f"  {name:<{width}}  {textwrap.shorten(comment, _WIDTH - width - 4, placeholder=' …')}\n"
        for name, comment in zip(names, comments, strict=True)
    )


def show_gin(file: str | None = None) -> None:
    """Prints a Gin file, or lists those at hand with what they are for.

    Args:
        file: a packaged file, such as models/taser.gin, or one of the working directory; None lists
            all of both.

    Raises:
        ConfigError: no such file; suggests the nearest.
    """
    if file is not None:
        print(find_gin_file(file).read_text(encoding="utf-8"), end="")
        return
    here = sorted(path.name for path in pathlib.Path().glob("*.gin"))
    print(listed([*here, *packaged()]), end="")
