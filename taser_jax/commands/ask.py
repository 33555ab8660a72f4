"""`taser ask`: typed questions against a trained model's index."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from taser_jax.assembly.model_directory import load_model, read_facts, text_settings
from taser_jax.batch import Role
from taser_jax.commands.inputs import search_devices
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.text.preprocessors import encode_queries
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.errors import ConfigError
from taser_jax.retrieval.index import open_index

# For models that were trained before their lengths were recorded.
DEFAULT_QUERY_LENGTH = 32


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
    texts = text_settings(read_facts(model_dir), task)
    store = PassageStore.open(data_dir, collection)
    model = load_model(model_dir, step=step)
    searcher = open_index(
        index_dir,
        fingerprints={"model": model.fingerprint, "collection": store.fingerprint},
        devices=search_devices(),
    )
    vocabulary = load_vocabulary(model.vocabulary_dir)
    tokens = encode_queries(
        questions,
        vocabulary,
        length=query_length or texts.query_length or DEFAULT_QUERY_LENGTH,
        settings=texts.queries,
    )
    result = searcher.search(np.asarray(model.encode_fn(Role.QUERY, task=task)(tokens)), k)
    found = []
    for question, rows, scores in zip(questions, result.rows, result.scores, strict=True):
        print(f"\n? {question}")
        ids = []
        for rank, (row, score) in enumerate(zip(rows, scores, strict=True), start=1):
            if row < 0:
                continue
            passage = store[int(row)]
            ids.append(passage.id)
            text = textwrap.shorten(passage.text, 150, placeholder=" ...")
            print(f"  {rank}. {passage.title}  [{score:.2f}]\n     {text}")
        found.append(ids)
    return found


CONFIGURABLES = ()
