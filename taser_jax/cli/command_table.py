"""All commands: the function of each, its Gin file and flags, what Gin may set, and to what."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from taser_jax.storage.typed_files import BUILDERS, is_enum

_SEQUENCES = (Sequence, list, tuple)
_MAPPINGS = (Mapping, dict)


@dataclasses.dataclass(frozen=True)
class Command:
    """One entry of the command line.

    Attributes:
        module: module in `taser_jax`.
        function: its function.
        summary: one line for the list of commands.
        gin_file: the Gin file read by default.
        recipe: for a command that takes another command's recipes, the one read by default;
            `gin_file` is then always read before it.
        recipe_of: that other command.
        flags: its own flags: flag -> the macro or parameter that it sets.
        switches: its own flags without a value: flag -> (macro, value).
        argument: the macro or `function.parameter` that a word after the command sets.
        many: whether several words may follow, as a list.
        joined: whether these are one text, as a question typed without quotes.
        optional: whether the word may be left out.
    """

    module: str
    function: str
    summary: str
    gin_file: str
    recipe: str | None = None
    recipe_of: str | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    argument: str | None = None
    many: bool = False
    joined: bool = False
    optional: bool = False

    def gin_files(self, given: Sequence[str] = ()) -> tuple[str, ...]:
        """Files to read, in order.

        Args:
            given: those of the command line.
        """
        if self.recipe is None:
            return tuple(given) or (self.gin_file,)
        return (self.gin_file, *(given or (self.recipe,)))


def _command(
    name: str, summary: str, *, module: str = "", function: str = "", **more: Any
) -> tuple[str, Command]:
    """A command by the usual names.

    Example:
        `encode` is the function of its name in `commands.encode`, and reads runs/encode.gin.
    """
    joined = name.replace(" ", "_")
    module, gin_file = module or f"commands.{joined}", f"runs/{joined}.gin"
    return name, Command(module, function or joined, summary, gin_file, **more)


# What takes the recipes of `train`.
_OF_TRAIN = {"recipe": "runs/taser_base.gin", "recipe_of": "train"}
_PIPELINES = "commands.pipelines"
_COMPARE_FLAGS = {
    "--pretrained": "PRETRAINED",
    "--out": "OUTPUT_DIR",
    "--systems": "SYSTEMS",
    "--minutes": "MINUTES",
    "--memory": "MEMORY",
    "--queries": "TRAINING_QUERIES",
}
_STRICT = {"--strict": ("STRICT", "True")}
_PLAN_FLAGS = dict.fromkeys(("--topology", "--topologies"), "plan_recipe.topologies")

COMMANDS: dict[str, Command] = dict(
    (
        _command(
            "init",
            "write a project's Gin file and task module",
            argument="init.name",
            flags={"--pretrained": "init.pretrained"},
        ),
        _command(
            "prepare",
            "convert a folder, files of any format, or pydocs, into a collection",
            switches=_STRICT,
            argument="DIRECTORIES",
            many=True,
            optional=True,
        ),
        _command("tokenize", "tokenize tasks into a token store"),
        _command(
            "import",
            "make a model directory from pretrained weights",
            module="commands.import_model",
            function="import_model",
        ),
        _command(
            "import embeddings",
            "read embeddings from Parquet, such as another model's",
            module="commands.import_model",
        ),
        _command("train", "train a dual encoder"),
        _command(
            "compile",
            "compile a training recipe for a TPU pod, without a TPU",
            function="compile_recipe",
            flags={"--topology": "compile_recipe.topology"},
            **_OF_TRAIN,
        ),
        _command(
            "plan",
            "compare meshes of TPU topologies for a training recipe, without a TPU",
            module="commands.compile",
            function="plan_recipe",
            flags=_PLAN_FLAGS,
            **_OF_TRAIN,
        ),
        _command("encode", "embed the passages"),
        _command(
            "ensemble",
            "train the ensemble that measures a specialist's confidence",
            module="systems.muf.ensemble",
        ),
        _command("search", "index embeddings and search them, write run files"),
        _command("bm25", "search queries with BM25", module="commands.search"),
        _command("hybrid", "fuse a dense and a BM25 run", module="commands.search"),
        _command(
            "memory",
            "add a memory to a mixture, remove one, or list all",
            module="systems.moma.memory",
            argument="memory.action",
            optional=True,
        ),
        _command(
            "augment",
            "retrieve each query's documents from the memories",
            module="systems.moma.augment",
        ),
        _command(
            "fuse",
            "combine the lists of specialists, weighted by their confidence",
            module="systems.muf.fuse",
        ),
        _command("mine", "mine hard negatives"),
        _command("evaluate", "evaluate runs"),
        _command("analyze", "measure which parameters serve which task"),
        _command(
            "verify",
            "compare files with their recorded checksums",
            module="storage.checksums",
            argument="DIRECTORY",
        ),
        _command(
            "ask",
            "answer a typed question from an index",
            flags={"--from": "DIRECTORY"},
            argument="QUESTIONS",
            many=True,
            joined=True,
            optional=True,
        ),
        _command(
            "serve",
            "answer searches over HTTP",
            module="commands.ask",
            argument="DIRECTORY",
            optional=True,
        ),
        _command(
            "export",
            "export a model, or embeddings, to formats of other libraries and vector stores",
            function="export_model",
            argument="export_model.formats",
            many=True,
            optional=True,
        ),
        _command(
            "push",
            "upload an exported model to the Hugging Face hub",
            module="commands.export",
            argument="REPO",
        ),
        _command(
            "compare",
            "from a folder of text to a table, an index and an export",
            module=f"{_PIPELINES}.compare",
            flags=_COMPARE_FLAGS,
            switches=_STRICT,
            argument="DIRECTORIES",
            many=True,
        ),
        _command("pipeline taser", "train, mine, retrain, evaluate", module=f"{_PIPELINES}.taser"),
        _command(
            "pipeline ance",
            "warm up, then alternate mining and training",
            module=f"{_PIPELINES}.ance",
        ),
        _command(
            "pipeline muf",
            "train specialists apart, combine them weighted by their confidence",
            module="systems.muf.pipeline",
        ),
        _command(
            "pipeline moma",
            "train end retriever and lookup in turn, over swappable memories",
            module="systems.moma.pipeline",
        ),
        _command(
            "quickstart", "compare BM25, MiniLM and TASER on pydocs", module=f"{_PIPELINES}.taser"
        ),
    )
)


def load(name: str) -> Callable[..., object]:
    """Imports a command's function."""
    command = COMMANDS[name]
    return getattr(importlib.import_module(f"taser_jax.{command.module}"), command.function)


