"""Writes DPR's retrieval results, which FiD reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from taser_jax.storage.artifacts import FilePath, replacing
from taser_jax.storage.records import Passage


@dataclasses.dataclass(frozen=True, slots=True)
class RetrievedPassage:
    """One passage of a result list.

    Attributes:
        passage: the passage.
        score: its retrieval score.
        has_answer: whether its text contains one of the answers.
    """

    passage: Passage
    score: float | np.floating
    has_answer: bool | np.bool_


@dataclasses.dataclass(frozen=True, slots=True)
class RetrievalResult:
    """A question with its retrieved passages.

    Attributes:
        question: its text.
        answers: its answers.
        contexts: best first.
        confidence: each specialist's confidence in the question, for fused lists.
    """

    question: str
    answers: Sequence[str]
    contexts: Sequence[RetrievedPassage]
    confidence: Mapping[str, float] | None = None


def write_dpr_results(path: FilePath, results: Iterable[RetrievalResult]) -> None:
    """Writes DPR's results JSON, FiD's input, one result at a time.

    [{question, answers, ctxs: [{id, title, text, score, has_answer}]}], the score as a string;
    results with confidences also have {"confidence": {specialist: w}}.

    Args:
        path: the file to write, local or gs://.
        results: one per question.

    Raises:
        StorageError: the disk is full or the file cannot be written.
    """
    with replacing(path) as scratch, scratch.open("w") as file:
        file.write("[")
        for number, result in enumerate(results):
            record: dict[str, object] = {
                "question": result.question,
                "answers": list(result.answers),
                "ctxs": [
                    {
                        "id": context.passage.id,
                        "title": context.passage.title,
                        "text": context.passage.text,
                        "score": str(context.score),
                        "has_answer": bool(context.has_answer),
                    }
                    for context in result.contexts
                ],
            }
            if result.confidence is not None:
                record["confidence"] = dict(result.confidence)
            file.write(",\n" if number else "\n")
            file.write(json.dumps(record, ensure_ascii=False, indent=1))
        file.write("\n]\n")
