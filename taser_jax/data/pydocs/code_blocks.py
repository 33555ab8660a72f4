"""Finds the code blocks of a docstring, and those of them that are Python."""

from __future__ import annotations

import ast
import re

_DIRECTIVE = re.compile(r"\s*\.\.\s+([\w-]+)::\s*(.*)$")
_COMMENT = re.compile(r"\s*\.\.\s+(_|\[|\w+\s*$|\|)")
_CODE_DIRECTIVES = {"code-block", "code", "testcode", "doctest", "ipython", "sourcecode"}
_IMPORT = re.compile(r"\s*(import|from)\s+[\w.]+")
_MIN_EXAMPLE_WORDS = 6
_KEPT_DIRECTIVES = {
    *("note", "warning", "tip", "hint", "important", "attention", "caution", "seealso"),
}


def indent(line: str) -> int:
    """Spaces before the text of a line."""
    return len(line) - len(line.lstrip())


def _block_end(lines: list[str], start: int, margin: int) -> int:
    """First line at or after `start` that is neither blank nor deeper than `margin`."""
    while start < len(lines) and (not lines[start].strip() or indent(lines[start]) > margin):
        start += 1
    return start


def without_code(doc: str) -> tuple[list[str], list[str]]:
    """Lines of prose, and the code blocks removed from them, in order."""
    lines = doc.expandtabs().splitlines()
    prose: list[str] = []
    blocks: list[str] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        directive = _DIRECTIVE.match(line)
        if line.strip().startswith(">>>"):
            start = i
            while i < len(lines) and lines[i].strip() and not lines[i].strip().startswith("```"):
                i += 1
            blocks.append("\n".join(lines[start:i]))
            prose.append("")
        elif line.strip().startswith("```"):
            start, i = i + 1, i + 1
            while i < len(lines) and not lines[i].strip().startswith("```"):
                i += 1
            blocks.append("\n".join(lines[start:i]))
            prose.append("")
            i += 1
        elif directive:
            name, argument = directive.groups()
            end = _block_end(lines, i + 1, indent(line))
            if name in _KEPT_DIRECTIVES:
                header = "See Also:" if name == "seealso" else argument
                prose.extend(["", " " * indent(line) + header])
                i += 1
                continue
            if name in _CODE_DIRECTIVES:
                body = [x for x in lines[i + 1 : end] if not re.match(r"\s*:\w+:", x)]
                blocks.append("\n".join(body))
            prose.append("")
            i = end
        elif _COMMENT.match(line):
            i = _block_end(lines, i + 1, indent(line))
        elif line.rstrip().endswith("::"):
            prose.append(line.rstrip()[:-1])
            i += 1
            end = _block_end(lines, i, indent(line))
            if end > i:
                blocks.append("\n".join(lines[i:end]))
                prose.append("")
            i = end
        else:
            prose.append(line)
            i += 1
    return prose, blocks


def _source(block: str) -> list[str]:
    """Python of a block without prompts, outputs and imports; one string per paragraph."""
    lines = block.splitlines()
    prompted = any(line.strip().startswith(">>>") for line in lines)
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if prompted:
            stripped = line.strip()
            if not stripped:
                paragraphs.append([])
            elif stripped.startswith((">>> ", "... ")):
                paragraphs[-1].append(re.sub(r"^\s*(>>>|\.\.\.) ", "", line))
        else:
            paragraphs[-1].append(line)
    sources = []
    for paragraph in paragraphs:
        margin = min((indent(x) for x in paragraph if x.strip()), default=0)
        kept = [x[margin:].split("  # doctest:")[0].rstrip() for x in paragraph if x.strip()]
        sources.append("\n".join(x for x in kept if not _IMPORT.match(x)))
    return sources


def examples(blocks: list[str]) -> tuple[str, ...]:
    """The Python in the blocks; blocks with prompts first, since literal blocks can be formulas."""
    found = []
    for block in sorted(blocks, key=lambda b: ">>>" not in b):
        for source in _source(block):
            if len(re.findall(r"\w+", source)) < _MIN_EXAMPLE_WORDS:
                continue
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError):
                continue
            # A line of prose in a literal block can parse as a name or a string.
            if any(not _is_bare(s) for s in tree.body):
                found.append(source)
    return tuple(found)


def _is_bare(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(
        statement.value, ast.Name | ast.Constant | ast.Tuple
    )
