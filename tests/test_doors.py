"""Imports point one way, and a machine without TensorFlow trains and encodes from a token store."""

import ast
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "taser_jax"

# Modules that a training machine imports; TensorFlow and its like are not installed there.
WITHOUT_TENSORFLOW = (
    *("storage", "devices/mesh", "devices/partitioning", "models", "optim", "training"),
    *("data/token_store", "data/batches", "retrieval/embeddings", "retrieval/exact"),
    *("retrieval/runs", "assembly", "commands/train", "commands/encode"),
    *("systems/muf/ensemble", "cli"),
)
FORBIDDEN = (
    *("tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "scann", "tensorboard"),
    *("torch", "transformers", "tokenizers", "sentencepiece", "bm25s", "ir_measures"),
)
# Rooms from the ground up: each imports those before it.
ROOMS = (
    *("storage", "devices", "models", "optim", "training", "data", "interop", "retrieval"),
    *("evaluation", "assembly", "retriever_parts", "retriever", "serving"),
    *("commands", "systems", "cli"),
)
# Batches, embeddings and counts of experts are plain pytrees, which every room may name.
PYTREES = ("taser_jax.models.batch",)
# Of reading texts, which become tokens only once.
TEXTS = ("seqio", "tensorflow", "taser_jax.data.text", "taser_jax.data.seqio_tasks")
# Folder -> what its modules may not import, directly, although it lies below.
CLOSED = {
    "data": ("taser_jax.models", "taser_jax.training", "taser_jax.optim", "flax", "optax"),
    **dict.fromkeys(("data/token_store", "data/batches"), TEXTS),
    "data/collections": ("seqio", "taser_jax.data.prepare", "taser_jax.data.readers"),
    "data/readers": ("taser_jax.data.prepare", "taser_jax.data.collections"),
    "retrieval": ("taser_jax.models", "taser_jax.training", "flax"),
    "evaluation": ("taser_jax.models", "taser_jax.training", "flax"),
    "models": ("gin",),
    "optim": ("taser_jax.models",),
    "interop": ("taser_jax.training",),
    # What follows encoding needs no model.
    **dict.fromkeys(
        ("commands/search.py", "commands/mine.py"),
        ("taser_jax.assembly", "taser_jax.models", "taser_jax.training", "flax"),
    ),
}


def files_of(name: str) -> list[pathlib.Path]:
    """A module's file, or those of all modules of a folder."""
    path = PACKAGE / name
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert files
    assert all(file.is_file() for file in files), name
    return files


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports_of(path: pathlib.Path) -> set[str]:
    """Names of the modules a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def run_without(
    modules: list[str], forbidden: tuple[str, ...] = FORBIDDEN
) -> subprocess.CompletedProcess[str]:
    program = f"""
import importlib, importlib.abc, sys
class Closed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ImportError("forbidden: " + name)
sys.meta_path.insert(0, Closed())
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(module, error)
"""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_machine_without_tensorflow_imports_all_it_trains_with():
    paths = [path for name in WITHOUT_TENSORFLOW for path in files_of(name)]
    done = run_without(list(map(module_of, paths)))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_check_itself_notices():
    assert "forbidden: seqio" in run_without(["seqio"]).stdout


@pytest.mark.parametrize("folder", CLOSED)
def test_doors_are_closed(folder):
    closed = tuple(f"{name}." for name in CLOSED[folder])
    for path in files_of(folder):
        for name in imports_of(path):
            is_open = name.startswith(PYTREES) or not f"{name}.".startswith(closed)
            assert is_open, f"{path} imports {name}"


def test_imports_point_down():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PACKAGE / "__init__.py":
            continue
        floor = ROOMS.index(module_of(path).split(".")[1])
        for name in imports_of(path):
            package, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if package == "taser_jax" and room in ROOMS:
                assert ROOMS.index(room) <= floor, f"{path} imports {name}"


def test_systems_offer_what_core_rooms_ask_them_for():
    asked = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        asked |= dict(re.findall(r'^([A-Z_]+) = "(taser_jax\.systems\.[^"]+)"$', text, re.M))
    assert asked.keys() == {*("QUERY_DOCUMENTS", "SHARED_EMBEDDINGS"), *("FUSION", "MEMORIES")}
    assert all(callable(pkgutil.resolve_name(name)) for name in asked.values())


def test_every_room_has_its_floor():
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__pycache__"} == set(ROOMS)


def test_only_the_command_line_knows_gin_files():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem in ("cli", "configuration", "gin_files"):
            continue
        assert not any(name.split(".")[0] == "gin" for name in imports_of(path)), path


def test_package_files_are_empty():
    # The package's own offers public names, imported when used.
    for path in sorted(set(PACKAGE.rglob("__init__.py")) - {PACKAGE / "__init__.py"}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert all(isinstance(node, ast.Expr | ast.Assign) for node in tree.body), path


def test_what_reads_texts_does_not_import_tensorflow():
    modules = ["taser_jax.tasks.kilt", "taser_jax.commands.tokenize", "taser_jax.commands.ask"]
    assert run_without(modules, ("tensorflow", "tensorflow_text", "seqio")).stdout == ""


def test_test_files_have_names_of_their_own():
    # pytest imports test files by their bare names: a run of all collects only one of two alike.
    names = [path.name for path in pathlib.Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
