"""Parses a docstring into summary, prose, parameters, code examples and see-also lines.

Understands numpydoc's underlined sections, Google's `Args:` blocks and `:param name:` fields, as
far as retrieval needs them. Code and see-also lines are removed from the text: they become queries,
never passages.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import re
import textwrap
from collections.abc import Callable


class ElementKind(enum.Enum):
    """The kind of a docstring's piece, which decides for which task it may become a query."""

    SUMMARY = "summary"
    PARAMETER = "parameter"
    PROSE = "prose"


@dataclasses.dataclass(frozen=True)
class Element:
    """One piece of a docstring's running text, in the order it was written.

    Attributes:
        kind: its kind.
        text: as in a passage.
        name: a parameter's name.
        description: a parameter's description without its name and type.
    """

    kind: ElementKind
    text: str
    name: str = ""
    description: str = ""


@dataclasses.dataclass(frozen=True)
class SeeAlso:
    """A line that points to another object: the name it gives and its description."""

    name: str
    description: str


@dataclasses.dataclass(frozen=True)
class ParsedDocstring:
    """A parsed docstring.

    Attributes:
        elements: the running text; the first is the summary if there is any prose.
        examples: blocks of Python that parse, without prompts, outputs and imports.
        see_also: lines that describe one other object.
    """

    elements: tuple[Element, ...]
    examples: tuple[str, ...]
    see_also: tuple[SeeAlso, ...]


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_UNDERLINE = re.compile(r"\s*([-=~^*])\1{2,}\s*$")
_SECTIONS = {
    "args": "parameters", "arguments": "parameters", "parameters": "parameters",
    "params": "parameters", "other parameters": "parameters", "keyword args": "parameters",
    "keyword arguments": "parameters", "kwargs": "parameters", "attributes": "parameters",
    "fields": "parameters", "other arguments": "parameters", "optional arguments": "parameters",
    "see also": "see also", "seealso": "see also",
    "references": "dropped", "reference": "dropped",
    "example": "prose", "examples": "prose", "example usage": "prose", "usage": "prose",
    "returns": "prose", "return": "prose", "yields": "prose", "raises": "prose",
    "note": "prose", "notes": "prose", "warnings": "prose", "warning": "prose", "warns": "prose",
    "methods": "prose",
}  # fmt: skip
_GOOGLE_HEADER = re.compile(r"\s*\**([A-Za-z][A-Za-z ]{2,20})\**:\**\s*$")
_FIELD = re.compile(r"\s*:(\w+)([^:`]*):(?!`|\w+:`)\s*(.*)$")
_NUMPY_PARAMETER = re.compile(r"(\*{0,2}\w+(?:, ?\*{0,2}\w+)*)(?:\s*:\s*(.*))?$")
_GOOGLE_PARAMETER = re.compile(r"[-*]?\s?`{0,2}(\*{0,2}\w+)`{0,2}\s*(?:\(([^()]*)\))?\s*:\s+(.*)$")
_ROLE = re.compile(r":[\w+]+(?::[\w+]+)*:`([^`]*)`")
_BACKTICKS = re.compile(r"(`{1,2})([^`]+)\1_{0,2}")
_CITATION = re.compile(r"\s*\[\w+\]_")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9*])")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|eq|fig|resp|approx|al)|\b[A-Z])\.$", re.I)
_SIGNATURE = re.compile(r"[\w.]+\((?:[^()]|\([^()]*\))*\)(?:\s*->\s*\S+(?:\s+\S+){0,3}(?<!\.))?")


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores, for comparing and counting text."""
    return re.findall(r"\w+", text.lower())


def count_words(text: str) -> int:
    """White-space separated words."""
    return len(text.split())


def sentences(text: str) -> list[str]:
    """Splits a paragraph into sentences; abbreviations do not end one."""
    parts: list[str] = []
    for piece in _SENTENCE_END.split(text):
        if parts and _ABBREVIATION.search(parts[-1]):
            parts[-1] += " " + piece
        else:
            parts.append(piece)
    return parts


def clean_text(lines: list[str]) -> str:
    """Joins lines and removes reStructuredText mark-up: roles, backticks, citations, rulers."""
    text = " ".join(line.strip() for line in lines if any(c.isalnum() for c in line))
    text = _ROLE.sub(lambda m: _role_target(m.group(1)), text)
    text = _BACKTICKS.sub(lambda m: _role_target(m.group(2)), text)
    return " ".join(_CITATION.sub("", text).replace("**", "").split())


def _role_target(target: str) -> str:
    return re.sub(r"\s*<[^>]*>$", "", target).lstrip("~!").strip() or target


def _split_sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(section kind, lines) in order. A numpydoc section ends at a header, Google's by indent."""
    sections: list[tuple[str, list[str]]] = [("prose", [])]
    google_indent: int | None = None
    content_seen = False
    remaining = iter(enumerate(lines))
    for i, line in remaining:
        title = line.strip().strip("*").lower().rstrip(":")
        header = _GOOGLE_HEADER.match(line)
        if line.strip() and any(map(_UNDERLINE.match, lines[i + 1 : i + 2])):
            unknown = [] if title in _SECTIONS else [line, ""]
            sections.append((_SECTIONS.get(title, "prose"), unknown))
            google_indent = None
            next(remaining)
        elif header and (title := header[1].strip().lower()) in _SECTIONS:
            sections.append((_SECTIONS[title], []))
            google_indent, content_seen = indent(line), False
        else:
            if google_indent is not None and line.strip():
                inside = indent(line) > google_indent
                bullet = sections[-1][0] == "see also" and re.match(r"\s*[-*] ", line)
                if not inside and not bullet and (content_seen or not lines[i - 1].strip()):
                    sections.append(("prose", []))
                    google_indent = None
                content_seen = True
            sections[-1][1].append(line)
    return sections


