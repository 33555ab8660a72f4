"""Answer matching against a direct implementation of the rule, list by list."""

import random

import numpy as np
import pytest
from answer_oracle import oracle_has_answer, oracle_regex, oracle_tokens

from taser_jax.evaluation import metrics
from taser_jax.evaluation.metrics import AnswerMatch, AnswerMatcher, tokenize


def has_answer(answers, text, **options):
    """One passage and one question at a time."""
    matcher = AnswerMatcher(lambda rows: [text for _ in rows], **options)
    return bool(matcher.hits(np.zeros((1, 1), np.int32), [answers])[0, 0])


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("new york", "He left New  York.", True),
        ("new york", "A New Yorker", False),
        ("york,", "New York , 1999", True),
        ("the beatles", "beatles", False),
        ("Röntgen", "Wilhelm Conrad RO\u0308NTGEN", True),
        ("Rontgen", "Röntgen", False),
        ("u.s.", "the U. S. Army", True),
        ("42", "1942", False),
        ("42", "42nd", False),
        # Lower-casing sees the word's end: there a final sigma equals a capital one.
        ("ΟΔΟΣ", "η οδος.", True),
        ("οδος", "η ΟΔΟΣ.", True),
        ("οδοσ", "η ΟΔΟΣ.", False),
        ("ΟΔΟΣ", "η οδος'α", True),
        ("zero\u200bwidth", "zero width", True),
        ("東京", "東京都", False),
        ("½", "½ cup", True),
        ("tab\tnew\nline", "tab new line", True),
        ("", "anything", True),
        (" \n", "", True),
    ],
)
def test_golden(answer, text, expected):
    assert has_answer([answer], text) is expected
    assert oracle_has_answer([answer], text) is expected


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("Sept?(ember)?|Feb(ruary)?", "in sep 2001", True),
        (r"New\s?York", "NEWYORK", True),
        ("^second", "first\nSecond line", True),
        ("^second", "first second", False),
        ("café", "CAFE\u0301", True),
        ("(unclosed", "(unclosed", False),
        ("*", "*", False),
        ("(" * 5000 + ")" * 5000, "", False),
        ("ork", "New York", True),
    ],
)
def test_golden_regex(pattern, text, expected):
    assert has_answer([pattern], text, match=AnswerMatch.REGEX) is expected
    assert oracle_regex([pattern], text) is expected


# Short words over few letters, so that sublists, near misses and joins of tokens all occur; marks,
# ligatures, cased letters beyond ASCII, separators, controls and unassigned points.
ALPHABET = "ab1. -'A\u0301é\u00a0\tΣσςİßﬁ\u200b\n東\u0378😀½"


def random_text(rng, length):
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(length)))


@pytest.mark.parametrize("letters", ["ascii", "unicode"])
def test_equals_the_oracle_on_random_text(letters):
    rng = random.Random(7)
    outcomes = []
    for _ in range(4000):
        text, answers = random_text(rng, 24), [random_text(rng, 5) for _ in range(2)]
        if letters == "ascii":
            text, *answers = (t.encode("ascii", "ignore").decode() for t in (text, *answers))
        assert tokenize(text) == oracle_tokens(text)
        expected = oracle_has_answer(answers, text)
        outcomes.append(expected)
        assert has_answer(answers, text) == expected, (answers, text)
    assert 0.1 < np.mean(outcomes) < 0.9


@pytest.mark.parametrize("match", list(AnswerMatch))
def test_matcher_equals_one_check_at_a_time(match, monkeypatch):
    rng = random.Random(11)
    texts = [random_text(rng, 40) for _ in range(60)]
    answers = [tuple(random_text(rng, 4) for _ in range(rng.randrange(3))) for _ in range(50)]
    rows = np.random.default_rng(3).integers(-1, 60, (50, 9)).astype(np.int32)
    one_check = oracle_has_answer if match is AnswerMatch.STRING else oracle_regex
    expected = [
        [row >= 0 and one_check(answers[query], texts[row]) for row in rows[query]]
        for query in range(50)
    ]
    asked = []

    def text_of(fetched_rows):
        asked.extend(fetched_rows)
        return [texts[row] for row in fetched_rows]

    # The last forgets: its cache changes no answer.
    for cached, block_queries in ((1 << 20, 256), (1 << 20, 7), (9, 7)):
        asked.clear()
        monkeypatch.setattr(metrics, "_CACHED", cached)
        monkeypatch.setattr(metrics, "_BLOCK_QUERIES", block_queries)
        matcher = AnswerMatcher(text_of, match=match)
        for _ in range(2):
            np.testing.assert_array_equal(matcher.hits(rows, answers), expected)
        assert -1 not in asked
        assert (len(asked) == len(set(asked))) == (cached > 9), "a passage was fetched twice"
