"""Candidates compared on queries that they were not trained on: the stages of a choice."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Float64, Int64

from taser_jax.assembly.model_directory import load_model, read_facts
from taser_jax.assembly.text_sources import frozen_texts
from taser_jax.commands.evaluate import EvaluationConfig, judge_run
from taser_jax.commands.inputs import read_task_run, run_path, tasks_with
from taser_jax.commands.pipelines import compare_plan
from taser_jax.commands.search import best_run, bm25, development_set
from taser_jax.data.batches.stream import TextSource
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.token_store.negatives import read_metadata, read_negatives, write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import writes
from taser_jax.models.batch import Role
from taser_jax.retrieval import fusion
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.embeddings import EmbeddingDtype, Embeddings, QueryEmbeddings
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.retrieval.runs import NO_ROW, Run, SearchResult, read_trec_run, top_k, write_trec_run
from taser_jax.storage.artifacts import read_json, write_json
from taser_jax.storage.progress import logger

# Queries of a fold that are ranked, and passages of each of their lists that the pool has.
RANKED, DEPTH = 100, 10
# {"queries": task -> ids of those that are ranked, "pool": rows of passages}
_FOLD = "fold.json"


@writes("{output_dir}")
def hold_out(
    *,
    data_dir: str,
    collection: str,
    tasks: Sequence[str],
    runs_dirs: Mapping[str, str],
    embeddings_dirs: Mapping[str, str],
    negatives_dir: str,
    output_dir: str,
    fold: int,
    folds: int,
    own_passage_tasks: Sequence[str] = (),
) -> list[str]:
    """Takes a fold's training queries out of the negatives, and makes the pool they are ranked in.

    At most 100 of each task's queries are ranked; none of the fold is trained on, and no query of
    another task with the same text. A task of few queries may have none in a fold, or all of them.
    The pool has the first ten passages of every list; BM25's lists are cut to it. So a fold's model
    encodes a few thousand passages, not the collection.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        tasks: tasks with training queries.
        runs_dirs: name -> runs of the training queries, of models that have learned from none.
        embeddings_dirs: some of these names -> embeddings: such a list ranks the whole pool.
        negatives_dir: hard negatives of the training queries.
        output_dir: receives `negatives/`, `NAME/` with a list for each name, and fold.json.
        fold: number of the fold, from 0.
        folds: number of folds.
        own_passage_tasks: as for `taser search`.

    Returns:
        Tasks all of whose queries are in the fold.
    """
    store = PassageStore.open(data_dir, collection)
    root = pathlib.Path(output_dir)
    ranked: dict[str, list[str]] = {}
    runs: dict[tuple[str, str], Run] = {}
    sets = [store.queries(task, "train") for task in tasks]
    numbers = fold_numbers([query.text for queries in sets for query in queries], folds)
    ends = np.cumsum([len(queries) for queries in sets])
    emptied: list[str] = []
    facts = read_metadata(negatives_dir)
    for task, queries, end in zip(tasks, sets, ends, strict=True):
        ids = [query.id for query in queries]
        is_held = numbers[end - len(ids) : end] == fold
        held = np.flatnonzero(is_held)
        lines = read_negatives(
            negatives_dir, task, "train", ids, collection_fingerprint=store.fingerprint
        )
        drops = is_held | [line.is_dropped for line in lines]
        write_negatives(
            root / "negatives",
            task,
            "train",
            query_ids=ids,
            rows=[[] if own else line.rows for line, own in zip(lines, is_held, strict=True)],
            scores=[[] if own else line.scores for line, own in zip(lines, is_held, strict=True)],
            metadata={name: facts[name] for name in ("collection_fingerprint", "source")},
            dropped={ids[row] for row in np.flatnonzero(drops)},
        )
        emptied += [task] if len(held) == len(ids) else []
        if not len(held):
            continue
        rng = np.random.default_rng([0, fold])
        sample = np.sort(rng.choice(held, min(RANKED, len(held)), replace=False))
        ranked[task] = [ids[row] for row in sample]
        for name, directory in runs_dirs.items():
            run = read_task_run(directory, queries, store)
            runs[name, task] = Run(ranked[task], run.rows[sample], run.scores[sample])
    pool = np.unique(np.concatenate([run.rows[:, :DEPTH].reshape(-1) for run in runs.values()]))
    pool = pool[pool != NO_ROW].astype(np.int64)
    for (name, task), run in runs.items():
        k = run.rows.shape[1]
        if name in embeddings_dirs:
            passages = Embeddings(embeddings_dirs[name])
            encoded = QueryEmbeddings.of_split(
                embeddings_dirs[name], task, "train", fingerprints=passages.fingerprints
            )
            ranking = encoded.take(_lines(encoded.query_ids, run.query_ids)).astype(np.float32)
            count = k + (task in own_passage_tasks)
            result = _best(ranking, passages.take(pool).astype(np.float32), pool, count)
        else:
            scores = np.where(np.isin(run.rows, pool), run.scores, np.float32(-np.inf))
            result = top_k(run.rows, scores, k)
        cut = best_run(result, run.query_ids, store, task, k, own_passage_tasks)
        write_trec_run(run_path(root / name, task, "train"), cut, ids=store.ids, tag=name)
    write_json(root / _FOLD, {"queries": ranked, "pool": pool.tolist()})
    return emptied


def fold_numbers(texts: Sequence[str], folds: int) -> Int64[np.ndarray, " texts"]:
    """A fold for each query: of equal sizes, drawn at random, equal texts in the same fold.

    Args:
        texts: the queries.
        folds: number of folds.
    """
    distinct, places = np.unique(np.array(texts, dtype=object).astype(str), return_inverse=True)
    order = np.random.default_rng(0).permutation(len(distinct))
    return (order % folds)[places]


def _best(
    queries: Float32[np.ndarray, "queries dim"],
    passages: Float32[np.ndarray, "passages dim"],
    pool: Int64[np.ndarray, " passages"],
    k: int,
) -> SearchResult:
    scores = queries @ passages.T
    return top_k(np.broadcast_to(pool, scores.shape), scores, min(k, len(pool)))


def _lines(ids: Sequence[str], chosen: Sequence[str]) -> Int64[np.ndarray, " chosen"]:
    """Where the chosen ids stand."""
    line_of = {id: line for line, id in enumerate(ids)}
    return np.array([line_of[id] for id in chosen], np.int64)


@writes("{output_dir}")
def rank_held_out(
    *,
    model_dir: str,
    token_store: str,
    data_dir: str,
    collection: str,
    fold_dir: str,
    output_dir: str,
    k: int,
    encode: EncodeConfig = EncodeConfig(),
    states_dir: str | None = None,
    states_dtype: EmbeddingDtype = EmbeddingDtype.BFLOAT16,
    own_passage_tasks: Sequence[str] = (),
) -> None:
    """Ranks a fold's queries in its pool with the model that has not seen them.

    Args:
        model_dir: the fold's model.
        token_store: tokens of passages and queries.
        data_dir: folder of collections.
        collection: the collection.
        fold_dir: the fold, from `hold_out`.
        output_dir: run files go there.
        k: results per query.
        encode: batches of encoding.
        states_dir: states of the blocks that were frozen in training; None computes from tokens.
        states_dtype: dtype of these states.
        own_passage_tasks: as for `taser search`.
    """
    tokens, store = TokenStore.open(token_store), PassageStore.open(data_dir, collection)
    model = load_model(model_dir)
    fold = read_json(pathlib.Path(fold_dir) / _FOLD)
    pool = np.array(fold["pool"], np.int64)
    splits = {task: tokens.queries(task, "train") for task in fold["queries"]}
    texts: TextSource = tokens
    if states_dir is not None:
        model = model.frozen(read_facts(model_dir)["train_from_block"])
        sets = list(splits.values())
        texts = frozen_texts(
            states_dir, model.model, model.params, tokens, sets, dtype=states_dtype
        )
    passages = encode_rows(model.encode_fn(Role.PASSAGE), texts.passages, pool, config=encode)
    for task, ids in fold["queries"].items():
        queries = splits[task]
        embeddings = encode_rows(
            model.encode_fn(Role.QUERY, task=task),
            texts.of_queries(queries),
            _lines(queries.query_ids, ids),
            config=encode,
        )
        best = _best(embeddings, passages, pool, k + (task in own_passage_tasks))
        ranked = best_run(best, ids, store, task, k, own_passage_tasks)
        path = run_path(output_dir, task, "train")
        write_trec_run(path, ranked, ids=store.ids, tag="held-out")


def choose(
    *,
    data_dir: str,
    collection: str,
    tasks: Sequence[str],
    split: str,
    dense_dirs: Mapping[str, Sequence[str]],
    sparse_dirs: Sequence[str],
    baseline: str,
    measure: str,
    k: int,
    config: fusion.HybridConfig = fusion.HybridConfig(),
    evaluation: EvaluationConfig = EvaluationConfig(),
) -> compare_plan.Choice:
    """Compares candidates on queries that none of them was trained on: each alone and with BM25.

    Test queries decide nothing: α is then the default, by the widths of the lists alone.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        tasks: tasks of the queries.
        split: split of the queries.
        dense_dirs: candidate -> its runs: one folder, or one for each fold.
        sparse_dirs: BM25's runs of the same queries, parallel to them.
        baseline: what is recommended where nothing is better, such as "untrained + BM25".
        measure: what is compared, and what α maximises.
        k: results per query.
        config: depth, normalisation and candidates of α.
        evaluation: the criterion for hits.

    Returns:
        The choice.
    """
    store = PassageStore.open(data_dir, collection)
    alphas: dict[str, float] = {}
    normalizations: dict[str, fusion.ScoreNormalization | None] = {}
    values: dict[str, dict[str, Float64[np.ndarray, " queries"]]] = {}
    count = 0
    for name, directories in dense_dirs.items():
        sets: dict[str, fusion.DevelopmentSet] = {}
        for task in tasks:
            queries = store.queries(task, split)
            parts = [
                lists
                for dense, sparse in zip(directories, sparse_dirs, strict=True)
                if (lists := _lists(dense, sparse, queries, store))
            ]
            dense, sparse = map(_joined, zip(*parts, strict=True))
            sets[task] = development_set(dense, sparse, queries, store, measure, evaluation)
        settled = fusion.settle(config, [(each.dense, each.sparse) for each in sets.values()])
        default, normalizations[name] = fusion.default_alpha(settled), settled.normalization
        if split == "test":
            alphas[name] = default
            continue
        count = sum(len(each.dense.query_ids) for each in sets.values())
        best = fusion.choose_alpha(list(sets.values()), k=k, config=settled).alpha
        alphas[name] = compare_plan.shrunk_alpha(best, default=default, queries=count)
        values[name] = {task: each.evaluate(each.dense) for task, each in sets.items()}
        values[f"{name} + BM25"] = {
            task: each.evaluate(
                fusion.fuse(each.dense, each.sparse, alpha=alphas[name], k=k, config=settled)
            )
            for task, each in sets.items()
        }
    gains = {
        name: compare_plan.paired_gain(value, values[baseline])
        for name, value in values.items()
        if name != baseline
    }
    for name, gain in gains.items():
        points = f"{100 * gain.mean:+.1f} points of {measure} against {baseline}"
        logger.info("%s: %s, ± %.1f", name, points, 100 * gain.error)
    best_row = compare_plan.recommend(gains, baseline)
    return compare_plan.Choice(best_row, alphas, gains, count, normalizations)


def _lists(dense: str, sparse: str, queries: QuerySet, store: PassageStore) -> list[Run]:
    """Both runs of the queries that a folder has: of a fold those that were ranked, if any."""
    fold = pathlib.Path(sparse).parent / _FOLD
    if not fold.exists():
        return [read_task_run(folder, queries, store) for folder in (dense, sparse)]
    ids = read_json(fold)["queries"].get(queries.task, [])
    paths = [run_path(folder, queries.task, queries.split) for folder in (dense, sparse)]
    return [read_trec_run(path, store.row_of, query_ids=ids) for path in paths if ids]


def _joined(runs: Sequence[Run]) -> Run:
    """Runs of different queries as one, padded to the longest lists."""
    k = max(run.rows.shape[1] for run in runs)
    padded = [top_k(run.rows, run.scores, k) for run in runs]
    return Run(
        [id for run in runs for id in run.query_ids],
        np.concatenate([each.rows for each in padded]),
        np.concatenate([each.scores for each in padded]),
    )


@writes("{output_dir}")
def choose_bm25(
    *,
    data_dir: str,
    collection: str,
    splits: Sequence[str],
    candidates: Sequence[Bm25Config],
    output_dir: str,
    measure: str,
    evaluation: EvaluationConfig = EvaluationConfig(),
    own_passage_tasks: Sequence[str] = (),
) -> int:
    """The number of the BM25 parameters that rank labelled queries best.

    The first candidate stays unless another gains more than one standard error.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        splits: splits of the queries; BM25 learns from none.
        candidates: parameters, the default first.
        output_dir: an index and runs of each.
        measure: what is compared.
        evaluation: the criterion for hits.
        own_passage_tasks: as for `taser search`.
    """
    store = PassageStore.open(data_dir, collection)
    judged = dataclasses.replace(evaluation, measures=(measure,))
    values: list[dict[str, Float64[np.ndarray, " queries"]]] = []
    for number, config in enumerate(candidates):
        runs, index = (f"{output_dir}/{number}/{name}" for name in ("runs", "index"))
        values.append({})
        for split in splits:
            bm25(
                data_dir=data_dir,
                collection=collection,
                output_dir=runs,
                index_dir=index,
                split=split,
                config=config,
                own_passage_tasks=own_passage_tasks,
            )
            for task in tasks_with(store, split=split):
                queries = store.queries(task, split)
                scores = judge_run(read_task_run(runs, queries, store), queries, store, judged)
                values[-1][f"{task}.{split}"] = scores.values[measure]
    gains = {
        str(number): compare_plan.paired_gain(each, values[0]) for number, each in enumerate(values)
    }
    return int(compare_plan.recommend(gains, "0"))
