"""`taser ask`: typed questions against a trained model's index."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence

from taser_jax.retrieval.passages import Hit
from taser_jax.retriever import Retriever
from taser_jax.retriever_parts import read_parts
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.registered import Registered


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is printed below a question.

    Attributes:
        hits: the best passages.
        note: a line before them; none where empty.
        sources: lines after them.
    """

    hits: Sequence[Hit]
    note: str = ""
    sources: Sequence[str] = ()


# They get the questions and, by name, those arguments of `ask` that concern them.
Answerer = Callable[..., list[Answer]]
FUSION: Registered[Answerer] = Registered("taser_jax.systems.muf.fuse")
MEMORIES: Registered[Answerer] = Registered("taser_jax.systems.moma.augment")


def ask(
    *,
    questions: Sequence[str],
    directory: str = "results",
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

    Example:
        `taser ask how do I sort a list --from=results`

    Args:
        questions: questions as typed.
        directory: where `taser compare` left its results: model, index and, if it recommended a
            hybrid, BM25; for when no model, fusion or memories are given.
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
        problem = f"{questions!r} is no list of questions, or one of them is empty"
        fix = "write `taser ask how do I sort a list`"
        raise ConfigError(problem, where="QUESTIONS", fix=fix)
    asked = {"task": task, "query_length": query_length, "k": k}
    if fusion_dir is not None:
        answers = FUSION.get()(questions, fusion_dir=fusion_dir, **asked)
    else:
        if model_dir is None and read_parts(directory) is None:
            problem = "no retriever.json, which `taser compare` writes"
            fix = (
                "give --from=ITS_OUTPUT_DIR, or FUSION_DIR, or MODEL_DIR, INDEX_DIR, DATA_DIR and "
                "COLLECTION"
            )
            raise ConfigError(problem, where=directory, fix=fix)
        retriever = Retriever.load(
            model_dir or directory,
            index_dir=index_dir,
            data_dir=data_dir,
            collection=collection,
            task=task,
            query_length=query_length,
            step=step,
        )
        if memory_dir is not None:
            memories = {"memory_dir": memory_dir, "lookup_dir": lookup_dir, "documents": documents}
            answers = MEMORIES.get()(questions, retriever, data_dir=data_dir, **memories, **asked)
        else:
            hits = retriever.search(questions, k=k, hybrid=retriever.has_hybrid)
            answers = [Answer(best) for best in hits]
    for question, answer in zip(questions, answers, strict=True):
        _show(question, answer)
    return [[hit.passage.id for hit in answer.hits] for answer in answers]


def _show(question: str, answer: Answer) -> None:
    print("\n".join([f"\n? {question}", *([answer.note] if answer.note else [])]))
    for rank, hit in enumerate(answer.hits, start=1):
        text = textwrap.shorten(hit.passage.text, 150, placeholder=" ...")
        print(f"  {rank}. {hit.passage.title}  [{hit.score:.2f}]\n     {text}")
    for line in answer.sources:
        print(line)
