"""What a taser command writes, if all of it goes to buckets: then a TPU may be deleted after it."""

from __future__ import annotations

import ast
import io
import itertools
import pathlib
import re
import tokenize
from collections.abc import Iterator, Sequence

from _hosts import ROOT, ask

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
    flags = list(_flags(words[1:]))
    files = [value for flag, value in flags if flag == "--gin_file" and not line_only]
    paths = [value.split(",") for flag, value in flags if flag == "--gin_search_paths"]
    bindings: dict[str, str] = {}
    for file in (FIRST, *files):
        _read(file, ["", *itertools.chain(*paths), "gin_configs"], bindings)
    line = {
        _selector(flag[len("--gin.") :].strip()): _literal(value.strip())
        for flag, value in flags
        if flag.startswith("--gin.")
    }
    bindings.update(line)
    names = (OUTPUT, *(name for name in ALWAYS_OUTPUTS if name in line))
    return list(dict.fromkeys(_address(name, bindings) for name in names))


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags of Gin and their values.

    Example:
        `--gin_bindings=MODEL_DIR=gs://b` and `--gin.MODEL_DIR gs://b` are both
        ("--gin.MODEL_DIR", "gs://b").
    """
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag.startswith(("--gin.", "--gin_")):
            value = value if equals else next(rest, "")
            if flag == "--gin_bindings":
                flag, _, value = f"--gin.{value}".partition("=")
            yield flag, value


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
    for folder in folders:
        relative = pathlib.PurePath(folder, path)
        # What lies elsewhere on this machine is not what hosts have there.
        if relative.is_absolute() or ".." in relative.parts:
            raise KeptError(f"{relative} is not in the checkout that hosts get")
        if (ROOT / relative).is_file():
            # Hosts get git's files alone, and may have another one of this name.
            if ask(["git", "-C", str(ROOT), "ls-files", "--error-unmatch", str(relative)])[0]:
                raise KeptError(f"{relative} is not in git, so hosts do not get it")
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
    # A string of one piece; another is not looked into.
    literal = re.fullmatch(r"""(["'])(gs://[^/\s"'\\][^\n"'\\]*)\1""", text)
    if not literal:
        raise KeptError(f"{name} is {text}, which is not in a bucket")
    return literal[2]