def configurables(*functions: Callable[..., object]) -> list[Callable[..., object]]:
    """What Gin may configure for functions, from the annotations of their parameters.

    These are the dataclasses that they name, in unions and collections too; their subclasses; what
    their fields name; and functions that make one of them (`BUILDERS`).

    Example:
        `train(*, training: TrainingConfig)` is configured by `TrainingConfig` and its `LoopConfig`.

    Args:
        functions: a command's, or any other.
    """
    reached: dict[Callable[..., object], None] = {}
    waiting = list(functions)
    while waiting:
        hints = typing.get_type_hints(waiting.pop())
        hints.pop("return", None)
        for kind in itertools.chain.from_iterable(map(_classes_in, hints.values())):
            own: list[Callable[..., object]] = [kind] if dataclasses.is_dataclass(kind) else []
            new = [target for target in (*own, *BUILDERS[kind]) if target not in reached]
            reached |= dict.fromkeys(new)
            waiting += new
    return sorted(reached, key=lambda target: target.__name__)


def _classes_in(hint: object) -> Iterator[type]:
    """Classes that an annotation names and their subclasses, but for those of Python itself."""
    for part in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from _classes_in(part)
    library = getattr(hint, "__module__", "builtins").partition(".")[0]
    if isinstance(hint, type) and library not in sys.stdlib_module_names:
        yield hint
        subclasses: list[type] = hint.__subclasses__()
        for subclass in subclasses:
            yield from _classes_in(subclass)


