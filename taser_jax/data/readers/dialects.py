"""Objects of LoTTE's, MS MARCO's and SQuAD's JSON, under the names of DPR's fields."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import regex

from taser_jax.storage.records import UNSPACED
from taser_jax.storage.typed_files import typed

# A word or, in scripts without spaces between words, a letter; and what separates it from the next.
WORD = regex.compile(rf"(?:[{UNSPACED}]\p{{M}}*|[^ {UNSPACED}]+)\p{{P}}* ?")
# Words per passage of what is cut, as in DPR's and Maillard's passages.
PASSAGE_WORDS = 100
# A paragraph of SQuAD's rarely has more words; COVID-QA's are whole articles.
_LONGEST_PARAGRAPH = 3 * PASSAGE_WORDS
_CONTEXTS = ("positive_ctxs", "hard_negative_ctxs")
_FIX_ARTICLE = "write {title, paragraphs: [{context, qas: [{question, id, answers}]}]}"


class _Answer(msgspec.Struct):
    """An answer of SQuAD's, which is a part of the paragraph."""

    text: str
    answer_start: int = 0


class _Asked(msgspec.Struct):
    """A question of SQuAD's; its paragraph may not answer it."""

    question: str
    id: str | int = ""
    answers: tuple[_Answer, ...] = ()
    is_impossible: bool = False


class _Paragraph(msgspec.Struct):
    """A paragraph of an article, and what is asked about it."""

    context: str
    qas: tuple[_Asked, ...]


class _Article(msgspec.Struct):
    """An object of SQuAD's files, as published with Rajpurkar et al., 2016."""

    paragraphs: tuple[_Paragraph, ...]
    title: str = ""


def as_dpr(values: dict[str, object], *, where: str) -> Iterator[Mapping[str, object]]:
    """Objects with DPR's fields for one of LoTTE, MS MARCO or SQuAD; others as they are.

    Example:
        `"answer_pids": [7]`, of LoTTE, becomes `"positive_ctxs": [{"passage_id": 7}]`.

    Args:
        values: an object of a file.
        where: its place, for messages.

    Raises:
        DataError: an article of SQuAD's that is malformed.
    """
    match values:
        case {"answer_pids": list(ids)}:
            yield {**values, "positive_ctxs": [{"passage_id": id} for id in ids]}
        case {"passages": {"is_selected": list(marks), "passage_text": list(texts)}}:
            # As `datasets` stores a list of objects.
            yield _of_marked(values, zip(marks, texts, strict=False))
        case {"passages": [{"is_selected": _, "passage_text": _}, *_] as objects}:
            dicts = [each for each in objects if isinstance(each, dict)]
            marked = ((each.get("is_selected"), each.get("passage_text")) for each in dicts)
            yield _of_marked(values, marked)
        case {"context": str(context), "answers": {"text": [*texts], "answer_start": [*starts]}}:
            # SQuAD's, as Hugging Face has it.
            pairs = zip(texts, starts, strict=False)
            answers = [{"text": text, "answer_start": start} for text, start in pairs]
            row = {"question": "", "answers": answers, "is_impossible": not answers}
            asked = typed(row, _Asked, where=where, fix=_FIX_ARTICLE)
            yield values | _judged(asked, context, title=str(values.get("title") or ""))
        case {"paragraphs": [{"qas": _}, *_]}:
            yield from _questions(typed(values, _Article, where=where, fix=_FIX_ARTICLE))
        case _:
            yield values


def _of_marked(
    values: Mapping[str, object], marked: Iterable[tuple[object, object]]
) -> Mapping[str, object]:
    contexts: dict[str, list[object]] = {name: [] for name in _CONTEXTS}
    for is_selected, text in marked:
        contexts["positive_ctxs" if is_selected else "hard_negative_ctxs"].append(text)
    is_unanswered = values.get("answers") == ["No Answer Present."]
    return {**values, **contexts, **({"answers": []} if is_unanswered else {})}


def _questions(article: _Article) -> Iterator[Mapping[str, object]]:
    for paragraph in article.paragraphs:
        for asked in paragraph.qas:
            judged = _judged(asked, paragraph.context, title=article.title)
            yield {"id": asked.id, "question": asked.question, **judged}


def _judged(asked: _Asked, context: str, *, title: str) -> dict[str, object]:
    """A question's answers, and its paragraph or, of an article, pieces with an answer and others.

    Example:
        Of 400 words and an answer of the words 98 to 102, the first two pieces of 100 are positive.
    """
    bounds = _bounds(context)
    spans = [(each.answer_start, each.answer_start + len(each.text)) for each in asked.answers]
    contexts: dict[str, list[object]] = {name: [] for name in _CONTEXTS}
    for start, end in itertools.pairwise(bounds):
        is_touched = any(first < end and start < last for first, last in spans)
        is_positive = is_touched if len(bounds) > 2 else not asked.is_impossible
        passage = {"title": title.replace("_", " "), "text": context[start:end].strip()}
        contexts["positive_ctxs" if is_positive else "hard_negative_ctxs"].append(passage)
    return {"answers": list(dict.fromkeys(each.text for each in asked.answers)), **contexts}


# Questions about one article follow each other.
@functools.lru_cache(maxsize=1)
def _bounds(context: str) -> Sequence[int]:
    """Where a paragraph, or each piece of an article, begins; and where the last one ends."""
    starts = [word.start() for word in WORD.finditer(re.sub(r"\s", " ", context))]
    begins = starts[PASSAGE_WORDS::PASSAGE_WORDS] if len(starts) > _LONGEST_PARAGRAPH else []
    return [0, *begins, len(context)]
