"""Pages of a knowledge source cut into passages."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Sequence

from taser_jax.data.readers.kilt import KiltPassage, Page, Span
from taser_jax.errors import ConfigError
from taser_jax.records import Passage

# (start, end) of pieces of a text.
Pieces = Sequence[tuple[int, int]]

_SECTION = "Section::::"
_TOKEN = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")
_SENTENCE_END = re.compile(r"""[.!?]+["'”’)\]]*\s+(?=["'“‘(\[]?[A-Z0-9])""")
# A full stop after these, or after an initial, ends no sentence.
_ABBREVIATION = re.compile(
    r"(?:\b[A-Z]|\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|No|Vol|vs|etc|ca|approx|e\.g|i\.e))\.$"
)


class Chunking(enum.Enum):
    """How a page becomes passages.

    PARAGRAPHS: as KILT's own paragraph script: whole sentences up to the limit, headings and the
        title left out, and the rest of a paragraph joined to the passage before it where both are
        of one section and short enough.
    WORDS: disjoint windows of the limit over the page's words, as DPR's and Maillard's passages.
    """

    PARAGRAPHS = "paragraphs"
    WORDS = "words"


@dataclasses.dataclass
class _Chunk:
    """A passage in the making.

    Attributes:
        text: so far.
        section: heading it stands under.
        tokens: its length.
        span: its place in the page.
    """

    text: str
    section: str
    tokens: int
    span: Span


def token_spans(text: str) -> Pieces:
    """Words and punctuation marks, which is near what spaCy counts.

    Example:
        >>> [text[a:b] for text in ["It's 1.5 m."] for a, b in token_spans(text)]
        ["It's", '1', '.', '5', 'm', '.']
    """
    return [match.span() for match in _TOKEN.finditer(text)]


def sentence_spans(text: str) -> Pieces:
    """Sentences by their final marks, told from initials and common abbreviations.

    Example:
        >>> [text[a:b] for text in ["Mr. A. Low fell. He rose."] for a, b in sentence_spans(text)]
        ['Mr. A. Low fell. ', 'He rose.']
    """
    spans, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text, start, match.start() + 1):
            spans.append((start, match.end()))
            start = match.end()
    return [*spans, (start, len(text))] if text[start:].strip() else spans


def chunk_page(
    page: Page,
    *,
    chunking: Chunking = Chunking.PARAGRAPHS,
    max_tokens: int = 100,
    tokens: Callable[[str], Pieces] = token_spans,
    sentences: Callable[[str], Pieces] = sentence_spans,
) -> Iterator[KiltPassage]:
    """Cuts a page into passages whose ids are the page's and a number: 12.0, 12.1, ...

    KILT's script counts and splits with spaCy, which `tokens` and `sentences` may be given from;
    without it the counts are near, so that cuts can lie a sentence apart from KILT's. A sentence
    longer than the limit is a passage by itself, as there.

    Args:
        page: its first paragraph is the title and left out.
        chunking: the way.
        max_tokens: of a passage; PARAGRAPHS stays below it.
        tokens: places of the tokens in a text (PARAGRAPHS).
        sentences: places of the sentences in a text (PARAGRAPHS).

    Yields:
        Passages with their places in the page, in its order.

    Raises:
        ConfigError: a limit below 1.

    Source: KILT's create_kilt_data_paragraphs.py, described by Petroni et al., 2021.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}", expected="1 or more")
    if chunking is Chunking.WORDS:
        chunks = _windows(page, max_tokens)
    else:
        chunks = iter(_paragraphs(page, max_tokens, tokens, sentences))
    for number, chunk in enumerate(chunks):
        passage = Passage(f"{page.id}.{number}", chunk.text, page.title, page.id)
        yield KiltPassage(passage, chunk.span)


def _paragraphs(
    page: Page,
    limit: int,
    tokens: Callable[[str], Pieces],
    sentences: Callable[[str], Pieces],
) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    section = ""
    for number, text in enumerate(page.paragraphs[1:], start=1):
        if _SECTION in text:
            section = text.strip()
            continue
        pending: list[tuple[int, int]] = []
        for start, end in sentences(text):
            found = [(start + a, start + b) for a, b in tokens(text[start:end])]
            if pending and len(pending) + len(found) >= limit:
                chunks.append(_chunk(text, number, pending, section))
                pending = []
            pending += found
        if not pending:
            continue
        last = _chunk(text, number, pending, section)
        before = chunks[-1] if chunks else None
        if before and before.section == section and before.tokens + last.tokens < limit:
            before.text += f" {last.text}"
            before.tokens += last.tokens + 1
            before.span = Span(before.span.start, last.span.end)
        else:
            chunks.append(last)
    return chunks


def _chunk(text: str, paragraph: int, pieces: Pieces, section: str) -> _Chunk:
    start, end = pieces[0][0], pieces[-1][1]
    span = Span((paragraph, start), (paragraph, end))
    return _Chunk(text[start:end], section, len(pieces), span)


def _windows(page: Page, limit: int) -> Iterator[_Chunk]:
    words = [
        (match.group(), (number, match.start()), (number, match.end()))
        for number, text in enumerate(page.paragraphs)
        if number and _SECTION not in text
        for match in re.finditer(r"\S+", text)
    ]
    for start in range(0, len(words), limit):
        window = words[start : start + limit]
        text = " ".join(word for word, _, _ in window)
        yield _Chunk(text, "", len(window), Span(window[0][1], window[-1][2]))
