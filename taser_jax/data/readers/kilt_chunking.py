"""Cuts pages of a knowledge source into passages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from taser_jax.data.readers.kilt import KiltPassage, Page, Span
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage

_SECTION = "Section::::"


def chunk_page(page: Page, *, max_tokens: int = 100) -> Iterator[KiltPassage]:
    """Cuts a page into disjoint windows of its words, like DPR's and Maillard's passages.

    Passage ids are the page's id and a number: 12.0, 12.1, ...

    Example:
        A page 7 of the paragraphs "Bern", "Bern is a city." and "Bears live there.", at 5 tokens:
        7.0 "Bern is a city. Bears", 7.1 "live there."

    Args:
        page: the page; its first paragraph (the title) and its headings are skipped.
        max_tokens: words per passage, separated by white space.

    Yields:
        Passages with their positions in the page, in its order.

    Raises:
        ConfigError: a limit below 1.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}", expected="1 or more")
    words = [
        (match.group(), (number, match.start()), (number, match.end()))
        for number, text in enumerate(page.paragraphs)
        if number and _SECTION not in text
        for match in re.finditer(r"\S+", text)
    ]
    for number, start in enumerate(range(0, len(words), max_tokens)):
        window = words[start : start + max_tokens]
        text = " ".join(word for word, _, _ in window)
        passage = Passage(f"{page.id}.{number}", text, page.title, page.id)
        yield KiltPassage(passage, Span(window[0][1], window[-1][2]))
