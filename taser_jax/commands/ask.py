"""`taser ask`: typed questions against a trained model's index."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from taser_jax.retriever import Hit, Retriever
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.moma.augmented_answers import Memories, ask_augmented
from taser_jax.systems.moma.memory_sources import Source
from taser_jax.systems.muf.fused_answers import ask_fused


def ask(
    *,
    questions: Sequence[str],
    model_dir: str | None = None,
    index_dir: str | None = None,
    data_dir: str | None = None,
    collection: str | None = None,
    fusion_dir: str | None = None,
    memory_dir: str | None = None,
    lookup_dir: str | None = None,
    documents: int = 10,
    query_length: int | None = None,
    task: str | None = None,
    k: int = 3,
    step: int | None = None,
) -> list[list[str]]:
    """Prints the best passages for typed questions.

    Args:
        questions: questions as typed.
        model_dir: the trained model.
        index_dir: an index of its embeddings.
        data_dir: folder of collections.
        collection: the collection.
        fusion_dir: from `taser fuse`, in place of the four above: its specialists answer together,
            and the confidence of each is printed below the question.
        memory_dir: a mixture of memories, for a model that fuses documents: the documents fused
            with each question are printed below its answers, with memory, score and attention.
        lookup_dir: the model that looks documents up: the one that the memories were added with.
        documents: documents fused with each question, K.
        query_length: maximum tokens per question; None means as in training.
        task: task whose prompt, length and query encoder are used, where tasks differ.
        k: passages per question.
        step: step of the checkpoint; None means the best one.

    Returns:
        Passage ids, best first, for each question.

    Raises:
        ConfigError: no question, an empty one, or a string instead of a list; neither a model with
            its index and collection nor a fusion.
    """
    if isinstance(questions, str) or not questions or not all(map(str.strip, questions)):
        raise ConfigError(
            f"questions are {questions!r}",
            where="QUESTIONS",
            expected="a list of questions, none of them empty",
            fix="""write --gin.QUESTIONS="['how do I sort a list']\"""",
        )
    if fusion_dir is not None:
        fused = ask_fused(questions, fusion_dir, k=k, query_length=query_length, task=task)
        for question, hits, weights in zip(questions, fused.hits, fused.confidence, strict=True):
            named = zip(fused.names, weights, strict=True)
            _show(question, hits, note="   w: " + ", ".join(f"{name} {w:.2f}" for name, w in named))
        return [[hit.passage.id for hit in hits] for hits in fused.hits]
    if model_dir is None or index_dir is None or data_dir is None or collection is None:
        raise ConfigError(
            "no model with an index and a collection, and no fusion",
            where="taser ask",
            fix="give MODEL_DIR, INDEX_DIR, DATA_DIR and COLLECTION, or FUSION_DIR",
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
    documents_of: list[list[Source]] = [[] for _ in questions]
    if memory_dir is None:
        found = retriever.search(questions, k=k)
    else:
        if lookup_dir is None:
            raise ConfigError(
                "memories and no model that looks documents up",
                where="LOOKUP_DIR",
                fix="give the model that `taser memory add` encoded them with",
            )
        memories = Memories(memory_dir, lookup_dir, documents, data_dir)
        found, documents_of = ask_augmented(
            questions, retriever, memories, k=k, task=task, query_length=query_length
        )
    for question, hits, sources in zip(questions, found, documents_of, strict=True):
        _show(question, hits)
        _show_sources(sources)
    return [[hit.passage.id for hit in hits] for hits in found]


def _show(question: str, hits: Sequence[Hit], *, note: str = "") -> None:
    print("\n".join([f"\n? {question}", *([note] if note else [])]))
    for rank, hit in enumerate(hits, start=1):
        text = textwrap.shorten(hit.passage.text, 150, placeholder=" ...")
        print(f"  {rank}. {hit.passage.title}  [{hit.score:.2f}]\n     {text}")


def _show_sources(sources: Sequence[Source]) -> None:
    if sources:
        print("  from memory:")
    for one in sources:
        text = textwrap.shorten(f"{one.passage.title}: {one.passage.text}", 90, placeholder=" ...")
        print(f"   {100 * one.attention:3.0f}%  {one.memory}  [{one.score:.2f}]  {text}")


CONFIGURABLES = ()
