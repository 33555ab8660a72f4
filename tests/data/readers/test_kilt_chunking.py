import itertools
import random

import pytest

from taser_jax.data.readers.kilt import Page, Span
from taser_jax.data.readers.kilt_chunking import chunk_page
from taser_jax.storage.errors import ConfigError

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


def test_windows_by_hand():
    assert _chunks(max_tokens=10) == [
        ("7.0", "Bern is a city. It lies on the Aare. Bears", Span((1, 0), (2, 5))),
        ("7.1", "live there. Founded in 1191 by Duke B. of Zurich", Span((2, 6), (4, 36))),
        ("7.2", "it grew. It burned.", Span((4, 37), (4, 56))),
    ]


@pytest.mark.parametrize("limit", [1, 7, 30])
def test_no_word_is_lost_or_repeated(limit):
    rng = random.Random(limit)
    paragraphs = [
        "".join(rng.choice(["word ", "Name. ", "It's ", "(x) ", "1.5 "]) for _ in range(n))
        for n in (0, 3, 40, 1, 25)
    ]
    page = Page("k:1", "9", "T", ("T", *paragraphs[:3], "Section::::S", *paragraphs[3:]))
    chunks = list(chunk_page(page, max_tokens=limit))
    assert " ".join(c.passage.text for c in chunks).split() == " ".join(paragraphs).split()
    spans = [chunk.span for chunk in chunks]
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    assert {chunk.passage.page_id for chunk in chunks} == {"9"}
    assert [len(c.passage.text.split()) for c in chunks[:-1]] == [limit] * (len(chunks) - 1)


def test_a_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        list(chunk_page(PAGE, max_tokens=0))


def test_worked_example():
    page = Page("k:1", "7", "Bern", ("Bern", "Bern is a city.", "Bears live there."))
    assert [text for _, text, _ in _chunks(page, max_tokens=5)] == [
        "Bern is a city. Bears",
        "live there.",
    ]
