"""`taser mine`: hard negatives for training, from run files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from taser_jax.commands import inputs
from taser_jax.commands.teachers import share_of_positives_first, teacher_scores
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.token_store.negatives import write_negatives
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.evaluation.answers import AnswerMatch, AnswerMatcher
from taser_jax.retrieval.mining import (
    AnswerContaining,
    Excluded,
    MinedNegatives,
    MiningConfig,
    MiningStatistics,
    WithoutNegatives,
    mine_negatives,
)
from taser_jax.retrieval.runs import top_k
from taser_jax.storage.artifacts import NEGATIVES, FilePath, split_path, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.records import Passage, Query
from taser_jax.storage.typed_files import to_plain

# Makes the draw of the sample independent of other draws with the same seed.
_PURPOSE = 0x5A3D
_SAMPLE_COLUMNS = (
    *("query_id", "query", "answers", "positive_score", "positive", "negative_score"),
    *("negative", "is_answered_by_negative"),
)


@writes("{output_dir}", kinds=[NEGATIVES])
@first_host_only
def mine(
    *,
    runs_dir: str,
    data_dir: str,
    collection: str,
    output_dir: str,
    split: str = "train",
    tasks: Sequence[str] | None = None,
    config: MiningConfig = MiningConfig(),
    regex_tasks: Sequence[str] = (),
    teachers: Mapping[str, float] = MappingProxyType({}),
    sample_size: int = 50,
) -> dict[str, int]:
    """Turns runs of training queries into hard negatives, as rows of the passage store.

    P1 of the TASER paper is a BM25 run with answer_containing='drop'; P2 is the first model's run
    without gold passages. For queries without answers, only positives are excluded. Counts of
    excluded candidates, by reason, are printed and stored in `metadata.json`.

    Args:
        runs_dir: run files of the split, from `taser bm25` or `taser search`.
        data_dir: folder of collections.
        collection: the collection.
        output_dir: negatives go there as `<task>.<split>.jsonl`.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.
        config: depth, count, by rank or sampled, what is left out.
        regex_tasks: tasks whose answers are regular expressions.
        teachers: directory -> weight: scores of the positives and of what is mined are added, for
            training with `ObjectiveConfig.distillation` (`teacher_scores`).
        sample_size: pairs of query and negative drawn into `<task>.<split>.sample.tsv` for
            manual inspection; its last column is for the verdict. 0 writes none.

    Returns:
        Negatives found, by task.

    Raises:
        ConfigError: an unknown task, settings under which no query has a negative, or a directory
            that holds no teacher.
    """
    store = PassageStore.open(data_dir, collection)
    heads = inputs.PassageHeads(store)
    inputs.check_known(regex_tasks, list_tasks(data_dir, collection), where="REGEX_TASKS")
    found = {}
    for task in inputs.tasks_with(data_dir, collection, split=split, tasks=tasks):
        queries = list(queries_set := QuerySet.open(data_dir, collection, task, split))
        run = inputs.read_task_run(runs_dir, queries_set, store)
        if run.rows.shape[1] < config.depth:
            # Not an error: BM25 only finds passages that share a word; collections may be small.
            logger.warning(
                "%s %s: the run has %d results per query, mining considers the first %d",
                *(task, split, run.rows.shape[1], config.depth),
            )
        answers = [query.answers for query in queries]
        task_config = config
        if config.answer_containing is AnswerContaining.DROP and not any(answers):
            logger.info("%s %s: no answers; negatives are judged by positives", task, split)
            task_config = dataclasses.replace(config, answer_containing=AnswerContaining.KEEP)
        if task in config.same_page_tasks:
            task_config = dataclasses.replace(task_config, excluded=Excluded.PAGES)
        task_match = AnswerMatch.REGEX if task in regex_tasks else AnswerMatch.STRING
        drops = task_config.answer_containing is AnswerContaining.DROP
        matcher = inputs.answer_matcher(store, task_match)
        with phase(f"mine {task} {split}"):
            mined = mine_negatives(
                top_k(run.rows, run.scores, max(config.depth, run.rows.shape[1])),
                [query.positives for query in queries],
                config=task_config,
                contains_answer=_answers_among(answers, matcher) if drops else None,
                pages_of=heads.pages,
            )
        logger.info("%s %s: %s", task, split, mined.statistics)
        teacher = None
        facts = {"mining": to_plain(task_config), "statistics": _plain(mined.statistics)}
        if teachers:
            teacher = teacher_scores(teachers, queries_set, mined.rows, store)
            facts["positive_first"] = first = share_of_positives_first(teacher)
            what = "the teacher scores the best positive of %.1f%% of queries above all negatives"
            logger.info(f"%s %s: {what}", task, split, 100 * first)
        # A pipeline's folder can be moved.
        places = {os.path.relpath(name, output_dir): weight for name, weight in teachers.items()}
        write_negatives(
            output_dir,
            task,
            split,
            query_ids=[query.id for query in queries],
            rows=mined.rows,
            scores=mined.scores,
            dropped=_dropped(mined, queries, task_config, where=f"{task} {split}"),
            metadata={
                "collection_fingerprint": store.fingerprint,
                "source": os.path.relpath(runs_dir, output_dir),
                **({"teachers": places} if teachers else {}),
            },
            facts=facts,
            teacher=teacher,
        )
        if sample_size:
            path = split_path(output_dir, task, split, ".sample.tsv")
            write_sample(
                path, mined, queries, store.__getitem__, size=sample_size, seed=config.seed
            )
        found[task] = mined.statistics.negatives
    return found


def _answers_among(
    answers: Sequence[Sequence[str]], matcher: AnswerMatcher
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def contains_answer(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return matcher.hits(rows, [answers[query] for query in queries])

    return contains_answer


def _dropped(
    mined: MinedNegatives, queries: Sequence[Query], config: MiningConfig, *, where: str
) -> frozenset[str]:
    """Ids of the queries that training drops; logs how many have no negatives.

    Raises:
        ConfigError: training would drop all of them.
    """
    statistics, dropped = mined.statistics, frozenset[str]()
    if config.without_negatives is WithoutNegatives.DROP:
        pairs = zip(queries, mined.rows, strict=True)
        dropped = frozenset(query.id for query, rows in pairs if not rows)
    if queries and len(dropped) == len(queries):
        problem = f"none of {len(queries)} queries has a negative: {statistics}"
        fix = "look deeper, lower the margins, or set without_negatives = 'random'"
        raise ConfigError(problem, where=where, fix=fix)
    if statistics.queries_without:
        fate = "training leaves them out" if dropped else "training draws random passages for them"
        logger.info("%s: %d queries without negatives: %s", where, statistics.queries_without, fate)
    return dropped


def _plain(statistics: MiningStatistics) -> dict[str, object]:
    """The counts as JSON values."""
    counts = {reason.value: count for reason, count in statistics.left_out.items()}
    return {**dataclasses.asdict(statistics), "left_out": counts}


def write_sample(
    path: FilePath,
    mined: MinedNegatives,
    queries: Sequence[Query],
    passage_of: Callable[[int], Passage],
    *,
    size: int,
    seed: int,
) -> None:
    """Writes pairs of query and negative, drawn uniformly from all pairs, as TSV.

    Args:
        path: the file.
        mined: the queries' negatives.
        queries: the queries, in the same order.
        passage_of: row -> passage.
        size: number of pairs; all where there are fewer.
        seed: seed of the draw.
    """
    ends = np.cumsum([len(rows) for rows in mined.rows])
    total = int(ends[-1]) if len(ends) else 0
    rng = np.random.default_rng([_PURPOSE, seed])
    lines = ["\t".join(_SAMPLE_COLUMNS)]
    for pair in np.sort(rng.choice(total, min(size, total), replace=False)).tolist():
        line = int(np.searchsorted(ends, pair, side="right"))
        place = pair - int(ends[line])
        query = queries[line]
        gold = _one_line(passage_of(query.positives[0])) if query.positives else ""
        fields = (
            query.id,
            query.text,
            " | ".join(query.answers),
            f"{mined.positive_scores[line]:.6g}",
            gold,
            f"{mined.scores[line][place]:.6g}",
            _one_line(passage_of(mined.rows[line][place])),
            "",
        )
        lines.append("\t".join(" ".join(field.split()) for field in fields))
    write_text(path, "\n".join(lines) + "\n")


def _one_line(passage: Passage) -> str:
    return f"{passage.title}: {passage.text}"
