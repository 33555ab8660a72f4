"""Positives of questions that have answers only, found with BM25."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

from taser_jax.commands.inputs import answer_matcher, check_known
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks, write_queries
from taser_jax.data.prepare.receipts import write_left_out
from taser_jax.evaluation.answers import AnswerMatch
from taser_jax.retrieval.bm25 import Bm25Config, Bm25Index, title_and_text
from taser_jax.retrieval.runs import NO_ROW, SearchResult
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.records import Query


@dataclasses.dataclass(frozen=True)
class Bm25Positives:
    """The positives of questions that have only answers, found with BM25.

    Attributes:
        tasks: task with answers -> name of the task to write.
        index_dir: BM25's index is built there once and reused.
        regex_tasks: tasks whose answers are regular expressions, by their names with answers.
        config: parameters of BM25.
    """

    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    index_dir: str | None = None
    regex_tasks: tuple[str, ...] = ()
    config: Bm25Config = Bm25Config()


def find_positives(
    data_dir: str, collection: str, options: Bm25Positives, *, depth: int = 100
) -> Mapping[str, Mapping[str, int]]:
    """Makes training sets of questions with answers: BM25's passages, by whether they contain one.

    Each question is searched together with its answers. Of the best passages, those that contain
    an answer become its positives, best first, and the others its hard negatives. Training and
    validation questions without a positive are dropped and listed in left_out/; test
    questions are copied as they are, for they are judged by their answers.

    Source: DPR-MUF (Li et al., Findings of EMNLP 2021), appendix A.1.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        options: the tasks, and where BM25's index is.
        depth: number of the best passages that are considered for each question.

    Returns:
        Task that was written -> split -> questions dropped.

    Raises:
        ConfigError: an unknown task, one that would be written over itself, no answers, or no
            place for the index.
    """
    tasks, where = options.tasks, "BM25_POSITIVES"
    if options.index_dir is None:
        problem = "no directory for BM25's index"
        raise ConfigError(problem, where="BM25_INDEX_DIR", fix="set --gin.BM25_INDEX_DIR=...")
    splits_of = list_tasks(data_dir, collection)
    check_known([*tasks, *options.regex_tasks], splits_of, where=where)
    if set(tasks) & set(tasks.values()) or len(set(tasks.values())) < len(tasks):
        fix = "give each a new name of its own: {'webq': 'webq_bm25'}"
        raise ConfigError(f"tasks {dict(tasks)}", where=where, fix=fix)
    store = PassageStore.open(data_dir, collection)
    index = Bm25Index.build(
        (title_and_text(passage) for passage in store.iterate()),
        options.index_dir,
        config=options.config,
        fingerprints={"collection": store.fingerprint},
    )
    dropped: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for task, name in tasks.items():
        matching = AnswerMatch.REGEX if task in options.regex_tasks else AnswerMatch.STRING
        for split in splits_of[task]:
            queries = list(QuerySet.open(data_dir, collection, task, split))
            if not any(query.answers for query in queries):
                found = f"no {split} question of {task!r} has answers"
                raise ConfigError(found, where=where, fix="leave the task out")
            lost: list[str] = []
            divided: Iterator[Query] = iter(queries)
            if split != "test":
                with phase(f"positives of {task} {split}"):
                    texts = [" ".join([query.text, *query.answers]) for query in queries]
                    result = index.search(texts, depth)
                    divided = _divided(queries, result, store, matching, lost)
            renamed = (dataclasses.replace(query, task=name) for query in divided)
            write_queries(data_dir, collection, name, split, renamed)
            write_left_out(data_dir, collection, (name, split), lost)
            dropped[name][split] = len(lost)
            logger.info(
                "%s %s: %s questions, %s dropped without a positive among BM25's first %d",
                *(name, split, f"{len(queries) - len(lost):,}", f"{len(lost):,}", depth),
            )
    return dropped


def _divided(
    queries: list[Query],
    result: SearchResult,
    store: PassageStore,
    match: AnswerMatch,
    lost: list[str],
) -> Iterator[Query]:
    """Queries with positives and negatives from their results; appends the others to `lost`."""
    with answer_matcher(store, match) as matcher:
        hits = matcher.hits(result.rows, [query.answers for query in queries])
    for query, rows, right in zip(queries, result.rows, hits, strict=True):
        if not right.any():
            lost.append(f"{query.id}: {query.text}")
            continue
        wrong = ~right & (rows != NO_ROW)
        yield dataclasses.replace(
            query,
            positives=tuple(rows[right].tolist()),
            relevance=(),
            hard_negatives=tuple(rows[wrong].tolist()),
        )