def _entries(lines: list[str]) -> list[list[str]]:
    """Groups lines into entries, which start at the smallest indent of the section."""
    text = textwrap.dedent("\n".join(line.rstrip() for line in lines)).lstrip()
    return [entry.split("\n") for entry in re.split(r"\n(?=\S)", text)]


def _parameter(name: str, kind: str, description: str) -> Element:
    kind = clean_text([kind])
    label = f"{name} ({kind})" if kind else name
    text = f"{label}: {description}" if description else label
    return Element(ElementKind.PARAMETER, text, name=name, description=description)


def _parameters(lines: list[str]) -> list[Element]:
    elements = []
    for entry in _entries(lines):
        google = _GOOGLE_PARAMETER.match(entry[0])
        numpy = _NUMPY_PARAMETER.match(entry[0])
        # "name: text" with a body below it is numpydoc's "name : type" only with the space.
        is_numpy = numpy and " : " in entry[0] and len(entry) > 1
        if match := numpy if is_numpy else google or numpy:
            name, kind, *first = match.groups()
            elements.append(_parameter(name, kind or "", clean_text([*first, *entry[1:]])))
        else:
            elements.extend(_prose(entry))
    return elements


def _prose(lines: list[str]) -> list[Element]:
    """Paragraphs and `:param name: text` fields, in order."""
    paragraphs: list[tuple[str, str, list[str]]] = [("", "", [])]
    for line in lines:
        if match := _FIELD.match(line):
            paragraphs.append((match[1], match[2].strip(), [match[3]]))
        elif line.strip():
            paragraphs[-1][-1].append(line)
        else:
            paragraphs.append(("", "", []))
    elements = []
    for field, of_what, paragraph in paragraphs:
        text = clean_text(paragraph)
        if not text or field in ("type", "rtype"):
            continue
        if field in ("param", "parameter", "arg", "argument", "keyword"):
            if of_what:
                *kind, name = of_what.split()
                elements.append(_parameter(name, " ".join(kind), text))
        elif field:
            label = f"{field} {of_what}".strip()
            elements.append(Element(ElementKind.PROSE, f"{label}: {text}"))
        elif not re.fullmatch(r"(\w+ ){0,3}\w+:", text):
            elements.append(Element(ElementKind.PROSE, text))
    return elements


def _see_also(lines: list[str]) -> list[SeeAlso]:
    references = []
    for entry in _entries([re.sub(r"^(\s*)[-*] ", r"\1", line) for line in lines]):
        text = clean_text(entry)
        name, colon, description = text.partition(":")
        name = name.strip().removesuffix("()")
        if colon and re.fullmatch(r"[\w.]+", name) and description.strip():
            references.append(SeeAlso(name.strip("."), description.strip()))
    return references


def _without_signature(doc: str) -> str:
    """Drops a first paragraph or line that is a call signature, as C functions have."""
    for separator in ("\n\n", "\n"):
        first, _, rest = doc.partition(separator)
        if _SIGNATURE.fullmatch(first.strip()):
            return rest
    # "name(arguments) -> Text." of older built-ins keeps its text.
    return re.sub(r"^[\w.]+\([^()]*\)\s*(?:->|--)\s*", "", doc, count=1)


