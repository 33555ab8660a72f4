"""`taser ask`: typed questions against a trained model's index."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from taser_jax.errors import ConfigError
from taser_jax.retriever import Retriever


def ask(
    *,
    questions: Sequence[str],
    model_dir: str,
    index_dir: str,
    data_dir: str,
    collection: str,
    query_length: int | None = None,
    task: str | None = None,
    k: int = 3,
    step: int | None = None,
) -> list[list[str]]:
    """Prints the best passages for questions in words.

    Args:
        questions: as typed.
        model_dir: the trained model.
        index_dir: an index of its embeddings.
        data_dir: where collections lie.
        collection: the collection.
        query_length: tokens a question is cut to; None takes the training's.
        task: whose prompt, length and query encoder, where tasks differ.
        k: passages a question.
        step: which checkpoint; None means the best one.

    Returns:
        Passage ids, best first, for each question.

    Raises:
        ConfigError: no question, an empty one, or a string instead of a list.
    """
    if isinstance(questions, str) or not questions or not all(map(str.strip, questions)):
        raise ConfigError(
            f"questions are {questions!r}",
            where="QUESTIONS",
            expected="a list of questions, none of them empty",
            fix="""write --gin.QUESTIONS="['how do I sort a list']\"""",
        )
    retriever = Retriever.load(
        model_dir,
        index_dir=index_dir,
        data_dir=data_dir,
        collection=collection,
        task=task,
        query_length=query_length,
        step=step,
    )
    found = retriever.search(questions, k=k)
    for question, hits in zip(questions, found, strict=True):
        print(f"\n? {question}")
        for rank, hit in enumerate(hits, start=1):
            text = textwrap.shorten(hit.passage.text, 150, placeholder=" ...")
            print(f"  {rank}. {hit.passage.title}  [{hit.score:.2f}]\n     {text}")
    return [[hit.passage.id for hit in hits] for hits in found]


CONFIGURABLES = ()
