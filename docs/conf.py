"""Sphinx configuration of the documentation site; `docs/build.sh` builds it."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from pygments.lexers.python import PythonLexer
from sphinx.application import Sphinx

import taser_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
# PyTorch's triton ends a process that has TensorFlow.
sys.modules["triton"] = None  # type: ignore[assignment]

project = "taser_jax"
author = copyright = "The taser_jax authors"
release = version = taser_jax.__version__
extensions = ["myst_parser", "sphinx.ext.apidoc", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["api/generated/modules.rst"]
html_theme = "furo"
html_title = f"taser_jax {release}"

# Links to headings, with GitHub's anchors.
myst_heading_anchors = 4

# One page per package, written when the site is built.
apidoc_modules = [
    {
        "path": "../taser_jax",
        "destination": "api/generated",
        "exclude_patterns": ["../taser_jax/tasks*"],
        "module_first": True,
        "automodule_options": {"members"},
    }
]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Signatures need the names only, and these take long to import.
autodoc_mock_imports = [
    *("tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "array_record"),
    *("scann", "bm25s", "Stemmer", "clu", "t5x", "matplotlib", "torch"),
    *("sentence_transformers", "transformers"),
]
napoleon_use_ivar = True
napoleon_attr_annotations = False

_SECTION = re.compile(r"(Args|Attributes|Example|Returns|Raises|Yields):$")
_CHOICE = re.compile(r"[A-Z][A-Z0-9_]*: ")
_CODE = re.compile(r"`+([^`]+)`+")


def front_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Puts the README before the front page's tables of contents."""
    if docname == "index":
        readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
        source[0] = (
            re.sub(r"\]\((LICENSE|CITATION.cff|examples/[^)]*)\)", r"](../\1)", readme) + source[0]
        )


def as_restructured_text(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turns a docstring's description into reStructuredText.

    Our docstrings are plain text: a line that begins with an enum's member is an item of a list,
    other indented lines are formulas or directory listings, whose line breaks count.
    """
    found = (i for i, line in enumerate(lines) if _SECTION.match(line))
    end = next(found, len(lines))
    converted: list[str] = []
    in_block = in_list = False
    for line in lines[:end]:
        before = converted[-1].strip() if converted else ""
        indented = line.startswith("  ")
        if not line.strip():
            in_list = False
        elif in_block and indented:
            pass
        elif _CHOICE.match(line):
            converted += [] if in_list else [""]
            line, in_list, in_block = f"* {_inline(line)}", True, False
        elif indented and in_list:
            line = f"  {_inline(line.strip())}"
        elif indented and (not before or before.endswith(":")):
            # The marker of a literal block, unless the docstring has it.
            said = next(filter(None, reversed(converted)), "").endswith("::")
            converted += [""] if said else ["", "::", ""]
            in_block = True
        else:
            converted += [""] if (in_block or in_list) and before else []
            line, in_list, in_block = _inline(line.strip()), False, False
        converted.append(line)
    lines[:] = [*converted, *map(_inline, lines[end:])]


def _inline(line: str) -> str:
    """Code in double backquotes; bars and asterisks elsewhere are characters, not markup."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = _CODE.split(line)
    parts[::2] = [re.sub(r"(?<!\\)([|*])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    return "".join(parts)


def setup(app: Sphinx) -> None:
    """Registers the handlers above and colours Gin files as Python."""
    app.add_lexer("gin", PythonLexer)
    app.connect("source-read", front_page)
    # Before napoleon, which sees Google's sections.
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)
