"""What a taser command writes, if all of it goes to buckets: then a TPU may be deleted after it."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The Gin file that `train` reads first, and the parameter that holds its output.
FIRST, OUTPUT = "runs/train.gin", "train.model_dir"
# A command line that names one of them expects results there.
ALWAYS_OUTPUTS = ("MODEL_DIR", "OUTPUT_DIR")
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class KeptError(Exception):
    """The reason why results may be on the hosts' disks."""


def outputs(words: Sequence[str], *, line_only: bool) -> list[str]:
    """Addresses of a command's outputs.

    Example:
        ["train", "--gin.MODEL_DIR=gs://bucket/taser"] writes to ["gs://bucket/taser"].

    Args:
        words: the command and its flags.
        line_only: whether to leave out the files that the flags name.

    Raises:
        KeptError: an output is not in a bucket, or cannot be resolved.
    """
    if words[0] != "train":
        # The others open outputs as local paths: gs://BUCKET/x is to them a folder `gs:`.
        raise KeptError("of all commands only train writes to a bucket")
    files, folders, line = _flags(words[1:])
    bindings: dict[str, str] = {}
    for path in [FIRST] if line_only else [FIRST, *files]:
        _read(path, folders, bindings)
    bindings.update(line)
    names = (OUTPUT, *(name for name in ALWAYS_OUTPUTS if name in line))
    return list(dict.fromkeys(_address(name, bindings) for name in names))


def _flags(words: Sequence[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """The Gin files of a command line, the folders to search for them, and its bindings."""
    files: list[str] = []
    folders: list[str] = []
    bindings: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith(("--gin.", "--gin_")):
            continue
        value = value if equals else next(rest, "")
        if flag == "--gin_bindings":
            flag, _, value = f"--gin.{value}".partition("=")
        if flag == "--gin_file":
            files.append(value)
        elif flag == "--gin_search_paths":
            folders += value.split(",")
        else:
            name = flag[len("--gin.") :].strip()
            bindings[_selector(name)] = _literal(value.strip())
    return files, folders, bindings


def _read(
    path: str, folders: Sequence[str], bindings: dict[str, str], included_by: tuple[str, ...] = ()
) -> None:
    """Adds the bindings of a Gin file and of its includes, as Gin text; later ones win."""
    if path in included_by:
        raise KeptError(f"{path} includes itself")
    try:
        for statement in _statements(_find(path, folders).read_text(encoding="utf-8-sig")):
            if "=" in statement:
                equals = statement.index("=")
                name = _selector("".join(statement[:equals]))
                bindings[name] = "".join(statement[equals + 1 :])
            elif statement[0] == "include":
                _read(ast.literal_eval(statement[1]), folders, bindings, (*included_by, path))
            elif statement[0] not in ("import", "from"):
                line = " ".join(statement)
                raise KeptError(f"{path} has `{line}`, which the launcher cannot read")
    except (OSError, ValueError, SyntaxError, tokenize.TokenError) as error:
        raise KeptError(f"{path} cannot be read: {error}") from error


def _find(path: str, folders: Sequence[str]) -> pathlib.Path:
    """A Gin file of this checkout, where hosts find their copy."""
    for folder in ("", *folders, "gin_configs"):
        relative = pathlib.PurePath(folder, path)
        # What lies elsewhere on this machine is not what hosts have there.
        if relative.is_absolute() or ".." in relative.parts:
            raise KeptError(f"{relative} is not in the checkout that hosts get")
        if (ROOT / relative).is_file():
            return ROOT / relative
    raise KeptError(f"{path} is not in the checkout that hosts get")


def _statements(text: str) -> Iterator[list[str]]:
    """The tokens of each statement: Gin's are Python's."""
    statement: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            yield statement
            statement = []
        elif token.type not in _SKIPPED:
            statement.append(token.string)


def _selector(name: str) -> str:
    """A binding's name in its short form.

    Example:
        `commands.train.train.model_dir` is `train.model_dir`, and `MODEL_DIR/macro.value` is
        MODEL_DIR.
    """
    scope, _, selector = name.rpartition("/")
    if scope and selector in ("macro.value", "gin.macro.value"):
        return scope
    return name if scope else ".".join(selector.split(".")[-2:])


def _literal(value: str) -> str:
    """A value of the command line as Gin text, where strings need no quotes."""
    if value.startswith(("@", "%")):
        return value
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return repr(value)
    return value


def _address(name: str, bindings: dict[str, str]) -> str:
    """The address in a bucket that a parameter or macro holds."""
    passed = {"gin.REQUIRED"}
    while (text := bindings.get(name, "%gin.REQUIRED")).startswith("%"):
        if text[1:] in passed:
            raise KeptError(
                f"{name} is neither on the command line nor in a Gin file that hosts get"
            )
        name = text[1:]
        passed.add(name)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, str) or not re.fullmatch(r"gs://[^/\s][^\n]*", value):
        raise KeptError(f"{name} is {text}, which is not in a bucket")
    return value
