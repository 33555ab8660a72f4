import itertools
import random
import re

import pytest

from taser_jax.data.readers.kilt import Page, Span
from taser_jax.data.readers.kilt_chunking import (
    Chunking,
    chunk_page,
    sentence_spans,
)
from taser_jax.errors import ConfigError

PAGE = Page(
    "k:1",
    "7",
    "Bern",
    (
        "Bern\n",
        "Bern is a city. It lies on the Aare.\n",
        "Bears live there.\n",
        "Section::::History.\n",
        "Founded in 1191 by Duke B. of Zurich it grew. It burned.\n",
        "",
    ),
)


def _chunks(page: Page = PAGE, **options) -> list[tuple[str, str, Span | None]]:
    return [(p.passage.id, p.passage.text, p.span) for p in chunk_page(page, **options)]


def test_paragraphs_by_hand():
    # 5 tokens + 6 tokens >= 9: cut between the sentences; "It lies ... Aare." (6) and the next
    # paragraph (4) would make 10, too long to join. The heading parts sections.
    assert _chunks(max_tokens=9) == [
        ("7.0", "Bern is a city.", Span((1, 0), (1, 15))),
        ("7.1", "It lies on the Aare.", Span((1, 16), (1, 36))),
        ("7.2", "Bears live there.", Span((2, 0), (2, 17))),
        ("7.3", "Founded in 1191 by Duke B. of Zurich it grew.", Span((4, 0), (4, 45))),
        ("7.4", "It burned.", Span((4, 46), (4, 56))),
    ]
    # With room for 16: 11 tokens and 4 of the next paragraph are joined (15 < 16).
    assert [text for _, text, _ in _chunks(max_tokens=16)] == [
        "Bern is a city. It lies on the Aare. Bears live there.",
        "Founded in 1191 by Duke B. of Zurich it grew. It burned.",
    ]
    assert _chunks(max_tokens=16)[0][2] == Span((1, 0), (2, 17))
    # At 15 they are not: KILT's limit is exclusive.
    assert [text for _, text, _ in _chunks(max_tokens=15)][1] == "Bears live there."


def test_windows_by_hand():
    assert _chunks(chunking=Chunking.WORDS, max_tokens=10) == [
        ("7.0", "Bern is a city. It lies on the Aare. Bears", Span((1, 0), (2, 5))),
        ("7.1", "live there. Founded in 1191 by Duke B. of Zurich", Span((2, 6), (4, 36))),
        ("7.2", "it grew. It burned.", Span((4, 37), (4, 56))),
    ]


def test_given_tokens_and_sentences_decide():
    def halves(text: str) -> list[tuple[int, int]]:
        return [(0, 4), (4, len(text))]

    def letters(text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer("[a-z]", text)]

    found = list(chunk_page(PAGE, max_tokens=5, sentences=halves, tokens=letters))
    # Three letters and more than two: the first two halves cannot be of one passage.
    assert [p.passage.text for p in found][:2] == ["ern", "is a city. It lies on the Aare"]


def test_sentences_are_not_cut_at_abbreviations():
    text = 'Dr. No met J. R. Smith in St. Gallen. "Hello," he said. 3 left... Why? No one knew.'
    assert [text[a:b].strip() for a, b in sentence_spans(text)] == [
        "Dr. No met J. R. Smith in St. Gallen.",
        '"Hello," he said.',
        "3 left...",
        "Why?",
        "No one knew.",
    ]
    assert list(sentence_spans(" \n")) == []


@pytest.mark.parametrize("chunking", list(Chunking))
@pytest.mark.parametrize("limit", [1, 7, 30])
def test_no_word_is_lost_or_repeated(chunking, limit):
    rng = random.Random(limit)
    paragraphs = [
        "".join(rng.choice(["word ", "Name. ", "It's ", "(x) ", "1.5 "]) for _ in range(n))
        for n in (0, 3, 40, 1, 25)
    ]
    page = Page("k:1", "9", "T", ("T", *paragraphs[:3], "Section::::S", *paragraphs[3:]))
    chunks = list(chunk_page(page, chunking=chunking, max_tokens=limit))
    assert " ".join(c.passage.text for c in chunks).split() == " ".join(paragraphs).split()
    spans = [chunk.span for chunk in chunks]
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    assert {chunk.passage.page_id for chunk in chunks} == {"9"}
    if chunking is Chunking.WORDS:
        assert [len(c.passage.text.split()) for c in chunks[:-1]] == [limit] * (len(chunks) - 1)


def test_a_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        list(chunk_page(PAGE, max_tokens=0))