def parse_docstring(doc: str) -> ParsedDocstring:
    r"""Parses a cleaned (`inspect.cleandoc`) docstring.

    Example:
        >>> parsed = parse_docstring("Adds two numbers.\n\nArgs:\n  a: the first number.")
        >>> [e.text for e in parsed.elements]
        ['Adds two numbers.', 'a: the first number.']

    Args:
        doc: the docstring. Memory addresses and lines about "this platform" are dropped.

    Returns:
        Its parts; `elements` is empty if there is nothing but code or a signature.
    """
    doc = _ADDRESS.sub("", doc)
    doc = "\n".join(x for x in doc.splitlines() if "on this platform" not in x)
    prose, blocks = without_code(_without_signature(doc).strip("\n"))
    elements: list[Element] = []
    see_also: list[SeeAlso] = []
    for kind, lines in _split_sections(prose):
        if kind == "parameters":
            elements.extend(_parameters(lines))
        elif kind == "see also":
            see_also.extend(_see_also(lines))
        elif kind == "prose":
            elements.extend(_prose(lines))
    if elements and elements[0].kind is ElementKind.PROSE:
        first, *rest = sentences(elements[0].text)
        elements[0] = Element(ElementKind.SUMMARY, first)
        if rest:
            elements.insert(1, Element(ElementKind.PROSE, " ".join(rest)))
    return ParsedDocstring(tuple(elements), examples(blocks), tuple(see_also))


_DIRECTIVE = re.compile(r"\s*\.\.\s+([\w-]+)::\s*(.*)$")
_COMMENT = re.compile(r"\s*\.\.\s+(_|\[|\w+\s*$|\|)")
_CODE_DIRECTIVES = {"code-block", "code", "testcode", "doctest", "ipython", "sourcecode"}
_FENCE = re.compile(r"\s*```")
_PROMPTED = re.compile(r"(?m)^\s*(?:>>>|\.\.\.) (.*)")
_IMPORT = re.compile(r"\s*(import|from)\s+[\w.]+")
_MIN_EXAMPLE_WORDS = 6
_KEPT_DIRECTIVES = {
    *("note", "warning", "tip", "hint", "important", "attention", "caution", "seealso")
}


def indent(line: str) -> int:
    """Spaces before the text of a line."""
    return len(line) - len(line.lstrip())


def without_code(doc: str) -> tuple[list[str], list[str]]:
    """Lines of prose, and the code blocks removed from them, in order."""
    lines = collections.deque(doc.expandtabs().splitlines())
    prose: list[str] = []
    blocks: list[str] = []

    def take(goes_on: Callable[[str], bool]) -> list[str]:
        taken = []
        while lines and goes_on(lines[0]):
            taken.append(lines.popleft())
        return taken

    def take_below(margin: int) -> list[str]:
        return take(lambda line: not line.strip() or indent(line) > margin)

    while lines:
        line = lines.popleft()
        if line.strip().startswith(">>>"):
            more = take(lambda line: bool(line.strip()) and not _FENCE.match(line))
            blocks.append("\n".join([line, *more]))
            prose.append("")
        elif _FENCE.match(line):
            blocks.append("\n".join(take(lambda line: not _FENCE.match(line))))
            prose.append("")
            if lines:
                lines.popleft()
        elif directive := _DIRECTIVE.match(line):
            name, argument = directive.groups()
            prose.append("")
            if name in _KEPT_DIRECTIVES:
                header = "See Also:" if name == "seealso" else argument
                prose.append(" " * indent(line) + header)
                continue
            body = take_below(indent(line))
            if name in _CODE_DIRECTIVES:
                blocks.append("\n".join(x for x in body if not re.match(r"\s*:\w+:", x)))
        elif _COMMENT.match(line):
            take_below(indent(line))
        elif line.rstrip().endswith("::"):
            prose.append(line.rstrip()[:-1])
            if body := take_below(indent(line)):
                blocks.append("\n".join(body))
                prose.append("")
        else:
            prose.append(line)
    return prose, blocks


def _source(block: str) -> list[str]:
    """Python of a block without prompts, outputs and imports; one string per paragraph."""
    paragraphs = [block.splitlines()]
    if any(line.strip().startswith(">>>") for line in paragraphs[0]):
        paragraphs = [_PROMPTED.findall(text) for text in re.split(r"\n\s*\n", block)]
    sources = []
    for paragraph in paragraphs:
        source = textwrap.dedent("\n".join(filter(str.strip, paragraph)))
        lines = (x.split("  # doctest:")[0].rstrip() for x in source.splitlines())
        sources.append("\n".join(x for x in lines if not _IMPORT.match(x)))
    return sources


def examples(blocks: list[str]) -> tuple[str, ...]:
    """The Python in the blocks; blocks with prompts first, since literal blocks can be formulas."""
    sources = []
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
                sources.append(source)
    return tuple(sources)


def _is_bare(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(
        statement.value, ast.Name | ast.Constant | ast.Tuple
    )
