"""All commands: the function of each, its Gin file and its flags."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

# Commands of two words, by their first.
GROUPS = {
    "prepare": "convert files into a collection",
    "pipeline": "run several stages",
}


@dataclasses.dataclass(frozen=True)
class Command:
    """One entry of the command line.

    Attributes:
        module: module in `taser_jax`; it lists what Gin may configure in CONFIGURABLES.
        function: its function.
        summary: one line for the list of commands.
        gin_file: the Gin file read by default.
        recipe: for a command that takes another command's recipes, the one read by default;
            `gin_file` is then always read before it.
        recipe_of: that other command's function.
        base: the Gin file that completes given files which do not configure the command themselves
            (or the command whose recipes it takes); it is read before them. None means `gin_file`.
        flags: its own flags: flag -> the macro or parameter that it sets.
        switches: its own flags without a value: flag -> (macro, value).
        argument: the macro or `function.parameter` that a word after the command sets.
        many: whether several words may follow, as a list.
        optional: whether the word may be left out.
    """

    module: str
    function: str
    summary: str
    gin_file: str
    recipe: str | None = None
    recipe_of: str | None = None
    base: str | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    argument: str | None = None
    many: bool = False
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
    name: str, summary: str, *, module: str | None = None, function: str | None = None
) -> tuple[str, Command]:
    """A command by the usual names.

    Example:
        `prepare mesh` is `prepare_mesh` of commands/prepare.py and reads runs/prepare_mesh.gin.
    """
    joined = name.replace(" ", "_")
    module = module or f"commands.{name.split()[0]}"
    return name, Command(module, function or joined, summary, f"runs/{joined}.gin")


COMMANDS: dict[str, Command] = dict(
    [
        (
            "init",
            Command(
                "commands.init",
                "init",
                "write a project's Gin file and task module",
                "runs/init.gin",
                argument="init.name",
            ),
        ),
        (
            "gin",
            Command(
                "cli.show_gin",
                "show_gin",
                "list the Gin files at hand, or print one",
                "runs/gin.gin",
                argument="show_gin.file",
                optional=True,
            ),
        ),
        (
            "prepare",
            Command(
                "commands.prepare",
                "prepare",
                "convert a folder, or files of any format, into a collection",
                "runs/prepare.gin",
                switches={"--strict": ("STRICT", "True")},
                argument="DIRECTORIES",
                many=True,
                optional=True,
            ),
        ),
        _command("prepare pydocs", "build the built-in collection"),
        _command("prepare mesh", "convert MeSH's XML"),
        _command("prepare thesaurus", "convert a thesaurus, JSON lines or OBO"),
        _command("vocab", "train a vocabulary on a collection"),
        _command("tokenize", "tokenize tasks into a token store"),
        _command(
            "import",
            "make a model directory from pretrained weights",
            module="commands.import_model",
            function="import_model",
        ),
        _command("train", "train a dual encoder"),
        (
            "compile",
            Command(
                "commands.compile",
                "compile_recipe",
                "compile a training recipe for a TPU pod, without a TPU",
                "runs/compile.gin",
                recipe="runs/taser_base.gin",
                recipe_of="train",
                base="runs/train.gin",
                flags={"--topology": "compile_recipe.topology"},
            ),
        ),
        (
            "plan",
            Command(
                "commands.plan",
                "plan_recipe",
                "choose mesh, rematerialisation and chunks for a TPU topology, without a TPU",
                "runs/plan.gin",
                recipe="runs/taser_base.gin",
                recipe_of="train",
                base="runs/train.gin",
                flags={
                    "--topology": "plan_recipe.topologies",
                    "--topologies": "plan_recipe.topologies",
                },
            ),
        ),
        _command("encode", "embed the passages"),
        _command(
            "ensemble",
            "train the ensemble that measures a specialist's confidence",
            module="systems.muf.ensemble",
        ),
        _command("search", "index embeddings and search them, write run files"),
        _command("bm25", "search queries with BM25"),
        _command("hybrid", "fuse a dense and a BM25 run"),
        (
            "memory",
            Command(
                "systems.moma.memory",
                "memory",
                "add a memory to a mixture, remove one, or list all",
                "runs/memory.gin",
                argument="memory.action",
                optional=True,
            ),
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
        _command("positives", "find positives of questions with answers, with BM25"),
        _command("score", "add a teacher's scores to negatives"),
        _command("evaluate", "evaluate runs"),
        _command("analyze", "measure which parameters serve which task"),
        (
            "verify",
            Command(
                "commands.verify",
                "verify",
                "compare files with their recorded checksums",
                "runs/verify.gin",
                argument="DIRECTORY",
            ),
        ),
        _command("ask", "answer typed questions from an index"),
        (
            "serve",
            Command(
                "commands.serve",
                "serve",
                "answer searches over HTTP",
                "runs/serve.gin",
                argument="DIRECTORY",
            ),
        ),
        _command("export", "export a model to other libraries' formats", function="export_model"),
        (
            "compare",
            Command(
                "commands.pipelines.compare",
                "compare",
                "from a folder of text to a table, an index and an export",
                "runs/compare.gin",
                flags={
                    "--pretrained": "PRETRAINED",
                    "--out": "OUTPUT_DIR",
                    "--systems": "SYSTEMS",
                    "--minutes": "MINUTES",
                },
                argument="DIRECTORIES",
                many=True,
            ),
        ),
        _command(
            "pipeline taser", "train, mine, retrain, evaluate", module="commands.pipelines.taser"
        ),
        _command(
            "pipeline ance",
            "warm up, then alternate mining and training",
            module="commands.pipelines.ance",
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
            "quickstart",
            "compare BM25, MiniLM and TASER on pydocs",
            module="commands.pipelines.quickstart",
        ),
    ]
)


def load(name: str) -> ModuleType:
    """Imports a command's module."""
    return importlib.import_module(f"taser_jax.{COMMANDS[name].module}")
