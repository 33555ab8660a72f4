"""Figures of the size of taser_jax, each with a ceiling: what a reader must know only gets less.

    python tests/test_ceilings.py      # figures and ceilings side by side

A change that makes a figure smaller lowers its ceiling in the same commit. A change that adds a
capability raises one by what it needs, and says so in its message.
"""

import ast
import collections
import functools
import inspect
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

import pytest

from taser_jax.cli import command_table

REPOSITORY = pathlib.Path(__file__).parents[1]
PACKAGE = REPOSITORY / "taser_jax"
# A ceiling this much above its figure has to be lowered.
SLACK = 0.03

# Lines of code of each folder at the top of the package: no docstrings, comments and blank lines.
ROOMS = {
    "assembly": 1_470,
    "cli": 1_205,
    "commands": 4_352,
    "data": 5_485,
    "devices": 1_046,
    "evaluation": 1_260,
    "interop": 2_639,
    "loose files": 356,
    "models": 2_181,
    "optim": 812,
    "retrieval": 2_110,
    "serving": 490,
    "storage": 1_281,
    "systems": 2_757,
    "training": 1_236,
}
OTHERS = {
    "lines of code": 28_680,
    "percent of code that imports or raises": 13.8,
    "files": 189,
    "lines of the longest file": 415,
    "loose files": 3,
    "rooms at the top": 14,
    "rooms on all floors": 25,
    "commands": 30,
    "fields that nothing binds": 31,
    "Any in annotations": 96,
    "modules that train imports": 75,
    # README.md and docs/*.md, without the pages that are generated.
    "words of documentation": 34_992,
}
CEILINGS = {f"code in {room}": lines for room, lines in ROOMS.items()} | OTHERS

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines with a token that is neither a comment nor of a docstring.

    Example:
        Of lines 1 `x = 1  # one`, 2 `` and 3 `# two`, it is {1}.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            lines.difference_update(_lines(node.body[0]))
    return lines


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.expr() as annotation)
            ):
                yield annotation
            case ast.FunctionDef(returns=ast.expr() as annotation):
                yield annotation


def _sizes() -> dict[str, float]:
    """Figures of the package's source."""
    sizes: collections.Counter[str] = collections.Counter()
    ceremony = longest = 0
    folders = set()
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        code = _code_lines(source, tree)
        imports_and_raises = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise)
            for line in _lines(node)
        }
        ceremony += len(code & imports_and_raises)
        longest = max(longest, source.count("\n"))
        folders.add(path.parent)
        room, *below = path.relative_to(PACKAGE).parts
        sizes[f"code in {room if below else 'loose files'}"] += len(code)
        sizes["lines of code"] += len(code)
        sizes["files"] += 1
        sizes["loose files"] += not below
        sizes["Any in annotations"] += sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for annotation in _annotations(tree)
            for node in ast.walk(annotation)
        )
    return sizes | {
        "rooms at the top": sum(folder.parent == PACKAGE for folder in folders),
        "rooms on all floors": len(folders - {PACKAGE}),
        "percent of code that imports or raises": round(100 * ceremony / sizes["lines of code"], 1),
        "lines of the longest file": longest,
    }


def _unbound_fields() -> set[str]:
    """`Class.field` that Gin may bind, and that no recipe and no benchmark does."""
    fields = {
        f"{settings.__name__}.{field}"
        for name in command_table.COMMANDS
        for settings in command_table.configurables_of(name)
        if inspect.isclass(settings)
        for field in inspect.signature(settings).parameters
    }
    bound: set[str] = set()
    for path in (*(REPOSITORY / "gin_configs").rglob("*.gin"), *_files_of_benchmarks()):
        source = path.read_text(encoding="utf-8")
        for line in source.splitlines():
            if not line.lstrip().startswith("#"):
                bound |= set(re.findall(r"(\w+\.\w+) ?=", line))
        if path.suffix == ".py":
            bound |= {
                f"{call.func.id}.{keyword.arg}"
                for call in ast.walk(ast.parse(source))
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
                for keyword in call.keywords
            }
    return fields - bound


def _files_of_benchmarks() -> Iterator[pathlib.Path]:
    for path in (REPOSITORY / "benchmarks").rglob("*"):
        if path.suffix in (".gin", ".py", ".sh"):
            yield path


def _modules_of_training() -> int:
    """Modules of the package that the command `train` imports."""
    program = (
        f"import sys, taser_jax.{command_table.COMMANDS['train'].module};"
        "print(sum(name.split('.')[0] == 'taser_jax' for name in sys.modules))"
    )
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@functools.cache
def figures() -> dict[str, float]:
    """Name -> what it is at present."""
    return _sizes() | {
        "commands": len(command_table.COMMANDS),
        "fields that nothing binds": len(_unbound_fields()),
        "modules that train imports": _modules_of_training(),
        "words of documentation": sum(
            len(page.read_text(encoding="utf-8").split())
            for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))
            if page.name != "commands.md"
        ),
    }


def test_every_figure_has_a_ceiling():
    """A new room gets one, and that of a room that is gone goes."""
    assert figures().keys() == CEILINGS.keys()


@pytest.mark.parametrize("name", CEILINGS)
def test_each_figure_is_at_its_ceiling_or_little_below(name):
    figure, ceiling = figures().get(name, 0), CEILINGS[name]
    assert figure <= ceiling, f"{name}: {figure}, above {ceiling}; make something else smaller"
    message = f"{name}: {figure}, more than 3% below {ceiling}; lower the ceiling in {__file__}"
    assert figure >= (1 - SLACK) * ceiling, message


def test_what_counts_as_code():
    source = '"""A module."""\n\nx = 1  # one\n# two\ndef f():\n    """Long\n    text."""\n'
    source += "    return (\n        x\n    )\n"
    assert _code_lines(source, ast.parse(source)) == {3, 5, 8, 9, 10}


if __name__ == "__main__":
    width = max(map(len, figures()))
    print(f"{'':{width}}  figure  ceiling")
    for name, figure in sorted(figures().items()):
        print(f"{name:{width}} {figure:7}  {CEILINGS.get(name, '-'):>7}")