def configurables_of(name: str) -> list[Callable[..., object]]:
    """What Gin may configure for a command: with the function whose recipes it takes, if any."""
    recipe_of = COMMANDS[name].recipe_of
    others = [load(recipe_of)] if recipe_of else []
    return [*others, *configurables(load(name), *others)]


@functools.cache
def configurable_names() -> frozenset[str]:
    """Names of all commands' functions and of all that some command may be configured with.

    From the sources: importing every command would load every library.
    """
    marked = r"^@(?:dataclasses\.dataclass.*|builds)\n(?:class|def) (\w+)"
    package = pathlib.Path(__file__).resolve().parents[1]
    texts = (path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    names = itertools.chain.from_iterable(re.findall(marked, text, re.M) for text in texts)
    return frozenset([*names, *(command.function for command in COMMANDS.values())])


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value; unknown kinds of annotations allow all.

    A whole number passes as a float and a list as a tuple; a string is no sequence of letters.

    Example:
        >>> fits({"query": 32}, dict[str, int]), fits("faq", Sequence[str])
        (True, False)

    Args:
        value: as given.
        hint: a resolved annotation.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin in _SEQUENCES or hint in _SEQUENCES:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            return False
        if origin is tuple and Ellipsis not in parts:
            return len(value) == len(parts) and all(map(fits, value, parts))
        return not parts or all(fits(part, parts[0]) for part in value)
    if origin in _MAPPINGS or hint in _MAPPINGS:
        if not isinstance(value, Mapping):
            return False
        return not parts or all(
            fits(key, parts[0]) and fits(part, parts[1]) for key, part in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if is_enum(hint):
        return isinstance(value, hint) or value in [member.value for member in hint]
    is_class = dataclasses.is_dataclass(hint) or inspect.isabstract(hint)
    if is_class or hint in (str, bool, type(None)):
        return isinstance(value, hint)
    if origin is os.PathLike or hint is os.PathLike:
        return isinstance(value, os.PathLike)
    return True


def at_home(value: object) -> object:
    """Expands `~` in paths: shells leave it alone after `=`, and Gin everywhere.

    Example:
        >>> at_home(["~/data", "a~b"]) == [os.path.expanduser("~/data"), "a~b"]
        True
    """
    if isinstance(value, str):
        return os.path.expanduser(value) if f"{value}/".startswith("~/") else value
    if type(value) is list:
        return [at_home(part) for part in value]
    if type(value) is tuple:
        return tuple(at_home(part) for part in value)
    if type(value) is dict:
        return {at_home(key): at_home(part) for key, part in value.items()}
    return value


def shown(hint: Any) -> str:
    """An annotation as it is written in code, enums by their values.

    Example:
        >>> shown(Mapping[str, int] | None)
        'Mapping[str, int] | None'
    """
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = re.sub(r"[\w.]+\.(?=\w)", "", text)
    # Python's own way of writing `X | None`, where X is an annotation and no class.
    text = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)
    for kind in _enums(hint):
        choices = " | ".join(repr(member.value) for member in kind)
        text = re.sub(rf"\b{kind.__name__}\b", choices, text)
    return text


def _enums(hint: Any) -> list[type[enum.Enum]]:
    if is_enum(hint):
        return [hint]
    return [kind for part in typing.get_args(hint) for kind in _enums(part)]


def fix_of(value: Any, hint: Any) -> str | None:
    """What to write instead, where that is obvious."""
    if isinstance(value, str) and value.startswith(("[", "(", "{")):
        return """quote all of it, as in --gin.TASKS="['faq']": the shell drops the quotes inside"""
    candidates = [[value], {value: value}] if isinstance(value, str) else [[value]]
    for wrapped in candidates:
        if fits(wrapped, hint):
            return f"write {wrapped!r}"
    return None
